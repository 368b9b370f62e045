// SPDX-License-Identifier: Apache-2.0
//! From fused QKV rows to heads: RMS norm by head, rotation, and the layout that attention reads.
//!
//! One pass over memory: queries go to `[head][row][dim]`, keys to panels `[head][panel][dim][panel's keys]` (transposed),
//! values to panels `[head][panel][row][panel's dims]`. Keys and values are padded with zeros to whole panels.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    buffer::{Buffer, CpuTensor, Shared, with_scratch},
    kernel,
    simd::{self, Simd},
};
use crate::{device::HeadLayout, rope::RotaryTable};

/// Heads, packed for attention.
pub struct CpuQkv {
    /// How the heads divide.
    pub layout: HeadLayout,
    /// Rows of the sequence.
    pub rows: usize,
    /// `[query_heads][rows][head_dim]`.
    pub query: Buffer,
    key: Buffer,
    value: Buffer,
    /// Columns of a panel.
    width: usize,
}

impl CpuQkv {
    fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(self.width)
    }
    fn key_value_head(&self, query_head: usize) -> usize {
        query_head / (self.layout.query_heads / self.layout.key_value_heads)
    }
    /// Keys `width * panel..` of the KV head of `query_head`: `[head_dim][width]`.
    pub fn key_panel(&self, query_head: usize, panel: usize, width: usize) -> &[f32] {
        debug_assert_eq!(width, self.width);
        let head = self.key_value_head(query_head);
        let start = (head * self.padded_rows() + panel * width) * self.layout.head_dim;
        &self.key[start..start + width * self.layout.head_dim]
    }
    /// Columns `width * panel..` of the values of `rows` of the KV head of `query_head`: `[rows][width]`.
    pub fn value_panel(&self, query_head: usize, panel: usize, rows: Range<usize>, width: usize) -> &[f32] {
        debug_assert_eq!(width, self.width);
        let panels = self.layout.head_dim.div_ceil(width);
        let head = self.key_value_head(query_head);
        let start = ((head * panels + panel) * self.padded_rows() + rows.start) * width;
        &self.value[start..start + rows.len() * width]
    }
    /// Query, key and value as `[heads, rows, head_dim]`.
    pub fn download(&self) -> [Vec<f32>; 3] {
        let (dim, group) =
            (self.layout.head_dim, self.layout.query_heads / self.layout.key_value_heads.max(1));
        let mut key = Vec::new();
        let mut value = Vec::new();
        for head in 0..self.layout.key_value_heads {
            for row in 0..self.rows {
                let panel = self.key_panel(head * group, row / self.width, self.width);
                key.extend((0..dim).map(|d| panel[d * self.width + row % self.width]));
                value.extend((0..dim).map(|d| {
                    self.value_panel(head * group, d / self.width, row..row + 1, self.width)[d % self.width]
                }));
            }
        }
        [self.query.to_vec(), key, value]
    }
}

/// One stream and the weights of its norms.
pub struct Part<'a> {
    /// `[rows, layout.columns()]`.
    pub qkv: &'a CpuTensor,
    /// `[head_dim]`.
    pub query_norm: Option<&'a [f32]>,
    /// `[head_dim]`.
    pub key_norm: Option<&'a [f32]>,
}

