//! Runs of 2 MiB that an owner keeps.

use super::*;

/// A zone of which an owner keeps at most two regions.
const FRAMES: u32 = 70 * 512;

#[test]
fn a_freed_run_is_the_next_one_and_its_bits_stay_set() {
    let zone = Zone::new(FRAMES).unwrap();
    let mut local = zone.local();
    let run = local.alloc(Order::HUGE).unwrap();
    local.free(run, Order::HUGE).unwrap();
    assert_eq!((local.held(), zone.taken()), (512, 512));
    for _ in 0..1000 {
        assert_eq!((local.alloc(Order::HUGE), zone.taken()), (Ok(run), 512));
        local.free(run, Order::HUGE).unwrap();
    }
    drop(local);
    assert_eq!((zone.taken(), zone.stats().in_use, zone.stats().held), (0, 0, 0));
    assert_eq!(zone.stats().allocs, 1001 * 512);
}

#[test]
fn wrong_frees_into_a_kept_run_are_detected() {
    let zone = Zone::new(FRAMES).unwrap();
    let mut local = zone.local();
    let run = local.alloc(Order::HUGE).unwrap();
    // The magazine knows a word of the region: its frame was freed and allocated again.
    local.free(run, Order::PAGE).unwrap();
    assert_eq!(local.alloc(Order::PAGE), Ok(run));
    local.free(run, Order::HUGE).unwrap();
    let inside = frame(run.index() + 64);
    let refused = |frame| Err(FrameError::DoubleFree { frame });
    assert_eq!(local.free(run, Order::HUGE), refused(run));
    assert_eq!(local.free(run, Order::PAGE), refused(run));
    assert_eq!(local.free(inside, Order::PAGE), refused(inside));
    assert_eq!(local.free(inside, order(6)), refused(inside));
    assert_eq!(local.free_bulk(&mut [Some(inside)]), refused(inside).map(|()| 0));
    assert_eq!(local.held(), 512);
}

#[test]
fn a_run_with_a_free_frame_is_not_kept() {
    let zone = Zone::new(FRAMES).unwrap();
    let mut local = zone.local();
    let run = local.alloc(Order::HUGE).unwrap();
    let inside = frame(run.index() + 200);
    zone.free(inside, Order::PAGE).unwrap();
    assert_eq!(local.free(run, Order::HUGE), Err(FrameError::DoubleFree { frame: inside }));
    assert_eq!((local.held(), zone.taken()), (0, 511));
    // Not a multiple of 2 MiB.
    let two = zone.alloc_run(1024, 1024).unwrap();
    let first = frame(two.index() + 256);
    assert_eq!(
        local.free(first, Order::HUGE),
        Err(FrameError::Misaligned { frame: first, order: Order::HUGE })
    );
    assert_eq!(local.held(), 0);
}

#[test]
fn kept_runs_are_the_owners_last_frames() {
    let zone = Zone::new(FRAMES).unwrap();
    let mut local = zone.local();
    let keep = |local: &mut Local<&Zone>| {
        let runs = [(); 3].map(|()| local.alloc(Order::HUGE).unwrap());
        runs.into_iter().for_each(|run| local.free(run, Order::HUGE).unwrap());
        assert_eq!(local.held(), 1024, "at most 1/32 of the zone");
    };
    keep(&mut local);
    let singles: Vec<_> = (0..FRAMES).map(|_| local.alloc(Order::PAGE).unwrap()).collect();
    assert!(local.alloc(Order::PAGE).is_err());
    singles.into_iter().for_each(|single| local.free(single, Order::PAGE).unwrap());
    assert_eq!(local.free_bulk(&mut []), Ok(0));
    drop(local);

    let mut local = zone.local();
    keep(&mut local);
    let mut slots = vec![None; FRAMES as usize];
    assert_eq!(local.fill_by(&mut slots, Urgency::Urgent), slots.iter().flatten().count());
    let all: BTreeSet<_> = slots.iter().flatten().map(|frame| frame.index()).collect();
    assert!(all.len() + zone.watermarks().min() as usize >= slots.len(), "{}", all.len());
}

