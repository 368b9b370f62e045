// SPDX-License-Identifier: Apache-2.0
//! What a caller is told while bytes move.

/// Follows a transfer. Totals are known before the first byte.
pub trait Progress: Send + Sync {
    /// The transfer starts: bytes and files of the whole, and the bytes of it that are there already.
    fn start(&self, _bytes: u64, _there: u64, _files: usize) {}
    /// Bytes arrived; negative if they had to be thrown away.
    fn add(&self, _bytes: i64) {}
    /// Something that a person should know: a retry, a wait, a fall back.
    fn note(&self, _text: &str) {}
    /// The transfer is over, one way or the other.
    fn finish(&self) {}
}

/// Says nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}

/// Decimal units, as the Hub shows sizes.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
