// SPDX-License-Identifier: Apache-2.0
//! The half of the stand-in that takes files. What it does, and where that is from:
//!
//! - `GET /api/whoami-v2`, `POST /api/repos/create` (201, or 409 if it is there; a first commit with `.gitattributes`),
//!   `PUT …/settings` with `visibility`, `POST …/branch/NAME` with `startingPoint`, `POST /api/validate-yaml` (400 with
//!   `errors`), `POST …/preupload/REV` (`files` with `uploadMode`), `POST …/commit/REV` (NDJSON: header, file, lfsFile,
//!   deletedFile; answer `commitOid`): the fields that huggingface_hub 2.4 sends and reads.
//! - 412 and "A commit has happened since" if `parentCommit` is not the branch's head: what `datasets` looks for.
//! - `POST /NAME.git/info/lfs/objects/batch`: git-lfs, docs/api/batch.md. No `actions` for an object that is there; for
//!   another one `upload`, either basic (PUT) or, above a size, multipart as huggingface_hub reads it (`chunk_size` and
//!   numbered addresses in the header, `ETag` of each part, a POST that puts them together), and `verify`.
//! - The storage is another origin with signed addresses, as the Hub's is. It takes whatever comes; `verify` and the
//!   next batch compare size and SHA-256, which the LFS documents ask of a server.
//!
//! A commit that refers to an object which the storage lacks is refused, as is a small file above [`LFS`] bytes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    response::{IntoResponse as _, Response},
};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use sha1::{Digest as _, Sha1};

use super::{Ask, Hub, LFS, Repo, error, hex, sha256};

/// What pushes need.
#[derive(Default)]
pub struct State {
    /// Token → what whoami says about it.
    pub accounts: Mutex<BTreeMap<String, Value>>,
    /// SHA-256 → what the storage holds.
    pub storage: Mutex<BTreeMap<String, Bytes>>,
    /// Objects above this many bytes come in parts of it; 0 for never.
    pub part: Mutex<usize>,
    /// Pause after each piece that is received.
    pub slow: Mutex<Duration>,
    /// How many objects are still to be stored with a wrong byte.
    pub damage: Mutex<usize>,
    /// How many commits are still to be made and answered with 500.
    pub lose: Mutex<usize>,
    /// Every commit's request, in order.
    pub commits: Mutex<Vec<Vec<Value>>>,
    parts: Mutex<BTreeMap<(String, usize), Bytes>>,
}

