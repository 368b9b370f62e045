// SPDX-License-Identifier: Apache-2.0
//! One commit that changes all files at once, or none: NDJSON with a header that names the parent commit, so that a
//! commit of somebody else in between is noticed and not overwritten.
//!
//! Source: what huggingface_hub 2.4 sends (`_prepare_commit_payload`). Sending a commit again could make it twice, and
//! an error can come although it was made (huggingface/datasets#7708): before another try, the branch is looked at.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures_util::stream;
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::json;

use super::local::Local;
use crate::{
    error::{Error, Kind, Result},
    http::{Beat, Call, Client, Content, Fault, hub},
    listing::{self, File},
    repo::{encode, is_commit},
};

/// What a commit does to one path.
#[derive(Debug, Clone)]
pub enum Change {
    /// A small file; its bytes travel in the commit.
    Inline(Local),
    /// A file whose bytes are in the storage.
    Stored {
        /// Path in the repository.
        path: String,
        /// SHA-256 of the content.
        sha256: String,
        /// Bytes.
        size: u64,
    },
    /// The path goes away.
    Remove(String),
}

/// A commit to be made.
pub struct Commit<'a> {
    /// organisation/name.
    pub repo: &'a str,
    /// Branch.
    pub revision: &'a str,
    /// The commit that it builds on.
    pub parent: &'a str,
    /// First line of its message.
    pub summary: &'a str,
    /// What it does.
    pub changes: &'a [Change],
}

impl Commit<'_> {
    /// Makes it; `done` says whether a listing is what this commit leads to. Returns the new commit.
    pub async fn make(&self, client: &Client<'_>, done: impl Fn(&[File]) -> bool) -> Result<String> {
        let Self { repo, revision, parent, .. } = self;
        let url = client.url(&format!("api/models/{repo}/commit/{}", encode(revision, false)))?;
        let call = Call::send(Method::POST, url, self.body()).header(CONTENT_TYPE, "application/x-ndjson");
        let what = format!("the commit to {repo}");
        let mut failures = 0;
        loop {
            let fault = match client.send(&call).await {
                Ok((response, url)) if response.status().is_success() => {
                    match client.body(&url, response).await {
                        Ok(body) => {
                            let answer: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
                            if let Some(commit) = answer["commitOid"].as_str().filter(|oid| is_commit(oid)) {
                                return Ok(commit.to_owned());
                            }
                            Fault::again("the answer names no commit")
                        }
                        Err(fault) => fault,
                    }
                }
                Ok((response, _)) if matches!(response.status().as_u16(), 409 | 412) => {
                    return match self.made(client, &done).await? {
                        Some(commit) => Ok(commit),
                        None => Err(self.conflict()),
                    };
                }
                Ok((response, url)) => client.refusal(repo, &url, &response),
                Err(fault) => fault,
            };
            if let Fault::Final(error) = fault {
                return Err(error);
            }
            // It may have been made and only its answer lost.
            let head = listing::resolve(client, repo, revision).await?;
            if head != *parent {
                return match self.made(client, &done).await? {
                    Some(commit) => Ok(commit),
                    None => Err(self.conflict()),
                };
            }
            failures += 1;
            client.pause(&what, fault, failures).await?;
        }
    }

    /// The branch's commit, if it is what this commit leads to.
    async fn made(&self, client: &Client<'_>, done: impl Fn(&[File]) -> bool) -> Result<Option<String>> {
        let head = listing::resolve(client, self.repo, self.revision).await?;
        let files = listing::files(client, self.repo, &head).await?;
        Ok((head != self.parent && done(&files)).then_some(head))
    }

    fn conflict(&self) -> Error {
        let what = format!("{}@{} got another commit meanwhile", self.repo, self.revision);
        Error::new(Kind::Network, what)
            .why(format!("this push builds on {}; nothing of it is visible", self.parent))
            .next("see what was changed, then run the command again: large files that arrived are not sent again")
    }

    fn body(&self) -> Content {
        let header = json!({"key": "header", "value": {
            "summary": self.summary, "description": "", "parentCommit": self.parent,
        }});
        let mut lines = vec![Line { before: format!("{header}\n"), file: None, after: "" }];
        lines.extend(self.changes.iter().map(line));
        let length = lines.iter().map(Line::length).sum();
        let lines: Arc<[Line]> = lines.into();
        let open = move |beat: Arc<Beat>| {
            let state = (lines.clone(), 0, beat);
            reqwest::Body::wrap_stream(stream::try_unfold(state, |(lines, at, beat)| async move {
                let Some(line) = lines.get(at) else { return Ok(None) };
                let text = line.text()?;
                beat.sent(line.file.as_ref().map_or(0, |file| file.size));
                Ok::<_, std::io::Error>(Some((text, (lines, at + 1, beat))))
            }))
        };
        Content::Stream { length, open: Arc::new(open) }
    }
}

/// A line of the request; a small file is read when it is its turn.
struct Line {
    before: String,
    file: Option<Local>,
    after: &'static str,
}

impl Line {
    fn length(&self) -> u64 {
        let content = self.file.as_ref().map_or(0, |file| file.size.div_ceil(3) * 4);
        self.before.len() as u64 + content + self.after.len() as u64
    }

    fn text(&self) -> std::io::Result<Bytes> {
        let content = match &self.file {
            Some(file) => BASE64_STANDARD.encode(file.all().map_err(std::io::Error::other)?),
            None => String::new(),
        };
        Ok(format!("{}{content}{}", self.before, self.after).into())
    }
}

fn line(change: &Change) -> Line {
    match change {
        Change::Inline(file) => Line {
            before: format!(
                "{{\"key\":\"file\",\"value\":{{\"path\":{},\"encoding\":\"base64\",\"content\":\"",
                json!(file.path)
            ),
            file: Some(file.clone()),
            after: "\"}}\n",
        },
        Change::Stored { path, sha256, size } => {
            let value = json!({"path": path, "algo": "sha256", "oid": sha256, "size": size});
            Line { before: format!("{}\n", json!({"key": "lfsFile", "value": value})), file: None, after: "" }
        }
        Change::Remove(path) => {
            let value = json!({"key": "deletedFile", "value": {"path": path}});
            Line { before: format!("{value}\n"), file: None, after: "" }
        }
    }
}

/// What each file becomes, as the Hub decides by its name, size and first bytes: true for the storage.
pub async fn stored(client: &Client<'_>, repo: &str, revision: &str, files: &[&Local]) -> Result<Vec<bool>> {
    let url = client.url(&format!("api/models/{repo}/preupload/{}", encode(revision, false)))?;
    let mut stored = Vec::new();
    // The Hub takes so many at a time.
    for chunk in files.chunks(256) {
        let mut list = Vec::new();
        for file in chunk {
            let sample = BASE64_STANDARD.encode(file.sample()?);
            list.push(json!({"path": file.path, "size": file.size, "sample": sample}));
        }
        let call = Call::post(url.clone(), &json!({"files": list}));
        let answer = client.ask("asking which files are large", repo, &call, &[]).await?.json();
        for file in chunk {
            let entry =
                answer["files"].as_array().into_iter().flatten().find(|entry| entry["path"] == file.path);
            let mode = entry.and_then(|entry| entry["uploadMode"].as_str());
            match mode {
                // The storage takes no empty object.
                Some("lfs") => stored.push(file.size > 0),
                Some("regular") => stored.push(false),
                _ => {
                    return Err(hub(
                        format!("the Hub does not say how {} is to be sent", file.path),
                        "uploadMode",
                    ));
                }
            }
        }
    }
    Ok(stored)
}
