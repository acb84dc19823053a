//! The timeline: when each descriptor of each batch takes effect, and when each batch completes.
//!
//! Batches complete in any order, and are published in the order of their tickets. Between its
//! submission and the completion of its batch each descriptor takes effect at a time of its own, so
//! that a half-executed batch is a state that devices run in. Fences alone keep an order.

use crate::config::{Effect, SoftConfig};
use pinfold_core::invalidate::{Descriptor, Ticket};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A descriptor that has not taken effect yet, and when it will.
#[derive(Debug)]
struct Request {
    what: Descriptor,
    at_ns: u64,
}

/// A batch in flight, or a part of one.
#[derive(Debug)]
struct Pending {
    /// The ticket of the wait at its end; `None` for a part that is not the last.
    ticket: Option<Ticket>,
    /// When it completes; `u64::MAX` for never.
    at_ns: u64,
    /// The descriptors that have not taken effect yet. None is due later than the part.
    requests: Vec<Request>,
    /// The entries that it occupies in the queue.
    entries: usize,
    /// Whether it aborts everything in flight, instead of completing.
    aborts: bool,
}

/// The batches in flight, in the order of their tickets.
#[derive(Debug)]
pub(super) struct Timeline {
    pending: VecDeque<Pending>,
    last_ns: u64,
    random: Random,
    submitted: u64,
    /// When the parts of a batch whose wait has not been submitted complete.
    parts_ns: u64,
    /// When everything before the last fence of that batch has taken effect.
    fence_ns: u64,
    /// Descriptors that take effect together.
    due: Vec<Descriptor>,
    spare: Vec<Vec<Request>>,
}

/// The progress up to a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Progress {
    /// The ticket up to which all batches are completed, if it has changed.
    pub(super) completed: Option<Ticket>,
    /// The entries of the queue that have become free.
    pub(super) entries: usize,
    /// Whether the unit has aborted everything in flight.
    pub(super) aborted: bool,
}

impl Timeline {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            pending: VecDeque::new(),
            last_ns: 0,
            random: Random::new(seed),
            submitted: 0,
            parts_ns: 0,
            fence_ns: 0,
            due: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Adds a part of a batch at time `now_ns`: the last one if it has a wait. Returns when the
    /// first of its descriptors takes effect, or when it completes if it has none.
    pub(super) fn add(
        &mut self,
        part: &[Descriptor],
        wait: Option<Ticket>,
        now_ns: u64,
        model: &Model,
    ) -> u64 {
        self.last_ns = self.last_ns.max(now_ns).saturating_add(model.part_ns(part.len(), wait));
        let hangs = model.hang_from.is_some_and(|first| self.submitted + 1 >= first);
        let aborts = wait.is_some() && model.abort_one_in.is_some_and(|n| self.random.one_in(n));
        let late_ns = if wait.is_some() { self.late_ns(model) } else { 0 };
        let at_ns = if hangs { u64::MAX } else { self.last_ns.saturating_add(late_ns) };
        let mut requests = self.spare.pop().unwrap_or_default();
        let mut fences = part.iter().filter(|what| **what == Descriptor::Fence).count();
        let (mut from_ns, mut first_ns) = (now_ns.max(self.fence_ns), at_ns);
        let mut to_ns = self.segment_end(from_ns, at_ns, fences);
        for what in part {
            if *what == Descriptor::Fence {
                fences -= 1;
                from_ns = to_ns.max(self.parts_ns);
                self.fence_ns = from_ns;
                to_ns = self.segment_end(from_ns, at_ns, fences);
                continue;
            }
            // Any part of an aborted batch may have been carried out.
            let never = hangs || aborts && self.random.one_in(2);
            let at_ns = if never { u64::MAX } else { self.effect_ns(from_ns, to_ns, model.effect) };
            first_ns = first_ns.min(at_ns);
            requests.push(Request { what: *what, at_ns });
        }
        self.submitted += u64::from(wait.is_some());
        self.parts_ns = at_ns;
        if wait.is_some() {
            (self.parts_ns, self.fence_ns) = (0, 0);
        }
        let entries = part.len() + usize::from(wait.is_some());
        self.pending.push_back(Pending { ticket: wait, at_ns, requests, entries, aborts });
        first_ns
    }

