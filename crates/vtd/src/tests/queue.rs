//! The queue: one tail write a batch, batches in parts, tickets that wrap, aborts.

use super::allocations::allocations;
use super::double::{
    Double, Heap, Identity, Lines, Payload, SNOOPING as CAP, SNOOPING_EXTENDED as ECAP,
};
use super::unit::{DEVICE, LIMIT, domain, enabled};
use crate::domain::DomainQueue;
use crate::queue::CAPACITY;
use crate::source::SourceId;
use crate::unit::{Unit, UnitError};
use crate::write_back::Coherent;
use pinfold_core::access::{Bidirectional, FromDevice};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{Domain, Mapping, TableBackend};
use pinfold_core::invalidate::{
    Descriptor, Flush, InvalidationQueue, Invalidator, QueueError, Scope, Ticket,
};
use std::mem::take;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Wake, Waker};

type Backend = TableBackend<crate::SecondStage<Coherent>, DomainQueue<Double, Coherent, Identity>>;

const DOMAIN: Descriptor = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };

fn backend(unit: &Arc<Unit<Double, Coherent>>, first: u64) -> (Backend, crate::unit::Attachments) {
    unit.create_backend(Identity::default(), Box::new(Heap), LIMIT, Ticket(first)).unwrap()
}

#[test]
fn a_batch_is_one_write_of_the_tail_and_a_wait_reads_memory_alone() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, _) = domain(&unit);
    let mappings: Vec<_> =
        (0..40).map(|_| domain.map(Payload::new(1), FromDevice).unwrap()).collect();
    // Every second one, so that they do not abut.
    let (even, _odd): (Vec<_>, Vec<_>) =
        mappings.into_iter().enumerate().partition(|(number, _)| number % 2 == 0);
    let before = double.counts();
    double.state().log.clear();
    let mut revoked = Vec::new();
    domain.revoke_many(even.into_iter().map(|(_, mapping)| mapping), &mut revoked);
    for one in revoked {
        drop(one.wait().unwrap());
    }
    let after = double.counts();
    assert_eq!(after.0 - before.0, 1);
    assert_eq!(after.1, before.1, "no register was read");
    let log = double.state().log.clone();
    assert!(log.len() > 2 && log.iter().filter(|entry| *entry == "wait").count() == 1, "{log:?}");
}

#[test]
fn tickets_go_on_where_the_status_word_wraps() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let first = u64::from(u32::MAX) - 3;
    let (backend, _) = backend(&unit, first);
    let queue = backend.queue();
    assert_eq!(queue.completed(), Ticket(first));
    for ticket in (first + 1..first + 10).step_by(3) {
        double.state().holds = true;
        for ticket in ticket..ticket + 3 {
            queue.submit(&[DOMAIN], Some(Ticket(ticket))).unwrap();
        }
        assert_eq!(queue.completed(), Ticket(ticket - 1), "nothing has been carried out");
        double.state().holds = false;
        double.run();
        assert_eq!(queue.completed(), Ticket(ticket + 2));
    }
    assert!(queue.completed().0 > u64::from(u32::MAX));
}

/// A status of 0 would be taken for the first ticket behind 2^32.
#[test]
fn a_queue_that_continues_begins_with_the_status_of_its_ticket() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let first = u64::from(u32::MAX);
    let (backend, _) = backend(&unit, first);
    double.state().holds = true;
    backend.queue().submit(&[DOMAIN], Some(Ticket(first + 1))).unwrap();
    assert_eq!(backend.queue().completed(), Ticket(first), "nothing has been carried out");
}

/// Makes the unit abort the submissions of `queue`, and returns when that is found.
fn abort(double: &Double, queue: &DomainQueue<Double, Coherent, Identity>) {
    double.state().bad_fetch = true;
    queue.submit(&[DOMAIN], None).unwrap();
    assert!((0..1_000).any(|_| queue.has_aborted()), "the error is found");
}

#[test]
fn an_abort_concerns_those_alone_that_have_something_in_flight() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (first, _) = backend(&unit, 0);
    let (idle, _) = backend(&unit, 7);
    let (first, idle) = (first.queue(), idle.queue());
    idle.submit(&[DOMAIN], Some(Ticket(8))).unwrap();
    assert_eq!(idle.completed(), Ticket(8));
    abort(&double, first);
    assert!(!idle.has_aborted(), "it has nothing in flight");
    double.state().holds = true;
    idle.submit(&[DOMAIN], Some(Ticket(9))).unwrap();
    assert!(!idle.has_aborted(), "the abort was before");
    double.state().holds = false;
    double.run();
    assert_eq!(idle.completed(), Ticket(9));
    // The other one has to restart first, and has nothing in flight then.
    assert_eq!(first.submit(&[DOMAIN], Some(Ticket(1))), Err(QueueError::Full));
    first.restart();
    abort(&double, idle);
    assert!(!first.has_aborted(), "its part ended with the abort before");
    first.submit(&[DOMAIN], Some(Ticket(1))).unwrap();
    assert_eq!(first.completed(), Ticket(1));
}

