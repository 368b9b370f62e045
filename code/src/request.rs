// SPDX-License-Identifier: Apache-2.0
//! What may be asked of a model: sizes, seeds, steps, references, with refusals that name the parameter, the value and
//! the range.

use image::RgbImage;

use crate::error::RequestError;

/// Largest seed plus one. JavaScript's numbers are exact below it, so a seed survives every client.
pub const SEED_END: u64 = 1 << 53;

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to draw, or how to change the references.
    pub prompt: String,
    /// Width of the picture in pixels.
    pub width: usize,
    /// Height of the picture in pixels.
    pub height: usize,
    /// Seed of the noise; torch's generator uses its low 32 bits.
    pub seed: u64,
    /// Denoising steps.
    pub steps: usize,
    /// Guidance scale; `None` for a distilled model.
    pub guidance: Option<f32>,
    /// Reference images, as decoded by [`crate::reference::decode`].
    pub references: Vec<RgbImage>,
}

impl Request {
    /// A text-to-image request with klein's defaults: 1024×1024, seed 42, 4 steps.
    pub fn new(prompt: impl Into<String>) -> Self {
        Self {
            prompt: prompt.into(),
            width: 1024,
            height: 1024,
            seed: 42,
            steps: 4,
            guidance: None,
            references: Vec::new(),
        }
    }
}

/// The ranges that a request is checked against.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Smallest width and height.
    pub min_side: usize,
    /// Largest width and height.
    pub max_side: usize,
    /// Width and height are multiples of this.
    pub grid: usize,
    /// Largest width × height.
    pub max_pixels: usize,
    /// Most reference images.
    pub max_references: usize,
    /// Longest prompt in characters, after trimming.
    pub max_prompt_chars: usize,
    /// Fewest and most denoising steps.
    pub steps: std::ops::RangeInclusive<usize>,
    /// Whether the model takes a guidance scale. A distilled model accepts none, or exactly 1.
    pub guidance: bool,
}

impl Limits {
    /// What the published package serves with klein.
    pub const KLEIN: Self = Self {
        min_side: 512,
        max_side: 1920,
        grid: 8,
        max_pixels: 1920 * 1088,
        max_references: 3,
        max_prompt_chars: 4000,
        steps: 4..=4,
        guidance: false,
    };

    /// The same with sizes from 16 pixels, for tests and small checkpoints.
    #[must_use]
    pub fn with_small_sizes(self) -> Self {
        Self { min_side: 16, ..self }
    }

    /// Checks everything that can be checked without running: prompt, size, seed, steps, guidance and the references'
    /// number and shape.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        let _ = request;
        todo!()
    }
}
