// SPDX-License-Identifier: Apache-2.0
//! The last encodings of reference images, so that a source image used again costs nothing.

use std::{collections::VecDeque, sync::Arc};

use sha2::{Digest, Sha256};

use crate::reference::ReferencePixels;

/// Encodings kept, as in the original port's `REF_CACHE_SIZE`.
pub const CAPACITY: usize = 4;

/// Pixel content *and* geometry: two images with the same bytes in another shape are two references.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// Key of a prepared reference.
    pub fn of(pixels: &ReferencePixels) -> Self {
        let mut hash = Sha256::new();
        hash.update((pixels.height as u64).to_le_bytes());
        hash.update((pixels.width as u64).to_le_bytes());
        hash.update(bytemuck::cast_slice::<f32, u8>(&pixels.values));
        Self(hash.finalize().into())
    }
}

/// Latent tokens by key, least recently used first.
#[derive(Default)]
pub struct ReferenceCache {
    entries: VecDeque<(Key, Arc<Vec<f32>>)>,
}

impl ReferenceCache {
    /// The tokens of a reference, if they are here; it becomes the most recent.
    pub fn get(&mut self, key: &Key) -> Option<Arc<Vec<f32>>> {
        let index = self.entries.iter().position(|(known, _)| known == key)?;
        let entry = self.entries.remove(index)?;
        let tokens = Arc::clone(&entry.1);
        self.entries.push_back(entry);
        Some(tokens)
    }

    /// Keeps the tokens of a reference, dropping the least recently used.
    pub fn insert(&mut self, key: Key, tokens: Arc<Vec<f32>>) {
        if self.entries.len() == CAPACITY {
            self.entries.pop_front();
        }
        self.entries.push_back((key, tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pixels(height: usize, width: usize, value: f32) -> ReferencePixels {
        ReferencePixels { height, width, values: vec![value; height * width * 3] }
    }

    #[test]
    fn keeps_the_last_four_used() {
        let keys: Vec<_> = (0..5).map(|i| Key::of(&pixels(16, 16, i as f32))).collect();
        let mut cache = ReferenceCache::default();
        for (i, key) in keys.iter().enumerate().take(4) {
            cache.insert(key.clone(), Arc::new(vec![i as f32]));
        }
        assert_eq!(*cache.get(&keys[0]).expect("kept"), [0.0]);
        cache.insert(keys[4].clone(), Arc::new(vec![4.0]));
        assert!(cache.get(&keys[1]).is_none(), "the least recently used went");
        assert!(cache.get(&keys[0]).is_some());
    }

    #[test]
    fn geometry_is_part_of_the_key() {
        assert!(Key::of(&pixels(16, 32, 0.5)) != Key::of(&pixels(32, 16, 0.5)));
    }
}
