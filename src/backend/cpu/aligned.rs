//! Buffers for vectors: one of 64 bytes that crosses a cache line takes two loads.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A buffer, zeroed at first, that begins at a cache line.
pub(super) struct Aligned<T> {
    /// With room before and behind the buffer.
    all: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    pub(super) fn new(len: usize) -> Self {
        let room = LINE.div_ceil(size_of::<T>());
        let all = vec![T::default(); len + room];
        let start = all.as_ptr().align_offset(LINE).min(room);
        Self { all, start, len }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.all[self.start..][..self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.all[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_a_line_wherever_the_allocator_puts_it() {
        let buffers: Vec<_> = (0..100).map(Aligned::<f32>::new).collect();
        for (len, buffer) in buffers.iter().enumerate() {
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % LINE), (len, 0));
        }
        assert!(Aligned::<u8>::new(3).iter().all(|byte| *byte == 0));
    }
}
