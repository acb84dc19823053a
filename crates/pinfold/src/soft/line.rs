//! The time line: when which flush takes effect.

use super::config::Effect;
use pinfold_core::invalidate::{Batch, Flush, Ticket};
use std::collections::VecDeque;

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Pending {
    ticket: Ticket,
    /// When it is over; `u64::MAX` for never.
    at_ns: u64,
    /// Whether it has taken effect.
    effected: bool,
    pub(super) whole: bool,
    pub(super) flushes: Vec<Flush>,
}

/// All batches on their way, in the order of their tickets.
#[derive(Debug)]
pub(super) struct TimeLine {
    pending: VecDeque<Pending>,
    last_ns: u64,
    random: u64,
    submitted: u64,
    spare: Vec<Vec<Flush>>,
}

impl TimeLine {
    pub(super) fn new(seed: u64) -> Self {
        Self { pending: VecDeque::new(), last_ns: 0, random: seed | 1, submitted: 0, spare: Vec::new() }
    }

    /// Adds a batch at the time `now_ns`. `effect` happens now or when the batch is over.
    pub(super) fn add(
        &mut self,
        batch: &Batch,
        ticket: Ticket,
        now_ns: u64,
        model: &Model,
        effect: impl FnOnce(&Pending),
    ) {
        self.submitted += 1;
        self.last_ns = self.last_ns.max(now_ns).saturating_add(model.cost_ns);
        let late = if model.late_ns == 0 { 0 } else { self.next_random() % model.late_ns };
        let hangs = model.hang_from.is_some_and(|first| self.submitted >= first);
        let at_ns = if hangs { u64::MAX } else { self.last_ns.saturating_add(late) };
        let mut flushes = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(Batch::CAPACITY));
        flushes.clear();
        flushes.extend_from_slice(batch.flushes());
        let effected = match model.effect {
            Effect::AtOnce => true,
            Effect::AtLast => false,
            Effect::AtRandom => self.next_random().is_multiple_of(2),
        };
        let pending = Pending { ticket, at_ns, effected, whole: batch.is_whole(), flushes };
        if effected && !hangs {
            effect(&pending);
        }
        self.pending.push_back(pending);
    }

    /// Lets `effect` happen for every batch that is over at `now_ns`; then says up to which ticket all are.
    pub(super) fn advance(&mut self, now_ns: u64, mut effect: impl FnMut(&Pending)) -> Option<Ticket> {
        for batch in self.pending.iter_mut().filter(|batch| !batch.effected && batch.at_ns <= now_ns) {
            effect(batch);
            batch.effected = true;
        }
        let mut completed = None;
        while let Some(batch) = self.pending.pop_front_if(|batch| batch.at_ns <= now_ns) {
            completed = Some(batch.ticket);
            self.spare.push(batch.flushes);
        }
        completed
    }

    /// When there is something to do next.
    pub(super) fn next_ns(&self) -> u64 {
        let front = self.pending.front().map(|batch| batch.at_ns);
        let late = self.pending.iter().filter(|batch| !batch.effected).map(|batch| batch.at_ns);
        late.chain(front).min().unwrap_or(u64::MAX)
    }

    fn next_random(&mut self) -> u64 {
        // xorshift64: good enough for being late.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// The costs.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) effect: Effect,
    pub(super) cost_ns: u64,
    pub(super) late_ns: u64,
    pub(super) hang_from: Option<u64>,
}
