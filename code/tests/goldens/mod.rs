// SPDX-License-Identifier: Apache-2.0
//! What diffusers computed for the tiny checkpoint in `tests/fixtures/tiny`, stage by stage.
//!
//! ```ignore
//! mod goldens;
//! let case = goldens::case("t2i_64x64");                  // prompt, size, seed, picture's sha256, ...
//! let run = goldens::load("t2i_64x64", "f32_bf16noise");  // BTreeMap<String, Tensor>
//! let taps: &[f32] = run["te.layer8"].f32();              // shape [1, 512, 48]
//! let ids: &[i64] = run["input_ids"].i64();               // shape [1, 512]
//! ```
//!
//! Three runs of each case: `f32`, `bf16`, and `f32_bf16noise` (f32 arithmetic from the noise that the bf16 run draws:
//! the yardstick of every bf16 run). What is where, so that every stage of every case can be tested with 22 MB:
//!
//! - `f32_bf16noise` has every tensor.
//! - `f32` has all but the outputs of the DiT's embedder, blocks and `norm_out` and of the VAE decoder's stages. Those
//!   are tested by an f32 run that starts from `f32_bf16noise`'s `noise_packed`.
//! - `bf16` has the tensors up to 50,000 bytes (noise, steps, picture, ...). Of the others [`Case::bf16_distance`] says
//!   how far diffusers' bf16 strays from `f32_bf16noise`, which is what our bf16 has to beat.
//!
//! Names are those of `scripts/dump_goldens.py`: `dit.doubleN.0` is the text stream and `.1` the image stream,
//! `dit.double0.attn.0` the image's attention and `.1` the text's; `dit.singleN` has the text rows first. NCHW for images.
//! Files are gzipped safetensors, written by `scripts/pack_goldens.py`; a tensor that several files share is stored once
//! and named by the others.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// All cases.
pub const CASES: [&str; 5] = ["t2i_64x64", "t2i_160x96", "t2i_88x72", "ref1_96x64", "ref3_64x128"];

/// Values of a golden tensor. bf16 is widened to f32, u8 to i64.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// f32 and bf16.
    F32(Vec<f32>),
    /// i64 and u8.
    I64(Vec<i64>),
}

/// A golden tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Extents.
    pub shape: Vec<usize>,
    /// Values.
    pub values: Values,
}

impl Tensor {
    /// Values of a float tensor.
    pub fn f32(&self) -> &[f32] {
        match &self.values {
            Values::F32(values) => values,
            Values::I64(_) => panic!("the tensor holds integers"),
        }
    }

    /// Values of an integer tensor.
    pub fn i64(&self) -> &[i64] {
        match &self.values {
            Values::I64(values) => values,
            Values::F32(_) => panic!("the tensor holds floats"),
        }
    }

    /// Values of a picture (`image_u8`, `ref0.source_rgb`: `[height, width, 3]`).
    pub fn u8(&self) -> Vec<u8> {
        self.i64().iter().map(|&value| u8::try_from(value).expect("a byte")).collect()
    }
}

/// What a case asks for, and what diffusers' runs of it say as a whole.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Case {
    /// Prompt.
    pub prompt: String,
    /// Prompt in the chat layout, as tokenised.
    pub chat_text: String,
    /// Width asked for. diffusers floors it to a multiple of 16.
    pub width: usize,
    /// Height asked for.
    pub height: usize,
    /// Seed.
    pub seed: u64,
    /// Reference images: `refN.source_rgb` in the run.
    pub references: usize,
    /// sha256 of the picture's bytes, by run.
    pub image_sha256: BTreeMap<String, String>,
    /// Relative L2 distance of diffusers' bf16 run from `f32_bf16noise`, by tensor.
    pub bf16_distance: BTreeMap<String, f64>,
}

/// What `name` asks for.
pub fn case(name: &str) -> Case {
    let text = std::fs::read_to_string(directory().join("cases.json")).expect("cases.json");
    let mut cases: BTreeMap<String, Case> = serde_json::from_str(&text).expect("cases.json");
    cases.remove(name).unwrap_or_else(|| panic!("no golden case {name}"))
}

/// Tensors of a run (`f32`, `bf16` or `f32_bf16noise`) of a case.
pub fn load(case: &str, run: &str) -> BTreeMap<String, Tensor> {
    let (mut tensors, same_as) = parse(&unpack(&format!("{case}.{run}")));
    let mut others = BTreeMap::new();
    for (name, place) in same_as {
        let (file, other) = place.split_once('/').expect("file/tensor");
        if file == format!("{case}.{run}") {
            tensors.insert(name, tensors[other].clone());
        } else {
            let file = others.entry(file.to_owned()).or_insert_with_key(|file| parse(&unpack(file)).0);
            tensors.insert(name, file[other].clone());
        }
    }
    tensors
}

/// Tensors of a plain safetensors file.
pub fn load_file(path: impl Into<PathBuf>) -> BTreeMap<String, Tensor> {
    let path = path.into();
    parse(&std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).0
}

/// Relative L2 distance `|got - wanted| / |wanted|`, summed in f64.
pub fn distance(got: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(got.len(), wanted.len(), "lengths differ");
    let square = |value: f64| value * value;
    let error: f64 = got.iter().zip(wanted).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    let size: f64 = wanted.iter().map(|&w| square(f64::from(w))).sum();
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

/// The fixtures.
pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn directory() -> PathBuf {
    fixtures().join("goldens")
}

/// Tensors of a gzipped safetensors file.
pub fn load_packed(path: &Path) -> BTreeMap<String, Tensor> {
    parse(&unpack_file(path)).0
}

fn unpack(file: &str) -> Vec<u8> {
    unpack_file(&directory().join(format!("{file}.safetensors.gz")))
}

fn unpack_file(path: &Path) -> Vec<u8> {
    let packed = std::fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    GzDecoder::new(packed)
        .read_to_end(&mut bytes)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    bytes
}

/// Tensors of a file, and the places of those that it shares with other files.
fn parse(bytes: &[u8]) -> (BTreeMap<String, Tensor>, BTreeMap<String, String>) {
    let (_, header) = SafeTensors::read_metadata(bytes).expect("a safetensors header");
    let same_as = header
        .metadata()
        .as_ref()
        .and_then(|metadata| metadata.get("same_as"))
        .map_or_else(BTreeMap::new, |json| serde_json::from_str(json).expect("same_as"));
    let tensors = SafeTensors::deserialize(bytes).expect("a safetensors file");
    (tensors.iter().map(|(name, view)| (name.to_owned(), tensor(&view))).collect(), same_as)
}

fn tensor(view: &TensorView<'_>) -> Tensor {
    let data = view.data();
    let values = match view.dtype() {
        Dtype::F32 => Values::F32(chunks(data).map(f32::from_le_bytes).collect()),
        Dtype::BF16 => Values::F32(
            chunks(data).map(|b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)).collect(),
        ),
        Dtype::I64 => Values::I64(chunks(data).map(i64::from_le_bytes).collect()),
        Dtype::U8 => Values::I64(data.iter().map(|&value| i64::from(value)).collect()),
        other => panic!("golden tensors have no {other:?}"),
    };
    Tensor { shape: view.shape().to_vec(), values }
}

fn chunks<const N: usize>(data: &[u8]) -> impl Iterator<Item = [u8; N]> {
    data.chunks_exact(N).map(|chunk| chunk.try_into().expect("a whole chunk"))
}
