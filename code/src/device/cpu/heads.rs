// SPDX-License-Identifier: Apache-2.0
//! From fused QKV rows to heads: RMS norm by head, rotation, and the layout that attention reads.
//!
//! Queries go to `[head][row][dim]`, keys to panels `[head][panel][dim][panel's keys]` (transposed), values to panels
//! `[head][panel][row][panel's dims]`, all in the values of the unit that multiplies them. Keys and values are padded with
//! zeros to whole panels.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    buffer::{Buffer, CpuTensor, Shared, with_scratch},
    kernel,
    simd::{self, Simd},
    unit::Unit,
};
use crate::{device::HeadLayout, rope::RotaryTable};

/// Heads, packed for attention in the values of the unit that multiplies them.
pub struct CpuQkv {
    /// How the heads divide.
    pub layout: HeadLayout,
    /// Rows of the sequence.
    pub rows: usize,
    /// `[query_heads][rows][stride]`, and by row what products are to be multiplied by.
    query: Buffer,
    query_scales: Vec<f32>,
    /// The same by panel.
    key: Buffer,
    key_scales: Vec<f32>,
    /// The same by head.
    value: Buffer,
    value_scales: Vec<f32>,
}

/// Sizes of packed heads, in values of a unit.
struct Sizes {
    /// Rows padded to whole panels.
    rows: usize,
    /// Values of a head's row, padded.
    dim: usize,
    /// Values from one query to the next.
    stride: usize,
    /// Panels of a row of values.
    panels: usize,
}

impl Sizes {
    fn new<U: Unit>(rows: usize, dim: usize) -> Self {
        let width = kernel::columns::<U::S>();
        Self {
            rows: rows.next_multiple_of(width),
            dim: dim.next_multiple_of(U::STEP),
            stride: U::stride(dim),
            panels: dim.div_ceil(width),
        }
    }
}

