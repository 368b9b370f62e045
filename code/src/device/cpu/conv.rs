// SPDX-License-Identifier: Apache-2.0
//! Convolutions as implicit products: the pixels of a tile are the rows of `A`, and its taps are runs at fixed offsets in
//! a *strip*, the tile's part of the input with its border of zeros. No im2col buffer, no padded copy of the image.
//!
//! A task is a tile of output pixels and all output channels. For each block of `CHANNELS` input channels it builds the
//! strip (in the second-level cache), reading the image once: group norm, SiLU and nearest ×2 upsampling happen on the
//! way, so their results never exist as images. Then every panel of the kernel passes over the strip from the first-level
//! cache. Partial sums live in scratch memory; bias and residual are added when they leave it.
//!
//! Kernels are packed once, at load: 16 bits stay 16 bits (168 MB for FLUX.2's VAE).

use std::{ops::Range, sync::OnceLock};

use half::bf16;
use rayon::prelude::*;

use super::{
    buffer::{Buffer, Shared, with_scratch},
    kernel::{self, Rows},
    linear::Epilogue,
    norm::{Affine, affine_row},
    simd::Simd,
    unit::{Panels, Unit},
    weights::CpuMatrix,
};
use crate::{
    device::{ConvGeometry, MemoryReport, Precision},
    weight::{DType, Weight},
};

/// Sums of a task: 1 MiB in the second-level cache.
const TASK_SUMS: usize = 256 * 1024;
/// Most output pixels of a task.
const TASK_PIXELS: usize = 1024;
/// Widest tile.
const TASK_WIDTH: usize = 128;

/// Input channels of a block: a panel takes at most about 18 KiB of the first-level cache.
const fn block_channels<U: Unit>(taps: usize) -> usize {
    let fits = 18 * 1024 / (taps * kernel::columns::<U::S>() * size_of::<U::Value>());
    if fits >= 64 {
        64
    } else if fits >= 32 {
        32
    } else {
        16
    }
}

