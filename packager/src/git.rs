// SPDX-License-Identifier: Apache-2.0
//! Git sources through the `git` program: resolving a ref to one commit, checking out that commit.

use std::{
    path::Path,
    process::{Command, Stdio},
};

pub use hub::repo::is_commit;
use tempfile::TempDir;

use crate::{
    error::{At, Class, Failure, Result},
    manifest::model::{GitSource, RelativePath},
};

fn git(dir: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.current_dir(dir).args(arguments).stdin(Stdio::null()).env("GIT_TERMINAL_PROMPT", "0");
    let what = || format!("git {}", arguments.join(" "));
    let output = command
        .output()
        .map_err(|error| Failure::new(Class::Failure, what()).why(error).next("install git"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let last = message.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no message").to_owned();
    Err(Failure::new(Class::Network, what()).why(last).next("check the URL, the ref and the network"))
}

/// The commit that a ref names now. Full names are asked for: a listing by suffix would also return
/// `feature/main` for `main`. A short commit id cannot be resolved this way and is refused.
pub fn resolve(source: &GitSource) -> Result<String> {
    if is_commit(&source.reference) {
        return Ok(source.reference.clone());
    }
    let name = &source.reference;
    let (tag, peeled, branch) =
        (format!("refs/tags/{name}"), format!("refs/tags/{name}^{{}}"), format!("refs/heads/{name}"));
    let listing = git(Path::new("."), &["ls-remote", "--", &source.repo, &tag, &peeled, &branch, name])?;
    let find = |wanted: &str| {
        let line =
            listing.lines().find_map(|line| line.split_once('\t').filter(|(_, found)| *found == wanted));
        line.map(|(commit, _)| commit.to_owned())
    };
    [&peeled, &tag, &branch, name].into_iter().find_map(|wanted| find(wanted)).ok_or_else(|| {
        let failure = Failure::new(Class::Manifest, format!("{} has no tag or branch {name}", source.repo));
        failure.next("give a tag, a branch or the full 40 digits of a commit")
    })
}

/// Checks out the wanted paths of one commit into a temporary directory without `.git`.
pub fn checkout(source: &GitSource, commit: Option<String>, paths: &[RelativePath]) -> Result<TempDir> {
    let commit = commit.map_or_else(|| resolve(source), Ok)?;
    let clone = tempfile::tempdir().at("create", Path::new("a temporary directory"))?;
    let dir = clone.path();
    git(dir, &["init", "--quiet"])?;
    git(dir, &["remote", "add", "origin", &source.repo])?;
    git(dir, &["fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", &commit])?;
    let mut arguments = vec!["checkout", "--quiet", &commit, "--"];
    arguments.extend(paths.iter().map(|path| path.0.as_str()));
    git(dir, &arguments)?;
    std::fs::remove_dir_all(dir.join(".git")).at("remove", &dir.join(".git"))?;
    Ok(clone)
}

/// Commit of a working tree, and whether it differs from it; none outside of Git.
pub fn describe(dir: &Path) -> Option<(String, bool)> {
    let commit = git(dir, &["rev-parse", "HEAD"]).ok()?.trim().to_owned();
    let status = git(dir, &["status", "--porcelain"]).ok()?;
    Some((commit, !status.trim().is_empty()))
}

/// Time of the last commit, seconds since 1970; none outside of Git.
pub fn commit_time(dir: &Path) -> Option<i64> {
    git(dir, &["log", "-1", "--format=%ct"]).ok()?.trim().parse().ok()
}
