// SPDX-License-Identifier: Apache-2.0
//! AVX-512F and sixteen lanes: the f32 path of hosts with AVX-512 but without a faster bf16 unit. bf16 weights are
//! widened to f32 multiply-adds, which on the processors measured so far beats `vdpbf16ps` (half the rate). The 12×32
//! tile takes 24 of 32 registers.

#[allow(clippy::wildcard_imports, reason = "the names are Intel's and say which they are")]
use std::arch::x86_64::*;

use super::{avx2::Avx2, simd::Simd};

/// Proof of AVX-512F, and of the AVX2 that its transposes use.
#[derive(Clone, Copy)]
pub struct Avx512(Avx2);

impl Avx512 {
    /// The instruction set, if this processor and system have it.
    pub fn detect() -> Option<Self> {
        Avx2::detect().filter(|_| is_x86_feature_detected!("avx512f")).map(Self)
    }
}

#[target_feature(enable = "avx512f,avx2,fma")]
fn run<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Transposes 16 rows of 16 pairs of 16-bit values.
#[target_feature(enable = "avx512f")]
pub fn transpose_pairs(rows: &[__m512i; 16]) -> [__m512i; 16] {
    // Four columns of four rows in each 128-bit lane: `blocks[i][j]` holds column `4 lane + j` of rows `4i..4i + 4`.
    let mut blocks = [[_mm512_setzero_si512(); 4]; 4];
    for (block, rows) in blocks.iter_mut().zip(rows.as_chunks::<4>().0) {
        let (low, high) = (_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
        let (low2, high2) =
            (_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
        *block = [
            _mm512_unpacklo_epi64(low, low2),
            _mm512_unpackhi_epi64(low, low2),
            _mm512_unpacklo_epi64(high, high2),
            _mm512_unpackhi_epi64(high, high2),
        ];
    }
    let mut columns = [_mm512_setzero_si512(); 16];
    for j in 0..4 {
        let even = |a, b| _mm512_shuffle_i32x4::<0x88>(a, b);
        let odd = |a, b| _mm512_shuffle_i32x4::<0xdd>(a, b);
        let [a, b, c, d] = [blocks[0][j], blocks[1][j], blocks[2][j], blocks[3][j]];
        let (top, bottom) = (even(a, b), even(c, d));
        columns[j] = even(top, bottom);
        columns[8 + j] = odd(top, bottom);
        let (top, bottom) = (odd(a, b), odd(c, d));
        columns[4 + j] = even(top, bottom);
        columns[12 + j] = odd(top, bottom);
    }
    columns
}

// Every intrinsic below is sound because `Avx512` is only made by `detect`.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: usize = 12;

    #[inline(always)]
    fn vectorize<R>(self, work: impl FnOnce() -> R) -> R {
        // SAFETY: the features were detected.
        unsafe { run(work) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's contract, and AVX-512F was detected.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        // SAFETY: the caller's contract, and AVX-512F was detected.
        unsafe { _mm512_storeu_ps(to, v) };
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m512 {
        // SAFETY: the caller's contract, and AVX-512F was detected.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn add_exponent(self, v: __m512, n: __m512) -> __m512 {
        // SAFETY: AVX-512F was detected.
        unsafe {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), shifted))
        }
    }
    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], to: *mut f32, stride: usize) {
        // SAFETY: the caller's contract, in four blocks of 8×8.
        unsafe {
            for (first, rows) in [(0, &rows[..8]), (8, &rows[8..16])] {
                let right: [*const f32; 8] = std::array::from_fn(|j| rows[j].add(8));
                self.0.transpose(rows, to.add(first), stride);
                self.0.transpose(&right, to.add(8 * stride + first), stride);
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose_bf16(self, rows: &[*const u16], to: *mut f32, stride: usize) {
        // SAFETY: the caller's contract, in four blocks of 8×8.
        unsafe {
            for (first, rows) in [(0, &rows[..8]), (8, &rows[8..16])] {
                let right: [*const u16; 8] = std::array::from_fn(|j| rows[j].add(8));
                self.0.transpose_bf16(rows, to.add(first), stride);
                self.0.transpose_bf16(&right, to.add(8 * stride + first), stride);
            }
        }
    }
}
