// SPDX-License-Identifier: Apache-2.0
//! A device that is wrong in one operation, and the comparison that must find it.

use std::ops::Range;

use flux2::{
    Error, Result,
    device::{
        ConvGeometry, Device, HeadLayout, Mask, MemoryReport, Ops, Precision, RawGroupNorm, RawQkvPart,
        Shape,
        compare::Compare,
        cpu::{CpuDevice, Isa},
    },
    rope::RotaryTable,
    weight::Weight,
};

use crate::{cases::device, whole::graph};

type Cpu = CpuDevice;

/// The CPU, but the first value of what `operation` computes is off by a hundredth of the sum.
struct Wrong {
    cpu: Cpu,
    operation: &'static str,
}

impl Wrong {
    fn rows(&self, operation: &str, x: <Cpu as Device>::Tensor) -> Result<<Cpu as Device>::Tensor> {
        if operation != self.operation {
            return Ok(x);
        }
        let mut values = self.cpu.download(&x)?;
        values[0] += 0.01 * values.iter().map(|v| v.abs()).sum::<f32>();
        match x.shape() {
            Shape::Rows(rows, columns) => self.cpu.upload_rows(&values, rows, columns),
            Shape::Image(height, width, channels) => self.cpu.upload_image(&values, height, width, channels),
        }
    }
}

fn norm_of<'a>(norm: &RawGroupNorm<'a, Wrong>) -> RawGroupNorm<'a, Cpu> {
    RawGroupNorm { groups: norm.groups, weight: norm.weight, bias: norm.bias, epsilon: norm.epsilon }
}

/// Methods that only pass on, and those that spoil their result.
macro_rules! delegate {
    (pass: { $($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)* }
     spoil: { $($spoiled:ident($($sarg:ident: $stype:ty),*);)* }) => {
        $(fn $name(&self, $($arg: $type),*) -> $out { self.cpu.$name($($arg),*) })*
        $(fn $spoiled(&self, $($sarg: $stype),*) -> Result<Self::Tensor> {
            self.rows(stringify!($spoiled), self.cpu.$spoiled($($sarg),*)?)
        })*
    };
}

impl Device for Wrong {
    type Tensor = <Cpu as Device>::Tensor;
    type Row = <Cpu as Device>::Row;
    type Matrix = <Cpu as Device>::Matrix;
    type GatedMatrix = <Cpu as Device>::GatedMatrix;
    type Conv = <Cpu as Device>::Conv;
    type Qkv = <Cpu as Device>::Qkv;
    type Rotary = <Cpu as Device>::Rotary;

    fn name(&self) -> String {
        "wrong".into()
    }
    delegate! {
        pass: {
        precision() -> Precision;
        memory() -> MemoryReport;
        upload_rows(values: &[f32], rows: usize, columns: usize) -> Result<Self::Tensor>;
        upload_image(values: &[f32], height: usize, width: usize, channels: usize) -> Result<Self::Tensor>;
        download(x: &Self::Tensor) -> Result<Vec<f32>>;
        upload_row(values: &[f32]) -> Result<Self::Row>;
        download_row(row: &Self::Row) -> Result<Vec<f32>>;
        download_qkv(qkv: &Self::Qkv) -> Result<[Vec<f32>; 3]>;
        matrix(parts: &[Weight]) -> Result<Self::Matrix>;
        gated_matrix(gate: &Weight, up: &Weight) -> Result<Self::GatedMatrix>;
        conv(weight: &Weight, bias: &Weight) -> Result<Self::Conv>;
        rotary(table: &RotaryTable) -> Result<Self::Rotary>;
        split_row(x: &Self::Tensor, parts: usize) -> Result<Vec<Self::Row>>;
        slice_rows(x: &Self::Tensor, range: Range<usize>) -> Result<Self::Tensor>;
        one_plus(row: &Self::Row) -> Result<Self::Row>;
        image_to_rows(x: &Self::Tensor) -> Result<Self::Tensor>;
        rows_to_image(x: &Self::Tensor, height: usize, width: usize) -> Result<Self::Tensor>;
        upsample(x: &Self::Tensor) -> Result<Self::Tensor>;
        }
        spoil: {
        linear(x: &Self::Tensor, w: &Self::Matrix, bias: Option<&Self::Row>);
        linear_swiglu(x: &Self::Tensor, w: &Self::GatedMatrix);
        linear_add(x: &Self::Tensor, w: &Self::Matrix, bias: Option<&Self::Row>, gate: Option<&Self::Row>,
            residual: &Self::Tensor);
        silu(x: &Self::Tensor);
        layer_norm(x: &Self::Tensor, weight: &Self::Row, bias: &Self::Row, epsilon: f32);
        rms_norm(x: &Self::Tensor, weight: &Self::Row, epsilon: f32);
        add(a: &Self::Tensor, b: &Self::Tensor);
        gated_add(x: &Self::Tensor, gate: &Self::Row, y: &Self::Tensor);
        concat_rows(parts: &[&Self::Tensor]);
        attention(qkv: &Self::Qkv, mask: &Mask, scale: f32);
        conv2d(x: &Self::Tensor, conv: &Self::Conv, geometry: ConvGeometry);
        upsample_conv(x: &Self::Tensor, conv: &Self::Conv, geometry: ConvGeometry);
        }
    }
    fn qkv_heads(
        &self,
        parts: &[RawQkvPart<'_, Self>],
        layout: HeadLayout,
        epsilon: f32,
        rotary: Option<&Self::Rotary>,
    ) -> Result<Self::Qkv> {
        // Wrong here means not rotated.
        let rotary = rotary.filter(|_| self.operation != "qkv_heads");
        let parts: Vec<_> = parts
            .iter()
            .map(|part| RawQkvPart { qkv: part.qkv, query_norm: part.query_norm, key_norm: part.key_norm })
            .collect();
        self.cpu.qkv_heads(&parts, layout, epsilon, rotary)
    }
    fn group_norm(
        &self,
        x: &Self::Tensor,
        norm: &RawGroupNorm<'_, Self>,
        silu: bool,
    ) -> Result<Self::Tensor> {
        self.rows("group_norm", self.cpu.group_norm(x, &norm_of(norm), silu)?)
    }
    fn norm_silu_conv(
        &self,
        x: &Self::Tensor,
        norm: &RawGroupNorm<'_, Self>,
        conv: &Self::Conv,
        geometry: ConvGeometry,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor> {
        self.rows("norm_silu_conv", self.cpu.norm_silu_conv(x, &norm_of(norm), conv, geometry, residual)?)
    }
}

#[test]
fn compare_names_the_wrong_operation_with_figures() {
    let cpu = || device(Isa::Portable, Precision::F32, 2);
    let compare = |operation| Compare::new(cpu(), Wrong { cpu: cpu(), operation }, 1e-5);
    graph(&Ops::new(&compare("none"))).unwrap();
    for wrong in [
        "linear",
        "qkv_heads",
        "attention",
        "silu",
        "linear_add",
        "layer_norm",
        "rms_norm",
        "linear_swiglu",
        "gated_add",
        "concat_rows",
        "norm_silu_conv",
        "upsample_conv",
        "group_norm",
        "conv2d",
        "add",
    ] {
        let Err(error) = graph(&Ops::new(&compare(wrong))) else { panic!("{wrong} was not found") };
        let Error::Device { device, operation, what } = &error else { panic!("{error}") };
        assert_eq!((device.as_str(), *operation), ("wrong", wrong), "{error}");
        assert!(what.contains("relative L2 error") && what.contains("passes 1e-5"), "{error}");
    }
}