#[test]
fn a_status_that_no_wait_has_written_is_not_believed() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (backend, attachments) = backend(&unit, 100);
    let queue = backend.queue();
    double.state().holds = true;
    queue.submit(&[DOMAIN], Some(Ticket(101))).unwrap();
    let at = unit.status_for_test(attachments.id());
    for wrong in [102, 99, 0, u32::MAX] {
        at.store(wrong.into(), Ordering::Release);
        assert_eq!(queue.completed(), Ticket(100), "{wrong}");
    }
    at.store(101, Ordering::Release);
    assert_eq!(queue.completed(), Ticket(101));
}

#[test]
fn a_full_queue_accepts_again_when_it_has_been_worked_on() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (backend, _) = backend(&unit, 0);
    let queue = backend.queue();
    double.state().holds = true;
    assert!(queue.accepts() > CAPACITY - 16, "as far as it is known without a register");
    queue.submit(&[DOMAIN; 200], None).unwrap();
    assert_eq!(queue.accepts(), CAPACITY - 200);
    assert_eq!(queue.submit(&[DOMAIN; 55], Some(Ticket(1))), Err(QueueError::Full), "one too many");
    queue.submit(&[DOMAIN; 54], Some(Ticket(1))).unwrap();
    assert_eq!(queue.accepts(), 0);
    assert_eq!(queue.submit(&[DOMAIN], None), Err(QueueError::Full));
    double.state().holds = false;
    double.run();
    assert_eq!((queue.completed(), queue.accepts()), (Ticket(1), CAPACITY));
    // Many times around the ring.
    for ticket in 2..2_000 {
        queue.submit(&[DOMAIN; 7], Some(Ticket(ticket))).unwrap();
        assert_eq!(queue.completed(), Ticket(ticket));
    }
}

#[test]
fn a_queue_that_is_not_enabled_accepts_nothing_of_domains() {
    let double = Double::new(CAP, ECAP);
    let unit = Unit::<_, Coherent>::new(double.clone(), Box::new(Heap), 48).unwrap();
    let (backend, _) = backend(&unit, 0);
    assert_eq!(backend.queue().accepts(), 0);
    let refused = backend.queue().submit(&[DOMAIN], Some(Ticket(1)));
    assert_eq!((refused, double.counts().0), (Err(QueueError::Full), 0));
}

#[test]
fn every_slot_of_a_queue_is_written_back() {
    let (_, unit) = enabled::<Lines>(CAP, ECAP & !1);
    let (_, attachments) = domain(&unit);
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    // Two slots each.
    for ticket in 1..=CAPACITY as u64 {
        queue.submit(&[DOMAIN], Some(Ticket(ticket))).unwrap();
        assert_eq!(queue.completed(), Ticket(ticket));
    }
}

#[test]
fn a_submission_and_a_poll_allocate_nothing() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, Some(0)).unwrap();
    double.state().ats.insert(DEVICE.0);
    let map = || domain.map(Payload::new(1), FromDevice).unwrap();
    // Makes the one-time allocations.
    drop(map().unmap().unwrap());
    for _ in 0..3 {
        let mapping = map();
        // A unit that works allocates, since it is a test's.
        double.state().holds = true;
        let tails = double.counts().0;
        let before = allocations();
        let revoked = mapping.revoke();
        assert!(!revoked.is_quiesced());
        assert_eq!(allocations() - before, 0);
        assert!(double.counts().0 > tails, "it was submitted");
        double.state().holds = false;
        double.run();
        let before = allocations();
        assert!(revoked.is_quiesced());
        drop(revoked.wait().unwrap());
        assert_eq!(allocations() - before, 0);
    }
}

/// More flushes than the queue has room for, with two devices' TLBs.
fn large_batch(queue: &Invalidator<DomainQueue<Double, Coherent, Identity>>) -> Ticket {
    let page = |number: u64| IovaRange::new(Iova::new(number << 14), 4096).unwrap();
    queue.request_and_submit((0..150).map(|number| Flush { range: page(number), leaf_only: true }))
}

