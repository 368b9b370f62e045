// SPDX-License-Identifier: Apache-2.0
//! A device that runs two devices side by side and stops at the first operation on which they differ: how a port, or a
//! kernel, is debugged on a whole model.
//!
//! Each device goes on with its own results, as it would alone; what is compared is every result, downloaded, by relative
//! L2 error against the first device, the reference. What the caller downloads is the reference's.

use std::ops::Range;

use super::{ConvGeometry, Device, HeadLayout, Mask, MemoryReport, Precision, RawGroupNorm, RawQkvPart};
use crate::{
    error::{Error, Result},
    rope::RotaryTable,
    weight::Weight,
};

/// See the module.
pub struct Compare<A, B> {
    reference: A,
    tested: B,
    bound: f64,
}

impl<A: Device, B: Device> Compare<A, B> {
    /// Compares `tested` with `reference`; a relative L2 error above `bound` is an error.
    pub const fn new(reference: A, tested: B, bound: f64) -> Self {
        Self { reference, tested, bound }
    }

    fn check(&self, operation: &'static str, wanted: &[f32], got: &[f32]) -> Result<()> {
        let refuse = |what| Err(Error::Device { device: self.tested.name(), operation, what });
        let reference = self.reference.name();
        if wanted.len() != got.len() {
            return refuse(format!("{} values where {reference} has {}", got.len(), wanted.len()));
        }
        let error = relative_error(wanted, got);
        // Not `error > bound`: NaN must fail too.
        if error <= self.bound {
            return Ok(());
        }
        let bound = self.bound;
        let (at, (wanted, got)) = worst(wanted, got);
        refuse(format!(
            "relative L2 error {error:.2e} to {reference} passes {bound:.0e}; worst at value {at}: {got:e}, not {wanted:e}"
        ))
    }

    fn tensors(
        &self,
        operation: &'static str,
        a: Result<A::Tensor>,
        b: Result<B::Tensor>,
    ) -> Result<Pair<A, B>> {
        let (a, b) = (a?, b?);
        self.check(operation, &self.reference.download(&a)?, &self.tested.download(&b)?)?;
        Ok((a, b))
    }

    fn rows(&self, operation: &'static str, a: A::Row, b: B::Row) -> Result<(A::Row, B::Row)> {
        self.check(operation, &self.reference.download_row(&a)?, &self.tested.download_row(&b)?)?;
        Ok((a, b))
    }
}

type Pair<A, B> = (<A as Device>::Tensor, <B as Device>::Tensor);

/// `|got - wanted| / |wanted|`; 0 if they are equal, infinite if only `wanted` is zero.
fn relative_error(wanted: &[f32], got: &[f32]) -> f64 {
    let pairs = || wanted.iter().zip(got).map(|(w, g)| (f64::from(*w), f64::from(*g)));
    let difference: f64 = pairs().map(|(w, g)| (g - w).powi(2)).sum();
    let size: f64 = pairs().map(|(w, _)| w * w).sum();
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

/// Index and values of the largest difference; NaN is larger than any.
fn worst(wanted: &[f32], got: &[f32]) -> (usize, (f32, f32)) {
    let pairs = wanted.iter().copied().zip(got.iter().copied());
    let distance = |(w, g): (f32, f32)| if (g - w).is_nan() { f32::INFINITY } else { (g - w).abs() };
    pairs.enumerate().max_by(|a, b| distance(a.1).total_cmp(&distance(b.1))).unwrap_or_default()
}

/// The halves of a slice of pairs.
fn parts_of<'a, 'p, A: Device, B: Device>(
    parts: &'a [RawQkvPart<'p, Compare<A, B>>],
) -> (Vec<RawQkvPart<'a, A>>, Vec<RawQkvPart<'a, B>>) {
    let a = |part: &'a RawQkvPart<'p, Compare<A, B>>| RawQkvPart {
        qkv: &part.qkv.0,
        query_norm: part.query_norm.map(|row| &row.0),
        key_norm: part.key_norm.map(|row| &row.0),
    };
    let b = |part: &'a RawQkvPart<'p, Compare<A, B>>| RawQkvPart {
        qkv: &part.qkv.1,
        query_norm: part.query_norm.map(|row| &row.1),
        key_norm: part.key_norm.map(|row| &row.1),
    };
    (parts.iter().map(a).collect(), parts.iter().map(b).collect())
}

fn norms_of<'a, A: Device, B: Device>(
    norm: &RawGroupNorm<'a, Compare<A, B>>,
) -> (RawGroupNorm<'a, A>, RawGroupNorm<'a, B>) {
    let RawGroupNorm { groups, weight, bias, epsilon } = *norm;
    (
        RawGroupNorm { groups, weight: &weight.0, bias: &bias.0, epsilon },
        RawGroupNorm { groups, weight: &weight.1, bias: &bias.1, epsilon },
    )
}

