// SPDX-License-Identifier: Apache-2.0
//! Attention with a streaming softmax: no score matrix larger than one block of queries by one block of keys.
//!
//! Keys and values were packed into panels by [`super::heads`], so both products run on the matrix kernel as it is. A task
//! is one head and `QUERIES` query rows. Blocks of keys that no query of the task may see are not visited. Of the time,
//! about nine tenths go to the two products and the rest to the exponentials.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    buffer::{Buffer, Shared, with_scratch},
    heads::CpuQkv,
    kernel::{self, Rows},
    simd::{self, Simd},
    unit::Unit,
};
use crate::device::Mask;

/// Query rows of a task.
const QUERIES: usize = 96;

/// Keys of a block: as many as keep a block of keys and one of values in half the second-level cache.
const fn block_keys(head_dim: usize) -> usize {
    let keys = 32 * 1024 / if head_dim == 0 { 1 } else { head_dim } / 32 * 32;
    if keys < 32 {
        32
    } else if keys > 512 {
        512
    } else {
        keys
    }
}

/// `softmax(scale · Q Kᵀ + mask) V`, heads merged.
pub fn attention<U: Unit>(unit: U, qkv: &CpuQkv, mask: &Mask, scale: f32) -> Buffer {
    let (rows, layout) = (qkv.rows, qkv.layout);
    let mut out = Buffer::dirty(rows * layout.query_columns());
    let blocks = rows.div_ceil(QUERIES);
    let shared = Shared::new(&mut out);
    // The longest causal tasks come first, so that no thread is left with one at the end.
    (0..blocks * layout.query_heads).into_par_iter().with_max_len(1).for_each(|task| {
        let block = blocks - 1 - task / layout.query_heads;
        let queries = block * QUERIES..rows.min((block + 1) * QUERIES);
        Task { qkv, mask, scale, head: task % layout.query_heads, queries }.run(unit, shared);
    });
    out
}

struct Task<'a> {
    qkv: &'a CpuQkv,
    mask: &'a Mask,
    scale: f32,
    head: usize,
    queries: Range<usize>,
}

