//! `rr-1`, `rr-2`, `rr-16`, `rr-200`: request/response loops through every policy.
//!
//! The workload of the study of 2015: many threads that each map a receive and a transmit buffer
//! for one small packet, and unmap both. Between the two a thread gives up the processor, because a
//! request/response loop always waits for the other side; the device then writes 64 bytes and reads
//! 64 bytes through the IOMMU. The drivers' static mappings are present.
//!
//! The device's table walks take time of the device (`us walking`), not of the threads: the rate
//! would otherwise depend on how a thread spends it. In `rr-200`, where other threads run
//! meanwhile, a second rate is that of threads that wait for it.
//!
//! The software IOMMU translates and copies on the processor of the thread, which hardware does
//! beside it: a policy whose addresses are new to the device pays for their walks, and `none`
//! hardly for any. So in `rr-200` a third rate is that of the same transactions without their
//! packets: a bound on what a processor beside an IOMMU could do, without doorbells and payloads.

use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject};
use crate::policy::{Dma, Memory, Policy, PolicyKind, PolicyThread, static_maps};
use crate::record::{Metric, Record};
use pinfold::soft::{Effect, Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::PhysRange;
use std::hint::black_box;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, available_parallelism};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// The bytes of a packet.
const PACKET: usize = 64;
/// How many mappings the drivers keep in a full run.
const STATIC: usize = 20_000;
/// How many buffers a thread has: more than any policy holds, and two.
const BUFFERS: u64 = 128;
/// A thread needs little more than its loop.
const STACK: usize = 64 << 10;

/// The cases and their numbers of threads.
const CASES: [(&str, usize); 4] = [("rr-1", 1), ("rr-2", 2), ("rr-16", 16), ("rr-200", 200)];

/// The case that is also measured with the other [`Packets`]: with fewer threads the wait would be
/// all that is measured.
const WAITING: &str = "rr-200";

/// What a thread does about the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packets {
    /// It lets it write a packet and read one. The time that the walks would take is reported.
    Moved,
    /// It waits for the walks before it unmaps, too, and leaves the processor to others.
    Awaited,
    /// Nothing: the device accesses nothing, and what is mapped is all the same unmapped and
    /// flushed.
    Absent,
}

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let threads = CASES.iter().map(|(_, threads)| *threads as u64).max().unwrap_or(1);
    let statics = harness.scale(STATIC);
    let kept = static_maps(statics).sum::<u64>();
    let bytes = (kept + threads * BUFFERS) * PAGE;
    let memory = Memory::new(usize::try_from(bytes).unwrap_or(usize::MAX))?;
    memory.use_hugepages();
    let time = Duration::from_millis(if harness.options().quick { 4 } else { 80 });
    let mut records = Vec::new();
    for (case, threads) in CASES {
        let subjects = PolicyKind::ALL.map(|kind| {
            let memory = &memory;
            Subject::new(kind.name(), move |out: &mut Samples| {
                loops(out, &Workload { case, threads, statics, time }, kind, memory)
            })
        });
        let workload = Workload { case, threads, statics, time };
        let copies = Subject::new("copies", move |out: &mut Samples| copies(out, &workload));
        records.extend(harness.interleave(subjects.into_iter().chain([copies]).collect())?);
    }
    let note = memory.describe_pages();
    records.iter_mut().for_each(|record| record.note = Some(note.clone()));
    Ok(records)
}

/// What runs, and for how long.
struct Workload {
    case: &'static str,
    threads: usize,
    /// How many mappings the drivers keep.
    statics: usize,
    time: Duration,
}

