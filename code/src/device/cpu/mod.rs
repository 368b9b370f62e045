// SPDX-License-Identifier: Apache-2.0
//! The processor of this computer.
//!
//! Activations are f32 row-major; weights are used in place from the memory map. What [`Precision::Bf16`] changes: weights
//! stored as f32 are rounded to bf16; where the processor has AMX, products are multiplied in bf16 with f32 sums; where it
//! has AVX512-FP16 instead, in fp16, more finely than bf16 inputs would be. Everything else is f32. Results are the same bit for bit for any number of threads: how work
//! is cut never depends on it, nor the order of a sum on how work is cut.
//!
//! `isa` chooses the instructions, `simd` is what kernels are written in, `unit` how `linear`, `attention` and `conv`
//! multiply matrices: by the f32 `kernel`, by `amx` or by `avx512fp16`.

// Kernels are generic over the instruction set and must be inlined into the function that switches it on.
#![allow(clippy::inline_always)]
// Vector loads need no alignment.
#![allow(clippy::cast_ptr_alignment)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_permission;
#[cfg(target_arch = "x86_64")]
mod amx_softmax;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512fp16;
mod buffer;
mod conv;
mod heads;
mod isa;
mod kernel;
mod linear;
mod norm;
mod peak;
mod recycle;
mod simd;
mod threads;
mod unit;
mod weights;

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rayon::ThreadPool;

pub use buffer::CpuTensor;
pub use conv::CpuConv;
pub use heads::CpuQkv;
pub use isa::Isa;
pub use threads::default_threads;
pub use weights::{CpuGatedMatrix, CpuMatrix};

use super::{
    ConvGeometry, Device, HeadLayout, Mask, MemoryReport, Precision, RawGroupNorm, RawQkvPart, Shape,
};
use crate::{error::Result, rope::RotaryTable, weight::Weight};
use buffer::Buffer;
use conv::Input;
use isa::{Kernels, dispatch, dispatch_unit};
use linear::{Epilogue, Weights};
use simd::Simd;

/// How to open the processor.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// What to compute in.
    pub precision: Precision,
    /// Threads; `None` is [`default_threads`].
    pub threads: Option<usize>,
}

/// See the module.
pub struct CpuDevice {
    precision: Precision,
    isa: Isa,
    kernels: Kernels,
    pool: Arc<ThreadPool>,
    memory: Mutex<MemoryReport>,
}

impl CpuDevice {
    /// The processor with the fastest instructions it has, or those that `FLUX2_CPU_ISA` names.
    ///
    /// # Errors
    /// If the variable names instructions that this host lacks, or threads cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self> {
        Self::with_isa(options, Isa::choose()?)
    }

    /// The processor with the instructions `isa`.
    ///
    /// # Errors
    /// If this host lacks them, or threads cannot be started.
    pub fn with_isa(options: CpuOptions, isa: Isa) -> Result<Self> {
        let kernels = isa.kernels()?;
        let pool = threads::pool(options.threads.unwrap_or_else(default_threads))?;
        Ok(Self { precision: options.precision, isa, kernels, pool, memory: Mutex::default() })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// The most floating-point operations per second that what multiplies matrices on this device can do with its
    /// threads, measured for `time` in registers alone: what the rates of its kernels are to be compared with.
    pub fn peak_flops(&self, time: Duration) -> f64 {
        dispatch_unit!(self.kernels, self.precision, unit => self.pool.install(|| peak::peak(unit, time)))
    }

    /// Prepares a weight and counts what it holds.
    fn prepare<T: Send>(&self, make: impl FnOnce(&mut MemoryReport) -> T + Send) -> T {
        let mut held = MemoryReport::default();
        let made = self.pool.install(|| make(&mut held));
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.weights += held.weights;
        memory.mapped += held.mapped;
        made
    }

    fn product(&self, x: &CpuTensor, w: Weights<'_>, outputs: usize, epilogue: Epilogue<'_>) -> CpuTensor {
        let (values, rows) = (x.values(), x.rows());
        let out = dispatch_unit!(self.kernels, self.precision, unit => {
            self.pool.install(|| linear::linear(unit, values, rows, w, epilogue))
        });
        let shape = match x.shape() {
            Shape::Rows(rows, _) => Shape::Rows(rows, outputs),
            Shape::Image(height, width, _) => Shape::Image(height, width, outputs),
        };
        CpuTensor::new(out, shape)
    }

    fn convolve(
        &self,
        input: Input<'_>,
        conv: &CpuConv,
        geometry: ConvGeometry,
        residual: Option<&CpuTensor>,
    ) -> CpuTensor {
        let epilogue =
            Epilogue { bias: Some(&conv.bias), gate: None, residual: residual.map(CpuTensor::values) };
        let out = dispatch_unit!(self.kernels, self.precision, unit => {
            self.pool.install(|| conv::conv(unit, input, &conv.kernel, geometry, epilogue))
        });
        let [height, width] = input.size();
        let [height, width] = geometry.output(height, width, conv.kernel.size);
        CpuTensor::new(out, Shape::Image(height, width, conv.bias.len()))
    }

    fn statistics(&self, x: &CpuTensor, norm: &RawGroupNorm<'_, Self>) -> norm::Affine {
        let (values, groups, channels) = (x.values(), norm.groups, x.columns());
        let (weight, bias, epsilon) = (norm.weight, norm.bias, norm.epsilon);
        dispatch!(self.kernels, s => self.pool.install(|| {
            norm::group_statistics(s, values, channels, groups, weight, bias, epsilon)
        }))
    }
}

