// SPDX-License-Identifier: Apache-2.0
//! Layer, RMS and group normalisation, and the operations that go value by value. All are bound by memory: each reads its
//! input from memory once (a row stays in the first-level cache between its statistics and its result), except group
//! norm, whose statistics need the whole image first.

use rayon::prelude::*;

use super::{
    buffer::{Buffer, Shared},
    simd::{self, Simd},
};

/// Values that a thread takes at a time.
const CHUNK: usize = 64 * 1024;
/// Pixels whose statistics are summed by one task; fixed, so that sums do not depend on the thread count.
const STATISTICS_PIXELS: usize = 4096;
/// Pixels summed in f32 before the sums go to f64.
const SUMMED_IN_F32: usize = 32;

/// Runs `row(input, output)` over all rows.
fn by_row<S: Simd>(simd: S, x: &[f32], columns: usize, row: impl Fn(&[f32], &mut [f32]) + Sync) -> Buffer {
    let mut out = Buffer::dirty(x.len());
    if x.is_empty() {
        return out;
    }
    let chunk = columns * CHUNK.div_ceil(columns);
    out.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(out, x)| {
        for (out, x) in out.chunks_exact_mut(columns).zip(x.chunks_exact(columns)) {
            simd.vectorize(
                #[inline(always)]
                || row(x, out),
            );
        }
    });
    out
}

/// `(x - mean) / sqrt(variance + epsilon) · weight + bias` by row.
pub fn layer_norm<S: Simd>(simd: S, x: &[f32], weight: &[f32], bias: &[f32], epsilon: f32) -> Buffer {
    by_row(
        simd,
        x,
        weight.len(),
        #[inline(always)]
        |x, out| {
            let mean = sum_in_parts(
                simd,
                x,
                #[inline(always)]
                |v| v,
            ) / x.len() as f32;
            let shift = simd.splat(-mean);
            let variance = sum_in_parts(
                simd,
                x,
                #[inline(always)]
                |v| {
                    let centred = simd.add(v, shift);
                    simd.mul(centred, centred)
                },
            ) / x.len() as f32;
            let scale = simd.splat(1.0 / (variance + epsilon).sqrt());
            simd::map(
                simd,
                [x, weight, bias],
                out,
                #[inline(always)]
                |[x, w, b]| simd.mul_add(simd.mul(simd.add(x, shift), scale), w, b),
            );
        },
    )
}

/// A sum over one row, by runs of 1024 so that long rows lose nothing.
#[inline(always)]
fn sum_in_parts<S: Simd>(simd: S, x: &[f32], f: impl Fn(S::V) -> S::V) -> f32 {
    let mut total = 0.0;
    for part in x.chunks(1024) {
        total += f64::from(simd::sum_map(
            simd,
            [part],
            #[inline(always)]
            |[v]| f(v),
        ));
    }
    total as f32
}

/// `x / sqrt(mean(x²) + epsilon) · weight` by row.
pub fn rms_norm<S: Simd>(simd: S, x: &[f32], weight: &[f32], epsilon: f32) -> Buffer {
    by_row(
        simd,
        x,
        weight.len(),
        #[inline(always)]
        |x, out| rms_row(simd, x, weight, epsilon, out),
    )
}

/// RMS norm of one row.
#[inline(always)]
pub fn rms_row<S: Simd>(simd: S, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let square = sum_in_parts(
        simd,
        x,
        #[inline(always)]
        |v| simd.mul(v, v),
    ) / x.len() as f32;
    let scale = simd.splat(1.0 / (square + epsilon).sqrt());
    simd::map(
        simd,
        [x, weight],
        out,
        #[inline(always)]
        |[x, w]| simd.mul(simd.mul(x, scale), w),
    );
}

/// `f` over the values of `N` tensors of one size.
#[allow(clippy::redundant_closure, reason = "a closure can be inlined always, a reference to one cannot")]
pub fn by_value<S: Simd, const N: usize>(
    simd: S,
    inputs: [&[f32]; N],
    f: impl Fn([S::V; N]) -> S::V + Sync,
) -> Buffer {
    let mut out = Buffer::dirty(inputs[0].len());
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(i, out)| {
        let inputs = inputs.map(|input| &input[i * CHUNK..i * CHUNK + out.len()]);
        simd.vectorize(
            #[inline(always)]
            || {
                simd::map(
                    simd,
                    inputs,
                    out,
                    #[inline(always)]
                    |v| f(v),
                );
            },
        );
    });
    out
}

/// `x + gate · y` by row.
pub fn gated_add<S: Simd>(simd: S, x: &[f32], gate: &[f32], y: &[f32]) -> Buffer {
    let mut out = Buffer::dirty(x.len());
    if x.is_empty() {
        return out;
    }
    let columns = gate.len();
    let chunk = columns * CHUNK.div_ceil(columns);
    out.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).zip(y.par_chunks(chunk)).for_each(|((out, x), y)| {
        for ((out, x), y) in
            out.chunks_exact_mut(columns).zip(x.chunks_exact(columns)).zip(y.chunks_exact(columns))
        {
            simd.vectorize(
                #[inline(always)]
                || {
                    simd::map(
                        simd,
                        [x, gate, y],
                        out,
                        #[inline(always)]
                        |[x, g, y]| simd.mul_add(g, y, x),
                    );
                },
            );
        }
    });
    out
}

/// A group norm as one multiply-add by channel.
pub struct Affine {
    /// By channel.
    pub scale: Vec<f32>,
    /// By channel.
    pub shift: Vec<f32>,
}

