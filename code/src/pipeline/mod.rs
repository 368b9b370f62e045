// SPDX-License-Identifier: Apache-2.0
//! From a request to a picture: encode → references → denoise → decode.
//!
//! This file holds what callers see; [`open`] loads checkpoints, [`Flux2`] makes pictures, [`plan`](crate::plan)
//! counts the same run without weights.

mod load;
mod reference_cache;
pub(crate) mod run;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

pub use load::{OnLoad, check, load, open};
pub use reference_cache::CAPACITY as REFERENCE_CACHE_SIZE;
pub use run::Flux2;
pub(crate) use run::TOKEN_PIXELS;

use image::RgbImage;

use crate::{
    device::{MemoryReport, Precision, Shape},
    error::Result,
    prompt::PromptTokenizer,
    request::{Limits, Request},
    spec::ModelSpec,
};

/// Which device to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// This computer's processor.
    Cpu {
        /// Worker threads; `None` is one per physical core that the process may use.
        threads: Option<usize>,
    },
}

impl DeviceChoice {
    /// Whether it makes one size after another; a device that captures a trace for one shape does not.
    pub const fn any_size(&self) -> bool {
        match self {
            Self::Cpu { .. } => true,
        }
    }
}

/// What to load and where.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Checkpoint directory in diffusers layout.
    pub checkpoint: PathBuf,
    /// Another directory to take the text encoder from (`KLEIN_TEXT_ENCODER`): the `text_encoder` directory of a
    /// diffusers checkpoint, or a full Qwen3 checkpoint.
    pub text_encoder: Option<PathBuf>,
    /// Device.
    pub device: DeviceChoice,
    /// Precision; also decides the noise of a seed.
    pub precision: Precision,
    /// Ranges to check requests against; `None` for the model's own.
    pub limits: Option<Limits>,
}

/// What was loaded.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// [`snapshot::model_name`](crate::snapshot::model_name).
    pub model: String,
    /// Facts of the model family.
    pub spec: &'static ModelSpec,
    /// Device name.
    pub device: String,
    /// Rows and columns of the mesh of chips.
    pub mesh: [usize; 2],
    /// Precision.
    pub precision: Precision,
    /// Ranges that requests are checked against.
    pub limits: Limits,
    /// Columns of prompt embeds.
    pub prompt_embeds_width: usize,
    /// Memory that the weights take.
    pub memory: MemoryReport,
}

/// A stage of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Prompt to prompt embeds.
    TextEncoder,
    /// Reference images to latent tokens.
    ReferenceEncode,
    /// Prompt embeds to the DiT's context, once per request.
    Context,
    /// Denoising steps.
    Dit,
    /// Latents to pixels.
    VaeDecode,
}

impl Stage {
    /// All stages in order.
    pub const ALL: [Self; 5] =
        [Self::TextEncoder, Self::ReferenceEncode, Self::Context, Self::Dit, Self::VaeDecode];

    /// Key of the card's timing: `text_encoder_s`, `reference_encode_s`, `context_s`, `dit_s`, `vae_decode_s`.
    pub const fn timing_key(self) -> &'static str {
        match self {
            Self::TextEncoder => "text_encoder_s",
            Self::ReferenceEncode => "reference_encode_s",
            Self::Context => "context_s",
            Self::Dit => "dit_s",
            Self::VaeDecode => "vae_decode_s",
        }
    }
}

/// Seconds by stage, under the card's keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timing {
    /// Seconds of each stage that ran, by [`Stage::timing_key`].
    pub values: BTreeMap<&'static str, f64>,
    /// Seconds of each denoising step.
    pub step_s: Vec<f64>,
    /// Reference images whose encoding was taken from the cache.
    pub cached_references: usize,
}

