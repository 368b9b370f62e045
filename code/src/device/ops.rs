// SPDX-License-Identifier: Apache-2.0
//! The layer between model code and a device: knows every shape, checks it once, counts the work, and lets an
//! [`Observer`] watch or stop the run between operations.

use std::{cell::RefCell, fmt, ops::Range, sync::Arc};

use super::{
    Conv, ConvGeometry, Device, GatedMatrix, GroupNorm, HeadLayout, Ledger, Mask, Matrix, Observer,
    Operation, Qkv, QkvPart, RawGroupNorm, RawQkvPart, Rotary, Row, Shape, Tensor, handles::Alive,
};
use crate::{
    error::{Error, Result},
    rope::RotaryTable,
    weight::Weight,
};

/// A device as model code sees it: every operation checked, counted and stoppable.
pub struct Ops<'a, D: Device> {
    device: &'a D,
    observer: Option<RefCell<&'a mut dyn Observer>>,
    ledger: Option<Arc<Ledger>>,
}

/// An error for operands that do not fit.
fn mismatch<T>(operation: &'static str, got: impl fmt::Display, wanted: impl fmt::Display) -> Result<T> {
    Err(Error::Shape { operation, got: got.to_string(), wanted: wanted.to_string() })
}

impl<'a, D: Device> Ops<'a, D> {
    /// Operations of `device`, unobserved.
    pub fn new(device: &'a D) -> Self {
        Self { device, observer: None, ledger: None }
    }

    /// Operations of `device`, watched by `observer`.
    pub fn observed(device: &'a D, observer: &'a mut dyn Observer) -> Self {
        Self { device, observer: Some(RefCell::new(observer)), ledger: None }
    }

    /// Enters all tensors in `ledger`.
    #[must_use]
    pub fn with_ledger(self, ledger: &Arc<Ledger>) -> Self {
        Self { ledger: Some(Arc::clone(ledger)), ..self }
    }

    fn wrap(&self, raw: D::Tensor, shape: Shape) -> Tensor<D> {
        Tensor { raw, shape, _alive: Alive::new(self.ledger.as_ref(), shape) }
    }

