//! [`Controller`]: the handle of a controller for its users.

use super::config::{Config, ControllerStats};
use super::error::Error;
use super::event::{Event, Health};
use super::inner::Inner;
use super::namespace::{Identity, Namespace, NamespaceInfo, Unusable};
use super::passthrough::RawCommand;
use super::queue::{Queue, Vector};
use crate::registers::Registers;
use crate::spec::PAGE_BYTES;
use pinfold_core::dma_pool::{ChunkSource, DmaPoolStats};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An enabled NVMe controller. A handle: a clone is the same controller. When the last one and all
/// queues are dropped, the controller is shut down as by [`disable`](Self::disable); where it
/// cannot be disabled, its memory is quarantined ([`quarantined_bytes`](super::quarantined_bytes)).
pub struct Controller<R: Registers, S: ChunkSource + Clone> {
    inner: Arc<Inner<R, S>>,
}

impl<R: Registers, S: ChunkSource + Clone> Clone for Controller<R, S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<R: Registers, S: ChunkSource + Clone> fmt::Debug for Controller<R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<R: Registers, S: ChunkSource + Clone> Controller<R, S> {
    /// Resets, enables and identifies the controller behind `registers`. Rings, buffers and list
    /// pages are allocated from `source`, which the controller must be able to access. Blocks until
    /// the controller answers.
    ///
    /// # Errors
    /// [`Error`]; the controller is disabled, or, where that failed too, its memory is quarantined.
    /// `registers` and `source`, two handles, are dropped: pass clones if they are still needed.
    pub fn start(registers: R, source: S, config: Config) -> Result<Self, Error>
    where
        S: 'static,
    {
        let inner = Arc::new(Inner::new(registers, source, config)?);
        inner.start()?;
        Ok(Self { inner })
    }

    /// Disables and enables the controller. Once it has been seen disabled, quarantined payloads
    /// can be recovered; existing queues report requests in flight as
    /// [`CommandError::Reset`](super::CommandError::Reset) and accept nothing more: create new
    /// ones.
    ///
    /// # Errors
    /// [`Error`]. Where the controller could not be disabled ([`Error::NotReady`],
    /// [`Error::Gone`]), nothing is recoverable. It may be called again.
    pub fn reset(&self) -> Result<(), Error> {
        self.inner.start()
    }

    /// Shuts the controller down and disables it. It is notified (CC.SHN) and has RTD3E (10 s where
    /// that is not reported, at most 60 s) to write back volatile data; then it is disabled in any
    /// case. After success it makes no more accesses to memory: everything in flight completes as
    /// with [`reset`](Self::reset), which also enables it again.
    ///
    /// # Errors
    /// [`Error::NotReady`], [`Error::Gone`]: nothing is recoverable.
    pub fn disable(&self) -> Result<(), Error> {
        self.inner.shut_down()
    }

    /// Returns the identity of the controller.
    pub fn identify(&self) -> Identity {
        self.inner.info().identity.clone()
    }

    /// Returns the namespaces that the driver supports.
    pub fn namespaces(&self) -> Vec<Namespace> {
        self.inner.info().namespaces.to_vec()
    }

    /// Returns the namespace with this identifier, as it was last identified.
    ///
    /// # Errors
    /// [`Unusable`]: why this driver does not support it.
    pub fn namespace(&self, nsid: u32) -> Result<Namespace, Unusable> {
        let info = self.inner.info();
        let highest = info.identity.namespaces;
        match info.found.iter().find(|found| found.nsid == nsid) {
            Some(found) => found.usable().ok_or(found.unusable.unwrap_or(Unusable::Inactive)),
            None if nsid == 0 || nsid > highest => Err(Unusable::Invalid { highest }),
            None => Err(Unusable::Inactive),
        }
    }

    /// Identifies all active namespaces again and returns them; unsupported ones with the reason.
    ///
    /// # Errors
    /// [`Error::AdminTimeout`], [`Error::Gone`], [`Error::Fatal`], [`Error::NeedsReset`]. A
    /// namespace that cannot be identified is not an error.
    pub fn scan_namespaces(&self) -> Result<Vec<NamespaceInfo>, Error> {
        let mut control = self.inner.control();
        let highest = control.info.identity.namespaces;
        self.inner.scan_namespaces(&mut control, highest)
    }

