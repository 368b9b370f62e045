// SPDX-License-Identifier: Apache-2.0
//! What may be asked of a model: sizes, seeds, steps, references, with refusals that name the parameter, the value and
//! the range.

use image::RgbImage;

use crate::{error::RequestError, reference};

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
    /// Width and height of the one size that is served, where there is only one.
    pub only_size: Option<[usize; 2]>,
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
        only_size: None,
        max_references: 3,
        max_prompt_chars: 4000,
        steps: 4..=4,
        guidance: false,
    };

    /// FLUX.2 \[dev\]: 1 to 200 steps, any guidance from 0, sizes on the model's own grid.
    pub const DEV: Self = Self { grid: 16, steps: 1..=200, guidance: true, ..Self::KLEIN };

    /// The same with sizes from 16 pixels, for tests and small checkpoints.
    #[must_use]
    pub fn with_small_sizes(self) -> Self {
        Self { min_side: 16, ..self }
    }

    /// Checks everything that can be checked without running: prompt, size, seed, steps, guidance and the references'
    /// number and shape.
    ///
    /// # Errors
    /// The first parameter out of its range, with the value got and the range.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        let prompt = request.prompt.trim();
        if prompt.is_empty() {
            return Err(RequestError::new("prompt", "is empty, wanted a description of the picture"));
        }
        check_prompt_text(prompt, self.max_prompt_chars)?;
        self.check_size(request.width, request.height)?;
        if request.seed >= SEED_END {
            let message = format!("is {}, wanted 0 to {} (2^53 - 1)", request.seed, SEED_END - 1);
            return Err(RequestError::new("seed", message));
        }
        if !self.steps.contains(&request.steps) {
            let (least, most) = (self.steps.start(), self.steps.end());
            let wanted = if least == most { least.to_string() } else { format!("{least} to {most}") };
            return Err(RequestError::new("steps", format!("is {}, wanted {wanted}", request.steps)));
        }
        self.check_guidance(request.guidance)?;
        if request.references.len() > self.max_references {
            let (got, most) = (request.references.len(), self.max_references);
            return Err(RequestError::new(
                "images",
                format!("has {got} reference images, wanted at most {most}"),
            ));
        }
        for (index, image) in request.references.iter().enumerate() {
            reference::check_shape(image.width() as usize, image.height() as usize, index)?;
        }
        Ok(())
    }

    /// Checks a picture's size: the one that is served if there is only one, each side's range and grid, then the area.
    ///
    /// # Errors
    /// The side that is wrong, with the value got and the range.
    pub fn check_size(&self, width: usize, height: usize) -> Result<(), RequestError> {
        if let Some([only_width, only_height]) = self.only_size {
            let sides = [("width", width, only_width), ("height", height, only_height)];
            if let Some((parameter, side, only)) = sides.into_iter().find(|(_, side, only)| side != only) {
                let message = format!(
                    "is {side}, wanted {only}: the size {only_width} x {only_height} was fixed at start, no other is served"
                );
                return Err(RequestError::new(parameter, message));
            }
        }
        for (parameter, side) in [("width", width), ("height", height)] {
            if !(self.min_side..=self.max_side).contains(&side) || !side.is_multiple_of(self.grid) {
                let message = format!(
                    "is {side}, wanted a multiple of {} from {} to {}",
                    self.grid, self.min_side, self.max_side
                );
                return Err(RequestError::new(parameter, message));
            }
        }
        // Both sides are in range, so the area cannot overflow.
        if width * height > self.max_pixels {
            let message = format!(
                "{width} x {height} is {} pixels, wanted at most {}; at this width the height is at most {}",
                width * height,
                self.max_pixels,
                self.max_pixels / width / self.grid * self.grid
            );
            return Err(RequestError::new("height", message));
        }
        Ok(())
    }

    #[allow(clippy::float_cmp, reason = "a distilled model's guidance is exactly 1")]
    fn check_guidance(&self, guidance: Option<f32>) -> Result<(), RequestError> {
        match guidance {
            Some(scale) if !self.guidance && scale != 1.0 => {
                let message =
                    format!("is {scale}, wanted none or 1: this model is distilled and takes no guidance");
                Err(RequestError::new("guidance", message))
            }
            Some(scale) if !(scale.is_finite() && scale >= 0.0) => {
                Err(RequestError::new("guidance", format!("is {scale}, wanted a finite number from 0")))
            }
            _ => Ok(()),
        }
    }
}

