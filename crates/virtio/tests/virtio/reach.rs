//! The memory that the device can reach: shared memory only, in its direction, while it is shared.

use crate::common::{Driver, Rig, pattern, place};
use pinfold::soft::{Fault, FaultKind};
use pinfold_core::addr::Iova;
use pinfold_virtio::BOUNCED_BYTES;
use pinfold_virtio::model::SECTOR;
use virtio_drivers::device::blk::{BlkReq, BlkResp};

fn kind(result: Result<(), Fault>) -> Option<FaultKind> {
    result.err().map(|fault| fault.kind)
}

fn later(iova: Iova, bytes: u64) -> Iova {
    iova.checked_add(bytes).unwrap()
}

#[test]
fn a_stale_access_to_a_payload_in_place_faults() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let mut buffer = rig.stack.arena().alloc(4096).unwrap();
    rig.driver.read_blocks(0, buffer.as_mut_slice().unwrap()).unwrap();
    let data = rig.disk.given()[1];
    assert!(data.writable);
    assert_eq!(kind(rig.disk.attack(data.iova, &[0xbd; 4096])), Some(FaultKind::NotMapped));
    assert_eq!(kind(rig.disk.spy(data.iova, &mut [0; 8])), Some(FaultKind::NotMapped));
    assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == 0));
    drop(buffer);
    rig.finish();
}

/// A payload that is too long to be bounced, and no whole number of pages.
const LONG: usize = BOUNCED_BYTES + SECTOR;

#[test]
fn a_stale_access_to_a_copy_faults() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let mut data = vec![0; LONG];
    rig.driver.read_blocks(0, &mut data).unwrap();
    let given = rig.disk.given()[1];
    assert_eq!(kind(rig.disk.attack(given.iova, &[0xbd; SECTOR])), Some(FaultKind::NotMapped));
    assert!(data.iter().all(|byte| *byte == 0));
    rig.finish();
}

#[test]
fn a_copy_has_nothing_of_the_program_behind_it() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let frames = rig.stack.arena().stats().frames - rig.stack.arena().stats().frames_in_use;
    let mut secrets: Vec<_> =
        (0..frames).filter_map(|_| rig.stack.arena().alloc(4096).ok()).collect();
    secrets.iter_mut().for_each(|secret| secret.as_mut_slice().unwrap().fill(0xa5));
    drop(secrets);
    rig.disk.hold();
    for len in [SECTOR, LONG] {
        let (mut req, data, mut resp) = (BlkReq::default(), vec![7; len], BlkResp::default());
        // SAFETY: all three are neither moved nor accessed until the completion below.
        let token = unsafe { rig.driver.write_blocks_nb(0, &mut req, &data, &mut resp) }.unwrap();
        rig.disk.serve();
        // The device looks at everything on the pages of the payload, which is still shared.
        let given = rig.disk.given()[1];
        let first = Iova::new(given.iova.raw() & !4095);
        let mut seen = vec![0; len.next_multiple_of(4096)];
        rig.disk.spy(first, &mut seen).unwrap();
        assert_eq!(seen.iter().filter(|byte| **byte == 7).count(), len);
        assert!(!seen.contains(&0xa5), "what the arena's frames held before");
        // SAFETY: the same three.
        unsafe { rig.driver.complete_write_blocks(token, &req, &data, &mut resp) }.unwrap();
    }
    rig.finish();
}

#[test]
fn a_stale_access_to_a_bounced_payload_misses_the_program() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let (data, mut back) = ([7; SECTOR], [0; SECTOR]);
    rig.driver.write_blocks(0, &data).unwrap();
    let sent = rig.disk.given()[1];
    let mut seen = [1; SECTOR];
    rig.disk.spy(sent.iova, &mut seen).unwrap(); // the pool's block, free and zeroed by now
    assert_eq!(seen, [0; SECTOR]);
    assert_eq!(kind(rig.disk.attack(sent.iova, &[0xbd])), Some(FaultKind::NoWrite));
    rig.driver.read_blocks(0, &mut back).unwrap();
    let received = rig.disk.given()[1];
    rig.disk.attack(received.iova, &[0xbd; SECTOR]).unwrap();
    assert_eq!((data, back), ([7; SECTOR], [7; SECTOR]));
    assert_eq!(kind(rig.disk.spy(received.iova, &mut seen)), Some(FaultKind::NoRead));
    rig.finish();
}