/// What a run tells its caller.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A stage begins.
    Stage {
        /// Which.
        stage: Stage,
    },
    /// Work done within the whole run, in floating-point operations. Comes after every operation.
    Work {
        /// Done so far.
        done: u64,
        /// Of the whole run.
        total: u64,
    },
    /// A denoising step is done.
    Step {
        /// Steps done, from 1.
        step: usize,
        /// Steps of the run.
        steps: usize,
        /// Seconds of this step.
        seconds: f64,
    },
    /// A preview that [`Progress::wants_preview`] asked for: the model's present estimate of the finished picture.
    Preview {
        /// Steps done, from 1.
        step: usize,
        /// The picture at its final size.
        image: &'a RgbImage,
    },
}

/// Follows a run, and can stop it.
pub trait Progress {
    /// Something happened.
    fn event(&mut self, _event: Event<'_>) {}
    /// Asked before every operation; `true` ends the run with [`crate::Error::Stopped`]. The reason (cancelled, deadline,
    /// client gone) is the caller's to know.
    fn stopped(&mut self) -> bool {
        false
    }
    /// Asked after each step but the last whether to decode a preview (the price of one VAE decode).
    fn wants_preview(&mut self, _step: usize, _steps: usize) -> bool {
        false
    }
    /// Asked whether [`Progress::value`] wants the value of a named stage (it costs a download). For comparing devices.
    fn wants_value(&self, _stage: &str) -> bool {
        false
    }
    /// The value of a named stage, as `dit.double0.text`, `step2.velocity` or `vae.decoder.mid`.
    fn value(&mut self, _stage: &str, _shape: Shape, _values: &[f32]) {}
}

/// Follows nothing.
pub struct Silent;

impl Progress for Silent {}

/// Prompt embeds `[tokens, width]`, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptEmbeds {
    /// Rows: the model's text tokens (512).
    pub tokens: usize,
    /// Columns: taps × hidden size (7680 for klein 4B).
    pub width: usize,
    /// Values.
    pub values: Vec<f32>,
}

/// Latent tokens of reference images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct References {
    /// `[sum of the grids, 128]`, row-major, all references in turn.
    pub tokens: Vec<f32>,
    /// `[height, width]` of each reference in tokens (pixels / 16).
    pub grids: Vec<[usize; 2]>,
}

/// Final latents of a picture: `[grid_height · grid_width, 128]`, row-major, normalised as the DiT sees them.
#[derive(Clone, Debug, PartialEq)]
pub struct Latents {
    /// Values.
    pub values: Vec<f32>,
    /// Rows of tokens: height / 16.
    pub grid_height: usize,
    /// Tokens in a row: width / 16.
    pub grid_width: usize,
}

/// A loaded model, ready to make pictures. One picture at a time.
pub trait Pipeline: Send {
    /// What was loaded.
    fn info(&self) -> &ModelInfo;
    /// The tokenizer, to count a prompt's tokens before it is queued.
    fn tokenizer(&self) -> Arc<PromptTokenizer>;
    /// Makes a picture of exactly the size asked for.
    ///
    /// # Errors
    /// [`crate::Error::Request`] before anything runs, [`crate::Error::Stopped`], [`crate::Error::NonFinite`], device errors.
    fn generate(&mut self, request: &Request, progress: &mut dyn Progress) -> Result<(RgbImage, Timing)>;
    /// Prompt embeds of a prompt.
    fn encode(&mut self, prompt: &str, progress: &mut dyn Progress) -> Result<PromptEmbeds>;
    /// Latent tokens of reference images; the last 4 encodings are cached by pixel content and geometry.
    fn references(&mut self, images: &[RgbImage], progress: &mut dyn Progress) -> Result<References>;
    /// All denoising steps from the noise of `seed`. Width and height are multiples of 16.
    fn denoise(
        &mut self,
        embeds: &PromptEmbeds,
        references: &References,
        width: usize,
        height: usize,
        seed: u64,
        progress: &mut dyn Progress,
    ) -> Result<Latents>;
    /// A picture from latents, at the latents' own size.
    fn decode(&mut self, latents: &Latents, progress: &mut dyn Progress) -> Result<RgbImage>;
}
