// SPDX-License-Identifier: Apache-2.0
//! Everything around the model against diffusers' own tensors: token ids, position ids, rotary tables, noise, schedule,
//! latent layouts, reference pixels and the final rounding. Fixtures: `tests/fixtures/goldens`, made by diffusers 0.37.1 on
//! the small checkpoint in `tests/fixtures/tiny`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use flux2::{
    checkpoint::Component,
    device::Precision,
    latents::{self, LatentStatistics},
    noise, pixels,
    prompt::PromptTokenizer,
    reference,
    rope::{self, RotaryTable},
    schedule::Schedule,
};
use image::RgbImage;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Scalars of a golden case.
#[derive(Deserialize)]
struct Case {
    prompt: String,
    width: usize,
    height: usize,
    seed: u64,
}

impl Case {
    fn grid(&self) -> (usize, usize) {
        (self.height / 16, self.width / 16)
    }
}

/// Tensors of a golden case by name.
struct Golden {
    name: String,
    bytes: Vec<u8>,
    case: Case,
}

impl Golden {
    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }
    fn has(&self, name: &str) -> bool {
        self.file().tensor(name).is_ok()
    }
    fn shape(&self, name: &str) -> Vec<usize> {
        self.file().tensor(name).unwrap().shape().to_vec()
    }
    fn bytes(&self, name: &str) -> Vec<u8> {
        self.file().tensor(name).unwrap_or_else(|_| panic!("{} has no {name}", self.name)).data().to_vec()
    }
    fn floats(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        match self.file().tensor(name).unwrap().dtype() {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => {
                bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            other => panic!("{name} is {other:?}"),
        }
    }
    fn integers(&self, name: &str) -> Vec<i64> {
        self.bytes(name).as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }
    fn ids(&self, name: &str) -> Vec<[i32; 4]> {
        self.integers(name).as_chunks::<4>().0.iter().map(|id| id.map(|v| v as i32)).collect()
    }
    /// An image of the VAE, NCHW in the file, as NHWC.
    fn nhwc(&self, name: &str) -> (usize, usize, Vec<f32>) {
        let [_, channels, height, width] = self.shape(name)[..] else { panic!("{name} is no image") };
        let values = self.floats(name);
        let moved = (0..height * width).flat_map(|p| (0..channels).map(move |c| (c, p)));
        (height, width, moved.map(|(c, p)| values[c * height * width + p]).collect())
    }
    fn references(&self) -> usize {
        (0..).take_while(|i| self.has(&format!("ref{i}.source_rgb"))).count()
    }
    fn source(&self, index: usize) -> RgbImage {
        let name = format!("ref{index}.source_rgb");
        let [height, width, _] = self.shape(&name)[..] else { panic!("{name} is no picture") };
        RgbImage::from_raw(width as u32, height as u32, self.bytes(&name)).unwrap()
    }
}

/// All golden cases of a data type (`f32`, `bf16`).
fn goldens(dtype: &str) -> Vec<Golden> {
    let directory = fixtures().join("goldens");
    let mut found: Vec<Golden> = fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| {
            let name =
                path.file_name()?.to_str()?.strip_suffix(&format!(".{dtype}.safetensors"))?.to_string();
            let case = fs::read(path.with_extension("json")).unwrap();
            Some(Golden {
                name: format!("{name} {dtype}"),
                bytes: fs::read(&path).unwrap(),
                case: serde_json::from_slice(&case).unwrap(),
            })
        })
        .collect();
    assert!(!found.is_empty(), "no {dtype} goldens in {}", directory.display());
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

#[test]
fn token_ids_are_equal() {
    let tokenizer = PromptTokenizer::load(&fixtures().join("tiny/tokenizer")).unwrap();
    for golden in goldens("f32") {
        let tokens = tokenizer.encode(&golden.case.prompt).unwrap();
        let ids: Vec<i64> = tokens.ids.iter().map(|&id| id.into()).collect();
        assert_eq!(ids, golden.integers("input_ids"), "{}", golden.name);
        let mask: Vec<i64> = (0..512).map(|i| tokens.real.contains(&i).into()).collect();
        assert_eq!(mask, golden.integers("attention_mask"), "{}", golden.name);
    }
}

#[test]
fn position_ids_are_equal() {
    for golden in goldens("f32") {
        let (height, width) = golden.case.grid();
        assert_eq!(latents::text_ids(512), golden.ids("txt_ids"), "{}", golden.name);
        assert_eq!(latents::image_ids(height, width), golden.ids("img_ids"), "{}", golden.name);
        if golden.references() > 0 {
            assert_eq!(reference_ids(&golden), golden.ids("ref_ids"), "{}", golden.name);
        }
    }
}

fn reference_ids(golden: &Golden) -> Vec<[i32; 4]> {
    (0..golden.references())
        .flat_map(|i| {
            let prepared = reference::prepare(&golden.source(i), i).unwrap();
            latents::reference_ids(i, prepared.height / 16, prepared.width / 16)
        })
        .collect()
}