    /// The device.
    pub fn device(&self) -> &'a D {
        self.device
    }

    /// Show the value of a named stage to the observer, if it wants it.
    pub fn stage(&self, x: &Tensor<D>, name: impl FnOnce() -> String) -> Result<()> {
        if let Some(observer) = &self.observer {
            let name = name();
            if observer.borrow().wants(&name) {
                let values = self.device.download(&x.raw)?;
                observer.borrow_mut().value(&name, x.shape, &values);
            }
        }
        Ok(())
    }

    fn run<T>(
        &self,
        name: &'static str,
        shapes: impl FnOnce() -> String,
        flops: usize,
        elements: usize,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(observer) = &self.observer else { return body() };
        let operation = Operation { name, shapes: shapes(), flops: flops as u64, bytes: elements as u64 * 4 };
        observer.borrow_mut().before(&operation)?;
        let result = body()?;
        observer.borrow_mut().after(&operation);
        Ok(result)
    }

    fn tensor(
        &self,
        name: &'static str,
        shapes: impl FnOnce() -> String,
        flops: usize,
        shape: Shape,
        body: impl FnOnce() -> Result<D::Tensor>,
    ) -> Result<Tensor<D>> {
        Ok(self.wrap(self.run(name, shapes, flops, shape.elements(), body)?, shape))
    }

    // ---- memory (not counted as operations)

    /// Rows `[rows, columns]` from host values.
    pub fn upload_rows(&self, values: &[f32], rows: usize, columns: usize) -> Result<Tensor<D>> {
        if values.len() != rows * columns {
            return mismatch("upload_rows", values.len(), format_args!("{rows} x {columns} values"));
        }
        Ok(self.wrap(self.device.upload_rows(values, rows, columns)?, Shape::Rows(rows, columns)))
    }

    /// An image `[height, width, channels]` from host values.
    pub fn upload_image(
        &self,
        values: &[f32],
        height: usize,
        width: usize,
        channels: usize,
    ) -> Result<Tensor<D>> {
        let shape = Shape::Image(height, width, channels);
        if values.len() != shape.elements() {
            return mismatch("upload_image", values.len(), shape);
        }
        Ok(self.wrap(self.device.upload_image(values, height, width, channels)?, shape))
    }

    /// Values of a tensor in row-major order.
    pub fn download(&self, x: &Tensor<D>) -> Result<Vec<f32>> {
        self.device.download(&x.raw)
    }

    /// Values of a row vector.
    pub fn download_row(&self, row: &Row<D>) -> Result<Vec<f32>> {
        self.device.download_row(&row.raw)
    }

    /// Query, key and value heads, `[heads, rows, head_dim]` each.
    pub fn download_qkv(&self, qkv: &Qkv<D>) -> Result<[Vec<f32>; 3]> {
        self.device.download_qkv(&qkv.raw)
    }

    /// A row vector from host values.
    pub fn row(&self, values: &[f32]) -> Result<Row<D>> {
        Ok(Row { raw: self.device.upload_row(values)?, len: values.len() })
    }

    /// A matrix of the rows of all parts in turn.
    pub fn matrix(&self, parts: &[Weight]) -> Result<Matrix<D>> {
        let inputs = parts.first().map_or(0, Weight::row_len);
        if parts.is_empty() || parts.iter().any(|part| part.shape().len() != 2 || part.row_len() != inputs) {
            return mismatch("matrix", format_args!("{parts:?}"), "matrices with the same number of columns");
        }
        let outputs = parts.iter().map(Weight::rows).sum();
        Ok(Matrix { raw: self.device.matrix(parts)?, bias: None, outputs, inputs })
    }

    /// A matrix of the rows of all parts in turn, with the biases of all parts in turn.
    pub fn matrix_with_bias(&self, parts: &[Weight], biases: &[Weight]) -> Result<Matrix<D>> {
        let matrix = self.matrix(parts)?;
        let bias = self.row(&biases.iter().flat_map(Weight::to_f32).collect::<Vec<_>>())?;
        if bias.len != matrix.outputs {
            return mismatch(
                "matrix_with_bias",
                format_args!("{biases:?}"),
                format_args!("{} biases", matrix.outputs),
            );
        }
        Ok(Matrix { bias: Some(bias), ..matrix })
    }

    /// Gate and up weights of a SwiGLU.
    pub fn gated_matrix(&self, gate: &Weight, up: &Weight) -> Result<GatedMatrix<D>> {
        if gate.shape() != up.shape() || gate.shape().len() != 2 {
            return mismatch("gated_matrix", format_args!("{gate:?}, {up:?}"), "two matrices of one shape");
        }
        Ok(GatedMatrix {
            raw: self.device.gated_matrix(gate, up)?,
            outputs: gate.rows(),
            inputs: gate.row_len(),
        })
    }

    /// A convolution kernel with its bias.
    pub fn conv(&self, weight: &Weight, bias: &Weight) -> Result<Conv<D>> {
        let &[outputs, inputs, size, width] = weight.shape() else {
            return mismatch("conv", format_args!("{weight:?}"), "[out, in, size, size]");
        };
        if size != width || bias.shape() != [outputs] {
            return mismatch("conv", format_args!("{weight:?}, {bias:?}"), "[out, in, size, size] and [out]");
        }
        Ok(Conv { raw: self.device.conv(weight, bias)?, outputs, inputs, size })
    }

    /// A rotary table.
    pub fn rotary(&self, table: &RotaryTable) -> Result<Rotary<D>> {
        Ok(Rotary { raw: self.device.rotary(table)?, rows: table.rows(), pairs: table.pairs() })
    }

    // ---- rows

    fn check_linear(name: &'static str, x: &Tensor<D>, outputs: usize, inputs: usize) -> Result<Shape> {
        match x.shape {
            Shape::Rows(rows, columns) if columns == inputs => Ok(Shape::Rows(rows, outputs)),
            got => mismatch(name, got, format_args!("[rows, {inputs}]")),
        }
    }

    /// `x Wᵀ + bias`.
    pub fn linear(&self, x: &Tensor<D>, w: &Matrix<D>) -> Result<Tensor<D>> {
        let shape = Self::check_linear("linear", x, w.outputs, w.inputs)?;
        let flops = 2 * shape.elements() * w.inputs;
        let shapes = || format!("{} x [{}, {}]", x.shape, w.outputs, w.inputs);
        let bias = w.bias.as_ref().map(|row| &row.raw);
        self.tensor("linear", shapes, flops, shape, || self.device.linear(&x.raw, &w.raw, bias))
    }

    /// `silu(x Gᵀ) · (x Uᵀ)`.
    pub fn linear_swiglu(&self, x: &Tensor<D>, w: &GatedMatrix<D>) -> Result<Tensor<D>> {
        let shape = Self::check_linear("linear_swiglu", x, w.outputs, w.inputs)?;
        let flops = 4 * shape.elements() * w.inputs;
        let shapes = || format!("{} x 2 [{}, {}]", x.shape, w.outputs, w.inputs);
        self.tensor("linear_swiglu", shapes, flops, shape, || self.device.linear_swiglu(&x.raw, &w.raw))
    }

    /// `residual + gate · (x Wᵀ + bias)`.
    pub fn linear_add(
        &self,
        x: &Tensor<D>,
        w: &Matrix<D>,
        gate: Option<&Row<D>>,
        residual: &Tensor<D>,
    ) -> Result<Tensor<D>> {
        let shape = Self::check_linear("linear_add", x, w.outputs, w.inputs)?;
        if residual.shape != shape || gate.is_some_and(|gate| gate.len != w.outputs) {
            return mismatch("linear_add", format_args!("residual {}", residual.shape), shape);
        }
        let flops = 2 * shape.elements() * w.inputs;
        let shapes = || format!("{} x [{}, {}]", x.shape, w.outputs, w.inputs);
        let (bias, gate) = (w.bias.as_ref().map(|row| &row.raw), gate.map(|row| &row.raw));
        self.tensor("linear_add", shapes, flops, shape, || {
            self.device.linear_add(&x.raw, &w.raw, bias, gate, &residual.raw)
        })
    }

    /// `x · sigmoid(x)`.
    pub fn silu(&self, x: &Tensor<D>) -> Result<Tensor<D>> {
        self.tensor("silu", || x.shape.to_string(), x.shape.elements(), x.shape, || self.device.silu(&x.raw))
    }

    /// `(x - mean) / sqrt(variance + epsilon) · weight + bias` by row.
    pub fn layer_norm(
        &self,
        x: &Tensor<D>,
        weight: &Row<D>,
        bias: &Row<D>,
        epsilon: f32,
    ) -> Result<Tensor<D>> {
        if weight.len != x.columns() || bias.len != x.columns() {
            return mismatch("layer_norm", format_args!("weight {}, bias {}", weight.len, bias.len), x.shape);
        }
        self.tensor(
            "layer_norm",
            || x.shape.to_string(),
            x.shape.elements(),
            x.shape,
            || self.device.layer_norm(&x.raw, &weight.raw, &bias.raw, epsilon),
        )
    }

    /// `x / sqrt(mean(x²) + epsilon) · weight` by row.
    pub fn rms_norm(&self, x: &Tensor<D>, weight: &Row<D>, epsilon: f32) -> Result<Tensor<D>> {
        if weight.len != x.columns() {
            return mismatch("rms_norm", format_args!("weight {}", weight.len), x.shape);
        }
        self.tensor(
            "rms_norm",
            || x.shape.to_string(),
            x.shape.elements(),
            x.shape,
            || self.device.rms_norm(&x.raw, &weight.raw, epsilon),
        )
    }

    /// `a + b`.
    pub fn add(&self, a: &Tensor<D>, b: &Tensor<D>) -> Result<Tensor<D>> {
        if a.shape != b.shape {
            return mismatch("add", b.shape, a.shape);
        }
        self.tensor(
            "add",
            || a.shape.to_string(),
            a.shape.elements(),
            a.shape,
            || self.device.add(&a.raw, &b.raw),
        )
    }

    /// `x + gate · y`.
    pub fn gated_add(&self, x: &Tensor<D>, gate: &Row<D>, y: &Tensor<D>) -> Result<Tensor<D>> {
        if x.shape != y.shape || gate.len != x.columns() {
            return mismatch("gated_add", format_args!("{} and gate {}", y.shape, gate.len), x.shape);
        }
        self.tensor(
            "gated_add",
            || x.shape.to_string(),
            x.shape.elements(),
            x.shape,
            || self.device.gated_add(&x.raw, &gate.raw, &y.raw),
        )
    }

    /// Rows of all parts in turn.
    pub fn concat_rows(&self, parts: &[&Tensor<D>]) -> Result<Tensor<D>> {
        let columns = parts.first().map_or(0, |part| part.columns());
        if parts.is_empty() || parts.iter().any(|part| part.columns() != columns) {
            let got = parts.iter().map(|part| part.shape.to_string()).collect::<Vec<_>>().join(", ");
            return mismatch("concat_rows", got, "parts with the same columns");
        }
        let shape = Shape::Rows(parts.iter().map(|part| part.rows()).sum(), columns);
        let raw: Vec<_> = parts.iter().map(|part| &part.raw).collect();
        self.tensor("concat_rows", || shape.to_string(), 0, shape, || self.device.concat_rows(&raw))
    }

    /// Rows `range`.
    pub fn slice_rows(&self, x: &Tensor<D>, range: Range<usize>) -> Result<Tensor<D>> {
        if range.start > range.end || range.end > x.rows() {
            return mismatch("slice_rows", format_args!("{range:?}"), x.shape);
        }
        let shape = Shape::Rows(range.len(), x.columns());
        self.tensor(
            "slice_rows",
            || format!("{} {range:?}", x.shape),
            0,
            shape,
            || self.device.slice_rows(&x.raw, range.clone()),
        )
    }

    /// The one row of `x` as `parts` row vectors of equal length.
    pub fn split_row(&self, x: &Tensor<D>, parts: usize) -> Result<Vec<Row<D>>> {
        if x.rows() != 1 || parts == 0 || !x.columns().is_multiple_of(parts) {
            return mismatch("split_row", x.shape, format_args!("[1, {parts} n]"));
        }
        let len = x.columns() / parts;
        let rows = self.run(
            "split_row",
            || x.shape.to_string(),
            0,
            x.columns(),
            || self.device.split_row(&x.raw, parts),
        )?;
        Ok(rows.into_iter().map(|raw| Row { raw, len }).collect())
    }

    /// `1 + row`.
    pub fn one_plus(&self, row: &Row<D>) -> Result<Row<D>> {
        let raw = self.run(
            "one_plus",
            || format!("[{}]", row.len),
            row.len,
            row.len,
            || self.device.one_plus(&row.raw),
        )?;
        Ok(Row { raw, len: row.len })
    }

    // ---- attention

    /// Heads of one or more fused QKV parts, normalised, concatenated and rotated. See [`Device::qkv_heads`].
    pub fn qkv_heads(
        &self,
        parts: &[QkvPart<'_, D>],
        layout: HeadLayout,
        epsilon: f32,
        rotary: Option<&Rotary<D>>,
    ) -> Result<Qkv<D>> {
        let rows = parts.iter().map(|part| part.qkv.rows()).sum();
        for part in parts {
            let norms = [part.query_norm, part.key_norm];
            if part.qkv.columns() != layout.columns()
                || norms.iter().flatten().any(|norm| norm.len != layout.head_dim)
            {
                return mismatch("qkv_heads", part.qkv.shape, format_args!("{layout:?}"));
            }
        }
        if let Some(rotary) = rotary
            && (rotary.rows != rows || rotary.pairs * 2 != layout.head_dim)
        {
            let wanted = format!("[{rows}, {}]", layout.head_dim / 2);
            return mismatch("qkv_heads", format_args!("rotary [{}, {}]", rotary.rows, rotary.pairs), wanted);
        }
        let raw: Vec<_> = parts
            .iter()
            .map(|part| RawQkvPart {
                qkv: &part.qkv.raw,
                query_norm: part.query_norm.map(|row| &row.raw),
                key_norm: part.key_norm.map(|row| &row.raw),
            })
            .collect();
        let elements = rows * layout.columns();
        let shapes = || format!("[{rows}, {}]", layout.columns());
        let raw = self.run("qkv_heads", shapes, elements, elements, || {
            self.device.qkv_heads(&raw, layout, epsilon, rotary.map(|rotary| &rotary.raw))
        })?;
        Ok(Qkv { raw, layout, rows })
    }

    /// `softmax(scale · Q Kᵀ + mask) V`, heads merged.
    pub fn attention(&self, qkv: &Qkv<D>, mask: &Mask, scale: f32) -> Result<Tensor<D>> {
        if let Mask::Keys(keys) | Mask::CausalKeys(keys) = mask
            && keys.end > qkv.rows
        {
            return mismatch("attention", format_args!("{mask:?}"), format_args!("keys below {}", qkv.rows));
        }
        let shape = Shape::Rows(qkv.rows, qkv.layout.query_columns());
        let flops = 4 * qkv.rows * qkv.rows * qkv.layout.query_columns();
        let shapes = || format!("{} heads [{}, {}]", qkv.layout.query_heads, qkv.rows, qkv.layout.head_dim);
        self.tensor("attention", shapes, flops, shape, || self.device.attention(&qkv.raw, mask, scale))
    }

    // ---- images

    fn check_conv(
        name: &'static str,
        [height, width, channels]: [usize; 3],
        conv: &Conv<D>,
        geometry: ConvGeometry,
    ) -> Result<(Shape, usize)> {
        let [top, left, bottom, right] = geometry.padding;
        if channels != conv.inputs || height + top + bottom < conv.size || width + left + right < conv.size {
            let got = Shape::Image(height, width, channels);
            return mismatch(name, got, format_args!("[height, width, {}]", conv.inputs));
        }
        let [height, width] = geometry.output(height, width, conv.size);
        let shape = Shape::Image(height, width, conv.outputs);
        Ok((shape, 2 * shape.elements() * conv.inputs * conv.size * conv.size))
    }

    fn image_dims(name: &'static str, x: &Tensor<D>) -> Result<[usize; 3]> {
        match x.shape {
            Shape::Image(height, width, channels) => Ok([height, width, channels]),
            rows @ Shape::Rows(..) => mismatch(name, rows, "an image"),
        }
    }

    fn raw_norm<'n>(
        name: &'static str,
        x: &Tensor<D>,
        norm: &'n GroupNorm<D>,
    ) -> Result<RawGroupNorm<'n, D>> {
        let [_, _, channels] = Self::image_dims(name, x)?;
        if norm.weight.len != channels || norm.bias.len != channels || !channels.is_multiple_of(norm.groups) {
            return mismatch(
                name,
                x.shape,
                format_args!("{} channels in {} groups", norm.weight.len, norm.groups),
            );
        }
        Ok(RawGroupNorm {
            groups: norm.groups,
            weight: &norm.weight.raw,
            bias: &norm.bias.raw,
            epsilon: norm.epsilon,
        })
    }

    /// Convolution with bias.
    pub fn conv2d(&self, x: &Tensor<D>, conv: &Conv<D>, geometry: ConvGeometry) -> Result<Tensor<D>> {
        let (shape, flops) = Self::check_conv("conv2d", Self::image_dims("conv2d", x)?, conv, geometry)?;
        let shapes = || format!("{} x {}x{} to {}", x.shape, conv.size, conv.size, conv.outputs);
        self.tensor("conv2d", shapes, flops, shape, || self.device.conv2d(&x.raw, &conv.raw, geometry))
    }

    /// Group normalisation, then SiLU if asked.
    pub fn group_norm(&self, x: &Tensor<D>, norm: &GroupNorm<D>, silu: bool) -> Result<Tensor<D>> {
        let raw = Self::raw_norm("group_norm", x, norm)?;
        self.tensor(
            "group_norm",
            || x.shape.to_string(),
            x.shape.elements(),
            x.shape,
            || self.device.group_norm(&x.raw, &raw, silu),
        )
    }

    /// `residual + conv(silu(group_norm(x)))`.
    pub fn norm_silu_conv(
        &self,
        x: &Tensor<D>,
        norm: &GroupNorm<D>,
        conv: &Conv<D>,
        geometry: ConvGeometry,
        residual: Option<&Tensor<D>>,
    ) -> Result<Tensor<D>> {
        let raw = Self::raw_norm("norm_silu_conv", x, norm)?;
        let (shape, flops) =
            Self::check_conv("norm_silu_conv", Self::image_dims("norm_silu_conv", x)?, conv, geometry)?;
        if let Some(residual) = residual
            && residual.shape != shape
        {
            return mismatch("norm_silu_conv", format_args!("residual {}", residual.shape), shape);
        }
        let shapes = || format!("{} x {}x{} to {}", x.shape, conv.size, conv.size, conv.outputs);
        self.tensor("norm_silu_conv", shapes, flops, shape, || {
            self.device.norm_silu_conv(
                &x.raw,
                &raw,
                &conv.raw,
                geometry,
                residual.map(|residual| &residual.raw),
            )
        })
    }

    /// `conv(upsample(x))`, nearest neighbour ×2.
    pub fn upsample_conv(&self, x: &Tensor<D>, conv: &Conv<D>, geometry: ConvGeometry) -> Result<Tensor<D>> {
        let [height, width, channels] = Self::image_dims("upsample_conv", x)?;
        let (shape, flops) =
            Self::check_conv("upsample_conv", [2 * height, 2 * width, channels], conv, geometry)?;
        let shapes = || format!("{} x {}x{} to {}", x.shape, conv.size, conv.size, conv.outputs);
        self.tensor("upsample_conv", shapes, flops, shape, || {
            self.device.upsample_conv(&x.raw, &conv.raw, geometry)
        })
    }

    /// Nearest neighbour ×2.
    pub fn upsample(&self, x: &Tensor<D>) -> Result<Tensor<D>> {
        let [height, width, channels] = Self::image_dims("upsample", x)?;
        let shape = Shape::Image(2 * height, 2 * width, channels);
        self.tensor("upsample", || x.shape.to_string(), 0, shape, || self.device.upsample(&x.raw))
    }

    /// The pixels of an image as rows.
    pub fn image_to_rows(&self, x: &Tensor<D>) -> Result<Tensor<D>> {
        let [height, width, channels] = Self::image_dims("image_to_rows", x)?;
        let shape = Shape::Rows(height * width, channels);
        self.tensor("image_to_rows", || x.shape.to_string(), 0, shape, || self.device.image_to_rows(&x.raw))
    }

    /// Rows as an image of `height` × `width` pixels.
    pub fn rows_to_image(&self, x: &Tensor<D>, height: usize, width: usize) -> Result<Tensor<D>> {
        if x.rows() != height * width {
            return mismatch("rows_to_image", x.shape, format_args!("{height} x {width} rows"));
        }
        let shape = Shape::Image(height, width, x.columns());
        self.tensor(
            "rows_to_image",
            || x.shape.to_string(),
            0,
            shape,
            || self.device.rows_to_image(&x.raw, height, width),
        )
    }
}
