// SPDX-License-Identifier: Apache-2.0
//! The registry as this program sees it: a few questions and two ways to write, each with a limit on silence, and each
//! failure with its class. The protocol itself is oci-client's.

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use hub::Progress;
use oci_client::{
    Client, Reference, RegistryOperation,
    client::{ClientConfig, ClientProtocol},
    errors::{OciDistributionError, OciEnvelope, OciErrorCode},
    secrets::RegistryAuth,
};
use tokio::io::AsyncReadExt as _;

use super::{Blob, Credentials, Source, Target};
use crate::{
    error::{At, Class, Failure, Result},
    layout::write::MANIFEST,
};

/// Longest silence: no byte taken, no answer given. A registry may hash gigabytes before it answers.
const STALL: Duration = Duration::from_mins(5);
/// Bytes that are read and sent at once.
const PIECE: usize = 1 << 20;
/// Tries of one blob where another may do.
const TRIES: u32 = 3;

/// One repository of a registry.
pub struct Remote {
    client: Client,
    target: Target,
    auth: RegistryAuth,
    /// Where the credentials came from.
    pub source: Source,
    progress: Arc<dyn Progress>,
    stall: Duration,
}

type Answer<T> = std::result::Result<T, OciDistributionError>;

impl Remote {
    /// Connects to nothing yet. Plain HTTP is for this machine, and for others if the user said so.
    pub fn new(
        target: &Target,
        credentials: Credentials,
        plain_http: bool,
        progress: Arc<dyn Progress>,
    ) -> Result<Self> {
        // The TLS of reqwest takes the process's provider; one that is set already is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let protocol =
            if plain_http || target.is_local() { ClientProtocol::Http } else { ClientProtocol::Https };
        let config = ClientConfig {
            protocol,
            // One PUT per blob, with its length: what every registry takes, and what can be streamed.
            use_monolithic_push: true,
            connect_timeout: Some(Duration::from_secs(30)),
            user_agent: concat!("flux2-tt-packager/", env!("CARGO_PKG_VERSION")),
            platform_resolver: None,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config)
            .map_err(|error| Failure::new(Class::Network, "cannot set up HTTP").why(error))?;
        let seconds = std::env::var("PACKAGER_REGISTRY_TIMEOUT").ok().and_then(|text| text.parse().ok());
        Ok(Self {
            client,
            target: target.clone(),
            auth: credentials.auth,
            source: credentials.source,
            progress,
            stall: seconds.map_or(STALL, Duration::from_secs),
        })
    }

    /// A tag or a digest of the repository. As a tag in both cases: the client's URLs are the same, and it expects one.
    fn at(&self, reference: &str) -> Reference {
        Reference::with_tag(self.target.host.clone(), self.target.repository.clone(), reference.to_owned())
    }

    /// Gets the token that the registry asks for; pushing is what it is for.
    pub async fn log_in(&self) -> Result<()> {
        let at = self.at("latest");
        let work = self.client.auth(&at, &self.auth, RegistryOperation::Push);
        self.ask("logging in to the registry", work).await.map(drop)
    }

    /// True if the registry has the blob.
    pub async fn has(&self, digest: &str) -> Result<bool> {
        let at = self.at(digest);
        self.ask("asking for a blob", self.client.blob_exists(&at, digest)).await
    }

    /// Bytes of a blob as the registry gives it; none if it has none.
    pub async fn size(&self, digest: &str) -> Result<Option<u64>> {
        let at = self.at(digest);
        let work = self.client.pull_blob_stream(&at, digest);
        // Its body is not read: what it holds, the registry has compared with the digest when it took it.
        Ok(self
            .maybe("reading a blob back", work)
            .await?
            .map(|answer| answer.content_length.unwrap_or_default()))
    }

    /// Digest of the manifest under a tag; none if there is no such tag.
    pub async fn digest_of(&self, tag: &str) -> Result<Option<String>> {
        let at = self.at(tag);
        self.maybe("asking for the tag", self.client.fetch_manifest_digest(&at, &self.auth)).await
    }

    /// A manifest's bytes; none if there is none of that digest.
    pub async fn manifest(&self, digest: &str) -> Result<Option<Bytes>> {
        let at = self.at(digest);
        let work = self.client.pull_manifest_raw(&at, &self.auth, &[MANIFEST]);
        Ok(self.maybe("reading the manifest back", work).await?.map(|(bytes, _)| bytes))
    }

