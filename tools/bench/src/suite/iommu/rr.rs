//! `rr-1`, `rr-2`, `rr-200`: what a driver pays for a transaction under every policy.
//!
//! The workload is that of the study of 2015: many threads that each map a receive and a transmit
//! buffer for one small packet, and unmap both; the drivers' static mappings are present. Three
//! accounts are kept apart:
//!
//! - **the driver's**: processor time of its threads (`CLOCK_THREAD_CPUTIME_ID`) while they map,
//!   unmap and request flushes. Nothing else runs on these clocks: no device is attached, so none
//!   of the model's translations, copies or IOTLB flushes are charged to the driver, and flushes
//!   complete at once, so there is no wait. The threads give up the processor after every 32
//!   transactions; the clock stops meanwhile.
//! - **the device's**: processor time of the model for the packets of a transaction, 64 bytes each
//!   way, which hardware spends beside the processor; and the time that its table walks would take.
//! - **the wait**: with flushes of 1 µs, the time for which the driver waits for them.
//!
//! A run of the driver's account consists of groups of 1,024 transactions of one thread. With one
//! thread and with 200 its figure is the first decile of their costs: what else the machine does
//! (interrupts, programs that evict the caches) can only add to a group. With two, what the threads
//! do to each other is the question: each is pinned to a processor of its own, a group counts if
//! both ran while it did, and the figure is the median. Without two processors, or with fewer than
//! a tenth of the groups left, there is no figure.

use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject, thread_time};
use crate::record::{Metric, Record};
use pinfold::soft::{Effect, Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::PhysRange;
use pinfold_replay::policy::{Dma, Memory, Policy, PolicyKind, PolicyThread, static_maps};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, available_parallelism};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// The bytes of a packet.
const PACKET: usize = 64;
/// The number of mappings that the drivers keep in a full run.
const STATIC: usize = 20_000;
/// The number of buffers of a thread: two more than any policy holds.
const BUFFERS: u64 = 128;
/// A thread needs little more than its loop.
const STACK: usize = 64 << 10;
/// The number of transactions of a driver before it yields the processor.
const BURST: u64 = 32;
/// The number of bursts in a group: enough that all policies have flushed several times.
const GROUP: u64 = 32;
/// The unit of the driver's account.
pub(super) const DRIVER: &str = "ns driver CPU/op";

/// The cases and their numbers of threads.
pub(super) const CASES: [(&str, usize); 3] = [("rr-1", 1), ("rr-2", 2), ("rr-200", 200)];

/// The policies, from the oldest to the ceiling.
pub(super) const POLICIES: [PolicyKind; 10] = [
    PolicyKind::Tree2015,
    PolicyKind::TreeMerged,
    PolicyKind::Lazy,
    PolicyKind::LinuxStrict,
    PolicyKind::Identity,
    PolicyKind::Strict,
    PolicyKind::Revoke,
    PolicyKind::Batch,
    PolicyKind::Static,
    PolicyKind::None,
];

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let most = CASES.iter().map(|(_, threads)| *threads as u64).max().unwrap_or(1);
    let statics = harness.scale(STATIC);
    let bytes = (static_maps(statics).sum::<u64>() + most * BUFFERS) * PAGE;
    let memory = Memory::new(usize::try_from(bytes).unwrap_or(usize::MAX))?;
    memory.use_hugepages();
    let time = Duration::from_millis(if harness.options().quick { 8 } else { 240 });
    let mut records = Vec::new();
    let fits = |threads: usize| threads != 2 || processors().len() >= 2;
    for (case, threads) in
        CASES.into_iter().filter(|(case, threads)| harness.wants(case) && fits(*threads))
    {
        let workload = Workload { case, threads, statics, time };
        let subjects = POLICIES.map(|kind| {
            let (memory, workload) = (&memory, workload);
            Subject::new(kind.name(), move |out: &mut Samples| {
                driver(out, &workload, kind, memory)?;
                device(out, &workload, kind, memory)
            })
        });
        records.extend(harness.interleave(subjects.into_iter().collect())?);
    }
    records.iter_mut().filter(|record| record.unit == DRIVER).for_each(Record::check_spread);
    Ok(records)
}

/// The subject that runs, and for how long.
#[derive(Clone, Copy)]
struct Workload {
    case: &'static str,
    threads: usize,
    /// The number of mappings that the drivers keep.
    statics: usize,
    time: Duration,
}

