//! `Registry`: refused changes, holds, updates, and agreement with a map of bytes.

use super::*;

fn plain(addr: usize, len: u64) -> Registered {
    Registered::from_segments(addr, [seg(addr as u64, len)]).unwrap()
}

/// What a refusal returns.
fn refused<T>(
    buffer: Registered,
    error: impl Into<RegisterError>,
) -> Result<T, Refused<Registered>> {
    Err(Refused { buffer, error: error.into() })
}

#[test]
fn wrong_registrations_are_refused_and_change_nothing() {
    assert_eq!(Registry::<Registered>::new(0).unwrap_err(), RegisterError::Capacity { asked: 0 });
    assert_eq!(
        Registry::<Registered>::new(16_385).unwrap_err(),
        RegisterError::Capacity { asked: 16_385 }
    );
    let mut table = Registry::new(2).unwrap();
    let first = table.register(plain(0x1000, 0x1000)).unwrap();
    let overlap = RegisterError::Overlaps { addr: 0x1fff, len: 1, with: first };
    assert_eq!(table.register(plain(0x1fff, 1)), refused(plain(0x1fff, 1), overlap));
    let taken = RegisterError::Taken { index: first };
    assert_eq!(table.register_at(first, plain(0x9000, 1)), refused(plain(0x9000, 1), taken));
    let beyond = IndexError::Beyond { index: BufferIndex::new(2), capacity: 2 };
    assert_eq!(
        table.register_at(BufferIndex::new(2), plain(0x9000, 1)),
        refused(plain(0x9000, 1), beyond)
    );
    assert_eq!(
        table.update(BufferIndex::new(2), plain(0x9000, 1)),
        refused(plain(0x9000, 1), beyond)
    );
    let second = table.register(plain(0x2000, 0x1000)).unwrap();
    let full = RegisterError::Full { capacity: 2 };
    assert_eq!(table.register(plain(0x9000, 1)), refused(plain(0x9000, 1), full));
    assert_eq!(
        table.register(plain(0x9000, 1)).unwrap_err().to_string(),
        "all 2 places of the buffer table are taken: unregister one first"
    );
    assert_eq!(table.find(0x2fff), Some((second, 0xfff)));
    assert_eq!(table.find(0x3000), None);
    assert_eq!(table.unregister(first), Ok(Unregistered::Free(plain(0x1000, 0x1000))));
    assert_eq!(table.unregister(first), Err(IndexError::Vacant { index: first }));
    assert_eq!(table.unregister(BufferIndex::new(7)).unwrap_err().to_string(), {
        "buffer:7 does not exist: the buffer table has 2 places"
    });
    assert_eq!(table.locate(second, 1), Ok(seg(0x2001, 0xfff)));
    assert!(matches!(table.segments(second, 0, 0x1001), Err(IndexError::Outside(_))));
    assert_eq!((table.len(), table.is_empty()), (1, false));
}

proptest! {
    #[test]
    fn the_table_agrees_with_a_map_of_bytes(
        steps in prop::collection::vec((any::<bool>(), 0usize..96, 1u64..24, 0u16..10), 1..200)
    ) {
        let mut table = Registry::new(8).unwrap();
        let mut model: [Option<u16>; 128] = [None; 128];
        for (add, addr, len, index) in steps {
            let span = addr..addr + usize::try_from(len).unwrap();
            let index = BufferIndex::new(index);
            if add {
                let free = model[span.clone()].iter().all(Option::is_none);
                match table.register(plain(addr, len)) {
                    Ok(index) => {
                        prop_assert!(free);
                        model[span].fill(Some(index.get()));
                    }
                    Err(Refused { error: RegisterError::Overlaps { with, .. }, .. }) => {
                        prop_assert!(model[span].contains(&Some(with.get())));
                    }
                    Err(refused) => prop_assert_eq!((refused.error, table.len()), (RegisterError::Full { capacity: 8 }, 8)),
                }
            } else {
                let there = model.contains(&Some(index.get()));
                prop_assert_eq!(table.unregister(index).is_ok(), there);
                model.iter_mut().filter(|byte| **byte == Some(index.get())).for_each(|byte| *byte = None);
            }
            for (addr, byte) in model.iter().enumerate() {
                prop_assert_eq!(table.find(addr).map(|(index, _)| index.get()), *byte);
            }
        }
    }
}

#[test]
fn a_held_buffer_vacates_its_place_at_once_and_is_returned_with_the_last_hold() {
    let mut table = Registry::new(4).unwrap();
    let index = table.register(plain(0x1000, 0x1000)).unwrap();
    let (one, two) = (table.hold(index).unwrap(), table.hold(index).unwrap());
    assert_eq!((table.holds(index), one.index()), (Ok(2), index));
    assert_eq!(table.unregister(index), Ok(Unregistered::Held { holds: 2 }));
    assert_eq!(table.unregister(index), Err(IndexError::Vacant { index }), "twice");
    assert_eq!(table.hold(index), Err(IndexError::Vacant { index }), "no new I/O begins on it");
    // The place and the memory can be registered again, with separate holds.
    assert_eq!(table.register(plain(0x1800, 0x1000)), Ok(index));
    let newer = table.hold(index).unwrap();
    assert_eq!((table.release(one), table.leaving()), (Ok(None), 1));
    assert_eq!(table.release(two), Ok(Some(plain(0x1000, 0x1000))));
    assert_eq!((table.holds(index), table.leaving()), (Ok(1), 0));
    assert_eq!(table.release(newer), Ok(None));
    assert_eq!(table.unregister(index), Ok(Unregistered::Free(plain(0x1800, 0x1000))));
}

