// SPDX-License-Identifier: Apache-2.0
//! Checkpoints that cannot be used: exit code 3, the file and what is wrong with it, from `generate` and from `check`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;

use crate::support::{Place, tiny, tiny_copy};

const VAE: &str = "vae/diffusion_pytorch_model.safetensors";
const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";

/// Breaks a copy of the tiny checkpoint; both commands say so.
#[track_caller]
fn refused(break_it: impl FnOnce(&Path), words: &[&str]) {
    let place = Place::new();
    let checkpoint = tiny_copy(&place);
    break_it(&checkpoint);
    generate(&place, &checkpoint).failed(3, words);
    let checked = check(&place, &checkpoint);
    assert_eq!(checked.code, Some(3), "{checked:?}");
    for word in words {
        assert!(checked.stdout.contains(word), "no {word:?} in {checked:?}");
    }
    assert_eq!(place.files(), ["checkpoint"]);
}

fn generate(place: &Place, checkpoint: &Path) -> crate::support::End {
    place.generate_with(checkpoint, &["a fox", "--width=64", "--height=64", "--out=out.png"])
}

fn check(place: &Place, checkpoint: &Path) -> crate::support::End {
    place.run(&["check", "--checkpoint", checkpoint.to_str().expect("UTF-8")])
}

fn edit(path: PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(&path).expect("a file");
    change(&mut bytes);
    fs::write(path, bytes).expect("a file");
}

fn edit_text(path: PathBuf, from: &str, to: &str) {
    let text = fs::read_to_string(&path).expect("a file");
    assert!(text.contains(from), "no {from} in {}", path.display());
    fs::write(path, text.replacen(from, to, 1)).expect("a file");
}

fn remove(path: PathBuf) {
    fs::remove_file(path).expect("it was there");
}

#[test]
fn a_whole_checkpoint_is_complete() {
    let place = Place::new();
    let end = check(&place, &tiny());
    assert!(end.succeeded().stdout.ends_with("complete\n"), "{end:?}");
    let mini = crate::support::mini();
    let answer = place.run(&["check", "--json", "--checkpoint", mini.to_str().expect("UTF-8")]).json();
    assert_eq!((&answer["complete"], &answer["problems"]), (&true.into(), &serde_json::json!([])));
}

#[test]
fn an_installation_is_checked_without_weights() {
    let place = Place::new();
    let end = place.run(&["check", "--installation"]);
    assert!(end.succeeded().stdout.contains("compute what the portable ones do"), "{end:?}");
    let answer = place.run(&["check", "--installation", "--json"]).json();
    assert_eq!(answer["directories_writable"], true, "{answer}");
    place
        .run(&["check", "--installation", "--checkpoint", "x"])
        .failed(2, &["--installation", "--checkpoint"]);
}

#[test]
fn no_checkpoint_at_all_says_where_it_was_looked_for_and_how_to_get_it() {
    let place = Place::new();
    let end = place.run(&["generate", "a fox"]);
    end.failed(
        3,
        &[
            "FLUX.2-klein-4B",
            "e7b7dc27f91deacad38e78976d1f2b499d76a294",
            ".cache/huggingface",
            "KLEIN_SNAPSHOT",
        ],
    );
    place.run(&["generate", "a fox", "--checkpoint", "nowhere"]).failed(3, &["nowhere", "not a directory"]);
    place.run(&["generate", "a fox", "--checkpoint", "."]).failed(3, &["model_index.json"]);
}

#[test]
fn a_checkpoint_downloaded_half_lacks_its_parts() {
    refused(|at| remove(at.join(TRANSFORMER)), &["transformer", "diffusion_pytorch_model"]);
    refused(|at| fs::remove_dir_all(at.join("vae")).expect("it was there"), &["vae"]);
    refused(|at| remove(at.join("model_index.json")), &["model_index.json"]);
    refused(|at| remove(at.join("transformer/config.json")), &["transformer", "config.json"]);
    refused(|at| remove(at.join("tokenizer/tokenizer.json")), &["tokenizer.json"]);
}

