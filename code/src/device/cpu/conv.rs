// SPDX-License-Identifier: Apache-2.0
//! Convolutions as implicit products: the pixels of a tile are the rows of `A`, and its taps are runs at fixed offsets in
//! a *strip*, the tile's part of the input with its border of zeros. No im2col buffer, no padded copy of the image.
//!
//! A task is a tile of output pixels and all output channels. For each block of `CHANNELS` input channels it builds the
//! strip (in the second-level cache), reading the image once: group norm, SiLU and nearest ×2 upsampling happen on the
//! way, so their results never exist as images. Then every panel of the kernel passes over the strip from the first-level
//! cache. Partial sums live in scratch memory; bias and residual are added when they leave it.
//!
//! Kernels are packed once, at load: bf16 stays bf16 (168 MB for FLUX.2's VAE) and is widened a panel at a time.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::{
    buffer::{Buffer, Shared, with_scratch},
    kernel::{self, Rows},
    linear::Epilogue,
    norm::{Affine, affine_row},
    simd::Simd,
    weights::CpuMatrix,
};
use crate::{
    device::{ConvGeometry, MemoryReport, Precision},
    weight::{DType, Weight},
};

/// Input channels of a block: with 9 taps a panel of 16 columns takes 18 KiB.
const CHANNELS: usize = 32;
/// Output pixels of a task.
const TASK_PIXELS: usize = 1024;
/// Widest tile.
const TASK_WIDTH: usize = 128;

/// A kernel, packed.
pub struct CpuConv {
    /// The kernel as a matrix, if it is 1×1: such a convolution is a linear.
    pub pointwise: Option<CpuMatrix>,
    /// By output channel.
    pub bias: Vec<f32>,
    /// Side of the kernel.
    pub size: usize,
    inputs: usize,
    outputs: usize,
    panels: Panels,
}

/// `[block of input channels][panel][tap][channel][panel's columns]`.
enum Panels {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl CpuConv {
    /// Packs `[out, in, size, size]` for panels of `width` columns. Adds what it holds to `memory`.
    pub fn new(
        weight: &Weight,
        bias: &Weight,
        width: usize,
        precision: Precision,
        memory: &mut MemoryReport,
    ) -> Self {
        let (outputs, inputs, size) = (weight.shape()[0], weight.shape()[1], weight.shape()[2]);
        let pointwise = (size == 1).then(|| CpuMatrix::new(std::slice::from_ref(weight), precision, memory));
        let taps = size * size;
        let columns = outputs.next_multiple_of(width);
        let mut packed = vec![0.0; columns * inputs * taps];
        for output in 0..outputs {
            let values = weight.row_f32(output);
            for (first, block) in blocks(inputs) {
                let panel = first * taps * columns + (output / width) * block * taps * width + output % width;
                for c in 0..block {
                    for tap in 0..taps {
                        packed[panel + (tap * block + c) * width] = values[(first + c) * taps + tap];
                    }
                }
            }
        }
        let panels = if precision == Precision::Bf16 || weight.dtype() == DType::Bf16 {
            Panels::Bf16(packed.into_iter().map(|v| bf16::from_f32(v).to_bits()).collect())
        } else {
            Panels::F32(packed)
        };
        memory.weights += match &panels {
            Panels::F32(values) => 4 * values.len(),
            Panels::Bf16(values) => 2 * values.len(),
        } as u64;
        Self { pointwise, bias: bias.to_f32(), size, inputs, outputs, panels }
    }
}

/// Blocks of input channels: first channel and length.
fn blocks(inputs: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..inputs).step_by(CHANNELS).map(move |first| (first, CHANNELS.min(inputs - first)))
}

/// What is convolved.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// `[height, width, channels]`.
    pub x: &'a [f32],
    /// Height, width, channels of `x`.
    pub dims: [usize; 3],
    /// Read as if it were twice as large in both directions.
    pub upsampled: bool,
    /// Group norm and SiLU on the way.
    pub norm: Option<&'a Affine>,
}

impl Input<'_> {
    /// Height and width as the kernel sees them.
    pub fn size(&self) -> [usize; 2] {
        let [height, width, _] = self.dims;
        let factor = if self.upsampled { 2 } else { 1 };
        [factor * height, factor * width]
    }

    /// Channels `channels` of row `y`, columns `x0..`, into `to` `[columns][channels]`; zeros outside the image.
    #[inline(always)]
    fn read_row<S: Simd>(&self, simd: S, y: isize, x0: isize, channels: Range<usize>, to: &mut [f32]) {
        let [height, width] = self.size();
        if y < 0 || y >= height as isize {
            to.fill(0.0);
            return;
        }
        let shift = usize::from(self.upsampled);
        for (i, to) in to.chunks_exact_mut(channels.len()).enumerate() {
            let x = x0 + i as isize;
            if x < 0 || x >= width as isize {
                to.fill(0.0);
                continue;
            }
            let pixel = (y as usize >> shift) * self.dims[1] + (x as usize >> shift);
            let from = &self.x[pixel * self.dims[2]..(pixel + 1) * self.dims[2]][channels.clone()];
            match self.norm {
                None => to.copy_from_slice(from),
                Some(norm) => {
                    let (scale, shift) = (&norm.scale[channels.clone()], &norm.shift[channels.clone()]);
                    affine_row(simd, from, scale, shift, true, to);
                }
            }
        }
    }
}

