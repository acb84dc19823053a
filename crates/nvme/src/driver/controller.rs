//! A controller: its start, its reset, what it is, and its queues.

mod bring_up;
mod core;

pub(super) use self::core::{Core, Grave};

use super::config::Config;
use super::error::Error;
use super::life::Life;
use super::queue::Queue;
use super::stats::ControllerStats;
use crate::registers::Registers;
use pinfold_core::dma_pool::{ChunkSource, PoolStats};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a controller says of itself (Base, "Identify Controller Data Structure").
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// MN.
    pub model: String,
    /// SN.
    pub serial: String,
    /// FR.
    pub firmware: String,
    /// VS: major, minor, tertiary.
    pub version: (u16, u8, u8),
    /// The most bytes in one command: MDTS, the driver's limit and [`Config::max_transfer_bytes`], whichever is
    /// least.
    pub max_transfer_bytes: u32,
    /// CAP.MQES + 1: the most entries of a queue.
    pub max_queue_entries: u32,
    /// How many I/O queue pairs were granted.
    pub queues: u16,
    /// Whether it can discard (ONCS bit 2).
    pub can_discard: bool,
    /// Whether it has a volatile write cache (VWC bit 0), so that a flush matters.
    pub volatile_cache: bool,
}

/// A namespace that this driver can use: blocks of 512 or 4096 bytes without metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Namespace {
    /// Its identifier.
    pub nsid: u32,
    /// Its size in blocks.
    pub blocks: u64,
    /// The size of a block: 512 or 4096 bytes.
    pub block_bytes: u32,
    /// Whether blocks that were discarded read as zeroes (DLFEAT).
    pub discard_zeroes: bool,
}

impl Namespace {
    /// Its size in bytes; `u64::MAX` where it is more than that.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes.into())
    }
}

/// An NVMe controller, enabled. Dropping it (and its queues) disables it.
pub struct Controller<R: Registers, S: ChunkSource + Clone> {
    core: Arc<Core<R, S>>,
}

impl<R: Registers, S: ChunkSource + Clone> fmt::Debug for Controller<R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<R: Registers, S: ChunkSource + Clone> Controller<R, S> {
    /// Resets and enables the controller behind `registers` and asks what it is. Rings, buffers and PRP list pages
    /// come from `source`, which the controller must be able to reach. Blocks until the controller answers.
    ///
    /// # Errors
    /// [`Error`]; the controller is left disabled, or, where even that failed, its memory leaked.
    pub fn start(registers: R, source: S, config: Config) -> Result<Self, Error> {
        let core = Arc::new(Core::new(registers, source, config)?);
        core.bring_up()?;
        Ok(Self { core })
    }

    /// Disables and enables the controller. When it has been seen disabled, all that was quarantined can be
    /// recovered; queues that exist report what was in flight as
    /// [`CommandError::Reset`](super::CommandError::Reset) and take nothing more: create new ones.
    ///
    /// # Errors
    /// [`Error`]. Where the controller could not be disabled ([`Error::NotReady`], [`Error::Gone`]), nothing is
    /// recoverable. It may be called again.
    pub fn reset(&self) -> Result<(), Error> {
        self.core.bring_up()
    }

    /// What the controller is.
    pub fn identify(&self) -> Identity {
        self.core.facts().identity.clone()
    }

    /// The namespaces that can be used.
    pub fn namespaces(&self) -> Vec<Namespace> {
        self.core.facts().namespaces.to_vec()
    }

    /// The deepest queue that [`create_queue`](Self::create_queue) makes.
    pub fn max_depth(&self) -> usize {
        self.core.max_depth()
    }

    /// A queue pair for `depth` requests under way at a time.
    ///
    /// # Errors
    /// [`Error::Depth`] naming the limit, [`Error::NoQueueLeft`], [`Error::Source`], [`Error::Admin`],
    /// [`Error::AdminTimeout`], [`Error::NeedsReset`].
    pub fn create_queue(&self, depth: usize) -> Result<Queue<R, S>, Error> {
        Queue::create(self.core.clone(), depth)
    }

    /// The account of the pool that PRP list pages come from. Linear in its blocks.
    pub fn list_pool(&self) -> PoolStats {
        self.core.lists.report()
    }

    /// What there is to count besides the queues' own counts.
    pub fn stats(&self) -> ControllerStats {
        let lists = self.core.lists.report();
        let life: &Life = &self.core.life;
        ControllerStats {
            resets: life.epoch(),
            list_pages_used: lists.in_use,
            list_pages_max: lists.high_water,
            quarantined: life.quarantined.load(Ordering::Relaxed),
            leaked: life.leaked.load(Ordering::Relaxed),
        }
    }
}
