//! Data that was written is read back, wherever the payload is.

use crate::common::{DISK, Rig, pattern, place};
use pinfold_virtio::model::SECTOR;
use proptest::prelude::*;
use std::cell::RefCell;
use virtio_drivers::device::blk::{BlkReq, BlkResp, RespStatus};

#[test]
fn the_heap_s_payloads_go_by_way_of_a_copy() {
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
fn pinfold_s_payloads_go_where_they_lie() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let mut buffer = rig.stack.arena().alloc(64 << 10).unwrap();
    buffer.as_mut_slice().unwrap().copy_from_slice(&pattern(64 << 10, 2));
    rig.driver.write_blocks(0, buffer.as_slice().unwrap()).unwrap();
    let copied = rig.stack.stats().copied_bytes;
    assert!(copied < 1024, "headers, lists of descriptors and the status alone: {copied}");
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
        // SAFETY: all three stay where they are, and untouched, until the request is completed below.
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
fn past_the_end_is_the_disk_s_error_and_nothing_is_lost() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    let last = DISK / SECTOR - 1;
    rig.driver.write_blocks(last, &pattern(SECTOR, 4)).unwrap();
    assert!(rig.driver.write_blocks(last, &pattern(2 * SECTOR, 5)).is_err());
    assert!(rig.driver.read_blocks(last + 1, &mut [0; SECTOR]).is_err());
    rig.finish();
}

#[test]
fn what_the_device_leaves_out_stays_as_it_was() {
    place!(Here);
    let mut rig = Rig::<Here>::new(4 << 20);
    rig.disk.read_short(100);
    let mut data = [0xee; 2 * SECTOR];
    rig.driver.read_blocks(0, &mut data).unwrap();
    assert!(data[..2 * SECTOR - 100].iter().all(|byte| *byte == 0));
    assert!(data[2 * SECTOR - 100..].iter().all(|byte| *byte == 0xee), "and not what the copy's frames held");
    rig.finish();
}

/// Where a payload lies.
#[derive(Clone, Copy, Debug)]
enum Lies {
    Heap,
    Pages,
    Crooked(usize),
}

fn lies() -> impl Strategy<Value = Lies> {
    prop_oneof![Just(Lies::Heap), Just(Lies::Pages), (1_usize..4096).prop_map(Lies::Crooked)]
}

#[test]
fn the_disk_matches_the_model_after_any_operation() {
    place!(Here);
    let step = (any::<bool>(), 0_usize..DISK / SECTOR - 64, 1_usize..64, lies(), any::<u8>());
    let rig = RefCell::new(Rig::<Here>::new(2 << 20)); // one for all cases
    proptest!(|(steps in proptest::collection::vec(step, 1..24))| {
        let mut rig = rig.borrow_mut();
        let mut model = rig.disk.media();
        let mut buffer = rig.stack.arena().alloc(64 * SECTOR + 4096).unwrap();
        for (write, sector, sectors, lies, seed) in steps {
            let len = sectors * SECTOR;
            let place = sector * SECTOR..sector * SECTOR + len;
            let mut heap = vec![seed; len];
            let payload = match lies {
                Lies::Heap => &mut heap[..],
                Lies::Pages => &mut buffer.as_mut_slice().unwrap()[..len],
                Lies::Crooked(at) => &mut buffer.as_mut_slice().unwrap()[at..at + len],
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
