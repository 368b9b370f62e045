// SPDX-License-Identifier: Apache-2.0
//! Vectors of f32 as the kernels see them: one small trait, implemented once per instruction set.
//!
//! A value of a type that implements [`Simd`] is the proof that this processor has the instructions: it is only made
//! after detection ([`super::isa`]). Kernels are written once, generic over it, and entered through [`Simd::vectorize`],
//! whose body is compiled with the instruction set switched on; everything they call must therefore be inlined.

/// Vector operations of one instruction set.
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of [`Simd::LANES`] values.
    type V: Copy;
    /// Values in a vector; at most 16.
    const LANES: usize;
    /// Rows of the matrix kernel's tile; its columns are two vectors. Chosen so that the tile fills the registers.
    const ROWS: usize;

    /// Runs `work` compiled for this instruction set. Mark the closure `#[inline(always)]`.
    fn vectorize<R>(self, work: impl FnOnce() -> R) -> R;

    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::V;
    /// The first lanes of `from`.
    ///
    /// # Safety
    /// `from` points to `LANES` readable values; no alignment is needed.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// Writes all lanes.
    ///
    /// # Safety
    /// `to` points to `LANES` writable values; no alignment is needed.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// Widens bf16, exactly.
    ///
    /// # Safety
    /// `from` points to `LANES` readable bf16 values; no alignment is needed.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;

    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, in one rounding where the hardware has it.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The smaller; `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Adds the low bits of `n` to the exponent of `v`.
    fn add_exponent(self, v: Self::V, n: Self::V) -> Self::V;

    /// Transposes `LANES` rows into columns: `to[k * stride + j] = rows[j][k]` for `k` and `j` below `LANES`.
    ///
    /// # Safety
    /// Each of the `LANES` pointers `rows` has `LANES` readable values; `to` has room for what is written.
    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], to: *mut f32, stride: usize) {
        for (j, row) in rows[..Self::LANES].iter().enumerate() {
            for k in 0..Self::LANES {
                // SAFETY: in bounds by the contract above.
                unsafe { *to.add(k * stride + j) = row.add(k).read_unaligned() };
            }
        }
    }
    /// The same from bf16, widened exactly.
    ///
    /// # Safety
    /// As for [`Simd::transpose`].
    #[inline(always)]
    unsafe fn transpose_bf16(self, rows: &[*const u16], to: *mut f32, stride: usize) {
        for (j, row) in rows[..Self::LANES].iter().enumerate() {
            for k in 0..Self::LANES {
                // SAFETY: in bounds by the contract above.
                unsafe { *to.add(k * stride + j) = widen(row.add(k).read_unaligned()) };
            }
        }
    }

    /// Lanes as an array; those past `LANES` are zero.
    #[inline(always)]
    fn lanes(self, v: Self::V) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        // SAFETY: LANES is at most 16.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        lanes
    }
    /// Sum of the lanes, in a fixed order.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut lanes = self.lanes(v);
        let mut width = Self::LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }
    /// Largest lane.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        self.lanes(v)[..Self::LANES].iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// `eˣ`, relative error below 2.5e-7 (measured in the conformance suite) for -86 ≤ x ≤ 88, clamped outside; NaN stays.
    ///
    /// `x = n ln 2 + r` with integral `n`, `|r| ≤ ln 2 / 2`; Taylor to degree 6 for `eʳ`; `2ⁿ` goes into the exponent.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        /// Added to a small number, leaves it rounded to an integer in the low bits of the mantissa.
        const ROUND: f32 = 12_582_912.0;
        /// ln 2 with its last bits in a second constant, so that n ln 2 is exact enough for every n.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        let x = self.min(self.splat(88.0), self.max(self.splat(-86.0), x));
        let rounded = self.mul_add(x, self.splat(std::f32::consts::LOG2_E), self.splat(ROUND));
        let n = self.sub(rounded, self.splat(ROUND));
        let r = self.mul_add(n, self.splat(-LN2_HIGH), x);
        let r = self.mul_add(n, self.splat(-LN2_LOW), r);
        let mut p = self.splat(1.0 / 720.0);
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.mul_add(p, r, self.splat(c));
        }
        self.add_exponent(p, rounded)
    }
    /// `x / (1 + e⁻ˣ)`.
    #[inline(always)]
    fn silu(self, x: Self::V) -> Self::V {
        let e = self.exp(self.sub(self.splat(0.0), x));
        self.div(x, self.add(self.splat(1.0), e))
    }
}

/// bf16 bits as f32.
#[inline(always)]
pub const fn widen(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `out[i] = f(inputs[0][i], …)` by vectors.
///
/// # Panics
/// If an input is shorter than `out`.
#[inline(always)]
pub fn map<S: Simd, const N: usize>(
    simd: S,
    inputs: [&[f32]; N],
    out: &mut [f32],
    f: impl Fn([S::V; N]) -> S::V,
) {
    assert!(inputs.iter().all(|input| input.len() >= out.len()), "inputs shorter than the output");
    let whole = out.len() / S::LANES * S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: i + LANES <= out.len() <= every input's length.
        unsafe {
            let v = f(inputs.map(|input| simd.load(input.as_ptr().add(i))));
            simd.store(out.as_mut_ptr().add(i), v);
        }
    }
    if whole < out.len() {
        let v = f(inputs.map(|input| load_part(simd, &input[whole..out.len()])));
        let rest = &mut out[whole..];
        rest.copy_from_slice(&simd.lanes(v)[..rest.len()]);
    }
}

/// The largest magnitude, 0 of none. NaN may be passed over.
#[inline(always)]
pub fn largest_abs<S: Simd>(simd: S, values: &[f32]) -> f32 {
    simd.vectorize(
        #[inline(always)]
        || {
            let chunks = values.chunks_exact(S::LANES);
            let rest = chunks.remainder().iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let (mut largest, mut smallest) = (simd.splat(rest), simd.splat(0.0));
            for chunk in chunks {
                // SAFETY: the chunk has LANES values.
                let v = unsafe { simd.load(chunk.as_ptr()) };
                (largest, smallest) = (simd.max(v, largest), simd.min(v, smallest));
            }
            simd.largest(simd.max(largest, simd.sub(simd.splat(0.0), smallest)))
        },
    )
}

/// `Σ f(inputs[0][i], …)` over the values of the first input, in an order that depends on its length alone.
#[inline(always)]
pub fn sum_map<S: Simd, const N: usize>(simd: S, inputs: [&[f32]; N], f: impl Fn([S::V; N]) -> S::V) -> f32 {
    let len = inputs[0].len();
    assert!(inputs.iter().all(|input| input.len() >= len), "inputs shorter than the first");
    let mut sums = [simd.splat(0.0); 4];
    let step = 4 * S::LANES;
    let blocks = len / step * step;
    for i in (0..blocks).step_by(step) {
        for (u, sum) in sums.iter_mut().enumerate() {
            // SAFETY: i + step <= len <= every input's length.
            let v = f(inputs.map(|input| unsafe { simd.load(input.as_ptr().add(i + u * S::LANES)) }));
            *sum = simd.add(*sum, v);
        }
    }
    let mut i = blocks;
    while i + S::LANES <= len {
        // SAFETY: as above.
        let v = f(inputs.map(|input| unsafe { simd.load(input.as_ptr().add(i)) }));
        sums[0] = simd.add(sums[0], v);
        i += S::LANES;
    }
    let [a, b, c, d] = sums;
    let mut total = simd.sum(simd.add(simd.add(a, b), simd.add(c, d)));
    if i < len {
        let v = f(inputs.map(|input| load_part(simd, &input[i..len])));
        total += simd.lanes(v)[..len - i].iter().sum::<f32>();
    }
    total
}

/// Fewer than `LANES` values, the rest zero.
#[inline(always)]
fn load_part<S: Simd>(simd: S, from: &[f32]) -> S::V {
    let mut lanes = [0.0; 16];
    lanes[..from.len()].copy_from_slice(from);
    // SAFETY: LANES is at most 16.
    unsafe { simd.load(lanes.as_ptr()) }
}

/// Vectors of the compiler's own choice (SSE2, NEON, …): runs anywhere.
#[derive(Clone, Copy)]
pub struct Portable;

/// Four values; operations on it become one instruction wherever there are 128-bit vectors.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Four([f32; 4]);

impl Four {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Simd for Portable {
    type V = Four;
    const LANES: usize = 4;
    /// 8 of 16 registers hold the tile on x86-64, 16 of 32 on aarch64.
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 8 } else { 4 };

    #[inline(always)]
    fn vectorize<R>(self, work: impl FnOnce() -> R) -> R {
        work()
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Four {
        Four([value; 4])
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Four {
        // SAFETY: the caller's contract.
        Four(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Four) {
        // SAFETY: the caller's contract.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(v.0) };
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Four {
        // SAFETY: the caller's contract.
        Four(unsafe { from.cast::<[u16; 4]>().read_unaligned() }.map(widen))
    }
    #[inline(always)]
    fn add(self, a: Four, b: Four) -> Four {
        a.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Four, b: Four) -> Four {
        a.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Four, b: Four) -> Four {
        a.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Four, b: Four) -> Four {
        a.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Four, b: Four, c: Four) -> Four {
        // Without the instruction `f32::mul_add` is a slow library call.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            Four(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], c.0[i])))
        } else {
            self.add(self.mul(a, b), c)
        }
    }
    #[inline(always)]
    fn min(self, a: Four, b: Four) -> Four {
        a.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: Four, b: Four) -> Four {
        a.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn add_exponent(self, v: Four, n: Four) -> Four {
        v.zip(n, |v, n| f32::from_bits(v.to_bits().wrapping_add(n.to_bits() << 23)))
    }
}
