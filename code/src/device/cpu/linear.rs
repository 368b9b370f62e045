// SPDX-License-Identifier: Apache-2.0
//! `x Wᵀ` with everything that follows it: bias, SwiGLU, gate and residual are applied while the tile is in the
//! first-level cache, so a linear reads its input once, its weights once per block of rows, and writes its output once.
//!
//! Blocking, outermost first: tasks of `Unit::TASK_ROWS` × `Unit::TASK_COLUMNS`; within a task slices along `k`, so that a
//! panel stays in the first-level cache however long the rows are, packed a few slices at a time, so that the weights are
//! read in runs; within a slice blocks of `BLOCK_ROWS` rows that stay in the second-level cache while all panels pass over
//! them. Partial sums of a task live in scratch memory.

use rayon::prelude::*;

use super::{
    buffer::{Buffer, Shared, with_scratch},
    kernel::{self, Rows},
    simd::{self, Simd},
    unit::Unit,
    weights::{CpuGatedMatrix, CpuMatrix, RowBytes},
};

/// Rows that stay in the second-level cache: at most 288 KiB of a slice.
const BLOCK_ROWS: usize = 192;
/// Rows that are encoded at once: those of a tile, if there are tiles.
const ENCODED_ROWS: usize = 32;
/// Up to this many rows the weights are read in place, a dot product at a time: the memory decides.
const FEW_ROWS: usize = 3;

/// What is multiplied.
#[derive(Clone, Copy)]
pub enum Weights<'a> {
    /// `x Wᵀ`.
    Plain(&'a CpuMatrix),
    /// `silu(x Gᵀ) · (x Uᵀ)`.
    Gated(&'a CpuGatedMatrix),
}

impl<'a> Weights<'a> {
    fn inputs(self) -> usize {
        match self {
            Self::Plain(w) => w.inputs,
            Self::Gated(w) => w.gate.inputs,
        }
    }
    fn outputs(self) -> usize {
        match self {
            Self::Plain(w) => w.outputs,
            Self::Gated(w) => w.gate.outputs,
        }
    }
    /// Output columns of a panel: a gated panel is a vector of gate and a vector of up columns.
    fn panel_outputs<S: Simd>(self) -> usize {
        match self {
            Self::Plain(_) => kernel::columns::<S>(),
            Self::Gated(_) => S::LANES,
        }
    }
    fn panel_rows<S: Simd>(self, panel: usize) -> [Option<RowBytes<'a>>; 32] {
        let mut rows = [None; 32];
        let first = panel * self.panel_outputs::<S>();
        for (j, row) in rows[..kernel::columns::<S>()].iter_mut().enumerate() {
            *row = match self {
                Self::Plain(w) => w.row(first + j),
                Self::Gated(w) if j < S::LANES => w.gate.row(first + j),
                Self::Gated(w) => w.up.row(first + j - S::LANES),
            };
        }
        rows
    }
}

/// What happens to a product before it is written: `residual + gate · (product + bias)`.
#[derive(Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// By output column.
    pub bias: Option<&'a [f32]>,
    /// By output column.
    pub gate: Option<&'a [f32]>,
    /// Of the shape of the output.
    pub residual: Option<&'a [f32]>,
}

