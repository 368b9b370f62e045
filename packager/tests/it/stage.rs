// SPDX-License-Identifier: Apache-2.0
//! Staging: what ships, what is dropped and said to be, what is refused.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use packager::{
    digest::digest,
    files::walk,
    manifest::{self, model::RelativePath},
    stage::{Dropped, Items, collect, stage},
};
use tempfile::{TempDir, tempdir};

use crate::support::{MINIMAL, write};

struct Trial {
    dir: TempDir,
}

impl Trial {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = tempdir().expect("dir");
        fs::create_dir(dir.path().join("tree")).expect("tree");
        for (path, content) in files {
            write(&dir.path().join("tree"), path, content);
        }
        Self { dir }
    }

    fn tree(&self) -> std::path::PathBuf {
        self.dir.path().join("tree")
    }

    fn stage(&self) -> Result<(Vec<String>, Vec<Dropped>), packager::error::Failure> {
        let manifest = manifest::read(MINIMAL, self.dir.path()).expect("a good manifest");
        let out = self.dir.path().join("out");
        let dropped = stage(&manifest, None, self.dir.path(), &out)?;
        Ok((walk(&out)?.into_iter().map(|entry| entry.path).collect(), dropped))
    }

    fn refused(&self, name: &str, why: &str) {
        let failure = self.stage().expect_err("refused");
        let text = failure.to_string();
        assert!(text.contains(name) && text.contains(why) && !failure.next.is_empty(), "{text}");
    }
}

#[test]
fn case_26_what_is_dropped_is_listed() {
    let files = [
        ("a.py", ""),
        ("__pycache__/a.pyc", ""),
        ("b.pyc", ""),
        ("w/model.safetensors", ""),
        ("w/logs/x", ""),
        ("keep.logs", ""),
        ("Logs/x", ""),
    ];
    let (kept, dropped) = Trial::new(&files).stage().expect("staged");
    assert_eq!(kept, ["Logs", "Logs/x", "a.py", "keep.logs", "w"]);
    let dropped: Vec<(&str, &str)> = dropped.iter().map(|d| (d.path.as_str(), d.pattern)).collect();
    assert_eq!(
        dropped,
        [
            ("__pycache__", "__pycache__"),
            ("b.pyc", "*.pyc"),
            ("w/logs", "logs"),
            ("w/model.safetensors", "*.safetensors")
        ]
    );
}

#[test]
fn a_file_entry_is_never_dropped() {
    let trial = Trial::new(&[("w/table.bin", "x"), ("w/other.bin", "y")]);
    let (mut items, mut dropped) = (Items::new(), Vec::new());
    collect(&trial.tree(), &[RelativePath("w/table.bin".into())], &mut items, &mut dropped)
        .expect("collected");
    assert!(items.contains_key("w/table.bin") && items.len() == 1 && dropped.is_empty());
}

#[test]
fn links_are_replaced_by_what_they_point_to() {
    let trial = Trial::new(&[("real/x.py", "x"), ("run.sh", "#!/bin/sh\n")]);
    symlink("real", trial.tree().join("linked")).expect("link");
    symlink("real/x.py", trial.tree().join("y.py")).expect("link");
    fs::set_permissions(trial.tree().join("run.sh"), fs::Permissions::from_mode(0o700)).expect("mode");
    let (kept, _) = trial.stage().expect("staged");
    assert_eq!(kept, ["linked", "linked/x.py", "real", "real/x.py", "run.sh", "y.py"]);
    let out = trial.dir.path().join("out");
    assert!(out.join("y.py").symlink_metadata().expect("meta").is_file());
    assert_eq!(out.join("run.sh").metadata().expect("meta").permissions().mode() & 0o777, 0o755);
}

#[test]
fn later_roots_overwrite_earlier_ones() {
    let dir = tempdir().expect("dir");
    write(dir.path(), "one/pkg/a.py", "one");
    write(dir.path(), "one/pkg/b.py", "one");
    write(dir.path(), "two/pkg/a.py", "two");
    let text = MINIMAL
        .replace("[{root: tree, paths: [\".\"]}]", "[{root: one, paths: [pkg]}, {root: two, paths: [pkg]}]");
    let manifest = manifest::read(&text, dir.path()).expect("good");
    let out = dir.path().join("out");
    stage(&manifest, None, dir.path(), &out).expect("staged");
    let read = |path: &str| fs::read_to_string(out.join(path)).expect("file");
    assert_eq!((read("pkg/a.py").as_str(), read("pkg/b.py").as_str()), ("two", "one"));
}

#[test]
fn case_14_env_files_and_tokens_are_refused_by_name() {
    Trial::new(&[("sub/.env", "A=1")]).refused("sub/.env", "secrets");
    Trial::new(&[(".env.production", "A=1")]).refused(".env.production", "secrets");
    let token = format!("hf_{}", "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA12");
    let trial = Trial::new(&[("deep/conf.py", &format!("# one\nTOKEN = '{token}'\n"))]);
    trial.refused("deep/conf.py", "line 2");
    let shown = trial.stage().expect_err("refused").to_string();
    assert!(!shown.contains(&token), "the message must not repeat the secret");
}

#[test]
fn case_15_git_directories_are_never_staged_nor_hashed() {
    Trial::new(&[("a.py", ""), (".git/config", "[remote]")]).refused(".git", "credentials");
    Trial::new(&[("a.py", ""), ("sub/.git", "gitdir: elsewhere")]).refused("sub/.git", "credentials");
    let trial = Trial::new(&[("a.py", "")]);
    write(trial.dir.path(), "tree/x/.git/config", "secret");
    symlink("x/.git/config", trial.tree().join("innocent")).expect("link");
    trial.refused("innocent", ".git");
}

#[test]
fn case_16_links_that_leave_the_tree_dangle_or_loop_are_refused() {
    let trial = Trial::new(&[("a.py", "")]);
    write(trial.dir.path(), "outside.txt", "secret");
    symlink("../outside.txt", trial.tree().join("out.txt")).expect("link");
    trial.refused("out.txt", "outside");

    let trial = Trial::new(&[("a.py", "")]);
    symlink("nowhere", trial.tree().join("dangling")).expect("link");
    trial.refused("dangling", "No such file");

    let trial = Trial::new(&[("d/a.py", "")]);
    symlink("..", trial.tree().join("d/up")).expect("link");
    trial.refused("d/up", "holds it");
}

#[test]
fn case_14_a_token_across_the_border_of_two_pieces_of_a_file_is_found() {
    let token = format!("hf_{}", "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA12");
    let content = format!("{}\n{token}\n", "x".repeat((1 << 20) - 10));
    Trial::new(&[("big.txt", &content)]).refused("big.txt", "line 2");
}

#[test]
fn staged_code_has_the_digest_of_its_source() {
    let trial = Trial::new(&[("pkg/a.py", "1"), ("pkg/b/c.py", "2"), (".hidden", "3")]);
    trial.stage().expect("staged");
    let of = |path: &Path| digest(path).expect("digest").code_sha256;
    assert_eq!(of(&trial.tree()), of(&trial.dir.path().join("out")));
}