impl<A: Device, B: Device> Device for Compare<A, B> {
    type Tensor = (A::Tensor, B::Tensor);
    type Row = (A::Row, B::Row);
    type Matrix = (A::Matrix, B::Matrix);
    type GatedMatrix = (A::GatedMatrix, B::GatedMatrix);
    type Conv = (A::Conv, B::Conv);
    type Qkv = (A::Qkv, B::Qkv);
    type Rotary = (A::Rotary, B::Rotary);

    fn name(&self) -> String {
        format!("{} compared with {}", self.tested.name(), self.reference.name())
    }
    /// That of the tested device.
    fn precision(&self) -> Precision {
        self.tested.precision()
    }
    /// That of both.
    fn memory(&self) -> MemoryReport {
        let (a, b) = (self.reference.memory(), self.tested.memory());
        MemoryReport { weights: a.weights + b.weights, mapped: a.mapped + b.mapped }
    }
    fn synchronize(&self) -> Result<()> {
        self.reference.synchronize()?;
        self.tested.synchronize()
    }

    fn upload_rows(&self, values: &[f32], rows: usize, columns: usize) -> Result<Self::Tensor> {
        let a = self.reference.upload_rows(values, rows, columns);
        self.tensors("upload_rows", a, self.tested.upload_rows(values, rows, columns))
    }
    fn upload_image(
        &self,
        values: &[f32],
        height: usize,
        width: usize,
        channels: usize,
    ) -> Result<Self::Tensor> {
        let a = self.reference.upload_image(values, height, width, channels);
        self.tensors("upload_image", a, self.tested.upload_image(values, height, width, channels))
    }
    fn download(&self, x: &Self::Tensor) -> Result<Vec<f32>> {
        self.reference.download(&x.0)
    }
    fn upload_row(&self, values: &[f32]) -> Result<Self::Row> {
        self.rows("upload_row", self.reference.upload_row(values)?, self.tested.upload_row(values)?)
    }
    fn download_row(&self, row: &Self::Row) -> Result<Vec<f32>> {
        self.reference.download_row(&row.0)
    }
    fn download_qkv(&self, qkv: &Self::Qkv) -> Result<[Vec<f32>; 3]> {
        self.reference.download_qkv(&qkv.0)
    }
    fn matrix(&self, parts: &[Weight]) -> Result<Self::Matrix> {
        Ok((self.reference.matrix(parts)?, self.tested.matrix(parts)?))
    }
    fn gated_matrix(&self, gate: &Weight, up: &Weight) -> Result<Self::GatedMatrix> {
        Ok((self.reference.gated_matrix(gate, up)?, self.tested.gated_matrix(gate, up)?))
    }
    fn conv(&self, weight: &Weight, bias: &Weight) -> Result<Self::Conv> {
        Ok((self.reference.conv(weight, bias)?, self.tested.conv(weight, bias)?))
    }
    fn rotary(&self, table: &RotaryTable) -> Result<Self::Rotary> {
        Ok((self.reference.rotary(table)?, self.tested.rotary(table)?))
    }