/// The work of threads, and the processor time that it took.
#[derive(Default)]
struct Account {
    transactions: u64,
    /// The groups of each thread.
    groups: Vec<Vec<Group>>,
    device: Duration,
}

impl Account {
    fn add(&mut self, other: Self) {
        self.transactions += other.transactions;
        self.groups.extend(other.groups);
        self.device += other.device;
    }

    /// Returns the first decile of the groups' costs.
    fn first_decile(&self) -> Option<f64> {
        let costs = sorted(self.groups.iter().flatten().map(|group| group.cost));
        costs.get(costs.len() / 10).copied()
    }

    /// Returns the median of the groups during which all threads ran, if enough are left.
    fn median_at_once(&self) -> Option<f64> {
        let counted = self.groups.iter().enumerate().flat_map(|(thread, own)| {
            let met = move |group: &&Group| {
                let mut others =
                    self.groups.iter().enumerate().filter(|(other, _)| *other != thread);
                group.ran && others.all(|(_, groups)| group.is_covered_by(groups))
            };
            own.iter().filter(met).map(|group| group.cost)
        });
        let costs = sorted(counted);
        let all: usize = self.groups.iter().map(Vec::len).sum();
        (costs.len() * 10 >= all).then(|| costs.get(costs.len() / 2).copied()).flatten()
    }
}

fn sorted(costs: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut costs: Vec<_> = costs.collect();
    costs.sort_by(f64::total_cmp);
    costs
}

/// Transactions of one thread.
#[derive(Clone, Copy)]
struct Group {
    begin: Instant,
    end: Instant,
    /// The thread had a processor for at least nine tenths of the time.
    ran: bool,
    /// Nanoseconds of the driver for a transaction.
    cost: f64,
}

impl Group {
    /// Returns whether another thread ran for nine tenths of this group: `groups` are in order.
    fn is_covered_by(&self, groups: &[Self]) -> bool {
        let first = groups.partition_point(|other| other.end <= self.begin);
        let beside = groups[first..].iter().take_while(|other| other.begin < self.end);
        let shared = beside.filter(|other| other.ran).map(|other| {
            other.end.min(self.end).saturating_duration_since(other.begin.max(self.begin))
        });
        shared.sum::<Duration>() * 10 >= (self.end - self.begin) * 9
    }
}

/// Returns the nanoseconds per transaction.
fn each(time: Duration, transactions: u64) -> f64 {
    time.as_secs_f64() * 1e9 / count(transactions.max(1))
}

#[expect(clippy::cast_precision_loss, reason = "counts of a short run")]
fn count(count: u64) -> f64 {
    count as f64
}

/// Records the driver's account.
fn driver(
    out: &mut Samples,
    workload: &Workload,
    kind: PolicyKind,
    memory: &Arc<Memory>,
) -> Result<(), BenchError> {
    let config =
        SoftConfig { flush_cost: Duration::ZERO, effect: Effect::AtLast, ..SoftConfig::default() };
    let policy = kind.create(memory, &config)?;
    with_static(&*policy, memory, workload.statics, |next| {
        let account = run_threads(&*policy, workload, memory, next, &[])?;
        let together = workload.threads == 2;
        let figure = if together { account.median_at_once() } else { account.first_decile() };
        if let Some(figure) = figure {
            out.figure(workload.case, Metric::Time, DRIVER, figure);
        }
        Ok(())
    })
}

/// Records the device's account, the wait, and a transaction's use of the IOMMU.
fn device(
    out: &mut Samples,
    workload: &Workload,
    kind: PolicyKind,
    memory: &Arc<Memory>,
) -> Result<(), BenchError> {
    let Workload { case, threads, time, .. } = *workload;
    let config = SoftConfig {
        flush_cost: Duration::from_micros(1),
        effect: Effect::AtLast,
        walk_cost: SoftConfig::WALK_COST,
        ..SoftConfig::default()
    };
    let policy = kind.create(memory, &config)?;
    let (account, before, stats) = with_static(&*policy, memory, workload.statics, |next| {
        // A card with a queue, and a translation cache, per processor.
        let queues = threads.min(available_parallelism().map_or(1, usize::from));
        let ports: Vec<Port> = (0..queues).map(|_| policy.port()).collect();
        let before = policy.stats();
        let slice = Workload { time: time / 3, ..*workload };
        let account = run_threads(&*policy, &slice, memory, next, &ports)?;
        Ok((account, before, policy.stats()))
    })?;
    let transactions = account.transactions;
    let device = each(account.device, transactions);
    let per = |after: u64, before: u64| count(after - before) / count(transactions.max(1));
    out.modelled(case, Metric::Time, "ns device CPU/op", device);
    let walks = per(stats.walk_ns, before.walk_ns);
    out.modelled(case, Metric::Time, "ns device walks/op", walks);
    out.modelled(case, Metric::Time, "ns waited/op", per(stats.wait_ns, before.wait_ns));
    let sent = per(stats.invalidations, before.invalidations);
    out.modelled(case, Metric::Count, "invalidations/op", sent);
    out.modelled(case, Metric::Count, "waits/op", per(stats.waits, before.waits));
    out.modelled(case, Metric::Count, "entries", count(stats.entries));
    out.modelled(case, Metric::Bytes, "bytes held", count(stats.held_bytes_peak));
    if !matches!(kind, PolicyKind::None | PolicyKind::Static) {
        out.modelled(case, Metric::Time, "us reachable", count(stats.reachable_ns) / 1e3);
    }
    Ok(())
}

