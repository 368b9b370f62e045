// SPDX-License-Identifier: Apache-2.0
//! Pictures: right, of the size asked for, and possible to make again.

use image::RgbImage;

use crate::support::{Place, mini, root, test_image, tiny};

/// No byte differs by more than one level, and at most one in a thousand at all.
#[track_caller]
fn assert_same_picture(got: &RgbImage, wanted: &RgbImage) {
    assert_eq!(got.dimensions(), wanted.dimensions());
    let different = got.iter().zip(wanted.iter()).filter(|(got, wanted)| got != wanted);
    let count = different.clone().count();
    let most = different.map(|(got, wanted)| got.abs_diff(*wanted)).max().unwrap_or(0);
    assert!(most <= 1 && count * 1000 <= got.len(), "{count} of {} bytes differ, by up to {most}", got.len());
}

fn golden(name: &str) -> RgbImage {
    image::open(root().join("examples/klein-mini/goldens").join(name)).expect("a golden picture").into_rgb8()
}

#[test]
fn cases_41_42_a_picture_from_text_is_that_of_diffusers() {
    let place = Place::new();
    let prompt = "a red circle on a blue background";
    let size = ["--width=512", "--height=512", "--seed=1", "--dtype=f32", "--out=out.png"];
    place.generate_with(&mini(), &[&[prompt], &size[..]].concat()).succeeded();
    assert_same_picture(&place.pixels("out.png"), &golden("mini_t2i_512.f32.png"));
}

#[test]
fn case_47_a_picture_from_a_reference_is_that_of_diffusers() {
    let place = Place::new();
    place.save("reference.png", &test_image(512, 512, 1));
    let size = ["--width=512", "--height=512", "--seed=2", "--dtype=f32", "--out=out.png"];
    let request = ["make the circle green", "--image", "reference.png"];
    place.generate_with(&mini(), &[&request, &size[..]].concat()).succeeded();
    assert_same_picture(&place.pixels("out.png"), &golden("mini_ref1_512.f32.png"));
}

#[test]
fn case_44_a_picture_has_exactly_the_size_asked_for() {
    let place = Place::new();
    for (width, height) in [(64, 128), (128, 64), (16, 16), (72, 88), (160, 24), (8 * 31, 8 * 3)] {
        let (w, h) = (width.to_string(), height.to_string());
        let answer =
            place.generate(&["a fox", "--width", &w, "--height", &h, "--out=out.png", "--json"]).json();
        assert_eq!(place.pixels("out.png").dimensions(), (width, height));
        assert_eq!(
            (answer["width"].as_u64(), answer["height"].as_u64()),
            (Some(width.into()), Some(height.into()))
        );
        assert_eq!(place.metadata("out.png")["width"], w);
        assert_eq!(place.metadata("out.png")["height"], h);
    }
}

/// The picture that a reference leads to.
fn with_reference(place: &Place, reference: &RgbImage) -> RgbImage {
    place.save("reference.png", reference);
    place
        .generate(&["an edit", "--image=reference.png", "--width=64", "--height=128", "--out=out.png"])
        .succeeded();
    place.pixels("out.png")
}

#[test]
fn cases_45_46_a_reference_keeps_its_aspect_and_size() {
    let place = Place::new();
    for (width, height) in [(117, 90), (300, 200)] {
        let whole = test_image(width, height, 1);
        // What is not a multiple of 16 is cut from both sides; nothing is squeezed or enlarged.
        let (w, h) = (width / 16 * 16, height / 16 * 16);
        let middle = image::imageops::crop_imm(&whole, (width - w) / 2, (height - h) / 2, w, h).to_image();
        assert_eq!(with_reference(&place, &whole), with_reference(&place, &middle));
        let enlarged = image::imageops::resize(&middle, 2 * w, 2 * h, image::imageops::FilterType::Nearest);
        assert_ne!(with_reference(&place, &middle), with_reference(&place, &enlarged));
    }
}

#[test]
fn case_49_the_size_asked_for_wins_over_a_reference() {
    let place = Place::new();
    place.save("reference.png", &test_image(96, 64, 1));
    let answer =
        place.generate(&["an edit", "--image=reference.png", "--width=64", "--height=128", "--json"]).json();
    assert_eq!((answer["width"].as_u64(), answer["height"].as_u64()), (Some(64), Some(128)));
    assert_eq!((&answer["size_from"], &answer["references"]), (&"asked".into(), &1.into()));
    assert_eq!(place.pixels("flux2-42.png").dimensions(), (64, 128));
}

