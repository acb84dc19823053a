//! Unmapping and mapping at random among many mappings: `live-1k`, `live-1m`.
//!
//! Every exchange executes the same instructions at both sizes, so what differs is the memory that
//! is in no cache: the handle in the list of the caller, whose part `handles-only` shows, and what
//! the policy knows of that mapping. A program that knows which mapping it unmaps next, as from a
//! list of completions, has the processor load both meanwhile
//! ([`Mapping::prefetch`](pinfold_core::domain::Mapping::prefetch)): the subjects called `-ahead`.

use super::life::free_flushes;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::policy::{Dma, Memory, PolicyKind, PolicyThread};
use crate::record::Record;
use crate::suite::handle::Rng;
use crate::suite::longest::{PASSES, Repeated, empty_passes};
use pinfold::soft::SoftConfig;
use pinfold_core::access::Access;
use pinfold_core::addr::PhysRange;
use pinfold_core::mem::prefetch;
use std::hint::black_box;
use std::sync::Arc;

type Outcome = Result<(), BenchError>;

/// A case: its name, and how many mappings are live.
type Case = (&'static str, usize);

/// Measures the exchanges, and the longest single one.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let memory = Memory::new(4096)?;
    let memory = &memory;
    let (cases, times) =
        ([("live-1k", 1000), ("live-1m", harness.scale(1_000_000))], harness.scale(100_000));
    // A search of the tree takes milliseconds once addresses have been freed at random.
    let kinds = [
        (PolicyKind::PinfoldRevoke, times),
        (PolicyKind::Magazines, times),
        (PolicyKind::Tree2015, times / 500),
    ];
    let ahead =
        [("pinfold-ahead", PolicyKind::PinfoldRevoke), ("magazines-ahead", PolicyKind::Magazines)];
    let mut subjects = Vec::new();
    for case in cases {
        for (kind, times) in kinds {
            subjects.push(Subject::new(kind.name(), move |out: &mut Samples| {
                among(out, case, kind, memory, times)
            }));
        }
        for (name, kind) in ahead {
            subjects.push(Subject::new(name, move |out: &mut Samples| {
                among_ahead(out, case, kind, memory, times)
            }));
        }
        subjects
            .push(Subject::new("handles-only", move |out: &mut Samples| handles(out, case, times)));
        subjects.push(Subject::new("empty-loop", move |out: &mut Samples| {
            empty_passes(out, case.0, case.1 + times);
            Ok(())
        }));
    }
    harness.with_runs(harness.options().runs.min(3)).interleave(subjects)
}

/// A thread's mappings of one page.
struct Live<'p> {
    thread: Box<dyn PolicyThread + 'p>,
    page: PhysRange,
    mapped: Vec<Dma>,
    freed: Vec<PhysRange>,
    rng: Rng,
}

impl Live<'_> {
    /// Unmaps the mapping at `at`, and maps the page again.
    fn exchange(&mut self, at: usize) -> Outcome {
        self.thread.unmap(self.mapped.swap_remove(at), &mut self.freed)?;
        self.freed.clear();
        self.mapped.push(self.thread.map(self.page, Access::WRITE)?);
        Ok(())
    }

    /// Exchanges one at random.
    fn at_random(&mut self) -> Outcome {
        let at = self.rng.below(self.mapped.len());
        self.exchange(at)
    }

    /// Exchanges `times` at random, each of which was chosen two exchanges before.
    fn ahead(&mut self, times: usize) -> Outcome {
        let live = self.mapped.len();
        let (mut next, mut then) = (self.rng.below(live), self.rng.below(live));
        for _ in 0..times {
            let at = next;
            (next, then) = (then, self.rng.below(live));
            // The handle first: what it refers to is loaded one exchange later.
            self.mapped.get(then).inspect(|dma| prefetch(*dma));
            self.mapped.get(next).inspect(|dma| self.thread.prefetch(dma));
            self.exchange(at)?;
        }
        Ok(())
    }

    fn end(mut self) -> Outcome {
        self.mapped.into_iter().try_for_each(|dma| self.thread.unmap(dma, &mut self.freed))?;
        Ok(self.thread.settle(&mut self.freed)?)
    }
}

