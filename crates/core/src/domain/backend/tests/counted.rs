//! Read-modify-writes of an owner's calls, counted: what its operations share with other threads.

use super::pinned::{Nowhere, domain};
use super::*;
use crate::access::FromDevice;
use crate::domain::{DomainLocal, Mapping, Revoked};
use crate::sync::{lock_count, longest_hold, rmw_count, rmw_reset};

/// Read-modify-writes of a mapping through an owner, locks included: none of its own, and those of
/// one request for each revocation, or batch of them.
#[test]
fn owners_share_next_to_nothing() {
    const ROUNDS: usize = 200;
    let (_unit, domain) = domain(64, Scattered::default());
    let mut local = domain.local();
    let batch = |local: &mut DomainLocal, many: usize| {
        let mappings: Vec<_> =
            (0..many).map(|_| local.map(Nowhere(1), FromDevice).unwrap()).collect();
        let mut revoked: Vec<Revoked<Nowhere>> = Vec::with_capacity(many);
        local.revoke_many(mappings, &mut revoked);
        assert!(revoked.into_iter().all(|one| local.wait(one).is_ok()));
    };
    for (many, limit) in [(256, 0.02), (16, 0.5), (1, 8.0)] {
        batch(&mut local, many);
        rmw_reset();
        (0..ROUNDS).for_each(|_| batch(&mut local, many));
        let each = rmw_count() as f64 / (ROUNDS * many) as f64;
        println!("{many} at a time: {each} read-modify-writes for a map and its revocation");
        assert!(each <= limit, "{each} for {many} at a time");
    }
}

/// Returns the read-modify-writes and locks for each of many rounds of a map and what `end` does
/// with the mapping.
fn each(
    queue: Scattered,
    mut end: impl FnMut(&mut DomainLocal, Mapping<Nowhere, FromDevice>),
) -> (f64, f64) {
    const ROUNDS: u32 = 4096;
    let (_unit, domain) = domain(64, queue);
    let mut local = domain.local();
    let mut rounds = |count| {
        for _ in 0..count {
            let mapping = local.map(Nowhere(1), FromDevice).unwrap();
            end(&mut local, mapping);
        }
    };
    rounds(2048);
    rmw_reset();
    rounds(ROUNDS);
    (rmw_count() as f64 / f64::from(ROUNDS), lock_count() as f64 / f64::from(ROUNDS))
}

/// The one read-modify-write is that of the lock under which the request is appended and its flush
/// submitted. Where the flush takes time, the waiter also publishes its completion, and counts its
/// wait.
#[test]
fn a_mapping_that_is_waited_for_by_itself_takes_one_lock_once() {
    type Case = (&'static str, fn(&mut DomainLocal, Mapping<Nowhere, FromDevice>));
    let cases: [Case; 4] = [
        ("unmap", |local, mapping| {
            let Nowhere(_) = local.unmap(mapping).unwrap();
        }),
        ("revoke and wait", |local, mapping| {
            let revoked = local.revoke(mapping);
            let Nowhere(_) = local.wait(revoked).unwrap();
        }),
        ("revoke and look", |local, mapping| {
            let revoked = local.revoke(mapping);
            while !revoked.is_quiesced() {
                local.domain.wait(revoked.ticket(), None).unwrap();
            }
            let Nowhere(_) = local.poll(revoked).unwrap();
        }),
        ("revoke and poll", |local, mapping| {
            let mut revoked = local.revoke(mapping);
            while let Err(again) = local.poll(revoked) {
                revoked = again;
                local.domain.wait(revoked.ticket(), None).unwrap();
            }
        }),
    ];
    for takes_polls in [0, 1] {
        for (name, end) in cases {
            let queue =
                Scattered { takes_polls, patient: true, forgets: true, ..Scattered::default() };
            let (rmws, locks) = each(queue, end);
            println!(
                "{name}, a flush of {takes_polls} polls: {rmws} read-modify-writes, {locks} locks"
            );
            let limit = if takes_polls == 0 { 1.0 } else { 3.0 };
            assert!(
                rmws <= limit && locks <= 1.0,
                "{name}, {takes_polls} polls: {rmws}, {locks} locks"
            );
        }
    }
}

/// The work of a call that revokes very many mappings under one hold of a lock does not grow with
/// their number: 16 requests are appended and 256 merged once, or 64 table pages are handled, in
/// some five steps each.
#[test]
fn no_lock_is_held_for_longer_because_more_is_revoked() {
    const STEPS: u64 = 512;
    const PAGES: usize = 2048;
    let show = |what: &str, count: usize| {
        println!(
            "{count}, {what}: at most {} steps under one of {} holds",
            longest_hold(),
            lock_count()
        );
        assert!(longest_hold() <= STEPS, "{count}, {what}: {}", longest_hold());
        rmw_reset();
    };
    let slow =
        || Scattered { takes_polls: 1, patient: true, forgets: true, ..Scattered::default() };
    for (count, stride) in [(10_000, 1), (10_000, 7919), (1_000_000, 1), (1_000_000, 7919)] {
        let (_unit, domain) = domain(PAGES, slow());
        let mut local = domain.local();
        let mut mapped: Vec<_> =
            (0..count).map(|_| Some(local.map(Nowhere(1), FromDevice).unwrap())).collect();
        let mut revoked: Vec<Revoked<Nowhere>> = Vec::with_capacity(count);
        let order = (0..count).map(|i| i * stride % count);
        rmw_reset();
        local.revoke_many(order.map(|i| mapped[i].take().unwrap()), &mut revoked);
        show("by an owner", count);
        assert!(revoked.into_iter().all(|one| local.wait(one).is_ok()));
        show("returned to an owner", count);
        drop(local);
        show("the owner", count);
    }
    // Without an owner the table pages are retired by the call, and reclaimed by one of the next.
    let (unit, domain) = domain(PAGES, slow());
    let mapped: Vec<_> =
        (0..1_000_000).map(|_| domain.map(Nowhere(1), FromDevice).unwrap()).collect();
    let (mut revoked, before): (Vec<Revoked<Nowhere>>, _) =
        (Vec::with_capacity(mapped.len()), unit.stats().table_pages);
    let count = mapped.len();
    rmw_reset();
    domain.revoke_many(mapped, &mut revoked);
    assert!(unit.stats().table_pages_retired > 1800);
    show("by a domain", count);
    assert!(revoked.into_iter().all(|one| one.wait().is_ok()));
    while unit.wait_for_retired(unit.deferred.reclaimed()) {}
    show("and reclaimed", count);
    let stats = unit.stats();
    assert!(stats.table_pages_retired == 0 && stats.table_pages < before / 8);
}
