//! A zone per node, and zeroed memory.

use super::*;
use crate::mem::DmaMemory;

fn nodes() -> Nodes {
    Nodes::new([(4, Zone::new(512).unwrap()), (1, Zone::new(1024).unwrap())]).unwrap()
}

#[test]
fn a_preference_is_honoured_or_refused() {
    let nodes = nodes();
    assert_eq!(nodes.ids().collect::<Vec<_>>(), [4, 1]);
    for preference in [Preference::Strict(2), Preference::Prefer(2)] {
        assert_eq!(nodes.alloc(Order::PAGE, preference), Err(NodesError::Unknown { node: 2 }));
        assert_eq!(nodes.fill(&mut [None; 3], preference), Err(NodesError::Unknown { node: 2 }));
    }
    let strict = nodes.alloc(Order::HUGE, Preference::Strict(4)).unwrap();
    assert_eq!((strict.node, strict.away), (4, false));
    let refused = FrameError::Exhausted { order: Order::PAGE, frames: 512 };
    assert_eq!(nodes.alloc(Order::PAGE, Preference::Strict(4)), Err(NodesError::Frame(refused)));
    let away = nodes.alloc(Order::PAGE, Preference::Prefer(4)).unwrap();
    assert_eq!((away.node, away.away), (1, true));
    let any = nodes.alloc(Order::PAGE, Preference::Any).unwrap();
    assert_eq!((any.node, any.away), (1, false));
    let (four, one) = (nodes.stats(4).unwrap(), nodes.stats(1).unwrap());
    assert_eq!((four.at_home, four.away, four.missed), (512, 0, 2));
    assert_eq!((one.at_home, one.away, one.missed), (1, 1, 0));
    nodes.free(strict, Order::HUGE).unwrap();
    let again = nodes.free(strict, Order::HUGE);
    assert_eq!(again, Err(NodesError::Frame(FrameError::DoubleFree { frame: strict.frame })));
    assert!(nodes.free(Origin { node: 9, ..away }, Order::PAGE).is_err());
    nodes.free(away, Order::PAGE).unwrap();
    nodes.free(any, Order::PAGE).unwrap();
    assert_eq!((nodes.zone(4).unwrap().taken(), nodes.zone(1).unwrap().taken()), (0, 0));
}

#[test]
fn bulk_says_what_came_from_elsewhere() {
    let nodes = nodes();
    let kept = nodes.alloc(Order::PAGE, Preference::Strict(4)).unwrap();
    let mut slots = vec![None; 700];
    slots[9] = Some(kept);
    assert_eq!(nodes.fill(&mut slots, Preference::Strict(4)), Ok(512));
    assert!(slots.iter().flatten().all(|origin| origin.node == 4 && !origin.away));
    assert_eq!(nodes.fill(&mut slots, Preference::Prefer(4)), Ok(700));
    assert_eq!(slots[9], Some(kept));
    assert_eq!(slots.iter().flatten().filter(|origin| origin.away).count(), 188);
    assert_eq!(slots.iter().flatten().collect::<std::collections::HashSet<_>>().len(), 700);
    assert_eq!((nodes.stats(4).unwrap().missed, nodes.stats(1).unwrap().away), (2, 188));
    for origin in slots.into_iter().flatten() {
        nodes.free(origin, Order::PAGE).unwrap();
    }
    assert_eq!(nodes.fill(&mut vec![None; 2000], Preference::Any), Ok(1536));
}

#[test]
fn a_set_needs_nodes_that_differ() {
    assert_eq!(Nodes::new([]).err(), Some(NodesError::NoNode));
    let zone = || Zone::new(512).unwrap();
    assert_eq!(Nodes::new([(3, zone()), (3, zone())]).err(), Some(NodesError::Twice { node: 3 }));
}

#[test]
fn zeroes_are_made_on_demand_and_nowhere_else() {
    let mut bytes = vec![u64::MAX; 16 * 512];
    let base = std::ptr::NonNull::new(bytes.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: `bytes` stays until the end of the test and is reached through the value only.
    let memory = unsafe { DmaMemory::from_raw(base, 16 * 4096) };
    let zeroes = |frame: Frame| {
        let at = frame.index() as usize * 4096;
        (0..512).filter(|i| memory.read_u64(at + i * 8) == Ok(0)).count()
    };
    let zone = Zone::new(512).unwrap();
    let kept = zone.alloc(Order::PAGE).unwrap();
    let mut slots = [None, Some(kept), None, None];
    assert_eq!(zone.fill_zeroed(&mut slots, &memory), Ok(4));
    assert_eq!(slots.map(|slot| zeroes(slot.unwrap())), [512, 0, 512, 512]);
    let run = zone.alloc_zeroed(order(2), &memory).unwrap();
    assert_eq!((0..4).map(|i| zeroes(frame(run.index() + i))).sum::<usize>(), 2048);
    assert_eq!((zone.taken(), (0..16).map(|i| zeroes(frame(i))).sum::<usize>()), (8, 7 * 512));
    // 16 frames of memory for 512 of the zone: what lies outside is refused, and given back.
    let mut local = zone.local();
    let mut many = [None; 20];
    let refused = local.fill_zeroed(&mut many, &memory);
    assert!(matches!(refused, Err(ZeroError::Outside { frame, .. }) if frame.index() == 16));
    assert_eq!(many.iter().flatten().count(), 8);
    drop(local);
    assert_eq!(zone.taken(), 16);
    assert!(matches!(zone.alloc_zeroed(Order::PAGE, &memory), Err(ZeroError::Outside { .. })));
    assert_eq!((zone.taken(), zone.stats().in_use), (16, 16));
}
