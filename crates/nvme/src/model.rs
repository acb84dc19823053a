//! A model controller: NVMe in this process, with memory or a file behind it.
//!
//! It sits on the far side of the two things that a driver has: [`ModelRegisters`] on one, a [`Bus`] on the other.
//! Queues, PRP lists and data are reached through the bus and in no other way, so behind a software IOMMU it can
//! reach what a real controller could, and not a byte more. It executes on a thread of its own, in the order of
//! arrival, and can be told to do wrong ([`Faults`]).

mod bus;
mod engine;
mod faults;
mod identify;
mod media;
mod prp;
mod queues;
mod shared;
mod soft;
mod stats;

pub use bus::{Bus, BusAccess, BusFault};
pub use faults::{Fault, Faults, Injection, InjectionOutcome, ROGUE_BYTE, Seen, When};
pub use media::{FileMedia, InvalidationQueue, Media, MediaError, MemoryMedia, Source};
pub use shared::ModelRegisters;
pub use stats::ModelStats;

use crate::interrupt::EventFd;
use crate::spec::Cap;
use engine::Engine;
use shared::Shared;
use stats::Counters;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{JoinHandle, Thread};

/// A namespace of the model: a medium, and how it is cut into blocks.
#[derive(Clone)]
pub struct Namespace {
    media: Arc<dyn Media>,
    block_shift: u32,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({} blocks of {} bytes)", self.blocks(), self.block_bytes())
    }
}

impl Namespace {
    /// `media` in blocks of `block_bytes` (512 or 4096). What is left over at its end is not used.
    ///
    /// # Errors
    /// [`ModelError::BlockSize`] for another size, [`ModelError::TooSmall`] where there is not one block.
    pub fn new(media: Arc<dyn Media>, block_bytes: u32) -> Result<Self, ModelError> {
        if block_bytes != 512 && block_bytes != 4096 {
            return Err(ModelError::BlockSize { block_bytes });
        }
        let namespace = Self { block_shift: block_bytes.trailing_zeros(), media };
        match namespace.blocks() {
            0 => Err(ModelError::TooSmall { bytes: namespace.media.bytes(), block_bytes }),
            _ => Ok(namespace),
        }
    }

    fn blocks(&self) -> u64 {
        self.media.bytes() >> self.block_shift
    }
    fn block_shift(&self) -> u32 {
        self.block_shift
    }
    fn block_bytes(&self) -> u64 {
        1 << self.block_shift
    }
}

/// What the model controller is to be.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// Its namespaces: the first is number 1.
    pub namespaces: Vec<Namespace>,
    /// MDTS: the largest transfer is `4096 << mdts` bytes; 0 is "no limit".
    pub mdts: u8,
    /// CAP.MQES: an I/O queue has at most `mqes + 1` entries. At least 1.
    pub mqes: u16,
    /// How many I/O queue pairs there are, 1 to 255.
    pub queues: u16,
    /// CAP.TO, in units of 500 ms: how long the driver waits for a change of CSTS.RDY.
    pub timeout_500ms: u8,
    /// CAP.DSTRD, 0 to 8: doorbells are `4 << stride_shift` bytes apart.
    pub stride_shift: u8,
    /// How many interrupt vectors there are, 0 to 2048; each is an eventfd.
    pub vectors: u16,
    /// RTD3E: how long a shutdown may take, in microseconds; 0 is "not reported".
    pub rtd3_entry_us: u32,
    /// VS: 2.0 is 20000h. Before 1.3 there are no identification descriptors, before 1.1 no list of active namespaces.
    pub version: u32,
    /// ACL, which counts from 0: how many aborts may be outstanding.
    pub acl: u8,
    /// AERL, which counts from 0: how many asynchronous event requests may be outstanding.
    pub aerl: u8,
}

impl ModelConfig {
    /// A controller with these namespaces, transfers up to 1 MiB, 16 queue pairs of up to 1024 entries, 10 s to
    /// become ready, and no interrupts.
    pub fn new(namespaces: Vec<Namespace>) -> Self {
        Self {
            namespaces,
            mdts: 8,
            mqes: 1023,
            queues: 16,
            timeout_500ms: 20,
            stride_shift: 0,
            vectors: 0,
            rtd3_entry_us: 0,
            version: 2 << 16,
            acl: 3,
            aerl: 0,
        }
    }
}

