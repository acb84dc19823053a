//! The state that a controller's handles and its queues share, behind the control lock.

use crate::driver::admin_queue::AdminQueue;
use crate::driver::clock::RetryDelays;
use crate::driver::config::Config;
use crate::driver::data_pointer::DataPointer;
use crate::driver::enable::{ControllerRegisters, ReadyWait};
use crate::driver::error::Error;
use crate::driver::in_flight::{SharedState, count_quarantined_bytes};
use crate::driver::namespace::{Identity, Namespace, NamespaceInfo};
use crate::driver::passthrough::{DataDirection, RawCommand};
use crate::driver::slots::{self, DmaBuffer};
use crate::registers::Registers;
use crate::spec::{Command, Cqe, PAGE, PAGE_BYTES, admin, create_cq};
use pinfold_core::dma_pool::{ChunkSource, DmaPool};
use pinfold_core::domain::DomainId;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// The deepest queue: command identifiers keep 6 bits for the use count of a slot.
const MAX_DEPTH: usize = 1023;

/// The properties that the controller reported when it was enabled.
#[derive(Clone, Debug)]
pub(in crate::driver) struct ControllerInfo {
    pub(in crate::driver) identity: Identity,
    /// All active namespaces.
    pub(in crate::driver) found: Arc<[NamespaceInfo]>,
    /// The namespaces that the driver supports.
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
    /// The queue identifiers that a [`Queue`](crate::driver::Queue) has; number 1 is first. An
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
        let admin = control.usable_admin()?;
        admin.fetch(&self.registers, &self.config, what, command).map(|(data, _)| data)
    }

    /// Like [`Controller::admin`](crate::driver::Controller::admin).
    pub(in crate::driver) fn admin(
        &self,
        raw: &RawCommand,
        data: &mut [u8; PAGE_BYTES],
    ) -> Result<u32, Error> {
        let (what, command) = raw.admin()?;
        let mut control = self.control();
        let admin = control.usable_admin()?;
        let (registers, config) = (&self.registers, &self.config);
        let result = match raw.direction() {
            DataDirection::ToController => admin.send_data(registers, config, what, command, data),
            DataDirection::FromController => {
                let fetched = admin.fetch::<R, [u8; PAGE_BYTES]>(registers, config, what, command);
                fetched.map(|(written, result)| {
                    data.copy_from_slice(&*written);
                    result
                })
            }
            _ => admin.execute(registers, config, what, command),
        };
        // One that has timed out may have been carried out.
        let refused = matches!(result, Err(Error::Admin { .. }));
        if raw.changes_namespaces() && !refused {
            admin.events.set_namespaces_changed();
            self.shared.namespaces_changed();
        }
        result
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

// Creating and deleting queue pairs (Base 5.3 to 5.6).
//
// Both hold the control lock throughout, as a reset does: a queue pair belongs to exactly one
// generation of the controller, and its rings are released only when the controller no longer has
// it.

/// Entries of a completion queue per command in flight: its doorbell is rung that much less often.
const COMPLETIONS_PER_COMMAND: usize = 4;

/// The entries of a queue pair's rings.
#[derive(Clone, Copy)]
pub(in crate::driver) struct RingSizes {
    pub(in crate::driver) submission: u32,
    pub(in crate::driver) completion: u32,
}

impl RingSizes {
    /// Sizes the rings for `submission` entries and a controller limit of `limit`, which is at most
    /// 65,536.
    pub(in crate::driver) fn new(submission: usize, limit: usize) -> Self {
        let bytes =
            (submission * COMPLETIONS_PER_COMMAND * Cqe::BYTES).next_multiple_of(PAGE_BYTES);
        let entries = |entries| u32::try_from(entries).unwrap_or(u32::MAX);
        let completion = (bytes / Cqe::BYTES).min(limit).max(submission);
        Self { submission: entries(submission), completion: entries(completion) }
    }
}

/// A queue pair that exists at the controller.
pub(in crate::driver) struct CreatedQueuePair<S: ChunkSource> {
    pub(in crate::driver) id: u16,
    /// The generation of the controller that has it.
    pub(in crate::driver) generation: u64,
    /// The properties that the controller reported in that generation.
    pub(in crate::driver) info: ControllerInfo,
    /// The version of the namespaces in `info`; even, so that a change since then is noticed.
    pub(in crate::driver) namespace_version: u64,
    pub(in crate::driver) sq: DmaBuffer<S>,
    pub(in crate::driver) cq: DmaBuffer<S>,
}

impl<R: Registers, S: ChunkSource + Clone> Inner<R, S> {
    /// Creates a queue pair, the completion queue first.
    pub(in crate::driver) fn create_queue_pair(
        &self,
        sizes: RingSizes,
        vector: Option<u16>,
    ) -> Result<CreatedQueuePair<S>, Error> {
        let allocate =
            |entries, size, what| slots::allocate(&self.source, entries as usize * size, what);
        let sq = allocate(sizes.submission, Command::BYTES, "a submission queue")?;
        let cq = allocate(sizes.completion, Cqe::BYTES, "a completion queue")?;
        let mut control = self.control();
        let generation = self.shared.generation();
        let id = control.reserve_id()?;
        let create = |opcode, ring: &DmaBuffer<S>, entries: u32, cdw11| Command {
            opcode,
            prp1: U64::new(ring.iova().raw()),
            // The size is 0-based.
            cdw10: U32::new(u32::from(id) | (entries - 1) << 16),
            cdw11: U32::new(create_cq::CONTIGUOUS | cdw11),
            ..Command::default()
        };
        let interrupts = vector.map_or(0, |vector| create_cq::INTERRUPTS | u32::from(vector) << 16);
        let create_cq = create(admin::CREATE_CQ, &cq, sizes.completion, interrupts);
        let create_sq = create(admin::CREATE_SQ, &sq, sizes.submission, u32::from(id) << 16);
        let mut has_cq = false;
        let created =
            self.execute(&mut control, "create completion queue", create_cq).and_then(|_| {
                has_cq = true;
                self.execute(&mut control, "create submission queue", create_sq)
            });
        let Err(error) = created else {
            let info = control.info.clone();
            let namespace_version = self.shared.namespace_version() & !1;
            return Ok(CreatedQueuePair { id, generation, info, namespace_version, sq, cq });
        };
        // An error status means that the queue was not created, and `NeedsReset` that the command
        // was not sent. After any other error it may exist.
        let not_created = matches!(error, Error::Admin { .. } | Error::NeedsReset);
        let gone =
            not_created && (!has_cq || self.delete(&mut control, admin::DELETE_CQ, id).is_ok());
        self.release_queue_pair(&mut control, PendingRelease::new(vec![sq, cq]), id, gone);
        Err(error)
    }

    /// Deletes the queue pair `id` of `generation` and releases `memory` when the controller no
    /// longer accesses it.
    pub(in crate::driver) fn delete_queue_pair(
        &self,
        id: u16,
        serial: u64,
        generation: u64,
        memory: PendingRelease<S>,
    ) {
        let mut control = self.control();
        if let Some(admin) = &mut control.admin {
            admin.forget_aborts(serial);
        }
        let gone = self.shared.generation() != generation
            || self
                .delete(&mut control, admin::DELETE_SQ, id)
                .and_then(|()| self.delete(&mut control, admin::DELETE_CQ, id))
                .is_ok();
        self.release_queue_pair(&mut control, memory, id, gone);
    }

    /// Releases memory and identifier of a queue pair that is `gone`; otherwise when the controller
    /// is disabled.
    fn release_queue_pair(
        &self,
        control: &mut Control<S>,
        mut memory: PendingRelease<S>,
        id: u16,
        gone: bool,
    ) {
        if gone {
            control.release_id(id);
            self.release(memory);
        } else {
            memory.id = Some(id);
            control.pending.push(memory);
            self.shared.quarantined_queues.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn delete(&self, control: &mut Control<S>, opcode: u8, id: u16) -> Result<(), Error> {
        let what = if opcode == admin::DELETE_SQ {
            "delete submission queue"
        } else {
            "delete completion queue"
        };
        let command = Command { opcode, cdw10: U32::new(id.into()), ..Command::default() };
        self.execute(control, what, command).map(drop)
    }
}
