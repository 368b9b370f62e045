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

use std::{ops::Range, sync::OnceLock};

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

/// Output pixels of a task.
const TASK_PIXELS: usize = 1024;
/// Widest tile.
const TASK_WIDTH: usize = 128;

/// Input channels of a block: with 9 taps a panel of 16 columns takes 18 KiB, with 4 taps 16 KiB.
const fn block_channels(taps: usize) -> usize {
    if taps > 4 { 32 } else { 64 }
}

/// Blocks of input channels: first channel and length.
fn blocks(inputs: usize, taps: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = block_channels(taps);
    (0..inputs).step_by(most).map(move |first| (first, most.min(inputs - first)))
}

/// A convolution, prepared.
pub struct CpuConv {
    /// The kernel as a matrix, if it is 1×1: such a convolution is a linear.
    pub pointwise: Option<CpuMatrix>,
    /// By output channel.
    pub bias: Vec<f32>,
    /// As stored.
    pub kernel: Kernel,
    weight: Weight,
    folded: OnceLock<[Kernel; 4]>,
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
        let round = precision == Precision::Bf16 || weight.dtype() == DType::Bf16;
        let kernel = Kernel::pack([outputs, inputs, size], width, round, |output| weight.row_f32(output));
        memory.weights += kernel.bytes();
        Self { pointwise, bias: bias.to_f32(), kernel, weight: weight.clone(), folded: OnceLock::new() }
    }

    /// The four 2×2 kernels that a 3×3 convolution of an image doubled by nearest neighbour comes down to, one for each
    /// `[row % 2, column % 2]` of the output: neighbours that are equal share a weight, the sum of theirs. 4 taps instead
    /// of 9. Made at first use; then adds what it holds to `memory`.
    pub fn folded(&self, width: usize, precision: Precision, memory: &mut MemoryReport) -> &[Kernel; 4] {
        self.folded.get_or_init(|| {
            let kernels = [[0, 0], [0, 1], [1, 0], [1, 1]].map(|phase| {
                let dims = [self.kernel.outputs, self.kernel.inputs, 2];
                Kernel::pack(dims, width, false, |output| {
                    let mut values = self.weight.row_f32(output);
                    if precision == Precision::Bf16 {
                        for value in &mut values {
                            *value = bf16::from_f32(*value).to_f32();
                        }
                    }
                    fold(&values, phase)
                })
            });
            memory.weights += kernels.iter().map(Kernel::bytes).sum::<u64>();
            kernels
        })
    }
}

/// `[inputs, 3, 3]` to `[inputs, 2, 2]` for the output pixels of one phase.
fn fold(values: &[f32], phase: [usize; 2]) -> Vec<f32> {
    // Which of three taps fall on the first and on the second source pixel.
    let taps = |phase: usize, source: usize| [[0..1, 1..3], [0..2, 2..3]][phase][source].clone();
    let mut folded = Vec::with_capacity(values.len() / 9 * 4);
    for kernel in values.chunks_exact(9) {
        for (y, x) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let columns = taps(phase[1], x);
            folded.push(
                taps(phase[0], y).map(|row| kernel[3 * row..][columns.clone()].iter().sum::<f32>()).sum(),
            );
        }
    }
    folded
}

/// A kernel in panels.
pub struct Kernel {
    outputs: usize,
    inputs: usize,
    /// Side.
    pub size: usize,
    panels: Panels,
}

/// `[block of input channels][panel][tap][channel][panel's columns]`.
enum Panels {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Kernel {
    /// Packs the kernels `[inputs, size, size]` that `values` gives for each output channel, as bf16 if `round`.
    fn pack(
        [outputs, inputs, size]: [usize; 3],
        width: usize,
        round: bool,
        values: impl Fn(usize) -> Vec<f32> + Sync,
    ) -> Self {
        let taps = size * size;
        let columns = outputs.next_multiple_of(width);
        let mut packed = vec![0.0; columns * inputs * taps];
        let shared = Shared::new(&mut packed);
        (0..outputs.div_ceil(width)).into_par_iter().for_each(|panel| {
            for column in 0..width.min(outputs - panel * width) {
                let values = values(panel * width + column);
                for (first, block) in blocks(inputs, taps) {
                    let start = first * taps * columns + panel * block * taps * width;
                    // SAFETY: this panel of this block is this task's alone.
                    let to = unsafe { shared.get(start..start + block * taps * width) };
                    for c in 0..block {
                        for tap in 0..taps {
                            to[(tap * block + c) * width + column] = values[(first + c) * taps + tap];
                        }
                    }
                }
            }
        });
        let panels = if round {
            Panels::Bf16(packed.into_iter().map(|v| bf16::from_f32(v).to_bits()).collect())
        } else {
            Panels::F32(packed)
        };
        Self { outputs, inputs, size, panels }
    }

