//! A thread that revokes several mappings by one call.

use super::{Dma, Figures, Payload, Pinfold, map};
use crate::policy::api::{PolicyError, PolicyThread};
use pinfold_core::access::Access;
use pinfold_core::addr::PhysRange;
use pinfold_core::domain::{Local, NotQuiesced, Revoked, Unrevoked};
use std::collections::VecDeque;
use std::time::Instant;

/// How many mappings are revoked at a time.
const BATCH: usize = 16;
/// How many revoked batches a thread has at most; then it waits for the first.
const HELD: usize = 5;
/// One of this many batches is timed.
const SAMPLE: u64 = 4;

/// Mappings that were revoked by one call, and when the first of them was unmapped, if that was
/// noted.
#[derive(Default)]
struct Batch {
    revoked: Vec<Revoked<Payload>>,
    since: Option<Instant>,
}

pub(super) struct Batches<'p> {
    policy: &'p Pinfold,
    owner: Local,
    /// Unmapped, and revoked with the next ones.
    gathered: Vec<Unrevoked<Payload>>,
    /// When the first of them was unmapped.
    since: Option<Instant>,
    held: VecDeque<Batch>,
    /// Of batches that have been returned.
    spare: Vec<Vec<Revoked<Payload>>>,
    revocations: u64,
    figures: Figures,
}

impl<'p> Batches<'p> {
    pub(super) fn new(policy: &'p Pinfold, owner: Local) -> Self {
        Self {
            policy,
            owner,
            gathered: Vec::with_capacity(BATCH),
            since: None,
            held: VecDeque::new(),
            spare: Vec::new(),
            revocations: 0,
            figures: Figures::default(),
        }
    }

    /// Revokes what is gathered.
    fn revoke_gathered(&mut self) {
        let mut revoked = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(BATCH));
        self.owner.revoke_many(self.gathered.drain(..), &mut revoked);
        self.held.push_back(Batch { revoked, since: self.since.take() });
        self.revocations += 1;
    }

    /// Frees the batches that are quiesced.
    fn poll(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let quiesced = |batch: &Batch| batch.revoked.last().is_none_or(Revoked::is_quiesced);
        while self.held.front().is_some_and(quiesced) {
            self.wait(freed)?;
        }
        Ok(())
    }

    /// Waits for the first batch.
    fn wait(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let Some(Batch { mut revoked, mut since }) = self.held.pop_front() else { return Ok(()) };
        for one in revoked.drain(..) {
            let payload = self.owner.wait(one).map_err(|NotQuiesced { error, .. }| error)?;
            self.figures.release(&payload, since.take(), freed)?;
        }
        self.spare.push(revoked);
        Ok(())
    }
}

impl PolicyThread for Batches<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        map(self.policy, &mut self.owner, memory, access)
    }

    fn prefetch(&self, dma: &Dma) {
        dma.prefetch_mapping();
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        self.figures.hold(dma.iova().len());
        if self.gathered.is_empty() && self.revocations.is_multiple_of(SAMPLE) {
            // The first of a batch waits longest.
            self.since = Some(Instant::now());
        }
        self.gathered.push(dma.into_mapping()?);
        if self.gathered.len() == BATCH {
            // What earlier calls revoked, which has completed meanwhile: a thread then uses the
            // same few buffers again.
            self.poll(freed)?;
            self.revoke_gathered();
            while self.held.len() >= HELD {
                self.wait(freed)?;
            }
        }
        Ok(())
    }

    fn settle(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        self.revoke_gathered();
        while !self.held.is_empty() {
            self.wait(freed)?;
        }
        Ok(())
    }
}

impl Drop for Batches<'_> {
    fn drop(&mut self) {
        self.figures.add_to(self.policy);
    }
}
