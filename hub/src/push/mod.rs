// SPDX-License-Identifier: Apache-2.0
//! Files out: a directory becomes what a repository shows, in one step, or the repository shows what it showed before.
//!
//! A push flows one way: [`target`] (who, where, what is there) → [`Plan`] → [`lfs`] (what the storage lacks) →
//! [`commit`] (everything at once, on the commit that was looked at) → [`readback`] (list and bytes). If what comes
//! back is wrong, a second commit puts the old files back.
//!
//! What only the real Hub can prove: that it still takes the `basic` and `multipart` transfers of Git LFS instead of
//! Xet for every repository, its limits on sizes, counts and rates, what it checks of a card, and how long it takes to
//! serve what was committed. All else is tested against a stand-in that speaks the same requests.

pub mod commit;
pub mod lfs;
pub mod local;
pub mod readback;
pub mod target;

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use self::{
    commit::{Change, Commit},
    lfs::Storage,
};
pub use self::{
    local::Local,
    target::{Remote, Visibility, check_card, check_permission, look},
};
use crate::{
    error::{Error, Kind, Result},
    http::{Call, Client},
    listing::{File, Id},
};

/// What is to be shown.
#[derive(Debug, Clone)]
pub struct Push {
    /// Every file of it.
    pub files: Vec<Local>,
    /// Directories, ending in "/", that hold nothing else afterwards.
    pub owned: Vec<String>,
    /// First line of the commit's message.
    pub summary: String,
    /// Who may see the repository; of a new one its owners, of another one as it is, if none is given.
    pub visibility: Option<Visibility>,
}

/// What a push has to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Files that are new or have other bytes.
    pub changed: Vec<Local>,
    /// Files that go away.
    pub removed: Vec<String>,
}

/// What a push did.
#[derive(Debug, Clone, Serialize)]
pub struct Pushed {
    /// organisation/name.
    pub repo: String,
    /// Branch.
    pub revision: String,
    /// The commit that shows the files.
    pub commit: String,
    /// True if the repository was created.
    pub created: bool,
    /// Who may see it.
    pub visibility: Visibility,
    /// Files that are shown.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Paths that were added or changed.
    pub changed: Vec<String>,
    /// Paths that were removed.
    pub removed: Vec<String>,
    /// Bytes that were sent.
    pub sent: u64,
}

/// Files below the owned directories that are not wanted.
fn stale(files: &[File], wanted: &[Local], owned: &[String]) -> Vec<String> {
    let wanted: HashSet<&str> = wanted.iter().map(|file| file.path.as_str()).collect();
    let below = |path: &str| owned.iter().any(|dir| path.starts_with(dir.as_str()));
    let stale = files.iter().filter(|file| below(&file.path) && !wanted.contains(file.path.as_str()));
    stale.map(|file| file.path.clone()).collect()
}

/// Compares what is wanted with what is there.
pub fn plan(remote: &Remote, push: &Push) -> Plan {
    let there: BTreeMap<&str, &File> = remote.files.iter().map(|file| (file.path.as_str(), file)).collect();
    let same = |local: &&Local| !there.get(local.path.as_str()).is_some_and(|file| local.is(file));
    Plan {
        changed: push.files.iter().filter(same).cloned().collect(),
        removed: stale(&remote.files, &push.files, &push.owned),
    }
}

/// Pushes: afterwards `remote` shows `push`, which was read back, or an error says what it shows.
///
/// # Errors
/// The first fault that no retry mends. What arrived in the storage until then is not sent again.
pub async fn push(client: &Client<'_>, mut remote: Remote, push: &Push) -> Result<Pushed> {
    let created = remote.visibility.is_none();
    let first = push.visibility.unwrap_or(Visibility::Private);
    if created {
        client.progress.note(&format!("creating {} ({})", remote.repo, first.name()));
        target::create(client, &remote.repo, first).await?;
        remote = look(client, &remote.repo, &remote.revision).await?;
    }
    let now = remote.visibility.unwrap_or(first);
    let wanted = push.visibility.unwrap_or(now);
    // Hidden before anything new is shown, shown after everything is proved.
    if wanted != now && wanted == Visibility::Private {
        set_visibility(client, &remote.repo, wanted).await?;
    }
    if !remote.branch {
        target::create_branch(client, &remote).await?;
    }

    let plan = plan(&remote, push);
    let (commit, sent) = if plan.changed.is_empty() && plan.removed.is_empty() {
        let all: Vec<&Local> = push.files.iter().collect();
        readback::check(client, &remote.repo, &remote.head, &push.files, &push.owned, &all).await?;
        (remote.head.clone(), 0)
    } else {
        send(client, &remote, push, &plan).await?
    };
    if wanted != now && wanted == Visibility::Public {
        set_visibility(client, &remote.repo, wanted).await?;
    }
    Ok(Pushed {
        repo: remote.repo,
        revision: remote.revision,
        commit,
        created,
        visibility: wanted,
        files: push.files.len(),
        bytes: push.files.iter().map(|file| file.size).sum(),
        changed: plan.changed.into_iter().map(|file| file.path).collect(),
        removed: plan.removed,
        sent,
    })
}

