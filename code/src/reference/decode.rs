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
    decode_any(bytes).map_err(|Refusal(message)| super::refusal(index, message))
}

/// What is wrong with a file.
struct Refusal(String);

impl From<image::ImageError> for Refusal {
    fn from(error: image::ImageError) -> Self {
        Self(format!("cannot be decoded: {error}"))
    }
}

impl From<&str> for Refusal {
    fn from(message: &str) -> Self {
        Self(message.to_string())
    }
}

fn decode_any(bytes: &[u8]) -> Result<RgbImage, Refusal> {
    if bytes.is_empty() {
        return Err("is empty, wanted a PNG, JPEG or WebP image".into());
    }
    let file = Cursor::new(bytes);
    match image::guess_format(bytes) {
        Ok(ImageFormat::Png) => {
            let mut limits = Limits::no_limits();
            limits.max_alloc = Some(MAX_CHUNK_BYTES);
            let decoder = PngDecoder::with_limits(file, limits)?;
            let animated = decoder.is_apng()?;
            decode_with(decoder, animated)
        }
        Ok(ImageFormat::Jpeg) => {
            check_jpeg(bytes)?;
            decode_with(JpegDecoder::new(file)?, false)
        }
        Ok(ImageFormat::WebP) => {
            let decoder = WebPDecoder::new(file)?;
            let animated = decoder.has_animation();
            decode_with(decoder, animated)
        }
        Ok(other) => {
            let name = other.extensions_str().first().unwrap_or(&"unknown").to_uppercase();
            Err(Refusal(format!("is a {name} image, wanted PNG, JPEG or WebP")))
        }
        Err(_) => Err("is not an image, wanted PNG, JPEG or WebP".into()),
    }
}

