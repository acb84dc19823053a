//! Creating and deleting queue pairs (Base 5.3 to 5.6).
//!
//! Both hold the control lock throughout, as a reset does: a queue pair belongs to exactly one
//! generation of the controller, and its rings are released only when the controller no longer has
//! it.

use super::state::{Control, ControllerInfo, Inner, PendingRelease};
use crate::driver::dma_buffer::{self, DmaBuffer};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Command, Cqe, PAGE_BYTES, admin, create_cq};
use pinfold_core::dma_pool::ChunkSource;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::{U32, U64};

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
    /// What the controller reported in that generation.
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
            |entries, size, what| dma_buffer::allocate(&self.source, entries as usize * size, what);
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
        serial: u32,
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
