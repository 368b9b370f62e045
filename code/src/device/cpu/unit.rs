// SPDX-License-Identifier: Apache-2.0
//! What the blocking of linears, convolutions and attention is generic over: how the operands of a product are held, and
//! the kernel that multiplies them.

use std::ops::Range;

use bytemuck::Pod;
use half::bf16;

use super::{
    buffer::Buffer,
    kernel::{self, Rows},
    peak,
    simd::Simd,
    weights::{RowBytes, pack_panel},
};

/// Panels that are kept, by the one unit that multiplies with them.
pub enum Panels {
    /// As they are.
    F32(Vec<f32>),
    /// To be widened.
    Bf16(Vec<u16>),
    /// fp16, and what products with each panel are to be multiplied by.
    Fp16(Vec<u16>, Vec<f32>),
    /// bf16 in tiles of pairs, two values in the place of one f32, aligned to cache lines.
    Tiles(Buffer),
}

impl Panels {
    /// Memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::F32(values) => size_of_val(&values[..]) as u64,
            Self::Tiles(values) => size_of_val(&values[..]) as u64,
            Self::Bf16(values) | Self::Fp16(values, _) => size_of_val(&values[..]) as u64,
        }
    }
}

/// A way to multiply matrices. The panels of all are [`kernel::columns`] wide.
pub trait Unit: Copy + Send + Sync + 'static {
    /// The vectors that go with it, for all that is not a product.
    type S: Simd;
    /// An operand's value.
    type Value: Pod + Send + Sync;
    /// Whether values differ from f32.
    const CODED: bool;
    /// Whether they are scaled.
    const SCALED: bool;
    /// Rows and runs of `A` and panels of `B` are padded with zeros to a multiple of this along `k`.
    const STEP: usize;
    /// Whether the rows of a linear lie in tiles: after every 32 rows of a slice the next 32, of each step the 32 rows, of
    /// each row a step.
    const TILED: bool = false;
    /// Values of `k` that a linear multiplies before the sums go back to memory; a multiple of [`Unit::STEP`].
    const DEPTH: usize;
    /// Slices of this depth that a linear packs at a time: the longer the runs that are read of each row of a weight, the
    /// better the processor fetches ahead.
    const PACKED_SLICES: usize = 1;
    /// Rows of a linear's task: what a packed weight is used for.
    const TASK_ROWS: usize = 768;
    /// Columns of a linear's task: what a row in the second-level cache is used for.
    const TASK_COLUMNS: usize = 128;

    /// The vectors that go with it.
    fn simd(self) -> Self::S;

    /// Values from one row of `A` to the next, for rows of `len`: at least `len` padded to [`Unit::STEP`].
    fn stride(len: usize) -> usize {
        len.next_multiple_of(Self::STEP)
    }

    /// Writes `from` as values of `A`, and zeros after it up to the end of `to`.
    ///
    /// Returns what a product with it is to be multiplied by.
    fn encode(self, from: &[f32], to: &mut [Self::Value]) -> f32;

    /// Writes `rows` rows of a linear, of `len` values and `from_stride` apart, as rows of `A` that lie `stride` apart or,
    /// if [`Unit::TILED`], in tiles; `scales` are what products with each are to be multiplied by. Up to 32 rows.
    #[allow(clippy::too_many_arguments, reason = "rows here and there")]
    fn encode_rows(
        self,
        from: &[f32],
        from_stride: usize,
        rows: usize,
        len: usize,
        to: &mut [Self::Value],
        stride: usize,
        scales: &mut [f32],
    ) {
        for row in 0..rows {
            let to = &mut to[row * stride..][..len.next_multiple_of(Self::STEP)];
            scales[row] = self.encode(&from[row * from_stride..][..len], to);
        }
    }

    /// The largest of `scores`; NaN may be passed over.
    #[inline(always)]
    fn largest(self, scores: &[f32]) -> f32 {
        largest_of(self.simd(), scores)
    }

    /// `e^(scale · score - base)` of `scores[seen]` and 0 of the others, as values of `A` in `to`, in place if they are not
    /// [`Unit::CODED`]; their sum, and what products with them are to be multiplied by.
    #[inline(always)]
    fn exponentials(
        self,
        scores: &mut [f32],
        seen: Range<usize>,
        scale: f32,
        base: f32,
        to: &mut [Self::Value],
    ) -> (f32, f32) {
        let simd = self.simd();
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let total = exponentials(simd, &mut scores[seen], scale, base);
        (total, if Self::CODED { self.encode(scores, to) } else { 1.0 })
    }

    /// Writes values `range` of `rows` of a weight as a panel `[k][rows]`; missing rows are zeros.
    ///
    /// Returns what a product with it is to be multiplied by.
    fn pack(self, rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [Self::Value]) -> f32;

    /// `from` as values of `A`, in `room` unless it can stay where it is, and what a product with it is to be multiplied by.
    fn view<'a>(self, from: &'a [f32], room: &'a mut [Self::Value]) -> (&'a [Self::Value], f32);

    /// What values of which `largest` is the largest are to be multiplied by, and products with them.
    fn scale(self, largest: f32) -> (f32, f32);

    /// Writes `values`, `[k][columns]`, times `factor` as a panel; `k` is a multiple of [`Unit::STEP`].
    fn pack_values(self, values: &[f32], factor: f32, panel: &mut [Self::Value]);

    /// A value of `A`, as it was encoded.
    fn decode(self, value: Self::Value) -> f32;

    /// Value `k` of a column of a panel, as it was packed.
    fn unpack(self, panel: &[Self::Value], k: usize, column: usize) -> f32;

    /// Keeps panels `[k][columns]`, of the lengths `lens`, one after the other in `values`; as bf16 or less if `round`.
    fn keep(self, values: Vec<f32>, lens: impl Iterator<Item = usize>, round: bool) -> Panels;

    /// Panel `index`, which lies at `range`, in `room` unless it can stay where it is, and what a product with it is to be
    /// multiplied by.
    fn kept<'a>(
        self,
        panels: &'a Panels,
        index: usize,
        range: Range<usize>,
        room: &'a mut [Self::Value],
    ) -> (&'a [Self::Value], f32);

    /// `C = scale · A · B`, or `C += scale · A · B`, for any number of rows and one panel; row `r` is also multiplied by
    /// `scales[r]`. The order of the sum is that of `k`, whatever the rows are cut into.
    ///
    /// # Safety
    /// Every run of every row is readable, `b` holds `runs.len() * len` rows of a panel, `scales` `rows` values, and `c`
    /// has `rows` rows of two vectors `c_stride` apart. `len` is a multiple of [`Unit::STEP`].
    #[allow(clippy::too_many_arguments, reason = "two operands, a result and their strides")]
    unsafe fn product(
        self,
        rows: usize,
        a: Rows<'_, Self::Value>,
        scales: *const f32,
        b: *const Self::Value,
        scale: f32,
        c: *mut f32,
        c_stride: usize,
        accumulate: bool,
    );

    /// Multiplies in registers alone, for a fraction of a millisecond; the number of floating-point operations.
    fn burst(self) -> f64 {
        peak::burst(self.simd())
    }
}

