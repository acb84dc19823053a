//! Every interleaving (up to a few preemptions) of an owner that allocates, recycles and closes
//! windows with threads that return addresses to them.
//!
//! Each range of addresses is modelled by a cell that its mapping uses: loom reports a use that is
//! not ordered before the use by the next mapping at that address.

use super::late::Due;
use super::owner::{Anyone, Caller, MAX_BYTES, Owner};
use super::window::{Addresses, Origin};
use super::{
    Backend, BackendError, Domain, DomainId, Pinned, Properties, Revocation, Wait, WindowToken,
};
use crate::access::{Access, FromDevice};
use crate::addr::{Iova, IovaRange};
use crate::invalidate::Ticket;
use crate::iova::IovaSpace;
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering, UnsafeCell, in_all_orders};
use alloc::vec::Vec;
use core::ptr::NonNull;
use core::task::{Poll, Waker};
use loom::sync::Arc;
use loom::thread;

/// Maps nothing, completes its tickets when it is told, and wakes who waits for them.
#[derive(Default)]
struct Waking {
    last: AtomicU64,
    done: AtomicU64,
    wakers: Mutex<Vec<(Ticket, Waker)>>,
}

impl Waking {
    fn complete(&self, ticket: Ticket) {
        let mut wakers = self.wakers.lock();
        self.done.store(ticket.0, Ordering::Release);
        let due: Vec<_> = wakers.extract_if(.., |(awaited, _)| *awaited <= ticket).collect();
        drop(wakers);
        due.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

impl Backend for Arc<Waking> {
    fn properties(&self) -> Properties {
        Properties::new("waking")
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        _: IovaRange,
        _: DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        Ok(())
    }
    fn revoke<'w>(
        &self,
        _: Revocation<'w>,
        _: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        Ok(Ticket(self.last.fetch_add(1, Ordering::Relaxed) + 1))
    }
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        let wakers = self.wakers.lock();
        let checked = match self.done.load(Ordering::Acquire) >= ticket.0 {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        };
        match wait {
            Wait::Wake(_, waker) if checked.is_pending() => {
                let mut wakers = wakers;
                wakers.push((ticket, waker.clone()));
                checked
            }
            Wait::Not | Wait::Wake(..) => checked,
            Wait::ToDeadline | Wait::For(_) => Poll::Ready(Ok(())),
        }
    }
}

/// The memory at the addresses of the first window: a cell for each half.
struct Cells([UnsafeCell<u32>; 2]);
// SAFETY: a cell is used by the mapping at its addresses alone; whether that holds is what loom
// checks.
unsafe impl Send for Cells {}
// SAFETY: as for `Send`.
unsafe impl Sync for Cells {}

struct World {
    domain: Domain,
    cells: Cells,
}

impl World {
    fn new() -> Arc<Self> {
        let backend = alloc::sync::Arc::new(Arc::new(Waking::default()));
        let domain = Domain::new(backend, IovaSpace::new(39).unwrap());
        Arc::new(Self { domain, cells: Cells([UnsafeCell::new(0), UnsafeCell::new(0)]) })
    }

    /// Uses the addresses, if they are in window `first`.
    fn touch(&self, first: IovaRange, addresses: &Addresses) {
        if let Some(offset) = addresses.iova.start().checked_offset_from(first.start())
            && let Some(cell) = self.cells.0.get((offset / MAX_BYTES) as usize)
        {
            // SAFETY: the addresses are this mapping's; loom reports it if another one uses them
            // still.
            cell.with_mut(|cell| unsafe { *cell += 1 });
        }
    }

    /// Uses those of the first two pages of window `first` that are among the addresses.
    fn touch_page(&self, first: IovaRange, addresses: &Addresses) {
        for (page, cell) in self.cells.0.iter().enumerate() {
            if first.part(page as u64 * 4096, 4096).is_some_and(|page| addresses.iova.covers(&page))
            {
                // SAFETY: as in `touch`.
                cell.with_mut(|cell| unsafe { *cell += 1 });
            }
        }
    }

