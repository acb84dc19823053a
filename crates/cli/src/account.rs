//! What a run did, as the stack itself counted it. One set of structures, printed as text ([`text`]) or as JSON.

mod text;

use crate::args::Protect;
use crate::copy::digest::Hash;
use crate::copy::pump::Phase;
use crate::lane::Figures;
use crate::latency::Latency;
use pinfold_core::dma_pool::PoolStats;
use serde::Serialize;

/// What a copy did.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CopyReport {
    /// `copy`.
    pub(crate) command: &'static str,
    /// As the user named it.
    pub(crate) source: String,
    /// As the user named it.
    pub(crate) destination: String,
    /// As the user named it.
    pub(crate) via: Option<String>,
    /// How many bytes the source had, and the destination has.
    pub(crate) bytes: u64,
    /// Bytes of one request.
    pub(crate) block_bytes: u64,
    /// The most requests in flight.
    pub(crate) iodepth: u64,
    /// Source to destination, or to the third target and from there.
    pub(crate) phases: Vec<PhaseReport>,
    /// The SHA-256 of both, where it was asked for.
    pub(crate) sha256: Option<Hashes>,
    /// What the memory stack did.
    pub(crate) stack: StackReport,
    /// What fell back to something slower, and why.
    pub(crate) notes: Vec<String>,
}

/// What was read again from both ends.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Hashes {
    /// Of the source.
    pub(crate) source: Hash,
    /// Of the destination, before it got its name.
    pub(crate) destination: Hash,
}

/// All bytes from one target to another.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PhaseReport {
    /// Where they were.
    pub(crate) from: String,
    /// Where they went.
    pub(crate) to: String,
    /// How many.
    pub(crate) bytes: u64,
    /// From the first request to the end of the flush.
    pub(crate) seconds: f64,
    /// Of that, the flush.
    pub(crate) flush_seconds: f64,
    /// `bytes` by `seconds`.
    pub(crate) bytes_per_second: f64,
    /// The reads from the one.
    pub(crate) reads: RequestReport,
    /// The writes to the other.
    pub(crate) writes: RequestReport,
}

impl PhaseReport {
    /// The account of `phase`.
    pub(crate) fn new(from: String, to: String, phase: &Phase) -> Self {
        Self {
            from,
            to,
            bytes: phase.bytes,
            seconds: phase.elapsed.as_secs_f64(),
            flush_seconds: phase.flush.as_secs_f64(),
            bytes_per_second: crate::units::per_second(phase.bytes, phase.elapsed),
            reads: RequestReport::new(&phase.reads),
            writes: RequestReport::new(&phase.writes),
        }
    }
}

/// Requests of one way at one target.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct RequestReport {
    /// How many.
    pub(crate) requests: u64,
    /// Bytes that they moved.
    pub(crate) bytes: u64,
    /// From the call until the request is in the queue; neither the system call nor the doorbell that submits it, which
    /// are one for many requests, is part of it.
    pub(crate) queueing: Latency,
    /// From there to the moment at which the program had the buffer again.
    pub(crate) completion: Latency,
    /// Both together.
    pub(crate) total: Latency,
}

impl RequestReport {
    /// The account of `figures`.
    pub(crate) fn new(figures: &Figures) -> Self {
        Self {
            requests: figures.requests,
            bytes: figures.bytes,
            queueing: figures.queueing.summary(),
            completion: figures.completion.summary(),
            total: figures.total.summary(),
        }
    }
}

/// What the memory stack did.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StackReport {
    /// When a controller could reach the data buffers.
    pub(crate) protect: Protect,
    /// The arenas.
    pub(crate) memory: Vec<MemoryReport>,
    /// The commands that get what was refused, for all arenas together: none undoes another.
    pub(crate) fixes: Vec<String>,
    /// The controllers.
    pub(crate) devices: Vec<DeviceReport>,
    /// The DMA pools of all controllers.
    pub(crate) pools: Vec<PoolReport>,
    /// The I/O address space.
    pub(crate) domain: DomainReport,
}

/// An arena.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MemoryReport {
    /// `data` or `control`.
    pub(crate) name: &'static str,
    /// Where it comes from.
    pub(crate) source: &'static str,
    /// How large it is.
    pub(crate) bytes: u64,
    /// The size of its pages.
    pub(crate) page_bytes: u64,
    /// Whether devices reach all of it, always.
    pub(crate) always_exposed: bool,
    /// What smaller pages than could be had elsewhere cost.
    pub(crate) cost: Option<&'static str>,
    /// Why the kernel may take its pages away, where it may.
    pub(crate) not_locked: Option<String>,
    /// How many 4 KiB frames it has.
    pub(crate) frames: u64,
    /// How many of them were in use when the account was taken.
    pub(crate) frames_in_use: u64,
    /// The most that were in use.
    pub(crate) frames_at_most: u64,
    /// How many are kept out of use, because a device may reach them for ever.
    pub(crate) frames_quarantined: u64,
    /// What was tried before, and why it gave nothing.
    pub(crate) refused: Vec<RefusedReport>,
}

