//! The table against a model: a map of leaves.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

/// Leaves by their first address: (bytes, physical address, access).
type Model = BTreeMap<u64, (u64, u64, u64)>;

fn first_in(model: &Model, start: u64, len: u64) -> Option<u64> {
    let before =
        model.range(..=start).next_back().filter(|(s, l)| **s + l.0 > start).map(|_| start);
    before.or_else(|| model.range(start..start + len).next().map(|(s, _)| *s))
}

fn expected_clear(model: &Model, asked: IovaRange) -> Result<(), TableError> {
    let (mut at, end) = (asked.start().raw(), asked.end().raw());
    while at < end {
        let leaf = model.range(..=at).next_back().filter(|(s, l)| **s + l.0 > at);
        let Some((&s, &(len, ..))) = leaf else {
            return Err(TableError::NotMapped { at: Iova::new(at) });
        };
        if s < at || s + len > end {
            return Err(TableError::PartOfLeaf { range: asked, leaf: range(s, len) });
        }
        at = s + len;
    }
    Ok(())
}

fn largest(at: u64, phys: u64, left: u64) -> u64 {
    [G1, M2].into_iter().find(|s| (at | phys).is_multiple_of(*s) && *s <= left).unwrap_or(K4)
}

/// The runs of the model: leaves that continue each other in both address spaces, of one size and
/// access.
fn joined(model: &Model) -> dump::Runs {
    let mut runs = dump::Runs::new();
    for (&at, &(size, phys, access)) in model {
        match runs.last_mut() {
            Some(run)
                if (run.0 + run.1, run.2 + run.1, run.3, run.4) == (at, phys, access, size) =>
            {
                run.1 += size
            }
            _ => runs.push((at, size, phys, access, size)),
        }
    }
    runs
}

type Op = (u8, u64, u64, u64);

fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec((0u8..10, any::<u64>(), any::<u64>(), any::<u64>()), 200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(48), ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_map_of_leaves(capacity in 6usize..40, levels in 3u8..=5, ops in ops()) {
        agrees::<VtdSecondStage>(capacity, levels, ops)?;
    }

    #[test]
    fn agrees_with_a_map_of_leaves_in_the_first_stage(
        capacity in 6usize..40,
        levels in 4u8..=5,
        ops in ops(),
    ) {
        agrees::<VtdFirstStage>(capacity, levels, ops)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::testing::cases(8), ..ProptestConfig::default() })]
    /// A walker that sees only what has been written back finds the same, at once.
    #[test]
    fn agrees_with_a_map_of_leaves_for_a_walker_that_is_not_coherent(
        capacity in 6usize..40,
        levels in 3u8..=5,
        ops in ops(),
    ) {
        formats::forget_written_back();
        agrees::<formats::NonCoherent>(capacity, levels, ops)?;
    }
}

fn agrees<F: Decode>(capacity: usize, levels: u8, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let b: Bench<F> = bench(capacity, levels);
    let mut model = Model::new();
    let mut ranges: Vec<IovaRange> = Vec::new();
    let mut flushing: VecDeque<Retired> = VecDeque::new();
    let anywhere = |a: u64, c: u64| {
        let base = [0, M2, G1 - M2, G1, 3 * G1, 5 * G1 - 3 * M2][(a % 6) as usize];
        let (start, len) = match c % 7 {
            0 => (base, M2),
            1 => (base, 3 * M2),
            2 => (base & !(G1 - 1), G1),
            3 => (base + (a / 6 % 600) * K4, M2 + (c / 7 % 9) * K4),
            _ => (base + (a / 6 % 600) * K4, (1 + c / 7 % 20) * K4),
        };
        range(start, len)
    };
    for (kind, a, c, d) in ops {
        match kind {
            0..4 => {
                let r = anywhere(a, c);
                let (start, len) = (r.start().raw(), r.len());
                let phys =
                    if d % 3 != 0 || len > 4 * M2 { start + 16 * G1 } else { start + 5 * K4 };
                let access = [Access::READ, Access::WRITE, RW][(d % 3) as usize];
                let given = F::given(access.bits().into());
                let stats = b.table.stats();
                let listed = b.table.0.directory.lock().pending.len;
                match b.table.map(r, PhysAddr::new(phys), access) {
                    Ok(()) => {
                        prop_assert_eq!(first_in(&model, start, len), None);
                        let mut at = start;
                        while at < start + len {
                            let p = phys + (at - start);
                            let (found, size, bits) = b.at(at).unwrap();
                            prop_assert_eq!((found, bits), (p, given));
                            prop_assert!((at | p).is_multiple_of(size) && at + size <= start + len);
                            // Only a page that waits to be reclaimed may stand in the way of a
                            // larger leaf. One that was linked again meanwhile and has lost its
                            // mappings waits too, but is not retired.
                            if stats.retired == 0 && flushing.is_empty() && listed == 0 {
                                prop_assert_eq!(size, largest(at, p, start + len - at));
                            }
                            model.insert(at, (size, p, given));
                            at += size;
                        }
                        ranges.push(r);
                    }
                    Err(TableError::AlreadyMapped { at }) => {
                        prop_assert_eq!(Some(at.raw()), first_in(&model, start, len));
                    }
                    Err(e) => prop_assert_eq!(e, full(capacity)),
                }
            }
            4..8 => {
                let r = if kind > 4 && !ranges.is_empty() {
                    ranges.swap_remove(below(a, ranges.len()))
                } else {
                    anywhere(a, c)
                };
                let expected = expected_clear(&model, r);
                let mut retired = Retired::new();
                prop_assert_eq!(b.table.clear(r, &mut retired), expected);
                if expected.is_ok() {
                    model.retain(|s, _| !r.contains(Iova::new(*s)));
                    ranges.retain(|o| !o.overlaps(&r));
                }
                flushing.push_back(retired);
            }
            _ => {
                // Flushes are over in any order.
                let at = if flushing.is_empty() { 0 } else { below(a, flushing.len()) };
                if let Some(retired) = flushing.remove(at) {
                    b.table.reclaim(retired).unwrap();
                }
            }
        }
        for (&s, &(len, phys, access)) in &model {
            prop_assert_eq!(b.at(s), Some((phys, len, access)));
            prop_assert_eq!(b.at(s + len).is_some(), model.contains_key(&(s + len)));
        }
        prop_assert_eq!(dump::runs(&b.table), joined(&model));
        let stats = b.table.stats();
        prop_assert!(
            stats.in_use + stats.retired <= stats.high_water && stats.high_water <= stats.capacity
        );
    }
    let mut retired = Retired::new();
    for (&s, &(len, ..)) in &model {
        b.table.clear(range(s, len), &mut retired).unwrap();
    }
    b.table.reclaim(retired).unwrap();
    for retired in flushing {
        b.table.reclaim(retired).unwrap();
    }
    b.is_pristine();
    Ok(())
}