    /// Returns the asynchronous events since the last call, at most 64; [`stats`](Self::stats)
    /// counts all. Reads the log pages that they name, and identifies the namespaces again if one
    /// changed. Bounded in time for any reports of the controller: about 8 times
    /// [`Config::admin_timeout`], and the rest is left to the next call. Events also arrive while a
    /// queue is used: its next submission then identifies the namespaces.
    ///
    /// # Errors
    /// As [`scan_namespaces`](Self::scan_namespaces).
    pub fn events(&self) -> Result<Vec<Event>, Error> {
        self.inner.take_events()
    }

    /// Reads the SMART / health information.
    ///
    /// # Errors
    /// As [`scan_namespaces`](Self::scan_namespaces).
    pub fn health(&self) -> Result<Health, Error> {
        self.inner.health()
    }

    /// Sends an admin command of the program's own, waits for it, and returns DW0 of its
    /// completion. `data` are sent, or replaced by the data that the controller has written,
    /// followed by zeroes, according to the [direction](RawCommand::direction). The controller gets
    /// a copy of them, of a page.
    ///
    /// Commands that change the namespaces (format, sanitize, management, attachment) have them
    /// identified again before the next request. Those that the driver relies on are refused: its
    /// queues, aborts, events, doorbells, the controller's resources, and features that it has set.
    /// A vendor's command must not transfer more than a page.
    ///
    /// # Errors
    /// [`Error::OwnedByDriver`], [`Error::NotSent`], [`Error::DataLength`]: nothing was sent.
    /// [`Error::Admin`]: the controller refuses it. As [`scan_namespaces`](Self::scan_namespaces).
    /// `data` are as before then.
    pub fn admin(&self, command: &RawCommand, data: &mut [u8; PAGE_BYTES]) -> Result<u32, Error> {
        self.inner.admin(command, data)
    }

    /// Returns the largest depth for [`create_queue`](Self::create_queue).
    pub fn max_depth(&self) -> usize {
        self.inner.max_depth()
    }

    /// Creates a queue pair for `depth` requests in flight, which is polled.
    ///
    /// # Errors
    /// [`Error::Depth`] naming the limit, [`Error::NoQueueLeft`], [`Error::Source`],
    /// [`Error::Admin`], [`Error::AdminTimeout`], [`Error::NeedsReset`].
    pub fn create_queue(&self, depth: usize) -> Result<Queue<R, S>, Error> {
        Queue::create(self.inner.clone(), depth, None)
    }

    /// Creates a queue pair with an interrupt, so that waiting for it sleeps. The controller must
    /// have the vector, and the queue must be its only user.
    ///
    /// # Errors
    /// As [`create_queue`](Self::create_queue); a vector that the controller does not have is an
    /// [`Error::Admin`]. `vector`, a handle, is dropped then.
    pub fn create_queue_with(&self, depth: usize, vector: Vector) -> Result<Queue<R, S>, Error> {
        Queue::create(self.inner.clone(), depth, Some(vector))
    }

    /// Returns the report of the pool of list pages. Linear in its blocks.
    pub fn list_pool(&self) -> DmaPoolStats {
        self.inner.lists.stats()
    }

    /// Returns the counters of the controller.
    pub fn stats(&self) -> ControllerStats {
        let lists = self.inner.lists.stats();
        let shared = &self.inner.shared;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ControllerStats {
            resets: shared.generation(),
            list_pages_used: lists.in_use,
            list_pages_max: lists.peak,
            quarantined: get(&shared.quarantined),
            quarantined_queues: get(&shared.quarantined_queues),
            quarantined_permanently: get(&shared.quarantined_permanently),
            events: get(&shared.events),
            health_events: get(&shared.health_events),
            namespace_events: get(&shared.namespace_events),
            events_lost: get(&shared.events_lost),
            admin_retries: get(&shared.admin_retries),
            spurious_admin_completions: get(&shared.spurious_admin_completions),
        }
    }
}
