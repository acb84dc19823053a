//! The state that a controller's handles and its queues share, behind the control lock.

use crate::driver::admin_queue::AdminQueue;
use crate::driver::config::Config;
use crate::driver::data_pointer::DataPointer;
use crate::driver::dma_buffer::DmaBuffer;
use crate::driver::enable::ReadyWait;
use crate::driver::error::Error;
use crate::driver::identity::Identity;
use crate::driver::namespace::{Namespace, NamespaceInfo};
use crate::driver::registers::ControllerRegisters;
use crate::driver::retry::RetryDelays;
use crate::driver::shared::{SharedState, count_quarantined_bytes};
use crate::registers::Registers;
use crate::spec::{Command, PAGE, PAGE_BYTES};
use pinfold_core::dma_pool::{ChunkSource, DmaPool};
use pinfold_core::domain::DomainId;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use zerocopy::{FromBytes, IntoBytes};

/// The deepest queue: command identifiers keep 6 bits for the use count of a slot.
const MAX_DEPTH: usize = 1023;

/// What the controller reported when it was enabled.
#[derive(Clone, Debug)]
pub(in crate::driver) struct ControllerInfo {
    pub(in crate::driver) identity: Identity,
    /// All active namespaces.
    pub(in crate::driver) found: Arc<[NamespaceInfo]>,
    /// Those that the driver supports.
    pub(in crate::driver) namespaces: Arc<[Namespace]>,
    /// CRDT1 to CRDT3.
    pub(in crate::driver) retry_delays: RetryDelays,
    /// RTD3E.
    pub(in crate::driver) rtd3_entry_us: u32,
}

impl ControllerInfo {
    pub(super) fn set_namespaces(&mut self, found: Vec<NamespaceInfo>) {
        for info in &found {
            if let Some(reason) = info.unusable {
                tracing::warn!(info.nsid, %reason, "unsupported namespace");
            }
        }
        self.namespaces = found.iter().filter_map(NamespaceInfo::usable).collect();
        self.found = found.into();
    }
}

/// Memory of a queue that the controller may still access. It is released when the controller is
/// disabled.
pub(in crate::driver) struct PendingRelease<S: ChunkSource> {
    pub(in crate::driver) rings: Vec<DmaBuffer<S>>,
    pub(in crate::driver) data: Vec<DataPointer>,
    /// The queue identifier, reserved until then.
    pub(super) id: Option<u16>,
}

impl<S: ChunkSource> PendingRelease<S> {
    pub(in crate::driver) fn new(rings: Vec<DmaBuffer<S>>) -> Self {
        Self { rings, data: Vec::new(), id: None }
    }
}

/// The state behind the control lock.
pub(in crate::driver) struct Control<S: ChunkSource> {
    /// `None` only while `Inner` is dropped.
    pub(in crate::driver) admin: Option<AdminQueue<S>>,
    pub(in crate::driver) info: ControllerInfo,
    pub(super) pending: Vec<PendingRelease<S>>,
    /// Whether the controller has the addresses of the admin rings and has not been seen disabled
    /// since.
    pub(super) attached: bool,
    /// Whether the last change of CC.EN did not take effect in time.
    pub(super) unresponsive: bool,
    /// Which queue identifiers a [`Queue`](crate::driver::Queue) has; number 1 is first. An
    /// identifier is reserved until its queue is dropped, so that a doorbell of an old queue never
    /// reaches a new one.
    pub(super) ids: Vec<bool>,
}

impl<S: ChunkSource + Clone> Control<S> {
    /// Returns the admin queue, if it accepts commands.
    pub(super) fn usable_admin(&mut self) -> Result<&mut AdminQueue<S>, Error> {
        self.admin.as_mut().filter(|admin| admin.is_usable()).ok_or(Error::NeedsReset)
    }

    pub(super) fn set_usable(&mut self, usable: bool) {
        if let Some(admin) = &mut self.admin {
            admin.set_usable(usable);
        }
    }

    /// Reserves a queue identifier.
    pub(super) fn reserve_id(&mut self) -> Result<u16, Error> {
        let limit = self.info.identity.queues;
        for id in 1..=limit {
            let index = usize::from(id) - 1;
            if self.ids.len() <= index {
                self.ids.resize(index + 1, false);
            }
            if let Some(reserved) = self.ids.get_mut(index).filter(|reserved| !**reserved) {
                *reserved = true;
                return Ok(id);
            }
        }
        Err(Error::NoQueueLeft { limit })
    }

    pub(super) fn release_id(&mut self, id: u16) {
        if let Some(reserved) = self.ids.get_mut(usize::from(id).wrapping_sub(1)) {
            *reserved = false;
        }
    }
}

pub(in crate::driver) struct Inner<R: Registers, S: ChunkSource + Clone> {
    pub(in crate::driver) registers: ControllerRegisters<R>,
    pub(in crate::driver) source: S,
    /// The domain of the source, in which every payload must be mapped.
    pub(in crate::driver) domain: Option<DomainId>,
    /// Pages for PRP lists and SGL segments.
    pub(in crate::driver) lists: DmaPool,
    pub(in crate::driver) config: Config,
    pub(in crate::driver) shared: Arc<SharedState>,
    control: Mutex<Control<S>>,
}

