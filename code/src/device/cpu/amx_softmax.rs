// SPDX-License-Identifier: Apache-2.0
//! The exponentials of attention for products in bf16: beside tiles they would take most of the time at full precision.
//!
//! `eˣ = 2^t`, `t = x log₂ e`, as `2^⌊t⌋` times a polynomial of degree 4 in `t - ⌊t⌋`, relative error 3e-6 where rounding
//! to bf16 costs 2e-3; two instructions take the parts of `t`, and results go to bf16 from the registers. Per sixteen
//! scores one load for the largest, one load, a dozen arithmetic instructions and half a store for the rest.

#[allow(clippy::wildcard_imports, reason = "the names are Intel's and say which they are")]
use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;

use half::bf16;

/// Relative minimax on 0 to 1 with value 1 at 0, by Remez' algorithm.
const POLYNOMIAL: [f32; 4] = [0.693_044_84, 0.241_280_2, 0.052_242_473, 0.013_426_684];

/// The largest of `scores`; NaN may be passed over.
#[target_feature(enable = "avx512f")]
pub fn largest(scores: &[f32]) -> f32 {
    let (chunks, rest) = scores.as_chunks::<16>();
    let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
    for (i, chunk) in chunks.iter().enumerate() {
        // SAFETY: the chunk has 16 values.
        largest[i % 4] = _mm512_max_ps(unsafe { _mm512_loadu_ps(chunk.as_ptr()) }, largest[i % 4]);
    }
    let [a, b, c, d] = largest;
    let all = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
    rest.iter().copied().fold(all, f32::max)
}

/// `e^(scale · score - base)` of each score, rounded to bf16 in `to`; their sum before rounding.
#[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
pub fn exponentials(scores: &[f32], scale: f32, base: f32, to: &mut [u16]) -> f32 {
    let (scale, base) = (_mm512_set1_ps(scale * LOG2_E), _mm512_set1_ps(-base * LOG2_E));
    let (chunks, rest) = scores.as_chunks::<32>();
    let (to_chunks, to_rest) = to.as_chunks_mut::<32>();
    let mut totals = [_mm512_setzero_ps(); 2];
    for (chunk, to) in chunks.iter().zip(to_chunks) {
        // SAFETY: the chunk has 32 values.
        let (low, high) =
            unsafe { (_mm512_loadu_ps(chunk.as_ptr()), _mm512_loadu_ps(chunk.as_ptr().add(16))) };
        let (low, high) = (power(low, scale, base), power(high, scale, base));
        totals = [_mm512_add_ps(totals[0], low), _mm512_add_ps(totals[1], high)];
        // SAFETY: both types are 512 bits, and `to` has 32 values.
        unsafe {
            let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), both);
        }
    }
    let mut total = _mm512_reduce_add_ps(_mm512_add_ps(totals[0], totals[1]));
    for (score, to) in rest.iter().zip(to_rest) {
        let power = _mm512_cvtss_f32(power(_mm512_set1_ps(*score), scale, base));
        total += power;
        *to = bf16::from_f32(power).to_bits();
    }
    total
}

/// `2^(x · scale + base)`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn power(x: __m512, scale: __m512, base: __m512) -> __m512 {
    /// What is left after rounding down to integers.
    const FRACTION: i32 = 0x09;
    let t = _mm512_fmadd_ps(x, scale, base);
    let r = _mm512_reduce_ps::<FRACTION>(t);
    let [a, b, c, d] = POLYNOMIAL.map(|value| _mm512_set1_ps(value));
    let p = _mm512_fmadd_ps(d, r, c);
    let p = _mm512_fmadd_ps(p, r, b);
    let p = _mm512_fmadd_ps(p, r, a);
    let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
    _mm512_scalef_ps(p, t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_finer_than_bf16() {
        if !(is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512dq")) {
            return;
        }
        let scores: Vec<f32> = (0..2005).map(|i| i as f32 / -20.0).collect();
        let mut to = vec![0; scores.len()];
        // SAFETY: the features were detected.
        let (total, most) = unsafe { (exponentials(&scores, 0.5, 0.0, &mut to), largest(&scores[7..])) };
        assert!((most - scores[7]).abs() < f32::EPSILON);
        for (score, got) in scores.iter().zip(&to) {
            let wanted = (f64::from(*score) / 2.0).exp();
            let error = (f64::from(bf16::from_bits(*got).to_f32()) - wanted).abs() / wanted;
            assert!(error < 4e-3, "{score}: {error}");
        }
        let wanted: f64 = scores.iter().map(|score| (f64::from(*score) / 2.0).exp()).sum();
        assert!((f64::from(total) / wanted - 1.0).abs() < 5e-6, "{total} {wanted}");
        assert!((bf16::from_bits(to[0]).to_f32() - 1.0).abs() < f32::EPSILON);
    }
}