/// Convolution of `input`, finished by `epilogue`.
pub fn conv<S: Simd>(
    simd: S,
    input: Input<'_>,
    conv: &CpuConv,
    geometry: ConvGeometry,
    epilogue: Epilogue<'_>,
) -> Buffer {
    let [in_height, in_width] = input.size();
    let [height, width] = geometry.output(in_height, in_width, conv.size);
    let mut out = Buffer::zeros(height * width * conv.outputs);
    if out.is_empty() {
        return out;
    }
    let tile_width = width.min(TASK_WIDTH);
    let tile_height = (TASK_PIXELS / tile_width).clamp(1, height);
    let across = width.div_ceil(tile_width);
    let shared = Shared::new(&mut out);
    (0..across * height.div_ceil(tile_height)).into_par_iter().with_max_len(1).for_each(|task| {
        let (y, x) = (task / across * tile_height, task % across * tile_width);
        let tile = Tile { y: y..height.min(y + tile_height), x: x..width.min(x + tile_width), width };
        tile.run(simd, input, conv, geometry, epilogue, shared);
    });
    out
}

/// Output pixels of a task.
struct Tile {
    y: Range<usize>,
    x: Range<usize>,
    /// Width of the whole output.
    width: usize,
}

impl Tile {
    fn run<S: Simd>(
        &self,
        simd: S,
        input: Input<'_>,
        conv: &CpuConv,
        geometry: ConvGeometry,
        epilogue: Epilogue<'_>,
        out: Shared<'_>,
    ) {
        let (width, taps) = (kernel::columns::<S>(), conv.size * conv.size);
        let [top, left, ..] = geometry.padding;
        let strip_width = (self.x.len() - 1) * geometry.stride + conv.size;
        let strip_height = (self.y.len() - 1) * geometry.stride + conv.size;
        let (pixels, panels) = (self.y.len() * self.x.len(), conv.outputs.div_ceil(width));
        let largest = CHANNELS.min(conv.inputs);
        let sizes = [strip_height * strip_width * largest, taps * largest * width, panels * pixels * width];
        with_scratch(sizes, |[strip, widened, sums]| {
            if conv.inputs == 0 {
                sums.fill(0.0);
            }
            for (first, block) in blocks(conv.inputs) {
                let strip = &mut strip[..strip_height * strip_width * block];
                for (i, row) in strip.chunks_exact_mut(strip_width * block).enumerate() {
                    let y = (self.y.start * geometry.stride + i) as isize - top as isize;
                    let x = (self.x.start * geometry.stride) as isize - left as isize;
                    simd.vectorize(
                        #[inline(always)]
                        || input.read_row(simd, y, x, first..first + block, row),
                    );
                }
                let runs: Vec<_> =
                    (0..taps).map(|tap| (tap / conv.size * strip_width + tap % conv.size) * block).collect();
                let stride = geometry.stride * block;
                for panel in 0..panels {
                    let start = first * taps * panels * width + panel * taps * block * width;
                    let range = start..start + taps * block * width;
                    let b = match &conv.panels {
                        Panels::F32(values) => &values[range],
                        Panels::Bf16(values) => {
                            simd.vectorize(
                                #[inline(always)]
                                || widen_panel(simd, &values[range.clone()], widened),
                            );
                            &widened[..range.len()]
                        }
                    };
                    for y in 0..self.y.len() {
                        let a = &strip[y * geometry.stride * strip_width * block..];
                        let a = Rows { start: a.as_ptr(), stride, runs: &runs, len: block };
                        let at = (panel * pixels + y * self.x.len()) * width;
                        let c = &mut sums[at..at + self.x.len() * width];
                        // SAFETY: the strip holds all taps of the row's pixels, B `taps * block` rows, C one row
                        // of `width` for each pixel.
                        unsafe {
                            kernel::product(
                                simd,
                                self.x.len(),
                                a,
                                b.as_ptr(),
                                c.as_mut_ptr(),
                                width,
                                first > 0,
                            );
                        }
                    }
                }
            }
            simd.vectorize(
                #[inline(always)]
                || self.finish(simd, sums, conv.outputs, epilogue, out),
            );
        });
    }

    #[inline(always)]
    fn finish<S: Simd>(
        &self,
        simd: S,
        sums: &[f32],
        outputs: usize,
        epilogue: Epilogue<'_>,
        out: Shared<'_>,
    ) {
        let width = kernel::columns::<S>();
        let pixels = self.y.len() * self.x.len();
        for (i, y) in self.y.clone().enumerate() {
            for (j, x) in self.x.clone().enumerate() {
                for (panel, column) in (0..outputs).step_by(width).enumerate() {
                    let sums = &sums[(panel * pixels + i * self.x.len() + j) * width..][..width];
                    let at = (y * self.width + x) * outputs + column;
                    let count = width.min(outputs - column);
                    // SAFETY: this pixel is this task's alone.
                    epilogue.apply(simd, sums, unsafe { out.get(at..at + count) }, column, at);
                }
            }
        }
    }
}

#[inline(always)]
fn widen_panel<S: Simd>(simd: S, from: &[u16], to: &mut [f32]) {
    for (i, chunk) in from.chunks_exact(S::LANES).enumerate() {
        let to = &mut to[i * S::LANES..(i + 1) * S::LANES];
        // SAFETY: both have LANES values.
        unsafe { simd.store(to.as_mut_ptr(), simd.load_bf16(chunk.as_ptr())) };
    }
}
