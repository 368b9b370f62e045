// SPDX-License-Identifier: Apache-2.0
//! What the unit that multiplies matrices can do at most, measured: the yardstick of every kernel on the machine at hand.

use std::time::{Duration, Instant};

use super::{simd::Simd, unit::Unit};

/// Independent sums: enough for the latency of any multiply-add unit, few enough for 16 registers.
const CHAINS: usize = 12;
/// Multiply-adds of a chain between two looks at the clock.
const STEPS: usize = 20_000;

/// Floating-point operations per second of all threads of the current pool together, in registers only: the best of
/// some bursts within `time`.
pub fn peak<U: Unit>(unit: U, time: Duration) -> f64 {
    let start = Instant::now();
    let mut best = 0.0f64;
    while start.elapsed() < time || best == 0.0 {
        let rates = rayon::broadcast(|_| {
            let start = Instant::now();
            let mut operations = 0.0;
            while start.elapsed() < Duration::from_millis(5) {
                operations += unit.burst();
            }
            operations / start.elapsed().as_secs_f64()
        });
        best = best.max(rates.iter().sum());
    }
    best
}

/// f32 multiply-adds; their number, twice.
pub fn burst<S: Simd>(simd: S) -> f64 {
    std::hint::black_box(simd.vectorize(
        #[inline(always)]
        || chains(simd),
    ));
    (2 * CHAINS * S::LANES * STEPS) as f64
}

#[inline(always)]
fn chains<S: Simd>(simd: S) -> f32 {
    let (factor, term) = (simd.splat(std::hint::black_box(0.999)), simd.splat(std::hint::black_box(0.001)));
    let mut sums = [simd.splat(0.5); CHAINS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = simd.mul_add(*sum, factor, term);
        }
    }
    sums.into_iter().map(|sum| simd.sum(sum)).sum()
}
