// SPDX-License-Identifier: Apache-2.0
//! Weights in: what is wanted, what of it is there, whether the rest fits on the disk, then the transfers.
//!
//! A complete fetch of a full commit asks no network and writes nothing. "Complete" is measured against the list of
//! files of that commit (kept beside the snapshot, or pinned), never against what happens to lie in the directory.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use rustix::fs::statvfs;
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::{
    cache::{Cache, Record, is_right},
    error::{At, Error, Kind, Result},
    http::Client,
    listing::{self, File, Id},
    partial::{Owner, others},
    pattern::selected,
    progress::{Progress, size},
    repo::{check_id, check_revision, is_commit},
    settings::Settings,
    transfer::{Source, blocking},
};

/// A file that a lock names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// Path in the repository.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of the content.
    pub sha256: String,
}

/// What to fetch.
#[derive(Debug, Clone, Default)]
pub struct Want {
    /// organisation/name.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// Only paths that match one of these; all if empty.
    pub allow: Vec<String>,
    /// No path that matches one of these.
    pub ignore: Vec<String>,
    /// What a lock says about the files of this commit.
    pub pins: Vec<Pin>,
    /// Hash what is there already, even if it was hashed before.
    pub verify: bool,
}

/// What was fetched.
#[derive(Debug, Clone, Serialize)]
pub struct Fetched {
    /// organisation/name.
    pub repo: String,
    /// The commit.
    pub revision: String,
    /// Its directory in the cache.
    pub snapshot: PathBuf,
    /// Files that were wanted: all are there.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of them that came over the network now.
    pub downloaded: u64,
}

/// One repository, looked at.
struct Plan<'w> {
    want: &'w Want,
    cache: Cache,
    commit: String,
    record: Record,
    files: Vec<File>,
    /// Files that the snapshot lacks or has damaged.
    unlinked: Vec<File>,
    /// Blobs to get for them; a blob that several paths share once.
    missing: Vec<File>,
}

/// Fetches all of `wants`, or nothing of them before the disk is known to hold all.
///
/// # Errors
/// The first fault that no retry mends. What arrived until then is kept for the next run.
pub async fn fetch(settings: &Settings, wants: &[Want], progress: &dyn Progress) -> Result<Vec<Fetched>> {
    let client = Client::new(settings, progress)?;
    let mut plans = Vec::new();
    for want in wants {
        plans.push(plan(&client, want).await?);
    }
    check_disk(&settings.cache, &plans)?;

    let bytes: u64 = plans.iter().flat_map(|plan| &plan.files).map(|file| file.size).sum();
    let missing: u64 = plans.iter().flat_map(|plan| &plan.missing).map(|file| file.size).sum();
    let count = plans.iter().map(|plan| plan.files.len()).sum();
    if missing > 0 {
        progress.start(bytes, bytes - missing.min(bytes), count);
    }
    let result = transfers(&client, plans).await;
    progress.finish();
    result
}

async fn transfers(client: &Client<'_>, plans: Vec<Plan<'_>>) -> Result<Vec<Fetched>> {
    let connections = Semaphore::new(client.settings.connections);
    let mut fetched = Vec::new();
    for mut plan in plans {
        let source = Source {
            client,
            cache: &plan.cache,
            repo: &plan.want.repo,
            commit: &plan.commit,
            connections: &connections,
        };
        let downloads = stream::iter(&plan.missing).map(|file| source.download(file));
        let downloaded: u64 = downloads
            .buffer_unordered(client.settings.connections)
            .try_fold(0, |sum, n| async move { Ok(sum + n) })
            .await?;
        check_pins(&plan)?;
        for file in &plan.unlinked {
            plan.cache.link(&plan.commit, file)?;
        }
        if !client.settings.offline {
            plan.record.verified.extend(plan.files.iter().map(|file| file.path.clone()));
            plan.remember()?;
        }
        fetched.push(plan.fetched(downloaded));
    }
    Ok(fetched)
}

impl Plan<'_> {
    /// Keeps the list and the name. A cache that may not be written loses only a saving, unless something was to change.
    fn remember(&self) -> Result<()> {
        let named = !is_commit(&self.want.revision);
        let reference =
            if named { self.cache.set_reference(&self.want.revision, &self.commit) } else { Ok(()) };
        let result = reference.and_then(|()| self.cache.set_record(&self.commit, &self.record));
        if self.unlinked.is_empty() { Ok(()) } else { result }
    }

    fn fetched(&self, downloaded: u64) -> Fetched {
        Fetched {
            repo: self.want.repo.clone(),
            revision: self.commit.clone(),
            snapshot: self.cache.snapshot(&self.commit),
            files: self.files.len(),
            bytes: self.files.iter().map(|file| file.size).sum(),
            downloaded,
        }
    }
}