fn with_two_tlbs() -> (Double, Invalidator<DomainQueue<Double, Coherent, Identity>>) {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, Some(1)).unwrap();
    unit.attach(SourceId(0x777), &attachments, Some(1)).unwrap();
    double.state().ats.extend([DEVICE.0, 0x777]);
    double.state().log.clear();
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    (double, Invalidator::new(queue))
}

#[test]
fn a_batch_larger_than_the_queue_goes_in_parts() {
    let (double, queue) = with_two_tlbs();
    let ticket = large_batch(&queue);
    queue.wait(ticket).unwrap();
    let log = double.state().log.clone();
    let count = |kind: &str| log.iter().filter(|entry| *entry == kind).count();
    assert_eq!((count("iotlb 3"), count("fence"), count("tlb"), count("wait")), (150, 1, 300, 1));
    assert!(queue.stats().parts > 1 && log.last().unwrap() == "wait", "{log:?}");
}

#[test]
fn an_abort_between_the_parts_of_a_batch_begins_it_again() {
    let (double, queue) = with_two_tlbs();
    double.state().holds = true;
    let ticket = large_batch(&queue);
    assert!(!queue.is_completed(ticket), "the first part is in the queue");
    // It is aborted, and the second part goes on only when all has begun again.
    double.state().bad_fetch = true;
    double.state().holds = false;
    double.run();
    queue.wait(ticket).unwrap();
    let log = double.state().log.clone();
    let error = log.iter().position(|entry| entry == "error").unwrap();
    let after = &log[error..];
    let count = |kind: &str| after.iter().filter(|entry| *entry == kind).count();
    assert_eq!((count("iotlb 3"), count("tlb")), (150, 300), "all of it after the error");
}

/// A mapping that the device has cached, whose flush meets an error.
fn cached(
    unit: &Arc<Unit<Double, Coherent>>,
    double: &Double,
    tlb: Option<u8>,
) -> (Domain, Mapping<Payload, Bidirectional>, u64) {
    let (domain, attachments) = domain(unit);
    unit.attach(DEVICE, &attachments, tlb).unwrap();
    if tlb.is_some() {
        double.state().ats.insert(DEVICE.0);
    }
    let mapping = domain.map(Payload::new(1), Bidirectional).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    (domain, mapping, iova)
}

#[test]
fn a_queue_error_is_recovered_from_and_nothing_is_taken_for_completed() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, mapping, iova) = cached(&unit, &double, None);
    double.state().bad_fetch = true;
    let revoked = mapping.revoke();
    assert!(double.access(DEVICE, iova, true).is_some(), "the flush was not carried out");
    drop(revoked.wait().unwrap());
    assert_eq!(double.access(DEVICE, iova, true), None);
    assert_eq!(domain.stats().backend.invalidations.resubmitted, 1);
    assert_eq!(unit.take_stray_faults().0.len(), 1);
    // The queue goes on.
    drop(domain.map(Payload::new(1), FromDevice).unwrap().unmap().unwrap());
}

/// As QEMU's does.
#[test]
fn a_unit_that_goes_on_when_the_tail_is_written_recovers() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, mapping, iova) = cached(&unit, &double, None);
    double.state().resumes_at_tail = true;
    for _ in 0..2 {
        double.state().bad_fetch = true;
        drop(domain.map(Payload::new(1), FromDevice).unwrap().unmap().unwrap());
    }
    double.state().bad_fetch = true;
    drop(mapping.unmap().unwrap());
    assert_eq!(double.access(DEVICE, iova, true), None);
    assert_eq!(domain.stats().backend.invalidations.resubmitted, 3);
    // An error of a flush of the unit's own.
    let (_, others) = super::unit::domain(&unit);
    double.state().bad_fetch = true;
    unit.attach(SourceId(9), &others, None).unwrap();
}

#[test]
fn an_error_during_a_recovery_is_recovered_from_too() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_domain, mapping, iova) = cached(&unit, &double, None);
    double.state().bad_fetch = true;
    let revoked = mapping.revoke();
    double.state().bad_fetch = true;
    drop(revoked.wait().unwrap());
    assert_eq!(double.access(DEVICE, iova, true), None);
    let log = double.state().log.clone();
    assert_eq!(log.iter().filter(|entry| *entry == "error").count(), 2);
}

