// SPDX-License-Identifier: Apache-2.0
//! What cannot be asked for: exit code 2, one sentence, nothing written.

use crate::support::{Place, test_image, tiny};

#[track_caller]
fn refused(arguments: &[&str], words: &[&str]) {
    let place = Place::new();
    let tiny = tiny();
    let checkpoint = ["generate", "--checkpoint", tiny.to_str().expect("UTF-8")];
    place.run(&[&checkpoint, arguments].concat()).failed(2, words);
    assert!(place.files().is_empty());
}

#[test]
fn a_size_outside_the_range_is_refused_with_the_range() {
    refused(&["a fox", "--width", "504"], &["width", "504", "512", "1920"]);
    refused(&["a fox", "--height", "1928"], &["height", "1928", "512", "1920"]);
    refused(&["a fox", "--width", "0"], &["width"]);
    refused(&["a fox", "--width", "wide"], &["--width", "wide"]);
}

#[test]
fn a_size_off_the_grid_is_refused_with_the_grid() {
    refused(&["a fox", "--width", "516"], &["width", "516", "multiple of 8"]);
}

#[test]
fn too_many_pixels_are_refused_with_the_limit() {
    refused(&["a fox", "--width", "1920", "--height", "1920"], &["1920 x 1920", "2088960"]);
}

#[test]
fn an_empty_prompt_is_refused() {
    refused(&[""], &["prompt", "empty"]);
    refused(&[" \n\t "], &["prompt", "empty"]);
    refused(&[], &["<PROMPT>"]);
}

#[test]
fn a_prompt_over_the_limit_is_refused_with_both_lengths() {
    refused(&[&"x".repeat(4001)], &["prompt", "4001", "4000"]);
}

#[test]
fn a_seed_out_of_range_is_refused_with_the_range() {
    for seed in ["-1", "9007199254740992", "18446744073709551616", "1.5", "1e3", ""] {
        refused(&["a fox", "--seed", seed], &["--seed", "from 0 to 9007199254740991"]);
    }
}

#[test]
fn four_references_are_refused_before_any_is_read() {
    let images = ["--image", "a.png", "--image", "b.png", "--image", "c.png", "--image", "d.png"];
    refused(&[&["a fox"], &images[..]].concat(), &["images", "4", "3"]);
}

#[test]
fn unknown_flags_devices_and_precisions_are_refused_with_what_there_is() {
    refused(&["a fox", "--sampler", "ddim"], &["--sampler"]);
    refused(&["a fox", "--guidance", "3"], &["guidance", "is 3", "none or 1"]);
    refused(&["a fox", "--steps", "8"], &["steps", "is 8", "4"]);
    refused(&["a fox", "--dtype", "fp8"], &["fp8", "f32", "bf16"]);
    refused(&["a fox", "--device", "gpu"], &["gpu", "cpu"]);
    refused(&["a fox", "--threads", "0"], &["--threads"]);
}

#[test]
fn what_the_request_asks_wrongly_is_said_before_the_checkpoint_is_looked_for() {
    let place = Place::new();
    place.save("reference.png", &test_image(64, 64, 1));
    let end = place.run(&[
        "generate",
        "a fox",
        "--image",
        "reference.png",
        "--width",
        "7",
        "--checkpoint",
        "/nowhere",
    ]);
    end.failed(2, &["width", "7"]);
}

#[test]
fn help_names_every_command_and_the_exit_codes() {
    let place = Place::new();
    let help = place.run(&["--help"]);
    for word in ["generate", "plan", "check", "Exit codes", "130"] {
        assert!(help.succeeded().stdout.contains(word), "no {word} in {help:?}");
    }
    let help = place.run(&["generate", "--help"]);
    for word in ["512 to 1920", "steps of 8", "KLEIN_SNAPSHOT", "default: 42"] {
        assert!(help.succeeded().stdout.replace('\n', " ").contains(word), "no {word} in {help:?}");
    }
}
