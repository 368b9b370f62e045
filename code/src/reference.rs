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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// An integer picture that any language can make again.
    fn picture(width: u32, height: u32) -> RgbImage {
        RgbImage::from_fn(width, height, |x, y| {
            let (x, y) = (u64::from(x), u64::from(y));
            let red = (x * 7 + y * 3) % 256;
            let green = ((x * x + y * y) / 5) % 256;
            let blue = ((x / 8 + y / 8) % 2) * 200 + (x * y) % 56;
            image::Rgb([red, green, blue].map(|channel| channel as u8))
        })
    }

    /// (from, to, first hex digits of the sha256 of Pillow 13.0.0's bytes), by `tests/scripts/pillow_lanczos.py`.
    const PILLOW: [(u32, u32, usize, usize, &str); 10] = [
        (1300, 900, 1230, 852, "f3ce833229e2980f"),
        (1920, 1080, 1365, 768, "d8edbfc98a80b886"),
        (1025, 1024, 1024, 1023, "d515030e3124dfd4"),
        (900, 3000, 560, 1869, "7b79f4806d6728b8"),
        (4096, 513, 2893, 362, "1aa9f7c56ff4d961"),
        (2000, 2000, 1024, 1024, "126eb77fd7a7faf7"),
        (200, 140, 150, 101, "ad09cd2df6c589bc"),
        (200, 140, 300, 202, "0e8fc3cac9a15972"),
        (200, 140, 64, 64, "7353da8fa51611b9"),
        (200, 140, 333, 77, "eb6efb61254ba2eb"),
    ];

    #[test]
    fn shrinking_is_pillows_bit_for_bit() {
        for (from_width, from_height, width, height, sha256) in PILLOW {
            if from_width > 200 {
                let size = shrunk_size(from_width as usize, from_height as usize);
                assert_eq!(size, Some((width, height)), "{from_width}x{from_height}");
            }
            let resized = lanczos::resize(&picture(from_width, from_height), width, height);
            let digest = Sha256::digest(resized.as_raw());
            let start = format!("{:016x}", u64::from_be_bytes(*digest.first_chunk().unwrap()));
            assert_eq!(start, sha256, "{from_width}x{from_height} to {width}x{height}");
        }
    }

    #[test]
    fn sizes_follow_the_reference() {
        for ((width, height), wanted) in [
            ((1920, 1080), (1360, 768)),
            ((1300, 900), (1216, 848)),
            ((1025, 1024), (1024, 1008)),
            ((1024, 1024), (1024, 1024)),
            // Small ones are never enlarged.
            ((300, 200), (288, 192)),
            ((64, 64), (64, 64)),
            ((64, 512), (64, 512)),
        ] {
            let prepared = prepare(&picture(width, height), 0).unwrap();
            assert_eq!((prepared.width, prepared.height), wanted, "{width}x{height}");
            assert_eq!(prepared.values.len(), wanted.0 * wanted.1 * 3);
        }
    }

    #[test]
    fn what_is_small_enough_is_cropped_around_its_centre_only() {
        let image = picture(117, 90);
        let prepared = prepare(&image, 0).unwrap();
        assert_eq!((prepared.width, prepared.height), (112, 80));
        let first = image.get_pixel(2, 5).0.map(|byte| f32::from(byte) / 255.0 * 2.0 - 1.0);
        assert_eq!(prepared.values[..3], first);
    }

    #[test]
    fn small_and_narrow_shapes_are_refused() {
        let refusal = |width, height| prepare(&RgbImage::new(width, height), 2).unwrap_err().to_string();
        assert_eq!(refusal(1, 1), "images[2]: is 1 x 1 pixels, wanted sides of at least 64");
        assert_eq!(refusal(63, 200), "images[2]: is 63 x 200 pixels, wanted sides of at least 64");
        assert_eq!(refusal(64, 513), "images[2]: is 64 x 513 pixels, wanted an aspect of at most 8 to 1");
        assert_eq!(refusal(0, 0), "images[2]: is 0 x 0 pixels, wanted sides of at least 64");
    }
}
