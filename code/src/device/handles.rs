// SPDX-License-Identifier: Apache-2.0
//! What the operations work on: the device's own tensors and weights, each with its shape.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{Device, HeadLayout};

/// Shape of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `[rows, columns]`.
    Rows(usize, usize),
    /// `[height, width, channels]`.
    Image(usize, usize, usize),
}

impl Shape {
    /// Number of values.
    pub const fn elements(self) -> usize {
        match self {
            Self::Rows(rows, columns) => rows * columns,
            Self::Image(height, width, channels) => height * width * channels,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(rows, columns) => write!(f, "[{rows}, {columns}]"),
            Self::Image(height, width, channels) => write!(f, "[{height}, {width}, {channels}]"),
        }
    }
}

/// A device tensor with its shape.
pub struct Tensor<D: Device> {
    pub(super) raw: D::Tensor,
    pub(super) shape: Shape,
    pub(super) _alive: Alive,
}

impl<D: Device> Tensor<D> {
    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }
    /// Rows of a matrix, or pixels of an image.
    pub fn rows(&self) -> usize {
        match self.shape {
            Shape::Rows(rows, _) => rows,
            Shape::Image(height, width, _) => height * width,
        }
    }
    /// Columns of a matrix, or channels of an image.
    pub fn columns(&self) -> usize {
        match self.shape {
            Shape::Rows(_, columns) | Shape::Image(_, _, columns) => columns,
        }
    }
    /// The device's own tensor.
    pub fn raw(&self) -> &D::Tensor {
        &self.raw
    }
}

/// A row vector with its length.
pub struct Row<D: Device> {
    pub(super) raw: D::Row,
    pub(super) len: usize,
}

/// A weight matrix `[outputs, inputs]`, with its bias if it has one.
pub struct Matrix<D: Device> {
    pub(super) raw: D::Matrix,
    pub(super) bias: Option<Row<D>>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// Gate and up weights, `[outputs, inputs]` each.
pub struct GatedMatrix<D: Device> {
    pub(super) raw: D::GatedMatrix,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// A convolution kernel `[outputs, inputs, size, size]` with bias.
pub struct Conv<D: Device> {
    pub(super) raw: D::Conv,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) size: usize,
}

/// Weights of a group normalisation.
pub struct GroupNorm<D: Device> {
    /// Number of groups.
    pub groups: usize,
    /// Scale by channel.
    pub weight: Row<D>,
    /// Shift by channel.
    pub bias: Row<D>,
    /// Added to the variance.
    pub epsilon: f32,
}

/// Heads ready for attention.
pub struct Qkv<D: Device> {
    pub(super) raw: D::Qkv,
    pub(super) layout: HeadLayout,
    pub(super) rows: usize,
}

/// A rotary table `[rows, pairs]`.
pub struct Rotary<D: Device> {
    pub(super) raw: D::Rotary,
    pub(super) rows: usize,
    pub(super) pairs: usize,
}

/// One stream of a joint attention. See [`RawQkvPart`](super::RawQkvPart).
pub struct QkvPart<'a, D: Device> {
    /// `[rows, layout.columns()]`.
    pub qkv: &'a Tensor<D>,
    /// Weight of the query heads' RMS norm.
    pub query_norm: Option<&'a Row<D>>,
    /// Weight of the key heads' RMS norm.
    pub key_norm: Option<&'a Row<D>>,
}

/// Bytes of the tensors that are alive, at four per value; a view counts like a copy.
#[derive(Default)]
pub struct Ledger {
    alive: AtomicU64,
    peak: AtomicU64,
}

impl Ledger {
    /// Most bytes alive at once so far.
    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }
}

/// A tensor's entry in the ledger, if there is one; struck out when the tensor goes.
pub(super) struct Alive(Option<(Arc<Ledger>, u64)>);

impl Alive {
    pub(super) fn new(ledger: Option<&Arc<Ledger>>, shape: Shape) -> Self {
        Self(ledger.map(|ledger| {
            let bytes = 4 * shape.elements() as u64;
            let alive = ledger.alive.fetch_add(bytes, Relaxed) + bytes;
            ledger.peak.fetch_max(alive, Relaxed);
            (Arc::clone(ledger), bytes)
        }))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        if let Some((ledger, bytes)) = &self.0 {
            ledger.alive.fetch_sub(*bytes, Relaxed);
        }
    }
}