impl Epilogue<'_> {
    /// Finishes the sums of `output.len()` columns that start at column `column` of the output and `at` of its buffer.
    #[inline(always)]
    pub fn apply<S: Simd>(&self, simd: S, sums: &[f32], output: &mut [f32], column: usize, at: usize) {
        let n = output.len();
        let bias = self.bias.map(|bias| &bias[column..column + n]);
        let gate = self.gate.map(|gate| &gate[column..column + n]);
        let residual = self.residual.map(|residual| &residual[at..at + n]);
        match (bias, gate, residual) {
            // A call to copy so little would cost more.
            (None, None, None) => simd::map(
                simd,
                [sums],
                output,
                #[inline(always)]
                |[s]| s,
            ),
            (Some(b), None, None) => simd::map(
                simd,
                [sums, b],
                output,
                #[inline(always)]
                |[s, b]| simd.add(s, b),
            ),
            (None, None, Some(r)) => simd::map(
                simd,
                [sums, r],
                output,
                #[inline(always)]
                |[s, r]| simd.add(r, s),
            ),
            (None, Some(g), Some(r)) => {
                simd::map(
                    simd,
                    [sums, g, r],
                    output,
                    #[inline(always)]
                    |[s, g, r]| simd.mul_add(g, s, r),
                );
            }
            (Some(b), None, Some(r)) => {
                simd::map(
                    simd,
                    [sums, b, r],
                    output,
                    #[inline(always)]
                    |[s, b, r]| simd.add(r, simd.add(s, b)),
                );
            }
            (bias, gate, residual) => {
                for (i, out) in output.iter_mut().enumerate() {
                    let sum = sums[i] + bias.map_or(0.0, |bias| bias[i]);
                    *out =
                        residual.map_or(0.0, |residual| residual[i]) + gate.map_or(1.0, |gate| gate[i]) * sum;
                }
            }
        }
    }
}

/// The product of `rows` rows of `x`, finished by `epilogue`.
pub fn linear<U: Unit>(unit: U, x: &[f32], rows: usize, w: Weights<'_>, epilogue: Epilogue<'_>) -> Buffer {
    let outputs = w.outputs();
    let mut out = Buffer::dirty(rows * outputs);
    if rows <= FEW_ROWS {
        few_rows(unit.simd(), x, rows, w, epilogue, &mut out);
        return out;
    }
    let x = Blocked::new(unit, x, rows, w.inputs());
    let panels = outputs.div_ceil(w.panel_outputs::<U::S>());
    let task_panels = U::TASK_COLUMNS / kernel::columns::<U::S>();
    let column_tasks = panels.div_ceil(task_panels);
    let shared = Shared::new(&mut out);
    (0..column_tasks * rows.div_ceil(U::TASK_ROWS)).into_par_iter().with_max_len(1).for_each(|task| {
        let (row_task, column_task) = (task / column_tasks, task % column_tasks);
        let task = Task {
            first_row: row_task * U::TASK_ROWS,
            rows: U::TASK_ROWS.min(rows - row_task * U::TASK_ROWS),
            first_panel: column_task * task_panels,
            panels: task_panels.min(panels - column_task * task_panels),
        };
        task.run(unit, &x, w, epilogue, shared);
    });
    out
}

/// The input as slices `[rows, U::DEPTH]` one after the other, so that the rows of a tile lie together.
struct Blocked {
    rows: usize,
    inputs: usize,
    /// `[slice][rows][stride]` of the unit's values.
    values: Buffer,
    /// `[slice][rows]`: what products are to be multiplied by.
    scales: Vec<f32>,
}

/// A slice along `k`.
struct Slice {
    index: usize,
    /// First value.
    start: usize,
    /// Values of a row.
    len: usize,
    /// The same, padded to steps.
    steps: usize,
    /// Values from one row to the next.
    stride: usize,
}

/// Values from one row of `len` to the next; in tiles, a 32nd of those from 32 rows to the next 32.
fn stride<U: Unit>(len: usize) -> usize {
    if U::TILED { len.next_multiple_of(U::STEP) } else { U::stride(len) }
}

/// All slices of rows of `inputs` values.
fn slices<U: Unit>(inputs: usize) -> impl Iterator<Item = Slice> {
    (0..inputs).step_by(U::DEPTH).enumerate().map(move |(index, start)| {
        let len = U::DEPTH.min(inputs - start);
        Slice { index, start, len, steps: len.next_multiple_of(U::STEP), stride: stride::<U>(len) }
    })
}

