// SPDX-License-Identifier: Apache-2.0
//! Devices to test, numbers to test them with, and how close is close enough.

use std::{
    io::Write,
    sync::{Arc, Once},
};

use flux2::{
    device::{
        Device, Precision,
        cpu::{CpuDevice, CpuOptions, Isa},
    },
    weight::{DType, Storage, Weight},
};

/// Relative L2 error allowed: f32 sums of some thousand terms in any order.
pub const BOUND: f64 = 2e-6;

/// The same for a product: inputs rounded to bf16 cost 1.7e-3 of many and up to half a bit in eight of one; fp16 sums of 64
/// products are finer.
pub fn product_bound(device: &CpuDevice) -> f64 {
    match (device.isa(), device.precision()) {
        (Isa::Amx, Precision::Bf16) => 4e-3,
        (Isa::Avx512Fp16, Precision::Bf16) => 1.5e-3,
        _ => BOUND,
    }
}

/// Whether inputs of products are rounded to bf16, and sums of bf16 inputs therefore as exact as f32 is.
pub fn rounds_inputs(device: &CpuDevice) -> bool {
    device.isa() == Isa::Amx && device.precision() == Precision::Bf16
}

/// Numbers for a product, and how exact it must be: on devices that round their inputs, also numbers that need no rounding.
pub fn inputs(device: &CpuDevice, numbers: &mut Numbers, n: usize) -> Vec<(Vec<f32>, f64)> {
    let x = numbers.take(n);
    let round = |x: &[f32]| x.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
    let rounded = rounds_inputs(device).then(|| (round(&x), BOUND));
    rounded.into_iter().chain([(x, product_bound(device))]).collect()
}

/// A processor device for each instruction set that the host has, in both precisions.
pub fn devices() -> Vec<CpuDevice> {
    static SAY: Once = Once::new();
    SAY.call_once(|| {
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            // Not `eprintln!`, which the test harness hides.
            writeln!(std::io::stderr(), "not run: {isa} (this host lacks it)").ok();
        }
    });
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    isas.flat_map(|isa| [Precision::F32, Precision::Bf16].map(|precision| device(isa, precision, 2)))
        .collect()
}

pub fn device(isa: Isa, precision: Precision, threads: usize) -> CpuDevice {
    CpuDevice::with_isa(CpuOptions { precision, threads: Some(threads) }, isa).unwrap()
}

/// Numbers that look random and are the same everywhere.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// In -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    pub fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stored {
    F32,
    Bf16,
    /// bf16 at an odd address.
    Bf16Unaligned,
    /// f32 at an odd address.
    F32Unaligned,
}

impl Stored {
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::Bf16Unaligned, Self::F32Unaligned];
}

/// A weight of `shape` with `values`, as stored.
pub fn weight(values: &[f32], shape: &[usize], stored: Stored) -> Weight {
    let (dtype, offset) = match stored {
        Stored::F32 => (DType::F32, 0),
        Stored::F32Unaligned => (DType::F32, 3),
        Stored::Bf16 => (DType::Bf16, 0),
        Stored::Bf16Unaligned => (DType::Bf16, 1),
    };
    let mut bytes = vec![0xff; offset];
    for value in values {
        match dtype {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            DType::Bf16 => bytes.extend(half::bf16::from_f32(*value).to_le_bytes()),
        }
    }
    Weight::new("w", Storage::Owned(Arc::new(bytes)), offset, dtype, shape)
}

/// What the device multiplies by: f32 weights are rounded to bf16 in bf16.
pub fn seen(w: &Weight, precision: Precision) -> Vec<f64> {
    let round = |v: f32| if precision == Precision::Bf16 { half::bf16::from_f32(v).to_f32() } else { v };
    w.to_f32().into_iter().map(|v| f64::from(round(v))).collect()
}

pub fn error(got: &[f32], wanted: &[f64]) -> f64 {
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(wanted).map(|(g, w)| f64::from(*g) - w));
    let size = norm(&mut wanted.iter().copied());
    if difference == 0.0 { 0.0 } else { difference / size }
}

#[track_caller]
pub fn close(got: &[f32], wanted: &[f64], bound: f64, case: impl std::fmt::Display) {
    assert_eq!(got.len(), wanted.len(), "{case}: number of values");
    let error = error(got, wanted);
    assert!(error <= bound, "{case}: relative L2 error {error:.2e} passes {bound:.0e}");
}