    /// Puts the manifest under a digest or a tag.
    pub async fn put_manifest(&self, reference: &str, bytes: &[u8]) -> Result<()> {
        let at = self.at(reference);
        let kind =
            MANIFEST.parse().map_err(|error| Failure::new(Class::Failure, "a media type").why(error))?;
        let work = self.client.push_manifest_raw(&at, bytes.to_vec(), kind);
        self.ask("writing the manifest", work).await.map(drop)
    }

    /// Sends a blob, from its start again where the connection breaks.
    pub async fn send(&self, blob: &Blob) -> Result<()> {
        let mut tries = 1;
        loop {
            let sent = Arc::new(AtomicU64::new(0));
            let Err((failure, again)) = self.send_once(blob, &sent).await else { return Ok(()) };
            self.progress.add(-(sent.load(Ordering::Relaxed) as i64));
            if !again || tries == TRIES {
                return Err(failure);
            }
            self.progress.note(&format!("{failure}; trying again"));
            tokio::time::sleep(Duration::from_secs(u64::from(tries))).await;
            tries += 1;
        }
    }

    async fn send_once(
        &self,
        blob: &Blob,
        sent: &Arc<AtomicU64>,
    ) -> std::result::Result<(), (Failure, bool)> {
        let file = tokio::fs::File::open(&blob.path)
            .await
            .at("open", &blob.path)
            .map_err(|failure| (failure, false))?;
        let broken = Arc::new(Mutex::new(None));
        let pieces = {
            let (broken, sent, progress) = (broken.clone(), sent.clone(), self.progress.clone());
            let path = blob.path.clone();
            stream::try_unfold((file, blob.size), move |(mut file, left)| {
                let (broken, sent, progress, path) =
                    (broken.clone(), sent.clone(), progress.clone(), path.clone());
                async move {
                    if left == 0 {
                        return Ok(None);
                    }
                    let mut piece = vec![0; PIECE.min(left as usize)];
                    if let Err(error) = file.read_exact(&mut piece).await {
                        note_broken(&broken, &path, &error);
                        return Err(OciDistributionError::IoError(error));
                    }
                    sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
                    progress.add(piece.len() as i64);
                    let left = left - piece.len() as u64;
                    Ok(Some((Bytes::from(piece), (file, left))))
                }
            })
        };
        let at = self.at(&blob.digest);
        let work = self.client.push_blob_stream(&at, pieces, &blob.digest, Some(blob.size));
        match self.watch(sent, work).await {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => {
                let local = broken.lock().ok().and_then(|mut slot| slot.take());
                Err(local.map_or_else(
                    || {
                        let again = may_pass(&error);
                        (self.failed(&format!("sending {} {}", blob.role, blob.digest), error), again)
                    },
                    |failure| (failure, false),
                ))
            }
            None => Err((self.stalled(&format!("sending {} {}", blob.role, blob.digest)), true)),
        }
    }

    /// Runs `work` until it ends, or until nothing has moved for too long.
    async fn watch<T>(&self, moved: &AtomicU64, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        let mut before = moved.load(Ordering::Relaxed);
        loop {
            if let Ok(result) = tokio::time::timeout(self.stall, &mut work).await {
                return Some(result);
            }
            let now = moved.load(Ordering::Relaxed);
            if now == before {
                return None;
            }
            before = now;
        }
    }

    async fn ask<T>(&self, what: &str, work: impl Future<Output = Answer<T>>) -> Result<T> {
        match self.watch(&AtomicU64::new(0), work).await {
            Some(result) => result.map_err(|error| self.failed(what, error)),
            None => Err(self.stalled(what)),
        }
    }