    fn linear(&self, x: &Self::Tensor, w: &Self::Matrix, bias: Option<&Self::Row>) -> Result<Self::Tensor> {
        let a = self.reference.linear(&x.0, &w.0, bias.map(|row| &row.0));
        self.tensors("linear", a, self.tested.linear(&x.1, &w.1, bias.map(|row| &row.1)))
    }
    fn linear_swiglu(&self, x: &Self::Tensor, w: &Self::GatedMatrix) -> Result<Self::Tensor> {
        let a = self.reference.linear_swiglu(&x.0, &w.0);
        self.tensors("linear_swiglu", a, self.tested.linear_swiglu(&x.1, &w.1))
    }
    fn linear_add(
        &self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Row>,
        gate: Option<&Self::Row>,
        residual: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        let (bias_a, gate_a) = (bias.map(|row| &row.0), gate.map(|row| &row.0));
        let (bias_b, gate_b) = (bias.map(|row| &row.1), gate.map(|row| &row.1));
        let a = self.reference.linear_add(&x.0, &w.0, bias_a, gate_a, &residual.0);
        self.tensors("linear_add", a, self.tested.linear_add(&x.1, &w.1, bias_b, gate_b, &residual.1))
    }
    fn silu(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
        self.tensors("silu", self.reference.silu(&x.0), self.tested.silu(&x.1))
    }
    fn layer_norm(
        &self,
        x: &Self::Tensor,
        weight: &Self::Row,
        bias: &Self::Row,
        epsilon: f32,
    ) -> Result<Self::Tensor> {
        let a = self.reference.layer_norm(&x.0, &weight.0, &bias.0, epsilon);
        self.tensors("layer_norm", a, self.tested.layer_norm(&x.1, &weight.1, &bias.1, epsilon))
    }
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Row, epsilon: f32) -> Result<Self::Tensor> {
        let a = self.reference.rms_norm(&x.0, &weight.0, epsilon);
        self.tensors("rms_norm", a, self.tested.rms_norm(&x.1, &weight.1, epsilon))
    }
    fn add(&self, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor> {
        self.tensors("add", self.reference.add(&a.0, &b.0), self.tested.add(&a.1, &b.1))
    }
    fn gated_add(&self, x: &Self::Tensor, gate: &Self::Row, y: &Self::Tensor) -> Result<Self::Tensor> {
        let a = self.reference.gated_add(&x.0, &gate.0, &y.0);
        self.tensors("gated_add", a, self.tested.gated_add(&x.1, &gate.1, &y.1))
    }
    fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor> {
        let (a, b): (Vec<_>, Vec<_>) = parts.iter().map(|part| (&part.0, &part.1)).unzip();
        self.tensors("concat_rows", self.reference.concat_rows(&a), self.tested.concat_rows(&b))
    }
    fn slice_rows(&self, x: &Self::Tensor, range: Range<usize>) -> Result<Self::Tensor> {
        let a = self.reference.slice_rows(&x.0, range.clone());
        self.tensors("slice_rows", a, self.tested.slice_rows(&x.1, range))
    }
    fn split_row(&self, x: &Self::Tensor, parts: usize) -> Result<Vec<Self::Row>> {
        let a = self.reference.split_row(&x.0, parts)?;
        let b = self.tested.split_row(&x.1, parts)?;
        a.into_iter().zip(b).map(|(a, b)| self.rows("split_row", a, b)).collect()
    }
    fn one_plus(&self, row: &Self::Row) -> Result<Self::Row> {
        self.rows("one_plus", self.reference.one_plus(&row.0)?, self.tested.one_plus(&row.1)?)
    }

    fn qkv_heads(
        &self,
        parts: &[RawQkvPart<'_, Self>],
        layout: HeadLayout,
        epsilon: f32,
        rotary: Option<&Self::Rotary>,
    ) -> Result<Self::Qkv> {
        let (parts_a, parts_b) = parts_of(parts);
        let a = self.reference.qkv_heads(&parts_a, layout, epsilon, rotary.map(|table| &table.0))?;
        let b = self.tested.qkv_heads(&parts_b, layout, epsilon, rotary.map(|table| &table.1))?;
        let (wanted, got) = (self.reference.download_qkv(&a)?, self.tested.download_qkv(&b)?);
        for (wanted, got) in wanted.iter().zip(&got) {
            self.check("qkv_heads", wanted, got)?;
        }
        Ok((a, b))
    }
    fn attention(&self, qkv: &Self::Qkv, mask: &Mask, scale: f32) -> Result<Self::Tensor> {
        let a = self.reference.attention(&qkv.0, mask, scale);
        self.tensors("attention", a, self.tested.attention(&qkv.1, mask, scale))
    }

    fn conv2d(&self, x: &Self::Tensor, conv: &Self::Conv, geometry: ConvGeometry) -> Result<Self::Tensor> {
        let a = self.reference.conv2d(&x.0, &conv.0, geometry);
        self.tensors("conv2d", a, self.tested.conv2d(&x.1, &conv.1, geometry))
    }
    fn group_norm(
        &self,
        x: &Self::Tensor,
        norm: &RawGroupNorm<'_, Self>,
        silu: bool,
    ) -> Result<Self::Tensor> {
        let (norm_a, norm_b) = norms_of(norm);
        let a = self.reference.group_norm(&x.0, &norm_a, silu);
        self.tensors("group_norm", a, self.tested.group_norm(&x.1, &norm_b, silu))
    }
    fn upsample(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
        self.tensors("upsample", self.reference.upsample(&x.0), self.tested.upsample(&x.1))
    }
    fn norm_silu_conv(
        &self,
        x: &Self::Tensor,
        norm: &RawGroupNorm<'_, Self>,
        conv: &Self::Conv,
        geometry: ConvGeometry,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor> {
        let (norm_a, norm_b) = norms_of(norm);
        let a = self.reference.norm_silu_conv(&x.0, &norm_a, &conv.0, geometry, residual.map(|r| &r.0));
        let b = self.tested.norm_silu_conv(&x.1, &norm_b, &conv.1, geometry, residual.map(|r| &r.1));
        self.tensors("norm_silu_conv", a, b)
    }
    fn upsample_conv(
        &self,
        x: &Self::Tensor,
        conv: &Self::Conv,
        geometry: ConvGeometry,
    ) -> Result<Self::Tensor> {
        let a = self.reference.upsample_conv(&x.0, &conv.0, geometry);
        self.tensors("upsample_conv", a, self.tested.upsample_conv(&x.1, &conv.1, geometry))
    }
    fn image_to_rows(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
        self.tensors("image_to_rows", self.reference.image_to_rows(&x.0), self.tested.image_to_rows(&x.1))
    }
    fn rows_to_image(&self, x: &Self::Tensor, height: usize, width: usize) -> Result<Self::Tensor> {
        let a = self.reference.rows_to_image(&x.0, height, width);
        self.tensors("rows_to_image", a, self.tested.rows_to_image(&x.1, height, width))
    }
}