    /// Executes every descriptor that is due at `now_ns`: calls `effect` with them, if there are
    /// any, in an order that respects the fences.
    pub(super) fn advance(&mut self, now_ns: u64, effect: impl FnOnce(&[Descriptor])) -> Progress {
        self.take_effect(now_ns, effect);
        let mut progress = Progress::default();
        while let Some(part) = self.pending.pop_front_if(|part| part.at_ns <= now_ns) {
            progress.entries += part.entries;
            let mut requests = part.requests;
            requests.clear();
            self.spare.push(requests);
            if part.aborts {
                // Requests that have not taken effect never do.
                progress.entries += self.pending.iter().map(|part| part.entries).sum::<usize>();
                self.pending.clear();
                (progress.aborted, self.parts_ns, self.fence_ns) = (true, 0, 0);
                break;
            }
            progress.completed = part.ticket.or(progress.completed);
        }
        progress
    }

    /// Returns how many batches have been submitted.
    pub(super) fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Returns when the next descriptor or batch is due; `u64::MAX` for never.
    pub(super) fn next_ns(&self) -> u64 {
        let front = self.pending.front().map(|part| part.at_ns);
        let requests =
            self.pending.iter().flat_map(|part| &part.requests).map(|request| request.at_ns);
        requests.chain(front).min().unwrap_or(u64::MAX)
    }

    fn take_effect(&mut self, now_ns: u64, effect: impl FnOnce(&[Descriptor])) {
        self.due.clear();
        for part in &mut self.pending {
            let due = part.requests.extract_if(.., |request| request.at_ns <= now_ns);
            self.due.extend(due.map(|request| request.what));
        }
        if !self.due.is_empty() {
            effect(&self.due);
        }
    }

    /// Returns when everything before the next of `fences` fences has taken effect.
    fn segment_end(&mut self, from_ns: u64, to_ns: u64, fences: usize) -> u64 {
        if fences == 0 || to_ns == u64::MAX {
            return to_ns;
        }
        from_ns + self.random.below(to_ns.saturating_sub(from_ns))
    }

    /// Returns a delay beyond the cost of a batch. Its logarithm is uniform: a thousandth of the
    /// limit is as likely as all of it.
    fn late_ns(&mut self, model: &Model) -> u64 {
        if model.late_ns == 0 {
            return 0;
        }
        let late = self.random.below(model.late_ns);
        late >> self.random.below(11)
    }

    fn effect_ns(&mut self, from_ns: u64, to_ns: u64, effect: Effect) -> u64 {
        match effect {
            _ if to_ns <= from_ns => from_ns,
            Effect::AtOnce => from_ns,
            Effect::AtLast => to_ns,
            // The ends of the interval are the extreme cases: each is as likely as everything
            // between them.
            Effect::AtRandom => match self.random.below(3) {
                0 => from_ns,
                1 => to_ns,
                _ => from_ns + self.random.below(to_ns - from_ns),
            },
        }
    }
}

/// The cost model.
#[derive(Debug)]
pub(super) struct Model {
    effect: Effect,
    /// A batch of one descriptor.
    batch_ns: u64,
    /// Each further one.
    descriptor_ns: u64,
    late_ns: u64,
    hang_from: Option<u64>,
    abort_one_in: Option<u64>,
    /// Whether some batch fails, hangs or aborts.
    goes_wrong: bool,
}