#[test]
fn cases_52_56_57_a_seed_gives_one_picture_and_is_told_everywhere() {
    let place = Place::new();
    let mut pictures = Vec::new();
    for (seed, threads) in [("5", "1"), ("5", "2"), ("6", "2"), ("42", "2")] {
        let answer = place.generate(&["a fox", "--seed", seed, "--threads", threads, "--json"]).json();
        let file = format!("flux2-{seed}.png");
        assert_eq!((&answer["file"], answer["seed"].to_string()), (&file.as_str().into(), seed.to_owned()));
        assert_eq!(place.metadata(&file)["seed"], seed);
        pictures.push(place.pixels(&file));
    }
    assert_eq!(pictures[0], pictures[1], "one thread or two");
    assert_ne!(pictures[1], pictures[2]);
    // No seed: 42, as the help says, each time.
    assert_eq!(place.generate(&["a fox", "--out=default.png", "--json"]).json()["seed"], 42);
    assert_eq!(place.pixels("default.png"), pictures[3]);
}

#[test]
fn case_55_a_prompt_is_cut_after_512_tokens_and_that_is_said() {
    let place = Place::new();
    // A digit is a token of its own, so the rest is the chat's.
    let tokens = |digits: usize| place.generate(&[&"7".repeat(digits), "--json", "--out=out.png"]).json();
    let chat = tokens(1)["prompt_tokens"].as_u64().expect("a number") as usize - 1;
    let whole = tokens(512 - chat);
    assert_eq!((&whole["prompt_tokens"], &whole["prompt_truncated"]), (&512.into(), &false.into()));
    let cut = tokens(513 - chat);
    assert_eq!((&cut["prompt_tokens"], &cut["prompt_truncated"]), (&513.into(), &true.into()));

    let end = place.generate(&[&"7".repeat(513 - chat), "--out=out.png"]);
    assert!(end.succeeded().stderr.contains("warning: the prompt has 513 tokens"), "{end:?}");
    assert!(!place.generate(&["7", "--out=out.png"]).stderr.contains("warning"));
}

#[test]
fn the_picture_and_the_answer_say_how_it_was_made() {
    let place = Place::new();
    let prompt = "a café's sign: “OPEN 24/7” ☕\nat dawn";
    let answer = place.generate(&[prompt, "--seed=7", "--dtype=f32", "--json"]).json();
    let metadata = place.metadata("flux2-7.png");
    let wanted = [
        ("prompt", prompt),
        ("seed", "7"),
        ("width", "64"),
        ("height", "64"),
        ("steps", "4"),
        ("dtype", "f32"),
    ];
    for (key, value) in wanted {
        assert_eq!(metadata[key], value, "{key}");
    }
    assert_eq!(metadata["model"], answer["model"].as_str().expect("a name"));
    assert_eq!((&answer["steps"], &answer["dtype"]), (&4.into(), &"f32".into()));
    assert!(answer["device"].as_str().is_some_and(|device| device.starts_with("cpu")), "{answer}");
    let timing = &answer["timing"];
    for key in ["text_encoder_s", "context_s", "dit_s", "vae_decode_s", "load_s", "total_s"] {
        assert!(timing[key].as_f64().is_some_and(|seconds| seconds >= 0.0), "{key} in {answer}");
    }
    assert_eq!(timing["step_s"].as_array().map(Vec::len), Some(4));
    assert!(timing.get("reference_encode_s").is_none(), "no reference, no such stage: {answer}");
}

#[test]
fn the_precisions_draw_their_own_noise() {
    let place = Place::new();
    place.generate(&["a fox", "--dtype=f32", "--out=f32.png"]).succeeded();
    place.generate(&["a fox", "--dtype=bf16", "--out=bf16.png"]).succeeded();
    place.generate(&["a fox", "--out=default.png"]).succeeded();
    assert_ne!(place.pixels("f32.png"), place.pixels("bf16.png"));
    assert_eq!(place.pixels("default.png"), place.pixels("bf16.png"));
}

#[test]
fn the_checkpoint_and_text_encoder_come_from_the_environment_too() {
    let place = Place::new();
    let arguments = ["generate", "a fox", "--allow-small", "--width=64", "--height=64"];
    let run = |name: &str, text_encoder: Option<&std::path::Path>| {
        let mut command = place.command(&[&arguments[..], &["--out", name]].concat());
        command.env("KLEIN_SNAPSHOT", tiny());
        if let Some(directory) = text_encoder {
            command.env("KLEIN_TEXT_ENCODER", directory);
        }
        crate::support::End::of(&command.output().expect("the binary runs")).succeeded();
        place.pixels(name)
    };
    let own = run("own.png", None);
    assert_eq!(own, run("directory.png", Some(&tiny().join("text_encoder"))));
    assert_eq!(own, run("checkpoint.png", Some(&tiny())));
    place
        .generate(&["a fox", "--text-encoder", tiny().to_str().expect("UTF-8"), "--out=flag.png"])
        .succeeded();
    assert_eq!(own, place.pixels("flag.png"));
}
