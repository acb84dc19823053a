//! The side of the [`Invalidator`] that submits: one thread at a time, and not under the lock that
//! requesters need.

use super::batch::{Open, Pages};
use super::flight::Flight;
use super::invalidator::Invalidator;
use super::queue::{Descriptor, InvalidationQueue, QueueError, Scope, Ticket};
use crate::sync::{Guard, Ordering};
use core::mem;

impl<Q: InvalidationQueue> Invalidator<Q> {
    /// Takes the open batch out of its lock and submits it. Returns at once if another thread is
    /// submitting, or if the queue is full: whoever polls next submits what has gathered.
    pub(super) fn submit_open(&self, mut open: Guard<'_, Open>) {
        if self.refused.load(Ordering::Relaxed) {
            return;
        }
        let Some(mut claim) = self.flight.try_claim(&mut open) else { return };
        claim.with(|flight| {
            if flight.ticket == 0 {
                if !self.take_batch(open, flight) {
                    return;
                }
            } else {
                drop(open);
            }
            self.submit_flight(flight);
        });
    }

    /// Submits a batch, or what is left of it.
    fn submit_flight(&self, flight: &mut Flight) {
        if !self.recover(flight) {
            return;
        }
        // Here, where it is done again if the queue panics meanwhile: a wait without descriptors
        // would flush nothing.
        if flight.descriptors.is_empty() {
            flight.prepare(&self.costs, self.queue.max_order(), self.queue.has_device_tlbs());
        }
        if self.send(flight) {
            self.sent(flight);
        } else {
            // The batch stays, and its deadline counts from this first attempt.
            self.clock.start(Ticket(flight.ticket), self.queue.now_ns());
        }
    }

    /// Submits `pages` as a batch of their own, with the open ticket, if nothing has gathered and
    /// the queue is not full.
    ///
    /// # Errors
    /// The lock: nothing has changed.
    pub(super) fn submit_one<'o>(
        &self,
        mut open: Guard<'o, Open>,
        pages: Pages,
    ) -> Result<(), Guard<'o, Open>> {
        if !open.batch.is_empty() || self.refused.load(Ordering::Relaxed) {
            return Err(open);
        }
        let Some(mut claim) = self.flight.try_claim(&mut open) else { return Err(open) };
        claim.with(|flight| {
            // Only now: before the claim, another thread may have been submitting.
            if flight.ticket != 0 || self.is_full(self.submitted.load(Ordering::Relaxed)) {
                return Err(open);
            }
            flight.ticket = open.ticket;
            open.ticket += 1;
            drop(open);
            flight.batch.push(pages);
            self.submit_flight(flight);
            Ok(())
        })
    }

    /// Submits the waits in flight again if the unit has aborted them.
    pub(super) fn resubmit(&self) {
        let claim = self.flight.try_claim(&mut self.open.lock());
        if let Some(mut claim) = claim {
            claim.with(|flight| self.recover(flight));
        }
    }

    /// Moves the open batch to `flight`, which is empty, and releases the lock. Returns false if
    /// there is nothing to submit, or if the queue is full.
    fn take_batch(&self, mut open: Guard<'_, Open>, flight: &mut Flight) -> bool {
        if open.batch.is_empty() || self.is_full(self.submitted.load(Ordering::Relaxed)) {
            return false;
        }
        mem::swap(&mut open.batch, &mut flight.batch);
        flight.ticket = open.ticket;
        open.ticket += 1;
        true
    }

    /// Restarts a queue that has aborted, and replaces the batches in flight by one flush of the
    /// domain that ends with their last ticket: it covers all of them, so their descriptors need
    /// not be kept, and it does no harm twice. A batch that was submitted in part begins again.
    /// Returns false if that has to be tried again.
    #[inline]
    fn recover(&self, flight: &mut Flight) -> bool {
        if !self.restarted.load(Ordering::Relaxed) && !self.queue.has_aborted() {
            return true;
        }
        self.recover_now(flight)
    }

    #[cold]
    fn recover_now(&self, flight: &mut Flight) -> bool {
        if self.queue.has_aborted() {
            flight.next = 0;
            // First: if the queue panics here, the flush is submitted all the same.
            self.restarted.store(true, Ordering::Relaxed);
            self.queue.restart();
        }
        let last = self.submitted.load(Ordering::Relaxed);
        if self.completed.load(Ordering::Acquire) < last {
            let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };
            let all = [flush, Descriptor::Fence, Descriptor::DeviceTlb(Scope::Domain)];
            let needed = if self.queue.has_device_tlbs() { all.len() } else { 1 };
            match self.queue.submit(all.get(..needed).unwrap_or(&all), Some(Ticket(last))) {
                Ok(()) => self.sent.resubmitted.add(1),
                Err(error) => {
                    self.note(error);
                    return false;
                }
            }
        }
        self.restarted.store(false, Ordering::Relaxed);
        true
    }

    /// Submits as much of `flight` as the queue accepts. Returns whether that was all of it, the
    /// wait included.
    fn send(&self, flight: &mut Flight) -> bool {
        loop {
            let (rest, space) = (flight.rest(), self.queue.accepts());
            // The wait takes the place of one descriptor.
            let wait = (rest.len() < space).then_some(Ticket(flight.ticket));
            let part = rest.get(..space).unwrap_or(rest);
            if space == 0 {
                return false;
            }
            match self.queue.submit(part, wait) {
                Ok(()) => flight.next += part.len(),
                Err(error) => {
                    self.note(error);
                    return false;
                }
            }
            self.sent.parts.add(1);
            if wait.is_some() {
                return true;
            }
        }
    }

    fn note(&self, error: QueueError) {
        match error {
            QueueError::Full => {}
            QueueError::Failed => self.refused.store(true, Ordering::Relaxed),
        }
    }

    /// Counts and publishes a batch that has been submitted, and its completion if that was
    /// immediate. Only then no deadline is needed, and no clock is read.
    fn sent(&self, flight: &mut Flight) {
        // First: if the queue panics here, the batch stays, and its wait is submitted again.
        let (completed, now_ns) = self.queue.after_submission();
        let (ticket, sent) = (flight.ticket, &self.sent);
        for descriptor in &flight.descriptors {
            match descriptor {
                Descriptor::Iotlb { scope, .. } => {
                    sent.iotlb.add(1);
                    sent.domain.add(u64::from(*scope == Scope::Domain));
                }
                Descriptor::DeviceTlb(_) => sent.device_tlb.add(1),
                Descriptor::Fence => {}
            }
        }
        sent.merged.add(flight.batch.merged());
        sent.pages.add(flight.pages_flushed);
        sent.waits.add(1);
        self.submitted.store(ticket, Ordering::Release);
        flight.clear();
        let in_flight = ticket - self.completed.load(Ordering::Relaxed).min(ticket);
        sent.peak.add(in_flight.saturating_sub(sent.peak.get()));
        if completed.0 == ticket {
            // No ticket above it can be published while this thread submits, so a store does not
            // lower what others publish.
            self.completed.store(ticket, Ordering::Release);
        } else {
            self.publish_up_to(completed);
        }
        if self.completed.load(Ordering::Relaxed) < ticket {
            self.clock.start(Ticket(ticket), now_ns);
        }
    }
}