/// Why there is no model controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Blocks have 512 or 4096 bytes.
    #[error("blocks of {block_bytes} bytes: the model has 512 and 4096")]
    BlockSize {
        /// What was asked for.
        block_bytes: u32,
    },
    /// A namespace has at least one block.
    #[error("a medium of {bytes} bytes has no room for one block of {block_bytes}")]
    TooSmall {
        /// The medium's size.
        bytes: u64,
        /// The size of a block.
        block_bytes: u32,
    },
    /// A number is outside what the model can be.
    #[error("{name} is {value}: the model takes {min} to {max}")]
    OutOfRange {
        /// Which field of [`ModelConfig`].
        name: &'static str,
        /// Its value.
        value: u64,
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// The system gave no thread.
    #[error("no thread for the model controller: {0}")]
    Thread(io::Error),
    /// The system gave no eventfd for an interrupt vector.
    #[error("no eventfd for interrupt vector {vector} of the model controller: {error}; raise ulimit -n")]
    Vector {
        /// Which one.
        vector: u16,
        /// What the system said.
        error: io::Error,
    },
}

/// A model controller, running until it is dropped.
pub struct ModelController {
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    faults: Faults,
    vectors: Vec<Arc<EventFd>>,
    thread: Thread,
    join: Option<JoinHandle<()>>,
}

impl fmt::Debug for ModelController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelController").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl ModelController {
    /// Starts a controller that reaches memory by `bus`. It is disabled, as after a reset.
    ///
    /// # Errors
    /// [`ModelError::OutOfRange`] naming the field, [`ModelError::Vector`], [`ModelError::Thread`].
    pub fn spawn(bus: impl Bus, config: ModelConfig) -> Result<Self, ModelError> {
        let check = |name, value: u64, min, max| match value {
            v if (min..=max).contains(&v) => Ok(()),
            value => Err(ModelError::OutOfRange { name, value, min, max }),
        };
        check("namespaces", config.namespaces.len() as u64, 1, 1024)?;
        check("mdts", config.mdts.into(), 0, 20)?;
        check("mqes", config.mqes.into(), 1, 65535)?;
        check("queues", config.queues.into(), 1, 255)?;
        check("timeout_500ms", config.timeout_500ms.into(), 1, 255)?;
        check("stride_shift", config.stride_shift.into(), 0, 8)?;
        check("vectors", config.vectors.into(), 0, 2048)?;
        let event = |vector| match EventFd::new() {
            Ok(event) => Ok(Arc::new(event)),
            Err(error) => Err(ModelError::Vector { vector, error }),
        };
        let vectors = (0..config.vectors).map(event).collect::<Result<Vec<_>, _>>()?;
        let cap = Cap::new(config.mqes, config.timeout_500ms, config.stride_shift);
        let shared = Arc::new(Shared::new(cap, config.version, config.queues));
        let counters = Arc::new(Counters::default());
        let bus = Arc::new(bus);
        // The thread is needed by what the thread is given: it waits for its first message before it runs.
        let (send, receive) = std::sync::mpsc::channel::<Engine<_>>();
        let join = std::thread::Builder::new()
            .name("nvme-model".into())
            .spawn(move || {
                if let Ok(engine) = receive.recv() {
                    engine.run();
                }
            })
            .map_err(ModelError::Thread)?;
        let thread = join.thread().clone();
        let faults = {
            let (shared, thread) = (shared.clone(), thread.clone());
            Faults::new(bus.clone(), Box::new(move || shared.wake(&thread)))
        };
        let engine =
            Engine::new(shared.clone(), bus, (faults.clone(), vectors.clone()), counters.clone(), config);
        // The thread waits in `recv`, so it takes it; were it dead, `drop` would find out by joining.
        drop(send.send(engine));
        Ok(Self { shared, counters, faults, vectors, thread, join: Some(join) })
    }

    /// The register file, for the driver. It may outlive the controller: then it reads as all ones,
    /// like that of a device that was pulled out.
    pub fn registers(&self) -> ModelRegisters {
        ModelRegisters { shared: self.shared.clone(), thread: self.thread.clone() }
    }

    /// What interrupt vector `vector` arrives at, if there is one of this number.
    pub fn interrupt(&self, vector: u16) -> Option<Arc<EventFd>> {
        self.vectors.get(usize::from(vector)).cloned()
    }

    /// The handle by which faults are injected.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// What it did so far.
    pub fn stats(&self) -> ModelStats {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        ModelStats {
            commands: get(&self.counters.commands),
            errors: get(&self.counters.errors),
            bytes_read: get(&self.counters.bytes_read),
            bytes_written: get(&self.counters.bytes_written),
            interrupts: get(&self.counters.interrupts),
            doorbells: get(&self.shared.doorbells),
            bad_doorbells: get(&self.shared.bad_doorbells),
            shutdowns: get(&self.counters.shutdowns),
            early_changes: get(&self.shared.early_changes),
        }
    }
}

impl Drop for ModelController {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.thread.unpark();
        if let Some(join) = self.join.take() {
            // A panic of the model's thread has been printed; there is nobody else to tell.
            drop(join.join());
        }
    }
}