impl Device for CpuDevice {
    type Tensor = CpuTensor;
    type Row = Vec<f32>;
    type Matrix = CpuMatrix;
    type GatedMatrix = CpuGatedMatrix;
    type Conv = CpuConv;
    type Qkv = CpuQkv;
    type Rotary = RotaryTable;

    fn name(&self) -> String {
        let threads = self.threads();
        format!("cpu ({}, {threads} thread{})", self.isa, if threads == 1 { "" } else { "s" })
    }
    fn precision(&self) -> Precision {
        self.precision
    }
    fn memory(&self) -> MemoryReport {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn upload_rows(&self, values: &[f32], rows: usize, columns: usize) -> Result<CpuTensor> {
        Ok(CpuTensor::new(Buffer::copy(values), Shape::Rows(rows, columns)))
    }
    fn upload_image(
        &self,
        values: &[f32],
        height: usize,
        width: usize,
        channels: usize,
    ) -> Result<CpuTensor> {
        Ok(CpuTensor::new(Buffer::copy(values), Shape::Image(height, width, channels)))
    }
    fn download(&self, x: &CpuTensor) -> Result<Vec<f32>> {
        Ok(x.values().to_vec())
    }
    fn upload_row(&self, values: &[f32]) -> Result<Vec<f32>> {
        Ok(values.to_vec())
    }
    fn download_row(&self, row: &Vec<f32>) -> Result<Vec<f32>> {
        Ok(row.clone())
    }
    fn download_qkv(&self, qkv: &CpuQkv) -> Result<[Vec<f32>; 3]> {
        Ok(dispatch_unit!(self.kernels, self.precision, unit => qkv.download(unit)))
    }
    fn matrix(&self, parts: &[Weight]) -> Result<CpuMatrix> {
        Ok(self.prepare(|memory| CpuMatrix::new(parts, self.precision, memory)))
    }
    fn gated_matrix(&self, gate: &Weight, up: &Weight) -> Result<CpuGatedMatrix> {
        Ok(self.prepare(|memory| CpuGatedMatrix {
            gate: CpuMatrix::new(std::slice::from_ref(gate), self.precision, memory),
            up: CpuMatrix::new(std::slice::from_ref(up), self.precision, memory),
        }))
    }
    fn conv(&self, weight: &Weight, bias: &Weight) -> Result<CpuConv> {
        Ok(dispatch_unit!(self.kernels, self.precision, unit => {
            self.prepare(|memory| CpuConv::new(unit, weight, bias, self.precision, memory))
        }))
    }
    fn rotary(&self, table: &RotaryTable) -> Result<RotaryTable> {
        Ok(table.clone())
    }

    fn linear(&self, x: &CpuTensor, w: &CpuMatrix, bias: Option<&Vec<f32>>) -> Result<CpuTensor> {
        let epilogue = Epilogue { bias: bias.map(Vec::as_slice), ..Epilogue::default() };
        Ok(self.product(x, Weights::Plain(w), w.outputs, epilogue))
    }
    fn linear_swiglu(&self, x: &CpuTensor, w: &CpuGatedMatrix) -> Result<CpuTensor> {
        Ok(self.product(x, Weights::Gated(w), w.gate.outputs, Epilogue::default()))
    }
    fn linear_add(
        &self,
        x: &CpuTensor,
        w: &CpuMatrix,
        bias: Option<&Vec<f32>>,
        gate: Option<&Vec<f32>>,
        residual: &CpuTensor,
    ) -> Result<CpuTensor> {
        let epilogue = Epilogue {
            bias: bias.map(Vec::as_slice),
            gate: gate.map(Vec::as_slice),
            residual: Some(residual.values()),
        };
        Ok(self.product(x, Weights::Plain(w), w.outputs, epilogue))
    }
    fn silu(&self, x: &CpuTensor) -> Result<CpuTensor> {
        let values = x.values();
        let out = dispatch!(self.kernels, s => self.pool.install(|| {
            norm::by_value(s, [values], #[inline(always)] |[x]| s.silu(x))
        }));
        Ok(CpuTensor::new(out, x.shape()))
    }
    fn layer_norm(
        &self,
        x: &CpuTensor,
        weight: &Vec<f32>,
        bias: &Vec<f32>,
        epsilon: f32,
    ) -> Result<CpuTensor> {
        let values = x.values();
        let out = dispatch!(self.kernels, s => self.pool.install(|| {
            norm::layer_norm(s, values, weight, bias, epsilon)
        }));
        Ok(CpuTensor::new(out, x.shape()))
    }
    fn rms_norm(&self, x: &CpuTensor, weight: &Vec<f32>, epsilon: f32) -> Result<CpuTensor> {
        let values = x.values();
        let out =
            dispatch!(self.kernels, s => self.pool.install(|| norm::rms_norm(s, values, weight, epsilon)));
        Ok(CpuTensor::new(out, x.shape()))
    }
    fn add(&self, a: &CpuTensor, b: &CpuTensor) -> Result<CpuTensor> {
        let values = [a.values(), b.values()];
        let out = dispatch!(self.kernels, s => self.pool.install(|| {
            norm::by_value(s, values, #[inline(always)] |[a, b]| s.add(a, b))
        }));
        Ok(CpuTensor::new(out, a.shape()))
    }
    fn gated_add(&self, x: &CpuTensor, gate: &Vec<f32>, y: &CpuTensor) -> Result<CpuTensor> {
        let (values, added) = (x.values(), y.values());
        let out = dispatch!(self.kernels, s => self.pool.install(|| norm::gated_add(s, values, gate, added)));
        Ok(CpuTensor::new(out, x.shape()))
    }
    fn concat_rows(&self, parts: &[&CpuTensor]) -> Result<CpuTensor> {
        let columns = parts.first().map_or(0, |part| part.columns());
        let rows = parts.iter().map(|part| part.rows()).sum();
        let mut values = Buffer::dirty(rows * columns);
        let mut rest = &mut values[..];
        for part in parts {
            let (to, after) = rest.split_at_mut(part.values().len());
            to.copy_from_slice(part.values());
            rest = after;
        }
        Ok(CpuTensor::new(values, Shape::Rows(rows, columns)))
    }
    fn slice_rows(&self, x: &CpuTensor, range: Range<usize>) -> Result<CpuTensor> {
        Ok(x.slice(&range))
    }
    fn split_row(&self, x: &CpuTensor, parts: usize) -> Result<Vec<Vec<f32>>> {
        let len = x.columns() / parts;
        Ok((0..parts).map(|i| x.values()[i * len..(i + 1) * len].to_vec()).collect())
    }
    fn one_plus(&self, row: &Vec<f32>) -> Result<Vec<f32>> {
        Ok(row.iter().map(|value| 1.0 + value).collect())
    }

    fn qkv_heads(
        &self,
        parts: &[RawQkvPart<'_, Self>],
        layout: HeadLayout,
        epsilon: f32,
        rotary: Option<&RotaryTable>,
    ) -> Result<CpuQkv> {
        let parts: Vec<_> = parts
            .iter()
            .map(|part| heads::Part {
                qkv: part.qkv,
                query_norm: part.query_norm.map(Vec::as_slice),
                key_norm: part.key_norm.map(Vec::as_slice),
            })
            .collect();
        Ok(dispatch_unit!(self.kernels, self.precision, unit => self.pool.install(|| {
            heads::qkv_heads(unit, &parts, layout, epsilon, rotary)
        })))
    }
    fn attention(&self, qkv: &CpuQkv, mask: &Mask, scale: f32) -> Result<CpuTensor> {
        let out = dispatch_unit!(self.kernels, self.precision, unit => {
            self.pool.install(|| attention::attention(unit, qkv, mask, scale))
        });
        Ok(CpuTensor::new(out, Shape::Rows(qkv.rows, qkv.layout.query_columns())))
    }

    fn conv2d(&self, x: &CpuTensor, conv: &CpuConv, geometry: ConvGeometry) -> Result<CpuTensor> {
        if let Some(matrix) = conv.pointwise.as_ref().filter(|_| geometry == ConvGeometry::POINTWISE) {
            let epilogue = Epilogue { bias: Some(&conv.bias), ..Epilogue::default() };
            return Ok(self.product(x, Weights::Plain(matrix), matrix.outputs, epilogue));
        }
        let input = Input { x: x.values(), dims: x.image(), upsampled: false, norm: None };
        Ok(self.convolve(input, conv, geometry, None))
    }
    fn group_norm(&self, x: &CpuTensor, norm: &RawGroupNorm<'_, Self>, silu: bool) -> Result<CpuTensor> {
        let affine = self.statistics(x, norm);
        let values = x.values();
        let out =
            dispatch!(self.kernels, s => self.pool.install(|| norm::apply_affine(s, values, &affine, silu)));
        Ok(CpuTensor::new(out, x.shape()))
    }
    fn upsample(&self, x: &CpuTensor) -> Result<CpuTensor> {
        let [height, width, channels] = x.image();
        let values = x.values();
        let out = self.pool.install(|| norm::upsample(values, [height, width, channels]));
        Ok(CpuTensor::new(out, Shape::Image(2 * height, 2 * width, channels)))
    }
    fn norm_silu_conv(
        &self,
        x: &CpuTensor,
        norm: &RawGroupNorm<'_, Self>,
        conv: &CpuConv,
        geometry: ConvGeometry,
        residual: Option<&CpuTensor>,
    ) -> Result<CpuTensor> {
        let affine = self.statistics(x, norm);
        let input = Input { x: x.values(), dims: x.image(), upsampled: false, norm: Some(&affine) };
        Ok(self.convolve(input, conv, geometry, residual))
    }
    fn upsample_conv(&self, x: &CpuTensor, conv: &CpuConv, geometry: ConvGeometry) -> Result<CpuTensor> {
        let mut input = Input { x: x.values(), dims: x.image(), upsampled: false, norm: None };
        if geometry != ConvGeometry::SAME_3X3 || conv.kernel.size != 3 {
            input.upsampled = true;
            return Ok(self.convolve(input, conv, geometry, None));
        }
        let epilogue = Epilogue { bias: Some(&conv.bias), ..Epilogue::default() };
        let out = dispatch_unit!(self.kernels, self.precision, unit => {
            let kernels = self.prepare(|memory| conv.folded(unit, self.precision, memory));
            self.pool.install(|| conv::upsampled_conv(unit, input, kernels, epilogue))
        });
        let [height, width, _] = x.image();
        Ok(CpuTensor::new(out, Shape::Image(2 * height, 2 * width, conv.bias.len())))
    }
    fn image_to_rows(&self, x: &CpuTensor) -> Result<CpuTensor> {
        Ok(x.view(Shape::Rows(x.rows(), x.columns())))
    }
    fn rows_to_image(&self, x: &CpuTensor, height: usize, width: usize) -> Result<CpuTensor> {
        Ok(x.view(Shape::Image(height, width, x.columns())))
    }
}