#[test]
fn kept_runs_are_released_under_pressure() {
    let zone = Zone::new(FRAMES).unwrap();
    let (mut local, mut other) = (zone.local(), zone.local());
    let run = local.alloc(Order::HUGE).unwrap();
    local.free(run, Order::HUGE).unwrap();
    let taken = core::iter::from_fn(|| other.alloc(Order::HUGE).ok()).count();
    assert_eq!((taken, zone.under_pressure()), (69, true));
    let mine = local.alloc(Order::HUGE).unwrap();
    local.free(mine, Order::HUGE).unwrap();
    assert_eq!(local.held(), 0);
    assert_eq!(other.alloc(Order::HUGE), Ok(mine));
}

#[test]
fn a_kept_run_is_not_freed_again_elsewhere() {
    let zone = Zone::new(FRAMES).unwrap();
    let (mut local, mut other) = (zone.local(), zone.local());
    let run = local.alloc(Order::HUGE).unwrap();
    local.free(run, Order::HUGE).unwrap();
    let inside = frame(run.index() + 64);
    let refused = |frame| Err(FrameError::DoubleFree { frame });
    assert_eq!(other.free(run, Order::HUGE), refused(run));
    assert_eq!(other.free(inside, Order::PAGE), refused(inside));
    assert_eq!(other.free_bulk(&mut [Some(inside)]), refused(inside).map(|()| 0));
    assert_eq!(zone.free(run, Order::HUGE), refused(run));
    assert_eq!(zone.free(inside, Order::PAGE), refused(inside));
    assert_eq!(zone.free_bulk(&mut [Some(inside)]), refused(inside).map(|()| 0));
    assert_eq!(zone.free_run(run, 512), refused(run));
    assert_eq!((zone.taken(), local.held(), other.held()), (512, 512, 0));
    // Allocated again, it is freed by whoever has it.
    assert_eq!(local.alloc(Order::HUGE), Ok(run));
    other.free(run, Order::HUGE).unwrap();
    drop((local, other));
    assert_eq!(zone.taken(), 0);
}

/// An owner whose word of the run is at hand, and empty.
#[test]
fn a_kept_run_is_not_freed_again_where_a_frame_of_it_was_cached() {
    let zone = Zone::new(FRAMES).unwrap();
    let (mut local, mut other) = (zone.local(), zone.local());
    let run = local.alloc(Order::HUGE).unwrap();
    other.free(run, Order::PAGE).unwrap();
    assert_eq!(other.alloc(Order::PAGE), Ok(run));
    local.free(run, Order::HUGE).unwrap();
    let refused = |frame| Err(FrameError::DoubleFree { frame });
    assert_eq!(other.free(run, Order::PAGE), refused(run));
    assert_eq!(other.free_bulk(&mut [Some(run)]), refused(run).map(|()| 0));
    assert_eq!((zone.taken(), local.held(), other.held()), (512, 512, 0));
}

#[test]
fn an_owner_that_only_allocates_releases_its_runs_under_pressure() {
    let allocs: [fn(&mut Local<&Zone>) -> bool; 3] = [
        |local| local.alloc(Order::PAGE).is_ok(),
        |local| local.alloc(order(3)).is_ok(),
        |local| local.fill(&mut [None; 8]) > 0,
    ];
    for alloc in allocs {
        let zone = Zone::new(FRAMES).unwrap();
        let mut local = zone.local();
        let runs = [(); 2].map(|()| local.alloc(Order::HUGE).unwrap());
        runs.into_iter().for_each(|run| local.free(run, Order::HUGE).unwrap());
        while zone.alloc(Order::PAGE).is_ok() {}
        assert!((zone.under_pressure(), local.held()) == (true, 1024));
        assert!(alloc(&mut local));
        assert!(local.held() < 512 && zone.alloc(Order::HUGE).is_ok());
    }
}

#[test]
fn an_owner_keeps_four_runs_at_most_and_a_full_magazine_beside_them() {
    let zone = Zone::new(200 * 512).unwrap();
    let mut local = zone.local();
    let [fifth, runs @ ..] = [(); 5].map(|()| local.alloc(Order::HUGE).unwrap());
    let others = zone.alloc_run(5000, 1).unwrap();
    runs.into_iter().for_each(|run| local.free(run, Order::HUGE).unwrap());
    assert_eq!(local.held(), 4 * 512);
    let mut most = 0;
    for index in covered(others, 5000) {
        local.free(frame(index), Order::PAGE).unwrap();
        most = most.max(local.held());
    }
    assert_eq!(most, 4 * 512 + super::magazine::limit(&zone));
    local.free(fifth, Order::HUGE).unwrap();
    assert_eq!((local.kept.frames(), local.alloc(Order::HUGE).unwrap() == fifth), (4 * 512, false));
}