/// Calls `measure` while the drivers' static mappings exist, with the first page behind them.
fn with_static<R>(
    policy: &dyn Policy,
    memory: &Memory,
    statics: usize,
    measure: impl FnOnce(u64) -> Result<R, BenchError>,
) -> Result<R, BenchError> {
    let mut drivers = policy.thread();
    let (mut kept, mut next): (Vec<Dma>, u64) = (Vec::with_capacity(statics), 0);
    for pages in static_maps(statics) {
        kept.push(drivers.map(part(memory, next, pages)?, Access::all())?);
        next += pages;
    }
    let result = measure(next);
    let mut freed = Vec::new();
    kept.into_iter().try_for_each(|dma| drivers.unmap(dma, &mut freed))?;
    drivers.settle(&mut freed)?;
    result
}

fn part(memory: &Memory, first: u64, pages: u64) -> Result<PhysRange, BenchError> {
    memory.range(first * PAGE, pages * PAGE).ok_or(BenchError::Addresses)
}

/// The processors that this program may use.
fn processors() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// Keeps the calling thread on one processor.
fn pin(processor: usize) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    Ok(sched_setaffinity(None, &set)?)
}

/// Runs the threads at once, and adds up their accounts.
fn run_threads(
    policy: &dyn Policy,
    workload: &Workload,
    memory: &Memory,
    first: u64,
    ports: &[Port],
) -> Result<Account, BenchError> {
    let stop = AtomicBool::new(false);
    // Held while threads are spawned; a thread that polled for the start would delay the others.
    let gate = Mutex::new(());
    let processors = processors();
    std::thread::scope(|scope| {
        let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        let spawn = |thread: usize| {
            let from = first + thread as u64 * BUFFERS;
            let pages = (0..BUFFERS).map(|page| part(memory, from + page, 1));
            let free: Vec<PhysRange> = pages.collect::<Result<_, _>>()?;
            let port = ports.get(thread % ports.len().max(1));
            let (stop, gate) = (&stop, &gate);
            let own = (workload.threads == 2).then(|| processors.get(thread).copied()).flatten();
            let work = move || {
                if let Some(own) = own {
                    pin(own).map_err(BenchError::NoThread)?;
                }
                let mut handle = policy.thread();
                drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
                match port {
                    Some(port) => beside_device(&mut *handle, port, free, stop),
                    None => alone(&mut *handle, free, stop),
                }
            };
            Builder::new().stack_size(STACK).spawn_scoped(scope, work).map_err(BenchError::NoThread)
        };
        let running: Result<Vec<_>, BenchError> = (0..workload.threads).map(spawn).collect();
        stop.store(running.is_err(), Ordering::Release);
        drop(closed);
        let running = running?;
        std::thread::sleep(workload.time);
        stop.store(true, Ordering::Release);
        let mut sum = Account::default();
        for thread in running {
            sum.add(thread.join().unwrap_or(Err(BenchError::Thread))?);
        }
        Ok(sum)
    })
}