impl CpuQkv {
    fn sizes<U: Unit>(&self) -> Sizes {
        Sizes::new::<U>(self.rows, self.layout.head_dim)
    }
    fn key_value_head(&self, query_head: usize) -> usize {
        query_head / (self.layout.query_heads / self.layout.key_value_heads)
    }
    /// Queries `rows` of a head, `Unit::stride` apart, and their scales.
    pub fn queries<U: Unit>(&self, head: usize, rows: Range<usize>) -> (&[U::Value], &[f32]) {
        let (stride, first) = (self.sizes::<U>().stride, head * self.rows);
        let rows = first + rows.start..first + rows.end;
        let values: &[U::Value] = bytemuck::cast_slice(&self.query);
        (&values[rows.start * stride..rows.end * stride], &self.query_scales[rows])
    }
    /// Keys of panel `panel` of the KV head of `query_head`, `[head_dim, padded][panel's keys]`, and their scale.
    pub fn key_panel<U: Unit>(&self, query_head: usize, panel: usize) -> (&[U::Value], f32) {
        let (sizes, width) = (self.sizes::<U>(), kernel::columns::<U::S>());
        let index = self.key_value_head(query_head) * (sizes.rows / width) + panel;
        let len = sizes.dim * width;
        let values: &[U::Value] = bytemuck::cast_slice(&self.key);
        (&values[index * len..(index + 1) * len], self.key_scales[index])
    }
    /// Panel `panel` of the values of `rows` of the KV head of `query_head`, `[rows][panel's columns]`, and their scale.
    pub fn value_panel<U: Unit>(
        &self,
        query_head: usize,
        panel: usize,
        rows: Range<usize>,
    ) -> (&[U::Value], f32) {
        let (sizes, width) = (self.sizes::<U>(), kernel::columns::<U::S>());
        let head = self.key_value_head(query_head);
        let start = ((head * sizes.panels + panel) * sizes.rows + rows.start) * width;
        let values: &[U::Value] = bytemuck::cast_slice(&self.value);
        (&values[start..start + rows.len() * width], self.value_scales[head])
    }
    /// Query, key and value as `[heads, rows, head_dim]`.
    pub fn download<U: Unit>(&self, unit: U) -> [Vec<f32>; 3] {
        let (dim, width) = (self.layout.head_dim, kernel::columns::<U::S>());
        let group = self.layout.query_heads / self.layout.key_value_heads.max(1);
        let (mut query, mut key, mut value) = (Vec::new(), Vec::new(), Vec::new());
        for head in 0..self.layout.query_heads {
            for row in 0..self.rows {
                let (values, scales) = self.queries::<U>(head, row..row + 1);
                query.extend(values[..dim].iter().map(|value| scales[0] * unit.decode(*value)));
            }
        }
        for head in 0..self.layout.key_value_heads {
            for row in 0..self.rows {
                let (panel, scale) = self.key_panel::<U>(head * group, row / width);
                key.extend((0..dim).map(|d| scale * unit.unpack(panel, d, row % width)));
                value.extend((0..dim).map(|d| {
                    let first = row / U::STEP * U::STEP;
                    let (panel, scale) =
                        self.value_panel::<U>(head * group, d / width, first..first + U::STEP);
                    scale * unit.unpack(panel, row - first, d % width)
                }));
            }
        }
        [query, key, value]
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
pub fn qkv_heads<U: Unit>(
    unit: U,
    parts: &[Part<'_>],
    layout: HeadLayout,
    epsilon: f32,
    rotary: Option<&RotaryTable>,
) -> CpuQkv {
    let (simd, width, dim) = (unit.simd(), kernel::columns::<U::S>(), layout.head_dim);
    let rows = parts.iter().map(|part| part.qkv.rows()).sum::<usize>();
    let sizes = Sizes::new::<U>(rows, dim);
    let room = |values: usize| Buffer::dirty((values * size_of::<U::Value>()).div_ceil(size_of::<f32>()));
    let (heads, groups) = (layout.key_value_heads, sizes.rows / width);
    let mut query = room(layout.query_heads * rows * sizes.stride);
    let mut query_scales = vec![1.0; layout.query_heads * rows];
    let mut key = room(heads * sizes.rows * sizes.dim);
    let mut key_scales = vec![1.0; heads * groups];
    let mut value = room(heads * sizes.rows * sizes.panels * width);
    let value_factors = value_factors(unit, parts, layout);
    {
        let queries = Shared::<U::Value>::new(bytemuck::cast_slice_mut(&mut query));
        let keys = Shared::<U::Value>::new(bytemuck::cast_slice_mut(&mut key));
        let values = Shared::<U::Value>::new(bytemuck::cast_slice_mut(&mut value));
        let (query_scales, key_scales) = (Shared::new(&mut query_scales), Shared::new(&mut key_scales));
        (0..groups).into_par_iter().for_each(|group| {
            let first = group * width;
            let count = width.min(rows - first);
            let rows_of_group: Vec<_> = (first..first + count).map(|row| locate(parts, row)).collect();
            with_scratch([dim, width * sizes.dim, width * width], |[normal, keys_of_group, square]| {
                let normal = &mut normal[..dim];
                for head in 0..layout.query_heads {
                    for (i, &(part, row)) in rows_of_group.iter().enumerate() {
                        let (from, at) = (&row[head * dim..(head + 1) * dim], head * rows + first + i);
                        let turn = angles(rotary, first + i);
                        normalise_and_rotate(simd, from, part.query_norm, epsilon, turn, normal);
                        // SAFETY: this row of this head is this task's alone.
                        unsafe {
                            let to = queries.get(at * sizes.stride..(at + 1) * sizes.stride);
                            query_scales.get(at..at + 1)[0] = unit.encode(normal, to);
                        }
                    }
                }
                for (head, &(value_factor, _)) in value_factors.iter().enumerate() {
                    let key_column = (layout.query_heads + head) * dim;
                    let value_column = key_column + heads * dim;
                    let panel = &mut keys_of_group[..width * sizes.dim];
                    panel.fill(0.0);
                    for (i, &(part, row)) in rows_of_group.iter().enumerate() {
                        let (from, turn) = (&row[key_column..key_column + dim], angles(rotary, first + i));
                        normalise_and_rotate(simd, from, part.key_norm, epsilon, turn, normal);
                        for (d, value) in normal.iter().enumerate() {
                            panel[d * width + i] = *value;
                        }
                    }
                    let largest = if U::SCALED { simd::largest_abs(simd, panel) } else { 1.0 };
                    let (factor, inverse) = unit.scale(largest);
                    let index = head * groups + group;
                    // SAFETY: this panel of this head is this task's alone.
                    unsafe {
                        let to = keys.get(index * panel.len()..(index + 1) * panel.len());
                        unit.pack_values(panel, factor, to);
                        key_scales.get(index..index + 1)[0] = inverse;
                    }
                    for panel in 0..sizes.panels {
                        let columns = panel * width..dim.min((panel + 1) * width);
                        let square = &mut square[..width * width];
                        square.fill(0.0);
                        for (to, (_, row)) in square.chunks_exact_mut(width).zip(&rows_of_group) {
                            let from = &row[value_column + columns.start..value_column + columns.end];
                            to[..from.len()].copy_from_slice(from);
                        }
                        let start = ((head * sizes.panels + panel) * sizes.rows + first) * width;
                        // SAFETY: these rows of this panel are this task's alone.
                        let to = unsafe { values.get(start..start + width * width) };
                        unit.pack_values(square, value_factor, to);
                    }
                }
            });
        });
    }
    let value_scales = value_factors.into_iter().map(|(_, inverse)| inverse).collect();
    CpuQkv { layout, rows, query, query_scales, key, key_scales, value, value_scales }
}

/// What the values of each head are multiplied by, and products with them: the same for all rows, over which a product
/// sums.
fn value_factors<U: Unit>(unit: U, parts: &[Part<'_>], layout: HeadLayout) -> Vec<(f32, f32)> {
    let first = (layout.query_heads + layout.key_value_heads) * layout.head_dim;
    let largest = |head: usize| {
        let columns = first + head * layout.head_dim..first + (head + 1) * layout.head_dim;
        parts
            .iter()
            .flat_map(|part| part.qkv.values().chunks_exact(part.qkv.columns()))
            .map(|row| simd::largest_abs(unit.simd(), &row[columns.clone()]))
            .fold(0.0, f32::max)
    };
    let heads = 0..layout.key_value_heads;
    heads.into_par_iter().map(|head| unit.scale(if U::SCALED { largest(head) } else { 1.0 })).collect()
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
    simd.vectorize(
        #[inline(always)]
        || {
            match weight {
                Some(weight) => super::norm::rms_row(simd, from, weight, epsilon, to),
                None => to.copy_from_slice(from),
            }
            if let Some((cos, sin)) = angles {
                for ((pair, cos), sin) in to.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    let [x, y] = *pair;
                    *pair = [x * cos - y * sin, y * cos + x * sin];
                }
            }
        },
    );
}
