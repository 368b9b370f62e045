// SPDX-License-Identifier: Apache-2.0
//! The operations that FLUX.2 needs, as a trait that a device implements.
//!
//! The level is chosen so that a CPU and a Tenstorrent card both have a fast kernel for each operation. Model code never
//! calls a [`Device`] directly: it goes through [`Ops`], which knows every shape, checks it once, counts the work and
//! asks between operations whether to stop. Devices may therefore rely on the shapes they are given.
//!
//! Conventions: a *tensor* is either rows `[rows, columns]` or an image in NHWC `[height, width, channels]` (one picture
//! at a time; an image is also the rows of its pixels). A *row* is a vector that is broadcast over the rows of a tensor and
//! has its own type, so that a broadcast cannot go the wrong way. All values are f32 to the caller; what a device keeps
//! and multiplies in is its [`Precision`].

pub mod compare;
pub mod cpu;
mod handles;
mod observe;
mod ops;
pub mod record;
pub mod self_check;

use std::ops::Range;

pub use handles::{Conv, GatedMatrix, GroupNorm, Ledger, Matrix, Qkv, QkvPart, Rotary, Row, Shape, Tensor};
pub use observe::{Observer, Operation, Trace};
pub use ops::Ops;

use crate::{error::Result, rope::RotaryTable, weight::Weight};

/// What a device computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f32 throughout: the reference.
    F32,
    /// bf16 weights and product inputs where the hardware gains from it; f32 accumulation, residual stream and
    /// row operations.
    Bf16,
}

impl Precision {
    /// `f32` or `bf16`, as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Which keys a query may attend to. Queries that see no key get zeros (torch's SDPA on the CPU).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Every query sees every key.
    None,
    /// Query `i` sees key `j` if `j` is in the range.
    Keys(Range<usize>),
    /// Query `i` sees key `j` if `j <= i` and `j` is in the range.
    CausalKeys(Range<usize>),
}

/// How the columns of a fused QKV tensor divide: all query heads, then key heads, then value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// Number of query heads; a multiple of `key_value_heads`. KV head of query head `h` is
    /// `h / (query_heads / key_value_heads)`.
    pub query_heads: usize,
    /// Number of key heads, and of value heads.
    pub key_value_heads: usize,
    /// Columns of one head; even where a rotary table is used.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Columns of the fused tensor.
    pub const fn columns(&self) -> usize {
        (self.query_heads + 2 * self.key_value_heads) * self.head_dim
    }
    /// Columns of the attention output.
    pub const fn query_columns(&self) -> usize {
        self.query_heads * self.head_dim
    }
}

/// Stride and zero padding of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvGeometry {
    /// Step in both directions.
    pub stride: usize,
    /// Zero rows or columns added before and after: `[top, left, bottom, right]`.
    pub padding: [usize; 4],
}

impl ConvGeometry {
    /// 3×3 with one pixel of padding all round.
    pub const SAME_3X3: Self = Self { stride: 1, padding: [1; 4] };
    /// 1×1.
    pub const POINTWISE: Self = Self { stride: 1, padding: [0; 4] };
    /// diffusers' down-sampler: 3×3, stride 2, padded right and bottom only.
    pub const DOWN_3X3: Self = Self { stride: 2, padding: [0, 0, 1, 1] };

    /// Output `[height, width]` of a `size`×`size` kernel.
    pub const fn output(&self, height: usize, width: usize, size: usize) -> [usize; 2] {
        let [top, left, bottom, right] = self.padding;
        [(height + top + bottom - size) / self.stride + 1, (width + left + right - size) / self.stride + 1]
    }
}

/// One stream of a joint attention: its fused QKV and the weights of its per-head RMS norms.
pub struct RawQkvPart<'a, D: Device> {
    /// `[rows, layout.columns()]`.
    pub qkv: &'a D::Tensor,
    /// Weight `[head_dim]` of the RMS norm over each query head, if the model has one.
    pub query_norm: Option<&'a D::Row>,
    /// Likewise for key heads.
    pub key_norm: Option<&'a D::Row>,
}