    /// Like `ask`; what is not there is none.
    async fn maybe<T>(&self, what: &str, work: impl Future<Output = Answer<T>>) -> Result<Option<T>> {
        match self.watch(&AtomicU64::new(0), work).await {
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(error)) if is_absent(&error) => Ok(None),
            Some(Err(error)) => Err(self.failed(what, error)),
            None => Err(self.stalled(what)),
        }
    }

    fn stalled(&self, what: &str) -> Failure {
        Failure::new(Class::Network, format!("{what}: {} stopped answering", self.target.host))
            .why(format!("nothing moved for {} s", self.stall.as_secs()))
            .next("run the command again: what the registry has is not sent again; PACKAGER_REGISTRY_TIMEOUT sets the limit in seconds")
    }

    fn failed(&self, what: &str, error: OciDistributionError) -> Failure {
        let (host, repository) = (&self.target.host, &self.target.repository);
        let (class, why) = explain(error);
        let what = format!("{what} failed ({host}/{repository})");
        let failure = Failure::new(class, what);
        match class {
            Class::Auth => failure
                .why(format!("{why}; it was asked with {}", self.source))
                .next(format!("log in with `docker login {host}` as someone who may push to {repository}")),
            Class::Verify => {
                failure.why(why).next("verify the package, then push again; the tag was not moved")
            }
            _ => failure.why(why).next("run the command again: what the registry has is not sent again"),
        }
    }
}

fn note_broken(slot: &Mutex<Option<Failure>>, path: &Path, error: &std::io::Error) {
    if let Ok(mut slot) = slot.lock() {
        *slot = Some(Failure::io("read", path, error));
    }
}

/// Class and reason. URLs are not shown: those of uploads hold signatures.
fn explain(error: OciDistributionError) -> (Class, String) {
    match error {
        OciDistributionError::AuthenticationFailure(text) => (Class::Auth, said(&text)),
        OciDistributionError::UnauthorizedError { .. } => (Class::Auth, "not authorised".into()),
        OciDistributionError::RegistryError { envelope, .. } => envelope_class(&envelope),
        OciDistributionError::ServerError { code, message, .. } => {
            match serde_json::from_str::<OciEnvelope>(&message) {
                Ok(envelope) => match (code, envelope_class(&envelope)) {
                    (401 | 403, (_, why)) => (Class::Auth, why),
                    (_, other) => other,
                },
                Err(_) if matches!(code, 401 | 403) => {
                    (Class::Auth, format!("status {code}: {}", said(&message)))
                }
                Err(_) => (Class::Network, format!("status {code}: {}", said(&message))),
            }
        }
        OciDistributionError::DigestError(error) => (Class::Verify, error.to_string()),
        OciDistributionError::RequestError(error) => {
            let class = match error.status().map(|status| status.as_u16()) {
                Some(401 | 403) => Class::Auth,
                _ => Class::Network,
            };
            let mut text = error.to_string();
            if let Some(url) = error.url() {
                text = text.replace(url.as_str(), "").replace(" for url ()", "");
            }
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            (class, text)
        }
        other => (Class::Network, other.to_string()),
    }
}

fn envelope_class(envelope: &OciEnvelope) -> (Class, String) {
    let why: Vec<String> = envelope.errors.iter().map(|error| said(&error.message)).collect();
    let class = envelope.errors.first().map_or(Class::Network, |error| match error.code {
        OciErrorCode::Unauthorized | OciErrorCode::Denied => Class::Auth,
        OciErrorCode::DigestInvalid | OciErrorCode::SizeInvalid | OciErrorCode::ManifestInvalid => {
            Class::Verify
        }
        _ => Class::Network,
    });
    (class, format!("the registry says: {}", why.join("; ")))
}

/// A stranger's text: one line, not too long.
fn said(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let short: String = line.chars().filter(|letter| !letter.is_control()).take(200).collect();
    if short.is_empty() { "no explanation".into() } else { short }
}

fn is_absent(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::ImageManifestNotFoundError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code == 404,
        OciDistributionError::RegistryError { envelope, .. } => envelope.errors.iter().any(|error| {
            matches!(
                error.code,
                OciErrorCode::ManifestUnknown
                    | OciErrorCode::NameUnknown
                    | OciErrorCode::BlobUnknown
                    | OciErrorCode::NotFound
            )
        }),
        OciDistributionError::RequestError(error) => {
            error.status().is_some_and(|status| status.as_u16() == 404)
        }
        _ => false,
    }
}

/// True if another try may do: a broken connection, a server in trouble.
fn may_pass(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::RequestError(error) => {
            error.status().is_none_or(|status| status.is_server_error() || status.as_u16() == 429)
        }
        OciDistributionError::ServerError { code, .. } => *code >= 500 || *code == 429,
        _ => false,
    }
}