async fn plan<'w>(client: &Client<'_>, want: &'w Want) -> Result<Plan<'w>> {
    check_id(&want.repo)?;
    check_revision(&want.revision)?;
    let cache = Cache::new(&client.settings.cache, &want.repo);
    let commit = commit(client, &cache, want).await?;
    let record = match (cache.record(&commit), client.settings.offline) {
        (Some(record), _) => record,
        (None, true) if !want.pins.is_empty() => Record { files: pinned(want), ..Record::default() },
        (None, true) => {
            let error = Error::new(
                Kind::Network,
                format!("it cannot be known offline whether {}@{commit} is complete", want.repo),
            );
            return Err(error
                .why("the list of its files is neither in the cache nor in manifest.lock")
                .next(
                    "run this once without HF_HUB_OFFLINE: what is there already is not downloaded again",
                ));
        }
        (None, false) => {
            Record { files: listing::files(client, &want.repo, &commit).await?, ..Record::default() }
        }
    };
    let chosen = |file: &&File| selected(&file.path, &want.allow, &want.ignore);
    let files: Vec<File> = record.files.iter().filter(chosen).cloned().collect();
    if files.is_empty() {
        let error = Error::new(Kind::Usage, format!("no file of {}@{commit} is wanted", want.repo));
        return Err(error
            .why(format!("{} files are there, and the patterns leave none", record.files.len()))
            .next("check the patterns"));
    }

    let mut missing: HashMap<String, File> = HashMap::new();
    let mut unlinked = Vec::new();
    for file in &files {
        let trusted = record.verified.contains(&file.path) && !want.verify;
        let pointer = cache.snapshot(&commit).join(&file.path);
        let there = present(&pointer, file, trusted).await?;
        if there {
            continue;
        }
        unlinked.push(file.clone());
        if !client.settings.offline && !present(&cache.blob(&file.id), file, false).await? {
            missing.insert(file.id.hex().to_owned(), file.clone());
        }
    }
    if client.settings.offline && !unlinked.is_empty() {
        return Err(incomplete(want, &commit, &unlinked));
    }
    let mut missing: Vec<File> = missing.into_values().collect();
    // Largest first: the last connection is not left alone with the largest file.
    missing.sort_by_key(|file| std::cmp::Reverse(file.size));
    Ok(Plan { want, cache, commit, record, files, unlinked, missing })
}

async fn commit(client: &Client<'_>, cache: &Cache, want: &Want) -> Result<String> {
    if is_commit(&want.revision) {
        return Ok(want.revision.clone());
    }
    if !client.settings.offline {
        return listing::resolve(client, &want.repo, &want.revision).await;
    }
    cache.reference(&want.revision).ok_or_else(|| {
        let error = Error::new(Kind::Network, format!("{}@{} is not in the cache", want.repo, want.revision));
        error
            .why(format!("HF_HUB_OFFLINE is set; looked in {}", client.settings.cache.display()))
            .next("unset HF_HUB_OFFLINE, or name the cache with HF_HUB_CACHE")
    })
}

async fn present(path: &Path, file: &File, trusted: bool) -> Result<bool> {
    let size = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|meta| meta.len());
    if size != Some(file.size) || trusted {
        return Ok(size == Some(file.size));
    }
    let (path, file) = (path.to_path_buf(), file.clone());
    blocking(move || is_right(&path, &file)).await
}

fn pinned(want: &Want) -> Vec<File> {
    let file =
        |pin: &Pin| File { path: pin.path.clone(), size: pin.size, id: Id::Sha256(pin.sha256.clone()) };
    want.pins.iter().map(file).collect()
}

fn incomplete(want: &Want, commit: &str, absent: &[File]) -> Error {
    let bytes: u64 = absent.iter().map(|file| file.size).sum();
    let list: Vec<String> =
        absent.iter().map(|file| format!("{} ({})", file.path, size(file.size))).collect();
    let what = format!("{}@{commit} is incomplete and HF_HUB_OFFLINE is set", want.repo);
    Error::new(Kind::Network, what)
        .why(format!("{} files, {}, are missing or damaged: {}", absent.len(), size(bytes), list.join(", ")))
        .next("run the command again without HF_HUB_OFFLINE")
}

/// The sum of what is missing against what is free, before the first byte.
fn check_disk(cache: &Path, plans: &[Plan<'_>]) -> Result<()> {
    let mut needed = 0;
    for plan in plans {
        let blobs = plan.cache.blobs();
        for file in &plan.missing {
            // What an abandoned download holds already need not be found again.
            let held = others(&blobs, file.id.hex()).into_iter().filter(|(_, owner)| *owner == Owner::Dead);
            let held = held.filter_map(|(path, _)| std::fs::metadata(path).ok());
            let held =
                held.map(|meta| std::os::unix::fs::MetadataExt::blocks(&meta) * 512).max().unwrap_or(0);
            needed += file.size.saturating_sub(held);
        }
    }
    if needed == 0 {
        return Ok(());
    }
    let existing = cache.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let disk = statvfs(existing).map_err(std::io::Error::from).at("measure", existing)?;
    let free = disk.f_bavail * disk.f_frsize;
    if needed <= free {
        return Ok(());
    }
    let what =
        format!("{} are missing, and the disk of {} has {} free", size(needed), cache.display(), size(free));
    Err(Error::new(Kind::Disk, what)
        .why(format!("{needed} and {free} bytes; nothing was downloaded"))
        .next("free some space, or name a cache on another disk with HF_HUB_CACHE"))
}

/// What arrived is what the lock says, besides being what the Hub says.
fn check_pins(plan: &Plan<'_>) -> Result<()> {
    let pins: HashMap<&str, &Pin> = plan.want.pins.iter().map(|pin| (pin.path.as_str(), pin)).collect();
    for file in &plan.files {
        let Some(pin) = pins.get(file.path.as_str()) else { continue };
        let right = match &file.id {
            Id::Sha256(hex) => *hex == pin.sha256 && file.size == pin.size,
            Id::Git(_) => {
                let wanted =
                    File { id: Id::Sha256(pin.sha256.clone()), size: pin.size, path: file.path.clone() };
                is_right(&plan.cache.blob(&file.id), &wanted)?
                    || is_right(&plan.cache.snapshot(&plan.commit).join(&file.path), &wanted)?
            }
        };
        if !right {
            let what =
                format!("{}@{}: {} is not the file that is pinned", plan.want.repo, plan.commit, file.path);
            return Err(Error::new(Kind::Verification, what)
                .why(format!("manifest.lock names SHA-256 {}", pin.sha256))
                .next("do not use it; if the pin is wrong, run `packager pin` and review the difference"));
        }
    }
    Ok(())
}