/// Weights of a group normalisation, as a device sees it.
pub struct RawGroupNorm<'a, D: Device> {
    /// Number of groups; divides the channels.
    pub groups: usize,
    /// Scale by channel.
    pub weight: &'a D::Row,
    /// Shift by channel.
    pub bias: &'a D::Row,
    /// Added to the variance.
    pub epsilon: f32,
}

/// Memory that a device holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Bytes of weights in the device's own memory.
    pub weights: u64,
    /// Bytes of weights used in place from the memory map.
    pub mapped: u64,
}

/// A device that can run FLUX.2. See the module for conventions.
///
/// Methods with a body are composites: correct for every device, overridden where a device has a kernel.
pub trait Device: Sized + Send + 'static {
    /// Rows or an image in the device's memory. Frees itself.
    type Tensor: Send;
    /// A vector that broadcasts over rows.
    type Row: Send;
    /// A weight `[out, in]`, prepared for products.
    type Matrix: Send;
    /// Two weights `[out, in]`, prepared for `silu(x Gᵀ) · (x Uᵀ)` in one product.
    type GatedMatrix: Send;
    /// A convolution kernel with its bias, prepared.
    type Conv: Send;
    /// Query, key and value heads, normalised and rotated.
    type Qkv: Send;
    /// A rotary table `[rows, head_dim / 2]` of cosines and sines.
    type Rotary: Send;

    /// Short name with what matters of the hardware: `cpu (avx2, 2 threads)`.
    fn name(&self) -> String;
    /// Rows and columns of the mesh of chips that it is.
    fn mesh(&self) -> [usize; 2] {
        [1, 1]
    }
    /// What it computes in.
    fn precision(&self) -> Precision;
    /// Memory it holds.
    fn memory(&self) -> MemoryReport;
    /// Wait until all work given is done.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    // ---- memory

    /// Rows `[rows, columns]`, row-major.
    fn upload_rows(&self, values: &[f32], rows: usize, columns: usize) -> Result<Self::Tensor>;
    /// An image `[height, width, channels]`.
    fn upload_image(
        &self,
        values: &[f32],
        height: usize,
        width: usize,
        channels: usize,
    ) -> Result<Self::Tensor>;
    /// Values in row-major order.
    fn download(&self, x: &Self::Tensor) -> Result<Vec<f32>>;
    /// A row vector.
    fn upload_row(&self, values: &[f32]) -> Result<Self::Row>;
    /// Values of a row vector.
    fn download_row(&self, row: &Self::Row) -> Result<Vec<f32>>;
    /// Query, key and value heads as `[heads, rows, head_dim]` each.
    fn download_qkv(&self, qkv: &Self::Qkv) -> Result<[Vec<f32>; 3]>;
    /// One matrix of the rows of all `parts` in turn; all parts have the same `in`.
    fn matrix(&self, parts: &[Weight]) -> Result<Self::Matrix>;
    /// `gate` and `up`, of one shape.
    fn gated_matrix(&self, gate: &Weight, up: &Weight) -> Result<Self::GatedMatrix>;
    /// A kernel `[out, in, size, size]` with its bias `[out]`.
    fn conv(&self, weight: &Weight, bias: &Weight) -> Result<Self::Conv>;
    /// A rotary table.
    fn rotary(&self, table: &RotaryTable) -> Result<Self::Rotary>;

    // ---- rows

    /// `x Wᵀ + bias`.
    fn linear(&self, x: &Self::Tensor, w: &Self::Matrix, bias: Option<&Self::Row>) -> Result<Self::Tensor>;
    /// `silu(x Gᵀ) · (x Uᵀ)`.
    fn linear_swiglu(&self, x: &Self::Tensor, w: &Self::GatedMatrix) -> Result<Self::Tensor>;
    /// `residual + gate · (x Wᵀ + bias)`; a missing gate is 1.
    fn linear_add(
        &self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Row>,
        gate: Option<&Self::Row>,
        residual: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        let y = self.linear(x, w, bias)?;
        match gate {
            Some(gate) => self.gated_add(residual, gate, &y),
            None => self.add(residual, &y),
        }
    }
    /// `x · sigmoid(x)`.
    fn silu(&self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// `(x - mean) / sqrt(variance + epsilon) · weight + bias` by row, biased variance. Modulation is folded in by the
    /// caller: weight = 1 + scale, bias = shift.
    fn layer_norm(
        &self,
        x: &Self::Tensor,
        weight: &Self::Row,
        bias: &Self::Row,
        epsilon: f32,
    ) -> Result<Self::Tensor>;
    /// `x / sqrt(mean(x²) + epsilon) · weight` by row.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Row, epsilon: f32) -> Result<Self::Tensor>;
    /// `a + b`, rows or images.
    fn add(&self, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor>;
    /// `x + gate · y`.
    fn gated_add(&self, x: &Self::Tensor, gate: &Self::Row, y: &Self::Tensor) -> Result<Self::Tensor>;
    /// Rows of all parts in turn.
    fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;
    /// Rows `range`.
    fn slice_rows(&self, x: &Self::Tensor, range: Range<usize>) -> Result<Self::Tensor>;
    /// The one row of `x` `[1, parts · n]` as `parts` row vectors of `n`.
    fn split_row(&self, x: &Self::Tensor, parts: usize) -> Result<Vec<Self::Row>>;
    /// `1 + row`.
    fn one_plus(&self, row: &Self::Row) -> Result<Self::Row>;

    // ---- attention

    /// Splits fused QKV rows into heads, applies the per-head RMS norms, concatenates the parts along the rows and
    /// rotates queries and keys by `rotary` (row `i` of the table for row `i` of the concatenation), on **adjacent pairs**:
    /// `y[2k] = x[2k] cos - x[2k+1] sin`, `y[2k+1] = x[2k+1] cos + x[2k] sin`.
    fn qkv_heads(
        &self,
        parts: &[RawQkvPart<'_, Self>],
        layout: HeadLayout,
        epsilon: f32,
        rotary: Option<&Self::Rotary>,
    ) -> Result<Self::Qkv>;
    /// `softmax(scale · Q Kᵀ + mask) V` by head, heads merged: `[rows, query_heads · head_dim]`.
    fn attention(&self, qkv: &Self::Qkv, mask: &Mask, scale: f32) -> Result<Self::Tensor>;

    // ---- images

    /// Convolution with bias.
    fn conv2d(&self, x: &Self::Tensor, conv: &Self::Conv, geometry: ConvGeometry) -> Result<Self::Tensor>;
    /// Group normalisation over height, width and the channels of a group, then SiLU if asked.
    fn group_norm(&self, x: &Self::Tensor, norm: &RawGroupNorm<'_, Self>, silu: bool)
    -> Result<Self::Tensor>;
    /// Nearest neighbour ×2.
    fn upsample(&self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// `residual + conv(silu(group_norm(x)))`; a missing residual is 0.
    fn norm_silu_conv(
        &self,
        x: &Self::Tensor,
        norm: &RawGroupNorm<'_, Self>,
        conv: &Self::Conv,
        geometry: ConvGeometry,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor> {
        let y = self.conv2d(&self.group_norm(x, norm, true)?, conv, geometry)?;
        match residual {
            Some(residual) => self.add(residual, &y),
            None => Ok(y),
        }
    }
    /// `conv(upsample(x))`.
    fn upsample_conv(
        &self,
        x: &Self::Tensor,
        conv: &Self::Conv,
        geometry: ConvGeometry,
    ) -> Result<Self::Tensor> {
        self.conv2d(&self.upsample(x)?, conv, geometry)
    }
    /// The pixels of an image as rows `[height · width, channels]`.
    fn image_to_rows(&self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// Rows `[height · width, channels]` as an image.
    fn rows_to_image(&self, x: &Self::Tensor, height: usize, width: usize) -> Result<Self::Tensor>;
}