/// What holds for every prompt, however it comes: no NUL, and not more than `max_chars` characters.
pub(crate) fn check_prompt_text(prompt: &str, max_chars: usize) -> Result<(), RequestError> {
    if let Some(at) = prompt.chars().position(|c| c == '\0') {
        let message = format!("has a NUL character at position {at}, wanted text without one");
        return Err(RequestError::new("prompt", message));
    }
    let chars = prompt.chars().count();
    if chars > max_chars {
        return Err(RequestError::new(
            "prompt",
            format!("has {chars} characters, wanted at most {max_chars}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(limits: &Limits, change: impl Fn(&mut Request)) -> String {
        let mut request = Request::new("a cat");
        change(&mut request);
        limits.check(&request).err().map(|error| error.to_string()).unwrap_or_default()
    }

    fn klein(change: impl Fn(&mut Request)) -> String {
        refusal(&Limits::KLEIN, change)
    }

    fn sized(width: usize, height: usize) -> String {
        klein(|r| (r.width, r.height) = (width, height))
    }

    #[test]
    fn the_defaults_and_the_corners_of_every_range_are_accepted() {
        assert_eq!(klein(|_| ()), "");
        for (width, height) in
            [(512, 512), (1920, 1088), (1088, 1920), (1920, 1080), (1448, 1440), (520, 1920)]
        {
            assert_eq!(sized(width, height), "");
        }
        assert_eq!(klein(|r| r.prompt = "é".repeat(4000)), "");
        assert_eq!(klein(|r| r.prompt = format!("  {} \n", "x".repeat(4000))), "");
        assert_eq!(klein(|r| r.seed = 0), "");
        assert_eq!(klein(|r| r.seed = (1 << 53) - 1), "");
        assert_eq!(klein(|r| r.guidance = Some(1.0)), "");
        assert_eq!(klein(|r| r.references = vec![RgbImage::new(64, 512); 3]), "");
    }

    #[test]
    fn prompts_are_refused_when_empty_too_long_or_with_nul() {
        for prompt in ["", " \n\t "] {
            assert_eq!(
                klein(|r| r.prompt = prompt.into()),
                "prompt: is empty, wanted a description of the picture"
            );
        }
        let nul = "prompt: has a NUL character at position 2, wanted text without one";
        assert_eq!(klein(|r| r.prompt = "éa\0".into()), nul);
        let long = "prompt: has 4001 characters, wanted at most 4000";
        assert_eq!(klein(|r| r.prompt = "é".repeat(4001)), long);
    }

    #[test]
    fn sizes_are_refused_by_range_grid_and_area() {
        let side =
            |parameter, value| format!("{parameter}: is {value}, wanted a multiple of 8 from 512 to 1920");
        for value in [0, 504, 513, 1023, 1928, usize::MAX - 7] {
            assert_eq!(sized(value, 1024), side("width", value));
            assert_eq!(sized(1024, value), side("height", value));
        }
        assert_eq!(
            sized(1920, 1096),
            "height: 1920 x 1096 is 2104320 pixels, wanted at most 2088960; at this width the height is at most 1088"
        );
        assert_eq!(refusal(&Limits::KLEIN.with_small_sizes(), |r| (r.width, r.height) = (16, 24)), "");
    }

    #[test]
    fn a_fixed_size_is_named_in_the_refusal_of_another() {
        let limits = Limits { only_size: Some([1024, 768]), ..Limits::DEV };
        let sized = |width, height| refusal(&limits, |r| (r.width, r.height) = (width, height));
        assert_eq!(sized(1024, 768), "");
        let reason = "the size 1024 x 768 was fixed at start, no other is served";
        assert_eq!(sized(512, 768), format!("width: is 512, wanted 1024: {reason}"));
        assert_eq!(sized(1024, 1024), format!("height: is 1024, wanted 768: {reason}"));
    }

    #[test]
    fn seeds_stay_exact_in_javascript() {
        let message = "seed: is 9007199254740992, wanted 0 to 9007199254740991 (2^53 - 1)";
        assert_eq!(klein(|r| r.seed = 1 << 53), message);
    }

    #[test]
    fn a_distilled_model_has_four_steps_and_no_guidance() {
        for steps in [0, 3, 5] {
            assert_eq!(klein(|r| r.steps = steps), format!("steps: is {steps}, wanted 4"));
        }
        let message = "guidance: is 3.5, wanted none or 1: this model is distilled and takes no guidance";
        assert_eq!(klein(|r| r.guidance = Some(3.5)), message);
        assert!(klein(|r| r.guidance = Some(f32::NAN)).starts_with("guidance: is NaN"));

        let guided = Limits { guidance: true, steps: 1..=50, ..Limits::KLEIN };
        assert_eq!(refusal(&guided, |r| (r.guidance, r.steps) = (Some(3.5), 50)), "");
        assert_eq!(refusal(&guided, |r| r.steps = 51), "steps: is 51, wanted 1 to 50");
        assert!(refusal(&guided, |r| r.guidance = Some(-1.0)).contains("wanted a finite number"));
    }

    #[test]
    fn references_are_refused_by_number_and_shape() {
        let four = "images: has 4 reference images, wanted at most 3";
        assert_eq!(klein(|r| r.references = vec![RgbImage::new(64, 64); 4]), four);
        let message = klein(|r| r.references = vec![RgbImage::new(64, 64), RgbImage::new(64, 513)]);
        assert!(message.starts_with("images[1]: "), "{message}");
    }
}
