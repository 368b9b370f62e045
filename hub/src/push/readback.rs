// SPDX-License-Identifier: Apache-2.0
//! What a repository serves after a push, against what was to be pushed: the list of its files with sizes and hashes,
//! and the bytes themselves of every file that changed, downloaded and hashed.

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use sha2::{Digest as _, Sha256};

use super::local::Local;
use crate::{
    cache::hex,
    error::{Error, Kind, Result},
    http::{Call, Client, Fault, reason, show},
    listing::{self, File},
};

/// What stands in a list of files that should not, or does not stand there that should.
pub fn difference(files: &[File], wanted: &[Local], owned: &[String]) -> Option<String> {
    for local in wanted {
        match files.iter().find(|file| file.path == local.path) {
            None => return Some(format!("{} is not there", local.path)),
            Some(file) if !local.is(file) => {
                return Some(format!(
                    "{} is {} bytes with the hash {}, and {} bytes with another were pushed",
                    local.path,
                    file.size,
                    file.id.hex(),
                    local.size
                ));
            }
            Some(_) => {}
        }
    }
    let stale = super::stale(files, wanted, owned).into_iter().next()?;
    Some(format!("{stale} is still there"))
}

/// Compares the list of a commit with what was pushed, then the bytes of `changed`.
pub async fn check(
    client: &Client<'_>,
    repo: &str,
    commit: &str,
    wanted: &[Local],
    owned: &[String],
    changed: &[&Local],
) -> Result<()> {
    let files = listing::files(client, repo, commit).await?;
    if let Some(why) = difference(&files, wanted, owned) {
        return Err(wrong(repo, commit).why(why));
    }
    let bytes = changed.iter().map(|file| file.size).sum();
    client.progress.note("reading back what the repository serves now");
    client.progress.start(bytes, 0, changed.len());
    let result = stream::iter(changed)
        .map(|file| bytes_of(client, repo, commit, file))
        .buffer_unordered(client.settings.connections)
        .try_for_each(|()| async { Ok(()) })
        .await;
    client.progress.finish();
    result
}

async fn bytes_of(client: &Client<'_>, repo: &str, commit: &str, file: &Local) -> Result<()> {
    let call = Call::get(client.file_url(repo, commit, &file.path)?);
    let what = format!("reading back {}", file.path);
    let (size, sha256) = client
        .retry(&what, || async {
            let (mut response, url) = client.send(&call).await?;
            if !response.status().is_success() {
                return Err(client.refusal(repo, &url, &response));
            }
            let (mut state, mut size) = (Sha256::new(), 0);
            loop {
                let far = || format!("{} stopped after {size} bytes", show(&url));
                match tokio::time::timeout(client.settings.stall, response.chunk()).await {
                    Err(_) => return Err(take_back(client, size, far())),
                    Ok(Err(error)) => {
                        return Err(take_back(client, size, format!("{}: {}", far(), reason(error))));
                    }
                    Ok(Ok(None)) => return Ok((size, hex(&state.finalize()))),
                    Ok(Ok(Some(piece))) => {
                        state.update(&piece);
                        size += piece.len() as u64;
                        client.progress.add(piece.len() as i64);
                    }
                }
            }
        })
        .await?;
    if (size, &sha256) == (file.size, &file.sha256) {
        return Ok(());
    }
    Err(wrong(repo, commit).why(format!(
        "{} comes back as {size} bytes with SHA-256 {sha256}, and {} bytes with {} were pushed",
        file.path, file.size, file.sha256
    )))
}

fn take_back(client: &Client<'_>, bytes: u64, why: String) -> Fault {
    client.progress.add(-(bytes as i64));
    Fault::again(why)
}

fn wrong(repo: &str, commit: &str) -> Error {
    Error::new(Kind::Verification, format!("{repo}@{commit} is not what was pushed"))
        .next("run the command again; if it stays so, tell the Hub's support")
}
