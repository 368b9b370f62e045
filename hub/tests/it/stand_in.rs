// SPDX-License-Identifier: Apache-2.0
//! A stand-in of the Hub over a real socket: what the clients of this repository ask of it, and faults on demand.
//!
//! Paths, fields and headers are those of the Hub's public OpenAPI description and of what huggingface_hub sends and
//! reads. What only the real Hub can prove: its rate limits, its redirects to a content network, Xet storage, and its
//! own checks of a card. The half that takes files is in `stand_in/write.rs`.

#[path = "stand_in/write.rs"]
pub mod write;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Files from this size on are LFS files.
pub const LFS: usize = 100_000;

/// A request as the stand-in saw it.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Method.
    pub method: String,
    /// Path without query.
    pub path: String,
    /// Headers.
    pub headers: HeaderMap,
    /// First and last byte asked for.
    pub range: Option<(u64, u64)>,
    /// How often this path was asked for before.
    pub before: usize,
}

/// Answers in place of the good answer, for a request and the file it is about.
pub type Fault = Box<dyn Fn(&Ask, &Bytes) -> Option<Response> + Send + Sync>;

/// One repository.
#[derive(Debug, Clone, Default)]
pub struct Repo {
    /// Commit → its files.
    pub commits: BTreeMap<String, BTreeMap<String, Bytes>>,
    /// What main is now.
    pub main: String,
    /// What other branches are now.
    pub branches: BTreeMap<String, String>,
    /// Who may read: nobody without a token, if private.
    pub private: bool,
}

/// The server's state.
#[derive(Default)]
pub struct Hub {
    /// By name.
    pub repos: Mutex<BTreeMap<String, Repo>>,
    /// Every request, in order.
    pub seen: Mutex<Vec<Ask>>,
    /// Entries of one page of a listing; 0 for all.
    pub page: Mutex<usize>,
    /// What pushes need.
    pub write: write::State,
    fault: Mutex<Option<Fault>>,
}

/// Lower-case hexadecimal.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

/// Git's name of a blob.
pub fn git_id(bytes: &[u8]) -> String {
    hex(Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

/// The files below a directory, by path.
#[allow(dead_code, reason = "the crate's own tests serve noise")]
pub fn files(directory: &Path) -> BTreeMap<String, Bytes> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).expect("a directory").flatten() {
        let name = entry.file_name().into_string().expect("UTF-8");
        if entry.path().is_dir() {
            found.extend(
                files(&entry.path()).into_iter().map(|(path, bytes)| (format!("{name}/{path}"), bytes)),
            );
        } else {
            found.insert(name, fs::read(entry.path()).expect("a file").into());
        }
    }
    found
}

impl Hub {
    /// Adds a commit and makes it main. Returns its name, which its content decides.
    pub fn commit(&self, repo: &str, files: &[(&str, Bytes)]) -> String {
        let mut repos = self.repos.lock().expect("hub");
        let entry = repos.entry(repo.into()).or_default();
        let files: BTreeMap<String, Bytes> =
            files.iter().map(|(path, bytes)| ((*path).into(), bytes.clone())).collect();
        let mut state = Sha1::new();
        for (path, bytes) in &files {
            state.update(format!("{path} {}", git_id(bytes)));
        }
        let commit = hex(state.finalize());
        entry.commits.insert(commit.clone(), files);
        entry.main.clone_from(&commit);
        commit
    }

    /// Sets what goes wrong.
    pub fn break_with(&self, fault: impl Fn(&Ask, &Bytes) -> Option<Response> + Send + Sync + 'static) {
        *self.fault.lock().expect("hub") = Some(Box::new(fault));
    }

    /// Nothing goes wrong any more.
    pub fn mend(&self) {
        *self.fault.lock().expect("hub") = None;
    }

    /// Requests for file contents so far.
    pub fn downloads(&self) -> Vec<Ask> {
        self.seen.lock().expect("hub").iter().filter(|ask| ask.path.contains("/resolve/")).cloned().collect()
    }

    /// Starts it on a free port of loopback.
    pub async fn start(self: &Arc<Self>) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().fallback(answer).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }
}

async fn answer(State(hub): State<Arc<Hub>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let query = request.uri().query().unwrap_or_default().to_owned();
    let range = request.headers().get(header::RANGE).and_then(|value| {
        let (first, last) = value.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().unwrap_or(u64::MAX)))
    });
    let ask = {
        let mut seen = hub.seen.lock().expect("hub");
        let before = seen.iter().filter(|ask| ask.path == path).count();
        let ask = Ask {
            method: request.method().to_string(),
            path: path.clone(),
            headers: request.headers().clone(),
            range,
            before,
        };
        seen.push(ask.clone());
        ask
    };
    let content = hub.content(&path).map_or_else(Bytes::new, |(_, bytes)| bytes);
    let broken = hub.fault.lock().expect("hub").as_ref().and_then(|fault| fault(&ask, &content));
    match broken {
        Some(response) if response.status() == CUT => write::cut(request).await,
        Some(response) => response,
        None if matches!(ask.method.as_str(), "POST" | "PUT") => write::answer(&hub, &ask, request).await,
        None if ask.path == "/api/whoami-v2" => hub.whoami(&ask),
        None => hub.good(&ask, &query),
    }
}

/// The status of a fault that stands for a connection that ends in the middle of what it receives.
pub const CUT: u16 = 599;

