// SPDX-License-Identifier: Apache-2.0
//! AVX512-FP16: products in fp16 multiply-adds, at twice the rate of f32, for hosts without a fast bf16 unit.
//!
//! bf16 weights are exact in fp16 (8 of its 11 bits) and activations round finer than to bf16. Range is kept by powers of
//! two, one for each row of `A` and each panel of `B`, so that the largest value lies between [`LARGEST`]`/2` and
//! [`LARGEST`]. Sums of [`FOLD`] products are fp16, two of them are added and go to f32 sums in memory: relative error
//! about 1e-3 for sums of thousands, where rounding the activations to bf16 alone costs 1.7e-3.
//!
//! A broadcast of one fp16 value takes a port that the multiply-adds need; of a pair of values along `k` it is free. So a
//! panel holds two vectors for each pair `(k, k + 1)`: lane `2i` of the first is column `2i` at `k` and lane `2i + 1`
//! column `2i + 1` at `k + 1`, the second has the other halves. The sum of the first and of the second with its lanes
//! swapped in pairs is the product, in order of columns. Of the time, an eighth goes into that and the conversion to f32.

#[allow(clippy::wildcard_imports, reason = "the names are Intel's and say which they are")]
use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::{
    avx512::{Avx512, transpose_pairs},
    kernel::{Rows, tile_rows},
    simd::{self, Simd},
    unit::{Panels, Unit},
    weights::RowBytes,
};

/// Products that are summed in fp16, in each of two lanes.
const FOLD: usize = 32;
/// Bound of scaled values: 2 FOLD · LARGEST² stays below fp16's largest number, 65,504.
const LARGEST: f32 = 16.0;
/// Columns of a panel.
const COLUMNS: usize = 32;
/// Pairs of `k` that are packed at once.
const CHUNK: usize = 16;

/// Proof of AVX512-FP16 and AVX512BW beside AVX-512F.
#[derive(Clone, Copy)]
pub struct Avx512Fp16(Avx512);

impl Avx512Fp16 {
    /// The instruction set, if this processor and system have it.
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512fp16") && is_x86_feature_detected!("avx512bw");
        Avx512::detect().filter(|_| has).map(Self)
    }
}

/// The power of two that brings `largest` between `LARGEST / 2` and `LARGEST`, and its inverse; 1 for what is not finite.
fn scales(largest: f32) -> (f32, f32) {
    const BIAS: u32 = 127;
    const TARGET: u32 = (LARGEST.to_bits() >> 23) - 1;
    let exponent = match largest.to_bits() >> 23 {
        255 => TARGET,
        exponent => exponent.max(8),
    };
    let power = |exponent| f32::from_bits(exponent << 23);
    (power(BIAS + TARGET - exponent), power(BIAS + exponent - TARGET))
}

/// Sixteen values times `factor`, rounded to nearest-even fp16.
#[target_feature(enable = "avx512f")]
fn narrow(values: __m512, factor: __m512) -> __m256i {
    _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(values, factor))
}

/// See [`Unit::encode`].
#[target_feature(enable = "avx512f")]
fn encode(from: &[f32], to: &mut [u16]) -> f32 {
    let (whole, rest) = from.as_chunks::<16>();
    let mut last = [0.0; 16];
    last[..rest.len()].copy_from_slice(rest);
    // By bits: what is not finite is the largest.
    let mut largest = _mm512_setzero_si512();
    for chunk in whole.iter().chain([&last]) {
        // SAFETY: the chunk has 16 values.
        let bits = unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) };
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX)));
    }
    let (factor, inverse) = scales(f32::from_bits(_mm512_reduce_max_epu32(largest)));
    let factor = _mm512_set1_ps(factor);
    let (to, end) = to.split_at_mut(16 * whole.len());
    for (chunk, to) in whole.iter().zip(to.as_chunks_mut::<16>().0) {
        // SAFETY: both chunks have 16 values.
        unsafe {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), narrow(_mm512_loadu_ps(chunk.as_ptr()), factor));
        };
    }
    let mut halves = [0u16; 16];
    // SAFETY: both arrays have 16 values.
    unsafe {
        _mm256_storeu_si256(halves.as_mut_ptr().cast(), narrow(_mm512_loadu_ps(last.as_ptr()), factor));
    };
    end.fill(0);
    end[..rest.len()].copy_from_slice(&halves[..rest.len()]);
    inverse
}

