//! Constraints are satisfied or refused; allocations last from the call to the free.

use crate::common::{ANYWHERE, Claims, PAGE, Rig, iova};
use dma_api::{DmaConstraints, DmaDirection, DmaError, DmaOp};
use pinfold_core::access::Access;
use pinfold_soft::SoftConfig;
use std::alloc::Layout;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

fn rig() -> Rig {
    Rig::new(SoftConfig::default())
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// Allocates, checks, and frees; returns the addresses.
fn allocated(rig: &Rig, constraints: DmaConstraints, layout: Layout) -> Option<(u64, usize)> {
    // SAFETY: freed below, and not accessed afterwards.
    let handle = unsafe { rig.platform.alloc_contiguous(constraints, layout) }?;
    let (at, cpu) = (handle.dma_addr().as_u64(), handle.as_ptr().addr().get());
    assert_eq!((handle.layout(), handle.allocation_ptr()), (layout, handle.as_ptr()));
    assert_eq!(rig.mapped().len() as u64, (layout.size() as u64).div_ceil(PAGE));
    // SAFETY: as above.
    unsafe { rig.platform.dealloc_contiguous(handle) };
    rig.nothing_is_reachable(&[handle.dma_addr()]);
    Some((at, cpu))
}

#[test]
fn an_allocation_is_reachable_until_it_is_freed() {
    let rig = rig();
    let dma = rig.platform.device(ANYWHERE);
    let mut ring = dma.coherent_array_zero::<u64>(1000).unwrap();
    let at = ring.dma_addr();
    ring.set_cpu(999, 7);
    rig.port.write(iova(at), &9u64.to_ne_bytes()).unwrap();
    let mut last = [0; 8];
    rig.port.read(iova(at).checked_add(999 * 8).unwrap(), &mut last).unwrap();
    assert_eq!((ring.read_cpu(0), last), (Some(9), 7u64.to_ne_bytes()));
    // Behind it, nothing of what the frames held.
    let mut rest = [1; 8192 - 8000];
    rig.port.read(iova(at).checked_add(8000).unwrap(), &mut rest).unwrap();
    assert_eq!(rest, [0; 192]);
    let pages = rig.mapped();
    assert!(pages.len() == 2 && pages.values().all(|access| *access == Access::all()));
    assert_eq!((rig.platform.stats().live, rig.platform.stats().live_bytes), (1, 8192));
    drop(ring);
    rig.nothing_is_reachable(&[at]);
    let stats = rig.platform.stats();
    assert_eq!((stats.allocations, stats.maps, stats.is_clean()), (1, 0, true), "{stats}");
}

#[test]
fn contiguous_memory_has_the_same_life() {
    let rig = rig();
    let dma = rig.platform.device(ANYWHERE);
    let mut data =
        dma.contiguous_array_zero_with_align::<u8>(5000, 64, DmaDirection::ToDevice).unwrap();
    data.copy_to_device_from_slice(&[3; 5000]);
    let at = data.dma_addr();
    let mut seen = [0; 5000];
    rig.port.read(iova(at), &mut seen).unwrap();
    assert_eq!(seen, [3; 5000]);
    drop(data);
    rig.nothing_is_reachable(&[at]);
}

#[test]
fn the_domain_of_a_device_is_named_by_its_number() {
    let (one, other) = (rig(), rig());
    let id = |rig: &Rig| rig.platform.device(ANYWHERE).info().domain();
    assert_ne!(id(&one), id(&other));
    assert!(format!("{:?}", id(&one)).contains(&one.domain.id().number().to_string()));
}

#[test]
fn addresses_are_within_the_mask() {
    let rig = rig();
    let (high, _) = allocated(&rig, ANYWHERE, layout(100, 1)).unwrap();
    assert!(high > 0);
    for mask in [u64::from(u32::MAX), 0xff_ffff, 0x1_ffff, 0x1fff] {
        let (at, _) = allocated(&rig, DmaConstraints::new(mask), layout(100, 1)).unwrap();
        assert!(at != 0 && at + 99 <= mask, "{at:#x} {mask:#x}");
    }
    for mask in [0, 0xfff, 0x1ffe] {
        assert_eq!(allocated(&rig, DmaConstraints::new(mask), layout(100, 1)), None, "{mask:#x}");
    }
    assert_eq!(rig.platform.stats().refused, 3);
    rig.nothing_is_reachable(&[]);
}

#[test]
fn alignments_beyond_a_page_hold_for_both_addresses() {
    let rig = rig();
    // Taken, so that the next free addresses are not aligned by chance.
    let odd = rig.platform.device(ANYWHERE).coherent_array_zero::<u8>(1).unwrap();
    for align in [1, 64, 4096, 8192, 1 << 16, 2 << 20] {
        // SAFETY: freed below.
        let one = unsafe { rig.platform.alloc_contiguous(ANYWHERE, layout(4097, align)) }.unwrap();
        let both = one.dma_addr().as_u64() | one.as_ptr().addr().get() as u64;
        assert!(both.is_multiple_of(align as u64), "{align}: {both:#x}");
        // SAFETY: not used afterwards.
        unsafe { rig.platform.dealloc_contiguous(one) };
        // Of the constraints it counts too.
        let (at, _) = allocated_beside(&rig, ANYWHERE.with_align(align));
        assert!(at.is_multiple_of(align as u64));
    }
    let at = odd.dma_addr();
    drop(odd);
    rig.nothing_is_reachable(&[at]);
}

/// Like `allocated`, beside other allocations.
fn allocated_beside(rig: &Rig, constraints: DmaConstraints) -> (u64, usize) {
    // SAFETY: freed below.
    let one = unsafe { rig.platform.alloc_contiguous(constraints, layout(10, 1)) }.unwrap();
    // SAFETY: not used afterwards.
    unsafe { rig.platform.dealloc_contiguous(one) };
    (one.dma_addr().as_u64(), one.as_ptr().addr().get())
}

#[test]
fn no_boundary_is_crossed() {
    let rig = rig();
    let _odd = rig.platform.device(ANYWHERE).coherent_array_zero::<u8>(1).unwrap();
    for (size, boundary) in [(1, 1), (4096, 4096), (8192, 8192), (12288, 1 << 16), (65536, 1 << 16)]
    {
        for _ in 0..4 {
            let constraints = ANYWHERE.with_boundary(boundary);
            // SAFETY: leaked, so that the next one is elsewhere.
            let one = unsafe { rig.platform.alloc_contiguous(constraints, layout(size, 1)) };
            let at = one.unwrap().dma_addr().as_u64();
            let (last, boundary) = (at + size as u64 - 1, boundary as u64);
            assert_eq!(at / boundary, last / boundary, "{size} {boundary} {at:#x}");
        }
    }
    for (size, boundary) in [(2, 1), (4097, 4096), (8192, 12288)] {
        let constraints = ANYWHERE.with_boundary(boundary);
        // SAFETY: nothing is allocated.
        let one = unsafe { rig.platform.alloc_contiguous(constraints, layout(size, 1)) };
        assert_eq!(one, None, "{size} {boundary}");
    }
}

#[test]
fn what_cannot_be_satisfied_is_refused_by_name() {
    let rig = rig();
    let map = |constraints: DmaConstraints, size: usize| {
        let mut data = vec![0u8; size];
        let at = NonNull::new(data.as_mut_ptr()).unwrap();
        let size = NonZeroUsize::new(size).unwrap();
        // SAFETY: refused: nothing refers to the data afterwards.
        unsafe { rig.platform.map_streaming(constraints, at, size, DmaDirection::ToDevice) }
    };
    let size = 8192;
    assert_eq!(
        map(ANYWHERE.with_max_segment_size(8191), size),
        Err(DmaError::SegmentTooLarge { size, max: 8191 })
    );
    let crossed = map(ANYWHERE.with_boundary(4096), size);
    assert!(matches!(crossed, Err(DmaError::BoundaryCross { size: 8192, boundary: 4096, .. })));
    let uneven = map(ANYWHERE.with_align(24), size);
    assert!(matches!(uneven, Err(DmaError::AlignMismatch { required: 24, .. })));
    let huge = map(ANYWHERE.with_align(1 << 63), size);
    assert!(matches!(huge, Err(DmaError::LayoutError(_))), "{huge:?}");
    assert_eq!(map(DmaConstraints::new(0x1ffe), size), Err(DmaError::NoMemory));
    assert_eq!((rig.platform.stats().refused, rig.platform.stats().maps), (5, 0));
    rig.nothing_is_reachable(&[]);
    // At the limit.
    assert!(allocated(&rig, ANYWHERE.with_max_segment_size(size), layout(size, 1)).is_some());
}

#[test]
fn an_allocation_of_nothing_takes_nothing() {
    let rig = rig();
    let dma = rig.platform.device(DmaConstraints::new(0));
    let none = dma.coherent_array_zero_with_align::<u64>(0, 1 << 20).unwrap();
    assert_eq!((none.len(), rig.lent(), rig.platform.stats().live), (0, 0, 0));
    drop(none);
    // SAFETY: of no bytes.
    let none = unsafe { rig.platform.alloc_coherent(ANYWHERE, layout(0, 4096)) }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { rig.platform.dealloc_coherent(none) }, Ok(()));
    assert!(rig.platform.stats().is_clean());
}

#[test]
fn memory_that_a_free_could_not_revoke_is_refused() {
    let claims = |claims: Claims| Rig::with(SoftConfig::default(), claims);
    for rig in [
        claims(Claims { fixed: true, ..Claims::default() }),
        claims(Claims { shared: true, ..Claims::default() }),
        claims(Claims { short: 1, ..Claims::default() }),
        claims(Claims { none: true, ..Claims::default() }),
    ] {
        assert_eq!(allocated(&rig, ANYWHERE, layout(8192, 1)), None);
        assert_eq!(rig.platform.stats().refused, 1);
        rig.nothing_is_reachable(&[]);
    }
}
