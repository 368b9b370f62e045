// SPDX-License-Identifier: Apache-2.0
//! From a stranger's file to an 8-bit RGB picture.
//!
//! Rules, the same for every format: content decides, not a name or declared type; the header is checked before a pixel is
//! decoded; EXIF orientation is applied; 16-bit is rounded to 8; grey and palette become RGB; alpha is laid over white;
//! colour profiles are ignored, every picture is taken for sRGB; CMYK is refused, because its colours mean nothing without
//! a profile and files disagree on their sign.

use std::io::Cursor;

use image::{
    DynamicImage, ImageDecoder, ImageFormat, Limits, RgbImage,
    codecs::{jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder},
    metadata::Orientation,
};

use crate::error::RequestError;

/// Most pixels that a file's header may claim: 16 megapixels of 1024².
pub const MAX_PIXELS: u64 = 16 << 20;
/// Bytes that chunks of a file other than its pixels may take when unpacked.
const MAX_CHUNK_BYTES: u64 = 32 << 20;

/// Decodes reference `index`: PNG, JPEG or WebP of one frame and at most 16 megapixels.
///
/// # Errors
/// A refusal of `images[index]` with what is wrong with the file.
pub fn decode(bytes: &[u8], index: usize) -> Result<RgbImage, RequestError> {
    decode_any(bytes).map_err(|message| super::refusal(index, message))
}

fn decode_any(bytes: &[u8]) -> Result<RgbImage, String> {
    if bytes.is_empty() {
        return Err("is empty, wanted a PNG, JPEG or WebP image".into());
    }
    match image::guess_format(bytes) {
        Ok(ImageFormat::Png) => {
            let mut limits = Limits::no_limits();
            limits.max_alloc = Some(MAX_CHUNK_BYTES);
            let decoder = PngDecoder::with_limits(Cursor::new(bytes), limits).map_err(unreadable)?;
            let frames = if decoder.is_apng().map_err(unreadable)? { Frames::Several } else { Frames::One };
            decode_with(decoder, frames)
        }
        Ok(ImageFormat::Jpeg) => {
            check_jpeg(bytes)?;
            decode_with(JpegDecoder::new(Cursor::new(bytes)).map_err(unreadable)?, Frames::One)
        }
        Ok(ImageFormat::WebP) => {
            let decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(unreadable)?;
            let frames = if decoder.has_animation() { Frames::Several } else { Frames::One };
            decode_with(decoder, frames)
        }
        Ok(other) => {
            let name = other.extensions_str().first().unwrap_or(&"unknown").to_uppercase();
            Err(format!("is a {name} image, wanted PNG, JPEG or WebP"))
        }
        Err(_) => Err("is not an image, wanted PNG, JPEG or WebP".into()),
    }
}

#[derive(PartialEq)]
enum Frames {
    One,
    Several,
}

fn decode_with(mut decoder: impl ImageDecoder, frames: Frames) -> Result<RgbImage, String> {
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels > MAX_PIXELS {
        return Err(format!(
            "is {width} x {height} = {pixels} pixels, wanted at most {MAX_PIXELS} (16 megapixels); shrink it first"
        ));
    }
    if frames == Frames::Several {
        return Err("is animated, wanted a picture of one frame".into());
    }
    // Damaged metadata is no reason to refuse the pixels.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
    image.apply_orientation(orientation);
    Ok(if image.color().has_alpha() { over_white(&image) } else { image.into_rgb8() })
}

fn unreadable(error: image::ImageError) -> String {
    format!("cannot be decoded: {error}")
}

/// `alpha · colour + (1 - alpha) · white`, rounded: colour under alpha 0 leaves no trace.
fn over_white(image: &DynamicImage) -> RgbImage {
    let rgba = image.to_rgba8();
    let pixels = rgba.pixels().flat_map(|pixel| {
        let [colour @ .., alpha] = pixel.0.map(u32::from);
        colour.map(|c| ((alpha * c + (255 - alpha) * 255 + 127) / 255) as u8)
    });
    let (width, height) = rgba.dimensions();
    RgbImage::from_raw(width, height, pixels.collect()).expect("three bytes for each pixel")
}

/// Refuses what the decoder would let through: CMYK (four components), and a file cut short, whose rest it paints grey.
fn check_jpeg(bytes: &[u8]) -> Result<(), String> {
    const CUT_SHORT: &str = "is a JPEG that is cut short; send the whole file";
    // Segments are FF, marker, big-endian length that counts itself. Only the start-of-image marker stands alone.
    let mut at = 2;
    loop {
        let [0xFF, marker, rest @ ..] = bytes.get(at..).unwrap_or_default() else {
            return Err(CUT_SHORT.into());
        };
        let [high, low, body @ ..] = rest else { return Err(CUT_SHORT.into()) };
        match marker {
            // Fill bytes may stand before a marker.
            0xFF => {
                at += 1;
                continue;
            }
            // Start of frame: precision, height, width (2 bytes each), number of components. C4, C8 and CC are others.
            0xC0..=0xCF if !matches!(marker, 0xC4 | 0xC8 | 0xCC) => {
                if body.get(5) == Some(&4) {
                    return Err("is a CMYK JPEG, wanted RGB or grey; convert it first".into());
                }
            }
            // Start of scan: compressed data and further scans to the end-of-image marker.
            0xDA => {
                let whole = body.windows(2).any(|pair| pair == [0xFF, 0xD9]);
                return if whole { Ok(()) } else { Err(CUT_SHORT.into()) };
            }
            _ => {}
        }
        at += 2 + usize::from(u16::from_be_bytes([*high, *low]));
    }
}
