//! Payloads of several pieces of memory, and of parts of pages.

use super::*;
use crate::mem::DmaMemory;

/// Two buffers, of which bytes 100 to 4196 and 5000 to 6000 are the data.
struct Scattered([Buf; 2]);

// SAFETY: as for `Buf`; the pieces do not change.
unsafe impl Pinned for Scattered {
    fn memory(&self) -> DmaMemory<'_> {
        self.0[0].memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        self.0.get(index).map(Pinned::memory)
    }
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        [(100, 4096), (5000, 1000)].get(index).copied()
    }
}

fn scattered(pages: [usize; 2], drops: &Arc<AtomicUsize>) -> Scattered {
    Scattered(pages.map(|pages| Buf::new(pages, drops)))
}

#[test]
fn scattered_memory_is_contiguous_for_the_device() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let mapping = domain.map(scattered([1, 2], &drops), FromDevice).unwrap();
    let iova = mapping.iova();
    let of = |index, page| mapping.piece(index).unwrap().addr() + page * PAGE;
    let found: Vec<_> = mock.pages.lock().iter().map(|(page, (addr, _))| (*page, *addr)).collect();
    let first = iova.start().raw() / 4096;
    assert_eq!(found, [(first, of(0, 0)), (first + 1, of(1, 0)), (first + 2, of(1, 1))]);
    let segments: Vec<_> =
        mapping.segments().map(|s| (s.iova.raw() - iova.start().raw(), s.len)).collect();
    assert_eq!(segments, [(100, 4096), (5000, 1000)]);
    assert_eq!(Payload::<FromDevice>::segment(&mapping, 1).map(|s| s.len), Some(1000));
    assert_eq!(Payload::<FromDevice>::segment(&mapping, 2), None);
    drop(mapping.unmap().unwrap());
    assert!(mock.pages.lock().is_empty());
    assert_eq!((drops.load(Ordering::SeqCst), mock.flushes.load(Ordering::SeqCst)), (2, 1));
}

#[test]
fn a_buffer_is_one_extent() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let mapping = domain.map(Buf::new(2, &drops), FromDevice).unwrap();
    assert_eq!(mapping.segments().collect::<Vec<_>>(), [mapping.segment()]);
}

#[test]
fn a_map_that_fails_at_a_later_piece_is_undone() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let empty = domain.space.iovas.stats();
    let failed = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(matches!(failed.error, BackendError::NotRegistered { .. }) && failed.payload.is_some());
    assert!(mock.pages.lock().is_empty());
    assert_eq!((mock.flushes.load(Ordering::SeqCst), domain.space.iovas.stats()), (1, empty));
}

#[test]
fn pieces_that_may_be_reached_after_a_failed_map_are_held_or_quarantined() {
    let (mock, domain, drops) = domain();
    let late = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(late.payload.is_none() && late.error.late_ticket().is_some());
    assert_eq!((domain.stats().deferred, domain.stats().deferred_bytes), (1, 11 * 4096));
    complete(&mock, Ticket(1));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 2));
    set(&mock.refuse_revoke);
    let stuck = domain.map(scattered([2, 9], &drops), Bidirectional).map(drop).unwrap_err();
    assert!(stuck.payload.is_none() && stuck.error == BackendError::NotRevoked);
    assert_eq!((domain.stats().quarantined, drops.load(Ordering::SeqCst)), (1, 2));
}
