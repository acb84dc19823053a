//! `malloc`: the process's own allocator, as a program without a pool uses it. It knows no device
//! addresses, and its memory is where the allocator puts it.

use std::mem::MaybeUninit;

/// A block of `N` bytes from the process's allocator, aligned as `malloc` aligns: more takes a
/// slower path of glibc.
#[derive(Debug)]
pub struct Malloced<const N: usize>(Box<Line<N>>);

#[derive(Debug)]
#[repr(align(16))]
struct Line<const N: usize>([MaybeUninit<u8>; N]);

impl<const N: usize> Malloced<N> {
    /// Allocates a block without touching its bytes.
    #[inline]
    pub fn alloc() -> Self {
        Self(Box::new(Line([const { MaybeUninit::uninit() }; N])))
    }

    /// Returns its address.
    #[inline]
    pub fn address(&self) -> usize {
        std::ptr::from_ref(&self.0.0).addr()
    }

    /// Writes the first word.
    #[inline]
    pub fn write(&mut self, word: u64) {
        if let Some(first) = self.0.0.first_chunk_mut::<8>() {
            *first = word.to_ne_bytes().map(MaybeUninit::new);
        }
    }

    /// Writes the first 64 bytes.
    #[inline]
    pub fn write_line(&mut self, words: [u64; 8]) {
        for (bytes, word) in self.0.0.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.to_ne_bytes().map(MaybeUninit::new);
        }
    }
}
