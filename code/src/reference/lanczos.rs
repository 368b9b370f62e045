// SPDX-License-Identifier: Apache-2.0
//! Pillow's 8-bit LANCZOS resize, bit for bit.
//!
//! Pillow (`src/libImaging/Resample.c`) works in 22-bit fixed point, one axis after the other with bytes in between; the
//! `image` crate's Lanczos is a float algorithm and gives other bytes. Which axis comes first is Pillow 13's rule
//! (python-pillow/Pillow#9549); Pillow 12 and older always take the rows first, and differ by a level here and there on
//! pictures more than twice as high as wide.

use image::RgbImage;
use rayon::prelude::*;

/// Lobes of the kernel on each side.
const LOBES: f64 = 3.0;
/// Fraction bits of a weight: 32 less 8 of the pixel and 2 of headroom.
const FRACTION_BITS: u32 = 32 - 8 - 2;
const CHANNELS: usize = 3;

/// A picture of another size.
pub fn resize(image: &RgbImage, width: usize, height: usize) -> RgbImage {
    let (from_width, from_height) = (image.width() as usize, image.height() as usize);
    let rows = |pixels| resize_rows(pixels, from_width, width);
    let columns = |pixels, row| resize_columns(pixels, from_height, height, row);
    let source = image.as_raw();
    let pixels = match (width == from_width, height == from_height) {
        (true, true) => source.clone(),
        (false, true) => rows(source),
        (true, false) => columns(source, width),
        (false, false) if columns_first(from_width, from_height, width, height) => {
            rows(&columns(source, from_width))
        }
        (false, false) => columns(&rows(source), width),
    };
    RgbImage::from_raw(width as u32, height as u32, pixels).expect("both passes made whole rows")
}

/// Whether the height loses more than twice as many pixels as the width.
fn columns_first(from_width: usize, from_height: usize, width: usize, height: usize) -> bool {
    height < from_height && (from_height - height) as i64 > 2 * (from_width as i64 - width as i64)
}

/// Weights of one output pixel over the input pixels from `first`.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = LOBES * stretch;
    let inverse = 1.0 / stretch;
    (0..to)
        .map(|i| {
            let centre = (i as f64 + 0.5) * scale;
            let first = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(from);
            let weights: Vec<f64> =
                (first..end).map(|x| kernel((x as f64 - centre + 0.5) * inverse)).collect();
            let sum: f64 = weights.iter().sum();
            let fixed = |w: f64| (w / sum * f64::from(1 << FRACTION_BITS)).round() as i32; // halves away from zero
            Taps { first, weights: weights.into_iter().map(fixed).collect() }
        })
        .collect()
}

fn kernel(x: f64) -> f64 {
    let sinc =
        |x: f64| if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) };
    if (-LOBES..LOBES).contains(&x) { sinc(x) * sinc(x / LOBES) } else { 0.0 }
}

fn round_to_byte(sum: i32) -> u8 {
    ((sum + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS).clamp(0, 255) as u8
}

fn resize_rows(pixels: &[u8], from: usize, to: usize) -> Vec<u8> {
    let taps = taps(from, to);
    let mut out = vec![0; pixels.len() / from * to];
    let rows = pixels.par_chunks_exact(from * CHANNELS);
    out.par_chunks_exact_mut(to * CHANNELS).zip(rows).for_each(|(out, row)| {
        let (row, out) = (row.as_chunks::<CHANNELS>().0, out.as_chunks_mut::<CHANNELS>().0);
        for (pixel, taps) in out.iter_mut().zip(&taps) {
            let mut sums = [0; CHANNELS];
            for (weight, source) in taps.weights.iter().zip(&row[taps.first..]) {
                for (sum, byte) in sums.iter_mut().zip(source) {
                    *sum += weight * i32::from(*byte);
                }
            }
            *pixel = sums.map(round_to_byte);
        }
    });
    out
}

fn resize_columns(pixels: &[u8], from: usize, to: usize, width: usize) -> Vec<u8> {
    let row_len = width * CHANNELS;
    let mut out = vec![0; to * row_len];
    out.par_chunks_exact_mut(row_len).zip(taps(from, to)).for_each(|(out, taps)| {
        let mut sums = vec![0; row_len];
        for (weight, row) in taps.weights.iter().zip(pixels[taps.first * row_len..].chunks_exact(row_len)) {
            for (sum, byte) in sums.iter_mut().zip(row) {
                *sum += weight * i32::from(*byte);
            }
        }
        for (byte, sum) in out.iter_mut().zip(sums) {
            *byte = round_to_byte(sum);
        }
    });
    out
}