fn decode_with(mut decoder: impl ImageDecoder, animated: bool) -> Result<RgbImage, Refusal> {
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels > MAX_PIXELS {
        return Err(Refusal(format!(
            "is {width} x {height} = {pixels} pixels, wanted at most {MAX_PIXELS} (16 megapixels); shrink it first"
        )));
    }
    if animated {
        return Err("is animated, wanted a picture of one frame".into());
    }
    // Damaged metadata is no reason to refuse the pixels.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder)?;
    image.apply_orientation(orientation);
    Ok(if image.color().has_alpha() { over_white(&image) } else { image.into_rgb8() })
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
fn check_jpeg(bytes: &[u8]) -> Result<(), Refusal> {
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
            0xC0..=0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF if body.get(5) == Some(&4) => {
                return Err("is a CMYK JPEG, wanted RGB or grey; convert it first".into());
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{fs, path::Path};

    use image::{ImageBuffer, Luma, Rgb, Rgba};
    use proptest::prelude::*;

    use super::*;

    /// Files of `tests/fixtures/references`, by `tests/scripts/make_reference_fixtures.py`.
    fn fixture(name: &str) -> Vec<u8> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/references").join(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn png<P>(image: &ImageBuffer<P, Vec<P::Subpixel>>) -> Vec<u8>
    where
        P: image::PixelWithColorType,
        [P::Subpixel]: image::EncodableLayout,
    {
        let mut file = Vec::new();
        image.write_to(&mut Cursor::new(&mut file), ImageFormat::Png).unwrap();
        file
    }

    /// The picture of the fixtures, 20 × 12.
    fn gradient() -> RgbImage {
        RgbImage::from_fn(20, 12, |x, y| Rgb([(x * 12) as u8, (y * 20) as u8, 40]))
    }

    fn refusal(bytes: &[u8]) -> String {
        decode(bytes, 1).unwrap_err().to_string()
    }

    fn furthest(a: &RgbImage, b: &RgbImage) -> u8 {
        assert_eq!(a.dimensions(), b.dimensions());
        a.iter().zip(b.iter()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
    }

    #[test]
    fn every_format_gives_its_colours() {
        assert_eq!(decode(&png(&gradient()), 0).unwrap(), gradient());
        assert!(furthest(&decode(&fixture("progressive.jpg"), 0).unwrap(), &gradient()) <= 4);
        assert!(furthest(&decode(&fixture("lossy.webp"), 0).unwrap(), &gradient()) <= 16);
        assert!(furthest(&decode(&fixture("palette.png"), 0).unwrap(), &gradient()) <= 8);
    }

    #[test]
    fn grey_becomes_rgb() {
        let grey = RgbImage::from_fn(20, 12, |x, _| Rgb([(x * 12) as u8; 3]));
        assert_eq!(decode(&fixture("grey.png"), 0).unwrap(), grey);
        assert!(furthest(&decode(&fixture("grey.jpg"), 0).unwrap(), &grey) <= 4);
    }

    #[test]
    fn sixteen_bits_are_rounded_to_eight() {
        let deep =
            ImageBuffer::from_fn(2, 1, |x, _| Rgb([[0u16, 257, 65535], [128, 129, 32768]][x as usize]));
        assert_eq!(decode(&png(&deep), 0).unwrap().as_raw(), &[0, 1, 255, 0, 1, 128]);
        let grey = ImageBuffer::from_fn(1, 1, |_, _| Luma([51400u16]));
        assert_eq!(decode(&png(&grey), 0).unwrap().as_raw(), &[200; 3]);
    }

    #[test]
    fn alpha_is_laid_over_white() {
        let half = ImageBuffer::from_fn(3, 1, |x, _| Rgba([200u8, 100, 0, [0, 128, 255][x as usize]]));
        let wanted = [255, 255, 255, 227, 177, 127, 200, 100, 0];
        assert_eq!(decode(&png(&half), 0).unwrap().as_raw(), &wanted);
        // Colour hidden under alpha 0 leaves no trace.
        let hidden = |colour: [u8; 3]| {
            let [r, g, b] = colour;
            decode(&png(&ImageBuffer::from_pixel(4, 4, Rgba([r, g, b, 0]))), 0).unwrap()
        };
        assert_eq!(hidden([255, 0, 0]), hidden([0, 9, 77]));

        let half_white = |colours: RgbImage| {
            RgbImage::from_fn(20, 12, |x, y| if x < 10 { Rgb([255; 3]) } else { *colours.get_pixel(x, y) })
        };
        assert_eq!(decode(&fixture("alpha.webp"), 0).unwrap(), half_white(gradient()));
        let grey = RgbImage::from_fn(20, 12, |x, _| Rgb([(x * 12) as u8; 3]));
        assert_eq!(decode(&fixture("grey_alpha.png"), 0).unwrap(), half_white(grey));
        let palette = decode(&fixture("palette_transparent.png"), 0).unwrap();
        assert_eq!(
            [0, 5, 10, 15].map(|x| palette.get_pixel(x, 3).0),
            [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255; 3]]
        );
    }

    #[test]
    fn orientation_is_applied() {
        // A quarter turn clockwise: the left column becomes the top row.
        let turned = RgbImage::from_fn(12, 20, |x, y| *gradient().get_pixel(y, 11 - x));
        assert_eq!(decode(&fixture("turned.png"), 0).unwrap(), turned);
        assert_eq!(decode(&fixture("turned.webp"), 0).unwrap(), turned);
        assert!(furthest(&decode(&fixture("turned.jpg"), 0).unwrap(), &turned) <= 4);
    }

    #[test]
    fn animations_cmyk_and_other_formats_are_refused() {
        for file in ["animated.webp", "animated.png"] {
            assert_eq!(refusal(&fixture(file)), "images[1]: is animated, wanted a picture of one frame");
        }
        let cmyk = "images[1]: is a CMYK JPEG, wanted RGB or grey; convert it first";
        assert_eq!(refusal(&fixture("cmyk.jpg")), cmyk);
        assert_eq!(refusal(&fixture("image.gif")), "images[1]: is a GIF image, wanted PNG, JPEG or WebP");
        for other in [&b"<svg xmlns='http://www.w3.org/2000/svg'/>"[..], b"hello", b"\0\0\0\0"] {
            assert_eq!(refusal(other), "images[1]: is not an image, wanted PNG, JPEG or WebP");
        }
        assert_eq!(refusal(b""), "images[1]: is empty, wanted a PNG, JPEG or WebP image");
    }

    #[test]
    fn a_bomb_is_refused_by_its_header() {
        // 19000² pixels of one bit in about 44 KB: 45 MB unpacked, 1 GB as RGB.
        let mut bomb = Vec::new();
        let mut encoder = png::Encoder::new(&mut bomb, 19_000, 19_000);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.set_depth(png::BitDepth::One);
        encoder
            .write_header()
            .unwrap()
            .write_image_data(&vec![0; 19_000 * 19_000_usize.div_ceil(8)])
            .unwrap();
        assert!(bomb.len() < 100_000, "{} bytes", bomb.len());
        let message = "images[1]: is 19000 x 19000 = 361000000 pixels, wanted at most 16777216 (16 megapixels); shrink it first";
        assert_eq!(refusal(&bomb), message);
        // The header alone decides: nothing of the pixels need be there.
        assert_eq!(refusal(&bomb[..1000]), message);
    }

    #[test]
    fn the_largest_pictures_are_decoded_and_the_next_larger_refused() {
        // The heaviest kind: 16-bit with alpha, 128 MB unpacked.
        let deep = ImageBuffer::from_pixel(4096, 4096, Rgba([0x0A0Au16, 0x1414, 0x1E1E, u16::MAX]));
        assert_eq!(decode(&png(&deep), 0).unwrap().get_pixel(4095, 4095).0, [10, 20, 30]);
        let plain = RgbImage::from_pixel(4096, 4096, Rgb([128; 3]));
        for format in [ImageFormat::Jpeg, ImageFormat::WebP] {
            let mut file = Vec::new();
            plain.write_to(&mut Cursor::new(&mut file), format).unwrap();
            assert!(decode(&file, 0).unwrap() == plain, "{format:?}");
        }
        assert!(refusal(&png(&RgbImage::new(4097, 4096))).contains("4097 x 4096 = 16781312 pixels"));
    }

    #[test]
    fn files_cut_short_are_refused() {
        for file in ["turned.png", "progressive.jpg", "turned.jpg", "alpha.webp", "lossy.webp"] {
            let bytes = fixture(file);
            for kept in [bytes.len() * 3 / 4, bytes.len() / 2, 20, 12] {
                assert!(decode(&bytes[..kept], 1).is_err(), "{file} cut to {kept} bytes");
            }
        }
    }

    const FILES: [&str; 7] = [
        "turned.png",
        "palette_transparent.png",
        "animated.png",
        "turned.jpg",
        "progressive.jpg",
        "lossy.webp",
        "alpha.webp",
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn damaged_files_are_refused_or_decoded(
            file in prop::sample::select(&FILES[..]),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            kept in 0.0f64..1.3,
        ) {
            let mut bytes = fixture(file);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate((bytes.len() as f64 * kept) as usize);
            let _ = decode(&bytes, 0);
        }

        #[test]
        fn any_bytes_after_a_signature_are_refused_or_decoded(
            signature in prop::sample::select(vec![
                &b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..], b"\xFF\xD8\xFF", b"RIFF\x64\0\0\0WEBPVP8 ", b"RIFF\x64\0\0\0WEBPVP8L",
                b"RIFF\x64\0\0\0WEBPVP8X", b""]),
            rest in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let _ = decode(&[signature, &rest].concat(), 0);
        }
    }
}