/// Runs the loops and records their figures.
fn loops(
    out: &mut Samples,
    workload: &Workload,
    kind: PolicyKind,
    memory: &Arc<Memory>,
) -> Result<(), BenchError> {
    let Workload { case, threads, statics, time } = *workload;
    let config = SoftConfig {
        effect: Effect::AtLast,
        walk_cost: SoftConfig::WALK_COST,
        ..SoftConfig::default()
    };
    let policy = kind.create(memory, &config)?;
    let mut drivers = policy.thread();
    let (kept, next) = map_static(&mut *drivers, memory, statics)?;
    let (transactions, elapsed) = serve_all(&*policy, threads, memory, next, time, Packets::Moved)?;
    let stats = policy.stats();
    let mut others = Vec::new();
    if case == WAITING {
        let rates =
            [("per s, walks awaited", Packets::Awaited), ("per s, no packets", Packets::Absent)];
        for (unit, packets) in rates {
            others.push((unit, serve_all(&*policy, threads, memory, next, time, packets)?));
        }
    }
    let mut freed = Vec::new();
    kept.into_iter().try_for_each(|dma| drivers.unmap(dma, &mut freed))?;
    drivers.settle(&mut freed)?;

    #[expect(clippy::cast_precision_loss, reason = "counts of a short run")]
    let figure = |count: u64| count as f64;
    let each = |count: u64| figure(count) / figure(transactions.max(1));
    out.modelled(
        case,
        Metric::Rate,
        "transactions/s",
        figure(transactions) / elapsed.as_secs_f64(),
    );
    out.modelled(case, Metric::Count, "invalidations/op", each(stats.invalidations));
    out.modelled(case, Metric::Count, "waits/op", each(stats.waits));
    let flushed = figure(stats.pages_flushed) / figure(stats.pages_requested.max(1));
    out.modelled(case, Metric::Count, "flushed/cleared", flushed);
    out.modelled(case, Metric::Count, "walk reads/op", each(stats.walk_reads));
    out.modelled(case, Metric::Time, "us walking", each(stats.walk_ns) / 1e3);
    for (unit, (transactions, elapsed)) in others {
        out.modelled(case, Metric::Rate, unit, figure(transactions) / elapsed.as_secs_f64());
    }
    out.modelled(case, Metric::Count, "entries", figure(stats.entries));
    out.modelled(case, Metric::Bytes, "bytes held", figure(stats.held_bytes_peak));
    if kind != PolicyKind::None {
        out.modelled(case, Metric::Time, "us reachable", figure(stats.reachable_ns) / 1e3);
    }
    Ok(())
}

/// Makes the mappings that drivers keep, and returns them with the first page behind them.
fn map_static(
    drivers: &mut dyn PolicyThread,
    memory: &Memory,
    statics: usize,
) -> Result<(Vec<Dma>, u64), BenchError> {
    let (mut kept, mut next) = (Vec::with_capacity(statics), 0);
    for pages in static_maps(statics) {
        kept.push(drivers.map(part(memory, next, pages)?, Access::all())?);
        next += pages;
    }
    Ok((kept, next))
}

fn part(memory: &Memory, first: u64, pages: u64) -> Result<PhysRange, BenchError> {
    memory.range(first * PAGE, pages * PAGE).ok_or(BenchError::Addresses)
}

/// Runs `threads` loops at once, and returns their transactions and the time.
fn serve_all(
    policy: &dyn Policy,
    threads: usize,
    memory: &Memory,
    first: u64,
    time: Duration,
    packets: Packets,
) -> Result<(u64, Duration), BenchError> {
    // A card with a queue, and a translation cache, per processor.
    let queues = threads.min(available_parallelism().map_or(1, usize::from));
    let ports: Vec<Port> = (0..queues).map(|_| policy.port()).collect();
    let phase = AtomicU8::new(STOP);
    // Held while threads are spawned; a thread that polled for the start would delay the others.
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        let spawn = |(thread, port)| {
            let pages = (0..BUFFERS).map(|page| part(memory, first + thread * BUFFERS + page, 1));
            let free: Vec<PhysRange> = pages.collect::<Result<_, _>>()?;
            let (phase, gate) = (&phase, &gate);
            let work = move || {
                let mut handle = policy.thread();
                drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
                serve(&mut *handle, port, free, phase, packets)
            };
            Builder::new().stack_size(STACK).spawn_scoped(scope, work).map_err(BenchError::NoThread)
        };
        let running: Result<Vec<_>, BenchError> =
            (0..threads as u64).zip(ports.iter().cycle()).map(spawn).collect();
        if running.is_ok() {
            phase.store(GO, Ordering::Release);
        }
        drop(closed);
        let running = running?;
        let start = Instant::now();
        std::thread::sleep(time);
        phase.store(STOP, Ordering::Release);
        let elapsed = start.elapsed();
        let mut transactions = 0;
        for thread in running {
            transactions += thread.join().unwrap_or(Err(BenchError::Thread))?;
        }
        Ok((transactions, elapsed))
    })
}

