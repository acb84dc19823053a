//! Bounced payloads behind the software IOMMU: their bytes, and what a device can reach.

use super::*;
use crate::memory::{MappingPolicy, Source};
use crate::{Domain, soft::Port};
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use proptest::prelude::*;

fn arena(domain: &Domain, bytes: u64) -> Arena {
    Arena::builder().size(bytes).source(Source::Plain).build(domain).unwrap()
}

fn bytes_of<D: Direction>(bounced: &Bounced<D>) -> Vec<u8> {
    let mut bytes = vec![0; bounced.memory().len()];
    bounced.memory().copy_to_slice(0, &mut bytes).unwrap();
    bytes
}

fn segment<D: Direction>(bounced: &Bounced<D>) -> Segment {
    assert_eq!(Payload::<D>::segment(bounced, 1), None);
    bounced.segment(0).unwrap()
}

/// Returns all bytes of the arena that a device can read, by their offset.
fn visible(port: &Port, arena: &Arena) -> Vec<(u64, u8)> {
    let mut bytes = Vec::new();
    for page in (0..arena.len() as u64).step_by(PAGE) {
        let mut read = [0; PAGE];
        if port.read(arena.iova().checked_add(page).unwrap(), &mut read).is_ok() {
            bytes.extend((page..).zip(read));
        }
    }
    bytes
}

#[test]
fn a_device_reads_and_writes_the_payload_in_its_direction_only() {
    let domain = Domain::soft().unwrap();
    let (arena, port) = (arena(&domain, 1 << 20), domain.port().unwrap());
    let out = BouncePool::<ToDevice>::new(&arena).unwrap().copy_of(b"to the device").unwrap();
    let into = BouncePool::<FromDevice>::new(&arena).unwrap().alloc(600).unwrap();
    let both = BouncePool::<Bidirectional>::new(&arena).unwrap().copy_of(&[9; 16 << 10]).unwrap();

    let mut read = [0; 13];
    port.read(segment(&out).iova, &mut read).unwrap();
    assert_eq!(&read, b"to the device");
    assert!(port.write(segment(&out).iova, &read).is_err());

    port.write(segment(&into).iova, &[5; 600]).unwrap();
    assert_eq!(bytes_of(&into), [5; 600]);
    assert!(port.read(segment(&into).iova, &mut read).is_err());

    let mut read = vec![0; 16 << 10];
    port.read(segment(&both).iova, &mut read).unwrap();
    port.write(segment(&both).iova, &[3; 16 << 10]).unwrap();
    assert!(read.iter().all(|&byte| byte == 9) && bytes_of(&both).iter().all(|&byte| byte == 3));
    assert_eq!(Payload::<ToDevice>::domain(&out), Some(pinfold_core::domain::Domain::id(&domain)));
}

#[test]
fn a_probing_device_sees_bounced_payloads_and_zeroes_only() {
    const SECRET: u8 = 0xa5;
    let domain = Domain::soft().unwrap();
    let (arena, port) = (arena(&domain, 1 << 20), domain.port().unwrap());
    // Every frame of the arena has held something of the program, and some hold it now.
    let mut buffers: Vec<_> = (0..arena.len() / PAGE).map(|_| arena.alloc(PAGE).unwrap()).collect();
    for buffer in &mut buffers {
        buffer.as_mut_slice().unwrap().fill(SECRET);
    }
    buffers.truncate(32);

    let pool = BouncePool::<ToDevice>::new(&arena).unwrap();
    let payloads: Vec<_> = [1, 256, 257, 1024, 4096, 16384]
        .iter()
        .map(|&len| pool.copy_of(&vec![7; len]).unwrap())
        .collect();
    let seen = visible(&port, &arena);
    let expected: usize = payloads.iter().map(|payload| payload.memory().len()).sum();
    assert_eq!(seen.iter().filter(|(_, byte)| *byte == 7).count(), expected);
    assert!(seen.iter().all(|(_, byte)| matches!(byte, 0 | 7)));
    // The first byte behind a payload is of the pool, or faults.
    let last = segment(&payloads[0]);
    assert!(port.write(last.iova.checked_add(last.len).unwrap(), &[1]).is_err());

    drop(payloads);
    let seen = visible(&port, &arena);
    assert!(!seen.is_empty() && seen.iter().all(|(_, byte)| *byte == 0), "what was sent is gone");
    drop(pool);
    assert!(visible(&port, &arena).is_empty(), "the last handle is dropped");
    assert!(
        buffers.iter_mut().all(|buffer| buffer
            .as_slice()
            .unwrap()
            .iter()
            .all(|&byte| byte == SECRET))
    );
}

