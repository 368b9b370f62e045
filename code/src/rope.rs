// SPDX-License-Identifier: Apache-2.0
//! Rotary position tables of the DiT and of the text encoder, one entry per adjacent pair of a head's columns.

/// Cosines and sines `[rows, pairs]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryTable {
    rows: usize,
    pairs: usize,
    /// Cosines, row-major.
    pub cos: Vec<f32>,
    /// Sines, row-major.
    pub sin: Vec<f32>,
}

impl RotaryTable {
    /// A table from its values.
    ///
    /// # Panics
    /// If the lengths are not `rows * pairs`.
    pub fn new(rows: usize, pairs: usize, cos: Vec<f32>, sin: Vec<f32>) -> Self {
        assert!(cos.len() == rows * pairs && sin.len() == rows * pairs, "rotary table lengths");
        Self { rows, pairs, cos, sin }
    }
    /// Positions.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Half the head dimension.
    pub fn pairs(&self) -> usize {
        self.pairs
    }
}