/// Copies the packets of transactions, and does nothing else: what all policies have in common and
/// none could avoid. One thread per processor: more would share it.
fn copies(out: &mut Samples, workload: &Workload) -> Result<(), BenchError> {
    let threads = workload.threads.min(available_parallelism().map_or(1, usize::from));
    let phase = AtomicU8::new(GO);
    let gate = Mutex::new(());
    let copy = || {
        drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
        let (request, mut response) = ([1u8; PACKET], [0u8; PACKET]);
        let (mut receive, transmit) = ([0u8; PACKET], [2u8; PACKET]);
        let mut transactions = 0u64;
        while phase.load(Ordering::Acquire) == GO {
            black_box(&mut receive).copy_from_slice(black_box(&request));
            black_box(&mut response).copy_from_slice(black_box(&transmit));
            transactions += 1;
        }
        transactions
    };
    let (transactions, elapsed) = std::thread::scope(|scope| {
        let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        let spawn = |_| {
            Builder::new().stack_size(STACK).spawn_scoped(scope, copy).map_err(BenchError::NoThread)
        };
        let running: Result<Vec<_>, BenchError> = (0..threads).map(spawn).collect();
        let start = Instant::now();
        drop(closed);
        if running.is_ok() {
            std::thread::sleep(workload.time);
        }
        phase.store(STOP, Ordering::Release);
        let elapsed = start.elapsed();
        let transactions =
            running?.into_iter().map(|thread| thread.join().unwrap_or(0)).sum::<u64>();
        Ok::<_, BenchError>((transactions, elapsed))
    })?;
    #[expect(clippy::cast_precision_loss, reason = "a count of a short run")]
    let transactions = transactions as f64;
    out.figure(workload.case, Metric::Rate, "transactions/s", transactions / elapsed.as_secs_f64());
    Ok(())
}

/// What the threads do: make transactions, or end.
const GO: u8 = 0;
const STOP: u8 = 1;

/// Makes transactions until told to stop, and returns how many. All memory is returned in the end.
fn serve(
    thread: &mut dyn PolicyThread,
    port: &Port,
    mut free: Vec<PhysRange>,
    phase: &AtomicU8,
    packets: Packets,
) -> Result<u64, BenchError> {
    let (request, mut response) = ([1; PACKET], [0; PACKET]);
    let all = free.len();
    let mut transactions = 0;
    while phase.load(Ordering::Acquire) == GO {
        let [receive, transmit] = [take(thread, &mut free)?, take(thread, &mut free)?];
        let receive = thread.map(receive, Access::WRITE)?;
        let transmit = thread.map(transmit, Access::READ)?;
        std::thread::yield_now();
        if packets != Packets::Absent {
            port.write(receive.iova().start(), &request)?;
            port.read(transmit.iova().start(), &mut response)?;
        }
        if packets == Packets::Awaited {
            port.wait_for_walks();
        }
        thread.unmap(receive, &mut free)?;
        thread.unmap(transmit, &mut free)?;
        transactions += 1;
    }
    thread.settle(&mut free)?;
    if free.len() == all {
        Ok(transactions)
    } else {
        Err(BenchError::Short { asked: all, got: free.len() })
    }
}

/// Returns a free buffer; waits if the policy holds all of them.
fn take(thread: &mut dyn PolicyThread, free: &mut Vec<PhysRange>) -> Result<PhysRange, BenchError> {
    if let Some(range) = free.pop() {
        return Ok(range);
    }
    thread.settle(free)?;
    free.pop().ok_or(BenchError::Addresses)
}