/// See [`crate::device::Device::qkv_heads`].
pub fn qkv_heads<S: Simd>(
    simd: S,
    parts: &[Part<'_>],
    layout: HeadLayout,
    epsilon: f32,
    rotary: Option<&RotaryTable>,
) -> CpuQkv {
    let (width, dim) = (kernel::columns::<S>(), layout.head_dim);
    let rows = parts.iter().map(|part| part.qkv.rows()).sum::<usize>();
    let (padded_rows, panels) = (rows.next_multiple_of(width), dim.div_ceil(width));
    let mut query = Buffer::zeros(layout.query_heads * rows * dim);
    let mut key = Buffer::zeros(layout.key_value_heads * padded_rows * dim);
    let mut value = Buffer::zeros(layout.key_value_heads * padded_rows * panels * width);
    let (queries, keys, values) = (Shared::new(&mut query), Shared::new(&mut key), Shared::new(&mut value));
    (0..rows.div_ceil(width)).into_par_iter().for_each(|group| {
        let first = group * width;
        let count = width.min(rows - first);
        let rows_of_group: Vec<_> = (first..first + count).map(|row| locate(parts, row)).collect();
        for head in 0..layout.query_heads {
            let start = (head * rows + first) * dim;
            // SAFETY: these rows of this head are this task's alone.
            let to = unsafe { queries.get(start..start + count * dim) };
            for (i, &(part, row)) in rows_of_group.iter().enumerate() {
                let from = &row[head * dim..(head + 1) * dim];
                let to = &mut to[i * dim..(i + 1) * dim];
                simd.vectorize(
                    #[inline(always)]
                    || {
                        normalise_and_rotate(
                            simd,
                            from,
                            part.query_norm,
                            epsilon,
                            angles(rotary, first + i),
                            to,
                        );
                    },
                );
            }
        }
        for head in 0..layout.key_value_heads {
            let key_column = (layout.query_heads + head) * dim;
            let value_column = key_column + layout.key_value_heads * dim;
            let start = (head * padded_rows + first) * dim;
            // SAFETY: this panel is this task's alone.
            let panel = unsafe { keys.get(start..start + width * dim) };
            with_scratch(
                [dim],
                #[inline(always)]
                |[normal]| {
                    for (i, &(part, row)) in rows_of_group.iter().enumerate() {
                        let normal = &mut normal[..dim];
                        let from = &row[key_column..key_column + dim];
                        simd.vectorize(
                            #[inline(always)]
                            || {
                                normalise_and_rotate(
                                    simd,
                                    from,
                                    part.key_norm,
                                    epsilon,
                                    angles(rotary, first + i),
                                    normal,
                                );
                            },
                        );
                        for (d, value) in normal.iter().enumerate() {
                            panel[d * width + i] = *value;
                        }
                    }
                },
            );
            for panel in 0..panels {
                let columns = panel * width..dim.min((panel + 1) * width);
                let start = ((head * panels + panel) * padded_rows + first) * width;
                // SAFETY: these rows of this panel are this task's alone.
                let to = unsafe { values.get(start..start + count * width) };
                for (to, (_, row)) in to.chunks_exact_mut(width).zip(&rows_of_group) {
                    let from = &row[value_column + columns.start..value_column + columns.end];
                    to[..from.len()].copy_from_slice(from);
                }
            }
        }
    });
    CpuQkv { layout, rows, query, key, value, width }
}

/// Row `row` of the concatenation.
fn locate<'p, 'a>(parts: &'p [Part<'a>], mut row: usize) -> (&'p Part<'a>, &'a [f32]) {
    for part in parts {
        if row < part.qkv.rows() {
            let columns = part.qkv.columns();
            return (part, &part.qkv.values()[row * columns..(row + 1) * columns]);
        }
        row -= part.qkv.rows();
    }
    unreachable!("rows are counted from the parts")
}

/// Cosines and sines of a row.
fn angles(rotary: Option<&RotaryTable>, row: usize) -> Option<(&[f32], &[f32])> {
    rotary.map(|table| {
        let range = row * table.pairs()..(row + 1) * table.pairs();
        (&table.cos[range.clone()], &table.sin[range])
    })
}

#[inline(always)]
fn normalise_and_rotate<S: Simd>(
    simd: S,
    from: &[f32],
    weight: Option<&[f32]>,
    epsilon: f32,
    angles: Option<(&[f32], &[f32])>,
    to: &mut [f32],
) {
    match weight {
        Some(weight) => super::norm::rms_row(simd, from, weight, epsilon, to),
        None => simd::map(
            simd,
            [from],
            to,
            #[inline(always)]
            |[x]| x,
        ),
    }
    if let Some((cos, sin)) = angles {
        for ((pair, cos), sin) in to.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
            let [x, y] = *pair;
            *pair = [x * cos - y * sin, y * cos + x * sin];
        }
    }
}
