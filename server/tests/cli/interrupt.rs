// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C and SIGTERM: exit code 130, no half file.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use crate::support::{Place, tiny};

/// Starts a picture that takes a minute, sends `signal` after the line that holds `after`; exit code and what it said.
fn interrupted(place: &Place, signal: &str, after: &str) -> (Option<i32>, String) {
    let tiny = tiny();
    let checkpoint = tiny.to_str().expect("UTF-8");
    let mut child = place
        .command(&["generate", "a fox", "--checkpoint", checkpoint, "--out=out.png"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut lines = BufReader::new(child.stderr.take().expect("standard error")).lines();
    let mut said = String::new();
    while !said.contains(after) {
        said += &lines.next().expect("not the end").expect("UTF-8");
    }
    let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
    assert!(kill.success());
    said.extend(lines.map(|line| line.expect("UTF-8")));
    let status = child.wait().expect("an end");
    assert!(!said.contains("step 4 of 4"), "not stopped but finished: {said}");
    (status.code(), said)
}

#[test]
fn case_48_without_a_size_it_is_1024_and_ctrl_c_leaves_no_file() {
    let place = Place::new();
    let (code, said) = interrupted(&place, "-INT", "text encoder");
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("1024×1024"), "{said}");
    assert!(said.contains("interrupted, nothing was written"), "{said}");
    assert!(place.files().is_empty());
}

#[test]
fn sigterm_keeps_the_earlier_picture() {
    let place = Place::new();
    place.write("out.png", "an earlier picture");
    let (code, said) = interrupted(&place, "-TERM", "step 1 of 4");
    assert_eq!(code, Some(130), "{said}");
    assert_eq!(std::fs::read(place.path("out.png")).expect("the file"), b"an earlier picture");
    assert_eq!(place.files(), ["out.png"]);
}
