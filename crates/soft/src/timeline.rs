//! The timeline: when each request of each batch takes effect, and when each batch completes.
//!
//! Batches complete in any order, and are published in the order of their tickets. Between its submission and the
//! completion of its batch each request takes effect at a time of its own, so that a half-executed batch is a state
//! that devices run in.

use crate::config::Effect;
use crate::random::Random;
use pinfold_core::invalidate::{Flush, Ticket};
use std::collections::VecDeque;

/// What a request invalidates in the caches of every device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Invalidation {
    /// Everything.
    Whole,
    /// Everything cached for a range.
    Range(Flush),
}

/// A request that has not taken effect yet, and when it will.
#[derive(Debug)]
struct Request {
    what: Invalidation,
    at_ns: u64,
}

/// A batch in flight.
#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    /// When it completes; `u64::MAX` for never.
    at_ns: u64,
    /// The requests that have not taken effect yet. None is due later than the batch.
    requests: Vec<Request>,
}

/// The batches in flight, in the order of their tickets.
#[derive(Debug)]
pub(super) struct Timeline {
    pending: VecDeque<Pending>,
    last_ns: u64,
    random: Random,
    submitted: u64,
    /// Requests that take effect together.
    due: Vec<Invalidation>,
    spare: Vec<Vec<Request>>,
}

impl Timeline {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            pending: VecDeque::new(),
            last_ns: 0,
            random: Random::new(seed),
            submitted: 0,
            due: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Adds a batch at time `now_ns`, and calls `effect` with the requests that take effect at once, if there are any.
    pub(super) fn add(
        &mut self,
        batch: impl IntoIterator<Item = Invalidation>,
        ticket: Ticket,
        now_ns: u64,
        model: &Model,
        effect: impl FnOnce(&[Invalidation]),
    ) {
        self.submitted += 1;
        self.last_ns = self.last_ns.max(now_ns).saturating_add(model.cost_ns);
        let hangs = model.hang_from.is_some_and(|first| self.submitted >= first);
        let at_ns = if hangs { u64::MAX } else { self.last_ns.saturating_add(self.late_ns(model)) };
        let mut requests = self.spare.pop().unwrap_or_default();
        for what in batch {
            let at_ns = if hangs { u64::MAX } else { self.effect_ns(now_ns, at_ns, model.effect) };
            requests.push(Request { what, at_ns });
        }
        self.pending.push_back(Pending { ticket, at_ns, requests });
        self.take_effect(now_ns, effect);
    }

    /// Executes every request that is due at `now_ns`. Returns the ticket up to which all batches are completed, if it has
    /// changed.
    pub(super) fn advance(&mut self, now_ns: u64, effect: impl FnOnce(&[Invalidation])) -> Option<Ticket> {
        self.take_effect(now_ns, effect);
        let mut completed = None;
        while let Some(batch) = self.pending.pop_front_if(|batch| batch.at_ns <= now_ns) {
            completed = Some(batch.ticket);
            self.spare.push(batch.requests);
        }
        completed
    }

    /// Returns when the next request or batch is due; `u64::MAX` for never.
    pub(super) fn next_ns(&self) -> u64 {
        let front = self.pending.front().map(|batch| batch.at_ns);
        let requests = self.pending.iter().flat_map(|batch| &batch.requests).map(|request| request.at_ns);
        requests.chain(front).min().unwrap_or(u64::MAX)
    }

    fn take_effect(&mut self, now_ns: u64, effect: impl FnOnce(&[Invalidation])) {
        self.due.clear();
        for batch in &mut self.pending {
            let due = batch.requests.extract_if(.., |request| request.at_ns <= now_ns);
            self.due.extend(due.map(|request| request.what));
        }
        if !self.due.is_empty() {
            effect(&self.due);
        }
    }

