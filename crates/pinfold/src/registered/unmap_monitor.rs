//! Detects that registered memory is unmapped, moved or discarded, with a userfaultfd.
//!
//! The call that does so waits in the kernel until the event has been read. The monitoring thread
//! sets `busy` *before* it reads, and clears it when the registrations are marked. A query after
//! the call has returned therefore either sees the mark, or sees `busy` and waits for the mark: no
//! use of reused addresses goes undetected.
//!
//! The monitoring thread allocates nothing and takes no lock, since the thread that waits for it
//! may hold any.

use super::footprint::Coverage;
use super::survey::Gone;
use crate::sys::process::Signals;
use crate::sys::userfault::{Event, Userfault, What};
use crate::sys::{Errno, bytes};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// A place in the monitor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Monitored {
    place: usize,
    /// The monitored pages.
    start: usize,
    end: usize,
}

#[derive(Debug)]
pub(super) struct UnmapMonitor {
    shared: Arc<Shared>,
    vacant: Vec<usize>,
    /// Pages may be monitored for several registrations: they are forgotten with the last.
    pages: Coverage,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// The process of the thread.
    process: u32,
}

#[derive(Debug)]
struct Shared {
    userfault: Userfault,
    /// Whether events are being read and marked.
    busy: AtomicBool,
    places: Box<[Place]>,
}

/// A monitored range: empty if the place is vacant.
#[derive(Debug, Default)]
struct Place {
    start: AtomicUsize,
    end: AtomicUsize,
    /// The event: 0, or one of the codes; `gone_at` is stored before.
    gone: AtomicUsize,
    gone_at: AtomicUsize,
}

const GONE: [(usize, Gone); 3] = [(1, Gone::Unmapped), (2, Gone::Moved), (3, Gone::Discarded)];

impl UnmapMonitor {
    /// Creates a monitor for at most `places` ranges.
    pub(super) fn new(places: usize) -> Result<Self, Errno> {
        let userfault = Userfault::new()?;
        let table = std::iter::repeat_with(Place::default).take(places).collect();
        let shared = Arc::new(Shared { userfault, busy: AtomicBool::new(false), places: table });
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let (seen, halt) = (shared.clone(), stop.clone());
        let named = std::thread::Builder::new().name("pinfold-unmap".to_owned());
        let thread = Signals::blocked_while(|| named.spawn(move || seen.run(&halt)));
        let thread =
            thread.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        let vacant = (0..places).rev().collect();
        Ok(Self {
            shared,
            vacant,
            pages: Coverage::default(),
            stop,
            thread: Some(thread),
            process: std::process::id(),
        })
    }

    /// Monitors `addr..end`, which is on the pages `first..last`.
    pub(super) fn monitor(
        &mut self,
        (addr, end): (usize, usize),
        (first, last): (usize, usize),
    ) -> Result<Monitored, Errno> {
        let place = self.vacant.pop().ok_or(Errno::new(libc::ENOSPC))?;
        // Earlier events for these addresses do not concern this registration.
        self.shared.wait_for_marks();
        if let Some(entry) = self.shared.places.get(place) {
            entry.gone.store(0, Ordering::Relaxed);
            entry.start.store(addr, Ordering::Relaxed);
            entry.end.store(end, Ordering::Release);
        }
        // Entered before, so that no event from here on is missed.
        if let Err(errno) = self.shared.userfault.monitor(first, last) {
            self.vacate(place);
            return Err(errno);
        }
        self.pages.add(first as u64, last as u64);
        Ok(Monitored { place, start: first, end: last })
    }

    /// Forgets a range.
    pub(super) fn forget(&mut self, monitored: Monitored) {
        let gone = self.gone(monitored).is_some();
        self.vacate(monitored.place);
        for (start, end) in self.pages.remove(monitored.start as u64, monitored.end as u64) {
            // Addresses that were unmapped may have been reused.
            if !gone && let Err(errno) = self.shared.userfault.forget(bytes(start), bytes(end)) {
                tracing::debug!(start, end, %errno, "memory is still monitored");
            }
        }
    }

    fn vacate(&mut self, place: usize) {
        if let Some(entry) = self.shared.places.get(place) {
            entry.end.store(0, Ordering::Release);
        }
        self.vacant.push(place);
    }

    /// Returns what happened to the range, and where.
    #[inline]
    pub(super) fn gone(&self, monitored: Monitored) -> Option<(Gone, usize)> {
        self.shared.wait_for_marks();
        let place = self.shared.places.get(monitored.place)?;
        let code = place.gone.load(Ordering::Acquire);
        let &(_, gone) = GONE.iter().find(|(have, _)| *have == code)?;
        Some((gone, place.gone_at.load(Ordering::Relaxed)))
    }
}

impl Drop for UnmapMonitor {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // The counter is 0, so this does not block.
        let stopped = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (stopped, self.thread.take()) {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Waits until the events that were read are marked.
    #[inline]
    fn wait_for_marks(&self) {
        let mut attempts = 0_u32;
        while self.busy.load(Ordering::Acquire) {
            if attempts < 64 {
                attempts += 1;
                std::thread::yield_now();
            } else {
                // The monitor may have a lower priority than a caller under SCHED_FIFO.
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
        }
    }

    fn run(&self, stop: &OwnedFd) {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.userfault.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
            ];
            let polled = rustix::event::poll(&mut fds, None);
            let [_, halt] = fds;
            if !halt.revents().is_empty()
                || polled.is_err_and(|errno| errno != rustix::io::Errno::INTR)
            {
                return;
            }
            self.busy.store(true, Ordering::SeqCst);
            while let Some(event) = self.userfault.next() {
                self.mark(event);
            }
            self.busy.store(false, Ordering::Release);
        }
    }

    fn mark(&self, event: Event) {
        let code = match event.what {
            What::Unmapped => 1,
            What::Moved => 2,
            What::Removed => 3,
        };
        for place in &self.places {
            let (end, start) =
                (place.end.load(Ordering::Acquire), place.start.load(Ordering::Relaxed));
            if start < event.end && event.start < end && place.gone.load(Ordering::Relaxed) == 0 {
                place.gone_at.store(event.start.max(start), Ordering::Relaxed);
                place.gone.store(code, Ordering::Release);
            }
        }
    }
}
