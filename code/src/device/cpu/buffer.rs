// SPDX-License-Identifier: Apache-2.0
//! Memory of tensors, scratch memory of threads, and writing to one buffer from many threads.

use std::{
    cell::RefCell,
    marker::PhantomData,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
};

use memmap2::MmapMut;

use super::recycle;
use crate::device::Shape;

/// Values from which a buffer is mapped in huge pages: 4 MiB.
const HUGE: usize = 1 << 20;

/// Values of a cache line.
const LINE: usize = 16;

/// Values of a tensor, aligned to cache lines. Large ones are mapped in huge pages: a fresh page costs the system more than
/// the kernels take to fill it, and 2 MiB pages cost a tenth. Even so, clearing them takes as long as a fifth of a fast
/// product, so that they are kept for the next tensor of the same size ([`recycle`]).
pub enum Buffer {
    /// From the allocator: the values, and where in them the first cache line starts and the last value ends.
    Heap(Vec<f32>, Range<usize>),
    /// From the system, and how many values there are. Taken only when it is dropped.
    Mapped(Option<MmapMut>, usize),
}

impl Buffer {
    /// `len` zeros, of which pages exist once they are written.
    pub fn zeros(len: usize) -> Self {
        if len >= HUGE
            && let Ok(map) = MmapMut::map_anon(len * size_of::<f32>())
        {
            #[cfg(target_os = "linux")]
            // Small pages do too, only more slowly.
            let _ = map.advise(memmap2::Advice::HugePage);
            recycle::count(map.len());
            return Self::Mapped(Some(map), len);
        }
        // Tile loads that straddle cache lines take twice the time.
        let values = vec![0.0; len + LINE - 1];
        let start = values.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE - 1);
        Self::Heap(values, start..start + len)
    }
    /// `len` values, whatever was left there: for what is overwritten at once.
    pub fn dirty(len: usize) -> Self {
        if len >= HUGE
            && let Some(map) = recycle::take(len * size_of::<f32>())
        {
            return Self::Mapped(Some(map), len);
        }
        Self::zeros(len)
    }
    /// A copy of `values`.
    pub fn copy(values: &[f32]) -> Self {
        let mut copy = Self::dirty(values.len());
        copy.copy_from_slice(values);
        copy
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Heap(values, range) => &values[range.clone()],
            Self::Mapped(map, len) => map.as_ref().map_or(&[], |map| &bytemuck::cast_slice(map)[..*len]),
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Heap(values, range) => &mut values[range.clone()],
            Self::Mapped(map, len) => {
                map.as_mut().map_or(&mut [], |map| &mut bytemuck::cast_slice_mut(map)[..*len])
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Self::Mapped(map, _) = self
            && let Some(map) = map.take()
        {
            recycle::put(map);
        }
    }
}

/// Rows or an image: a range of a shared buffer, so that views cost nothing.
pub struct CpuTensor {
    data: Arc<Buffer>,
    range: Range<usize>,
    shape: Shape,
}

impl CpuTensor {
    /// A tensor of its own buffer.
    pub fn new(data: Buffer, shape: Shape) -> Self {
        debug_assert_eq!(data.len(), shape.elements());
        Self { range: 0..data.len(), data: Arc::new(data), shape }
    }
    /// The same values under another shape.
    #[must_use]
    pub fn view(&self, shape: Shape) -> Self {
        debug_assert_eq!(self.range.len(), shape.elements());
        Self { data: Arc::clone(&self.data), range: self.range.clone(), shape }
    }
    /// Rows `rows`.
    #[must_use]
    pub fn slice(&self, rows: &Range<usize>) -> Self {
        let columns = self.columns();
        let start = self.range.start + rows.start * columns;
        let range = start..start + rows.len() * columns;
        Self { data: Arc::clone(&self.data), range, shape: Shape::Rows(rows.len(), columns) }
    }
    /// All values, row-major.
    pub fn values(&self) -> &[f32] {
        &self.data[self.range.clone()]
    }
    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }
    /// Rows, or pixels.
    pub fn rows(&self) -> usize {
        match self.shape {
            Shape::Rows(rows, _) => rows,
            Shape::Image(height, width, _) => height * width,
        }
    }
    /// Columns, or channels.
    pub fn columns(&self) -> usize {
        match self.shape {
            Shape::Rows(_, columns) | Shape::Image(_, _, columns) => columns,
        }
    }
    /// `[height, width, channels]`; rows are an image one pixel wide.
    pub fn image(&self) -> [usize; 3] {
        match self.shape {
            Shape::Rows(rows, columns) => [rows, 1, columns],
            Shape::Image(height, width, channels) => [height, width, channels],
        }
    }
}

/// A buffer that several threads write, each to places of its own.
#[derive(Clone, Copy)]
pub struct Shared<'a, V = f32> {
    start: *mut V,
    len: usize,
    lives: PhantomData<&'a mut [V]>,
}

// SAFETY: only `get` gives access, whose contract forbids two threads the same place.
unsafe impl<V: Send> Send for Shared<'_, V> {}
// SAFETY: as above.
unsafe impl<V: Send> Sync for Shared<'_, V> {}

impl<'a, V> Shared<'a, V> {
    /// Shares `buffer` for as long as it is borrowed.
    pub fn new(buffer: &'a mut [V]) -> Self {
        Self { start: buffer.as_mut_ptr(), len: buffer.len(), lives: PhantomData }
    }
    /// A part of the buffer.
    ///
    /// # Safety
    /// Nobody else uses any place of this range while the result lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the contract above is what keeps the ranges apart")]
    pub unsafe fn get(&self, range: Range<usize>) -> &'a mut [V] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the shared buffer");
        // SAFETY: inside the buffer, which is borrowed for 'a, and nobody else's by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// A cache line, so that scratch memory is aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with this thread's scratch memory, split into parts of at least `sizes` values, each aligned to 64 bytes.
/// The values are whatever was left there. Does not nest.
pub fn with_scratch<const N: usize, R>(sizes: [usize; N], work: impl FnOnce([&mut [f32]; N]) -> R) -> R {
    let lines = sizes.map(|size| size.div_ceil(16));
    SCRATCH.with_borrow_mut(|scratch| {
        let total: usize = lines.iter().sum();
        if scratch.len() < total {
            scratch.resize(total, Line([0.0; 16]));
        }
        let mut rest = scratch.as_mut_slice();
        work(lines.map(|count| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(count);
            rest = after;
            // SAFETY: `Line` is an array of 16 f32 without padding.
            unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<f32>(), 16 * count) }
        }))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::float_cmp, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn scratch_parts_are_apart_and_aligned() {
        with_scratch([3, 40], |[a, b]| {
            assert_eq!((a.len(), b.len()), (16, 48));
            assert!(a.as_ptr().addr() % 64 == 0 && b.as_ptr().addr() % 64 == 0);
            a.fill(1.0);
            b.fill(2.0);
            assert!(a.iter().all(|v| *v == 1.0));
        });
    }
}
