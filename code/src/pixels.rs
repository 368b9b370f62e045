// SPDX-License-Identifier: Apache-2.0
//! From the VAE's output to a picture and to the bytes of a PNG file.

use image::{RgbImage, imageops};

/// The VAE's output, NHWC `[height, width, 3]` in -1 to 1, as a picture: `clamp(v / 2 + 1/2, 0, 1) · 255`, halves to even
/// (diffusers `VaeImageProcessor.denormalize` and `numpy_to_pil`).
///
/// Values are expected to be finite: the pipeline checks before.
///
/// # Panics
/// If the length does not fit the size.
pub fn to_rgb(values: &[f32], height: usize, width: usize) -> RgbImage {
    let bytes =
        values.iter().map(|v| ((v * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8).collect();
    RgbImage::from_raw(width as u32, height as u32, bytes)
        .filter(|_| values.len() == height * width * 3)
        .unwrap_or_else(|| panic!("{} values for a picture of {width}x{height}", values.len()))
}

/// The middle of a picture; an odd margin is one pixel wider on the right and at the bottom.
///
/// # Panics
/// If the picture is smaller than asked for.
pub fn centre_crop(image: &RgbImage, width: u32, height: u32) -> RgbImage {
    let (has_width, has_height) = image.dimensions();
    assert!(width <= has_width && height <= has_height, "{width}x{height} of {has_width}x{has_height}");
    imageops::crop_imm(image, (has_width - width) / 2, (has_height - height) / 2, width, height).to_image()
}

/// A PNG file with UTF-8 text chunks (keyword, text).
///
/// Fast compression with the Paeth filter: 30 ms for a megapixel, where the usual level takes 2 s to save a quarter of the
/// bytes. The bytes are the same for the same version of this crate's lock file; only the pixels are promised beyond it.
///
/// # Panics
/// If the picture is empty or a keyword is not 1 to 79 Latin-1 characters.
pub fn encode_png(image: &RgbImage, text: &[(&str, &str)]) -> Vec<u8> {
    let mut file = Vec::new();
    let write = |file: &mut Vec<u8>| -> Result<(), png::EncodingError> {
        let mut encoder = png::Encoder::new(file, image.width(), image.height());
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_compression(png::Compression::Fast);
        encoder.set_filter(png::Filter::Paeth);
        for (keyword, text) in text {
            encoder.add_itxt_chunk((*keyword).to_string(), (*text).to_string())?;
        }
        let mut writer = encoder.write_header()?;
        writer.write_image_data(image.as_raw())?;
        writer.finish()
    };
    write(&mut file).expect("memory takes every write; the caller promises a picture and fitting keywords");
    file
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn values_are_clamped_and_halves_go_to_even() {
        let level = |byte: f32| byte / 255.0 * 2.0 - 1.0;
        let values = [-1.0, 1.0, 0.0, -7.0, 7.0, level(3.0), level(126.5), level(2.5), level(0.4)];
        let image = to_rgb(&values, 1, 3);
        assert_eq!(image.as_raw(), &[0, 255, 128, 0, 255, 3, 126, 2, 0]);
        assert_eq!((image.width(), image.height()), (3, 1));
    }

    #[test]
    fn a_crop_is_central() {
        let image = RgbImage::from_fn(5, 4, |x, y| image::Rgb([x as u8, y as u8, 0]));
        let crop = centre_crop(&image, 2, 2);
        assert_eq!(crop.get_pixel(0, 0).0, [1, 1, 0]);
        assert_eq!(crop.dimensions(), (2, 2));
        let full = RgbImage::from_fn(1920, 1088, |_, y| image::Rgb([(y % 256) as u8; 3]));
        assert_eq!(centre_crop(&full, 1920, 1080).get_pixel(0, 0).0, [4; 3]);
    }

    #[test]
    fn png_holds_the_pixels_and_the_text() {
        let image =
            RgbImage::from_fn(33, 17, |x, y| image::Rgb([(x * 7) as u8, (y * 11) as u8, (x * y) as u8]));
        let file = encode_png(&image, &[("prompt", "Ein Fuchs im Schnee \u{2744}"), ("seed", "42")]);
        assert_eq!(image::load_from_memory(&file).unwrap().to_rgb8(), image);
        let reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info().unwrap();
        let text: Vec<(String, String)> =
            reader.info().utf8_text.iter().map(|t| (t.keyword.clone(), t.get_text().unwrap())).collect();
        assert_eq!(
            text,
            [("prompt".into(), "Ein Fuchs im Schnee \u{2744}".into()), ("seed".into(), "42".into())]
        );
    }

    /// An upgrade of `png` or `fdeflate` that changes files is noticed here; it needs a new version of this crate.
    #[test]
    fn png_bytes_are_pinned() {
        let image =
            RgbImage::from_fn(64, 48, |x, y| image::Rgb([(x * 4) as u8, (y * 5) as u8, (x ^ y) as u8]));
        let file = encode_png(&image, &[("seed", "42")]);
        let digest = Sha256::digest(&file);
        let start = u64::from_be_bytes(*digest.first_chunk().unwrap());
        assert_eq!((file.len(), start), (3053, 0x9ca8_c1bb_5742_43d8));
    }
}
