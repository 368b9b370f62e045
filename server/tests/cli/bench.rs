// SPDX-License-Identifier: Apache-2.0
//! `bench`: what it reports, not how fast it is.

use crate::support::{Place, tiny};

#[test]
fn every_stage_is_reported_with_its_rate_and_memory() {
    let place = Place::new();
    let tiny = tiny();
    let checkpoint = tiny.to_str().expect("UTF-8");
    let common =
        ["bench", "--allow-small", "--size=64x32", "--runs=2", "--references=1", "--checkpoint", checkpoint];
    let answer = place.run(&[&common[..], &["--json"]].concat()).json();
    let size = &answer["sizes"][0];
    assert_eq!(
        (size["width"].as_u64(), size["height"].as_u64(), size["runs"].as_u64()),
        (Some(64), Some(32), Some(2))
    );
    assert!(size["peak_anonymous_bytes"].as_u64() > Some(0) && answer["peak_tflops"].as_f64() > Some(0.0));
    for stage in ["text_encoder", "reference_encode", "context", "dit", "vae_decode", "picture"] {
        let stage = &size["stages"][stage];
        assert!(stage["min_s"].as_f64() <= stage["median_s"].as_f64() && stage["tflop"].as_f64() > Some(0.0));
    }
    let table = place.run(&[&common[..], &["--stages"]].concat());
    table.succeeded();
    assert!(table.stdout.contains("64×32") && table.stdout.contains("vae_decode"), "{}", table.stdout);
}

#[test]
fn what_cannot_run_is_not_measured() {
    let place = Place::new();
    let tiny = tiny();
    let checkpoint = ["--checkpoint", tiny.to_str().expect("UTF-8")];
    place.run(&[&["bench", "--size=516x512"], &checkpoint[..]].concat()).failed(2, &["width", "516"]);
    place.run(&[&["bench", "--size=512"], &checkpoint[..]].concat()).failed(2, &["512x512"]);
}