/// The bits of the largest value of a row's `range`, as bf16 without sign, rounded up.
#[target_feature(enable = "avx512f,avx512bw")]
fn largest_bits(row: &RowBytes<'_>, range: Range<usize>) -> u16 {
    let mut rest = range.start;
    let mut largest = 0;
    if let Some(values) = row.bf16(range.clone()) {
        let mut bits = _mm512_setzero_si512();
        while rest + 2 * CHUNK <= range.end {
            // SAFETY: the row has 2 CHUNK values from `rest` on.
            let values = unsafe { _mm512_loadu_si512(values.add(rest - range.start).cast()) };
            bits = _mm512_max_epu16(bits, _mm512_and_si512(values, _mm512_set1_epi16(i16::MAX)));
            rest += 2 * CHUNK;
        }
        let high = _mm512_reduce_max_epu32(_mm512_srli_epi32::<16>(bits));
        let low = _mm512_reduce_max_epu32(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff)));
        largest = high.max(low) as u16;
    }
    // The highest bits decide, and their rounding error is nothing beside the room above `LARGEST`.
    (rest..range.end).fold(largest, |largest, k| largest.max((row.value(k).to_bits() >> 16) as u16 & 0x7fff))
}

/// Up to `2 CHUNK` values of a row in fp16, zeros after them.
#[target_feature(enable = "avx512f,avx512bw")]
fn row_chunk(row: Option<&RowBytes<'_>>, range: Range<usize>, factor: __m512) -> __m512i {
    let Some(row) = row else { return _mm512_setzero_si512() };
    let stored = row.bf16(range.clone()).filter(|_| range.len() == 2 * CHUNK);
    let [low, high] = if let Some(values) = stored {
        // SAFETY: the row has 2 CHUNK values in the range.
        let values = unsafe { _mm512_loadu_si512(values.cast()) };
        let widen = |half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
        [widen(_mm512_castsi512_si256(values)), widen(_mm512_extracti64x4_epi64::<1>(values))]
    } else {
        let mut values = [0.0f32; 2 * CHUNK];
        for (value, k) in values.iter_mut().zip(range) {
            *value = row.value(k);
        }
        // SAFETY: there are 2 CHUNK = 32 values.
        unsafe { [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16))] }
    };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(low, factor)), narrow(high, factor))
}

/// Which 16-bit lanes are the second of a pair.
const SECOND: u32 = 0xaaaa_aaaa;

/// See [`Unit::pack`].
#[target_feature(enable = "avx512f,avx512bw")]
fn pack(rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [u16]) -> f32 {
    let largest = rows.iter().flatten().map(|row| largest_bits(row, range.clone())).max().unwrap_or(0);
    let (factor, inverse) = scales(f32::from_bits(u32::from(largest) << 16));
    let factor = _mm512_set1_ps(factor);
    let (lines, _) = panel[..range.len().div_ceil(2) * 2 * COLUMNS].as_chunks_mut::<COLUMNS>();
    for (chunk, lines) in lines.chunks_mut(2 * CHUNK).enumerate() {
        let start = range.start + 2 * CHUNK * chunk;
        let range = start..range.end.min(start + 2 * CHUNK);
        let mut halves = [[_mm512_setzero_si512(); 16]; 2];
        for (parity, half) in halves.iter_mut().enumerate() {
            for (i, half) in half.iter_mut().enumerate() {
                *half = row_chunk(rows[2 * i + parity].as_ref(), range.clone(), factor);
            }
            *half = transpose_pairs(half);
        }
        for (k, lines) in lines.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let [even, odd] = [halves[0][k], halves[1][k]];
            // SAFETY: a line has 32 values.
            unsafe {
                _mm512_storeu_si512(lines[0].as_mut_ptr().cast(), _mm512_mask_blend_epi16(SECOND, even, odd));
                _mm512_storeu_si512(lines[1].as_mut_ptr().cast(), _mm512_mask_blend_epi16(SECOND, odd, even));
            }
        }
    }
    inverse
}

/// See [`Unit::pack_values`].
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_values(values: &[f32], factor: f32, panel: &mut [u16]) {
    let rows = values.as_chunks::<COLUMNS>().0;
    let factor = _mm512_set1_ps(factor);
    let lines = panel[..values.len()].as_chunks_mut::<COLUMNS>().0.as_chunks_mut::<2>().0;
    for (rows, lines) in rows.as_chunks::<2>().0.iter().zip(lines) {
        let mut halves = [_mm512_setzero_si512(); 2];
        for (half, row) in halves.iter_mut().zip(rows) {
            // SAFETY: a row has 32 values.
            let (low, high) =
                unsafe { (_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(row.as_ptr().add(16))) };
            let low = _mm512_castsi256_si512(narrow(low, factor));
            *half = _mm512_inserti64x4::<1>(low, narrow(high, factor));
        }
        let first = _mm512_mask_blend_epi16(SECOND, halves[0], halves[1]);
        let second = _mm512_rol_epi32::<16>(_mm512_mask_blend_epi16(SECOND, halves[1], halves[0]));
        // SAFETY: a line has 32 values.
        unsafe {
            _mm512_storeu_si512(lines[0].as_mut_ptr().cast(), first);
            _mm512_storeu_si512(lines[1].as_mut_ptr().cast(), second);
        }
    }
}