/// What a policy is created with: the table pages for all mappings that a pass makes are there
/// before it, with room for those that address space with holes needs. Their first touch is a
/// fault, which takes the kernel up to half a millisecond.
fn config(live: usize, times: usize) -> SoftConfig {
    SoftConfig { table_reserved: (1 << 20) + 2 * 8 * (live + 3 * times), ..free_flushes() }
}

/// Returns an empty list for `live` handles, whose memory has been touched: it is the caller's, and
/// no call is to be interrupted for it.
fn touched_list(live: usize, memory: &Arc<Memory>) -> Result<Vec<Dma>, BenchError> {
    let page = memory.range(0, 4096).ok_or(BenchError::Addresses)?;
    let policy = PolicyKind::None.create(memory, &SoftConfig::default())?;
    let (mut thread, mut list) = (policy.thread(), Vec::with_capacity(live));
    for _ in 0..live {
        list.push(thread.map(page, Access::WRITE)?);
    }
    list.clear();
    Ok(list)
}

/// Exchanges at random, and records the cost of one and the longest single map or exchange.
fn among(
    out: &mut Samples,
    (case, live): Case,
    kind: PolicyKind,
    memory: &Arc<Memory>,
    times: usize,
) -> Outcome {
    let page = memory.range(0, 4096).ok_or(BenchError::Addresses)?;
    let mut longest = Repeated::new(live + times);
    for pass in 0..PASSES {
        let policy = kind.create(memory, &config(live, times))?;
        let mapped = touched_list(live, memory)?;
        let mut all =
            Live { thread: policy.thread(), page, mapped, freed: Vec::new(), rng: Rng::new() };
        longest.begin_pass();
        for _ in 0..live {
            all.mapped.push(all.thread.map(page, Access::WRITE)?);
            longest.note();
        }
        // The addresses are in order at first.
        (0..times).try_for_each(|_| all.at_random())?;
        let (cost, result) = Cost::of(|| (0..times).try_for_each(|_| all.at_random()));
        result?;
        if pass == 0 {
            out.cost(case, cost, times);
        }
        longest.begin();
        for _ in 0..times {
            all.at_random()?;
            longest.note();
        }
        all.end()?;
    }
    longest.record(out, case);
    Ok(())
}

/// The same, each chosen two exchanges before.
fn among_ahead(
    out: &mut Samples,
    (case, live): Case,
    kind: PolicyKind,
    memory: &Arc<Memory>,
    times: usize,
) -> Outcome {
    let policy = kind.create(memory, &config(live, times))?;
    let page = memory.range(0, 4096).ok_or(BenchError::Addresses)?;
    let mapped = touched_list(live, memory)?;
    let mut all =
        Live { thread: policy.thread(), page, mapped, freed: Vec::new(), rng: Rng::new() };
    for _ in 0..live {
        all.mapped.push(all.thread.map(page, Access::WRITE)?);
    }
    all.ahead(times)?;
    let (cost, result) = Cost::of(|| all.ahead(times));
    result?;
    out.cost(case, cost, times);
    all.end()
}

/// Takes handles out of the list of a caller at random and puts them back, and does nothing else:
/// what no policy with handles of this size could avoid.
fn handles(out: &mut Samples, (case, live): Case, times: usize) -> Outcome {
    const WORDS: usize = size_of::<Dma>() / 8;
    let mut list: Vec<[usize; WORDS]> = (0..live).map(|number| [number; WORDS]).collect();
    let mut rng = Rng::new();
    let mut exchange = || {
        let taken = list.swap_remove(rng.below(list.len()));
        list.push(black_box(taken));
    };
    (0..times).for_each(|_| exchange());
    let (cost, ()) = Cost::of(|| (0..times).for_each(|_| exchange()));
    out.cost(case, cost, times);
    Ok(())
}
