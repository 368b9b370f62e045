// SPDX-License-Identifier: Apache-2.0
//! What a repository holds at a revision: the commit, and every file with its size and hash.
//!
//! Sizes and hashes come from the tree listing and not from headers of the files, which mirrors and proxies strip.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::{Error, Kind, Result},
    http::{Call, Client, hub},
    repo::{encode, is_commit, is_hex, is_path},
};

/// Pages of a listing that are followed; one holds a thousand files.
const PAGES: usize = 1000;

/// What a file's bytes must hash to; also the name of its blob in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Id {
    /// SHA-256 of the content: large files, and pins.
    Sha256(String),
    /// Git's SHA-1 of "blob", the size and the content: small files.
    Git(String),
}

impl Id {
    /// The hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }
}

/// A file at a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Path in the repository.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// What they hash to.
    pub id: Id,
}

/// The commit that a revision stands for now.
pub async fn resolve(client: &Client<'_>, repo: &str, revision: &str) -> Result<String> {
    let url = client.url(&format!("api/models/{repo}/revision/{}", encode(revision, false)))?;
    let (answer, _) = client.json(&format!("asking for {repo}@{revision}"), repo, &Call::get(url)).await?;
    match answer["sha"].as_str() {
        Some(sha) if is_commit(sha) => Ok(sha.into()),
        _ => Err(hub(format!("the Hub names no commit for {repo}@{revision}"), "field sha")),
    }
}

/// Every file at a commit.
pub async fn files(client: &Client<'_>, repo: &str, commit: &str) -> Result<Vec<File>> {
    let mut url = client.url(&format!("api/models/{repo}/tree/{commit}?recursive=true&expand=false"))?;
    let what = format!("listing {repo}@{commit}");
    let mut files = Vec::new();
    for _ in 0..PAGES {
        let (answer, next) = client.json(&what, repo, &Call::get(url)).await?;
        let Some(entries) = answer.as_array() else {
            return Err(hub(format!("{what} gave no list"), ""));
        };
        for entry in entries.iter().filter(|entry| entry["type"] == "file") {
            files.push(file(repo, entry)?);
        }
        match next {
            Some(next) => url = next,
            None => return Ok(files),
        }
    }
    Err(hub(format!("{what} does not end"), ""))
}

fn file(repo: &str, entry: &Value) -> Result<File> {
    let path = entry["path"].as_str().unwrap_or_default();
    if !is_path(path) {
        let error = Error::new(Kind::Verification, format!("{repo} lists a file at {path:?}"));
        return Err(error.why("that path leads out of the cache").next("do not trust this hub"));
    }
    let lfs = entry.get("lfs").filter(|lfs| lfs.is_object());
    let size = lfs.unwrap_or(entry)["size"].as_u64();
    let id = match lfs {
        // Older answers put "sha256:" before the digits.
        Some(lfs) => lfs["oid"]
            .as_str()
            .map(|oid| oid.trim_start_matches("sha256:"))
            .filter(|oid| is_hex(oid, 64))
            .map(|oid| Id::Sha256(oid.into())),
        None => entry["oid"].as_str().filter(|oid| is_hex(oid, 40)).map(|oid| Id::Git(oid.into())),
    };
    match (size, id) {
        (Some(size), Some(id)) => Ok(File { path: path.into(), size, id }),
        _ => Err(hub(format!("{repo} lists {path} without its size or hash"), "fields size, oid, lfs.oid")),
    }
}