#[test]
fn a_received_payload_is_not_found_in_the_next_one() {
    let domain = Domain::soft().unwrap();
    let (arena, port) = (arena(&domain, 1 << 20), domain.port().unwrap());
    let pool = BouncePool::<FromDevice>::new(&arena).unwrap();
    for len in (1..=BouncePool::<FromDevice>::MAX_BYTES).step_by(997) {
        for _ in 0..40 {
            let payload = pool.alloc(len).unwrap();
            assert!(bytes_of(&payload).iter().all(|&byte| byte == 0));
            port.write(segment(&payload).iova, &vec![1; len]).unwrap();
        }
    }
}

#[test]
fn a_payload_keeps_its_pages_mapped_after_its_pool() {
    let domain = Domain::soft().unwrap();
    let port = domain.port().unwrap();
    let payload = {
        let arena = arena(&domain, 1 << 20);
        BouncePool::<ToDevice>::new(&arena).unwrap().copy_of(b"kept").unwrap()
    };
    let at = segment(&payload).iova;
    port.read(at, &mut [0; 4]).unwrap();
    std::thread::spawn(move || drop(payload)).join().unwrap();
    assert!(port.read(at, &mut [0; 4]).is_err());
}

#[test]
fn impossible_lengths_and_exhaustion_name_value_and_limit() {
    let domain = Domain::soft().unwrap();
    let arena = arena(&domain, 64 << 10);
    let pool = BouncePool::<FromDevice>::new(&arena).unwrap();
    for bytes in [0, (16 << 10) + 1, usize::MAX] {
        assert_eq!(pool.alloc(bytes).unwrap_err(), BounceError::Length { bytes, limit: 16 << 10 });
    }
    let mut payloads = Vec::new();
    let error = loop {
        match pool.alloc(5000) {
            Ok(payload) => payloads.push(payload),
            Err(error) => break error,
        }
    };
    assert_eq!(payloads.len(), 4, "blocks of 16 KiB");
    let BounceError::Exhausted { bytes: 5000, block: 16384, .. } = error else { panic!("{error}") };
    assert!(matches!(pool.alloc(1), Err(BounceError::Exhausted { block: 256, .. })));
    payloads.pop();
    assert_eq!(pool.alloc(9000).unwrap().memory().len(), 9000);
}

#[test]
fn an_arena_that_is_mapped_whole_is_used_as_well() {
    let domain = Domain::soft().unwrap();
    let arena =
        Arena::builder().size(1 << 20).mapping_policy(MappingPolicy::Whole).build(&domain).unwrap();
    let payload = BouncePool::<FromDevice>::new(&arena).unwrap().alloc(64).unwrap();
    domain.port().unwrap().write(segment(&payload).iova, &[1; 64]).unwrap();
    assert_eq!(bytes_of(&payload), [1; 64]);
}

