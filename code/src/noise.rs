// SPDX-License-Identifier: Apache-2.0
//! Standard normal noise of a seed: `torch.randn` with a CPU generator, bit for bit.
//!
//! A Mersenne Twister seeded with the low 32 bits of the seed fills the buffer with uniforms, which a Box-Muller
//! transform turns into normals in blocks of 16 (ATen `DistributionTemplates.h`, `normal_fill`). Surprising: bf16 uses
//! 8 random bits a value and rounds after every operation, so a seed's bf16 noise is another picture than its f32 noise.
//!
//! The order of operations of the f32 logarithm, sine and cosine, every fused multiply-add included, and their constants
//! follow the Cephes library as vectorised in `avx_mathfun.h` (Julien Pommier, Giovanni Garberoglio; zlib licence), which
//! is what torch runs on x86-64 with AVX2. A torch without AVX2 draws slightly other numbers.

use half::bf16;
use rayon::prelude::*;

use crate::device::Precision;

/// Values that one Box-Muller block turns together.
const BLOCK: usize = 16;
/// Pairs of a block: value `j` goes with value `j + PAIRS`.
const PAIRS: usize = BLOCK / 2;
/// Added to every value, as torch does: it turns -0 into 0.
const MEAN: f32 = 0.0;
/// Different uniforms of the bf16 path.
const BF16_LEVELS: usize = 256;

/// `torch.randn(count, generator=torch.Generator().manual_seed(seed))` in f32, or in bfloat16 widened to f32.
///
/// The result is the same on every host: the f32 path uses only IEEE operations (`mul_add` is exact with or without the
/// instruction), the bf16 path f64 library functions whose last bits vanish in the rounding to eight.
///
/// # Panics
/// If `count` is below 16, where torch uses another transform; the smallest picture has 128 values.
pub fn standard_normal(seed: u64, count: usize, precision: Precision) -> Vec<f32> {
    assert!(count >= BLOCK, "noise of {count} values, wanted at least {BLOCK}");
    let mut generator = MersenneTwister::new(seed as u32);
    match precision {
        Precision::F32 => {
            // 24 bits make every multiple of 2^-24 in [0, 1).
            let uniform = move || (generator.next() & 0x00FF_FFFF) as f32 * f32::powi(2.0, -24);
            fill(count, uniform, box_muller_f32)
        }
        Precision::Bf16 => {
            let table = Bf16Table::new();
            let uniform = move || (generator.next() & 0xFF) as f32 / BF16_LEVELS as f32;
            fill(count, uniform, |block| table.box_muller(block))
        }
    }
}

/// Uniforms for the whole buffer first, then each block turned; a tail shorter than a block makes the last 16 values drawn
/// and turned again.
fn fill(
    count: usize,
    mut uniform: impl FnMut() -> f32,
    transform: impl Fn(&mut [f32; BLOCK]) + Sync,
) -> Vec<f32> {
    let mut values: Vec<f32> = (0..count).map(|_| uniform()).collect();
    let (blocks, tail) = values.as_chunks_mut::<BLOCK>();
    blocks.par_iter_mut().with_min_len(256).for_each(&transform);
    if !tail.is_empty() {
        let mut block = std::array::from_fn(|_| uniform());
        transform(&mut block);
        values[count - BLOCK..].copy_from_slice(&block);
    }
    values
}

/// `[u1, u2]` to `[r cos θ, r sin θ]` with `r = √(-2 ln (1 - u1))`, `θ = 2π u2`.
fn box_muller_f32(block: &mut [f32; BLOCK]) {
    for j in 0..PAIRS {
        let radius = (-2.0 * cephes_ln(1.0 - block[j])).sqrt();
        let (sin, cos) = cephes_sin_cos(std::f32::consts::TAU * block[j + PAIRS]);
        block[j] = radius * cos + MEAN;
        block[j + PAIRS] = radius * sin + MEAN;
    }
}

/// Natural logarithm of a positive f32.
#[allow(clippy::excessive_precision)] // Cephes' constants as published.
fn cephes_ln(x: f32) -> f32 {
    const COEFFICIENTS: [f32; 9] = [
        7.037_683_629_2e-2,
        -1.151_461_031_0e-1,
        1.167_699_874_0e-1,
        -1.242_014_084_6e-1,
        1.424_932_278_7e-1,
        -1.666_805_766_5e-1,
        2.000_071_476_5e-1,
        -2.499_999_399_3e-1,
        3.333_333_117_4e-1,
    ];
    let bits = x.max(f32::MIN_POSITIVE).to_bits();
    let mut exponent = ((bits >> 23) as i32 - 127) as f32 + 1.0;
    let mantissa = f32::from_bits((bits & 0x007F_FFFF) | 0x3F00_0000); // in [0.5, 1)
    let mut x = mantissa - 1.0;
    if mantissa < std::f32::consts::FRAC_1_SQRT_2 {
        exponent -= 1.0;
        x += mantissa;
    }
    let square = x * x;
    let mut y = COEFFICIENTS[0];
    for coefficient in &COEFFICIENTS[1..] {
        y = y.mul_add(x, *coefficient);
    }
    y *= x;
    y = y.mul_add(square, exponent * -2.121_944_40e-4); // ln 2 in two parts, the small one first
    y = (-square).mul_add(0.5, y);
    exponent.mul_add(0.693_359_375, x + y)
}