/// A source of memory that gave nothing.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RefusedReport {
    /// Which.
    pub(crate) source: &'static str,
    /// Why.
    pub(crate) why: String,
}

/// A controller, and its driver.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DeviceReport {
    /// As the user named it.
    pub(crate) name: String,
    /// How many queues were used.
    pub(crate) queues: u64,
    /// Reads and writes that the driver took.
    pub(crate) requests: u64,
    /// Commands that they became.
    pub(crate) commands: u64,
    /// Commands that the controller ended with an error.
    pub(crate) errors: u64,
    /// Requests that were tried again.
    pub(crate) retries: u64,
    /// Requests that did not end in time.
    pub(crate) timeouts: u64,
    /// Doorbell writes.
    pub(crate) doorbells: u64,
    /// Whether a wait sleeps until an interrupt, as is asked for without `--poll`, or asks again and again.
    pub(crate) by_interrupt: bool,
    /// How often the program slept until an interrupt.
    pub(crate) sleeps: u64,
    /// Interrupts that woke it.
    pub(crate) interrupts: u64,
    /// Segments of all requests' data.
    pub(crate) segments: u64,
    /// Pages named to the controller.
    pub(crate) prp_entries: u64,
    /// Pages of PRP lists that this took.
    pub(crate) prp_pages: u64,
    /// Pages of PRP lists in use when the account was taken.
    pub(crate) prp_pages_in_use: u64,
    /// The most at a time.
    pub(crate) prp_pages_at_most: u64,
}

impl DeviceReport {
    /// The account of another queue of the same controller is added.
    pub(crate) fn add(&mut self, other: &Self) {
        self.queues += other.queues;
        self.requests += other.requests;
        self.commands += other.commands;
        self.errors += other.errors;
        self.retries += other.retries;
        self.timeouts += other.timeouts;
        self.doorbells += other.doorbells;
        self.sleeps += other.sleeps;
        self.interrupts += other.interrupts;
        self.segments += other.segments;
        self.prp_entries += other.prp_entries;
        self.prp_pages += other.prp_pages;
    }
}

/// A DMA pool.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolReport {
    /// Its name.
    pub(crate) name: String,
    /// Blocks in use when the account was taken.
    pub(crate) in_use: u64,
    /// The most blocks in use at a time.
    pub(crate) at_most: u64,
    /// Blocks in all.
    pub(crate) blocks: u64,
    /// Bytes of a block.
    pub(crate) block_bytes: u64,
    /// Chunks that they were cut from.
    pub(crate) chunks: u64,
    /// Of these, chunks that could be given back.
    pub(crate) free_chunks: u64,
    /// Bytes of all chunks.
    pub(crate) bytes: u64,
}

impl PoolReport {
    /// The account of a pool with these figures.
    pub(crate) fn new(stats: &PoolStats) -> Self {
        Self {
            name: stats.name.clone(),
            in_use: stats.in_use,
            at_most: stats.high_water,
            blocks: stats.blocks,
            block_bytes: stats.block_bytes,
            chunks: stats.chunks,
            free_chunks: stats.free_chunks,
            bytes: stats.bytes,
        }
    }
}

/// An I/O address space.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DomainReport {
    /// What keeps its table.
    pub(crate) backend: &'static str,
    /// Buffers mapped.
    pub(crate) maps: u64,
    /// Of these, ones that needed no table work.
    pub(crate) maps_fixed: u64,
    /// Buffers that a device may reach for ever.
    pub(crate) quarantined: u64,
    /// Free extents of I/O virtual addresses.
    pub(crate) iova_extents: u64,
    /// Table pages in use.
    pub(crate) table_pages: u64,
    /// Ranges that were asked to be flushed.
    pub(crate) invalidations_asked: u64,
    /// Of these, ranges for which table pages had to be dropped, too.
    pub(crate) invalidations_of_tables: u64,
    /// Ranges that a neighbour's flush covered.
    pub(crate) invalidations_merged: u64,
    /// Flushes sent.
    pub(crate) invalidations_sent: u64,
    /// Of these, flushes of everything.
    pub(crate) invalidations_whole: u64,
    /// Waits sent behind them.
    pub(crate) waits_sent: u64,
    /// Calls that had to wait.
    pub(crate) waited: u64,
    /// How long they did.
    pub(crate) waited_ns: u64,
}