impl Model {
    pub(super) fn new(config: &SoftConfig) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            effect: config.effect,
            batch_ns: ns(config.flush_cost),
            descriptor_ns: ns(config.descriptor_cost.min(config.flush_cost)),
            late_ns: ns(config.late_by),
            hang_from: config.hang_from,
            abort_one_in: config.abort_one_in,
            goes_wrong: config.fail_from.or(config.hang_from).or(config.abort_one_in).is_some(),
        }
    }

    /// Returns whether everything happens when it is submitted, so that nothing is ever in flight.
    pub(super) fn is_immediate(&self) -> bool {
        self.batch_ns == 0 && self.late_ns == 0 && !self.goes_wrong
    }

    /// Returns the cost of a part of a batch. The wait replaces the first descriptor.
    fn part_ns(&self, descriptors: usize, wait: Option<Ticket>) -> u64 {
        let (further, wait_ns) = match wait {
            Some(_) => (descriptors.saturating_sub(1), self.batch_ns),
            None => (descriptors, 0),
        };
        wait_ns.saturating_add(self.descriptor_ns.saturating_mul(further as u64))
    }
}

// The clock that all units share.

/// Nanoseconds since the IOMMU was created.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

// Pseudo-random numbers.

/// A reproducible source of pseudo-random numbers for models and tests (xorshift64*, Marsaglia
/// 2003). Not for secrets.
///
/// ```
/// let mut random = pinfold_soft::Random::new(7);
/// assert!(random.below(10) < 10);
/// ```
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a source whose sequence is determined by `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number below `end`, or 0 if `end` is 0. The distribution is uniform enough for an
    /// `end` below 2^40.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The low bits of the bare state are correlated.
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16;
        if end == 0 { 0 } else { bits % end }
    }

    /// Returns an index below `end`.
    pub fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap_or(0)
    }

    /// Returns true once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns one of `from`, which must not be empty.
    ///
    /// # Panics
    /// If `from` is empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::invalidate::Scope;

    fn model(effect: Effect) -> Model {
        let (batch_ns, descriptor_ns, late_ns) = (10, 0, 1_000_000);
        Model {
            effect,
            batch_ns,
            descriptor_ns,
            late_ns,
            hang_from: None,
            abort_one_in: None,
            goes_wrong: false,
        }
    }

    /// Descriptors that can be told from each other need no address.
    fn request(n: u64) -> Descriptor {
        if n.is_multiple_of(2) {
            Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false }
        } else {
            Descriptor::DeviceTlb(Scope::Domain)
        }
    }

    #[test]
    fn batches_complete_out_of_order_and_are_published_in_order() {
        let (mut line, model) = (Timeline::new(3), model(Effect::AtLast));
        for ticket in 1..=64 {
            line.add(&[request(ticket)], Some(Ticket(ticket)), ticket, &model);
        }
        let times: Vec<u64> = line.pending.iter().map(|batch| batch.at_ns).collect();
        let overtaken =
            times.iter().zip(&times[1..]).filter(|(first, second)| second < first).count();
        assert!(overtaken > 16, "batches complete in the order of their submission: {times:?}");
        let short = times.iter().filter(|at| **at < 10_000).count();
        assert!(short > 4 && short < 60, "short delays are as likely as long ones: {times:?}");
        let (mut published, mut effects) = (0, 0);
        while published < 64 {
            let now = line.next_ns();
            if let Some(ticket) = line.advance(now, |due| effects += due.len()).completed {
                published = ticket.0;
            }
            let prefix = times.iter().take_while(|at| **at <= now).count() as u64;
            assert_eq!(published, prefix, "at {now}");
            // A batch that completed out of order has taken effect, although it is not published.
            assert_eq!(effects, times.iter().filter(|at| **at <= now).count(), "at {now}");
        }
    }

    #[test]
    fn each_descriptor_of_a_batch_takes_effect_at_its_own_time() {
        let (mut line, model) = (Timeline::new(5), model(Effect::AtRandom));
        let batch: Vec<_> = (0..200).map(request).collect();
        line.add(&batch, Some(Ticket(1)), 0, &model);
        let mut at_once = 0;
        assert_eq!(line.advance(0, |due| at_once = due.len()), Progress::default());
        let over = line.pending[0].at_ns;
        assert!((30..110).contains(&at_once), "{at_once} of 200 descriptors took effect at once");
        let (mut steps, mut last) = (0, 0);
        while line.next_ns() < over {
            let now = line.next_ns();
            assert!(now > last && line.advance(now, |_| steps += 1).completed.is_none());
            last = now;
        }
        assert!(steps > 20, "only {steps} effects between submission and completion");
        let mut rest = 0;
        let progress = line.advance(over, |due| rest = due.len());
        assert_eq!(progress, Progress { completed: Some(Ticket(1)), entries: 201, aborted: false });
        assert!(rest > 30, "{rest} of 200 descriptors took effect at the last moment");
        assert_eq!(line.next_ns(), u64::MAX);
    }

    /// Descriptors behind a fence follow those before it, whatever the times of their effects, also
    /// across parts.
    #[test]
    fn fences_keep_their_order() {
        let (before, behind) = (request(0), request(1));
        for (seed, effect) in
            (0..600).zip([Effect::AtOnce, Effect::AtLast, Effect::AtRandom].into_iter().cycle())
        {
            let (mut line, model) =
                (Timeline::new(seed), Model { descriptor_ns: 3, ..model(effect) });
            let batch = [before, before, before, Descriptor::Fence, behind, behind];
            let cut = usize::try_from(seed % 5).unwrap();
            line.add(&batch[..cut], None, 0, &model);
            line.add(&batch[cut..], Some(Ticket(1)), 0, &model);
            let mut order = Vec::new();
            while line.next_ns() < u64::MAX {
                line.advance(line.next_ns(), |due| order.extend_from_slice(due));
            }
            assert_eq!(order, [before, before, before, behind, behind], "{effect:?}, cut at {cut}");
        }
    }

    #[test]
    fn a_batch_costs_more_for_each_descriptor_however_it_is_cut() {
        let exact = Model { late_ns: 0, descriptor_ns: 3, ..model(Effect::AtLast) };
        let at = |cuts: &[usize]| {
            let (mut line, batch) = (Timeline::new(1), [request(0); 5]);
            let mut from = 0;
            for &cut in cuts {
                line.add(&batch[from..cut], None, 100, &exact);
                from = cut;
            }
            line.add(&batch[from..], Some(Ticket(1)), 100, &exact);
            line.pending.back().unwrap().at_ns
        };
        assert_eq!(at(&[]), 100 + 10 + 4 * 3);
        assert_eq!(at(&[2]), 100 + 10 + 4 * 3);
        assert_eq!(at(&[1, 3]), 100 + 10 + 4 * 3);
    }

    #[test]
    fn a_hanging_batch_takes_no_effect_and_blocks_the_following() {
        let mut line = Timeline::new(1);
        let hangs = Model { hang_from: Some(2), late_ns: 0, ..model(Effect::AtOnce) };
        let mut effects = Vec::new();
        for ticket in 1..=3 {
            line.add(&[request(ticket)], Some(Ticket(ticket)), 0, &hangs);
            line.advance(0, |due| effects.extend_from_slice(due));
        }
        assert_eq!(effects, [request(1)]);
        assert_eq!(line.advance(u64::MAX - 1, |_| unreachable!()).completed, Some(Ticket(1)));
    }

    /// An abort drops what is in flight: it takes no effect, and frees the queue.
    #[test]
    fn an_abort_drops_everything_in_flight() {
        let mut line = Timeline::new(1);
        let aborts = Model { abort_one_in: Some(1), late_ns: 0, ..model(Effect::AtLast) };
        for ticket in 1..=3 {
            line.add(&[request(ticket)], Some(Ticket(ticket)), 0, &aborts);
        }
        let mut effects = 0;
        let progress = line.advance(10, |due| effects += due.len());
        assert_eq!(progress, Progress { completed: None, entries: 6, aborted: true });
        assert!(effects <= 1 && line.next_ns() == u64::MAX, "{effects}");
        assert_eq!(line.advance(u64::MAX - 1, |_| unreachable!()), Progress::default());
    }
}
