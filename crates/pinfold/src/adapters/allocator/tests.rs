//! Vectors in arenas: contents, frames, alignments, and a device that fills them.

use super::*;
use crate::Arena;
use crate::{Domain, MappingPolicy, Source};
use allocator_api2::boxed::Box as DmaBox;
use pinfold_core::access::{FromDevice, ToDevice};
use proptest::prelude::*;
use std::sync::LazyLock;

fn arena(bytes: u64) -> (Domain, Arena, ArenaAlloc) {
    let domain = Domain::soft().unwrap();
    let arena = Arena::builder().size(bytes).source(Source::Plain).build(&domain).unwrap();
    let alloc = ArenaAlloc::new(&arena).unwrap();
    (domain, arena, alloc)
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn an_arena_that_others_may_write_is_not_an_allocator() {
    let domain = Domain::soft().unwrap();
    for (mapping_policy, source) in
        [(MappingPolicy::Whole, Source::Plain), (MappingPolicy::PerUse, Source::Memfd)]
    {
        let arena = Arena::builder()
            .size(1 << 20)
            .mapping_policy(mapping_policy)
            .source(source)
            .build(&domain)
            .unwrap();
        assert_eq!(ArenaAlloc::new(&arena).unwrap_err(), NotExclusive);
    }
}

#[test]
fn a_vector_grows_shrinks_and_is_freed() {
    let (_domain, arena, alloc) = arena(4 << 20);
    let mut vec = Vec::new_in(alloc);
    vec.extend((0..100_000_u32).map(|i| i.wrapping_mul(7)));
    let holds = |vec: &[u32]| vec.iter().zip(0_u32..).all(|(value, i)| *value == i.wrapping_mul(7));
    assert!(holds(&vec));
    vec.truncate(1025);
    let (addr, before) = (vec.as_ptr(), arena.stats().frames_in_use);
    vec.shrink_to_fit();
    assert_eq!(
        (vec.as_ptr(), arena.stats().frames_in_use),
        (addr, 2),
        "from {before} frames, in place"
    );
    assert!(holds(&vec));
    drop(vec);
    assert_eq!(arena.stats().frames_in_use, 0);
}

#[test]
fn a_vector_in_a_full_arena_can_shrink() {
    let (_domain, arena, alloc) = arena(1 << 20);
    let mut vec: Vec<u8, _> = Vec::with_capacity_in(1 << 20, alloc.clone());
    vec.extend_from_slice(&[5; 9000]);
    assert_eq!(alloc.allocate(layout(1, 1)), Err(AllocError), "no frame is free");
    vec.shrink_to_fit();
    assert_eq!(arena.stats().frames_in_use, 3);
    assert!(vec.iter().all(|byte| *byte == 5));
    drop(DmaBox::new_in([1_u8; 4096], alloc));
    drop(vec);
    assert_eq!(arena.stats().frames_in_use, 0);
}

#[test]
fn zero_sized_types_take_no_frames_and_are_aligned() {
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Nothing;
    let (_domain, arena, alloc) = arena(1 << 20);
    let mut vec = Vec::new_in(alloc.clone());
    vec.extend([Nothing; 1000]);
    let boxed = DmaBox::new_in(Nothing, alloc.clone());
    assert!((&raw const *boxed).addr().is_multiple_of(64));
    let ptr = alloc.allocate(layout(0, 8192)).unwrap();
    assert!(ptr.is_empty() && ptr.addr().get().is_multiple_of(8192));
    // SAFETY: allocated with this layout.
    let grown = unsafe { alloc.grow(ptr.cast(), layout(0, 8192), layout(100, 8192)) }.unwrap();
    assert_eq!((grown.len(), grown.addr().get() % 8192), (8192, 0));
    assert_eq!(arena.stats().frames_in_use, 2);
    // SAFETY: likewise.
    let none = unsafe { alloc.shrink(grown.cast(), layout(100, 8192), layout(0, 1)) }.unwrap();
    // SAFETY: likewise.
    unsafe { alloc.deallocate(none.cast(), layout(0, 1)) };
    assert_eq!(arena.stats().frames_in_use, 0);
}

#[test]
fn alignments_up_to_2_mib_are_supported_and_larger_ones_refused() {
    let (_domain, arena, alloc) = arena(16 << 20);
    for shift in 0..=21 {
        let _one_off = alloc.allocate(layout(4096, 1)).unwrap();
        for size in [1, 4097, 3 << 20] {
            let layout = layout(size, 1 << shift);
            let ptr = alloc.allocate(layout).unwrap();
            assert!(
                ptr.addr().get().is_multiple_of(layout.align()) && ptr.len() >= size,
                "{layout:?}"
            );
            // SAFETY: allocated with a layout that this one fits, up to all that it came to.
            unsafe {
                alloc
                    .deallocate(ptr.cast(), Layout::from_size_align(ptr.len(), 1 << shift).unwrap())
            };
        }
    }
    assert_eq!(arena.stats().frames_in_use, 22);
    assert_eq!(alloc.allocate(layout(1, 4 << 20)), Err(AllocError));
    assert_eq!(alloc.allocate(layout(17 << 20, 1)), Err(AllocError));
    assert_eq!(alloc.allocate(layout(isize::MAX as usize, 1)), Err(AllocError));
    assert_eq!(arena.stats().frames_in_use, 22, "a refused allocation takes no frame");
}

#[test]
fn recycled_memory_is_zeroed_on_request() {
    let (_domain, _arena, alloc) = arena(1 << 20);
    let mut all = Vec::new_in(alloc.clone());
    all.resize(1 << 20, 0xaa_u8);
    drop(all);
    let ptr = alloc.allocate_zeroed(layout(100, 1)).unwrap();
    // SAFETY: just allocated, of that many bytes, all written.
    assert!(unsafe { ptr.as_ref() }.iter().all(|byte| *byte == 0));
    // SAFETY: allocated with this layout.
    let grown =
        unsafe { alloc.grow_zeroed(ptr.cast(), layout(100, 1), layout(50_000, 1)) }.unwrap();
    // SAFETY: as above.
    assert!(unsafe { grown.as_ref() }.iter().all(|byte| *byte == 0));
    // SAFETY: allocated with this layout.
    unsafe { alloc.deallocate(grown.cast(), layout(50_000, 1)) };
}

#[test]
fn a_device_fills_a_mapped_vector_and_loses_access_on_unmap() {
    let (domain, arena, alloc) = arena(1 << 20);
    let device = domain.port().unwrap();
    let mut vec = Vec::new_in(alloc.clone());
    vec.resize(2000, 1_u32);
    let mapped = domain.map(DmaVec::new(vec).unwrap(), FromDevice).unwrap();
    let iova = mapped.iova();
    assert_eq!(iova.len(), 8192, "exactly its frames");
    device.write(iova.start(), &[0xff; 8]).unwrap();
    let vec = mapped.unmap().unwrap().into_vec();
    assert_eq!((vec.len(), vec[0], vec[1], vec[2]), (2000, u32::MAX, u32::MAX, 1));
    device.write(iova.start(), &[0; 8]).unwrap_err();
    assert_eq!(vec[0], u32::MAX, "a late write faults");

    let mapped = domain.map(DmaVec::new(vec).unwrap(), ToDevice).unwrap();
    device.write(mapped.iova().start(), &[0; 8]).unwrap_err();
    drop(mapped);
    assert_eq!(arena.stats().frames_in_use, 0, "dropped while mapped");
    assert_eq!(DmaVec::new(Vec::<u8, _>::new_in(alloc)).unwrap_err().0.capacity(), 0);
}

proptest! {
    /// Compares with `std`'s `Vec`: the same contents after any operations, and as many frames as
    /// the capacities need.
    #[test]
    fn vectors_agree_with_std(steps in proptest::collection::vec((0_usize..3, 0_u8..4, 0_u16..6000), 1..40)) {
        // One arena for all cases: each frees every frame at its end.
        static ONE: LazyLock<(Domain, Arena, ArenaAlloc)> = LazyLock::new(|| arena(2 << 20));
        let (_, arena, alloc) = &*ONE;
        let mut vecs: [Vec<u16, ArenaAlloc>; 3] = std::array::from_fn(|_| Vec::new_in(alloc.clone()));
        let mut model: [std::vec::Vec<u16>; 3] = Default::default();
        for (which, what, n) in steps {
            let (vec, model) = (&mut vecs[which], &mut model[which]);
            match what {
                0 => {
                    vec.resize(n.into(), n);
                    model.resize(n.into(), n);
                }
                1 => {
                    vec.truncate(n.into());
                    model.truncate(n.into());
                    vec.shrink_to_fit();
                }
                2 => {
                    vec.extend_from_slice(&[7; 33]);
                    model.extend_from_slice(&[7; 33]);
                }
                _ => {
                    *vec = Vec::new_in(alloc.clone());
                    model.clear();
                }
            }
            prop_assert_eq!(&vec[..], &model[..]);
            let frames: usize = vecs.iter().map(|vec| (vec.capacity() * 2).div_ceil(FRAME)).sum();
            prop_assert_eq!(arena.stats().frames_in_use, frames as u64);
        }
        drop(vecs);
        prop_assert_eq!(arena.stats().frames_in_use, 0);
    }
}
