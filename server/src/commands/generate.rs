// SPDX-License-Identifier: Apache-2.0
//! `generate`: one picture to a file, without HTTP.
//!
//! Everything that can be refused is refused before the weights are read: references, sizes, seed, the output path.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use flux2::{
    OpenOptions, Request,
    pipeline::ModelInfo,
    pixels, reference,
    request::{Limits, SEED_END},
    spec::{self, ModelSpec},
};
use serde::Serialize;

use super::print_json;
use crate::{
    cli::{CheckpointArgs, DeviceArgs},
    failure::Failure,
    interrupt,
    output::Output,
    progress::{self, Display, Reporter},
    stdout::{print_line, tell},
};

/// Largest file read as a reference image: 16 megapixels of 16-bit RGBA, uncompressed.
const MAX_IMAGE_FILE: u64 = 128 << 20;

/// Make one picture
#[derive(Args)]
pub struct Generate {
    /// What to draw, or how to change the reference images
    prompt: String,
    /// Reference image (PNG, JPEG or WebP); up to three times
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// Width in pixels: 512 to 1920 in steps of 8 (dev: 16) [default: 1024, whatever the references' size]
    #[arg(long, value_name = "PIXELS")]
    width: Option<usize>,
    /// Height in pixels, as the width; width × height at most 1920 × 1088 [default: 1024]
    #[arg(long, value_name = "PIXELS")]
    height: Option<usize>,
    /// Seed of the noise, 0 to 2^53 - 1: the same seed gives the same picture
    #[arg(long, value_name = "N", default_value_t = 42, value_parser = seed, allow_negative_numbers = true)]
    seed: u64,
    /// Denoising steps [default: the model's own: klein 4 and no other, dev 50 of 1 to 200]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Guidance scale of a guided model, from 0 [default: the model's own: dev 4; klein takes none]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true)]
    guidance: Option<f32>,
    /// Picture to write, replaced if it exists [default: flux2-SEED.png]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    json: bool,
    /// Accept sizes from 16 pixels, for tests and small checkpoints
    #[arg(long, hide = true)]
    allow_small: bool,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    file: String,
    width: usize,
    height: usize,
    /// `asked`, or `default` where neither width nor height was given.
    size_from: &'static str,
    seed: u64,
    steps: usize,
    references: usize,
    /// Tokens of the prompt with the chat's own, before it is cut.
    prompt_tokens: usize,
    prompt_truncated: bool,
    model: &'a str,
    device: &'a str,
    dtype: &'static str,
    timing: Seconds<'a>,
}

#[derive(Serialize)]
struct Seconds<'a> {
    #[serde(flatten)]
    stages: &'a BTreeMap<&'static str, f64>,
    step_s: &'a [f64],
    load_s: f64,
    total_s: f64,
}