/// What whoami says about a user, the role of the token, and organisations with the user's roles in them.
pub fn account(name: &str, role: &str, organisations: &[(&str, &str)]) -> Value {
    let organisations: Vec<Value> =
        organisations.iter().map(|(name, role)| json!({"name": name, "roleInOrg": role})).collect();
    json!({"type": "user", "name": name, "orgs": organisations,
        "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}})
}

/// Counts down; true while there was something left.
fn take(count: &Mutex<usize>) -> bool {
    let mut count = count.lock().expect("hub");
    let left = *count > 0;
    *count = count.saturating_sub(1);
    left
}

/// Takes a part of a request's body, then ends the connection.
pub async fn cut(request: Request) -> Response {
    let _ = request.into_body().into_data_stream().next().await;
    // Unwinding ends the connection's task without an answer, and without a message.
    std::panic::resume_unwind(Box::new("cut"))
}

/// What the Hub answers to a POST or PUT.
pub async fn answer(hub: &Arc<Hub>, ask: &Ask, request: Request) -> Response {
    let slow = *hub.write.slow.lock().expect("hub");
    let mut pieces = request.into_body().into_data_stream();
    let mut body = Vec::new();
    while let Some(piece) = pieces.next().await {
        let Ok(piece) = piece else { return error(400, "", "the body ended early") };
        body.extend_from_slice(&piece);
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
    }
    hub.taken(ask, body.into())
}

impl Hub {
    /// What `whoami` says about the request's token.
    fn account(&self, ask: &Ask) -> Option<Value> {
        let token = ask.headers.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")?;
        self.write.accounts.lock().expect("hub").get(token).cloned()
    }

    pub(super) fn whoami(&self, ask: &Ask) -> Response {
        match self.account(ask) {
            Some(account) => axum::Json(account).into_response(),
            None => error(401, "", "Invalid username or password."),
        }
    }

    /// Without accounts, everybody reads everything.
    pub(super) fn may_read(&self, ask: &Ask, name: &str, repo: &Repo) -> bool {
        let open = self.write.accounts.lock().expect("hub").is_empty();
        open || !repo.private || self.account(ask).is_some_and(|account| member(&account, name))
    }

    fn may_write(&self, ask: &Ask, name: &str) -> Option<Response> {
        match self.account(ask) {
            None => Some(error(401, "", "Invalid username or password.")),
            Some(account) if !member(&account, name) || account["auth"]["accessToken"]["role"] == "read" => {
                Some(error(403, "", "You don't have the rights to write to this repository"))
            }
            Some(_) => None,
        }
    }

    fn taken(&self, ask: &Ask, body: Bytes) -> Response {
        let path = ask.path.trim_start_matches('/').to_owned();
        if let Some(place) = path.strip_prefix("storage/") {
            return self.store(place, body);
        }
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        if let Some(oid) = path.strip_prefix("api/complete_multipart/") {
            return self.put_together(oid, &value);
        }
        if let Some((name, verb)) = path.split_once(".git/info/lfs/objects/") {
            return self.may_write(ask, name).unwrap_or_else(|| match verb {
                "batch" => self.batch(ask, name, &value),
                _ => self.verify(&value),
            });
        }
        match path.as_str() {
            "api/repos/create" => return self.create(ask, &value),
            "api/validate-yaml" => return validate(value["content"].as_str().unwrap_or_default()),
            _ => {}
        }
        let mut parts = path.strip_prefix("api/models/").unwrap_or_default().splitn(4, '/');
        let mut next = || parts.next().unwrap_or_default().replace("%2F", "/");
        let (name, verb, revision) = (format!("{}/{}", next(), next()), next(), next());
        if let Some(refused) = self.may_write(ask, &name) {
            return refused;
        }
        let mut repos = self.repos.lock().expect("hub");
        let Some(repo) = repos.get_mut(&name) else {
            return error(404, "RepoNotFound", "Repository not found");
        };
        match verb.as_str() {
            "settings" => {
                repo.private = value["visibility"] == "private";
                axum::Json(json!({})).into_response()
            }
            "branch" if repo.branches.contains_key(&revision) => error(409, "", "Reference already exists"),
            "branch" => {
                repo.branches.insert(revision, value["startingPoint"].as_str().unwrap_or_default().into());
                axum::Json(json!({})).into_response()
            }
            "preupload" => preupload(&value),
            "commit" => self.take_commit(repo, &revision, &body),
            _ => error(404, "", "unknown"),
        }
    }

    fn create(&self, ask: &Ask, value: &Value) -> Response {
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        let name = format!("{}/{}", text("organization"), text("name"));
        if let Some(refused) = self.may_write(ask, &name) {
            return refused;
        }
        if self.repos.lock().expect("hub").contains_key(&name) {
            return error(409, "", "You already created this model repo");
        }
        self.commit(
            &name,
            &[(".gitattributes", Bytes::from_static(b"*.bin filter=lfs diff=lfs merge=lfs -text\n"))],
        );
        let mut repos = self.repos.lock().expect("hub");
        repos.get_mut(&name).expect("made").private = text("visibility") == "private";
        (axum::http::StatusCode::CREATED, axum::Json(json!({"name": name}))).into_response()
    }

    fn has(&self, oid: &str, size: &Value) -> bool {
        let storage = self.write.storage.lock().expect("hub");
        storage.get(oid).is_some_and(|bytes| *size == bytes.len() && sha256(bytes) == oid)
    }

    fn batch(&self, ask: &Ask, name: &str, value: &Value) -> Response {
        let host = ask.headers["host"].to_str().expect("a host").to_owned();
        let port = host.rsplit(':').next().expect("a port");
        let part = *self.write.part.lock().expect("hub");
        let object = |object: &Value| {
            let oid = object["oid"].as_str().unwrap_or_default();
            let size = object["size"].as_u64().unwrap_or_default() as usize;
            if self.has(oid, &object["size"]) {
                return json!({"oid": oid, "size": size});
            }
            let place = format!("http://localhost:{port}/storage/{oid}");
            let verify = json!({"href": format!("http://{host}/{name}.git/info/lfs/objects/verify")});
            let upload = if part == 0 || size <= part {
                json!({"href": format!("{place}?signature=secret")})
            } else {
                let mut header =
                    serde_json::Map::from_iter([("chunk_size".to_owned(), json!(part.to_string()))]);
                for number in 1..=size.div_ceil(part) {
                    header
                        .insert(format!("{number:05}"), json!(format!("{place}/{number}?signature=secret")));
                }
                json!({"href": format!("http://{host}/api/complete_multipart/{oid}"), "header": header})
            };
            json!({"oid": oid, "size": size, "authenticated": true, "actions": {"upload": upload, "verify": verify}})
        };
        let objects: Vec<Value> = value["objects"].as_array().into_iter().flatten().map(object).collect();
        axum::Json(json!({"transfer": if part == 0 { "basic" } else { "multipart" }, "objects": objects}))
            .into_response()
    }

    fn store(&self, place: &str, mut body: Bytes) -> Response {
        if take(&self.write.damage) {
            let mut bytes = body.to_vec();
            bytes[0] ^= 1;
            body = bytes.into();
        }
        let etag = format!("\"{}\"", hex(Sha1::digest(&body)));
        match place.split_once('/') {
            None => drop(self.write.storage.lock().expect("hub").insert(place.into(), body)),
            Some((oid, number)) => {
                let number = number.parse().expect("a number");
                self.write.parts.lock().expect("hub").insert((oid.into(), number), body);
            }
        }
        Response::builder().header("etag", etag).body(Body::empty()).expect("a response")
    }

    fn put_together(&self, oid: &str, value: &Value) -> Response {
        let parts = self.write.parts.lock().expect("hub");
        let mut whole = Vec::new();
        for (entry, number) in value["parts"].as_array().into_iter().flatten().zip(1..) {
            let part = parts.get(&(oid.to_owned(), number));
            let etag = part.map(|part| format!("\"{}\"", hex(Sha1::digest(part))));
            match part {
                Some(part) if entry["partNumber"] == number && entry["etag"].as_str() == etag.as_deref() => {
                    whole.extend_from_slice(part);
                }
                _ => return error(400, "", "InvalidPart"),
            }
        }
        self.write.storage.lock().expect("hub").insert(oid.into(), whole.into());
        axum::Json(json!({})).into_response()
    }

    fn verify(&self, value: &Value) -> Response {
        let oid = value["oid"].as_str().unwrap_or_default();
        if self.has(oid, &value["size"]) {
            axum::Json(json!({})).into_response()
        } else {
            error(422, "", "not that object")
        }
    }

    fn take_commit(&self, repo: &mut Repo, revision: &str, body: &[u8]) -> Response {
        let lines: Vec<Value> = body
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).expect("a line of JSON"))
            .collect();
        self.write.commits.lock().expect("hub").push(lines.clone());
        let head = repo.commit_of(revision).to_owned();
        if lines[0]["value"]["parentCommit"].as_str().is_some_and(|parent| parent != head) {
            return error(412, "", "A commit has happened since. Please refresh and try again.");
        }
        let Some(mut files) = repo.commits.get(&head).cloned() else {
            return error(404, "RevisionNotFound", "Invalid rev id");
        };
        for line in &lines[1..] {
            let text = |key: &str| line["value"][key].as_str().unwrap_or_default().to_owned();
            match line["key"].as_str().unwrap_or_default() {
                "deletedFile" => drop(files.remove(&text("path"))),
                "file" => {
                    let bytes = decode(&text("content"));
                    if bytes.len() >= LFS {
                        return error(400, "", &format!("{} must be pushed with LFS", text("path")));
                    }
                    files.insert(text("path"), bytes);
                }
                "lfsFile" => {
                    let stored = self.write.storage.lock().expect("hub").get(&text("oid")).cloned();
                    // The repository's own earlier files are in its storage too.
                    let own = || {
                        let mut all = repo.commits.values().flat_map(BTreeMap::values);
                        all.find(|bytes| sha256(bytes) == text("oid")).cloned()
                    };
                    let Some(bytes) = stored.or_else(own) else {
                        return error(400, "", &format!("the LFS object of {} does not exist", text("path")));
                    };
                    files.insert(text("path"), bytes);
                }
                _ => return error(400, "", "an unknown operation"),
            }
        }
        let number = repo.commits.len();
        let name = hex(Sha1::new().chain_update(body).chain_update(format!("{head}{number}")).finalize());
        repo.commits.insert(name.clone(), files);
        if revision == "main" {
            repo.main.clone_from(&name);
        } else {
            repo.branches.insert(revision.into(), name.clone());
        }
        if take(&self.write.lose) {
            return error(500, "", "Internal Server Error");
        }
        axum::Json(json!({"success": true, "commitOid": name, "commitUrl": format!("/commit/{name}")}))
            .into_response()
    }
}

