// SPDX-License-Identifier: Apache-2.0
//! AVX2 with FMA and eight lanes. The 6×16 tile takes 12 of 16 registers.

#[allow(clippy::wildcard_imports, reason = "the names are Intel's and say which they are")]
use std::arch::x86_64::*;

use super::simd::Simd;

/// Proof of AVX2 and FMA.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The instruction set, if this processor and system have it.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma")]
fn run<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Transposes eight vectors of eight values.
#[inline(always)]
fn transpose_8x8(_: Avx2, r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: AVX2 was detected, or there were no `Avx2`.
    unsafe {
        let low = |a, b| _mm256_unpacklo_ps(a, b);
        let high = |a, b| _mm256_unpackhi_ps(a, b);
        let pairs = [
            low(r[0], r[1]),
            high(r[0], r[1]),
            low(r[2], r[3]),
            high(r[2], r[3]),
            low(r[4], r[5]),
            high(r[4], r[5]),
            low(r[6], r[7]),
            high(r[6], r[7]),
        ];
        let even = |a, b| _mm256_shuffle_ps::<0x44>(a, b);
        let odd = |a, b| _mm256_shuffle_ps::<0xEE>(a, b);
        let top = [
            even(pairs[0], pairs[2]),
            odd(pairs[0], pairs[2]),
            even(pairs[1], pairs[3]),
            odd(pairs[1], pairs[3]),
        ];
        let bottom = [
            even(pairs[4], pairs[6]),
            odd(pairs[4], pairs[6]),
            even(pairs[5], pairs[7]),
            odd(pairs[5], pairs[7]),
        ];
        [
            _mm256_permute2f128_ps::<0x20>(top[0], bottom[0]),
            _mm256_permute2f128_ps::<0x20>(top[1], bottom[1]),
            _mm256_permute2f128_ps::<0x20>(top[2], bottom[2]),
            _mm256_permute2f128_ps::<0x20>(top[3], bottom[3]),
            _mm256_permute2f128_ps::<0x31>(top[0], bottom[0]),
            _mm256_permute2f128_ps::<0x31>(top[1], bottom[1]),
            _mm256_permute2f128_ps::<0x31>(top[2], bottom[2]),
            _mm256_permute2f128_ps::<0x31>(top[3], bottom[3]),
        ]
    }
}

// Every intrinsic below is sound because `Avx2` is only made by `detect`.
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const ROWS: usize = 6;

    #[inline(always)]
    fn vectorize<R>(self, work: impl FnOnce() -> R) -> R {
        // SAFETY: the features were detected.
        unsafe { run(work) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: the caller's contract, and AVX was detected.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m256) {
        // SAFETY: the caller's contract, and AVX was detected.
        unsafe { _mm256_storeu_ps(to, v) };
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m256 {
        // SAFETY: the caller's contract, and AVX2 was detected.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: FMA was detected.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX was detected.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn add_exponent(self, v: __m256, n: __m256) -> __m256 {
        // SAFETY: AVX2 was detected.
        unsafe {
            let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shifted))
        }
    }
    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], to: *mut f32, stride: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let rows: [__m256; 8] = std::array::from_fn(|j| self.load(rows[j]));
            for (k, column) in transpose_8x8(self, rows).into_iter().enumerate() {
                self.store(to.add(k * stride), column);
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose_bf16(self, rows: &[*const u16], to: *mut f32, stride: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let rows: [__m256; 8] = std::array::from_fn(|j| self.load_bf16(rows[j]));
            for (k, column) in transpose_8x8(self, rows).into_iter().enumerate() {
                self.store(to.add(k * stride), column);
            }
        }
    }
}