#[test]
fn rotary_tables_are_equal_to_the_last_place() {
    for golden in goldens("f32") {
        let (height, width) = golden.case.grid();
        let image = [latents::image_ids(height, width), reference_ids(&golden)].concat();
        // diffusers repeats each value adjacently, transformers the whole row.
        for (name, ids) in [("dit.rope_txt", latents::text_ids(512)), ("dit.rope_img", image)] {
            let table = rope::dit_table(&ids, &[8; 4], 2000.0);
            let wanted = |part| golden.floats(&format!("{name}.{part}")).into_iter().step_by(2).collect();
            compare_tables(&golden, name, &table, wanted("cos"), wanted("sin"));
        }
        let table = rope::text_table(0..512, 32, 1e6);
        let wanted = |part: usize| {
            golden.floats(&format!("te.rope.{part}")).chunks(32).flat_map(|row| row[..16].to_vec()).collect()
        };
        compare_tables(&golden, "te.rope", &table, wanted(0), wanted(1));
    }
}

/// Values may differ by one unit in the last place, where torch's vectorised functions round otherwise.
fn compare_tables(golden: &Golden, name: &str, table: &RotaryTable, cos: Vec<f32>, sin: Vec<f32>) {
    for (part, got, wanted) in [("cos", &table.cos, cos), ("sin", &table.sin, sin)] {
        assert_eq!(got.len(), wanted.len(), "{} {name}.{part}", golden.name);
        let ulps = |a: f32, b: f32| (i64::from(a.to_bits()) - i64::from(b.to_bits())).abs();
        let differing = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        let worst =
            got.iter().zip(&wanted).map(|(a, b)| if a == b { 0 } else { ulps(*a, *b) }).max().unwrap();
        println!(
            "{} {name}.{part}: {differing} of {} differ, by at most {worst} ulp",
            golden.name,
            got.len()
        );
        assert!(worst <= 1, "{} {name}.{part}: {worst} ulp", golden.name);
    }
}

#[test]
fn noise_is_equal() {
    for (dtype, precision) in
        [("f32", Precision::F32), ("bf16", Precision::Bf16), ("f32_bf16noise", Precision::Bf16)]
    {
        for golden in goldens(dtype) {
            let (height, width) = golden.case.grid();
            let noise = noise::standard_normal(golden.case.seed, 128 * height * width, precision);
            let packed = latents::pack(&noise, height, width);
            assert_eq!(packed, golden.floats("noise_packed"), "{}", golden.name);
        }
    }
}

#[test]
fn schedules_and_steps_are_equal() {
    for golden in goldens("f32") {
        let (height, width) = golden.case.grid();
        let schedule = Schedule::new(height * width, 4);
        assert_eq!(schedule.sigmas, golden.floats("sched.sigmas"), "{}", golden.name);
        assert_eq!(schedule.timesteps, golden.floats("sched.timesteps"), "{}", golden.name);
        let mut latents = golden.floats("noise_packed");
        for step in 0..4 {
            let velocity = golden.floats(&format!("step{step}.model_out"));
            let image_rows = latents.len();
            schedule.step(step, &mut latents, &velocity[..image_rows]);
            assert_eq!(
                latents,
                golden.floats(&format!("step{step}.latents_after")),
                "{} {step}",
                golden.name
            );
        }
    }
}

fn statistics() -> LatentStatistics {
    let vae = Component::open(&fixtures().join("tiny/vae"), "diffusion_pytorch_model").unwrap();
    let values = |name: &str| vae.weight(name, &[128]).unwrap().to_f32();
    LatentStatistics::new(&values("bn.running_mean"), &values("bn.running_var"), 1e-4)
}

/// Equal but for the last place: torch's square root (MKL) is not correctly rounded, which moves the standard deviation of 2
/// of the 128 channels by one unit in the last place.
fn close(got: &[f32], wanted: &[f32]) -> bool {
    got.len() == wanted.len()
        && got.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= 2.5e-7 * (1.0 + b.abs()))
}

#[test]
fn latents_reach_the_vae_and_come_back_as_diffusers_does() {
    let statistics = statistics();
    for golden in goldens("f32") {
        let (height, width) = golden.case.grid();
        let (_, _, wanted) = golden.nhwc("vae.dec.input");
        let got = latents::to_vae(&golden.floats("step3.latents_after"), height, width, &statistics);
        let differing = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        println!("{}: {differing} of {} values into the VAE differ", golden.name, got.len());
        assert!(close(&got, &wanted), "{}", golden.name);

        let mut tokens = Vec::new();
        for i in 0..golden.references() {
            let (height, width, moments) = golden.nhwc(&format!("ref{i}.moments"));
            let mean: Vec<f32> = moments.chunks(64).flat_map(|pixel| pixel[..32].to_vec()).collect();
            tokens.extend(latents::from_vae(&mean, height, width, &statistics));
        }
        if !tokens.is_empty() {
            assert!(close(&tokens, &golden.floats("ref_tokens")), "{}", golden.name);
        }
    }
}

#[test]
fn reference_pixels_are_equal() {
    for golden in goldens("f32") {
        for i in 0..golden.references() {
            let prepared = reference::prepare(&golden.source(i), i).unwrap();
            let (height, width, wanted) = golden.nhwc(&format!("ref{i}.pixels"));
            assert_eq!((prepared.height, prepared.width), (height, width), "{} reference {i}", golden.name);
            assert_eq!(prepared.values, wanted, "{} reference {i}", golden.name);
        }
    }
}

#[test]
fn pictures_are_rounded_equally() {
    for golden in goldens("f32") {
        let (height, width, values) = golden.nhwc("vae.dec.output");
        assert_eq!(
            pixels::to_rgb(&values, height, width).as_raw(),
            &golden.bytes("image_u8"),
            "{}",
            golden.name
        );
    }
}
