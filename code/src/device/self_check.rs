// SPDX-License-Identifier: Apache-2.0
//! Whether this host's fast kernels compute what the plain ones do: asked of a new machine or a built image, answered in
//! milliseconds and without weights.

use super::{
    ConvGeometry, Device as _, HeadLayout, Mask, Ops, Precision, QkvPart,
    compare::Compare,
    cpu::{CpuDevice, CpuOptions, Isa},
};
use crate::{error::Result, weight::Weight};

/// Rows and columns that fill no vector or tile evenly.
const ROWS: usize = 37;
const INPUTS: usize = 96;
const OUTPUTS: usize = 130;
const LAYOUT: HeadLayout = HeadLayout { query_heads: 4, key_value_heads: 2, head_dim: 32 };
/// Height, width, channels of an image.
const IMAGE: [usize; 3] = [9, 11, 32];

/// Runs one of each expensive operation on the CPU device as it would be chosen here, and on the portable kernels; returns
/// the chosen instructions.
///
/// # Errors
/// If `FLUX2_CPU_ISA` names what this host lacks, threads cannot be started, or an operation differs by more than the
/// precision explains: relative L2 error of 1e-5 in f32, 1e-2 where inputs are rounded to bf16.
pub fn self_check(precision: Precision) -> Result<Isa> {
    let options = CpuOptions { precision, threads: None };
    let chosen = CpuDevice::new(options)?;
    let isa = chosen.isa();
    let bound = if precision == Precision::F32 { 1e-5 } else { 1e-2 };
    let device = Compare::new(CpuDevice::with_isa(options, Isa::Portable)?, chosen, bound);
    let ops = Ops::new(&device);
    let mut numbers = Numbers(1);

    let x = ops.upload_rows(&numbers.take(ROWS * INPUTS), ROWS, INPUTS)?;
    let mut weight = |name: &str, shape: &[usize]| {
        Weight::from_f32_as_bf16(name, &numbers.take(shape.iter().product()), shape)
    };
    let matrix = ops.matrix_with_bias(&[weight("w", &[OUTPUTS, INPUTS])], &[weight("b", &[OUTPUTS])])?;
    ops.linear(&x, &matrix)?;
    let gated = ops.gated_matrix(&weight("g", &[OUTPUTS, INPUTS]), &weight("u", &[OUTPUTS, INPUTS]))?;
    ops.linear_swiglu(&x, &gated)?;
    let conv = ops.conv(&weight("k", &[OUTPUTS, IMAGE[2], 3, 3]), &weight("b", &[OUTPUTS]))?;

    let qkv = ops.upload_rows(&numbers.take(ROWS * LAYOUT.columns()), ROWS, LAYOUT.columns())?;
    let part = QkvPart { qkv: &qkv, query_norm: None, key_norm: None };
    let heads = ops.qkv_heads(&[part], LAYOUT, 1e-6, None)?;
    ops.attention(&heads, &Mask::CausalKeys(0..ROWS - 3), (LAYOUT.head_dim as f32).sqrt().recip())?;

    let [height, width, channels] = IMAGE;
    let image = ops.upload_image(&numbers.take(IMAGE.iter().product()), height, width, channels)?;
    ops.conv2d(&image, &conv, ConvGeometry::SAME_3X3)?;
    device.synchronize()?;
    Ok(isa)
}

/// Numbers in -1 to 1 that look random and are the same everywhere (Knuth's MMIX generator).
struct Numbers(u64);

impl Numbers {
    fn take(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_passes_in_both_precisions() {
        for precision in [Precision::F32, Precision::Bf16] {
            assert!(self_check(precision).is_ok(), "{:?}", self_check(precision));
        }
    }
}