/// Sine and cosine of a non-negative f32.
#[allow(clippy::excessive_precision)] // Cephes' constants as published.
fn cephes_sin_cos(x: f32) -> (f32, f32) {
    // The octant, rounded up to even, then π/4 taken off that often in three parts.
    let octant = ((x * 1.273_239_544_735_16) as i32 + 1) & !1;
    let turns = octant as f32;
    let x = turns.mul_add(-0.785_156_25, x);
    let x = turns.mul_add(-2.418_756_484_985_351_562_5e-4, x);
    let x = turns.mul_add(-3.774_894_977_445_941_08e-8, x);

    let square = x * x;
    let mut cos = 2.443_315_711_809_948e-5f32;
    cos = cos.mul_add(square, -1.388_731_625_493_765e-3);
    cos = cos.mul_add(square, 4.166_664_568_298_827e-2);
    cos *= square;
    cos = cos.mul_add(square, -(square * 0.5)) + 1.0;
    let mut sin = -1.951_529_589_1e-4f32;
    sin = sin.mul_add(square, 8.332_160_873_6e-3);
    sin = sin.mul_add(square, -1.666_665_461_1e-1);
    sin *= square;
    sin = sin.mul_add(x, x);

    if octant & 2 != 0 {
        std::mem::swap(&mut sin, &mut cos);
    }
    let sin_negative = octant & 4 != 0;
    let cos_negative = (octant - 2) & 4 == 0;
    (if sin_negative { -sin } else { sin }, if cos_negative { -cos } else { cos })
}

/// The bf16 transform: 256 possible uniforms, so 256 radii and 256 angles.
struct Bf16Table {
    radius: [f32; BF16_LEVELS],
    sin: [f32; BF16_LEVELS],
    cos: [f32; BF16_LEVELS],
}

impl Bf16Table {
    fn new() -> Self {
        let level = |k: usize| k as f64 / BF16_LEVELS as f64;
        let angle = |k: usize| f64::from(round_bf16((std::f64::consts::TAU * level(k)) as f32));
        Self {
            radius: std::array::from_fn(|k| {
                let ln = round_bf16((1.0 - level(k)).ln() as f32);
                round_bf16(round_bf16(-2.0 * ln).sqrt())
            }),
            sin: std::array::from_fn(|k| round_bf16(angle(k).sin() as f32)),
            cos: std::array::from_fn(|k| round_bf16(angle(k).cos() as f32)),
        }
    }

    fn box_muller(&self, block: &mut [f32; BLOCK]) {
        let level = |uniform: f32| (uniform * BF16_LEVELS as f32) as usize;
        for j in 0..PAIRS {
            let (radius, angle) = (self.radius[level(block[j])], level(block[j + PAIRS]));
            block[j] = round_bf16(radius * self.cos[angle]) + MEAN;
            block[j + PAIRS] = round_bf16(radius * self.sin[angle]) + MEAN;
        }
    }
}

fn round_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// MT19937 (Matsumoto and Nishimura, 1998) with the usual initialisation.
struct MersenneTwister {
    state: [u32; Self::SIZE],
    next: usize,
}

impl MersenneTwister {
    const SIZE: usize = 624;
    const SHIFT: usize = 397;