#[test]
fn an_error_of_one_domain_loses_nothing_of_another() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_first, mapping, iova) = cached(&unit, &double, None);
    let (second, at_second) = domain(&unit);
    let other = SourceId(0x801);
    unit.attach(other, &at_second, None).unwrap();
    let theirs = second.map(Payload::new(1), FromDevice).unwrap();
    let their_iova = theirs.iova().start().raw();
    assert!(double.access(other, their_iova, true).is_some());
    double.state().holds = true;
    let (revoked, theirs) = (mapping.revoke(), theirs.revoke());
    double.state().bad_fetch = true;
    double.state().holds = false;
    double.run();
    // The first domain finds and clears the error; the second learns of it.
    drop(revoked.wait().unwrap());
    assert!(
        double.access(other, their_iova, true).is_some(),
        "replaced by a wait that nobody sees"
    );
    drop(theirs.wait().unwrap());
    assert_eq!(double.access(DEVICE, iova, true), None);
    assert_eq!(double.access(other, their_iova, true), None);
}

#[test]
fn a_device_that_does_not_answer_completes_nothing_until_it_does() {
    for prefetched in 0..3 {
        let (double, unit) = enabled::<Coherent>(CAP, ECAP);
        let (_domain, mapping, iova) = cached(&unit, &double, Some(4));
        double.state().mute.insert(DEVICE.0);
        double.state().prefetched = prefetched;
        let mut revoked = mapping.revoke();
        for _ in 0..2_000 {
            revoked = match revoked.poll() {
                Ok(_) => panic!("a TLB that was not flushed"),
                Err(pending) => pending,
            };
        }
        assert!(double.access(DEVICE, iova, true).is_some(), "by its own TLB");
        assert!(double.state().log.iter().filter(|entry| *entry == "no answer").count() > 2);
        double.state().mute.clear();
        drop(revoked.wait().unwrap());
        assert_eq!(double.access(DEVICE, iova, true), None);
    }
}

#[test]
fn a_flush_before_ats_is_enabled_completes_once_it_is() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    unit.attach(DEVICE, &attachments, Some(4)).unwrap();
    assert!(!double.state().log.iter().any(|entry| entry == "no answer"), "nothing is cached yet");
    let Err(revoked) = mapping.revoke().poll() else { panic!("the device has not answered") };
    assert_eq!(double.state().log.last().unwrap(), "no answer");
    double.state().ats.insert(DEVICE.0);
    drop(revoked.wait().unwrap());
}

#[test]
fn a_task_sleeps_until_a_pause_is_over_or_its_flush_has_ended() {
    struct Wakes(AtomicU32);
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, _) = domain(&unit);
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    double.state().holds = true;
    let mut task = pin!(mapping.revoke().into_future());
    let wakes = Arc::new(Wakes(AtomicU32::new(0)));
    let waker = Waker::from(Arc::clone(&wakes));
    let mut context = Context::from_waker(&waker);
    for pauses in 0..4 {
        assert!(task.as_mut().poll(&mut context).is_pending());
        assert_eq!(wakes.0.load(Ordering::Relaxed), pauses, "woken before the pause");
        let paused = take(&mut double.state().paused);
        assert_eq!(paused.len(), 1);
        paused.into_iter().for_each(Waker::wake);
    }
    double.state().holds = false;
    double.run();
    assert!(task.as_mut().poll(&mut context).is_ready());
    assert!(double.state().paused.is_empty());
}

#[test]
fn a_wrong_answer_of_a_device_aborts_nothing() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_domain, mapping, _) = cached(&unit, &double, None);
    double.state().holds = true;
    let mut revoked = mapping.revoke();
    double.state().fsts |= 1 << 5;
    for _ in 0..600 {
        let Err(pending) = revoked.poll() else { panic!("not carried out") };
        revoked = pending;
    }
    assert_eq!((unit.wrong_answers(), double.state().fsts), (1, 0));
    double.state().log.clear();
    double.state().holds = false;
    double.run();
    drop(revoked.wait().unwrap());
    assert_eq!(double.state().log, ["iotlb 3", "wait"], "and nothing again");
}

#[test]
fn a_queue_that_does_not_move_again_has_failed_for_good() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, mapping, _) = cached(&unit, &double, None);
    double.state().holds = true;
    let revoked = mapping.revoke();
    double.state().fsts |= 1 << 4;
    double.state().stuck = true;
    let error = revoked.wait().map(drop).unwrap_err().error.to_string();
    assert!(error.contains("the invalidation unit has failed"), "{error}");
    assert!(domain.stats().quarantined + domain.stats().deferred > 0);
    let (_, others) = super::unit::domain(&unit);
    let tails = double.counts().0;
    let attached = unit.attach(SourceId(9), &others, None);
    assert_eq!(attached, Err(UnitError::NotFlushed { what: "a context entry" }));
    assert_eq!(double.counts().0, tails, "nothing is submitted to it");
}

