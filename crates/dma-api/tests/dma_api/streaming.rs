//! Buffers of a driver's own: by copies, in their direction, at the right time.

use crate::common::{ANYWHERE, Rig, iova};
use dma_api::{DmaCoherency, DmaDirection, DmaMapHandle, DmaOp};
use pinfold_soft::SoftConfig;
use std::alloc::Layout;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

fn rig() -> Rig {
    Rig::new(SoftConfig::default())
}

#[test]
fn the_device_reads_what_was_prepared() {
    let rig = rig();
    let dma = rig.platform.device(ANYWHERE);
    let mut data = vec![1u8; 5000];
    let mut map = dma.map_streaming_slice(&mut data, 64, DmaDirection::ToDevice).unwrap();
    let (at, mut seen) = (map.dma_addr(), [0; 8192]);
    rig.port.read(iova(at), &mut seen).unwrap();
    assert!(
        seen[..5000] == [1; 5000] && seen[5000..] == [0; 3192],
        "mapped, and nothing behind it"
    );
    map.write_with_cpu(5000, |bytes| bytes.fill(2));
    map.prepare_for_device(1000..2000);
    rig.port.read(iova(at), &mut seen).unwrap();
    assert!(seen[..1000] == [1; 1000] && seen[1000..2000] == [2; 1000] && seen[2000] == 1);
    assert!(rig.port.write(iova(at), &[9]).is_err(), "it may not write");
    map.complete_for_cpu(0..5000);
    assert_eq!(map.to_vec_cpu(), [2; 5000], "nothing is copied back");
    drop(map);
    rig.nothing_is_reachable(&[at]);
    assert_eq!(rig.platform.stats().copied_bytes, 6000);
}

#[test]
fn the_driver_reads_what_the_device_wrote_and_keeps_the_rest() {
    let rig = rig();
    let dma = rig.platform.device(ANYWHERE);
    for direction in [DmaDirection::FromDevice, DmaDirection::Bidirectional] {
        let mut data = vec![1u8; 5000];
        let mut map = dma.map_streaming_slice(&mut data, 1, direction).unwrap();
        let at = map.dma_addr();
        rig.port.write(iova(at), &[7; 100]).unwrap();
        assert_eq!(map.read_cpu(0), Some(1), "not before it is completed");
        map.complete_for_cpu(50..5000);
        assert!(map.to_vec_cpu()[..50] == [1; 50] && map.to_vec_cpu()[50..100] == [7; 50]);
        assert!(map.to_vec_cpu()[100..] == [1; 4900], "what the device did not write");
        // Used again: the device writes less than before.
        map.write_for_device(5000, |bytes| bytes.fill(3));
        rig.port.write(iova(at), &[8; 10]).unwrap();
        map.complete_for_cpu(0..5000);
        assert!(map.to_vec_cpu()[..10] == [8; 10] && map.to_vec_cpu()[10..] == [3; 4990]);
        let readable = rig.port.read(iova(at), &mut [0]).is_ok();
        assert_eq!(readable, direction == DmaDirection::Bidirectional);
        // The unmap does not undo stores of the driver after the completion.
        map.write_with_cpu(1, |bytes| bytes.fill(4));
        drop(map);
        assert_eq!(data[..2], [4, 8]);
        rig.nothing_is_reachable(&[at]);
    }
    let stats = rig.platform.stats();
    assert_eq!((stats.allocations, stats.maps, stats.is_clean()), (0, 2, true), "{stats}");
}

/// Maps bytes without the types of `dma-api`.
fn map(rig: &Rig, data: &mut [u8]) -> DmaMapHandle {
    let (at, size) = (NonNull::new(data.as_mut_ptr()).unwrap(), NonZeroUsize::new(data.len()));
    let direction = DmaDirection::Bidirectional;
    // SAFETY: every caller unmaps it before the data ends, and leaves the data alone meanwhile.
    unsafe { rig.platform.map_streaming(ANYWHERE, at, size.unwrap(), direction) }.unwrap()
}

fn complete(rig: &Rig, map: &DmaMapHandle, offset: usize, size: usize) {
    let (direction, coherency) = (DmaDirection::Bidirectional, DmaCoherency::Coherent);
    rig.platform.sync_map_for_cpu(map, offset, size, direction, coherency);
}

fn prepare(rig: &Rig, map: &DmaMapHandle, offset: usize, size: usize) {
    let (direction, coherency) = (DmaDirection::Bidirectional, DmaCoherency::Coherent);
    rig.platform.sync_map_for_device(map, offset, size, direction, coherency);
}

#[test]
fn a_synchronisation_outside_of_a_buffer_changes_nothing() {
    let rig = rig();
    let mut data = vec![1u8; 100];
    let handle = map(&rig, &mut data);
    rig.port.write(iova(handle.dma_addr()), &[7; 100]).unwrap();
    for (offset, size) in [(0, 101), (100, 1), (usize::MAX, 2), (1, usize::MAX)] {
        complete(&rig, &handle, offset, size);
        prepare(&rig, &handle, offset, size);
    }
    assert_eq!(rig.platform.stats().invalid, 8);
    assert_eq!(rig.platform.stats().copied_bytes, 100, "of the map");
    complete(&rig, &handle, 100, 0);
    // SAFETY: mapped above.
    unsafe { rig.platform.unmap_streaming(handle) };
    assert_eq!((data, rig.platform.stats().invalid), (vec![1; 100], 8));
}

#[test]
fn a_stale_handle_changes_nothing() {
    let rig = rig();
    let (mut old, mut new) = (vec![1u8; 100], vec![2u8; 100]);
    let stale = map(&rig, &mut old);
    // SAFETY: mapped above.
    unsafe { rig.platform.unmap_streaming(stale) };
    complete(&rig, &stale, 0, 100);
    let live = map(&rig, &mut new);
    assert_eq!(live.dma_addr(), stale.dma_addr(), "the address is used again");
    rig.port.write(iova(live.dma_addr()), &[7; 100]).unwrap();
    complete(&rig, &stale, 0, 100);
    prepare(&rig, &stale, 0, 100);
    // SAFETY: refused.
    unsafe { rig.platform.unmap_streaming(stale) };
    assert_eq!(rig.platform.stats().invalid, 4);
    // Nor does one of another length.
    let (at, part) = (live.as_ptr(), Layout::from_size_align(99, 1).unwrap());
    // SAFETY: a handle that is refused.
    let part = unsafe { DmaMapHandle::new(at, live.dma_addr(), part, live.bounce_ptr()) };
    // SAFETY: refused.
    unsafe { rig.platform.unmap_streaming(part) };
    assert_eq!((rig.platform.stats().invalid, rig.platform.stats().live), (5, 1));
    complete(&rig, &live, 0, 100);
    // SAFETY: mapped above.
    unsafe { rig.platform.unmap_streaming(live) };
    assert_eq!((old, new), (vec![1; 100], vec![7; 100]));
    rig.nothing_is_reachable(&[live.dma_addr()]);
}
