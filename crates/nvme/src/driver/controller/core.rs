//! What a controller and its queues have in common.

use super::switch::Patience;
use super::{Identity, Namespace, NamespaceInfo};
use crate::driver::admin::Admin;
use crate::driver::config::Config;
use crate::driver::error::Error;
use crate::driver::life::{Life, count_quarantined_bytes};
use crate::driver::queue::MAX_DEPTH;
use crate::driver::request::{PRPS_LISTS, Page};
use crate::driver::span::Span;
use crate::registers::Registers;
use crate::spec::{Cap, Doorbell, PAGE, PAGE_BYTES, doorbell_offset, offset};
use pinfold_core::dma_pool::{ChunkSource, DmaPool};
use pinfold_core::domain::DomainId;
use pinfold_core::gather::prp::{ListPages, Prps};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// What was found out when the controller was enabled.
#[derive(Clone, Debug)]
pub(in crate::driver) struct Facts {
    pub(in crate::driver) identity: Identity,
    /// All active namespaces.
    pub(in crate::driver) found: Arc<[NamespaceInfo]>,
    /// Those that can be used.
    pub(in crate::driver) namespaces: Arc<[Namespace]>,
    /// RTD3E.
    pub(in crate::driver) rtd3_entry_us: u32,
}

/// What a queue left behind that the controller may still reach. It is released when the controller is disabled.
pub(in crate::driver) struct Grave<S: ChunkSource> {
    /// Held, and released with it.
    spans: Vec<Span<S>>,
    pub(in crate::driver) prps: Vec<Prps<Page, PRPS_LISTS>>,
    pub(in crate::driver) pages: Vec<Page>,
    /// The queue identifier that is free again then.
    pub(in crate::driver) id: Option<u16>,
}

impl<S: ChunkSource> Grave<S> {
    pub(in crate::driver) fn of(spans: Vec<Span<S>>) -> Self {
        Self { spans, prps: Vec::new(), pages: Vec::new(), id: None }
    }
}

impl Facts {
    pub(super) fn set_namespaces(&mut self, found: Vec<NamespaceInfo>) {
        for info in &found {
            if let Some(reason) = info.unusable {
                tracing::warn!(info.nsid, %reason, "a namespace cannot be used");
            }
        }
        self.namespaces = found.iter().filter_map(NamespaceInfo::usable).collect();
        self.found = found.into();
    }
}

/// The part that is reached by one thread at a time.
pub(in crate::driver) struct Control<S: ChunkSource> {
    /// `None` only while the core is dropped.
    pub(in crate::driver) admin: Option<Admin<S>>,
    pub(in crate::driver) facts: Facts,
    pub(super) graves: Vec<Grave<S>>,
    /// Whether the controller has been told where the admin rings are, and not been seen disabled since.
    pub(super) attached: bool,
    /// Whether the last change of CC.EN did not take effect in time.
    pub(super) unresponsive: bool,
    /// Which queue identifiers a [`Queue`](crate::driver::Queue) has: number 1 is first. An identifier stays taken
    /// until its queue is dropped, so that a doorbell of an old queue never reaches a new one.
    pub(super) ids: Vec<bool>,
}

