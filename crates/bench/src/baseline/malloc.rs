//! `malloc`: the process's own allocator, aligned; what a program does that has no pool. It knows no device address.

use std::mem::MaybeUninit;

/// A block of `N` bytes on a cache line of its own, from the process's allocator.
#[derive(Debug)]
pub struct Malloced<const N: usize>(Box<Line<N>>);

#[derive(Debug)]
#[repr(align(64))]
struct Line<const N: usize>(MaybeUninit<[u8; N]>);

impl<const N: usize> Malloced<N> {
    /// One block, its bytes untouched.
    pub fn alloc() -> Self {
        Self(Box::new(Line(MaybeUninit::uninit())))
    }

    /// Where it lies.
    pub fn address(&self) -> usize {
        std::ptr::from_ref(&self.0.0).addr()
    }
}
