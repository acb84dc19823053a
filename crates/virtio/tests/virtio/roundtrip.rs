//! Written data is read back, for payloads on the heap and in the arena.

use crate::common::{DISK, Rig, pattern, place};
use pinfold_virtio::model::SECTOR;
use proptest::prelude::*;
use std::cell::RefCell;
use virtio_drivers::device::blk::{BlkReq, BlkResp, RespStatus};

#[test]
fn payloads_on_the_heap_are_copied() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    assert_eq!(rig.driver.capacity(), (DISK / SECTOR) as u64);
    let data = pattern(16 * SECTOR, 1);
    rig.driver.write_blocks(3, &data).unwrap();
    assert_eq!(&rig.disk.media()[3 * SECTOR..19 * SECTOR], data);
    let mut back = vec![0; data.len()];
    rig.driver.read_blocks(3, &mut back).unwrap();
    assert_eq!(back, data);
    rig.driver.flush().unwrap();
    let mut id = [0; 20];
    let len = rig.driver.device_id(&mut id).unwrap();
    assert_eq!(&id[..len], b"pinfold-model-disk");
    let stats = rig.finish();
    assert_eq!((stats.shares_in_place, stats.shares_live), (0, 0));
    assert!(stats.copied_bytes >= 2 * data.len() as u64);
}

#[test]
fn payloads_in_the_arena_are_mapped_in_place() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let mut buffer = rig.stack.arena().alloc(64 << 10).unwrap();
    buffer.as_mut_slice().unwrap().copy_from_slice(&pattern(64 << 10, 2));
    rig.driver.write_blocks(0, buffer.as_slice().unwrap()).unwrap();
    let copied = rig.stack.stats().copied_bytes;
    assert!(copied < 1024, "only headers, descriptor lists and the status: {copied}");
    buffer.as_mut_slice().unwrap().fill(0);
    rig.driver.read_blocks(0, buffer.as_mut_slice().unwrap()).unwrap();
    assert_eq!(buffer.as_slice().unwrap(), pattern(64 << 10, 2));
    assert_eq!(rig.stack.stats().shares_in_place, 2);
    drop(buffer);
    rig.finish();
}

#[test]
fn many_requests_are_in_flight_at_once() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    rig.driver.write_blocks(0, &pattern(16 * SECTOR, 3)).unwrap();
    rig.disk.hold();
    let mut requests: Vec<_> =
        (0..16).map(|_| (BlkReq::default(), [0; SECTOR], BlkResp::default(), 0)).collect();
    for (block, (req, data, resp, token)) in requests.iter_mut().enumerate() {
        // SAFETY: all three are neither moved nor accessed until the completion below.
        *token = unsafe { rig.driver.read_blocks_nb(block, req, data, resp) }.unwrap();
    }
    assert_eq!(rig.stack.stats().shares_live, 16 * 4, "header, data, status, and a list of them");
    assert_eq!(rig.driver.peek_used(), None);
    rig.disk.serve();
    for (block, (req, data, resp, token)) in requests.iter_mut().enumerate() {
        assert_eq!(rig.driver.peek_used(), Some(*token));
        // SAFETY: the same three.
        unsafe { rig.driver.complete_read_blocks(*token, req, data, resp) }.unwrap();
        assert_eq!(resp.status(), RespStatus::OK);
        assert_eq!(data[..], pattern(16 * SECTOR, 3)[block * SECTOR..(block + 1) * SECTOR]);
    }
    rig.finish();
}

#[test]
fn requests_past_the_end_fail_and_nothing_leaks() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let last = DISK / SECTOR - 1;
    rig.driver.write_blocks(last, &pattern(SECTOR, 4)).unwrap();
    assert!(rig.driver.write_blocks(last, &pattern(2 * SECTOR, 5)).is_err());
    assert!(rig.driver.read_blocks(last + 1, &mut [0; SECTOR]).is_err());
    rig.finish();
}

#[test]
fn bytes_that_the_device_does_not_write_keep_their_value() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    rig.disk.read_short(100);
    let mut data = [0xee; 2 * SECTOR];
    rig.driver.read_blocks(0, &mut data).unwrap();
    assert!(data[..2 * SECTOR - 100].iter().all(|byte| *byte == 0));
    assert!(
        data[2 * SECTOR - 100..].iter().all(|byte| *byte == 0xee),
        "not the old contents of the copy's frames"
    );
    rig.finish();
}

/// The location of a payload.
#[derive(Clone, Copy, Debug)]
enum Location {
    Heap,
    Pages,
    Unaligned(usize),
}

fn locations() -> impl Strategy<Value = Location> {
    prop_oneof![
        Just(Location::Heap),
        Just(Location::Pages),
        (1_usize..4096).prop_map(Location::Unaligned)
    ]
}

#[test]
fn the_disk_matches_the_model_after_any_operation() {
    place!(Here);
    let step = (any::<bool>(), 0_usize..DISK / SECTOR - 64, 1_usize..64, locations(), any::<u8>());
    let rig = RefCell::new(Rig::<Here>::new(2 << 20)); // one for all cases
    proptest!(|(steps in proptest::collection::vec(step, 1..24))| {
        let mut rig = rig.borrow_mut();
        let mut model = rig.disk.media();
        let mut buffer = rig.stack.arena().alloc(64 * SECTOR + 4096).unwrap();
        for (write, sector, sectors, location, seed) in steps {
            let len = sectors * SECTOR;
            let place = sector * SECTOR..sector * SECTOR + len;
            let mut heap = vec![seed; len];
            let payload = match location {
                Location::Heap => &mut heap[..],
                Location::Pages => &mut buffer.as_mut_slice().unwrap()[..len],
                Location::Unaligned(at) => &mut buffer.as_mut_slice().unwrap()[at..at + len],
            };
            if write {
                payload.copy_from_slice(&pattern(len, seed));
                rig.driver.write_blocks(sector, payload).unwrap();
                model[place].copy_from_slice(&pattern(len, seed));
            } else {
                rig.driver.read_blocks(sector, payload).unwrap();
                prop_assert_eq!(&payload[..], &model[place]);
            }
        }
        prop_assert!(rig.disk.media() == model);
    });
    rig.into_inner().finish();
}