impl Blocked {
    fn new<U: Unit>(unit: U, x: &[f32], rows: usize, inputs: usize) -> Self {
        let count = inputs.div_ceil(U::DEPTH);
        let len = count * Self::pitch::<U>(rows, inputs) * size_of::<U::Value>();
        let mut values = Buffer::dirty(len.div_ceil(size_of::<f32>()));
        let mut scales = vec![1.0; rows * count];
        let shared = Shared::<U::Value>::new(bytemuck::cast_slice_mut(&mut values));
        let shared_scales = Shared::new(&mut scales);
        (0..rows.div_ceil(ENCODED_ROWS)).into_par_iter().for_each(|group| {
            let first = group * ENCODED_ROWS;
            let count = ENCODED_ROWS.min(rows - first);
            for slice in slices::<U>(inputs) {
                let at = Self::at::<U>(rows, inputs, &slice, first);
                let scale = slice.index * rows + first;
                // Rows in tiles fill the last tile's place.
                let len = if U::TILED { ENCODED_ROWS } else { count } * slice.stride;
                // SAFETY: each row of each slice is written by the one task that has the row.
                let (to, scales) =
                    unsafe { (shared.get(at..at + len), shared_scales.get(scale..scale + count)) };
                let from = &x[first * inputs + slice.start..];
                unit.encode_rows(from, inputs, count, slice.len, to, slice.stride, scales);
            }
        });
        Self { rows, inputs, values, scales }
    }
    /// Where a row of a slice starts.
    fn at<U: Unit>(rows: usize, inputs: usize, slice: &Slice, row: usize) -> usize {
        slice.index * Self::pitch::<U>(rows, inputs) + row * slice.stride
    }
    /// Values from one slice to the next.
    fn pitch<U: Unit>(rows: usize, inputs: usize) -> usize {
        let rows = if U::TILED { rows.next_multiple_of(ENCODED_ROWS) } else { rows };
        rows * stride::<U>(U::DEPTH.min(inputs))
    }
}

struct Task {
    first_row: usize,
    rows: usize,
    first_panel: usize,
    panels: usize,
}

impl Task {
    fn run<U: Unit>(&self, unit: U, x: &Blocked, w: Weights<'_>, epilogue: Epilogue<'_>, out: Shared<'_>) {
        let width = kernel::columns::<U::S>();
        let values: &[U::Value] = bytemuck::cast_slice(&x.values);
        let panel = U::PACKED_SLICES * U::DEPTH.min(x.inputs).next_multiple_of(U::STEP) * width;
        let packed = (self.panels * panel * size_of::<U::Value>()).div_ceil(size_of::<f32>());
        with_scratch(
            [packed, self.panels * U::PACKED_SLICES, self.panels * self.rows * width],
            #[inline(always)]
            |[packed, factors, sums]| {
                let packed: &mut [U::Value] = bytemuck::cast_slice_mut(packed);
                if x.inputs == 0 {
                    sums.fill(0.0);
                }
                let columns: Vec<_> =
                    (0..self.panels).map(|panel| w.panel_rows::<U::S>(self.first_panel + panel)).collect();
                let slices: Vec<_> = slices::<U>(x.inputs).collect();
                for packed_slices in slices.chunks(U::PACKED_SLICES) {
                    let first = packed_slices[0].start;
                    let all = packed_slices.iter().map(|slice| slice.steps).sum::<usize>();
                    for (panel, rows) in columns.iter().enumerate() {
                        for (i, slice) in packed_slices.iter().enumerate() {
                            let to = &mut packed[(panel * all + slice.start - first) * width..];
                            let range = slice.start..slice.start + slice.len;
                            factors[panel * U::PACKED_SLICES + i] =
                                unit.pack(&rows[..width], range, &mut to[..slice.steps * width]);
                        }
                    }
                    for (i, slice) in packed_slices.iter().enumerate() {
                        for block in (0..self.rows).step_by(BLOCK_ROWS) {
                            let count = BLOCK_ROWS.min(self.rows - block);
                            let row = self.first_row + block;
                            let a = &values[Blocked::at::<U>(x.rows, x.inputs, slice, row)..];
                            let a = &a[..(count - 1) * slice.stride + slice.steps];
                            let (start, stride, len) = (a.as_ptr(), slice.stride, slice.steps);
                            let a = Rows { start, stride, runs: &[0], len, tiled: U::TILED };
                            let scales = &x.scales[slice.index * x.rows + row..][..count];
                            for panel in 0..self.panels {
                                let b = &packed[(panel * all + slice.start - first) * width..];
                                let b = &b[..slice.steps * width];
                                let at = (panel * self.rows + block) * width;
                                let c = &mut sums[at..at + count * width];
                                // SAFETY: A has `count` rows of `steps` values and scales, B `steps` rows and C
                                // `count` rows of `width`.
                                unsafe {
                                    unit.product(
                                        count,
                                        a,
                                        scales.as_ptr(),
                                        b.as_ptr(),
                                        factors[panel * U::PACKED_SLICES + i],
                                        c.as_mut_ptr(),
                                        width,
                                        slice.index > 0,
                                    );
                                };
                            }
                        }
                    }
                }
                let simd = unit.simd();
                simd.vectorize(
                    #[inline(always)]
                    || self.finish(simd, sums, w, epilogue, out),
                );
            },
        );
    }

