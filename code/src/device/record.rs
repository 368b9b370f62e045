// SPDX-License-Identifier: Apache-2.0
//! A device without numbers: runs a whole graph in milliseconds, so that its operations can be listed, counted and
//! compared. It keeps shapes only and never reads a weight; what is downloaded is zeros.

use std::ops::Range;

use super::{
    ConvGeometry, Device, HeadLayout, Mask, MemoryReport, Precision, RawGroupNorm, RawQkvPart, Shape,
};
use crate::{error::Result, rope::RotaryTable, weight::Weight};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct RecordDevice {
    precision: Precision,
}

impl RecordDevice {
    /// A device that claims to compute in `precision`.
    pub const fn new(precision: Precision) -> Self {
        Self { precision }
    }
}

/// Output channels and side of a convolution kernel.
#[derive(Clone, Copy, Debug)]
pub struct RecordedConv {
    outputs: usize,
    size: usize,
}

/// Rows and division of heads.
#[derive(Clone, Copy, Debug)]
pub struct RecordedQkv {
    rows: usize,
    layout: HeadLayout,
}

/// Rows, or pixels, and columns, or channels.
const fn rows_and_columns(x: Shape) -> (usize, usize) {
    match x {
        Shape::Rows(rows, columns) => (rows, columns),
        Shape::Image(height, width, channels) => (height * width, channels),
    }
}

fn convolved(height: usize, width: usize, conv: RecordedConv, geometry: ConvGeometry) -> Shape {
    let [height, width] = geometry.output(height, width, conv.size);
    Shape::Image(height, width, conv.outputs)
}

const fn image(x: Shape) -> [usize; 3] {
    match x {
        Shape::Rows(rows, columns) => [rows, 1, columns],
        Shape::Image(height, width, channels) => [height, width, channels],
    }
}

impl Device for RecordDevice {
    type Tensor = Shape;
    /// Length.
    type Row = usize;
    /// Outputs.
    type Matrix = usize;
    /// Outputs.
    type GatedMatrix = usize;
    type Conv = RecordedConv;
    type Qkv = RecordedQkv;
    type Rotary = ();

    fn name(&self) -> String {
        "record".into()
    }
    fn precision(&self) -> Precision {
        self.precision
    }
    fn memory(&self) -> MemoryReport {
        MemoryReport::default()
    }
    fn upload_rows(&self, _: &[f32], rows: usize, columns: usize) -> Result<Shape> {
        Ok(Shape::Rows(rows, columns))
    }
    fn upload_image(&self, _: &[f32], height: usize, width: usize, channels: usize) -> Result<Shape> {
        Ok(Shape::Image(height, width, channels))
    }
    fn download(&self, x: &Shape) -> Result<Vec<f32>> {
        Ok(vec![0.0; x.elements()])
    }
    fn upload_row(&self, values: &[f32]) -> Result<usize> {
        Ok(values.len())
    }
    fn download_row(&self, row: &usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; *row])
    }
    fn download_qkv(&self, qkv: &RecordedQkv) -> Result<[Vec<f32>; 3]> {
        let HeadLayout { query_heads, key_value_heads, head_dim } = qkv.layout;
        Ok([query_heads, key_value_heads, key_value_heads]
            .map(|heads| vec![0.0; heads * qkv.rows * head_dim]))
    }
    fn matrix(&self, parts: &[Weight]) -> Result<usize> {
        Ok(parts.iter().map(Weight::rows).sum())
    }
    fn gated_matrix(&self, gate: &Weight, _: &Weight) -> Result<usize> {
        Ok(gate.rows())
    }
    fn conv(&self, weight: &Weight, _: &Weight) -> Result<RecordedConv> {
        Ok(RecordedConv { outputs: weight.rows(), size: weight.shape().last().copied().unwrap_or(1) })
    }
    fn rotary(&self, _: &RotaryTable) -> Result<()> {
        Ok(())
    }
    fn linear(&self, x: &Shape, outputs: &usize, _: Option<&usize>) -> Result<Shape> {
        Ok(Shape::Rows(rows_and_columns(*x).0, *outputs))
    }
    fn linear_swiglu(&self, x: &Shape, outputs: &usize) -> Result<Shape> {
        Ok(Shape::Rows(rows_and_columns(*x).0, *outputs))
    }
    fn linear_add(
        &self,
        _: &Shape,
        _: &usize,
        _: Option<&usize>,
        _: Option<&usize>,
        residual: &Shape,
    ) -> Result<Shape> {
        Ok(*residual)
    }
    fn silu(&self, x: &Shape) -> Result<Shape> {
        Ok(*x)
    }
    fn layer_norm(&self, x: &Shape, _: &usize, _: &usize, _: f32) -> Result<Shape> {
        Ok(*x)
    }
    fn rms_norm(&self, x: &Shape, _: &usize, _: f32) -> Result<Shape> {
        Ok(*x)
    }
    fn add(&self, a: &Shape, _: &Shape) -> Result<Shape> {
        Ok(*a)
    }
    fn gated_add(&self, x: &Shape, _: &usize, _: &Shape) -> Result<Shape> {
        Ok(*x)
    }
    fn concat_rows(&self, parts: &[&Shape]) -> Result<Shape> {
        let columns = parts.first().map_or(0, |part| rows_and_columns(**part).1);
        Ok(Shape::Rows(parts.iter().map(|part| rows_and_columns(**part).0).sum(), columns))
    }
    fn slice_rows(&self, x: &Shape, range: Range<usize>) -> Result<Shape> {
        Ok(Shape::Rows(range.len(), rows_and_columns(*x).1))
    }
    fn split_row(&self, x: &Shape, parts: usize) -> Result<Vec<usize>> {
        Ok(vec![x.elements() / parts; parts])
    }
    fn one_plus(&self, row: &usize) -> Result<usize> {
        Ok(*row)
    }
    fn qkv_heads(
        &self,
        parts: &[RawQkvPart<'_, Self>],
        layout: HeadLayout,
        _: f32,
        _: Option<&()>,
    ) -> Result<RecordedQkv> {
        Ok(RecordedQkv { rows: parts.iter().map(|part| rows_and_columns(*part.qkv).0).sum(), layout })
    }
    fn attention(&self, qkv: &RecordedQkv, _: &Mask, _: f32) -> Result<Shape> {
        Ok(Shape::Rows(qkv.rows, qkv.layout.query_columns()))
    }
    fn conv2d(&self, x: &Shape, conv: &RecordedConv, geometry: ConvGeometry) -> Result<Shape> {
        let [height, width, _] = image(*x);
        Ok(convolved(height, width, *conv, geometry))
    }
    fn group_norm(&self, x: &Shape, _: &RawGroupNorm<'_, Self>, _: bool) -> Result<Shape> {
        Ok(*x)
    }
    fn upsample(&self, x: &Shape) -> Result<Shape> {
        let [height, width, channels] = image(*x);
        Ok(Shape::Image(2 * height, 2 * width, channels))
    }
    fn image_to_rows(&self, x: &Shape) -> Result<Shape> {
        let (rows, columns) = rows_and_columns(*x);
        Ok(Shape::Rows(rows, columns))
    }
    fn rows_to_image(&self, x: &Shape, height: usize, width: usize) -> Result<Shape> {
        Ok(Shape::Image(height, width, rows_and_columns(*x).1))
    }
}