impl<R: Registers, S: ChunkSource + Clone> Inner<R, S> {
    pub(in crate::driver) fn new(registers: R, source: S, config: Config) -> Result<Self, Error>
    where
        S: 'static,
    {
        let domain = source.domain();
        if registers.domain().is_some_and(|of_device| domain != Some(of_device)) {
            return Err(Error::OtherDomain);
        }
        let registers = ControllerRegisters::new(registers)?;
        let cap = registers.cap();
        if !cap.has_nvm_command_set() {
            return Err(Error::NoNvmCommandSet);
        }
        if cap.min_page_bytes() > PAGE {
            return Err(Error::PageSize { min_bytes: cap.min_page_bytes() });
        }
        let lists =
            DmaPool::builder("nvme lists").block(PAGE_BYTES).align(PAGE_BYTES).build(&source)?;
        let shared = Arc::new(SharedState::default());
        let control = Control {
            admin: Some(AdminQueue::new(&source, shared.clone())?),
            info: ControllerInfo {
                identity: Identity {
                    max_queue_entries: u32::from(cap.mqes()) + 1,
                    ..Identity::default()
                },
                found: Arc::from([]),
                namespaces: Arc::from([]),
                retry_delays: RetryDelays::default(),
                rtd3_entry_us: 0,
            },
            pending: Vec::new(),
            attached: false,
            unresponsive: false,
            ids: Vec::new(),
        };
        Ok(Self { registers, source, domain, lists, config, shared, control: Mutex::new(control) })
    }

    pub(in crate::driver) fn control(&self) -> MutexGuard<'_, Control<S>> {
        // Every step under the lock leaves `Control` consistent, or the admin queue marked as not
        // usable.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the control state, unless another thread holds its lock.
    pub(in crate::driver) fn try_control(&self) -> Option<MutexGuard<'_, Control<S>>> {
        match self.control.try_lock() {
            Ok(control) => Some(control),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(in crate::driver) fn info(&self) -> ControllerInfo {
        self.control().info.clone()
    }

    pub(in crate::driver) fn max_depth(&self) -> usize {
        // A ring holds one command less than it has entries.
        usize::from(self.registers.cap().mqes()).min(MAX_DEPTH)
    }

    /// Sends an admin command and waits for it.
    pub(super) fn execute(
        &self,
        control: &mut Control<S>,
        what: &'static str,
        command: Command,
    ) -> Result<u32, Error> {
        control.usable_admin()?.execute(&self.registers, &self.config, what, command)
    }

    /// Sends an admin command that reads a structure of at most a page.
    pub(super) fn fetch<T: FromBytes + IntoBytes>(
        &self,
        control: &mut Control<S>,
        what: &'static str,
        command: Command,
    ) -> Result<Box<T>, Error> {
        control.usable_admin()?.fetch(&self.registers, &self.config, what, command)
    }

    /// Sends an admin command whose data begins with `data`, of at most a page, followed by zeroes.
    pub(super) fn send_data(
        &self,
        control: &mut Control<S>,
        what: &'static str,
        command: Command,
        data: &[u8],
    ) -> Result<u32, Error> {
        control.usable_admin()?.send_data(&self.registers, &self.config, what, command, data)
    }

    /// Releases memory that the controller no longer accesses.
    pub(super) fn release(&self, pending: PendingRelease<S>) {
        let mut lists = self.lists.clone();
        for data in pending.data {
            data.release(&mut lists);
        }
    }

    /// Releases everything that waited until the controller was seen disabled.
    pub(super) fn on_disabled(&self, control: &mut Control<S>) {
        self.shared.next_generation();
        control.attached = false;
        self.shared.quarantined_queues.store(0, Ordering::Relaxed);
        for pending in std::mem::take(&mut control.pending) {
            if let Some(id) = pending.id {
                control.release_id(id);
            }
            self.release(pending);
        }
    }
}

impl<R: Registers, S: ChunkSource + Clone> Drop for Inner<R, S> {
    /// Waits for the shutdown (60 s at most) and for CSTS.RDY (as
    /// [`EnableControl`](crate::driver::enable::EnableControl) bounds it).
    fn drop(&mut self) {
        let mut control = self.control();
        if !control.attached {
            return;
        }
        self.notify_shutdown(&control);
        let wait = if control.unresponsive { ReadyWait::Once } else { ReadyWait::Reported };
        let Err(error) = self.stop(&mut control, wait) else { return };
        // The controller may still write to its rings, lists and buffers.
        let (admin, pending) = (control.admin.take(), std::mem::take(&mut control.pending));
        let rings =
            pending.iter().flat_map(|pending| &pending.rings).map(|ring| ring.segment().len);
        let lists = self.lists.stats().in_use * PAGE;
        let bytes = admin.as_ref().map_or(0, AdminQueue::bytes) + rings.sum::<u64>() + lists;
        count_quarantined_bytes(bytes);
        tracing::warn!(%error, bytes, "the controller could not be disabled: its memory is quarantined");
        // List pages are quarantined by being dropped.
        let rings: Vec<_> = pending.into_iter().map(|pending| pending.rings).collect();
        std::mem::forget((admin, rings));
    }
}