    #[inline(always)]
    fn finish<S: Simd>(
        &self,
        simd: S,
        sums: &mut [f32],
        w: Weights<'_>,
        epilogue: Epilogue<'_>,
        out: Shared<'_>,
    ) {
        let (width, step, outputs) = (kernel::columns::<S>(), w.panel_outputs::<S>(), w.outputs());
        for panel in 0..self.panels {
            let column = (self.first_panel + panel) * step;
            let count = step.min(outputs - column);
            for row in 0..self.rows {
                let sums = &mut sums[(panel * self.rows + row) * width..][..width];
                let at = (self.first_row + row) * outputs + column;
                // SAFETY: these rows and columns are this task's alone.
                let output = unsafe { out.get(at..at + count) };
                match w {
                    Weights::Plain(_) => epilogue.apply(simd, sums, output, column, at),
                    Weights::Gated(_) => {
                        let (gate, up) = sums.split_at(S::LANES);
                        simd::map(
                            simd,
                            [gate, up],
                            output,
                            #[inline(always)]
                            |[gate, up]| simd.mul(simd.silu(gate), up),
                        );
                    }
                }
            }
        }
    }
}

/// The product of very few rows: each weight is used once or thrice, so packing would cost more than it saves.
fn few_rows<S: Simd>(
    simd: S,
    x: &[f32],
    rows: usize,
    w: Weights<'_>,
    epilogue: Epilogue<'_>,
    out: &mut [f32],
) {
    const COLUMNS: usize = 64;
    let (inputs, outputs) = (w.inputs(), w.outputs());
    let shared = Shared::new(out);
    (0..outputs.div_ceil(COLUMNS)).into_par_iter().for_each(|group| {
        let column = group * COLUMNS;
        let count = COLUMNS.min(outputs - column);
        simd.vectorize(
            #[inline(always)]
            || {
                let mut sums = [[0.0; COLUMNS]; FEW_ROWS];
                for j in 0..count {
                    for (row, sums) in sums[..rows].iter_mut().enumerate() {
                        let x = &x[row * inputs..(row + 1) * inputs];
                        sums[j] = match w {
                            Weights::Plain(w) => w.dot(simd, column + j, x),
                            Weights::Gated(w) => {
                                let gate = simd.splat(w.gate.dot(simd, column + j, x));
                                simd.lanes(simd.silu(gate))[0] * w.up.dot(simd, column + j, x)
                            }
                        };
                    }
                }
                for (row, sums) in sums[..rows].iter().enumerate() {
                    let at = row * outputs + column;
                    // SAFETY: these columns are this task's alone.
                    epilogue.apply(simd, sums, unsafe { shared.get(at..at + count) }, column, at);
                }
            },
        );
    });
}