async fn set_visibility(client: &Client<'_>, repo: &str, visibility: Visibility) -> Result<()> {
    client.progress.note(&format!("making {repo} {}", visibility.name()));
    target::set_visibility(client, repo, visibility).await
}

/// The transfers, the commit and the proof. Returns the commit and the bytes that were sent.
async fn send(client: &Client<'_>, remote: &Remote, push: &Push, plan: &Plan) -> Result<(String, u64)> {
    let Remote { repo, revision, head, .. } = remote;
    let changed: Vec<&Local> = plan.changed.iter().collect();
    let modes = commit::stored(client, repo, revision, &changed).await?;
    let mut seen = HashSet::new();
    let large = changed.iter().zip(&modes).filter(|(_, stored)| **stored).map(|(file, _)| *file);
    let large: Vec<&Local> = large.filter(|file| seen.insert(&file.sha256)).collect();
    let small = changed.iter().zip(&modes).filter(|(_, stored)| !**stored).map(|(file, _)| file.size);
    let small: u64 = small.sum();
    let total = small + large.iter().map(|file| file.size).sum::<u64>();
    client.progress.start(total, 0, changed.len());
    let storage = Storage { client, repo, revision };
    let result = async {
        let sent = storage.upload(&large).await?;
        let sent = large.iter().filter(|file| sent.contains(&file.path)).map(|file| file.size).sum::<u64>();
        let changes = changed.iter().zip(&modes).map(|(file, stored)| match stored {
            true => Change::Stored { path: file.path.clone(), sha256: file.sha256.clone(), size: file.size },
            false => Change::Inline((*file).clone()),
        });
        let removals = plan.removed.iter().cloned().map(Change::Remove);
        let changes: Vec<Change> = changes.chain(removals).collect();
        let commit = Commit { repo, revision, parent: head, summary: &push.summary, changes: &changes };
        let done = |files: &[File]| readback::difference(files, &push.files, &push.owned).is_none();
        Ok((commit.make(client, done).await?, sent + small))
    }
    .await;
    client.progress.finish();
    let (commit, sent) = result?;
    match readback::check(client, repo, &commit, &push.files, &push.owned, &changed).await {
        Ok(()) => Ok((commit, sent)),
        Err(error) if error.kind == Kind::Verification => {
            Err(put_back(client, remote, plan, &commit, error).await)
        }
        Err(error) => Err(Error {
            what: format!("{repo}@{commit} was pushed and could not be read back: {}", error.what),
            next: "run the command again: it sends nothing that is there, and reads everything back".into(),
            ..error
        }),
    }
}

/// What came back was wrong: a second commit shows the old files again.
async fn put_back(client: &Client<'_>, remote: &Remote, plan: &Plan, commit: &str, error: Error) -> Error {
    let Remote { repo, head, .. } = remote;
    let why = match old_files(client, remote, plan, commit).await {
        Ok(()) => format!("{}; the repository shows the files of {head} again", error.why),
        Err(second) => format!(
            "{}; putting the files of {head} back failed too ({second}), so the repository shows {commit}",
            error.why
        ),
    };
    client.progress.note(&format!("{repo}: {why}"));
    error.why(why)
}

async fn old_files(client: &Client<'_>, remote: &Remote, plan: &Plan, commit: &str) -> Result<()> {
    let Remote { repo, revision, head, files, .. } = remote;
    let paths = plan.changed.iter().map(|file| &file.path).chain(&plan.removed);
    let mut changes = Vec::new();
    for path in paths {
        changes.push(match files.iter().find(|file| file.path == *path) {
            None => Change::Remove(path.clone()),
            Some(File { id: Id::Sha256(sha256), size, .. }) => {
                Change::Stored { path: path.clone(), sha256: sha256.clone(), size: *size }
            }
            Some(file) => {
                let call = Call::get(client.file_url(repo, head, path)?);
                let answer = client.ask(&format!("getting the old {path}"), repo, &call, &[]).await?;
                let old = Local::bytes(path, answer.body.into());
                if !old.is(file) {
                    return Err(Error::new(Kind::Verification, format!("the old {path} comes back damaged")));
                }
                Change::Inline(old)
            }
        });
    }
    let summary = "Put the files back that a push was to replace";
    // The Hub writes .gitattributes itself.
    let old = |file: &&File| file.path != ".gitattributes";
    let done = |now: &[File]| files.iter().filter(old).all(|file| now.contains(file));
    Commit { repo, revision, parent: commit, summary, changes: &changes }.make(client, done).await.map(|_| ())
}
