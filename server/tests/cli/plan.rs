// SPDX-License-Identifier: Apache-2.0
//! `plan`: from configurations alone.

use crate::support::{Place, mini};

#[test]
fn the_published_model_is_counted_without_weights() {
    let place = Place::new();
    let answer = place.run(&["plan", "--json"]).json();
    // Parameters as in the published files: all of the transformer's; the encoder's first 27 of 36 layers.
    assert_eq!(answer["parameters"]["transformer"], 3_875_544_576_u64);
    assert_eq!(answer["sequence"], 512 + 64 * 64);
    // Two per multiply-add, attention 4·n²·width per block: 2.7 TFLOP of the encoder's matrices, 33 a step of the DiT's.
    let tera = |value: &serde_json::Value| value["flops"].as_f64().expect("a number") / 1e12;
    let stages = answer["stages"].as_array().expect("stages");
    let names: Vec<_> = stages.iter().map(|stage| stage["stage"].as_str().expect("a name")).collect();
    assert_eq!(names, ["text_encoder", "context", "dit", "vae_decode"]);
    assert!((2.7..3.1).contains(&tera(&stages[0])), "{}", tera(&stages[0]));
    assert!((125.0..155.0).contains(&tera(&stages[2])), "{}", tera(&stages[2]));
    let sum: f64 = stages.iter().map(tera).sum();
    assert!((sum - tera(&answer)).abs() < 1e-6);
}

#[test]
fn references_size_and_checkpoint_change_the_count() {
    let place = Place::new();
    let plain = place.run(&["plan", "--json", "--width=512", "--height=512"]).json();
    let more = place.run(&["plan", "--json", "--width=512", "--height=512", "--references=2"]).json();
    assert_eq!(more["sequence"].as_u64(), plain["sequence"].as_u64().map(|rows| rows + 2 * 64 * 64));
    assert_eq!(more["stages"][1]["stage"], "reference_encode");
    let mini = mini();
    let small = place.run(&["plan", "--json", "--checkpoint", mini.to_str().expect("UTF-8")]).json();
    assert_eq!(small["parameters"]["transformer"], 3_748_352);
    let table = place.run(&["plan", "--width=512", "--height=768"]);
    for word in ["FLUX.2-klein-4B", "512×768", "TFLOP", "vae_decode"] {
        assert!(table.succeeded().stdout.contains(word), "{table:?}");
    }
}

/// Sizes and costs of FLUX.2 [dev], worked out from its shapes by hand: 50 steps of 282.6 TFLOP at 1024².
#[test]
fn dev_is_counted_with_what_its_padding_saves() {
    let place = Place::new();
    let answer = place.run(&["plan", "--model=dev", "--prompt-tokens=45", "--json"]).json();
    assert_eq!((&answer["model"], &answer["steps"]), (&"FLUX.2-dev".into(), &50.into()));
    assert_eq!(answer["parameters"]["text_encoder"], 17_343_754_240_u64);
    assert_eq!(answer["weight_bytes"]["transformer"], 64_446_562_304_u64);
    let number = |value: &serde_json::Value| value.as_f64().expect("a number") / 1e12;
    let dit = answer["stages"]
        .as_array()
        .expect("stages")
        .iter()
        .find(|stage| stage["stage"] == "dit")
        .expect("a stage");
    assert!((14_000.0..14_300.0).contains(&number(&dit["flops"])), "{dit}");
    let padding = &answer["padding"];
    assert_eq!(padding["positions"], 467);
    assert!((1.5..1.6).contains(&number(&padding["flops"])), "{padding}");
    assert!((17.0..17.4).contains(&number(&padding["flops_of_all_rows"])), "{padding}");
    let table = place.run(&["plan", "--model=dev", "--prompt-tokens=45"]);
    for words in [
        "text encoder 34.69 GB, transformer 64.45 GB, VAE 0.17 GB; 99.30 GB in all",
        "one row of the text encoder stands for 467 before the prompt",
    ] {
        assert!(table.succeeded().stdout.contains(words), "{words}: {table:?}");
    }
    // Nothing is saved by a full prompt, nor where padding comes after it.
    for arguments in [&["plan", "--model=dev", "--json"][..], &["plan", "--prompt-tokens=24", "--json"]] {
        assert!(place.run(arguments).json()["padding"].is_null(), "{arguments:?}");
    }
}

#[test]
fn what_cannot_run_is_not_planned() {
    let place = Place::new();
    place.run(&["plan", "--width=516"]).failed(2, &["width", "516"]);
    place.run(&["plan", "--references=4"]).failed(2, &["images", "4"]);
    place.run(&["plan", "--steps=5"]).failed(2, &["steps", "5"]);
    place.run(&["plan", "--checkpoint=/nowhere"]).failed(3, &["/nowhere"]);
}