pub(in crate::driver) struct Core<R: Registers, S: ChunkSource + Clone> {
    pub(in crate::driver) registers: R,
    pub(in crate::driver) source: S,
    /// The domain that the source is in, and every payload must be in.
    pub(in crate::driver) domain: Option<DomainId>,
    pub(in crate::driver) lists: DmaPool<S>,
    pub(in crate::driver) config: Config,
    pub(in crate::driver) cap: Cap,
    pub(in crate::driver) life: Arc<Life>,
    control: Mutex<Control<S>>,
}

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    pub(super) fn new(registers: R, source: S, config: Config) -> Result<Self, Error> {
        let domain = source.domain();
        if registers.domain().is_some_and(|of_device| domain != Some(of_device)) {
            return Err(Error::OtherDomain);
        }
        let cap = Cap(registers.read64(offset::CAP));
        if cap.0 == u64::MAX {
            return Err(Error::Gone);
        }
        if !cap.has_nvm_command_set() {
            return Err(Error::NoNvmCommandSet);
        }
        if cap.min_page_bytes() > 4096 {
            return Err(Error::PageSize { min_bytes: cap.min_page_bytes() });
        }
        let lists = DmaPool::new(source.clone(), "nvme prp", PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)?;
        let life = Arc::new(Life::default());
        let admin = Admin::new(&source, life.clone())?;
        let identity = Identity { max_queue_entries: u32::from(cap.mqes()) + 1, ..Identity::default() };
        let facts = Facts { identity, found: Arc::from([]), namespaces: Arc::from([]), rtd3_entry_us: 0 };
        let control = Control {
            admin: Some(admin),
            facts,
            graves: Vec::new(),
            attached: false,
            unresponsive: false,
            ids: Vec::new(),
        };
        Ok(Self { registers, source, domain, lists, config, cap, life, control: Mutex::new(control) })
    }

    pub(in crate::driver) fn control(&self) -> MutexGuard<'_, Control<S>> {
        // Every step under the lock leaves `Control` whole, or `Admin` marked as not usable.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, where no other thread has it.
    pub(in crate::driver) fn try_control(&self) -> Option<MutexGuard<'_, Control<S>>> {
        match self.control.try_lock() {
            Ok(control) => Some(control),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(in crate::driver) fn facts(&self) -> Facts {
        self.control().facts.clone()
    }

    pub(in crate::driver) fn max_depth(&self) -> usize {
        // A ring holds one command less than it has entries.
        usize::from(self.cap.mqes()).min(MAX_DEPTH)
    }

    pub(in crate::driver) fn ring(&self, queue: u16, which: Doorbell, value: u32) {
        self.registers.write32(doorbell_offset(queue, which, self.cap.doorbell_stride_shift()), value);
    }

    /// Gives back what nobody reaches any more.
    pub(in crate::driver) fn release(&self, grave: Grave<S>) {
        for prps in grave.prps {
            if let Err(error) = prps.release(&self.lists) {
                tracing::error!(%error, "a PRP list page was not taken back");
            }
        }
        for page in grave.pages {
            self.give_page(page);
        }
    }

    pub(in crate::driver) fn give_page(&self, page: Page) {
        if let Err(error) = self.lists.give(page) {
            tracing::error!(%error, "a list page was not taken back");
        }
    }

    /// The controller has been seen disabled.
    pub(super) fn on_disabled(&self, control: &mut Control<S>) {
        self.life.next_epoch();
        control.attached = false;
        self.life.quarantined_queues.store(0, Ordering::Relaxed);
        for grave in std::mem::take(&mut control.graves) {
            if let Some(id) = grave.id {
                control.give_id(id);
            }
            self.release(grave);
        }
    }
}

impl<R: Registers, S: ChunkSource + Clone> Drop for Core<R, S> {
    /// Waits for the shutdown (60 s at most) and for CSTS.RDY (as [`Switch`](super::switch::Switch) bounds it).
    fn drop(&mut self) {
        let mut control = self.control();
        if !control.attached {
            return;
        }
        self.notify_shutdown(&control);
        let patience = if control.unresponsive { Patience::Glance } else { Patience::Full };
        let Err(error) = self.stop(&mut control, patience) else { return };
        // Rings, lists and buffers that a controller may still write to are nobody's any more.
        let (admin, graves) = (control.admin.take(), std::mem::take(&mut control.graves));
        let queues = graves.iter().flat_map(|grave| &grave.spans).map(|span| span.segment().len);
        let lists = self.lists.report().in_use * PAGE;
        let bytes = admin.as_ref().map_or(0, Admin::bytes) + queues.sum::<u64>() + lists;
        count_quarantined_bytes(bytes);
        tracing::warn!(%error, bytes, "the controller could not be disabled: its memory is leaked");
        std::mem::forget((admin, graves));
    }
}