/// Makes transactions without a device until told to stop; at least one group, after a burst that
/// does not count. The clock of the thread is read around each burst.
fn alone(
    thread: &mut dyn PolicyThread,
    mut free: Vec<PhysRange>,
    stop: &AtomicBool,
) -> Result<Account, BenchError> {
    let (all, mut account) = (free.len(), Account::default());
    let mut burst = |free: &mut Vec<PhysRange>| -> Result<Duration, BenchError> {
        let before = thread_time();
        for _ in 0..BURST {
            let (receive, transmit) = map(thread, free)?;
            thread.unmap(receive, free)?;
            thread.unmap(transmit, free)?;
        }
        Ok(thread_time().saturating_sub(before))
    };
    burst(&mut free)?;
    let mut groups = Vec::new();
    while groups.is_empty() || !stop.load(Ordering::Acquire) {
        let (begin, before) = (Instant::now(), thread_time());
        let mut time = Duration::ZERO;
        for _ in 0..GROUP {
            time += burst(&mut free)?;
            std::thread::yield_now();
        }
        let (end, ran) = (Instant::now(), thread_time().saturating_sub(before));
        let ran = ran * 10 >= (end - begin) * 9;
        groups.push(Group { begin, end, ran, cost: each(time, GROUP * BURST) });
        account.transactions += GROUP * BURST;
    }
    account.groups.push(groups);
    end(thread, free, all).map(|()| account)
}

/// Makes transactions with a device until told to stop, and keeps the device's account. Between map
/// and packets a thread yields the processor: a request/response loop always waits for the other
/// side.
fn beside_device(
    thread: &mut dyn PolicyThread,
    port: &Port,
    mut free: Vec<PhysRange>,
    stop: &AtomicBool,
) -> Result<Account, BenchError> {
    let (request, mut response) = ([1; PACKET], [0; PACKET]);
    let (all, mut account) = (free.len(), Account::default());
    while !stop.load(Ordering::Acquire) {
        let (receive, transmit) = map(thread, &mut free)?;
        std::thread::yield_now();
        let before = Instant::now();
        port.write(receive.iova().start(), &request)?;
        port.read(transmit.iova().start(), &mut response)?;
        account.device += before.elapsed();
        thread.unmap(receive, &mut free)?;
        thread.unmap(transmit, &mut free)?;
        account.transactions += 1;
    }
    end(thread, free, all).map(|()| account)
}

/// Maps a receive and a transmit buffer.
#[inline]
fn map(thread: &mut dyn PolicyThread, free: &mut Vec<PhysRange>) -> Result<(Dma, Dma), BenchError> {
    let [receive, transmit] = [take(thread, free)?, take(thread, free)?];
    Ok((thread.map(receive, Access::WRITE)?, thread.map(transmit, Access::READ)?))
}

/// Returns a free buffer; waits if the policy holds all of them.
fn take(thread: &mut dyn PolicyThread, free: &mut Vec<PhysRange>) -> Result<PhysRange, BenchError> {
    if let Some(range) = free.pop() {
        return Ok(range);
    }
    thread.settle(free)?;
    free.pop().ok_or(BenchError::Addresses)
}

/// Waits for the memory that the policy holds: all of it is returned in the end.
fn end(
    thread: &mut dyn PolicyThread,
    mut free: Vec<PhysRange>,
    all: usize,
) -> Result<(), BenchError> {
    thread.settle(&mut free)?;
    if free.len() == all { Ok(()) } else { Err(BenchError::Short { asked: all, got: free.len() }) }
}

#[cfg(test)]
mod tests {
    use super::{Account, Group};
    use std::time::{Duration, Instant};

    fn groups(start: Instant, from_us: u64, costs: &[(bool, f64)]) -> Vec<Group> {
        let at = |index: usize| start + Duration::from_micros(from_us + 100 * index as u64);
        let group = |(index, (ran, cost)): (usize, &(bool, f64))| Group {
            begin: at(index),
            end: at(index + 1),
            ran: *ran,
            cost: *cost,
        };
        costs.iter().enumerate().map(group).collect()
    }

    #[test]
    fn groups_count_while_the_other_thread_ran() {
        let start = Instant::now();
        // The second thread waits for its processor during the cheap groups of the first.
        let one = groups(start, 0, &[(true, 10.0), (true, 10.0), (true, 30.0), (true, 32.0)]);
        let two = groups(start, 0, &[(false, 90.0), (false, 90.0), (true, 31.0), (true, 33.0)]);
        let account = Account { groups: vec![one, two], ..Account::default() };
        assert_eq!(account.first_decile(), Some(10.0));
        assert_eq!(account.median_at_once(), Some(32.0));
    }

    #[test]
    fn threads_that_take_turns_have_no_figure() {
        let start = Instant::now();
        let one = groups(start, 0, &[(true, 10.0); 4]);
        let two = groups(start, 400, &[(true, 10.0); 4]);
        let account = Account { groups: vec![one, two], ..Account::default() };
        assert_eq!(account.median_at_once(), None);
    }
}
