//! A thread that revokes each mapping by itself.

use super::{Dma, Figures, Payload, Pinfold, Unmap, map};
use crate::policy::api::{PolicyError, PolicyThread};
use pinfold_core::access::Access;
use pinfold_core::addr::PhysRange;
use pinfold_core::domain::{Local, NotQuiesced, Revoked};
use std::collections::VecDeque;
use std::time::Instant;

/// How many revoked mappings a thread has at most; then it waits. More than an owner gathers.
const HELD: usize = 80;

pub(super) struct Single<'p> {
    policy: &'p Pinfold,
    owner: Local,
    held: VecDeque<Revoked<Payload>>,
    /// When one of `held` was revoked, and how many precede it there.
    timed: Option<(Instant, usize)>,
    figures: Figures,
}

impl<'p> Single<'p> {
    pub(super) fn new(policy: &'p Pinfold, owner: Local) -> Self {
        Self { policy, owner, held: VecDeque::new(), timed: None, figures: Figures::default() }
    }

    /// Frees what is quiesced. Only the last look costs more than a load.
    #[inline]
    fn poll(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        while self.held.front_mut().is_some_and(|first| self.owner.has_quiesced(first)) {
            self.wait(freed)?;
        }
        Ok(())
    }

    /// Waits for the first.
    fn wait(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let Some(revoked) = self.held.pop_front() else { return Ok(()) };
        let payload = self.owner.wait(revoked).map_err(|NotQuiesced { error, .. }| error)?;
        self.release(&payload, freed)
    }

    #[inline]
    fn release(
        &mut self,
        payload: &Payload,
        freed: &mut Vec<PhysRange>,
    ) -> Result<(), PolicyError> {
        let mut since = None;
        match &mut self.timed {
            Some((_, before @ 1..)) => *before -= 1,
            timed => since = timed.take().map(|(since, _)| since),
        }
        self.figures.release(payload, since, freed)
    }
}

impl PolicyThread for Single<'_> {
    fn map(&mut self, memory: PhysRange, access: Access) -> Result<Dma, PolicyError> {
        map(self.policy, &mut self.owner, memory, access)
    }

    fn prefetch(&self, dma: &Dma) {
        dma.prefetch_mapping();
    }

    fn unmap(&mut self, dma: Dma, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        let bytes = dma.iova().len();
        let mapping = dma.into_mapping()?;
        if self.policy.unmap == Unmap::Wait {
            freed.push(self.owner.unmap(mapping)?.range()?);
            return Ok(());
        }
        // What earlier calls revoked, which has completed meanwhile: a thread then uses the same
        // few buffers again.
        self.poll(freed)?;
        self.figures.hold(bytes);
        if self.timed.is_none() {
            // The last one that was timed has been returned: so this is the first behind each
            // flush, or one next to it.
            self.timed = Some((Instant::now(), self.held.len()));
        }
        self.held.push_back(self.owner.revoke(mapping));
        while self.held.len() >= HELD {
            self.wait(freed)?;
        }
        Ok(())
    }

    fn settle(&mut self, freed: &mut Vec<PhysRange>) -> Result<(), PolicyError> {
        while !self.held.is_empty() {
            self.wait(freed)?;
        }
        Ok(())
    }
}

impl Drop for Single<'_> {
    fn drop(&mut self) {
        self.figures.add_to(self.policy);
    }
}