    /// Returns a delay beyond the cost of a batch. Its logarithm is uniform: a thousandth of the limit is as likely as
    /// all of it.
    fn late_ns(&mut self, model: &Model) -> u64 {
        if model.late_ns == 0 {
            return 0;
        }
        let late = self.random.below(model.late_ns);
        late >> self.random.below(11)
    }

    fn effect_ns(&mut self, now_ns: u64, completed_ns: u64, effect: Effect) -> u64 {
        match effect {
            Effect::AtOnce => now_ns,
            Effect::AtLast => completed_ns,
            // The ends of the interval are the extreme cases: each is as likely as everything between them.
            Effect::AtRandom => match self.random.below(3) {
                0 => now_ns,
                1 => completed_ns,
                _ => now_ns + self.random.below((completed_ns - now_ns).max(1)),
            },
        }
    }
}

/// The cost model.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) effect: Effect,
    pub(super) cost_ns: u64,
    pub(super) late_ns: u64,
    pub(super) hang_from: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::addr::{Iova, IovaRange};

    fn model(effect: Effect) -> Model {
        Model { effect, cost_ns: 10, late_ns: 1_000_000, hang_from: None }
    }

    fn request(page: u64) -> Invalidation {
        let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
        Invalidation::Range(Flush { range, leaf_only: true })
    }

    #[test]
    fn batches_complete_out_of_order_and_are_published_in_order() {
        let mut line = Timeline::new(3);
        for ticket in 1..=64 {
            line.add([request(ticket)], Ticket(ticket), ticket, &model(Effect::AtLast), |_| {});
        }
        let times: Vec<u64> = line.pending.iter().map(|batch| batch.at_ns).collect();
        let overtaken = times.iter().zip(&times[1..]).filter(|(first, second)| second < first).count();
        assert!(overtaken > 16, "batches complete in the order of their submission: {times:?}");
        let short = times.iter().filter(|at| **at < 10_000).count();
        assert!(short > 4 && short < 60, "short delays are as likely as long ones: {times:?}");
        let (mut published, mut effects) = (0, 0);
        while published < 64 {
            let now = line.next_ns();
            if let Some(ticket) = line.advance(now, |due| effects += due.len()) {
                published = ticket.0;
            }
            let prefix = times.iter().take_while(|at| **at <= now).count() as u64;
            assert_eq!(published, prefix, "at {now}");
            // A batch that completed out of order has taken effect, although it is not published.
            assert_eq!(effects, times.iter().filter(|at| **at <= now).count(), "at {now}");
        }
    }

    #[test]
    fn each_request_of_a_batch_takes_effect_at_its_own_time() {
        let mut line = Timeline::new(5);
        let mut at_once = 0;
        line.add((0..200).map(request), Ticket(1), 0, &model(Effect::AtRandom), |due| at_once = due.len());
        let over = line.pending[0].at_ns;
        assert!((30..110).contains(&at_once), "{at_once} of 200 requests took effect at once");
        let (mut steps, mut last) = (0, 0);
        while line.next_ns() < over {
            let now = line.next_ns();
            assert!(now > last && line.advance(now, |_| steps += 1).is_none());
            last = now;
        }
        assert!(steps > 20, "only {steps} effects between submission and completion");
        let mut rest = 0;
        assert_eq!(line.advance(over, |due| rest = due.len()), Some(Ticket(1)));
        assert!(rest > 30, "{rest} of 200 requests took effect at the last moment");
        assert_eq!(line.next_ns(), u64::MAX);
    }

    #[test]
    fn a_hanging_batch_never_takes_effect_and_blocks_the_following_ones() {
        let mut line = Timeline::new(1);
        let hangs = Model { hang_from: Some(2), late_ns: 0, ..model(Effect::AtOnce) };
        for ticket in 1..=3 {
            line.add([request(ticket)], Ticket(ticket), 0, &hangs, |due| assert_eq!(due, [request(1)]));
        }
        assert_eq!(line.advance(u64::MAX - 1, |_| unreachable!()), Some(Ticket(1)));
    }
}