#[test]
fn a_flush_of_the_units_own_waits_for_room() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (backend, _) = backend(&unit, 0);
    let (_, attachments) = domain(&unit);
    double.state().holds = true;
    // It needs a place more, with its wait.
    backend.queue().submit(&[DOMAIN; CAPACITY - 1], None).unwrap();
    double.state().log.clear();
    let refused = unit.attach(DEVICE, &attachments, None);
    assert_eq!(refused, Err(UnitError::NotFlushed { what: "a context entry" }));
    double.state().holds = false;
    double.run();
    let log = double.state().log.clone();
    assert!(log.iter().all(|entry| entry.starts_with("iotlb")), "{log:?}");
    assert_eq!(log.len(), CAPACITY - 1, "none is written over");
}

#[test]
fn a_flush_of_the_units_own_recovers_a_full_queue() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (backend, _) = backend(&unit, 0);
    let (_, attachments) = domain(&unit);
    double.state().holds = true;
    backend.queue().submit(&[DOMAIN; CAPACITY], None).unwrap();
    // An error, so that it fetches nothing until that is cleared.
    double.state().fsts |= 1 << 4;
    double.state().holds = false;
    unit.attach(DEVICE, &attachments, None).unwrap();
}

#[test]
fn a_fence_writes_nothing_that_is_waited_for() {
    let (_, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let status = || unit.status_for_test(0).load(Ordering::Relaxed);
    let before = status();
    assert_ne!(before, 0);
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    queue.submit(&[Descriptor::Fence], Some(Ticket(1))).unwrap();
    assert_eq!((status(), queue.completed()), (before, Ticket(1)));
}

#[test]
fn a_flush_of_the_units_own_is_given_again_after_an_error() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_, attachments) = domain(&unit);
    double.state().bad_fetch = true;
    unit.attach(DEVICE, &attachments, None).unwrap();
    let log = double.state().log.clone();
    assert_eq!(log, ["error", "wait", "wait", "context 3", "wait", "iotlb 2", "wait"]);
    // Not carried out at all.
    double.state().holds = true;
    let error = unit.detach(DEVICE, &attachments).unwrap_err();
    assert_eq!(error, UnitError::NotFlushed { what: "a context entry" });
}

/// Random maps, revocations and accesses, and errors between them: what is quiesced is never
/// reached, and what is mapped always is.
#[test]
fn nothing_is_reached_after_it_is_quiesced() {
    for seed in 0..20_u64 {
        let (double, unit) = enabled::<Coherent>(CAP ^ (seed & 1) << 7, ECAP);
        let (domain, attachments) = domain(&unit);
        let tlb = (seed % 3 == 0).then_some(2);
        unit.attach(DEVICE, &attachments, tlb).unwrap();
        if tlb.is_some() {
            double.state().ats.insert(DEVICE.0);
        }
        let mut random = seed * 77 + 1;
        let mut below = |limit: usize| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % limit
        };
        let (mut mapped, mut revoked, mut gone) =
            (Vec::new(), Vec::new(), Vec::<(u64, u64)>::new());
        for _ in 0..400 {
            match below(8) {
                0..=2 => {
                    let mapping = domain.map(Payload::new(1 + below(30)), Bidirectional).unwrap();
                    let from = mapping.iova().start().raw();
                    gone.retain(|(start, len)| {
                        from + mapping.iova().len() <= *start || start + len <= from
                    });
                    mapped.push(mapping);
                }
                3 | 4 if !mapped.is_empty() => {
                    revoked.push(mapped.swap_remove(below(mapped.len())).revoke());
                }
                5 if !revoked.is_empty() => {
                    double.state().holds = false;
                    double.run();
                    let one = revoked.swap_remove(below(revoked.len()));
                    let range = (one.iova().start().raw(), one.iova().len());
                    drop(one.wait().unwrap());
                    gone.push(range);
                }
                6 => double.state().bad_fetch = true,
                _ => {
                    let mut state = double.state();
                    state.holds = !state.holds;
                    // A map with caching mode waits for its flush.
                    state.holds &= seed & 1 == 0;
                }
            }
            for mapping in &mapped {
                let page = below(mapping.iova().len() as usize / 4096) as u64 * 4096;
                let (iova, phys) = (mapping.iova().start().raw(), mapping.memory().addr() as u64);
                assert_eq!(double.access(DEVICE, iova + page, true), Some(phys + page));
            }
            for one in &revoked {
                double.access(DEVICE, one.iova().start().raw(), true);
            }
            for (start, len) in &gone {
                let page = below(*len as usize / 4096) as u64 * 4096;
                assert_eq!(double.access(DEVICE, start + page, true), None, "seed {seed}");
            }
            double.state().log.clear();
            unit.take_faults(&attachments);
        }
    }
}
