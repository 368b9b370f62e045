// SPDX-License-Identifier: Apache-2.0
//! A device without numbers: runs a whole graph in milliseconds, so that its operations can be listed, counted and
//! compared. Shapes are kept and checked by [`super::Ops`]; what is downloaded is zeros.

use std::ops::Range;

use super::{ConvGeometry, Device, HeadLayout, Mask, MemoryReport, Precision, RawGroupNorm, RawQkvPart};
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

impl Device for RecordDevice {
    /// Number of values.
    type Tensor = usize;
    type Row = usize;
    type Matrix = ();
    type GatedMatrix = ();
    type Conv = ();
    type Qkv = ();
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
    fn upload_rows(&self, values: &[f32], _: usize, _: usize) -> Result<usize> {
        Ok(values.len())
    }
    fn upload_image(&self, values: &[f32], _: usize, _: usize, _: usize) -> Result<usize> {
        Ok(values.len())
    }
    fn download(&self, _: &usize) -> Result<Vec<f32>> {
        todo!()
    }
    fn upload_row(&self, values: &[f32]) -> Result<usize> {
        Ok(values.len())
    }
    fn download_row(&self, row: &usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; *row])
    }
    fn download_qkv(&self, (): &()) -> Result<[Vec<f32>; 3]> {
        todo!()
    }
    fn matrix(&self, _: &[Weight]) -> Result<()> {
        Ok(())
    }
    fn gated_matrix(&self, _: &Weight, _: &Weight) -> Result<()> {
        Ok(())
    }
    fn conv(&self, _: &Weight, _: &Weight) -> Result<()> {
        Ok(())
    }
    fn rotary(&self, _: &RotaryTable) -> Result<()> {
        Ok(())
    }
    fn linear(&self, _: &usize, (): &(), _: Option<&usize>) -> Result<usize> {
        todo!()
    }
    fn linear_swiglu(&self, _: &usize, (): &()) -> Result<usize> {
        todo!()
    }
    fn silu(&self, x: &usize) -> Result<usize> {
        Ok(*x)
    }
    fn layer_norm(&self, x: &usize, _: &usize, _: &usize, _: f32) -> Result<usize> {
        Ok(*x)
    }
    fn rms_norm(&self, x: &usize, _: &usize, _: f32) -> Result<usize> {
        Ok(*x)
    }
    fn add(&self, a: &usize, _: &usize) -> Result<usize> {
        Ok(*a)
    }
    fn gated_add(&self, x: &usize, _: &usize, _: &usize) -> Result<usize> {
        Ok(*x)
    }
    fn concat_rows(&self, parts: &[&usize]) -> Result<usize> {
        Ok(parts.iter().copied().sum())
    }
    fn slice_rows(&self, _: &usize, _: Range<usize>) -> Result<usize> {
        todo!()
    }
    fn split_row(&self, x: &usize, parts: usize) -> Result<Vec<usize>> {
        Ok(vec![x / parts; parts])
    }
    fn one_plus(&self, row: &usize) -> Result<usize> {
        Ok(*row)
    }
    fn qkv_heads(&self, _: &[RawQkvPart<'_, Self>], _: HeadLayout, _: f32, _: Option<&()>) -> Result<()> {
        Ok(())
    }
    fn attention(&self, (): &(), _: &Mask, _: f32) -> Result<usize> {
        todo!()
    }
    fn conv2d(&self, _: &usize, (): &(), _: ConvGeometry) -> Result<usize> {
        todo!()
    }
    fn group_norm(&self, x: &usize, _: &RawGroupNorm<'_, Self>, _: bool) -> Result<usize> {
        Ok(*x)
    }
    fn upsample(&self, x: &usize) -> Result<usize> {
        Ok(4 * x)
    }
    fn image_to_rows(&self, x: &usize) -> Result<usize> {
        Ok(*x)
    }
    fn rows_to_image(&self, x: &usize, _: usize, _: usize) -> Result<usize> {
        Ok(*x)
    }
}
