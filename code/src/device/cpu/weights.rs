// SPDX-License-Identifier: Apache-2.0
//! Weight matrices: views of the memory map, and their packing into panels.
//!
//! Matrices are not prepacked: each task of a product packs the block it needs and uses it for hundreds of rows, which
//! costs 1 to 4 % of the product and saves a second copy of 8 GB and the time to make it. The one exception is a matrix
//! stored as f32 on a device that computes in bf16: it is rounded once into memory of our own.

use std::ops::Range;

use super::simd::{Simd, widen};
use crate::{
    device::{MemoryReport, Precision},
    weight::{DType, Weight},
};

/// A matrix `[outputs, inputs]`: the rows of all parts in turn.
pub struct CpuMatrix {
    parts: Vec<Weight>,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
}

impl CpuMatrix {
    /// Takes `parts` as they are, but rounds f32 to bf16 if `precision` asks for it. Adds what it holds to `memory`.
    pub fn new(parts: &[Weight], precision: Precision, memory: &mut MemoryReport) -> Self {
        let parts: Vec<_> = parts
            .iter()
            .map(|part| {
                if precision == Precision::Bf16 && part.dtype() == DType::F32 {
                    memory.weights += part.stored_bytes() as u64 / 2;
                    part.rounded()
                } else {
                    let bytes = part.stored_bytes() as u64;
                    *if part.is_mapped() { &mut memory.mapped } else { &mut memory.weights } += bytes;
                    part.clone()
                }
            })
            .collect();
        let outputs = parts.iter().map(Weight::rows).sum();
        Self { inputs: parts.first().map_or(0, Weight::row_len), parts, outputs }
    }

    /// Row `row`, or none past the end.
    pub fn row(&self, mut row: usize) -> Option<RowBytes<'_>> {
        for part in &self.parts {
            if row < part.rows() {
                return Some(RowBytes { bytes: part.row_bytes(row), dtype: part.dtype() });
            }
            row -= part.rows();
        }
        None
    }

    /// Row `row` times `x`, in an order that depends on the length alone; 0 past the end.
    #[inline(always)]
    pub fn dot<S: Simd>(&self, simd: S, row: usize, x: &[f32]) -> f32 {
        // Not `map_or`: its closure would not be compiled for the instruction set.
        match self.row(row) {
            Some(row) => row.dot(simd, x),
            None => 0.0,
        }
    }
}

/// Gate and up weights of a SwiGLU.
pub struct CpuGatedMatrix {
    /// Goes through SiLU.
    pub gate: CpuMatrix,
    /// Multiplies.
    pub up: CpuMatrix,
}

/// One row as stored.
#[derive(Clone, Copy)]
pub struct RowBytes<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

impl RowBytes<'_> {
    /// The values `range`, if they are stored as bf16 and this machine reads them as they are.
    #[inline(always)]
    pub fn bf16(&self, range: Range<usize>) -> Option<*const u16> {
        let stored = self.dtype == DType::Bf16 && cfg!(target_endian = "little");
        stored.then(|| self.bytes[2 * range.start..2 * range.end].as_ptr().cast())
    }

    /// Value `k`.
    #[inline(always)]
    pub fn value(&self, k: usize) -> f32 {
        let bytes = &self.bytes[k * self.dtype.size()..];
        match self.dtype {
            DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            DType::Bf16 => widen(u16::from_le_bytes([bytes[0], bytes[1]])),
        }
    }

    /// Values `k..k + LANES` on a little-endian machine.
    ///
    /// # Safety
    /// The row has them.
    #[inline(always)]
    unsafe fn vector<S: Simd>(&self, simd: S, k: usize) -> S::V {
        // SAFETY: the contract above; loads need no alignment.
        unsafe {
            match self.dtype {
                DType::F32 => simd.load(self.bytes.as_ptr().cast::<f32>().add(k)),
                DType::Bf16 => simd.load_bf16(self.bytes.as_ptr().cast::<u16>().add(k)),
            }
        }
    }

    /// `x · row`, in an order that depends on the length alone.
    #[inline(always)]
    fn dot<S: Simd>(&self, simd: S, x: &[f32]) -> f32 {
        let whole = if cfg!(target_endian = "little") { x.len() / S::LANES * S::LANES } else { 0 };
        assert!(self.bytes.len() >= x.len() * self.dtype.size(), "row shorter than its input");
        let mut sums = [simd.splat(0.0); 4];
        let blocks = whole / (4 * S::LANES) * (4 * S::LANES);
        // SAFETY: k + LANES <= x.len() in both loops, and the row is at least as long.
        unsafe {
            for k in (0..blocks).step_by(4 * S::LANES) {
                for (u, sum) in sums.iter_mut().enumerate() {
                    let k = k + u * S::LANES;
                    *sum = simd.mul_add(simd.load(x.as_ptr().add(k)), self.vector(simd, k), *sum);
                }
            }
            for k in (blocks..whole).step_by(S::LANES) {
                sums[0] = simd.mul_add(simd.load(x.as_ptr().add(k)), self.vector(simd, k), sums[0]);
            }
        }
        let [a, b, c, d] = sums;
        let sum = simd.sum(simd.add(simd.add(a, b), simd.add(c, d)));
        (whole..x.len()).fold(sum, |sum, k| sum + x[k] * self.value(k))
    }
}

/// Writes one panel `[k range][rows]`, widened to f32; missing rows are zeros.
///
/// Time: reads of the map and the transpose of `LANES`×`LANES` blocks in registers.
#[inline(always)]
pub fn pack_panel<S: Simd>(simd: S, rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [f32]) {
    let width = rows.len();
    let panel = &mut panel[..range.len() * width];
    for (first, group) in rows.chunks(S::LANES).enumerate().map(|(i, group)| (i * S::LANES, group)) {
        let dtype = group[0].map(|row| row.dtype);
        let alike = group.len() == S::LANES && group.iter().all(|row| row.map(|row| row.dtype) == dtype);
        let whole = match dtype {
            Some(dtype) if alike && cfg!(target_endian = "little") => {
                let whole = range.len() / S::LANES * S::LANES;
                let mut starts = [std::ptr::null::<u8>(); 16];
                for (start, row) in starts.iter_mut().zip(group.iter().flatten()) {
                    *start = row.bytes[range.start * dtype.size()..range.end * dtype.size()].as_ptr();
                }
                for k in (0..whole).step_by(S::LANES) {
                    // SAFETY: each start has range.len() values, k + LANES of them at least; the panel has
                    // range.len() rows of `width`, of which columns first..first + LANES are written.
                    unsafe {
                        let to = panel.as_mut_ptr().add(k * width + first);
                        match dtype {
                            DType::F32 => {
                                simd.transpose(&starts.map(|s| s.cast::<f32>().wrapping_add(k)), to, width);
                            }
                            DType::Bf16 => {
                                simd.transpose_bf16(
                                    &starts.map(|s| s.cast::<u16>().wrapping_add(k)),
                                    to,
                                    width,
                                );
                            }
                        }
                    }
                }
                whole
            }
            _ => 0,
        };
        for k in whole..range.len() {
            for (j, row) in group.iter().enumerate() {
                panel[k * width + first + j] = row.map_or(0.0, |row| row.value(range.start + k));
            }
        }
    }
}
