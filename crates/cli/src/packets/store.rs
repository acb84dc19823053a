//! Packets to a target: a disk reads each from the page that the network wrote it to.

use super::counts::Counts;
use super::slot::{self, SLOT};
use crate::signal::Interrupt;
use crate::targets::error::TargetError;
use crate::targets::target::{Completion, Io, IoDirection, Request, SubmitError, Target};
use pinfold::page_pool::Tag;
use pinfold_xdp::{Packet, PacketPage, Socket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The slots of a target that all queues store to.
#[derive(Debug)]
pub(crate) struct Slots {
    next: AtomicU64,
    /// How many the target has.
    limit: u64,
    /// When the run began, since 1970: it tells its slots from those of an earlier one.
    run: Duration,
}

impl Slots {
    /// Creates the slots of a target of `capacity` bytes; `None` if it grows.
    pub(crate) fn new(capacity: Option<u64>) -> Self {
        let limit = capacity.map_or(u64::MAX / SLOT, |bytes| bytes / SLOT);
        let run = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { next: AtomicU64::new(0), limit, run }
    }

    /// Takes the next slot; `None` if the target is full.
    fn take(&self) -> Option<u64> {
        let next = |taken: u64| (taken < self.limit).then_some(taken + 1);
        // Relaxed: only the number matters.
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
    }

    /// Returns how many bytes the slots take that have been taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.next.load(Ordering::Relaxed) * SLOT
    }
}

/// A queue's way to the target.
pub(crate) struct Store<'t> {
    target: &'t mut (dyn Target<PacketPage> + Send),
    slots: &'t Slots,
    /// Holds the pages that are being written.
    holder: Tag,
    depth: usize,
    in_flight: usize,
    completed: Vec<Completion<PacketPage>>,
}

impl<'t> Store<'t> {
    /// Stores to `target` with up to `depth` requests in flight.
    pub(crate) fn new(
        target: &'t mut (dyn Target<PacketPage> + Send),
        slots: &'t Slots,
        holder: Tag,
        depth: usize,
    ) -> Self {
        Self { target, slots, holder, depth, in_flight: 0, completed: Vec::with_capacity(depth) }
    }

    /// Returns how many packets can be stored now. Those beyond stay in the receive ring.
    pub(super) fn room(&self) -> usize {
        self.depth - self.in_flight
    }

    /// Returns whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Starts to write a packet, if the target has a slot for it.
    pub(super) fn write(
        &mut self,
        packet: Packet,
        received: Duration,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let page = packet.into_page().and_then(|page| {
            if slot::has_room(&page) { Ok(page) } else { Err(Packet::from(page)) }
        });
        let (page, number) = match page.map(|page| (page, self.slots.take())) {
            Ok((page, Some(number))) => (page, number),
            Ok((page, None)) => {
                counts.not_stored += 1;
                socket.recycle(page.into());
                return Ok(());
            }
            Err(packet) => {
                counts.not_stored += 1;
                socket.recycle(packet);
                return Ok(());
            }
        };
        page.hold_for(self.holder);
        let block = self.target.info().alignment;
        let len = slot::complete(&page, number, received, self.slots.run, block);
        let len = len.inspect_err(|_| counts.not_stored += 1)?;
        let io = Io::new(IoDirection::Write, number * SLOT, len);
        match self.target.submit(Request { io, buffer: page }) {
            Ok(()) => {
                self.in_flight += 1;
                Ok(())
            }
            Err(SubmitError { buffer, error }) => {
                counts.not_stored += 1;
                if let Some(page) = buffer {
                    socket.recycle(page.into());
                }
                Err(error)
            }
        }
    }

    /// Submits what was started, and returns the pages of what has been written to the socket's
    /// pool.
    pub(super) fn collect(
        &mut self,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let polled = self.target.poll(&mut self.completed);
        self.settle(socket, counts).and(polled)
    }

    /// As [`collect`](Self::collect), after waiting for a completion.
    pub(super) fn wait(
        &mut self,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let waited = self.target.wait(&mut self.completed);
        self.settle(socket, counts).and(waited)
    }

    /// Waits until everything is written and durable, also behind a write that failed. Returns the
    /// first error.
    pub(super) fn finish(
        &mut self,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let mut finished = Ok(());
        while self.in_flight > 0 {
            let before = self.in_flight;
            let waited = self.wait(socket, counts);
            let is_stuck = waited.is_err() && self.in_flight == before;
            finished = finished.and(waited);
            if is_stuck {
                break;
            }
        }
        finished.and(self.target.sync(&Interrupt::default()))
    }

    fn settle(&mut self, socket: &mut Socket, counts: &mut Counts) -> Result<(), TargetError> {
        let mut settled = Ok(());
        for Completion { buffer, result, .. } in self.completed.drain(..) {
            self.in_flight -= 1;
            if let Some(page) = buffer {
                socket.recycle(page.into());
            }
            match result {
                Ok(_) => counts.stored += 1,
                Err(error) => {
                    counts.not_stored += 1;
                    settled = settled.and(Err(error));
                }
            }
        }
        settled
    }
}

impl std::fmt::Debug for Store<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("slots", &self.slots)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}