    fn new(seed: u32) -> Self {
        let mut state = [seed; Self::SIZE];
        for i in 1..Self::SIZE {
            let previous = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { state, next: Self::SIZE }
    }

    fn next(&mut self) -> u32 {
        if self.next == Self::SIZE {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9D2C_5680;
        y ^= (y << 15) & 0xEFC6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for k in 0..Self::SIZE {
            let y = (self.state[k] & 0x8000_0000) | (self.state[(k + 1) % Self::SIZE] & 0x7FFF_FFFF);
            let magic = if y & 1 == 0 { 0 } else { 0x9908_B0DF };
            self.state[k] = self.state[(k + Self::SHIFT) % Self::SIZE] ^ (y >> 1) ^ magic;
        }
        self.next = 0;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::float_cmp, reason = "tests")]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    struct Vector {
        seed: u64,
        precision: Precision,
        first: [f32; 8],
        /// First 16 hex digits of the sha256 of the little-endian bytes, of 1×128×4×4 and 1×128×64×64 values.
        sha256: [&'static str; 2],
    }

    const fn vector(seed: u64, precision: Precision, first: [f32; 8], sha256: [&'static str; 2]) -> Vector {
        Vector { seed, precision, first, sha256 }
    }

    use Precision::{Bf16, F32};
    /// From torch 2.11.0.
    #[rustfmt::skip]
    #[allow(clippy::excessive_precision, clippy::unreadable_literal)]
    const VECTORS: [Vector; 8] = [
        vector(0, F32, [-1.125839829, -1.152360201, -0.250578582, -0.433878809, 0.848710358, 0.692009151, -0.31601277, -2.115219355], ["3f0ef5a2e81dc06d", "84ff3f017d1b8755"]),
        vector(0, Bf16, [1.4609375, 0.291015625, 0.9609375, 1.5703125, 0.494140625, -1.515625, -0.25, 0.57421875], ["0cdc0b6c60d8213a", "645a850191e52d87"]),
        vector(42, F32, [1.926915288, 1.487284064, 0.900717199, -2.105520964, 0.678418458, -1.234544873, -0.043067478, -1.604666948], ["cce876c98a066192", "0d1f7de77a0539b4"]),
        vector(42, Bf16, [-0.80859375, -1.53125, 0.40625, 0.171875, -0.2470703125, 0.2041015625, -0.87890625, -0.38671875], ["6c3d7853b61e62a6", "a66db70354aff53f"]),
        vector(1234, F32, [-0.111718565, -0.496590108, 0.163073704, -0.88168776, 0.053900193, 0.668373704, -0.059657607, -0.467497945], ["894357a6b3f94449", "8355e9ba3c3da118"]),
        vector(1234, Bf16, [-0.59375, -0.671875, 0.478515625, 0.578125, -1.4296875, 0.81640625, -0.671875, -1.9921875], ["9c6c8b88545f2891", "92c08f92fb28652c"]),
        vector(4294967301, F32, [1.84232986, 0.518887162, -1.711921334, -1.701379299, 2.019419432, -0.268614441, -0.130717501, -1.437413812], ["09dc0240a494d062", "80116ef2978f4d20"]),
        vector(4294967301, Bf16, [0.96875, 1.3984375, 1.8828125, -0.09228515625, -1.6953125, -1.0234375, -0.95703125, 0.306640625], ["69ae4b5a5b4ca315", "434f4200487f6e27"]),
    ];

    fn sha256_start(values: &[f32], precision: Precision) -> String {
        let mut hasher = Sha256::new();
        for value in values {
            match precision {
                F32 => hasher.update(value.to_le_bytes()),
                Bf16 => hasher.update(bf16::from_f32(*value).to_le_bytes()),
            }
        }
        format!("{:016x}", u64::from_be_bytes(*hasher.finalize().first_chunk().unwrap()))
    }

    #[test]
    fn case_52_noise_is_drawn_on_the_host_and_is_torchs_bit_for_bit() {
        for v in VECTORS {
            for (side, sha256) in [4, 64].into_iter().zip(v.sha256) {
                let values = standard_normal(v.seed, 128 * side * side, v.precision);
                let label = format!("seed {} {} {side}x{side}", v.seed, v.precision.name());
                assert_eq!(sha256_start(&values, v.precision), sha256, "{label}");
                assert_eq!(values[..8], v.first, "{label}");
            }
        }
    }

    #[test]
    fn only_the_low_32_bits_of_a_seed_count() {
        for precision in [F32, Bf16] {
            assert_eq!(standard_normal(5, 256, precision), standard_normal((1 << 32) + 5, 256, precision));
        }
    }

    #[test]
    fn bf16_noise_is_another_picture_and_coarse() {
        let (fine, coarse) = (standard_normal(42, 1 << 16, F32), standard_normal(42, 1 << 16, Bf16));
        assert_ne!(fine[0], coarse[0]);
        assert!(coarse.iter().all(|v| v.abs() <= 3.33 && *v == round_bf16(*v)));
    }

    #[test]
    fn a_tail_is_drawn_again() {
        let (whole, with_tail) = (standard_normal(7, 48, F32), standard_normal(7, 36, F32));
        assert_eq!(whole[..20], with_tail[..20]);
        // The last 16 of 36 come from uniforms 36 to 51, which are not a block of the longer draw.
        assert_ne!(whole[20..36], with_tail[20..]);
    }
}
