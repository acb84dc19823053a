//! Every state of eight units of addresses on both sides of a border, and every operation in each.

use super::super::IovaSpace;
use super::{G, HIGH, range};
use crate::addr::Iova;

const UNITS: u64 = 8;

/// The position of the units: four before `border`, four after. A unit has `unit` granules.
#[derive(Clone, Copy, Debug)]
struct Place {
    border: u64,
    unit: u64,
}

impl Place {
    fn granule(self, unit: u64) -> u64 {
        self.border - UNITS / 2 * self.unit + unit * self.unit
    }

    /// A space in which exactly the units whose bit is set are allocated, and all else is reserved.
    /// The `order` is that of the allocations: it decides which regions have maps.
    fn space(self, allocated: u64, whole_first: bool) -> IovaSpace {
        let space = IovaSpace::new(45).unwrap();
        let (start, end) = (self.granule(0), self.granule(UNITS));
        space.reserve(range(0, start)).unwrap();
        space.reserve(range(end, (1 << 33) - end)).unwrap();
        if whole_first {
            space.alloc_at(range(start, end - start)).unwrap();
        }
        for unit in 0..UNITS {
            let part = range(self.granule(unit), self.unit);
            match (whole_first, allocated >> unit & 1 == 1) {
                (true, false) => space.free(part).unwrap(),
                (false, true) => space.alloc_at(part).unwrap(),
                _ => {}
            }
        }
        space
    }

    /// The first of the fits for `len` units, in the upper half if there are any.
    fn first_fit(self, allocated: u64, len: u64, before: u64) -> Option<u64> {
        let fits = |at: &u64| {
            let across = self.border == HIGH && *at < UNITS / 2 && *at + len > UNITS / 2;
            allocated & bits(*at, len) == 0 && at + len <= before && !across
        };
        let from = if self.border == HIGH { UNITS / 2 } else { 0 };
        (from..UNITS).chain(0..from).filter(|at| at + len <= UNITS).find(fits)
    }
}

fn bits(at: u64, len: u64) -> u64 {
    ((1 << len) - 1) << at
}

/// The states that one operation leads to, from each state.
fn check(place: Place, allocated: u64, whole_first: bool) {
    let space = place.space(allocated, whole_first);
    let expect = |space: &IovaSpace, allocated: u64| {
        let stats = space.stats();
        let runs = (allocated & !(allocated << 1)).count_ones() as usize;
        assert_eq!(stats.bytes_in_use, u64::from(allocated.count_ones()) * place.unit * G);
        assert_eq!(stats.allocated, runs, "{place:?} {allocated:#b}");
    };
    expect(&space, allocated);
    for len in 1..=UNITS {
        for before in 1..=UNITS {
            // A limit is the last address.
            let limit = Iova::new(place.granule(before) * G - 1);
            let want = place.first_fit(allocated, len, before);
            let got = space.alloc(len * place.unit * G, 1, Some(limit));
            assert_eq!(
                got.as_ref().ok().map(|r| r.start().raw() / G),
                want.map(|at| place.granule(at))
            );
            if let (Ok(r), Some(at)) = (got, want) {
                expect(&space, allocated | bits(at, len));
                space.free(r).unwrap();
            }
        }
        for at in 0..=UNITS - len {
            let (part, here) = (range(place.granule(at), len * place.unit), bits(at, len));
            let taken = space.alloc_at(part).is_ok();
            assert_eq!(taken, allocated & here == 0);
            if taken {
                expect(&space, allocated | here);
            }
            let freed = space.free(part).is_ok();
            assert_eq!(freed, taken || allocated & here == here);
            if freed && !taken {
                expect(&space, allocated & !here);
                space.alloc_at(part).unwrap();
            }
        }
    }
    expect(&space, allocated);
    space.space.lock().check();
}

#[test]
fn every_operation_in_every_state_of_a_small_space() {
    // Within a region; between regions; between nodes of each level; at 4 GiB; and beyond the first
    // root.
    let borders = [100, 512, 4096, 1 << 15, 1 << 18, HIGH, 1 << 21, 1 << 30];
    for border in borders {
        for unit in [1, 171, 512, 700, 4096].into_iter().filter(|unit| unit * UNITS / 2 < border) {
            for allocated in 0..1 << UNITS {
                check(Place { border, unit }, allocated, allocated % 2 == 0);
            }
        }
    }
}
