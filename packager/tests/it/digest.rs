// SPDX-License-Identifier: Apache-2.0
//! Both digests: the published vectors, a Python re-implementation beside ours, and the properties
//! that the framed digest has and the published one lacks.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    process::Command,
};

use packager::digest::digest;
use proptest::prelude::*;
use tempfile::tempdir;

use crate::support::{packager, repository, write};

#[test]
fn the_published_vector_holds() {
    let dir = tempdir().expect("dir");
    for (path, content) in [
        ("models/common/mod.py", "x = 1\n"),
        ("pkg/__init__.py", ""),
        ("pkg/a.py", "A"),
        ("pkg-extra/b.py", "B"),
    ] {
        write(dir.path(), path, content);
    }
    assert_eq!(
        digest(dir.path()).expect("digest").code_sha256,
        "cb0dee45eaa8dc942ce9d77180ccb85385cd0874a391fcbcdd11ca13cd9638df"
    );
}

/// Dotfiles, names beyond ASCII, links to a file and to a directory, an empty directory. The value is
/// what CPython 3.12 computes with the format's algorithm on this tree.
#[test]
fn a_tree_with_every_kind_of_entry_has_the_digest_of_the_format() {
    let dir = tempdir().expect("dir");
    let files = [
        ("foo/x", "1\n"),
        ("foo-bar/x", "2\n"),
        ("foo.txt", "3\n"),
        (".hid/y", "4\n"),
        (".dot", "5\n"),
        ("a/empty", ""),
        ("Z/q", "6\n"),
        ("é.txt", "7\n"),
    ];
    for (path, content) in files {
        write(dir.path(), path, content);
    }
    symlink("../foo/x", dir.path().join("a/link")).expect("link");
    symlink("../foo", dir.path().join("a/dlink")).expect("link");
    fs::create_dir(dir.path().join("empty")).expect("dir");
    assert_eq!(
        digest(dir.path()).expect("digest").code_sha256,
        "3ef17d6545412c3e722c06789add95339c27e862076a9b1214eb6c38e85353f7"
    );
}

/// The published algorithm, written again from its description.
const PYTHON: &str = r#"
import hashlib, os, sys
for root in sys.argv[1:]:
    found = []
    for base, dirs, files in os.walk(root):
        for name in files:
            full = os.path.join(base, name)
            if os.path.isfile(full):
                found.append(os.path.relpath(full, root).split("/"))
    state = hashlib.sha256()
    for parts in sorted(found):
        state.update("/".join(parts).encode("utf-8"))
        state.update(open(os.path.join(root, *parts), "rb").read())
    print(state.hexdigest())
"#;

#[test]
fn two_hundred_random_trees_have_the_digest_that_python_computes() {
    let dir = tempdir().expect("dir");
    let mut state = 42_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let names =
        ["a", "b.txt", ".dot", "foo", "foo-bar", "foo.txt", "é", "日本", "Z", "with space", "a+b", "~"];
    let mut roots = Vec::new();
    for tree in 0..200 {
        let root = dir.path().join(tree.to_string());
        fs::create_dir(&root).expect("dir");
        for _ in 0..random(12) {
            let path: Vec<&str> = (0..=random(3)).map(|_| names[random(names.len())]).collect();
            let full = root.join(path.join("/"));
            let made = full.parent().map(fs::create_dir_all).is_some_and(|result| result.is_ok());
            if !made || full.symlink_metadata().is_ok() {
                continue;
            }
            match random(6) {
                0 => symlink(names[random(names.len())], &full).expect("link"),
                1 => fs::create_dir(&full).expect("dir"),
                _ => fs::write(&full, "x".repeat(random(40))).expect("file"),
            }
        }
        roots.push(root);
    }
    let output = Command::new("python3")
        .args(["-c", PYTHON])
        .args(&roots)
        .output()
        .expect("python3 is needed to compare with");
    let theirs = String::from_utf8(output.stdout).expect("UTF-8");
    let theirs: Vec<&str> = theirs.lines().collect();
    assert_eq!(theirs.len(), 200, "{}", String::from_utf8_lossy(&output.stderr));
    for (root, expected) in roots.iter().zip(theirs) {
        assert_eq!(digest(root).expect("digest").code_sha256, expected, "{}", root.display());
    }
}

fn framed(root: &Path) -> String {
    digest(root).expect("digest").code_tree_sha256
}

#[test]
fn case_25_a_moved_boundary_collides_in_the_published_digest_only() {
    let (one, two) = (tempdir().expect("dir"), tempdir().expect("dir"));
    write(one.path(), "ab", "c");
    write(two.path(), "a", "bc");
    let (first, second) = (digest(one.path()).expect("digest"), digest(two.path()).expect("digest"));
    assert_eq!(first.code_sha256, second.code_sha256, "as the published format has it");
    assert_ne!(first.code_tree_sha256, second.code_tree_sha256);
}

#[test]
fn case_25_modes_links_and_empty_directories_change_the_framed_digest() {
    let dir = tempdir().expect("dir");
    write(dir.path(), "run", "#!/bin/sh\n");
    write(dir.path(), "copy", "#!/bin/sh\n");
    let mut seen = vec![framed(dir.path())];
    let mut differs = |what: &str| {
        let now = framed(dir.path());
        assert!(!seen.contains(&now), "{what}");
        seen.push(now);
    };
    fs::set_permissions(dir.path().join("run"), fs::Permissions::from_mode(0o755)).expect("mode");
    differs("an executable bit");
    fs::create_dir(dir.path().join("empty")).expect("dir");
    differs("an empty directory");
    fs::remove_file(dir.path().join("copy")).expect("remove");
    symlink("run", dir.path().join("copy")).expect("link");
    differs("a link instead of a copy");
    fs::rename(dir.path().join("empty"), dir.path().join("other")).expect("rename");
    differs("a renamed directory");
}

proptest! {
    /// Two trees of up to four files have one framed digest only if they are the same tree.
    #[test]
    fn case_25_different_trees_have_different_framed_digests(
        one in proptest::collection::btree_map("[ab]{1,3}", ("[ab]{0,3}", any::<bool>()), 0..4),
        two in proptest::collection::btree_map("[ab]{1,3}", ("[ab]{0,3}", any::<bool>()), 0..4),
    ) {
        let make = |tree: &std::collections::BTreeMap<String, (String, bool)>| {
            let dir = tempdir().expect("dir");
            for (path, (content, executable)) in tree {
                write(dir.path(), path, content);
                fs::set_permissions(dir.path().join(path), fs::Permissions::from_mode(if *executable { 0o755 } else { 0o644 })).expect("mode");
            }
            framed(dir.path())
        };
        prop_assert_eq!(one == two, make(&one) == make(&two));
    }
}

#[test]
fn the_command_prints_both_digests() {
    let output = packager(&repository(), &["digest", "code", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["code_sha256"].as_str().map(str::len), Some(64));
    assert_eq!(value["code_tree_sha256"].as_str().map(str::len), Some(64));
    assert_eq!(packager(&repository(), &["digest", "no-such-directory"]).status.code(), Some(2));
}
