// SPDX-License-Identifier: Apache-2.0
//! Runs a pipeline with every stage observed, and finds our value of a golden tensor.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::BTreeMap;

use flux2::{
    Progress, RgbImage,
    device::{
        Precision, Shape,
        cpu::{CpuDevice, CpuOptions},
    },
    pipeline::{self, Flux2},
    request::Limits,
};

use crate::goldens;

/// Keeps the first value of every stage: step 0 of what repeats.
#[derive(Default)]
pub struct Probe {
    /// By stage.
    pub values: BTreeMap<String, (Shape, Vec<f32>)>,
    encoded: usize,
}

impl Progress for Probe {
    fn wants_value(&self, _: &str) -> bool {
        true
    }
    fn value(&mut self, stage: &str, shape: Shape, values: &[f32]) {
        let mut name = stage.to_owned();
        if stage == "vae.encoder.moments" {
            name = format!("reference{}.moments", self.encoded);
            self.encoded += 1;
        }
        self.values.entry(name).or_insert_with(|| (shape, values.to_vec()));
    }
}

/// A checkpoint of the fixtures on the CPU.
pub fn open(checkpoint: &str, limits: Limits, precision: Precision, noise: Precision) -> Flux2<CpuDevice> {
    let device = CpuDevice::new(CpuOptions { precision, threads: None }).expect("a cpu");
    let path = goldens::fixtures().join(checkpoint);
    let mut model =
        pipeline::load(&path, None, device, Some(limits.with_small_sizes())).expect("the checkpoint");
    model.set_noise(noise);
    model
}

/// The reference images of a golden run.
pub fn references(golden: &BTreeMap<String, goldens::Tensor>) -> Vec<RgbImage> {
    let sources = (0..).map_while(|index| golden.get(&format!("ref{index}.source_rgb")));
    let image = |source: &goldens::Tensor| {
        RgbImage::from_raw(source.shape[1] as u32, source.shape[0] as u32, source.u8()).expect("a picture")
    };
    sources.map(image).collect()
}

/// Pictures agree within one level in at most 0.1 % of the bytes.
pub fn assert_same_picture(name: &str, image: &RgbImage, wanted: &[u8]) {
    assert_eq!(image.as_raw().len(), wanted.len(), "{name}: size");
    let differing = image.as_raw().iter().zip(wanted).filter(|(got, want)| got != want).count();
    let largest = image.as_raw().iter().zip(wanted).map(|(got, want)| got.abs_diff(*want)).max();
    println!("{name}: {differing} of {} bytes differ, largest {largest:?}", wanted.len());
    assert!(largest <= Some(1) && differing * 1000 <= wanted.len(), "{name}: picture");
}

/// Our value of a golden tensor, in the golden's layout; `None` for what is tested elsewhere or not observable.
pub fn ours(probe: &Probe, golden: &str, wanted: &goldens::Tensor) -> Option<Vec<f32>> {
    let stage = match golden {
        "te.embed" => "text.embed".into(),
        "noise_packed" => "noise".into(),
        "dit.x_embed" => "dit.image".into(),
        "dit.ctx_embed" => "dit.context".into(),
        "prompt_embeds" | "dit.temb" | "dit.norm_out" => golden.into(),
        "dit.mod_img" => "dit.modulation.image".into(),
        "dit.mod_txt" => "dit.modulation.text".into(),
        "dit.mod_single" => "dit.modulation.single".into(),
        "dit.velocity_step0.0" => "step0.velocity".into(),
        "ref_tokens" => {
            let references = (0..).map_while(|index| probe.values.get(&format!("reference{index}.tokens")));
            return Some(references.flat_map(|(_, values)| values.clone()).collect());
        }
        _ => {
            if golden.contains(".q_norm") || golden.contains(".attn") || golden.contains("rope") {
                return None;
            }
            if let Some(layer) = golden.strip_prefix("te.layer") {
                format!("text.layer{layer}")
            } else if let Some(block) = golden.strip_prefix("dit.double") {
                let (index, stream) = block.split_once('.')?;
                format!("dit.double{index}.{}", if stream == "0" { "text" } else { "image" })
            } else if golden.starts_with("dit.single") {
                golden.into()
            } else if let Some(step) = golden.strip_suffix(".model_out") {
                format!("{step}.velocity")
            } else if let Some(step) = golden.strip_suffix(".latents_after") {
                format!("{step}.latents")
            } else if let Some(stage) = golden.strip_prefix("vae.dec.") {
                format!("vae.decoder.{stage}")
            } else if let Some(stage) = golden.strip_prefix("vae.enc0.") {
                format!("vae.encoder.{stage}")
            } else if golden.ends_with(".moments") {
                format!("reference{}", golden.strip_prefix("ref")?)
            } else {
                return None;
            }
        }
    };
    let (shape, values) = probe.values.get(&stage).unwrap_or_else(|| panic!("{golden}: no stage {stage}"));
    Some(match (*shape, wanted.shape.len()) {
        (Shape::Image(height, width, channels), 4) => to_nchw(values, height, width, channels),
        // One row stands for all padding before a prompt.
        (Shape::Rows(rows, columns), _) if stage.starts_with("text.") => {
            let repeats = wanted.shape[1] - rows + 1;
            values[..columns].repeat(repeats).into_iter().chain(values[columns..].iter().copied()).collect()
        }
        _ => values.clone(),
    })
}

fn to_nchw(values: &[f32], height: usize, width: usize, channels: usize) -> Vec<f32> {
    let pixels = height * width;
    let value = |index: usize| values[(index % pixels) * channels + index / pixels];
    (0..pixels * channels).map(value).collect()
}

/// Golden rows past ours are reference rows, which the port drops before the output head.
pub fn compare(name: &str, probe: &Probe, golden: &str, wanted: &goldens::Tensor) -> Option<f64> {
    if !matches!(wanted.values, goldens::Values::F32(_)) {
        return None;
    }
    let got = ours(probe, golden, wanted)?;
    let mut reference = wanted.f32();
    if golden.ends_with(".model_out") || golden == "dit.norm_out" || golden.starts_with("dit.velocity") {
        reference = &reference[..got.len()];
    }
    assert_eq!(got.len(), reference.len(), "{name} {golden}");
    Some(goldens::distance(&got, reference))
}

/// Our value of a golden tensor as the reference for another run, if the tensor holds floats and we have the stage.
pub fn reference(probe: &Probe, golden: &str, shape_of: &goldens::Tensor) -> Option<Vec<f32>> {
    matches!(shape_of.values, goldens::Values::F32(_)).then(|| ours(probe, golden, shape_of)).flatten()
}