/// `R` rows of a product.
///
/// # Safety
/// As for [`Unit::product`].
#[target_feature(enable = "avx512fp16,avx512f,avx512bw")]
#[allow(clippy::too_many_arguments, reason = "two operands, a result and their strides")]
unsafe fn tile<const R: usize>(
    a: Rows<'_, u16>,
    scales: *const f32,
    mut b: *const u16,
    scale: f32,
    c: *mut f32,
    c_stride: usize,
    mut accumulate: bool,
) {
    let mut sums = [[_mm512_setzero_ph(); 2]; R];
    let mut summed = 0;
    // SAFETY: `row`, `b`, `scales` and `c` stay inside what the caller of `product` promised.
    unsafe {
        for (i, &run) in a.runs.iter().enumerate() {
            let start = a.start.add(run);
            let pairs = a.len / 2;
            let mut k = 0;
            while k < pairs {
                let count = (FOLD - summed).min(pairs - k);
                for k in k..k + count {
                    let first = _mm512_castsi512_ph(_mm512_loadu_si512(b.cast()));
                    let second = _mm512_castsi512_ph(_mm512_loadu_si512(b.add(COLUMNS).cast()));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let pair = start.add(r * a.stride + 2 * k).cast::<i32>().read_unaligned();
                        let pair = _mm512_castsi512_ph(_mm512_set1_epi32(pair));
                        sums[0] = _mm512_fmadd_ph(pair, first, sums[0]);
                        sums[1] = _mm512_fmadd_ph(pair, second, sums[1]);
                    }
                    b = b.add(2 * COLUMNS);
                }
                (k, summed) = (k + count, summed + count);
                if summed == FOLD || (k == pairs && i + 1 == a.runs.len()) {
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let swapped = _mm512_rol_epi32::<16>(_mm512_castph_si512(sums[1]));
                        let sum = _mm512_add_ph(sums[0], _mm512_castsi512_ph(swapped));
                        let high = _mm512_extracti64x4_epi64::<1>(_mm512_castph_si512(sum));
                        let low = _mm512_cvtxph_ps(_mm512_castph512_ph256(sum));
                        let high = _mm512_cvtxph_ps(_mm256_castsi256_ph(high));
                        let factor = _mm512_set1_ps(scale * *scales.add(r));
                        let c = c.add(r * c_stride);
                        let (to_low, to_high) = (c, c.add(16));
                        if accumulate {
                            _mm512_storeu_ps(to_low, _mm512_fmadd_ps(low, factor, _mm512_loadu_ps(to_low)));
                            _mm512_storeu_ps(
                                to_high,
                                _mm512_fmadd_ps(high, factor, _mm512_loadu_ps(to_high)),
                            );
                        } else {
                            _mm512_storeu_ps(to_low, _mm512_mul_ps(low, factor));
                            _mm512_storeu_ps(to_high, _mm512_mul_ps(high, factor));
                        }
                        *sums = [_mm512_setzero_ph(); 2];
                    }
                    (summed, accumulate) = (0, true);
                }
            }
        }
        // Nothing was summed.
        if !accumulate {
            for r in 0..R {
                _mm512_storeu_ps(c.add(r * c_stride), _mm512_setzero_ps());
                _mm512_storeu_ps(c.add(r * c_stride + 16), _mm512_setzero_ps());
            }
        }
    }
}

