// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 [dev] against what diffusers computed for the tiny dev checkpoint: the same pipeline, other data.
//!
//! The bf16 yardstick is our own f32 run from the bf16 noise, which the f32 test shows to be diffusers' within 1e-4.

mod goldens;
mod stages;

use std::{collections::BTreeMap, path::PathBuf};

use flux2::{
    Request, RgbImage,
    device::Precision,
    latents,
    pipeline::Pipeline,
    prompt::{MISTRAL, PromptTokenizer},
    request::Limits,
    schedule::Schedule,
};
use serde::Deserialize;
use stages::Probe;

#[derive(Deserialize)]
struct Case {
    prompt: String,
    width: usize,
    height: usize,
    seed: u64,
    steps: usize,
    guidance: f32,
    real_tokens: usize,
    bf16_distance: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
struct GoldenSchedule {
    mu: f64,
    sigmas: Vec<f32>,
    timesteps: Vec<f32>,
}

fn directory() -> PathBuf {
    goldens::fixtures().join("dev/goldens")
}

fn json<T: for<'a> Deserialize<'a>>(file: &str) -> T {
    let text = std::fs::read_to_string(directory().join(file)).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

fn cases() -> BTreeMap<String, Case> {
    json("cases.json")
}

fn load(name: &str, run: &str) -> BTreeMap<String, goldens::Tensor> {
    goldens::load_packed(&directory().join(format!("{name}.{run}.safetensors.gz")))
}

fn run(
    case: &Case,
    golden: &BTreeMap<String, goldens::Tensor>,
    precision: Precision,
    noise: Precision,
) -> (Probe, RgbImage) {
    let request = Request {
        width: case.width / 16 * 16,
        height: case.height / 16 * 16,
        seed: case.seed,
        steps: case.steps,
        guidance: Some(case.guidance),
        references: stages::references(golden),
        ..Request::new(&case.prompt)
    };
    let mut probe = Probe::default();
    let mut model = stages::open("dev/tiny", Limits::DEV, precision, noise);
    let (image, _) = model.generate(&request, &mut probe).expect("a picture");
    (probe, image)
}

#[test]
fn f32_agrees_with_diffusers_at_every_stage() {
    for (name, case) in &cases() {
        let golden = load(name, "f32");
        let (probe, image) = run(case, &golden, Precision::F32, Precision::F32);
        let mut compared = 0;
        for (tensor, wanted) in &golden {
            if let Some(distance) = stages::compare(name, &probe, tensor, wanted) {
                assert!(distance < 1e-4, "{name} {tensor}: {distance:.3e}");
                compared += 1;
            }
        }
        println!("{name}: {compared} stages within 1e-4");
        stages::assert_same_picture(name, &image, &golden["image_u8"].u8());
    }
}

#[test]
fn bf16_is_closer_to_f32_than_diffusers_bf16_at_every_stage() {
    for (name, case) in &cases() {
        let golden = load(name, "bf16");
        let (probe, _) = run(case, &golden, Precision::Bf16, Precision::Bf16);
        let (yardstick, _) = run(case, &golden, Precision::F32, Precision::Bf16);
        for (tensor, theirs) in &golden {
            let Some(reference) = stages::reference(&yardstick, tensor, theirs) else { continue };
            let wanted =
                goldens::Tensor { shape: theirs.shape.clone(), values: goldens::Values::F32(reference) };
            let Some(ours) = stages::compare(name, &probe, tensor, &wanted) else { continue };
            let theirs = goldens::distance(&theirs.f32()[..wanted.f32().len()], wanted.f32());
            assert!(ours <= theirs.max(1e-6), "{name} {tensor}: ours {ours:.3e}, diffusers {theirs:.3e}");
            if let Some(&published) = case.bf16_distance.get(tensor) {
                assert!(ours <= published, "{name} {tensor}: ours {ours:.3e}, yardstick {published:.3e}");
            }
        }
    }
}

#[test]
fn integers_noise_and_schedules_are_equal() {
    let tokenizer = PromptTokenizer::load(&goldens::fixtures().join("dev/tiny/tokenizer"), &MISTRAL)
        .expect("a tokenizer");
    for (name, case) in &cases() {
        let golden = load(name, "f32");
        let tokens = tokenizer.encode(&case.prompt).expect("tokens");
        let ids: Vec<i64> = tokens.ids.iter().map(|&id| i64::from(id)).collect();
        assert_eq!(ids, golden["input_ids"].i64(), "{name}: ids");
        let mask: Vec<i64> = (0..ids.len()).map(|i| i64::from(tokens.real.contains(&i))).collect();
        assert_eq!(mask, golden["attention_mask"].i64(), "{name}: mask");
        assert_eq!((tokens.real.len(), tokens.truncated()), (case.real_tokens, tokens.total > 512), "{name}");
        for (run, precision) in [("f32", Precision::F32), ("bf16", Precision::Bf16)] {
            let golden = load(name, run);
            let [height, width] = [case.height / 16, case.width / 16];
            let z = flux2::noise::standard_normal(case.seed, latents::CHANNELS * height * width, precision);
            assert_eq!(latents::pack(&z, height, width), golden["noise_packed"].f32(), "{name} {run}: noise");
        }
        let schedule = Schedule::new(case.width / 16 * (case.height / 16), case.steps);
        assert_eq!(schedule.sigmas, golden["sched.sigmas"].f32(), "{name}: sigmas");
        assert_eq!(schedule.timesteps, golden["sched.timesteps"].f32(), "{name}: timesteps");
    }
    for (name, wanted) in json::<BTreeMap<String, GoldenSchedule>>("schedules.json") {
        let (tokens, steps) = name.strip_prefix('L').and_then(|rest| rest.split_once("_n")).expect("L…_n…");
        let schedule = Schedule::new(tokens.parse().expect("tokens"), steps.parse().expect("steps"));
        assert!((schedule.mu - wanted.mu).abs() < 1e-12, "{name}: mu");
        assert_eq!(schedule.sigmas, wanted.sigmas, "{name}: sigmas");
        assert_eq!(schedule.timesteps, wanted.timesteps, "{name}: timesteps");
    }
}

#[test]
fn a_model_without_the_guidance_path_or_the_pad_rule_would_be_noticed() {
    let cases = cases();
    let case = &cases["t2i_64x64"];
    let golden = load("t2i_64x64", "f32");
    let (probe, _) = run(
        &Case {
            guidance: 3.5,
            ..json::<BTreeMap<String, Case>>("cases.json").remove("t2i_64x64").expect("a case")
        },
        &golden,
        Precision::F32,
        Precision::F32,
    );
    let distance = stages::compare("t2i_64x64", &probe, "step0.model_out", &golden["step0.model_out"]);
    assert!(distance > Some(0.2), "guidance 3.5 for {}: {distance:?}", case.guidance);
}

/// The published VAE is F32 and the published klein's is its rounding: a bf16 run must not see the difference.
#[test]
fn an_f32_vae_is_rounded_at_load_all_of_it() {
    use flux2::device::cpu::{CpuDevice, CpuOptions};
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};

    let tiny = goldens::fixtures().join("dev/tiny");
    let directory = tempfile::tempdir().expect("a directory");
    for part in ["model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer"] {
        std::os::unix::fs::symlink(tiny.join(part), directory.path().join(part)).expect("a link");
    }
    let file = "vae/diffusion_pytorch_model.safetensors";
    std::fs::create_dir(directory.path().join("vae")).expect("a directory");
    std::fs::copy(tiny.join("vae/config.json"), directory.path().join("vae/config.json")).expect("a copy");
    let bytes = std::fs::read(tiny.join(file)).expect("a fixture");
    let stored = SafeTensors::deserialize(&bytes).expect("tensors");
    let mut rounded = 0;
    let tensors: Vec<_> = stored
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            if view.dtype() != Dtype::F32 {
                return (name, view.dtype(), view.shape().to_vec(), view.data().to_vec());
            }
            rounded += 1;
            let values = view.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
            let data = values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect();
            (name, Dtype::BF16, view.shape().to_vec(), data)
        })
        .collect();
    assert_eq!(rounded, tensors.len() - 1, "all but the counter");
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("a view"))
    });
    let bytes = safetensors::serialize(views, None).expect("a file");
    std::fs::write(directory.path().join(file), bytes).expect("a file");

    // With a reference, so that the encoder and the batch norm's statistics have their part.
    let case = &cases()["ref1_96x64"];
    let golden = load("ref1_96x64", "bf16");
    let run = |path: &std::path::Path| {
        let device = CpuDevice::new(CpuOptions { precision: Precision::Bf16, threads: None }).expect("a cpu");
        let mut model = flux2::pipeline::load(path, None, device, Some(Limits::DEV.with_small_sizes()))
            .expect("the checkpoint");
        let request = Request {
            width: case.width,
            height: case.height,
            seed: case.seed,
            steps: 2,
            references: stages::references(&golden),
            ..Request::new(&case.prompt)
        };
        let mut probe = Probe::default();
        let (image, _) = model.generate(&request, &mut probe).expect("a picture");
        (probe.values, image)
    };
    let ((f32_values, f32_image), (values, image)) = (run(&tiny), run(directory.path()));
    for (stage, value) in &values {
        assert!(f32_values[stage] == *value, "{stage} differs");
    }
    assert!(values.contains_key("reference0.tokens") && f32_image == image);
}