    fn alloc(&self, owner: &mut Owner) -> Addresses {
        owner.alloc(&self.domain.space, MAX_BYTES, || 4096).unwrap()
    }

    /// Returns the window of the first allocation.
    fn window(addresses: &Addresses) -> IovaRange {
        IovaRange::new(addresses.iova.start(), 2 * MAX_BYTES).unwrap()
    }

    fn assert_all_returned(&self) {
        let stats = self.domain.stats();
        assert_eq!((stats.windows, stats.quarantined), (0, 0));
        assert_eq!(self.domain.space.iovas.stats().bytes_in_use, 0);
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    (builder.preemption_bound, builder.max_branches) = (Some(preemptions), 20_000);
    in_all_orders(|| builder.check(model));
}

/// Another thread returns half of a window while the owner returns the other half and maps on: it
/// recycles the window or opens another one, and both uses of an address are ordered.
#[test]
fn loom_a_window_is_recycled_after_what_others_return() {
    explore(3, || {
        let world = World::new();
        let mut owner = world.domain.space.register_owner();
        let (sent, kept) = (world.alloc(&mut owner), world.alloc(&mut owner));
        let first = World::window(&sent);
        let other = Arc::clone(&world);
        let other = thread::spawn(move || {
            other.touch(first, &sent);
            Anyone.release(&other.domain.space, sent);
        });
        world.touch(first, &kept);
        owner.release(&world.domain.space, kept);
        for _ in 0..2 {
            let next = world.alloc(&mut owner);
            world.touch(first, &next);
            owner.release(&world.domain.space, next);
        }
        other.join().unwrap();
        world.domain.space.retire_owner(&mut owner);
        world.assert_all_returned();
    });
}

/// A thread closes the idle windows of all owners while an owner allocates from its own, and a
/// third thread returns the last of one: each window is closed once, and what follows at its
/// addresses comes after all uses.
#[test]
fn loom_an_idle_window_is_reclaimed_by_another_thread() {
    explore(2, || {
        let world = World::new();
        let mut owner = world.domain.space.register_owner();
        let (sent, kept) = (world.alloc(&mut owner), world.alloc(&mut owner));
        let first = World::window(&sent);
        let more = world.alloc(&mut owner);
        world.touch(first, &kept);
        owner.release(&world.domain.space, kept);
        let (other, third) = (Arc::clone(&world), Arc::clone(&world));
        let third = thread::spawn(move || {
            third.touch(first, &sent);
            Anyone.release(&third.domain.space, sent);
        });
        let other = thread::spawn(move || {
            other.domain.space.reclaim_idle();
            let any = Anyone.alloc(&other.domain.space, MAX_BYTES, || MAX_BYTES).unwrap();
            other.touch(first, &any);
            Anyone.release(&other.domain.space, any);
        });
        for _ in 0..2 {
            let next = world.alloc(&mut owner);
            world.touch(first, &next);
            owner.release(&world.domain.space, next);
        }
        owner.release(&world.domain.space, more);
        other.join().unwrap();
        third.join().unwrap();
        world.domain.space.retire_owner(&mut owner);
        world.assert_all_returned();
    });
}

/// The owner is dropped while other threads return what it has mapped: the window is closed once,
/// after all uses.
#[test]
fn loom_an_orphaned_window_is_closed_once_after_all_uses() {
    explore(3, || {
        let world = World::new();
        let mut owner = world.domain.space.register_owner();
        let sent = [world.alloc(&mut owner), world.alloc(&mut owner)];
        let first = World::window(&sent[0]);
        let threads = sent.map(|sent| {
            let other = Arc::clone(&world);
            thread::spawn(move || {
                other.touch(first, &sent);
                Anyone.release(&other.domain.space, sent);
            })
        });
        world.domain.space.retire_owner(&mut owner);
        // The next user of these addresses uses them after all that is mapped there now.
        if world.domain.space.iovas.alloc_at(first).is_ok() {
            for cell in &world.cells.0 {
                // SAFETY: as in `touch`.
                cell.with_mut(|cell| unsafe { *cell = 0 });
            }
            world.domain.space.free_iova(first);
        }
        for thread in threads {
            thread.join().unwrap();
        }
        world.assert_all_returned();
    });
}

/// Two threads return neighbours, which share a word, while the owner collects: it may collect what
/// is not counted yet, and then uses the window again, after what the two did there.
#[test]
fn loom_what_is_returned_beside_a_collection_is_collected_once() {
    explore(3, || {
        let world = World::new();
        let mut owner = world.domain.space.register_owner();
        let small: Vec<_> =
            (0..2).map(|_| owner.alloc(&world.domain.space, 4096, || 4096).unwrap()).collect();
        let first = World::window(&small[0]);
        let own = world.alloc(&mut owner);
        let threads: Vec<_> = small
            .into_iter()
            .map(|addresses| {
                let other = Arc::clone(&world);
                thread::spawn(move || {
                    other.touch_page(first, &addresses);
                    Anyone.release(&other.domain.space, addresses);
                })
            })
            .collect();
        owner.release(&world.domain.space, own);
        // None fits what the one before leaves, so each looks at what has been returned.
        let large: Vec<_> = (0..3)
            .map(|_| {
                let large = world.alloc(&mut owner);
                world.touch_page(first, &large);
                large
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        large.into_iter().for_each(|addresses| owner.release(&world.domain.space, addresses));
        assert!(world.domain.stats().windows <= 3);
        world.domain.space.retire_owner(&mut owner);
        world.assert_all_returned();
    });
}

/// A payload is late, and its flush completes while another thread releases: one of the two
/// releases it, once, whichever of them the other finds at it.
#[test]
fn loom_what_is_due_beside_a_release_is_released_by_one_of_the_two() {
    explore(3, || {
        let (backend, dropped) = (Arc::new(Waking::default()), std::sync::Arc::new(()));
        backend.complete(Ticket(1));
        let space = IovaSpace::new(39).unwrap();
        let domain = Arc::new(Domain::new(alloc::sync::Arc::new(Arc::clone(&backend)), space));
        for ticket in 1..=2 {
            let iova = domain.space.alloc_iova(4096, 4096, None).unwrap();
            let addresses = Addresses { iova, origin: Origin::Space };
            let due = Due::At(Ticket(ticket));
            domain.space.keep_reachable(std::sync::Arc::clone(&dropped), addresses, due, true);
        }
        let other = Arc::clone(&domain);
        let other = thread::spawn(move || other.release_late());
        backend.complete(Ticket(2));
        domain.release_late();
        other.join().unwrap();
        assert_eq!(std::sync::Arc::strong_count(&dropped), 1);
        assert_eq!((domain.stats().deferred, domain.space.iovas.stats().bytes_in_use), (0, 0));
    });
}

/// Counts its drop; nothing touches its memory.
struct Piece(Arc<AtomicU64>);

// SAFETY: only its addresses are used.
unsafe impl Pinned for Piece {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: as above.
        unsafe { DmaMemory::from_raw(NonNull::without_provenance(4096.try_into().unwrap()), 4096) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Two threads leave a buffer each with the domain while a third completes their flushes: whatever
/// each of them sees of the others, both are freed, and no further call is needed.
#[test]
fn loom_what_is_held_is_freed_by_the_wake_that_completes_it() {
    explore(2, || {
        let (backend, drops) = (Arc::new(Waking::default()), Arc::new(AtomicU64::new(0)));
        let domain =
            Domain::new(alloc::sync::Arc::new(Arc::clone(&backend)), IovaSpace::new(39).unwrap());
        let revoke = || domain.map(Piece(Arc::clone(&drops)), FromDevice).unwrap().revoke();
        let (first, second) = (revoke(), revoke());
        let dropping = thread::spawn(move || drop(first.quiesced()));
        let completing = {
            let backend = Arc::clone(&backend);
            thread::spawn(move || backend.complete(Ticket(2)))
        };
        drop(second.quiesced());
        dropping.join().unwrap();
        completing.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 2);
        assert!(backend.wakers.lock().is_empty());
    });
}