#[test]
fn a_payload_to_read_cannot_be_written_nor_one_to_write_read() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    rig.disk.hold();
    let mut buffer = rig.stack.arena().alloc(8192).unwrap();
    buffer.as_mut_slice().unwrap().copy_from_slice(&pattern(8192, 9));
    let (out, into) = buffer.as_mut_slice().unwrap().split_at_mut(4096);
    let (mut req, mut resp) =
        ([BlkReq::default(), BlkReq::default()], [BlkResp::default(), BlkResp::default()]);
    let ([req_out, req_in], [resp_out, resp_in]) = (&mut req, &mut resp);

    // SAFETY: all of it is neither moved nor accessed until the completion below.
    let token = unsafe { rig.driver.write_blocks_nb(0, req_out, out, resp_out) }.unwrap();
    rig.disk.serve();
    let data = rig.disk.given()[1];
    assert_eq!(kind(rig.disk.attack(data.iova, &[0; 8])), Some(FaultKind::NoWrite));
    // SAFETY: the same.
    unsafe { rig.driver.complete_write_blocks(token, req_out, out, resp_out) }.unwrap();

    // SAFETY: as above.
    let token = unsafe { rig.driver.read_blocks_nb(0, req_in, into, resp_in) }.unwrap();
    rig.disk.serve();
    let data = rig.disk.given()[1];
    assert_eq!(kind(rig.disk.spy(data.iova, &mut [0; 8])), Some(FaultKind::NoRead));
    // The next page is not shared with the device.
    assert_eq!(kind(rig.disk.attack(later(data.iova, 4096), &[0])), Some(FaultKind::NotMapped));
    // SAFETY: the same.
    unsafe { rig.driver.complete_read_blocks(token, req_in, into, resp_in) }.unwrap();
    assert_eq!(out, into);
    drop(buffer);
    rig.finish();
}

#[test]
fn the_rest_of_a_partly_shared_page_is_not_reachable() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    rig.disk.hold();
    let mut buffer = rig.stack.arena().alloc(4096).unwrap();
    buffer.as_mut_slice().unwrap().fill(0x77);
    let (part, rest) = buffer.as_mut_slice().unwrap().split_at_mut(SECTOR);
    let (mut req, mut resp) = (BlkReq::default(), BlkResp::default());
    // SAFETY: all three are neither moved nor accessed until the completion below.
    let token = unsafe { rig.driver.read_blocks_nb(0, &mut req, part, &mut resp) }.unwrap();
    rig.disk.serve();
    rig.disk.attack(rig.disk.given()[1].iova, &[0xbd; 4096]).unwrap(); // a whole page: of the copy
    // SAFETY: the same three.
    unsafe { rig.driver.complete_read_blocks(token, &req, part, &mut resp) }.unwrap();
    assert!(part.iter().all(|byte| *byte == 0xbd), "the device may write the payload");
    assert!(rest.iter().all(|byte| *byte == 0x77));
    drop(buffer);
    rig.finish();
}

#[test]
fn descriptors_are_read_only_and_rings_end_with_the_driver() {
    place!(Here);
    let rig = Rig::<Here>::new(4 << 20);
    let [descriptors, offered, used] = rig.disk.rings();
    assert_eq!(kind(rig.disk.attack(descriptors, &[0xff; 16])), Some(FaultKind::NoWrite));
    assert_eq!(kind(rig.disk.attack(offered, &[0xff; 4])), Some(FaultKind::NoWrite));
    assert_eq!(kind(rig.disk.spy(used, &mut [0; 4])), Some(FaultKind::NoRead));
    let disk = rig.disk.clone();
    rig.finish();
    for ring in [descriptors, offered, used] {
        assert_eq!(kind(disk.attack(ring, &[0])), Some(FaultKind::NotMapped));
        assert_eq!(kind(disk.spy(ring, &mut [0])), Some(FaultKind::NotMapped));
    }
}

#[test]
fn two_places_are_independent() {
    place!(One);
    place!(Other);
    let (mut one, mut other) = (Rig::<One>::new(4 << 20), Rig::<Other>::new(4 << 20));
    let write = |driver: &mut Driver<One>| driver.write_blocks(0, &pattern(SECTOR, 1)).unwrap();
    write(&mut one.driver);
    other.driver.write_blocks(0, &pattern(SECTOR, 2)).unwrap();
    assert_eq!(one.disk.media()[..SECTOR], pattern(SECTOR, 1));
    assert_eq!(other.disk.media()[..SECTOR], pattern(SECTOR, 2));
    assert_eq!((one.finish().shares, other.finish().shares), (4, 4));
}
