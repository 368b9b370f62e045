// SPDX-License-Identifier: Apache-2.0
//! Reference images: what is taken and as what, and what is refused with exit code 3 and the file's name.

use std::io::Cursor;

use image::{DynamicImage, GrayAlphaImage, GrayImage, ImageFormat, RgbImage, RgbaImage};

use crate::support::{End, Place, root, test_image};

fn edit(place: &Place, file: &str) -> End {
    place.generate(&["an edit", "--image", file, "--out=out.png"])
}

/// The picture that a reference leads to.
#[track_caller]
fn picture(image: impl Into<DynamicImage>) -> RgbImage {
    let place = Place::new();
    image.into().save(place.path("reference.png")).expect("a PNG");
    edit(&place, "reference.png").succeeded();
    place.pixels("out.png")
}

#[track_caller]
fn refused(name: &str, bytes: &[u8], words: &[&str]) {
    let place = Place::new();
    place.write(name, bytes);
    edit(&place, name).failed(3, &[&[name], words].concat());
    assert_eq!(place.files(), [name]);
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(root().join("server/tests/cli/fixtures").join(name)).expect("a fixture")
}

fn png(image: impl Into<DynamicImage>) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.into().write_to(&mut bytes, ImageFormat::Png).expect("a PNG");
    bytes.into_inner()
}

#[test]
fn case_59_alpha_is_laid_over_white_and_hidden_colour_has_no_influence() {
    let rgba = |hidden| {
        RgbaImage::from_fn(64, 64, |x, y| {
            if x < 32 {
                image::Rgba([hidden, 0, hidden, 0])
            } else {
                image::Rgba([10, 200, (4 * y) as u8, 255])
            }
        })
    };
    let laid = RgbImage::from_fn(64, 64, |x, y| {
        if x < 32 { image::Rgb([255; 3]) } else { image::Rgb([10, 200, (4 * y) as u8]) }
    });
    let wanted = picture(laid);
    assert_eq!(picture(rgba(0)), wanted);
    assert_eq!(picture(rgba(255)), wanted);
}

#[test]
fn grey_16_bit_and_grey_with_alpha_become_8_bit_rgb() {
    let grey = GrayImage::from_fn(64, 64, |x, y| image::Luma([(x * 2 + y) as u8]));
    let wanted = picture(DynamicImage::from(grey.clone()).into_rgb8());
    assert_eq!(picture(grey.clone()), wanted);
    assert_eq!(picture(DynamicImage::from(grey.clone()).into_rgb16()), wanted);
    assert_eq!(picture(DynamicImage::from(grey.clone()).into_luma16()), wanted);
    let opaque = GrayAlphaImage::from_fn(64, 64, |x, y| image::LumaA([grey.get_pixel(x, y)[0], 255]));
    assert_eq!(picture(opaque), wanted);
}

#[test]
fn case_62_a_palette_is_looked_up() {
    let place = Place::new();
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 64, 64);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(vec![200, 30, 30, 20, 20, 180]);
    let indices: Vec<u8> = (0..64 * 64).map(|at| u8::from(at % 64 >= 20)).collect();
    encoder.write_header().expect("a header").write_image_data(&indices).expect("pixels");
    place.write("palette.png", &bytes);
    edit(&place, "palette.png").succeeded();
    let rgb =
        RgbImage::from_fn(64, 64, |x, _| image::Rgb(if x >= 20 { [20, 20, 180] } else { [200, 30, 30] }));
    assert_eq!(place.pixels("out.png"), picture(rgb));
}

#[test]
fn jpeg_and_webp_are_read_whatever_the_name_says() {
    let place = Place::new();
    for (name, format) in [("jpeg.png", ImageFormat::Jpeg), ("webp", ImageFormat::WebP)] {
        let mut bytes = Cursor::new(Vec::new());
        DynamicImage::from(test_image(64, 64, 1)).write_to(&mut bytes, format).expect("an image");
        place.write(name, bytes.into_inner());
        edit(&place, name).succeeded();
    }
}

#[test]
fn case_61_cmyk_is_refused_not_guessed() {
    refused("cmyk.jpg", &fixture("cmyk.jpg"), &["CMYK", "RGB"]);
}

#[test]
fn case_62_animations_and_gifs_are_refused() {
    refused("animated.webp", &fixture("animated.webp"), &["one frame"]);
    refused("still.gif", &fixture("still.gif"), &["GIF", "PNG, JPEG or WebP"]);
}

#[test]
fn case_64_a_huge_picture_is_refused_by_its_header() {
    // The header of a PNG of 19000 × 19000 pixels, which would take a gigabyte, and not one pixel.
    let mut bytes = png(RgbImage::new(64, 64));
    bytes[16..24].copy_from_slice(&[0, 0, 0x4A, 0x38, 0, 0, 0x4A, 0x38]);
    let checksum = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&checksum.to_be_bytes());
    refused("huge.png", &bytes, &["19000 x 19000", "16 megapixels"]);
}

/// CRC-32 as in the PNG specification, annex D.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(
            crc ^ u32::from(byte),
            |crc, _| if crc & 1 == 1 { 0xEDB8_8320 ^ (crc >> 1) } else { crc >> 1 },
        )
    })
}

#[test]
fn what_is_not_an_image_is_refused() {
    refused("notes.png", b"not an image at all", &["not an image", "PNG, JPEG or WebP"]);
    refused("empty.png", b"", &["empty"]);
    let whole = png(test_image(64, 64, 1));
    refused("cut.png", &whole[..whole.len() / 2], &["cannot be decoded"]);
    let place = Place::new();
    edit(&place, "absent.png").failed(3, &["absent.png", "cannot be read", "No such file"]);
    edit(&place, ".").failed(3, &["cannot be read"]);
}

#[test]
fn pictures_too_small_or_too_long_are_refused_with_the_rule() {
    refused("pixel.png", &png(RgbImage::new(1, 1)), &["1 x 1", "64"]);
    refused("low.png", &png(RgbImage::new(640, 63)), &["640 x 63", "64"]);
    refused("long.png", &png(RgbImage::new(520, 64)), &["520 x 64", "8"]);
    let place = Place::new();
    place.save("good.png", &test_image(512, 64, 1));
    edit(&place, "good.png").succeeded();
}

#[test]
fn the_file_at_fault_is_named_among_several() {
    let place = Place::new();
    place.save("good.png", &test_image(64, 64, 1));
    place.save("bad.png", &test_image(63, 63, 1));
    place.generate(&["an edit", "--image=good.png", "--image=bad.png"]).failed(3, &["bad.png"]);
}