/// f32 multiply-adds. Nothing is scaled.
#[derive(Clone, Copy)]
pub struct Single<S>(pub S);

impl<S: Simd> Unit for Single<S> {
    type S = S;
    type Value = f32;
    const CODED: bool = false;
    const SCALED: bool = false;
    const STEP: usize = 1;
    /// A panel takes half the first-level cache, 24 KiB.
    const DEPTH: usize = {
        let fits = 24 * 1024 / (kernel::columns::<S>() * size_of::<f32>());
        if fits < 384 { fits } else { 384 }
    };

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    fn encode(self, from: &[f32], to: &mut [f32]) -> f32 {
        to[..from.len()].copy_from_slice(from);
        to[from.len()..].fill(0.0);
        1.0
    }
    #[inline(always)]
    fn pack(self, rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [f32]) -> f32 {
        self.0.vectorize(
            #[inline(always)]
            || pack_panel(self.0, rows, range, panel),
        );
        1.0
    }
    #[inline(always)]
    fn view<'a>(self, from: &'a [f32], _room: &'a mut [f32]) -> (&'a [f32], f32) {
        (from, 1.0)
    }
    #[inline(always)]
    fn scale(self, _largest: f32) -> (f32, f32) {
        (1.0, 1.0)
    }
    #[inline(always)]
    fn pack_values(self, values: &[f32], _factor: f32, panel: &mut [f32]) {
        panel[..values.len()].copy_from_slice(values);
    }
    fn decode(self, value: f32) -> f32 {
        value
    }
    fn unpack(self, panel: &[f32], k: usize, column: usize) -> f32 {
        panel[k * kernel::columns::<S>() + column]
    }
    fn keep(self, values: Vec<f32>, _lens: impl Iterator<Item = usize>, round: bool) -> Panels {
        if round {
            Panels::Bf16(values.into_iter().map(|v| bf16::from_f32(v).to_bits()).collect())
        } else {
            Panels::F32(values)
        }
    }
    #[inline(always)]
    fn kept<'a>(
        self,
        panels: &'a Panels,
        _index: usize,
        range: Range<usize>,
        room: &'a mut [f32],
    ) -> (&'a [f32], f32) {
        match panels {
            Panels::F32(values) => (&values[range], 1.0),
            Panels::Bf16(values) => {
                let room = &mut room[..range.len()];
                self.0.vectorize(
                    #[inline(always)]
                    || widen_panel(self.0, &values[range], room),
                );
                (room, 1.0)
            }
            Panels::Fp16(..) | Panels::Tiles(_) => unreachable!("kept by another unit"),
        }
    }
    #[inline(always)]
    unsafe fn product(
        self,
        rows: usize,
        a: Rows<'_>,
        _scales: *const f32,
        b: *const f32,
        _scale: f32,
        c: *mut f32,
        c_stride: usize,
        accumulate: bool,
    ) {
        // SAFETY: the caller's contract.
        unsafe { kernel::product(self.0, rows, a, b, c, c_stride, accumulate) };
    }
}