impl Unit for Avx512Fp16 {
    type S = Avx512;
    type Value = u16;
    const CODED: bool = true;
    const SCALED: bool = true;
    const STEP: usize = 2;
    const DEPTH: usize = 384;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn encode(self, from: &[f32], to: &mut [u16]) -> f32 {
        assert!(from.len() <= to.len(), "room for fewer values than there are");
        // SAFETY: the features were detected.
        unsafe { encode(from, to) }
    }
    #[inline(always)]
    fn pack(self, rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [u16]) -> f32 {
        assert_eq!(rows.len(), COLUMNS, "rows of a panel");
        // SAFETY: the features were detected.
        unsafe { pack(rows, range, panel) }
    }
    #[inline(always)]
    fn view<'a>(self, from: &'a [f32], room: &'a mut [u16]) -> (&'a [u16], f32) {
        let room = &mut room[..from.len()];
        let scale = self.encode(from, room);
        (room, scale)
    }
    #[inline(always)]
    fn scale(self, largest: f32) -> (f32, f32) {
        scales(largest)
    }
    #[inline(always)]
    fn pack_values(self, values: &[f32], factor: f32, panel: &mut [u16]) {
        assert_eq!(values.len() % (2 * COLUMNS), 0, "an even number of rows");
        // SAFETY: the features were detected.
        unsafe { pack_values(values, factor, panel) };
    }
    fn decode(self, value: u16) -> f32 {
        f16::from_bits(value).to_f32()
    }
    fn unpack(self, panel: &[u16], k: usize, column: usize) -> f32 {
        // The first line has even columns at even `k` and odd ones at odd `k`, the second the others.
        let line = k / 2 * 2 + usize::from(k % 2 != column % 2);
        let lane = if k % 2 == column % 2 { column } else { column ^ 1 };
        self.decode(panel[line * COLUMNS + lane])
    }
    fn keep(self, mut values: Vec<f32>, lens: impl Iterator<Item = usize>, round: bool) -> Panels {
        if round {
            for value in &mut values {
                *value = bf16::from_f32(*value).to_f32();
            }
        }
        let mut panels = vec![0; values.len()];
        let mut start = 0;
        let scales = lens
            .map(|len| {
                let range = start..start + len;
                start = range.end;
                let values = &values[range.clone()];
                let (factor, inverse) = scales(simd::largest_abs(self.0, values));
                self.pack_values(values, factor, &mut panels[range]);
                inverse
            })
            .collect();
        Panels::Fp16(panels, scales)
    }
    #[inline(always)]
    fn kept<'a>(
        self,
        panels: &'a Panels,
        index: usize,
        range: Range<usize>,
        _room: &'a mut [u16],
    ) -> (&'a [u16], f32) {
        match panels {
            Panels::Fp16(values, scales) => (&values[range], scales[index]),
            Panels::F32(_) | Panels::Bf16(_) | Panels::Tiles(_) => unreachable!("kept by another unit"),
        }
    }
    #[inline(always)]
    unsafe fn product(
        self,
        rows: usize,
        a: Rows<'_, u16>,
        scales: *const f32,
        b: *const u16,
        scale: f32,
        c: *mut f32,
        c_stride: usize,
        accumulate: bool,
    ) {
        let mut done = 0;
        while done < rows {
            let count = tile_rows(Avx512::ROWS, rows - done);
            // SAFETY: the features were detected; rows done..done + count are inside A and C by the caller's contract.
            unsafe {
                let a = Rows { start: a.start.add(done * a.stride), ..a };
                let (scales, c) = (scales.add(done), c.add(done * c_stride));
                match count {
                    12 => tile::<12>(a, scales, b, scale, c, c_stride, accumulate),
                    8 => tile::<8>(a, scales, b, scale, c, c_stride, accumulate),
                    6 => tile::<6>(a, scales, b, scale, c, c_stride, accumulate),
                    5 => tile::<5>(a, scales, b, scale, c, c_stride, accumulate),
                    4 => tile::<4>(a, scales, b, scale, c, c_stride, accumulate),
                    3 => tile::<3>(a, scales, b, scale, c, c_stride, accumulate),
                    2 => tile::<2>(a, scales, b, scale, c, c_stride, accumulate),
                    _ => tile::<1>(a, scales, b, scale, c, c_stride, accumulate),
                }
            }
            done += count;
        }
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "powers of two are exact")]
mod tests {
    use super::*;

    #[test]
    fn scales_bring_the_largest_value_into_range() {
        for value in [1e-38, 3e-20, 0.75, 1.0, 8.0, 15.99, 16.0, 7e4, 3e38] {
            let (factor, inverse) = scales(value);
            assert_eq!(factor * inverse, 1.0, "{value}");
            assert!((8.0..16.0).contains(&(value * factor)) || value < 1e-30, "{value} {factor}");
        }
        assert_eq!(scales(0.0).0 * scales(0.0).1, 1.0);
        assert_eq!(scales(f32::INFINITY), (1.0, 1.0));
        assert_eq!(scales(f32::NAN), (1.0, 1.0));
    }
}