impl Task<'_> {
    /// Keys that query `i` sees.
    fn keys(&self, i: usize) -> Range<usize> {
        match self.mask {
            Mask::None => 0..self.qkv.rows,
            Mask::Keys(keys) => keys.clone(),
            Mask::CausalKeys(keys) => keys.start..keys.end.min(i + 1),
        }
    }

    fn run<U: Unit>(&self, unit: U, out: Shared<'_>) {
        let (simd, width, dim) = (unit.simd(), kernel::columns::<U::S>(), self.qkv.layout.head_dim);
        let (count, padded_dim, block) = (self.queries.len(), dim.next_multiple_of(width), block_keys(dim));
        // The last query sees the most keys.
        let keys = self.keys(self.queries.end - 1);
        let (query, query_scales) = self.qkv.queries::<U>(self.head, self.queries.clone());
        let len = dim.next_multiple_of(U::STEP);
        // From one row of scores to the next, an odd number of cache lines; and of probabilities.
        let stride = block + 16;
        let coded = if U::CODED { U::stride(block) } else { stride };
        let room =
            if U::CODED { (count * coded * size_of::<U::Value>()).div_ceil(size_of::<f32>()) } else { 0 };
        let sizes = [count * stride, count * padded_dim, count, count, room, count];
        with_scratch(
            sizes,
            #[inline(always)]
            |[scores, sums, largest, totals, room, scales]| {
                let room: &mut [U::Value] = bytemuck::cast_slice_mut(room);
                largest.fill(f32::NEG_INFINITY);
                totals.fill(0.0);
                sums.fill(0.0);
                let first = keys.start / width * width;
                for start in (first..keys.end.max(first)).step_by(block) {
                    let end = keys.end.min(start + block);
                    let used = (end - start).next_multiple_of(width);
                    for panel in 0..used / width {
                        let a = Rows {
                            start: query.as_ptr(),
                            stride: U::stride(dim),
                            runs: &[0],
                            len,
                            tiled: false,
                        };
                        let (b, scale) = self.qkv.key_panel::<U>(self.head, start / width + panel);
                        let c = &mut scores[panel * width..];
                        // SAFETY: A is `count` queries, B a key panel of `len` rows, C `count` rows `stride` apart.
                        unsafe {
                            let (scales, c) = (query_scales.as_ptr(), c.as_mut_ptr());
                            unit.product(count, a, scales, b.as_ptr(), scale, c, stride, false);
                        };
                    }
                    for i in 0..count {
                        let seen = self.keys(self.queries.start + i);
                        let seen = seen.start.max(start).min(end) - start..seen.end.clamp(start, end) - start;
                        let scores = &mut scores[i * stride..i * stride + used];
                        let sums = &mut sums[i * padded_dim..(i + 1) * padded_dim];
                        let to = if U::CODED { &mut room[i * coded..i * coded + used] } else { &mut [] };
                        scales[i] = simd.vectorize(
                            #[inline(always)]
                            || {
                                softmax(
                                    unit,
                                    scores,
                                    seen,
                                    self.scale,
                                    &mut largest[i],
                                    &mut totals[i],
                                    sums,
                                    to,
                                )
                            },
                        );
                    }
                    let probabilities: &[U::Value] =
                        if U::CODED { &*room } else { bytemuck::cast_slice(&*scores) };
                    for panel in 0..padded_dim / width {
                        let a = Rows {
                            start: probabilities.as_ptr(),
                            stride: coded,
                            runs: &[0],
                            len: used,
                            tiled: false,
                        };
                        let (b, scale) = self.qkv.value_panel::<U>(self.head, panel, start..start + used);
                        let c = &mut sums[panel * width..];
                        // SAFETY: A is `count` rows of `used` probabilities, B as many values, C `count` rows of sums.
                        unsafe {
                            let (scales, c) = (scales.as_ptr(), c.as_mut_ptr());
                            unit.product(count, a, scales, b.as_ptr(), scale, c, padded_dim, true);
                        };
                    }
                }
                for i in 0..count {
                    let at = (self.queries.start + i) * self.qkv.layout.query_columns() + self.head * dim;
                    // SAFETY: these rows of this head are this task's alone.
                    let output = unsafe { out.get(at..at + dim) };
                    let factor = if totals[i] == 0.0 { 0.0 } else { 1.0 / totals[i] };
                    let sums = &sums[i * padded_dim..i * padded_dim + dim];
                    simd.vectorize(
                        #[inline(always)]
                        || {
                            simd::map(
                                simd,
                                [sums],
                                output,
                                #[inline(always)]
                                |[sum]| simd.mul(sum, simd.splat(factor)),
                            );
                        },
                    );
                }
            },
        );
    }
}

/// Turns the scores of one query into probabilities relative to the largest so far, and brings total and sums to the same
/// base. Scores outside `seen` become 0. Returns what products with the probabilities are to be multiplied by.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "a row, its state and where it goes")]
fn softmax<U: Unit>(
    unit: U,
    scores: &mut [f32],
    seen: Range<usize>,
    scale: f32,
    largest: &mut f32,
    total: &mut f32,
    sums: &mut [f32],
    to: &mut [U::Value],
) -> f32 {
    let simd = unit.simd();
    if seen.is_empty() {
        return unit.exponentials(scores, 0..0, scale, 0.0, to).1;
    }
    let new = largest.max(unit.largest(&scores[seen.clone()]) * scale);
    if new > *largest {
        // A first block has no sums yet: e^-inf must be 0, which the clamped exponential is not.
        let factor = if *largest == f32::NEG_INFINITY {
            0.0
        } else {
            simd.lanes(simd.exp(simd.splat(*largest - new)))[0]
        };
        *total *= factor;
        scale_in_place(simd, sums, factor);
        *largest = new;
    }
    let (sum, factor) = unit.exponentials(scores, seen, scale, new, to);
    *total += sum;
    factor
}

#[inline(always)]
fn scale_in_place<S: Simd>(simd: S, values: &mut [f32], factor: f32) {
    for chunk in values.chunks_exact_mut(S::LANES) {
        // SAFETY: the chunk has LANES values.
        unsafe {
            let v = simd.mul(simd.load(chunk.as_ptr()), simd.splat(factor));
            simd.store(chunk.as_mut_ptr(), v);
        }
    }
}
