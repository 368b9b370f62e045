// SPDX-License-Identifier: Apache-2.0
//! Rotary position tables of the DiT and of the text encoder, one entry per pair of a head's columns.
//!
//! The two models compute their angles in different precision, and the pictures follow: the DiT in f64 (diffusers
//! `get_1d_rotary_pos_embed`), the text encoder in f32 (transformers `Qwen3RotaryEmbedding`). diffusers stores every
//! value twice, adjacently; transformers stores the whole row twice. Here each value is stored once.

use std::ops::Range;

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

    /// A table of the cosine and sine of every angle, rounded once to f32.
    fn from_angles(rows: usize, pairs: usize, angles: impl Iterator<Item = f64>) -> Self {
        let (sin, cos) = angles.map(f64::sin_cos).map(|(s, c)| (s as f32, c as f32)).unzip();
        Self::new(rows, pairs, cos, sin)
    }
}

/// The DiT's table for tokens at `ids` (t, h, w, l), `axes[a]` columns of a head for axis `a`.
///
/// Pair `k` of axis `a` turns by `ids[a] / theta^(2k / axes[a])`, in f64.
///
/// # Panics
/// If there are more than four axes.
pub fn dit_table(ids: &[[i32; 4]], axes: &[usize], theta: f64) -> RotaryTable {
    assert!(axes.len() <= 4, "an id has four axes, asked for {}", axes.len());
    let frequencies: Vec<(usize, f64)> = axes
        .iter()
        .enumerate()
        .flat_map(|(axis, &columns)| {
            let frequency = move |k: usize| 1.0 / theta.powf((2 * k) as f64 / columns as f64);
            (0..columns / 2).map(move |k| (axis, frequency(k)))
        })
        .collect();
    let angles = ids.iter().flat_map(|id| frequencies.iter().map(|&(axis, f)| f64::from(id[axis]) * f));
    RotaryTable::from_angles(ids.len(), frequencies.len(), angles)
}

/// The text encoder's table: pair `j` turns by `position · inv_j` with `inv_j = 1 / theta^(2j / head_dim)`, each of
/// exponent, power, reciprocal and product rounded to f32.
///
/// Power, cosine and sine are taken in f64 and rounded, so the table is the same on every host; torch's own vectorised
/// functions may be one unit in the last place away.
pub fn text_table(positions: Range<usize>, head_dim: usize, theta: f64) -> RotaryTable {
    let inverse: Vec<f32> = (0..head_dim / 2)
        .map(|j| {
            let exponent = (2 * j) as f32 / head_dim as f32;
            1.0 / theta.powf(f64::from(exponent)) as f32
        })
        .collect();
    let angles = positions.clone().flat_map(|p| inverse.iter().map(move |&inv| f64::from(p as f32 * inv)));
    RotaryTable::from_angles(positions.len(), inverse.len(), angles)
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn each_axis_turns_its_own_pairs() {
        let table = dit_table(&[[0, 0, 0, 0], [10, 2, 3, 0]], &[4, 4, 4, 4], 2000.0);
        assert_eq!((table.rows(), table.pairs()), (2, 8));
        assert!(table.cos[..8].iter().all(|&c| c == 1.0) && table.sin[..8].iter().all(|&s| s == 0.0));
        let slow = 1.0 / 2000f64.sqrt();
        let wanted = [10.0, 10.0 * slow, 2.0, 2.0 * slow, 3.0, 3.0 * slow, 0.0, 0.0];
        for (pair, angle) in wanted.into_iter().enumerate() {
            assert_eq!(table.cos[8 + pair], angle.cos() as f32, "pair {pair}");
            assert_eq!(table.sin[8 + pair], angle.sin() as f32, "pair {pair}");
        }
    }

    #[test]
    fn klein_has_sixteen_frequencies_on_each_of_four_axes() {
        let table = dit_table(&[[1, 1, 1, 1]], &[32; 4], 2000.0);
        assert_eq!(table.pairs(), 64);
        assert_eq!(table.cos[..16], table.cos[48..]);
    }

    #[test]
    fn text_positions_start_where_the_range_does() {
        let whole = text_table(0..512, 128, 1e6);
        let tail = text_table(500..512, 128, 1e6);
        assert_eq!((whole.rows(), whole.pairs()), (512, 64));
        assert_eq!(whole.cos[500 * 64..], tail.cos);
        assert_eq!(whole.sin[500 * 64..], tail.sin);
        assert_eq!(whole.sin[64], 1f32.sin());
    }
}