#[test]
fn check_lists_everything_that_is_missing() {
    let place = Place::new();
    let checkpoint = tiny_copy(&place);
    remove(checkpoint.join(VAE));
    remove(checkpoint.join("tokenizer/tokenizer.json"));
    remove(checkpoint.join("text_encoder/model-00002-of-00002.safetensors"));
    let end = place.run(&["check", "--json", "--checkpoint", checkpoint.to_str().expect("UTF-8")]);
    assert_eq!(end.code, Some(3), "{end:?}");
    let answer: serde_json::Value = serde_json::from_str(&end.stdout).expect("JSON");
    assert_eq!(answer["complete"], false);
    let problems = answer["problems"].as_array().expect("a list");
    assert_eq!(problems.len(), 3, "{answer}");
    for part in ["vae", "tokenizer.json", "model-00002-of-00002.safetensors"] {
        assert!(
            problems.iter().any(|problem| problem.as_str().is_some_and(|text| text.contains(part))),
            "{answer}"
        );
    }
}

#[test]
fn an_index_that_names_an_absent_shard_is_refused_with_the_shard() {
    let index = "text_encoder/model.safetensors.index.json";
    let shard = "model-00002-of-00002.safetensors";
    refused(|at| remove(at.join("text_encoder").join(shard)), &[shard]);
    refused(
        |at| edit_text(at.join(index), shard, "model-00003-of-00002.safetensors"),
        &["model-00003-of-00002"],
    );
}

#[test]
fn a_truncated_file_is_refused() {
    refused(|at| edit(at.join(TRANSFORMER), |bytes| bytes.truncate(bytes.len() - 1000)), &["transformer"]);
    refused(|at| edit(at.join(VAE), |bytes| bytes.truncate(100)), &["vae"]);
    refused(|at| edit(at.join(VAE), Vec::clear), &["vae"]);
    // A page of an error message that was saved as the file.
    refused(|at| edit(at.join(VAE), |bytes| *bytes = b"<html>Access denied</html>".to_vec()), &["vae"]);
}

#[test]
fn tensors_missing_renamed_or_of_another_shape_or_type_are_refused_by_name() {
    // Same lengths, so that the rest of the header stays right.
    refused(|at| in_header(at, "proj_out.weight", "proj_off.weight"), &["proj_out.weight"]);
    refused(
        |at| in_header(at, "\"dtype\":\"BF16\",\"shape\":[128,96]", "\"dtype\":\"BF16\",\"shape\":[96,128]"),
        &["128", "96"],
    );
    refused(|at| in_header(at, "\"dtype\":\"BF16\"", "\"dtype\":\"I16\" "), &["I16"]);
}

fn in_header(checkpoint: &Path, from: &str, to: &str) {
    edit(checkpoint.join(TRANSFORMER), |bytes| {
        let at =
            bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("in the header");
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    });
}

#[test]
fn another_model_is_refused() {
    refused(
        |at| edit_text(at.join("model_index.json"), "Flux2KleinPipeline", "FluxPipeline"),
        &["FluxPipeline"],
    );
    refused(
        |at| edit_text(at.join("transformer/config.json"), "\"num_layers\": 2", "\"num_layers\": 3"),
        &["transformer"],
    );
    refused(|at| fs::write(at.join("vae/config.json"), "{ \"block").expect("a file"), &["vae/config.json"]);
}

#[test]
fn case_50_weights_that_are_not_numbers_make_no_picture() {
    for (file, tensor, stage) in [
        (VAE, "decoder.conv_out.bias", "VAE decode"),
        (TRANSFORMER, "proj_out.weight", "step"),
        ("text_encoder/model-00001-of-00002.safetensors", "model.embed_tokens.weight", "text encoder"),
    ] {
        let place = Place::new();
        let checkpoint = tiny_copy(&place);
        edit(checkpoint.join(file), |bytes| {
            let tensors = SafeTensors::deserialize(bytes).expect("a safetensors file");
            let data = tensors.tensor(tensor).expect("the tensor").data();
            let range = data.as_ptr() as usize - bytes.as_ptr() as usize..;
            let range = range.start..range.start + data.len();
            // bf16 NaN, all over the tensor.
            bytes[range]
                .chunks_exact_mut(2)
                .for_each(|value| value.copy_from_slice(&0x7FC0_u16.to_le_bytes()));
        });
        let end = generate(&place, &checkpoint);
        assert_eq!((end.code, end.stdout.as_str()), (Some(3), ""), "{end:?}");
        let sentence = end.stderr.lines().find(|line| line.starts_with("error: ")).expect("a sentence");
        for word in [tensor, "NaN or infinity", stage] {
            assert!(sentence.contains(word), "no {word} in {sentence}");
        }
        assert_eq!(place.files(), ["checkpoint"]);
    }
}