    fn bytes(&self) -> u64 {
        match &self.panels {
            Panels::F32(values) => 4 * values.len() as u64,
            Panels::Bf16(values) => 2 * values.len() as u64,
        }
    }
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
    kernel: &Kernel,
    geometry: ConvGeometry,
    epilogue: Epilogue<'_>,
) -> Buffer {
    let [in_height, in_width] = input.size();
    let [height, width] = geometry.output(in_height, in_width, kernel.size);
    let mut out = Buffer::zeros(height * width * kernel.outputs);
    let place = Place { step: 1, first: [0, 0], width };
    run_tiles(
        simd,
        &[Job { input, kernel, geometry, place }],
        [height, width],
        epilogue,
        Shared::new(&mut out),
    );
    out
}

/// 3×3 convolution, padded by one, of `input` doubled by nearest neighbour. `kernels` are [`CpuConv::folded`].
pub fn upsampled_conv<S: Simd>(
    simd: S,
    input: Input<'_>,
    kernels: &[Kernel; 4],
    epilogue: Epilogue<'_>,
) -> Buffer {
    let [height, width] = input.size();
    let mut out = Buffer::zeros(4 * height * width * kernels[0].outputs);
    let jobs: [Job<'_>; 4] = std::array::from_fn(|i| {
        let [y, x] = [i / 2, i % 2];
        let geometry = ConvGeometry { stride: 1, padding: [1 - y, 1 - x, y, x] };
        Job {
            input,
            kernel: &kernels[i],
            geometry,
            place: Place { step: 2, first: [y, x], width: 2 * width },
        }
    });
    run_tiles(simd, &jobs, [height, width], epilogue, Shared::new(&mut out));
    out
}

/// One convolution and where its results go.
struct Job<'a> {
    input: Input<'a>,
    kernel: &'a Kernel,
    geometry: ConvGeometry,
    place: Place,
}

/// Where in the output image a result `(y, x)` goes: to `first + step · (y, x)`.
struct Place {
    step: usize,
    first: [usize; 2],
    /// Width of the output image.
    width: usize,
}

/// All tiles of jobs with results of one size.
fn run_tiles<S: Simd>(
    simd: S,
    jobs: &[Job<'_>],
    [height, width]: [usize; 2],
    epilogue: Epilogue<'_>,
    out: Shared<'_>,
) {
    if height * width == 0 {
        return;
    }
    let tile_width = width.min(TASK_WIDTH);
    let tile_height = (TASK_PIXELS / tile_width).clamp(1, height);
    let across = width.div_ceil(tile_width);
    let tiles = across * height.div_ceil(tile_height);
    (0..tiles * jobs.len()).into_par_iter().with_max_len(1).for_each(|task| {
        let (tile, job) = (task / jobs.len(), &jobs[task % jobs.len()]);
        let (y, x) = (tile / across * tile_height, tile % across * tile_width);
        let tile = Tile { y: y..height.min(y + tile_height), x: x..width.min(x + tile_width) };
        tile.run(simd, job, epilogue, out);
    });
}

/// Results of a task.
struct Tile {
    y: Range<usize>,
    x: Range<usize>,
}

impl Tile {
    fn run<S: Simd>(&self, simd: S, job: &Job<'_>, epilogue: Epilogue<'_>, out: Shared<'_>) {
        let Job { input, kernel: conv, geometry, place } = job;
        let (width, taps) = (kernel::columns::<S>(), conv.size * conv.size);
        let [top, left, ..] = geometry.padding;
        let strip_width = (self.x.len() - 1) * geometry.stride + conv.size;
        let strip_height = (self.y.len() - 1) * geometry.stride + conv.size;
        let (pixels, panels) = (self.y.len() * self.x.len(), conv.outputs.div_ceil(width));
        let largest = block_channels(taps).min(conv.inputs);
        let sizes = [strip_height * strip_width * largest, taps * largest * width, panels * pixels * width];
        with_scratch(sizes, |[strip, widened, sums]| {
            if conv.inputs == 0 {
                sums.fill(0.0);
            }
            for (first, block) in blocks(conv.inputs, taps) {
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
                || self.finish(simd, sums, conv.outputs, place, epilogue, out),
            );
        });
    }

    #[inline(always)]
    fn finish<S: Simd>(
        &self,
        simd: S,
        sums: &[f32],
        outputs: usize,
        place: &Place,
        epilogue: Epilogue<'_>,
        out: Shared<'_>,
    ) {
        let width = kernel::columns::<S>();
        let pixels = self.y.len() * self.x.len();
        for (i, y) in self.y.clone().enumerate() {
            for (j, x) in self.x.clone().enumerate() {
                for (panel, column) in (0..outputs).step_by(width).enumerate() {
                    let sums = &sums[(panel * pixels + i * self.x.len() + j) * width..][..width];
                    let row = place.first[0] + place.step * y;
                    let pixel = row * place.width + place.first[1] + place.step * x;
                    let at = pixel * outputs + column;
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