/// Group norm of an image, as what it does to each channel. Sums of differences from the first pixel, so that a large
/// mean costs no precision; f64 from `SUMMED_IN_F32` pixels on.
pub fn group_statistics<S: Simd>(
    simd: S,
    x: &[f32],
    channels: usize,
    groups: usize,
    weight: &[f32],
    bias: &[f32],
    epsilon: f32,
) -> Affine {
    let pixels = x.len() / channels.max(1);
    let Some(pivot) = x.get(..channels) else {
        return Affine { scale: weight.to_vec(), shift: bias.to_vec() };
    };
    let partial: Vec<[Vec<f64>; 2]> = x
        .par_chunks(STATISTICS_PIXELS * channels)
        .map(|x| {
            let (mut totals, mut square_totals) = (vec![0.0; channels], vec![0.0; channels]);
            let (mut sums, mut squares) = (vec![0.0; channels], vec![0.0; channels]);
            for x in x.chunks(SUMMED_IN_F32 * channels) {
                simd.vectorize(
                    #[inline(always)]
                    || sum_pixels(simd, x, pivot, &mut sums, &mut squares),
                );
                for (total, sum) in totals.iter_mut().zip(&sums).chain(square_totals.iter_mut().zip(&squares))
                {
                    *total += f64::from(*sum);
                }
            }
            [totals, square_totals]
        })
        .collect();
    let total =
        |which: usize, c: usize| partial.iter().map(|sums| sums[which][c]).sum::<f64>() / pixels as f64;
    let size = channels / groups;
    let (mut scale, mut shift) = (vec![0.0; channels], vec![0.0; channels]);
    for group in (0..channels).step_by(size.max(1)) {
        let moments: Vec<_> =
            (group..group + size).map(|c| (f64::from(pivot[c]), total(0, c), total(1, c))).collect();
        let mean = moments.iter().map(|(pivot, sum, _)| pivot + sum).sum::<f64>() / size as f64;
        // Σ (x - mean)² of a channel, from sums relative to its pivot.
        let spread =
            |&(pivot, sum, square): &(f64, f64, f64)| square - sum * sum + (pivot + sum - mean).powi(2);
        let variance = moments.iter().map(spread).sum::<f64>() / size as f64;
        let factor = 1.0 / (variance + f64::from(epsilon)).sqrt();
        for c in group..group + size {
            let a = factor * f64::from(weight[c]);
            scale[c] = a as f32;
            shift[c] = (f64::from(bias[c]) - mean * a) as f32;
        }
    }
    Affine { scale, shift }
}

/// Sums and sums of squares of `x - pivot` by channel.
#[inline(always)]
fn sum_pixels<S: Simd>(simd: S, x: &[f32], pivot: &[f32], sums: &mut [f32], squares: &mut [f32]) {
    let channels = pivot.len();
    let whole = channels / S::LANES * S::LANES;
    for c in (0..whole).step_by(S::LANES) {
        // SAFETY: c + LANES <= channels, the length of all rows.
        unsafe {
            let shift = simd.load(pivot.as_ptr().add(c));
            let (mut sum, mut square) = (simd.splat(0.0), simd.splat(0.0));
            for pixel in x.chunks_exact(channels) {
                let v = simd.sub(simd.load(pixel.as_ptr().add(c)), shift);
                sum = simd.add(sum, v);
                square = simd.mul_add(v, v, square);
            }
            simd.store(sums.as_mut_ptr().add(c), sum);
            simd.store(squares.as_mut_ptr().add(c), square);
        }
    }
    for c in whole..channels {
        (sums[c], squares[c]) = (0.0, 0.0);
        for pixel in x.chunks_exact(channels) {
            let v = pixel[c] - pivot[c];
            sums[c] += v;
            squares[c] += v * v;
        }
    }
}

/// Group norm applied, then SiLU if asked.
pub fn apply_affine<S: Simd>(simd: S, x: &[f32], affine: &Affine, silu: bool) -> Buffer {
    by_row(
        simd,
        x,
        affine.scale.len(),
        #[inline(always)]
        |x, out| affine_row(simd, x, &affine.scale, &affine.shift, silu, out),
    )
}

/// One pixel, or a range of its channels.
#[inline(always)]
pub fn affine_row<S: Simd>(simd: S, x: &[f32], scale: &[f32], shift: &[f32], silu: bool, out: &mut [f32]) {
    if silu {
        simd::map(
            simd,
            [x, scale, shift],
            out,
            #[inline(always)]
            |[x, a, b]| simd.silu(simd.mul_add(x, a, b)),
        );
    } else {
        simd::map(
            simd,
            [x, scale, shift],
            out,
            #[inline(always)]
            |[x, a, b]| simd.mul_add(x, a, b),
        );
    }
}

/// Nearest neighbour ×2 of an image `[height, width, channels]`.
pub fn upsample(x: &[f32], [height, width, channels]: [usize; 3]) -> Buffer {
    let mut out = Buffer::dirty(4 * x.len());
    if out.is_empty() {
        return out;
    }
    let shared = Shared::new(&mut out);
    (0..height).into_par_iter().for_each(|y| {
        for half in 0..2 {
            let start = (2 * y + half) * 2 * width * channels;
            // SAFETY: these two output rows are this task's alone.
            let to = unsafe { shared.get(start..start + 2 * width * channels) };
            let from = &x[y * width * channels..(y + 1) * width * channels];
            for (to, from) in to.chunks_exact_mut(2 * channels).zip(from.chunks_exact(channels)) {
                to[..channels].copy_from_slice(from);
                to[channels..].copy_from_slice(from);
            }
        }
    });
    out
}
