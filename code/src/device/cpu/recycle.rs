// SPDX-License-Identifier: Apache-2.0
//! Large buffers that were dropped, kept for the next of the same size, so that the system need not clear their pages again.
//!
//! What is in use and what is kept together never pass the most that was in use at once: keeping costs no peak. Nothing is
//! kept when nothing is in use.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use memmap2::MmapMut;

static KEPT: Mutex<Kept> = Mutex::new(Kept { maps: VecDeque::new(), bytes: 0, used: 0, most: 0 });

struct Kept {
    /// The oldest first.
    maps: VecDeque<MmapMut>,
    /// Of `maps`.
    bytes: usize,
    /// In use now, and at most so far.
    used: usize,
    most: usize,
}

impl Kept {
    /// Counts a map as in use and gives back what would make a new peak.
    fn use_more(&mut self, bytes: usize) {
        self.used += bytes;
        self.most = self.most.max(self.used);
        self.trim();
    }
    fn trim(&mut self) {
        let most = if self.used == 0 { 0 } else { self.most };
        while self.used + self.bytes > most
            && let Some(map) = self.maps.pop_front()
        {
            self.bytes -= map.len();
        }
    }
}

fn with<R>(work: impl FnOnce(&mut Kept) -> R) -> R {
    work(&mut KEPT.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A new map of so many bytes is in use.
pub fn count(bytes: usize) {
    with(|kept| kept.use_more(bytes));
}

/// A kept map of exactly so many bytes, the one used last: its pages may still be in a cache.
pub fn take(bytes: usize) -> Option<MmapMut> {
    with(|kept| {
        let index = kept.maps.iter().rposition(|map| map.len() == bytes)?;
        let map = kept.maps.remove(index)?;
        kept.bytes -= bytes;
        kept.use_more(bytes);
        Some(map)
    })
}

/// Keeps a map that is no longer in use.
pub fn put(map: MmapMut) {
    with(|kept| {
        kept.used = kept.used.saturating_sub(map.len());
        kept.bytes += map.len();
        kept.maps.push_back(map);
        kept.trim();
    });
}