#[derive(Clone, Debug)]
enum Step {
    Send(Vec<u8>),
    Receive(usize),
    /// The device writes so many bytes of a value into a payload.
    Write(usize, usize, u8),
    Drop(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = || prop_oneof![1..300_usize, 900..1100_usize, 4000..4200_usize, 16000..=16384_usize];
    let step = prop_oneof![
        3 => (len(), 1..=255u8).prop_map(|(len, byte)| Step::Send(vec![byte; len])),
        3 => len().prop_map(Step::Receive),
        3 => (any::<usize>(), len(), 1..=255u8).prop_map(|(at, len, byte)| Step::Write(at, len, byte)),
        4 => any::<usize>().prop_map(Step::Drop),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Against a model: each payload has the bytes that it was given or that the device wrote, no
    /// two overlap, and a device reads nothing but the payloads and zeroes.
    #[test]
    fn payloads_hold_what_a_model_holds(steps in steps()) {
        let domain = Domain::soft().unwrap();
        let (arena, port) = (arena(&domain, 4 << 20), domain.port().unwrap());
        let (to, from) = (BouncePool::new(&arena).unwrap(), BouncePool::new(&arena).unwrap());
        let mut sent: Vec<(Bounced<ToDevice>, Vec<u8>)> = Vec::new();
        let mut received: Vec<(Bounced<FromDevice>, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Send(bytes) => sent.push((to.copy_of(&bytes).unwrap(), bytes)),
                Step::Receive(len) => received.push((from.alloc(len).unwrap(), vec![0; len])),
                Step::Write(at, len, byte) if !received.is_empty() => {
                    let at = at % received.len();
                    let (payload, bytes) = &mut received[at];
                    let len = len.min(bytes.len());
                    port.write(segment(payload).iova, &vec![byte; len]).unwrap();
                    bytes[..len].fill(byte);
                }
                Step::Drop(at) if at % 2 == 0 && !sent.is_empty() => drop(sent.swap_remove(at % sent.len())),
                Step::Drop(at) if !received.is_empty() => drop(received.swap_remove(at % received.len())),
                Step::Write(..) | Step::Drop(_) => {}
            }
        }
        for (payload, bytes) in &received {
            prop_assert_eq!(&bytes_of(payload), bytes);
        }
        let mut expected = std::collections::BTreeMap::new();
        for (payload, bytes) in &sent {
            prop_assert_eq!(&bytes_of(payload), bytes);
            let offset = segment(payload).iova.raw() - arena.iova().raw();
            expected.extend((offset..).zip(bytes.iter().copied()));
        }
        prop_assert_eq!(expected.len(), sent.iter().map(|(_, bytes)| bytes.len()).sum::<usize>());
        let seen: std::collections::BTreeMap<_, _> =
            visible(&port, &arena).into_iter().filter(|(_, byte)| *byte != 0).collect();
        prop_assert_eq!(seen, expected);
    }
}

#[test]
fn a_pool_leaves_the_rest_of_the_arena_to_others() {
    let domain = Domain::soft().unwrap();
    let arena = arena(&domain, 1 << 20);
    let pool = BouncePool::<ToDevice>::with_limit(&arena, 64 << 10).unwrap();
    let mut payloads: Vec<_> = std::iter::from_fn(|| pool.alloc(16 << 10).ok()).collect();
    assert_eq!(payloads.len(), 4);
    let BounceError::Exhausted { error: AllocError::Source(error), .. } =
        pool.alloc(1).unwrap_err()
    else {
        panic!("another error")
    };
    assert_eq!(error, SourceError::Limit { bytes: 4096, left: 0, limit: 64 << 10 });
    assert!(arena.alloc(512 << 10).is_ok());
    payloads.pop();
    assert_eq!(pool.alloc(10_000).unwrap().memory().len(), 10_000);
}

#[test]
fn a_limit_counts_what_the_pool_has_and_not_what_it_was_refused() {
    let domain = Domain::soft().unwrap();
    let arena = arena(&domain, 64 << 10);
    let buffers: Vec<_> = (0..16).map(|_| arena.alloc(PAGE).unwrap()).collect();
    let pool = BouncePool::<ToDevice>::with_limit(&arena, 32 << 10).unwrap();
    for _ in 0..8 {
        let error = pool.alloc(5000).unwrap_err();
        assert!(!error.to_string().contains("limit"), "the arena has none: {error}");
    }
    drop(buffers);
    let two = [pool.alloc(5000).unwrap(), pool.alloc(16 << 10).unwrap()];
    for len in [1, 5000] {
        let error = pool.alloc(len).unwrap_err();
        let BounceError::Exhausted {
            error: AllocError::Source(SourceError::Limit { left: 0, limit, .. }),
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(limit, 32 << 10);
    }
    drop(two);
    assert_eq!(pool.alloc(5000).unwrap().memory().len(), 5000);
}