#[inline(always)]
fn largest_of<S: Simd>(simd: S, values: &[f32]) -> f32 {
    let chunks = values.chunks_exact(S::LANES);
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut largest = simd.splat(rest);
    for chunk in chunks {
        // SAFETY: the chunk has LANES values.
        largest = simd.max(unsafe { simd.load(chunk.as_ptr()) }, largest);
    }
    simd.largest(largest)
}

/// `e^(scale · score - base)` in place; their sum.
#[inline(always)]
fn exponentials<S: Simd>(simd: S, scores: &mut [f32], scale: f32, base: f32) -> f32 {
    let (scale, base) = (simd.splat(scale), simd.splat(-base));
    let mut total = simd.splat(0.0);
    let mut chunks = scores.chunks_exact_mut(S::LANES);
    for chunk in chunks.by_ref() {
        // SAFETY: the chunk has LANES values.
        unsafe {
            let e = simd.exp(simd.mul_add(simd.load(chunk.as_ptr()), scale, base));
            simd.store(chunk.as_mut_ptr(), e);
            total = simd.add(total, e);
        }
    }
    let mut total = simd.sum(total);
    for score in chunks.into_remainder() {
        *score = simd.lanes(simd.exp(simd.mul_add(simd.splat(*score), scale, base)))[0];
        total += *score;
    }
    total
}

/// Widens whole vectors.
#[inline(always)]
fn widen_panel<S: Simd>(simd: S, from: &[u16], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(S::LANES).zip(to.chunks_exact_mut(S::LANES)) {
        // SAFETY: both have LANES values.
        unsafe { simd.store(to.as_mut_ptr(), simd.load_bf16(from.as_ptr())) };
    }
}
