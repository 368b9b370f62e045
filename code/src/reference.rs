// SPDX-License-Identifier: Apache-2.0
//! Reference images: from a stranger's file to the pixels that the VAE encodes.
//!
//! A reference keeps its own aspect whatever the output's. It is only ever shrunk, never enlarged (diffusers
//! `Flux2ImageProcessor`); BFL's and other ports differ.

mod decode;
mod lanczos;

use image::RgbImage;

pub use decode::{MAX_PIXELS, decode};

use crate::{error::RequestError, pixels::centre_crop};

/// Shortest side of a reference.
pub const MIN_SIDE: usize = 64;
/// Longest side over shortest.
pub const MAX_ASPECT: usize = 8;
/// Largest area that is encoded; larger references are shrunk to it.
const MAX_AREA: usize = 1024 * 1024;
/// Sides are cropped to a multiple of this.
const GRID: usize = 16;

/// What the VAE encodes.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferencePixels {
    /// Height, a multiple of 16.
    pub height: usize,
    /// Width, a multiple of 16.
    pub width: usize,
    /// NHWC `[height, width, 3]`, -1 to 1.
    pub values: Vec<f32>,
}

/// Pixels of reference `index`: shrunk to at most 1024² of area with Pillow's Lanczos, cropped to multiples of 16 around
/// the centre, `byte / 255 · 2 - 1`.
///
/// # Errors
/// A refusal of `images[index]` with a side under 64 pixels or an aspect over 8.
pub fn prepare(image: &RgbImage, index: usize) -> Result<ReferencePixels, RequestError> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    check_shape(width, height, index)?;
    let shrunk = shrunk_size(width, height).map(|(width, height)| lanczos::resize(image, width, height));
    let image = shrunk.as_ref().unwrap_or(image);

    let [width, height] = [image.width(), image.height()].map(|side| side as usize / GRID * GRID);
    let cropped = centre_crop(image, width as u32, height as u32);
    let values = cropped.as_raw().iter().map(|&byte| f32::from(byte) / 255.0 * 2.0 - 1.0).collect();
    Ok(ReferencePixels { height, width, values })
}

/// Refuses shapes that the model was not made for.
pub(crate) fn check_shape(width: usize, height: usize, index: usize) -> Result<(), RequestError> {
    let (short, long) = (width.min(height), width.max(height));
    if short < MIN_SIDE {
        let message = format!("is {width} x {height} pixels, wanted sides of at least {MIN_SIDE}");
        return Err(refusal(index, message));
    }
    if long > MAX_ASPECT * short {
        let message = format!("is {width} x {height} pixels, wanted an aspect of at most {MAX_ASPECT} to 1");
        return Err(refusal(index, message));
    }
    Ok(())
}

/// Size to shrink to, if the area is too large: scaled in f64 and cut, as Python's `int(width * scale)`.
fn shrunk_size(width: usize, height: usize) -> Option<(usize, usize)> {
    if width * height <= MAX_AREA {
        return None;
    }
    let scale = (MAX_AREA as f64 / (width * height) as f64).sqrt();
    Some(((width as f64 * scale) as usize, (height as f64 * scale) as usize))
}

fn refusal(index: usize, message: String) -> RequestError {
    RequestError::new(format!("images[{index}]"), message)
}
