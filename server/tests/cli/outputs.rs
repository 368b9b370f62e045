// SPDX-License-Identifier: Apache-2.0
//! The output path: known to be good before the work, whole or untouched after it.

use std::{fs, os::unix::fs::PermissionsExt};

use crate::support::{Place, tiny, tiny_copy};

#[test]
fn a_path_that_cannot_be_written_is_refused_before_the_work() {
    let place = Place::new();
    place
        .generate_with(&place.path("nowhere"), &["a fox", "--width=64", "--height=64", "--out=a/b/out.png"])
        .failed(2, &["--out a/b/out.png", "directory does not exist"]);
    // Nobody may make files there, not even root.
    place.generate(&["a fox", "--out", "/proc/out.png"]).failed(2, &["--out /proc/out.png"]);
    fs::create_dir(place.path("directory.png")).expect("a directory");
    place.generate(&["a fox", "--out", "directory.png"]).failed(2, &["directory.png", "not a file"]);
    place.generate(&["a fox", "--out", "out.jpg"]).failed(2, &["out.jpg", "PNG"]);
    assert_eq!(place.files(), ["directory.png"]);
}

#[test]
fn a_read_only_picture_is_left_alone() {
    let place = Place::new();
    place.write("out.png", "kept");
    fs::set_permissions(place.path("out.png"), fs::Permissions::from_mode(0o444)).expect("a mode");
    place.generate(&["a fox", "--out", "out.png"]).failed(2, &["out.png", "read-only"]);
    assert_eq!(fs::read(place.path("out.png")).expect("the file"), b"kept");
}

#[test]
fn a_failed_run_leaves_the_earlier_picture() {
    let place = Place::new();
    place.write("out.png", "an earlier picture");
    let checkpoint = tiny_copy(&place);
    fs::remove_file(checkpoint.join("vae/diffusion_pytorch_model.safetensors")).expect("it was there");
    place
        .generate_with(&checkpoint, &["a fox", "--width=64", "--height=64", "--out=out.png"])
        .failed(3, &["vae"]);
    assert_eq!(fs::read(place.path("out.png")).expect("the file"), b"an earlier picture");
    assert_eq!(place.files(), ["checkpoint", "out.png"]);
}

#[test]
fn a_picture_replaces_the_earlier_one_and_keeps_a_link() {
    let place = Place::new();
    place.write("target.png", "an earlier picture");
    std::os::unix::fs::symlink("target.png", place.path("out.png")).expect("a link");
    place.generate(&["a fox", "--out", "out.png"]).succeeded();
    assert!(place.path("out.png").is_symlink());
    assert_eq!(place.pixels("target.png").dimensions(), (64, 64));
    let mode = fs::metadata(place.path("target.png")).expect("the file").permissions().mode();
    assert_eq!(mode & 0o444, 0o444, "readable as any new file is, not only by its owner");
    assert_eq!(place.files(), ["out.png", "target.png"]);
}

#[test]
fn standard_output_is_the_path_and_standard_error_the_progress() {
    let place = Place::new();
    let end = place.generate(&["a fox"]);
    assert_eq!(end.succeeded().stdout, "flux2-42.png\n");
    for part in ["loaded", "text encoder", "step 4 of 4", "denoising", "VAE decode", " s\n"] {
        assert!(end.stderr.contains(part), "no {part:?} in {end:?}");
    }
    assert!(!end.stderr.contains('\u{1b}'), "no escape codes where nobody sees them: {end:?}");
}

#[test]
fn a_terminal_gets_a_bar() {
    let place = Place::new();
    let mut command = place.command(&[]);
    let binary = command.get_program().to_str().expect("UTF-8").to_owned();
    command = std::process::Command::new("script");
    let tiny = crate::support::tiny();
    let line = format!(
        "{binary} generate fox --allow-small --width=64 --height=64 --checkpoint={} --out={}",
        tiny.display(),
        place.path("out.png").display()
    );
    let output = command.args(["-qec", &line, "/dev/null"]).output().expect("script, of Debian's bsdutils");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}");
    assert!(shown.contains("denoising") && shown.contains(" %"), "{shown}");
    assert!(!shown.contains("step 4 of 4"), "{shown}");
    assert_eq!(place.files(), ["out.png"]);
}

/// `println!` panics where its reader is gone; the commands' own printing does not.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let place = Place::new();
    let tiny = tiny();
    let checkpoint = tiny.to_str().expect("UTF-8");
    for arguments in [
        &["plan"][..],
        &["plan", "--json"],
        &["check", "--checkpoint", checkpoint],
        &["config", "--checkpoint", checkpoint],
        &["doctor", "--port", "0", "--checkpoint", checkpoint],
        &["generate", "a fox", "--allow-small", "--width=16", "--height=16", "--checkpoint", checkpoint],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let errors = writer.try_clone().expect("a pipe");
        let status =
            place.command(arguments).stdout(writer).stderr(errors).status().expect("the binary runs");
        assert_eq!(status.code(), Some(0), "{arguments:?}");
    }
}
