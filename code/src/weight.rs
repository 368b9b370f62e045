// SPDX-License-Identifier: Apache-2.0
//! A view of a weight: which bytes, of what type and shape, in which order of rows.
//!
//! Views are cheap to clone and keep the memory map alive, so that a device may use the mapped pages in place.
//! Row and column slices and the row order are part of the view; nothing is copied until a device asks.

use std::{fmt, ops::Range, sync::Arc};

use memmap2::Mmap;

/// How a stored element is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// IEEE 754 single precision, little-endian.
    F32,
    /// bfloat16, little-endian.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
        })
    }
}

/// Bytes that a weight lives in: a memory map of the checkpoint, or memory of our own (tests).
#[derive(Clone)]
pub enum Storage {
    /// A mapped file.
    Mapped(Arc<Mmap>),
    /// Owned bytes.
    Owned(Arc<Vec<u8>>),
    /// No bytes: a weight that only has a shape, to plan a run without a checkpoint. Reads as zeros.
    Absent,
}

impl Storage {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
            Self::Absent => &[],
        }
    }
}

/// In which order the rows of a matrix are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As stored.
    Stored,
    /// Each head's rows `[a0 … a(d/2-1), b0 … b(d/2-1)]` are read as `[a0, b0, a1, b1, …]`, so that a model with
    /// half-split rotary embedding (Qwen3, Mistral) can use the adjacent-pair form of the DiT.
    HalfSplitToPairs {
        /// Rows of one head; even.
        head_dim: usize,
    },
}

/// A tensor of the checkpoint, or rows and columns of one.
#[derive(Clone)]
pub struct Weight {
    /// Name in the checkpoint, for messages.
    pub name: Arc<str>,
    storage: Storage,
    offset: usize,
    dtype: DType,
    shape: Vec<usize>,
    /// Elements from one row to the next (more than a row holds, for a column slice).
    row_stride: usize,
    order: RowOrder,
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.dtype, self.shape)
    }
}

impl Weight {
    /// A whole, contiguous tensor that starts `offset` bytes into `storage`.
    ///
    /// # Panics
    /// If the bytes are not there: callers check sizes first.
    pub fn new(name: &str, storage: Storage, offset: usize, dtype: DType, shape: &[usize]) -> Self {
        let end = offset + shape.iter().product::<usize>() * dtype.size();
        assert!(
            matches!(storage, Storage::Absent) || end <= storage.bytes().len(),
            "weight {name} exceeds its storage"
        );
        let row_stride = shape.iter().skip(1).product();
        Self {
            name: name.into(),
            storage,
            offset,
            dtype,
            shape: shape.to_vec(),
            row_stride,
            order: RowOrder::Stored,
        }
    }

    /// A weight from numbers, for tests.
    pub fn from_f32(name: &str, values: &[f32], shape: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(name, Storage::Owned(Arc::new(bytes)), 0, DType::F32, shape)
    }

    /// A bf16 weight from numbers rounded to nearest even, for tests.
    pub fn from_f32_as_bf16(name: &str, values: &[f32], shape: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        Self::new(name, Storage::Owned(Arc::new(bytes)), 0, DType::Bf16, shape)
    }

    /// Shape of the view, `[out, in]` for a matrix, `[out, in, height, width]` for a convolution kernel.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Stored element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// First dimension.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row of the view (product of all dimensions but the first).
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Bytes of the view as stored.
    pub fn stored_bytes(&self) -> usize {
        self.rows() * self.row_len() * self.dtype.size()
    }

    /// Rows `range` of a matrix, in stored order.
    ///
    /// # Panics
    /// If the range is out of bounds or the view already reorders its rows.
    #[must_use]
    pub fn slice_rows(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.rows() && self.order == RowOrder::Stored, "{}: rows {range:?}", self.name);
        let mut view = self.clone();
        view.offset += range.start * self.row_stride * self.dtype.size();
        view.shape[0] = range.len();
        view
    }

    /// Columns `range` of a matrix.
    ///
    /// # Panics
    /// If the weight is not a matrix or the range is out of bounds.
    #[must_use]
    pub fn slice_columns(&self, range: Range<usize>) -> Self {
        assert!(self.shape.len() == 2 && range.end <= self.shape[1], "{}: columns {range:?}", self.name);
        let mut view = self.clone();
        view.offset += range.start * self.dtype.size();
        view.shape[1] = range.len();
        view
    }

    /// The same rows read in another order.
    ///
    /// # Panics
    /// If the rows are not whole heads.
    #[must_use]
    pub fn with_row_order(&self, order: RowOrder) -> Self {
        if let RowOrder::HalfSplitToPairs { head_dim } = order {
            assert!(head_dim % 2 == 0 && self.rows().is_multiple_of(head_dim), "{}: {order:?}", self.name);
        }
        Self { order, ..self.clone() }
    }

    /// How rows are ordered.
    pub fn row_order(&self) -> RowOrder {
        self.order
    }

    /// Stored bytes of row `row` of the view: `row_len()` elements of `dtype()`, little-endian, not aligned.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let stored = match self.order {
            RowOrder::Stored => row,
            RowOrder::HalfSplitToPairs { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                head * head_dim + (within % 2) * (head_dim / 2) + within / 2
            }
        };
        let start = self.offset + stored * self.row_stride * self.dtype.size();
        &self.storage.bytes()[start..start + self.row_len() * self.dtype.size()]
    }

    /// The weight in bf16: itself if it is stored so, else rounded to nearest even, ties to even, in memory of its own.
    #[must_use]
    pub fn rounded(&self) -> Self {
        if self.dtype == DType::Bf16 {
            return self.clone();
        }
        let mut bytes = Vec::with_capacity(self.stored_bytes() / 2);
        for row in 0..self.rows() {
            for value in self.row_f32(row) {
                bytes.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes());
            }
        }
        Self::new(&self.name, Storage::Owned(Arc::new(bytes)), 0, DType::Bf16, &self.shape)
    }

    /// Whether the view lies in a memory map, so that a device may use the pages in place.
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped(_))
    }

    /// Row `row` widened to f32.
    pub fn row_f32(&self, row: usize) -> Vec<f32> {
        if matches!(self.storage, Storage::Absent) {
            return vec![0.0; self.row_len()];
        }
        let bytes = self.row_bytes(row);
        match self.dtype {
            DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::Bf16 => {
                bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
        }
    }

    /// All values widened to f32, row-major in the view's order.
    pub fn to_f32(&self) -> Vec<f32> {
        (0..self.rows()).flat_map(|row| self.row_f32(row)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_orders_read_the_right_rows() {
        let w = Weight::from_f32("w", &(0..24).map(|v| v as f32).collect::<Vec<_>>(), &[4, 6]);
        assert_eq!(w.slice_rows(1..3).slice_columns(2..4).to_f32(), [8.0, 9.0, 14.0, 15.0]);
        let pairs = w.slice_columns(0..1).with_row_order(RowOrder::HalfSplitToPairs { head_dim: 4 });
        assert_eq!(pairs.to_f32(), [0.0, 12.0, 6.0, 18.0]);
    }

    #[test]
    fn a_vector_is_rows_of_one_element() {
        let w = Weight::from_f32_as_bf16("v", &[1.0, 2.5], &[2]);
        assert_eq!((w.rows(), w.row_len(), w.to_f32()), (2, 1, vec![1.0, 2.5]));
    }
}