/// Blocks of input channels: first channel, channels, and channels with padding.
fn blocks<U: Unit>(inputs: usize, taps: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let most = block_channels::<U>(taps);
    (0..inputs).step_by(most).map(move |first| {
        let len = most.min(inputs - first);
        (first, len, len.next_multiple_of(U::STEP))
    })
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
    /// Packs `[out, in, size, size]` for `unit`. Adds what it holds to `memory`.
    pub fn new<U: Unit>(
        unit: U,
        weight: &Weight,
        bias: &Weight,
        precision: Precision,
        memory: &mut MemoryReport,
    ) -> Self {
        let (outputs, inputs, size) = (weight.shape()[0], weight.shape()[1], weight.shape()[2]);
        let pointwise = (size == 1).then(|| CpuMatrix::new(std::slice::from_ref(weight), precision, memory));
        let round = precision == Precision::Bf16 || weight.dtype() == DType::Bf16;
        let kernel = Kernel::pack(unit, [outputs, inputs, size], round, |output| weight.row_f32(output));
        memory.weights += kernel.panels.bytes();
        Self { pointwise, bias: bias.to_f32(), kernel, weight: weight.clone(), folded: OnceLock::new() }
    }

    /// The four 2×2 kernels that a 3×3 convolution of an image doubled by nearest neighbour comes down to, one for each
    /// `[row % 2, column % 2]` of the output: neighbours that are equal share a weight, the sum of theirs. 4 taps instead
    /// of 9. Made at first use; then adds what it holds to `memory`.
    pub fn folded<U: Unit>(&self, unit: U, precision: Precision, memory: &mut MemoryReport) -> &[Kernel; 4] {
        self.folded.get_or_init(|| {
            let kernels = [[0, 0], [0, 1], [1, 0], [1, 1]].map(|phase| {
                let dims = [self.kernel.outputs, self.kernel.inputs, 2];
                Kernel::pack(unit, dims, false, |output| {
                    let mut values = self.weight.row_f32(output);
                    if precision == Precision::Bf16 {
                        for value in &mut values {
                            *value = bf16::from_f32(*value).to_f32();
                        }
                    }
                    fold(&values, phase)
                })
            });
            memory.weights += kernels.iter().map(|kernel| kernel.panels.bytes()).sum::<u64>();
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
    /// `[block of input channels][panel][tap][channel][panel's columns]`.
    panels: Panels,
}

impl Kernel {
    /// Packs the kernels `[inputs, size, size]` that `values` gives for each output channel; `round` says that they are or
    /// may be rounded to bf16.
    fn pack<U: Unit>(
        unit: U,
        [outputs, inputs, size]: [usize; 3],
        round: bool,
        values: impl Fn(usize) -> Vec<f32> + Sync,
    ) -> Self {
        let (width, taps) = (kernel::columns::<U::S>(), size * size);
        let panels = outputs.div_ceil(width);
        let padded_inputs: usize = blocks::<U>(inputs, taps).map(|(.., padded)| padded).sum();
        let mut packed = vec![0.0; panels * width * padded_inputs * taps];
        let shared = Shared::new(&mut packed);
        (0..panels).into_par_iter().for_each(|panel| {
            for column in 0..width.min(outputs - panel * width) {
                let values = values(panel * width + column);
                for (first, block, padded) in blocks::<U>(inputs, taps) {
                    let start = (first * panels + panel * padded) * taps * width;
                    // SAFETY: this panel of this block is this task's alone.
                    let to = unsafe { shared.get(start..start + padded * taps * width) };
                    for c in 0..block {
                        for tap in 0..taps {
                            to[(tap * padded + c) * width + column] = values[(first + c) * taps + tap];
                        }
                    }
                }
            }
        });
        let lens = blocks::<U>(inputs, taps)
            .flat_map(|(.., padded)| std::iter::repeat_n(padded * taps * width, panels));
        Self { outputs, inputs, size, panels: unit.keep(packed, lens, round) }
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

    /// Channels `channels` of row `y`, columns `x0..`, into `to` `[columns][padded]`; zeros outside the image and in the
    /// channels of padding.
    #[inline(always)]
    fn read_row<S: Simd>(
        &self,
        simd: S,
        y: isize,
        x0: isize,
        channels: Range<usize>,
        padded: usize,
        to: &mut [f32],
    ) {
        let [height, width] = self.size();
        if y < 0 || y >= height as isize {
            to.fill(0.0);
            return;
        }
        let shift = usize::from(self.upsampled);
        for (i, to) in to.chunks_exact_mut(padded).enumerate() {
            let x = x0 + i as isize;
            if x < 0 || x >= width as isize {
                to.fill(0.0);
                continue;
            }
            let pixel = (y as usize >> shift) * self.dims[1] + (x as usize >> shift);
            let from = &self.x[pixel * self.dims[2]..(pixel + 1) * self.dims[2]][channels.clone()];
            let (to, padding) = to.split_at_mut(channels.len());
            padding.fill(0.0);
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
pub fn conv<U: Unit>(
    unit: U,
    input: Input<'_>,
    kernel: &Kernel,
    geometry: ConvGeometry,
    epilogue: Epilogue<'_>,
) -> Buffer {
    let [in_height, in_width] = input.size();
    let [height, width] = geometry.output(in_height, in_width, kernel.size);
    let mut out = Buffer::dirty(height * width * kernel.outputs);
    let place = Place { step: 1, first: [0, 0], width };
    run_tiles(
        unit,
        &[Job { input, kernel, geometry, place }],
        [height, width],
        epilogue,
        Shared::new(&mut out),
    );
    out
}

/// 3×3 convolution, padded by one, of `input` doubled by nearest neighbour. `kernels` are [`CpuConv::folded`].
pub fn upsampled_conv<U: Unit>(
    unit: U,
    input: Input<'_>,
    kernels: &[Kernel; 4],
    epilogue: Epilogue<'_>,
) -> Buffer {
    let [height, width] = input.size();
    let mut out = Buffer::dirty(4 * height * width * kernels[0].outputs);
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
    run_tiles(unit, &jobs, [height, width], epilogue, Shared::new(&mut out));
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
fn run_tiles<U: Unit>(
    unit: U,
    jobs: &[Job<'_>],
    [height, width]: [usize; 2],
    epilogue: Epilogue<'_>,
    out: Shared<'_>,
) {
    if height * width == 0 {
        return;
    }
    let tile_width = width.min(TASK_WIDTH);
    let outputs = jobs.iter().map(|job| job.kernel.outputs).max().unwrap_or(1).max(1);
    let pixels = (TASK_SUMS / outputs).min(TASK_PIXELS);
    let tile_height = (pixels / tile_width).clamp(1, height);
    let across = width.div_ceil(tile_width);
    let tiles = across * height.div_ceil(tile_height);
    (0..tiles * jobs.len()).into_par_iter().with_max_len(1).for_each(|task| {
        let (tile, job) = (task / jobs.len(), &jobs[task % jobs.len()]);
        let (y, x) = (tile / across * tile_height, tile % across * tile_width);
        let tile = Tile { y: y..height.min(y + tile_height), x: x..width.min(x + tile_width) };
        tile.run(unit, job, epilogue, out);
    });
}

/// Results of a task.
struct Tile {
    y: Range<usize>,
    x: Range<usize>,
}

impl Tile {
    fn run<U: Unit>(&self, unit: U, job: &Job<'_>, epilogue: Epilogue<'_>, out: Shared<'_>) {
        let Job { input, kernel: conv, geometry, place } = job;
        let (simd, width, taps) = (unit.simd(), kernel::columns::<U::S>(), conv.size * conv.size);
        let [top, left, ..] = geometry.padding;
        let strip_width = (self.x.len() - 1) * geometry.stride + conv.size;
        let strip_height = (self.y.len() - 1) * geometry.stride + conv.size;
        let (pixels, panels) = (self.y.len() * self.x.len(), conv.outputs.div_ceil(width));
        let largest = block_channels::<U>(taps).min(conv.inputs.next_multiple_of(U::STEP));
        let strip = strip_height * strip_width * largest;
        let room = |values: usize| (values * size_of::<U::Value>()).div_ceil(size_of::<f32>());
        let sizes = [strip, room(strip), room(taps * largest * width), panels * pixels * width, self.x.len()];
        with_scratch(sizes, |[strip, strip_room, panel_room, sums, scales]| {
            let strip_room: &mut [U::Value] = bytemuck::cast_slice_mut(strip_room);
            let panel_room: &mut [U::Value] = bytemuck::cast_slice_mut(panel_room);
            if conv.inputs == 0 {
                sums.fill(0.0);
            }
            for (index, (first, block, padded)) in blocks::<U>(conv.inputs, taps).enumerate() {
                let strip = &mut strip[..strip_height * strip_width * padded];
                for (i, row) in strip.chunks_exact_mut(strip_width * padded).enumerate() {
                    let y = (self.y.start * geometry.stride + i) as isize - top as isize;
                    let x = (self.x.start * geometry.stride) as isize - left as isize;
                    simd.vectorize(
                        #[inline(always)]
                        || input.read_row(simd, y, x, first..first + block, padded, row),
                    );
                }
                let (strip, scale) = unit.view(strip, strip_room);
                scales.fill(scale);
                let runs: Vec<_> =
                    (0..taps).map(|tap| (tap / conv.size * strip_width + tap % conv.size) * padded).collect();
                let stride = geometry.stride * padded;
                for panel in 0..panels {
                    let start = (first * panels + panel * padded) * taps * width;
                    let range = start..start + taps * padded * width;
                    let (b, scale) = unit.kept(&conv.panels, index * panels + panel, range, panel_room);
                    for y in 0..self.y.len() {
                        let a = &strip[y * geometry.stride * strip_width * padded..];
                        let a = Rows { start: a.as_ptr(), stride, runs: &runs, len: padded, tiled: false };
                        let at = (panel * pixels + y * self.x.len()) * width;
                        let c = &mut sums[at..at + self.x.len() * width];
                        // SAFETY: the strip holds all taps of the row's pixels, B `taps * padded` rows, C one row
                        // of `width` for each pixel, and `scales` a value.
                        unsafe {
                            unit.product(
                                self.x.len(),
                                a,
                                scales.as_ptr(),
                                b.as_ptr(),
                                scale,
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