#[test]
fn an_update_replaces_in_place_and_may_overlap_what_it_replaces() {
    let mut table = Registry::new(3).unwrap();
    let [a, b, c] = [0, 1, 2].map(BufferIndex::new);
    assert_eq!(table.update(c, plain(0x5000, 0x1000)), Ok(None), "sparse");
    assert_eq!(table.register(plain(0x1000, 0x1000)), Ok(a));
    let hold = table.hold(a).unwrap();
    let overlap = RegisterError::Overlaps { addr: 0x1000, len: 0x5000, with: c };
    assert_eq!(table.update(a, plain(0x1000, 0x5000)), refused(plain(0x1000, 0x5000), overlap));
    assert_eq!(table.get(a), Ok(&plain(0x1000, 0x1000)), "the previous buffer is unchanged");
    assert_eq!(table.update(a, plain(0x1800, 0x2000)), Ok(Some(Unregistered::Held { holds: 1 })));
    assert_eq!(table.find(0x1000), None);
    assert_eq!(table.find(0x1800), Some((a, 0)));
    assert_eq!(table.release(hold), Ok(Some(plain(0x1000, 0x1000))));
    let listed: Vec<_> = table.iter().map(|(index, buffer)| (index, buffer.addr())).collect();
    assert_eq!(listed, [(a, 0x1800), (c, 0x5000)]);
    assert_eq!(table.prepare(None, 0x9000, 1), Ok(b));
    assert_eq!(table.prepare(Some(c), 0x5800, 0x1000), Ok(c));
    assert!(
        matches!(table.prepare(None, 0x5800, 1), Err(RegisterError::Overlaps { with, .. }) if with == c)
    );
}

/// Passes a hold to a table that did not issue it, and takes it back.
fn release_elsewhere(table: &mut Registry<Registered>, hold: Hold) -> Hold {
    let index = hold.index();
    let NotHeld(back) = table.release(hold).unwrap_err();
    assert_eq!(back.index(), index);
    back
}

#[test]
fn a_hold_of_another_table_is_refused_and_given_back() {
    let mut one = Registry::new(1).unwrap();
    let mut other = Registry::new(1).unwrap();
    let index = one.register(plain(0x1000, 0x1000)).unwrap();
    let hold = one.hold(index).unwrap();
    // A table without such a buffer, and one with another in that place.
    let hold = release_elsewhere(&mut other, hold);
    other.register(plain(0x1000, 0x1000)).unwrap();
    let hold = release_elsewhere(&mut other, hold);
    assert_eq!((one.holds(index), other.holds(index)), (Ok(1), Ok(0)));
    assert_eq!(
        NotHeld(hold).to_string(),
        "the hold on buffer:0 was not issued by this table: release it in the table that issued it"
    );
    // It still ends the I/O in its own table.
    let hold = one.hold(index).unwrap();
    let hold = release_elsewhere(&mut other, hold);
    assert_eq!((one.release(hold), one.holds(index)), (Ok(None), Ok(1)));
}

/// The other table has as many buffers in the same places, and I/O in flight on each.
#[test]
fn a_hold_unpins_no_equal_buffer_of_another_table() {
    let mut tables = [Registry::new(2).unwrap(), Registry::new(2).unwrap()];
    let index = tables.each_mut().map(|table| table.register(plain(0x1000, 0x1000)).unwrap())[0];
    let [mine, other] = tables.each_mut().map(|table| table.hold(index).unwrap());
    let mine = release_elsewhere(&mut tables[1], mine);
    assert_eq!(tables[1].holds(index), Ok(1));
    // Likewise once the buffers have left their places.
    for table in &mut tables {
        assert_eq!(table.unregister(index), Ok(Unregistered::Held { holds: 1 }));
    }
    let mine = release_elsewhere(&mut tables[1], mine);
    for (table, hold) in tables.iter_mut().zip([mine, other]) {
        assert_eq!(table.leaving(), 1);
        assert_eq!(table.release(hold), Ok(Some(plain(0x1000, 0x1000))));
    }
}

#[test]
fn the_largest_table_is_full_at_its_last_place() {
    let mut table = Registry::new(Registry::<Registered>::MAX_BUFFERS).unwrap();
    let tib = Registered::MAX_BYTES;
    // 127 buffers of 1 TiB are all that 47 bits of addresses hold; the rest are small.
    for i in 0..127 {
        table.register(plain(usize::try_from(i * tib).unwrap(), tib)).unwrap();
    }
    for i in 127..16_384 {
        let index = BufferIndex::new(i);
        table.register_at(index, plain((127 << 40) + usize::from(i) * 8192, 4096)).unwrap();
    }
    let full = RegisterError::Full { capacity: 16_384 };
    let one_more = plain((127 << 40) + (16_384 << 13), 1);
    assert_eq!(table.register(one_more.clone()), refused(one_more, full));
    assert_eq!(table.find((126 << 40) + 5), Some((BufferIndex::new(126), 5)));
    let beyond = plain(usize::try_from(64 * tib).unwrap(), tib);
    assert!(matches!(
        table.update(BufferIndex::new(63), beyond),
        Err(Refused { error: RegisterError::Overlaps { .. }, .. })
    ));
    assert!(matches!(
        Registered::from_segments(0, [seg(0, tib + 1)]),
        Err(BufferError::TooLong { .. })
    ));
}
