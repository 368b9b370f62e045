// SPDX-License-Identifier: Apache-2.0
//! Requests to a hub: where the token goes, which redirects are followed, what a refusal means, when to try again.
//!
//! Redirects are followed here and not by reqwest, because the token may go to the endpoint's own origin only, and
//! because an answer that lacks a header must be named. Queries of URLs are never shown: they hold signatures.

use std::{
    pin::pin,
    time::{Duration, SystemTime},
};

use reqwest::{
    Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER},
};
use serde_json::Value;

pub use crate::call::{Beat, Call, Content};
use crate::{
    error::{Error, Kind, Result},
    progress::Progress,
    proxy,
    repo::encode,
    settings::Settings,
    tls,
};

/// How often it is looked how far a body has gone.
const TICK: Duration = Duration::from_millis(250);
/// Hops that are followed.
const HOPS: usize = 10;
/// Longest wait that a server may ask for; after more the user is better told.
const LONGEST_WAIT: Duration = Duration::from_mins(5);
/// Largest answer that is held in memory: listings, never files.
const LARGEST_ANSWER: usize = 64 << 20;

/// Why a request brought nothing.
#[derive(Debug)]
pub enum Fault {
    /// Another try may do.
    Again {
        /// What happened.
        why: String,
        /// How long the server asks to wait.
        after: Option<Duration>,
    },
    /// No other try will do.
    Final(Error),
}

impl Fault {
    /// Another try may do.
    pub fn again(why: impl Into<String>) -> Self {
        Self::Again { why: why.into(), after: None }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// An answer that is held in memory.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// A header's text; "" if it is not there.
    pub fn header(&self, name: &str) -> String {
        text(&self.headers, name)
    }
}

/// A header that may be shown.
fn text(headers: &HeaderMap, name: &str) -> String {
    let text = headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// A connection pool to a hub and to where it redirects.
pub struct Client<'a> {
    http: reqwest::Client,
    /// What the environment says.
    pub settings: &'a Settings,
    /// Who is told of retries.
    pub progress: &'a dyn Progress,
}

impl<'a> Client<'a> {
    /// A pool. Certificates are the system's (`SSL_CERT_FILE` and `SSL_CERT_DIR` name others), or Mozilla's where the
    /// system has none; proxies are those of `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`.
    pub fn new(settings: &'a Settings, progress: &'a dyn Progress) -> Result<Self> {
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(settings.stall)
            .user_agent(concat!("flux2-tt-hub/", env!("CARGO_PKG_VERSION")))
            .tls_backend_preconfigured(tls::config()?)
            .build()
            .map_err(|error| Error::new(Kind::Network, "cannot set up HTTP").why(reason(error)))?;
        Ok(Self { http, settings, progress })
    }

    /// A URL below the endpoint; `path` is encoded already.
    pub fn url(&self, path: &str) -> Result<Url> {
        let base = self.settings.endpoint.as_str().trim_end_matches('/');
        Url::parse(&format!("{base}/{path}"))
            .map_err(|error| Error::new(Kind::Network, format!("{base}/{path} is no URL")).why(error))
    }

    /// The URL of a file at a commit.
    pub fn file_url(&self, repo: &str, commit: &str, path: &str) -> Result<Url> {
        self.url(&format!("{repo}/resolve/{commit}/{}", encode(path, true)))
    }

    /// True if the token may go there.
    pub fn is_endpoint(&self, url: &Url) -> bool {
        url.origin() == self.settings.endpoint.origin()
    }

    /// Sends once and follows redirects; the answer has any other status. Returns the URL that gave it.
    pub async fn send(&self, call: &Call) -> Result<(Response, Url), Fault> {
        let mut url = call.url.clone();
        for _ in 0..HOPS {
            let mut request = self
                .http
                .request(call.method.clone(), url.clone())
                .headers(call.headers.clone())
                // Ranges of a compressed body are ranges of something else.
                .header(ACCEPT_ENCODING, "identity");
            let beat = Beat::new();
            request = match &call.body {
                Content::Bytes(bytes) => request.body(bytes.clone()),
                // Signed storage takes no body of unknown length.
                Content::Stream { length, open } => {
                    request.header(CONTENT_LENGTH, *length).body(open(beat.clone()))
                }
            };
            if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_endpoint(&url)) {
                let mut value =
                    HeaderValue::from_str(&format!("Bearer {}", token.value())).map_err(|_| {
                        Error::new(
                            Kind::Auth,
                            format!("the token of {} holds a line break or worse", token.source),
                        )
                        .next("copy the token again, in one line")
                    })?;
                value.set_sensitive(true);
                request = request.header(AUTHORIZATION, value);
            }
            let result = self.watch(&url, request.send(), &beat, self.settings.stall * call.patience).await;
            let redirects = |response: &Response| {
                response.status().is_redirection() && response.status() != StatusCode::NOT_MODIFIED
            };
            match result {
                Ok(response) if !redirects(&response) => {
                    if !response.status().is_success() {
                        self.take_back(&beat);
                    }
                    return Ok((response, url));
                }
                Ok(response) => {
                    self.take_back(&beat);
                    url = redirect(&url, &response)?;
                }
                Err(fault) => {
                    self.take_back(&beat);
                    return Err(fault);
                }
            }
        }
        Err(Fault::Final(hub(format!("{} redirects more than {HOPS} times", show(&call.url)), "")))
    }