impl Generate {
    /// Runs the command.
    pub fn run(&self) -> Result<(), Failure> {
        interrupt::install()?;
        // Wrong usage is told before a missing checkpoint is, and both before any weight is read.
        let found = self.checkpoint.find();
        let looked_for = self.checkpoint.model.spec();
        let spec =
            found.as_ref().map_or(Ok(looked_for), |path| spec::of_checkpoint(path)).unwrap_or(looked_for);
        let limits = spec.limits.clone();
        let limits = if self.allow_small { limits.with_small_sizes() } else { limits };
        let request = self.request(spec, &limits)?;
        let output =
            Output::new(&self.out.clone().unwrap_or_else(|| format!("flux2-{}.png", self.seed).into()))?;
        let options = OpenOptions {
            checkpoint: found?,
            text_encoder: self.checkpoint.text_encoder(),
            device: self.device.choice(),
            precision: self.device.precision(),
            limits: Some(limits),
        };

        let display = if self.json { Display::Quiet } else { Display::of_terminal() };
        let loading = display.loading(&options.checkpoint);
        let start = Instant::now();
        let mut pipeline = flux2::open(&options, &mut |done, total| loading.read(done, total))
            .map_err(Failure::checkpoint)?;
        let load_s = start.elapsed().as_secs_f64();
        loading.finish(&pipeline.info().model, load_s);
        if !self.json {
            tell!(
                "{}×{} pixels, seed {}, {} steps, references: {}, {}",
                request.width,
                request.height,
                request.seed,
                request.steps,
                request.references.len(),
                options.precision.name()
            );
        }

        let prompt = pipeline.tokenizer().encode(&request.prompt)?;
        if prompt.truncated() && !self.json {
            tell!(
                "warning: the prompt has {} tokens with the chat's own, the model sees the first {}; shorten it or \
                 its end is ignored",
                prompt.total,
                prompt.ids.len()
            );
        }
        interrupt::running();
        let start = Instant::now();
        let mut reporter = Reporter::new(display);
        let result = pipeline.generate(&request, &mut reporter);
        reporter.finish();
        let (picture, timing) = result.map_err(|error| match error {
            flux2::Error::Request(error) => Failure::request(&error, &self.images),
            other => other.into(),
        })?;
        let info = pipeline.info();
        let metadata = metadata(&request, info);
        let chunks: Vec<_> = metadata.iter().map(|(key, value)| (*key, value.as_str())).collect();
        interrupt::writing();
        output.write(&pixels::encode_png(&picture, &chunks))?;
        let total_s = start.elapsed().as_secs_f64();

        let answer = Answer {
            file: output.path().display().to_string(),
            width: request.width,
            height: request.height,
            size_from: if self.width.or(self.height).is_some() { "asked" } else { "default" },
            seed: request.seed,
            steps: request.steps,
            references: request.references.len(),
            prompt_tokens: prompt.total,
            prompt_truncated: prompt.truncated(),
            model: &info.model,
            device: &info.device,
            dtype: info.precision.name(),
            timing: Seconds { stages: &timing.values, step_s: &timing.step_s, load_s, total_s },
        };
        if self.json {
            return print_json(&answer);
        }
        progress::print_part(&format!("done on {}", info.device), total_s);
        // The path alone on standard output, so that `$(flux2-server generate ...)` is the picture.
        print_line!("{}", answer.file);
        Ok(())
    }

    /// The request, as far as it can be checked without the weights.
    fn request(&self, spec: &ModelSpec, limits: &Limits) -> Result<Request, Failure> {
        // Before any file is read: there may be a thousand of them.
        if self.images.len() > limits.max_references {
            return Err(Failure::Usage(format!(
                "images: got {}, the model takes 0 to {}; leave out some --image",
                self.images.len(),
                limits.max_references
            )));
        }
        let references = self.images.iter().enumerate().map(|(index, file)| {
            reference::decode(&read(file)?, index).map_err(|error| Failure::request(&error, &self.images))
        });
        let defaults = Request::new(self.prompt.as_str());
        let request = Request {
            width: self.width.unwrap_or(defaults.width),
            height: self.height.unwrap_or(defaults.height),
            seed: self.seed,
            steps: self.steps.unwrap_or(spec.steps),
            guidance: self.guidance,
            references: references.collect::<Result<_, _>>()?,
            ..defaults
        };
        limits.check(&request).map_err(|error| Failure::request(&error, &self.images))?;
        Ok(request)
    }
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|&seed| seed < SEED_END)
        .ok_or_else(|| format!("a seed is a whole number from 0 to {}", SEED_END - 1))
}

/// A reference image's bytes.
fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    let unusable = |why: String| Failure::Unusable(format!("image {}: {why}", file.display()));
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|opened| opened.take(MAX_IMAGE_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| unusable(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > MAX_IMAGE_FILE {
        return Err(unusable(format!("is larger than {} MiB, make it smaller", MAX_IMAGE_FILE >> 20)));
    }
    Ok(bytes)
}

/// Text chunks of the PNG: enough to make the picture again.
fn metadata(request: &Request, info: &ModelInfo) -> Vec<(&'static str, String)> {
    let guidance = request.guidance.or(info.spec.guidance);
    let mut chunks = vec![
        ("prompt", request.prompt.clone()),
        ("seed", request.seed.to_string()),
        ("width", request.width.to_string()),
        ("height", request.height.to_string()),
        ("steps", request.steps.to_string()),
        ("references", request.references.len().to_string()),
        ("model", info.model.clone()),
        ("dtype", info.precision.name().to_owned()),
        ("software", concat!("flux2-server ", env!("CARGO_PKG_VERSION")).to_owned()),
    ];
    chunks.extend(guidance.map(|scale| ("guidance", scale.to_string())));
    chunks
}