fn member(account: &Value, repo: &str) -> bool {
    let namespace = repo.split('/').next().unwrap_or_default();
    let organisations = account["orgs"].as_array().into_iter().flatten();
    account["name"] == namespace || organisations.into_iter().any(|org| org["name"] == namespace)
}

fn validate(card: &str) -> Response {
    let front =
        card.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---\n")).map(|(front, _)| front);
    let wrong = |message: &str| {
        let body = json!({"errors": [{"message": message}], "warnings": []});
        (axum::http::StatusCode::BAD_REQUEST, axum::Json(body)).into_response()
    };
    let Some(front) = front else { return wrong("empty or missing yaml metadata in repo card") };
    let name = front.lines().find_map(|line| line.strip_prefix("license_name: "));
    if name.is_some_and(|name| name.chars().any(char::is_uppercase)) {
        return wrong("\"license_name\" must be lower case");
    }
    axum::Json(json!({"errors": [], "warnings": []})).into_response()
}

fn preupload(value: &Value) -> Response {
    let files = value["files"].as_array().into_iter().flatten().map(|file| {
        let large = file["size"].as_u64().is_some_and(|size| size as usize >= LFS);
        json!({"path": file["path"], "uploadMode": if large { "lfs" } else { "regular" }, "shouldIgnore": false, "oid": null})
    });
    axum::Json(json!({"files": files.collect::<Vec<_>>()})).into_response()
}

/// Base64.
fn decode(text: &str) -> Bytes {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for digit in text.bytes().filter_map(digit) {
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes.into()
}