    /// Waits for an answer as long as something moves, and tells the progress what was sent.
    async fn watch(
        &self,
        url: &Url,
        sending: impl Future<Output = reqwest::Result<Response>>,
        beat: &Beat,
        limit: Duration,
    ) -> Result<Response, Fault> {
        let mut sending = pin!(sending);
        let mut told = 0;
        loop {
            let left = limit.saturating_sub(beat.quiet());
            let answer = tokio::time::timeout(left.min(TICK), &mut sending).await;
            let sent = beat.total();
            self.progress.add((sent - told) as i64);
            told = sent;
            match answer {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) => return Err(Self::unreachable(url, error)),
                Err(_) if left.is_zero() => {
                    return Err(Fault::again(format!("{} does not answer", show(url))));
                }
                Err(_) => {}
            }
        }
    }

    /// What was sent in vain does not count.
    fn take_back(&self, beat: &Beat) {
        self.progress.add(-(beat.total() as i64));
    }

    /// No answer at all: the way there is named, and whether another try may do.
    fn unreachable(url: &Url, error: reqwest::Error) -> Fault {
        let proxy = error.is_connect().then(|| proxy::of(url, |name| std::env::var(name).ok())).flatten();
        let way = proxy.map(|proxy| format!(" through {proxy}")).unwrap_or_default();
        let distrusted = tls::distrusted(&error);
        let why = format!("{} cannot be reached{way}: {}", show(url), reason(error));
        if !distrusted {
            return Fault::again(why);
        }
        let error = Error::new(Kind::Network, why);
        Fault::Final(error.next("if that certificate is right (a company's own authority, say), name the authority's file with SSL_CERT_FILE"))
    }

    /// Runs `attempt` until it succeeds, fails for good, or has failed `retries` times in a row; each retry is announced.
    pub async fn retry<T, F: Future<Output = Result<T, Fault>>>(
        &self,
        what: &str,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T> {
        let mut failures = 0;
        loop {
            match attempt().await {
                Ok(value) => return Ok(value),
                Err(fault) => {
                    failures += 1;
                    self.pause(what, fault, failures).await?;
                }
            }
        }
    }

    /// Waits before the next try and says so, or gives up.
    pub async fn pause(&self, what: &str, fault: Fault, failures: u32) -> Result<()> {
        let (why, after) = match fault {
            Fault::Final(error) => return Err(error),
            Fault::Again { why, after } => (why, after),
        };
        if failures > self.settings.retries {
            let error = Error::new(Kind::Network, format!("{what} failed {failures} times")).why(why);
            return Err(error.next(self.advice()));
        }
        let pause = self.settings.pause * 2_u32.pow((failures - 1).min(5));
        let pause = after.map_or(pause, |after| after.max(self.settings.pause));
        if pause > LONGEST_WAIT {
            let error = Error::new(Kind::Network, what).why(why);
            return Err(error.next(format!("try again in {} s, as the server asks", pause.as_secs())));
        }
        self.progress.note(&format!("{what}: {why}; trying again in {:.1} s", pause.as_secs_f64()));
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// A JSON answer, with retries. Returns the next page's URL too.
    pub async fn json(&self, what: &str, repo: &str, call: &Call) -> Result<(Value, Option<Url>)> {
        self.retry(what, || async {
            let (response, url) = self.send(call).await?;
            if !response.status().is_success() {
                return Err(self.refusal(repo, &url, &response));
            }
            let next = next_page(&url, response.headers());
            let body = self.body(&url, response).await?;
            let value = serde_json::from_slice(&body).map_err(|_| {
                let why = "the answer is no JSON; a proxy or a sign-in page may stand in between";
                Fault::Final(hub(format!("{} does not speak the Hub's language", show(&url)), why))
            })?;
            Ok((value, next))
        })
        .await
    }

    /// The answer to a request that only some statuses may refuse: `accept` are not failures. With retries.
    pub async fn ask(&self, what: &str, repo: &str, call: &Call, accept: &[u16]) -> Result<Answer> {
        self.retry(what, || async {
            let (response, url) = self.send(call).await?;
            let status = response.status().as_u16();
            if !response.status().is_success() && !accept.contains(&status) {
                return Err(self.refusal(repo, &url, &response));
            }
            let headers = response.headers().clone();
            let body = self.body(&url, response).await?;
            Ok(Answer { status, headers, body })
        })
        .await
    }

    /// A whole answer of bounded size.
    pub async fn body(&self, url: &Url, mut response: Response) -> Result<Vec<u8>, Fault> {
        let mut body = Vec::new();
        loop {
            match tokio::time::timeout(self.settings.stall, response.chunk()).await {
                Err(_) => return Err(Fault::again(format!("{} stopped in the middle", show(url)))),
                Ok(Err(error)) => return Err(Fault::again(format!("{}: {}", show(url), reason(error)))),
                Ok(Ok(None)) => return Ok(body),
                Ok(Ok(Some(piece))) => body.extend_from_slice(&piece),
            }
            if body.len() > LARGEST_ANSWER {
                return Err(Fault::Final(hub(format!("{} answers without end", show(url)), "")));
            }
        }
    }

    /// What an answer that is no success means.
    pub fn refusal(&self, repo: &str, url: &Url, response: &Response) -> Fault {
        let status = response.status();
        let header = |name| text(response.headers(), name);
        let place = show(url);
        let retry = matches!(status.as_u16(), 408 | 425 | 429) || status.is_server_error();
        if retry || !self.is_endpoint(url) {
            let after = response.headers().get(RETRY_AFTER).and_then(wait);
            return Fault::Again { why: format!("{place} answers {status}"), after };
        }
        let (code, message) = (header("x-error-code"), header("x-error-message"));
        let page = format!("{}/{repo}", self.settings.endpoint.as_str().trim_end_matches('/'));
        let source = self.settings.token_source();
        let new = |kind, what: String, next: String| {
            let why = if message.is_empty() { format!("{place} answers {status}") } else { message.clone() };
            let why = if kind == Kind::Auth { format!("{why}; {source}") } else { why };
            Fault::Final(Error::new(kind, what).why(why).next(next))
        };
        match (status.as_u16(), code.as_str()) {
            (401 | 403, "GatedRepo") => new(
                Kind::Auth,
                format!("{repo} is gated"),
                format!("accept its conditions at {page}, then set HF_TOKEN to a token of that account"),
            ),
            (401, _) if self.settings.token.is_none() => new(
                Kind::Auth,
                format!("{repo} does not exist or is private"),
                format!("check the name at {page}; for a private or gated repository set HF_TOKEN"),
            ),
            (401, _) => new(
                Kind::Auth,
                format!("the token was refused for {repo}"),
                "set HF_TOKEN to a valid token; `hf auth whoami` says whose it is".into(),
            ),
            (403, _) => new(
                Kind::Auth,
                format!("access to {repo} was denied"),
                format!("give the token the right to do this, or ask for access at {page}"),
            ),
            (404, "RevisionNotFound") => new(
                Kind::Network,
                format!("the revision asked for is not, or no longer, in {repo}"),
                format!("see {page}/commits/main, and pin one that is there"),
            ),
            (404, "RepoNotFound") => new(
                Kind::Network,
                format!("{repo} does not exist or is private"),
                format!("check the name at {page}"),
            ),
            _ => new(Kind::Network, format!("{repo}: the Hub refused a request"), format!("see {page}")),
        }
    }

    fn advice(&self) -> String {
        let way = match proxy::of(&self.settings.endpoint, |name| std::env::var(name).ok()) {
            Some(proxy) => format!("check {proxy} and the way from it"),
            None => "check the connection".into(),
        };
        format!(
            "{way} to {}, then run the command again: it goes on where it stopped",
            show(&self.settings.endpoint)
        )
    }
}

/// A failure of the hub's doing.
pub fn hub(what: String, why: &str) -> Error {
    Error::new(Kind::Network, what).why(why).next("check HF_ENDPOINT and what stands between you and it")
}

/// A URL without its query, which may be signed.
pub fn show(url: &Url) -> String {
    format!("{}{}", url.origin().ascii_serialization(), url.path().trim_end_matches('/'))
}

/// The innermost cause, without the URL.
pub fn reason(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut inner: &dyn std::error::Error = &error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}

fn redirect(from: &Url, response: &Response) -> Result<Url, Error> {
    let place = show(from);
    let Some(location) = response.headers().get(LOCATION) else {
        let why = "it redirects without a Location header, as some mirrors and proxies do";
        return Err(hub(format!("{place} answers {}", response.status()), why));
    };
    let next = location.to_str().ok().and_then(|location| from.join(location).ok());
    let next = next.ok_or_else(|| hub(format!("{place} redirects to something that is no URL"), ""))?;
    if !matches!(next.scheme(), "http" | "https") || (from.scheme() == "https" && next.scheme() == "http") {
        return Err(hub(format!("{place} redirects to {}", show(&next)), "that is not safe"));
    }
    Ok(next)
}

/// `Retry-After`: seconds, or a date.
fn wait(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).ok()
}

/// `Link: <URL>; rel="next"`.
fn next_page(from: &Url, headers: &HeaderMap) -> Option<Url> {
    let text = headers.get("link")?.to_str().ok()?;
    let link = text.split(',').find(|link| link.contains("rel=\"next\""))?;
    from.join(link.trim().strip_prefix('<')?.split_once('>')?.0).ok()
}
