//! Many payloads whose flush is late, and payloads that use their domain while they are dropped.

use super::*;
use crate::mem::DmaMemory;

/// A payload that looks for others that can be dropped when it is dropped itself.
struct Reentrant {
    buf: Buf,
    domain: Domain,
}

// SAFETY: those of `buf`.
unsafe impl Pinned for Reentrant {
    fn memory(&self) -> DmaMemory<'_> {
        self.buf.memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Drop for Reentrant {
    fn drop(&mut self) {
        self.domain.release_late();
    }
}

/// Each drop finds the next payload; they are dropped one after the other, not one inside the
/// other.
#[test]
fn payloads_that_use_their_domain_when_dropped_do_not_pile_up_on_the_stack() {
    const COUNT: usize = 20_000;
    let (mock, domain, drops) = domain();
    let extents = domain.stats().iova_extents;
    for _ in 0..COUNT {
        let payload = Reentrant { buf: Buf::new(1, &drops), domain: domain.clone() };
        drop(domain.map(payload, FromDevice).unwrap());
    }
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (COUNT as u64, 0));
    complete(&mock, Ticket(COUNT as u64));
    let small = std::thread::Builder::new().stack_size(256 << 10);
    let domain = small.spawn(move || {
        assert_eq!(domain.release_late(), 0);
        domain
    });
    let domain = domain.unwrap().join().unwrap();
    assert_eq!(drops.load(Ordering::SeqCst), COUNT);
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.unmaps, stats.iova_extents), (0, COUNT as u64, extents));
}

/// Those that are due are dropped in the order of their tickets, however they came; the others
/// stay.
#[test]
fn what_is_due_is_released_and_the_rest_is_not() {
    let (mock, domain, drops) = domain();
    let mut revoked: Vec<_> =
        (0..9).map(|_| domain.map(Buf::new(1, &drops), FromDevice).unwrap().revoke()).collect();
    for at in [4, 0, 3, 3, 0, 3, 1, 0, 0] {
        drop(revoked.swap_remove(at));
    }
    for due in 1..=9 {
        complete(&mock, Ticket(due));
        assert_eq!(domain.release_late(), 9 - due);
        assert_eq!(drops.load(Ordering::SeqCst) as u64, due);
    }
}