/// An error as the Hub sends it.
pub fn error(status: u16, code: &str, message: &str) -> Response {
    let headers = [("x-error-code", code.to_owned()), ("x-error-message", message.to_owned())];
    let status = StatusCode::from_u16(status).expect("a status");
    (status, headers, axum::Json(json!({"error": message}))).into_response()
}

impl Repo {
    /// The commit that a revision stands for.
    fn commit_of<'a>(&'a self, revision: &'a str) -> &'a str {
        match revision {
            "main" | "" => &self.main,
            other => self.branches.get(other).map_or(other, String::as_str),
        }
    }
}

impl Hub {
    /// The file behind `/org/name/resolve/revision/path`, with its commit.
    fn content(&self, path: &str) -> Option<(String, Bytes)> {
        let (repo, rest) = path.trim_start_matches('/').split_once("/resolve/")?;
        let (revision, file) = rest.split_once('/')?;
        let repos = self.repos.lock().expect("hub");
        let repo = repos.get(repo)?;
        let commit = repo.commit_of(revision);
        Some((commit.to_owned(), repo.commits.get(commit)?.get(&file.replace("%20", " "))?.clone()))
    }

    /// What the Hub answers.
    fn good(&self, ask: &Ask, query: &str) -> Response {
        if let Some((name, _)) = ask.path.trim_start_matches('/').split_once("/resolve/") {
            let repo = self.repos.lock().expect("hub").get(name).cloned().unwrap_or_default();
            if !self.may_read(ask, name, &repo) {
                return error(404, "RepoNotFound", "Repository not found");
            }
            return match self.content(&ask.path) {
                Some((commit, bytes)) => file(ask, &commit, &bytes),
                None => error(404, "EntryNotFound", "Entry not found"),
            };
        }
        let Some(rest) = ask.path.strip_prefix("/api/models/") else { return error(404, "", "unknown") };
        let mut parts = rest.splitn(4, '/');
        let mut next = || parts.next().unwrap_or_default();
        let (name, verb, revision) =
            (format!("{}/{}", next(), next()), next().to_owned(), next().replace("%2F", "/"));
        let repos = self.repos.lock().expect("hub");
        let Some(repo) = repos.get(&name) else { return error(404, "RepoNotFound", "Repository not found") };
        if !self.may_read(ask, &name, repo) {
            return error(
                if ask.headers.contains_key("authorization") { 404 } else { 401 },
                "RepoNotFound",
                "Repository not found",
            );
        }
        let commit = repo.commit_of(&revision).to_owned();
        let Some(files) = repo.commits.get(&commit) else {
            return error(404, "RevisionNotFound", &format!("Invalid rev id: {commit}"));
        };
        match verb.as_str() {
            "" | "revision" => axum::Json(json!({
                "id": name, "sha": commit, "private": repo.private,
                "siblings": files.keys().map(|path| json!({"rfilename": path})).collect::<Vec<_>>(),
            }))
            .into_response(),
            "tree" => self.tree(files, &ask.path, query),
            _ => error(404, "", "unknown"),
        }
    }

    fn tree(&self, files: &BTreeMap<String, Bytes>, path: &str, query: &str) -> Response {
        let entries: Vec<Value> = files.iter().map(|(path, bytes)| entry(path, bytes)).collect();
        let page = *self.page.lock().expect("hub");
        if page == 0 {
            return axum::Json(entries).into_response();
        }
        let start = query.split('&').find_map(|part| part.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
        let end = (start + page).min(entries.len());
        let link =
            (end < entries.len()).then(|| format!("<{path}?recursive=true&cursor={end}>; rel=\"next\""));
        let mut response = axum::Json(entries[start..end].to_vec()).into_response();
        if let Some(link) = link {
            response.headers_mut().insert(header::LINK, link.parse().expect("a header"));
        }
        response
    }
}

fn entry(path: &str, bytes: &Bytes) -> Value {
    if bytes.len() < LFS {
        return json!({"type": "file", "oid": git_id(bytes), "size": bytes.len(), "path": path});
    }
    let oid = sha256(bytes);
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {}\n", bytes.len());
    json!({
        "type": "file", "oid": git_id(pointer.as_bytes()), "size": bytes.len(), "path": path,
        "lfs": {"oid": oid, "size": bytes.len(), "pointerSize": pointer.len()},
    })
}

/// A file, or a range of it.
pub fn file(ask: &Ask, commit: &str, bytes: &Bytes) -> Response {
    let id = if bytes.len() < LFS { git_id(bytes) } else { sha256(bytes) };
    let builder = Response::builder()
        .header(header::ETAG, format!("\"{id}\""))
        .header("x-repo-commit", commit)
        .header("x-linked-etag", format!("\"{id}\""))
        .header("x-linked-size", bytes.len())
        .header(header::ACCEPT_RANGES, "bytes");
    let length = bytes.len() as u64;
    let (builder, body) = match ask.range {
        Some((first, _)) if first >= length => {
            (builder.status(416).header(header::CONTENT_RANGE, format!("bytes */{length}")), Bytes::new())
        }
        Some((first, last)) => {
            let last = last.min(length - 1);
            let builder =
                builder.status(206).header(header::CONTENT_RANGE, format!("bytes {first}-{last}/{length}"));
            (builder, bytes.slice(first as usize..=last as usize))
        }
        None => (builder, bytes.clone()),
    };
    let builder = builder.header(header::CONTENT_LENGTH, body.len());
    let body = if ask.method == "HEAD" { Body::empty() } else { Body::from(body) };
    builder.body(body).expect("a response")
}

/// Bytes without a pattern that a range could miss.
pub fn noise(seed: u64, length: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}
