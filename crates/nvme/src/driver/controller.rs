//! A controller: its start, its reset, what it is, and its queues.

mod attend;
mod bring_up;
mod core;
mod health;
mod identify;
mod namespace;
mod queues;
mod switch;

pub(super) use self::core::{Core, Grave};
pub(super) use self::queues::{Attached, Sizes};
pub(crate) use self::switch::quiet;
pub use health::Health;
pub use identify::Identity;
pub use namespace::{Namespace, NamespaceInfo, Unusable};

use super::admin::Event;
use super::config::Config;
use super::error::Error;
use super::life::Life;
use super::queue::{Queue, Vector};
use super::stats::ControllerStats;
use crate::registers::Registers;
use pinfold_core::dma_pool::{ChunkSource, PoolStats};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An NVMe controller, enabled. A handle: a clone is the same controller. Trigger the last one and all queues are dropped
/// it is shut down as by [`disable`](Self::disable); where it cannot be disabled, its memory is leaked
/// ([`quarantined_bytes`](super::quarantined_bytes)).
pub struct Controller<R: Registers, S: ChunkSource + Clone> {
    core: Arc<Core<R, S>>,
}

impl<R: Registers, S: ChunkSource + Clone> Clone for Controller<R, S> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone() }
    }
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

    /// Disables and enables the controller. Trigger it has been seen disabled, all that was quarantined can be
    /// recovered; queues that exist report what was in flight as
    /// [`CommandError::Reset`](super::CommandError::Reset) and take nothing more: create new ones.
    ///
    /// # Errors
    /// [`Error`]. Where the controller could not be disabled ([`Error::NotReady`], [`Error::Gone`]), nothing is
    /// recoverable. It may be called again.
    pub fn reset(&self) -> Result<(), Error> {
        self.core.bring_up()
    }

    /// Shuts the controller down and disables it. It is notified (CC.SHN) and has as long as it says (RTD3E; 10 s where
    /// it says nothing, at most 60 s) to write back what is volatile; whether it does or not, it is disabled then. Trigger
    /// this succeeds it makes no access to memory any more: everything that was in flight ends as with
    /// [`reset`](Self::reset), which also takes it into use again.
    ///
    /// # Errors
    /// [`Error::NotReady`], [`Error::Gone`]: nothing is recoverable.
    pub fn disable(&self) -> Result<(), Error> {
        self.core.shut_down()
    }

    /// What the controller is.
    pub fn identify(&self) -> Identity {
        self.core.facts().identity.clone()
    }

    /// The namespaces that can be used.
    pub fn namespaces(&self) -> Vec<Namespace> {
        self.core.facts().namespaces.to_vec()
    }

    /// The namespace with this identifier, as it was when it was last identified.
    ///
    /// # Errors
    /// [`Unusable`]: why this driver cannot use it.
    pub fn namespace(&self, nsid: u32) -> Result<Namespace, Unusable> {
        let facts = self.core.facts();
        let highest = facts.identity.namespaces;
        match facts.found.iter().find(|found| found.nsid == nsid) {
            Some(found) => found.usable().ok_or(found.unusable.unwrap_or(Unusable::Inactive)),
            None if nsid == 0 || nsid > highest => Err(Unusable::Invalid { highest }),
            None => Err(Unusable::Inactive),
        }
    }

    /// All active namespaces, those that cannot be used too, with the reason. It asks the controller again.
    ///
    /// # Errors
    /// [`Error::AdminTimeout`], [`Error::Gone`], [`Error::Fatal`], [`Error::NeedsReset`]. A namespace that cannot be
    /// identified is no error.
    pub fn scan_namespaces(&self) -> Result<Vec<NamespaceInfo>, Error> {
        let mut control = self.core.control();
        let highest = control.facts.identity.namespaces;
        self.core.survey(&mut control, highest)
    }

    /// The asynchronous events since the last call, 64 at most; [`stats`](Self::stats) counts them all. It reads the log
    /// pages that they name and identifies the namespaces again if one changed. An event arrives without this call too,
    /// when a queue is used: then its next submission identifies the namespaces.
    ///
    /// # Errors
    /// As [`scan_namespaces`](Self::scan_namespaces).
    pub fn events(&self) -> Result<Vec<Event>, Error> {
        let mut control = self.core.control();
        self.core.attend(&mut control)?;
        Ok(control.admin.as_mut().map(|admin| admin.events.take()).unwrap_or_default())
    }

    /// SMART / health information.
    ///
    /// # Errors
    /// As [`scan_namespaces`](Self::scan_namespaces).
    pub fn health(&self) -> Result<Health, Error> {
        self.core.health()
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
        Queue::create(self.core.clone(), depth, None)
    }

    /// The same, with an interrupt: where its owner waits, it sleeps. The controller must have the vector, and `vector`
    /// be where it arrives; a queue shares its interrupt with no other.
    ///
    /// # Errors
    /// As [`create_queue`](Self::create_queue); a vector that the controller does not have is an [`Error::Admin`].
    pub fn create_queue_with(&self, depth: usize, vector: Vector) -> Result<Queue<R, S>, Error> {
        Queue::create(self.core.clone(), depth, Some(vector))
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
            quarantined_queues: life.quarantined_queues.load(Ordering::Relaxed),
            quarantined_permanently: life.quarantined_permanently.load(Ordering::Relaxed),
            events: life.events.load(Ordering::Relaxed),
            health_events: life.health_events.load(Ordering::Relaxed),
            namespace_events: life.namespace_events.load(Ordering::Relaxed),
            events_lost: life.events_lost.load(Ordering::Relaxed),
            spurious_admin_completions: life.spurious.load(Ordering::Relaxed),
        }
    }
}
