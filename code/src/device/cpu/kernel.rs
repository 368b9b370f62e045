// SPDX-License-Identifier: Apache-2.0
//! The matrix kernel under linears, attention and convolutions: a register tile `C += A · B`, in f32 multiply-adds.
//!
//! `A` is read a value at a time and broadcast, from rows that lie a fixed stride apart: blocked activations, queries,
//! probabilities or the pixels of an image all have that form, so nothing is transposed on this side. `B` is a *panel*,
//! `[k][2 vectors]`, contiguous. The tile of `Simd::ROWS` rows by two vectors stays in registers over the whole of `k`:
//! per `k` it costs 2 ROWS fused multiply-adds, 2 vector loads and ROWS broadcasts, so the multiply-adds decide the speed
//! as long as the panel comes from the first-level cache.

use super::simd::Simd;

/// The `A` operand of a product, of values `V`.
#[derive(Clone, Copy)]
pub struct Rows<'a, V = f32> {
    /// First value of the first row.
    pub start: *const V,
    /// Values from one row to the next.
    pub stride: usize,
    /// Where each run of `len` values starts, from the start of its row: one run for a plain matrix, one for each tap of
    /// a convolution.
    pub runs: &'a [usize],
    /// Values of a run.
    pub len: usize,
    /// Whether rows lie in tiles instead, as [`super::unit::Unit::TILED`] says; then `stride` has no meaning.
    pub tiled: bool,
}

/// Steps along `k` between two looks at the loop's end: one where the tile takes so many registers that the compiler, given
/// more to reorder, would spill it.
const fn unroll<S: Simd>() -> usize {
    if S::ROWS > 8 { 1 } else { 4 }
}

/// Columns of a tile: two vectors.
pub const fn columns<S: Simd>() -> usize {
    2 * S::LANES
}

/// `C = A · B`, or `C += A · B`, for any number of rows and one panel.
///
/// The order of the sum is that of `k`, whatever the rows are cut into.
///
/// # Safety
/// Every run of every row is readable, `b` holds `runs.len() * len` rows of two vectors, and `c` has `rows` rows of two
/// vectors `c_stride` apart.
#[inline(always)]
pub unsafe fn product<S: Simd>(
    simd: S,
    rows: usize,
    a: Rows<'_>,
    b: *const f32,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
) {
    let mut done = 0;
    while done < rows {
        let count = tile_rows(S::ROWS, rows - done);
        // SAFETY: rows done..done + count are inside A and C by the caller's contract.
        unsafe {
            let a = Rows { start: a.start.add(done * a.stride), ..a };
            let c = c.add(done * c_stride);
            match count {
                12 => tile::<S, 12>(simd, a, b, c, c_stride, accumulate),
                8 => tile::<S, 8>(simd, a, b, c, c_stride, accumulate),
                6 => tile::<S, 6>(simd, a, b, c, c_stride, accumulate),
                5 => tile::<S, 5>(simd, a, b, c, c_stride, accumulate),
                4 => tile::<S, 4>(simd, a, b, c, c_stride, accumulate),
                3 => tile::<S, 3>(simd, a, b, c, c_stride, accumulate),
                2 => tile::<S, 2>(simd, a, b, c, c_stride, accumulate),
                _ => tile::<S, 1>(simd, a, b, c, c_stride, accumulate),
            }
        }
        done += count;
    }
}

/// Rows of the next tile: as many as fit, but no tail so short that the multiply-adds would wait for each other.
pub const fn tile_rows(most: usize, left: usize) -> usize {
    match (most, left) {
        (12, 12..) => 12,
        (12 | 8, 8..) => 8,
        (6, 7 | 8) => 4,
        (6 | 8 | 12, 6..) => 6,
        (6 | 8 | 12, 5) => 5,
        (_, 4..) => 4,
        (_, left) => left,
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, const R: usize>(
    simd: S,
    a: Rows<'_>,
    b: *const f32,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
) {
    if R > S::ROWS {
        return;
    }
    // SAFETY: the caller's contract.
    simd.vectorize(
        #[inline(always)]
        || unsafe { tile_body::<S, R>(simd, a, b, c, c_stride, accumulate) },
    );
}

/// One column of A times one row of B. Inlined: a call would leave the instruction set that `vectorize` switched on.
#[inline(always)]
unsafe fn step<S: Simd, const R: usize>(
    simd: S,
    start: *const f32,
    stride: usize,
    k: usize,
    b: *const f32,
    sums: &mut [[S::V; 2]; R],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let (left, right) = (simd.load(b), simd.load(b.add(S::LANES)));
        for (r, sum) in sums.iter_mut().enumerate() {
            let value = simd.splat(*start.add(r * stride + k));
            sum[0] = simd.mul_add(value, left, sum[0]);
            sum[1] = simd.mul_add(value, right, sum[1]);
        }
    }
}

#[inline(always)]
unsafe fn tile_body<S: Simd, const R: usize>(
    simd: S,
    a: Rows<'_>,
    mut b: *const f32,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
) {
    let mut sums = [[simd.splat(0.0); 2]; R];
    // SAFETY: `start`, `b` and `c` stay inside what the caller of `product` promised.
    unsafe {
        if accumulate {
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = [simd.load(c.add(r * c_stride)), simd.load(c.add(r * c_stride + S::LANES))];
            }
        }
        for &run in a.runs {
            let start = a.start.add(run);
            let mut k = 0;
            while k + unroll::<S>() <= a.len {
                for u in 0..unroll::<S>() {
                    step::<S, R>(simd, start, a.stride, k + u, b.add(2 * u * S::LANES), &mut sums);
                }
                (k, b) = (k + unroll::<S>(), b.add(2 * unroll::<S>() * S::LANES));
            }
            while k < a.len {
                step::<S, R>(simd, start, a.stride, k, b, &mut sums);
                (k, b) = (k + 1, b.add(2 * S::LANES));
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            simd.store(c.add(r * c_stride), sum[0]);
            simd.store(c.add(r * c_stride + S::LANES), sum[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_cut_into_full_tiles() {
        let cut = |most, mut left| {
            let mut tiles = Vec::new();
            while left > 0 {
                tiles.push(tile_rows(most, left));
                left -= tiles[tiles.len() - 1];
            }
            tiles
        };
        assert_eq!(cut(6, 20), [6, 6, 4, 4]);
        assert_eq!(cut(6, 7), [4, 3]);
        assert_eq!(cut(12, 31), [12, 12, 6, 1]);
        assert_eq!(cut(4, 6), [4, 2]);
        assert_eq!(cut(8, 20), [8, 8, 4]);
    }
}
