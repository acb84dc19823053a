//! Which queue pairs the controller has (Base 5.3 to 5.6).
//!
//! Creation and deletion hold the control lock from end to end, as a reset does: a queue pair belongs to exactly one
//! generation of the controller, and its rings are released only when that generation is known to have forgotten them.

use super::core::{Control, Core, Facts, Grave};
use crate::driver::admin::Admin;
use crate::driver::error::Error;
use crate::driver::span::{self, Span};
use crate::registers::Registers;
use crate::spec::{Command, Cqe, PAGE_BYTES, admin, create_cq};
use pinfold_core::dma_pool::ChunkSource;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::{U32, U64};

/// A completion queue has room for so many times the commands under way: its doorbell is then rung that much less.
const COMPLETION_ROOM: usize = 4;

/// How many entries the rings of a queue pair have.
#[derive(Clone, Copy)]
pub(in crate::driver) struct Sizes {
    pub(in crate::driver) submission: u32,
    pub(in crate::driver) completion: u32,
}

impl Sizes {
    /// For `submission` entries at a controller whose queues have at most `limit`, which is at most 65,536.
    pub(in crate::driver) fn new(submission: usize, limit: usize) -> Self {
        let bytes = (submission * COMPLETION_ROOM * Cqe::BYTES).next_multiple_of(PAGE_BYTES);
        let entries = |entries| u32::try_from(entries).unwrap_or(u32::MAX);
        let completion = (bytes / Cqe::BYTES).min(limit).max(submission);
        Self { submission: entries(submission), completion: entries(completion) }
    }
}

/// A queue pair that the controller has.
pub(in crate::driver) struct Attached<S: ChunkSource> {
    pub(in crate::driver) id: u16,
    /// The controller's generation that has it.
    pub(in crate::driver) epoch: u64,
    /// What was known of the controller in that generation.
    pub(in crate::driver) facts: Facts,
    /// The number that goes with its namespaces; never odd, so that a change that is not attended to is noticed.
    pub(in crate::driver) namespaces: u64,
    pub(in crate::driver) sq: Span<S>,
    pub(in crate::driver) cq: Span<S>,
}

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    /// Creates a queue pair: the completion queue first.
    pub(in crate::driver) fn attach_queue(
        &self,
        sizes: Sizes,
        vector: Option<u16>,
    ) -> Result<Attached<S>, Error> {
        let sq = span::take(&self.source, sizes.submission as usize * Command::BYTES, "a submission queue")?;
        let cq = span::take(&self.source, sizes.completion as usize * Cqe::BYTES, "a completion queue")?;
        let mut control = self.control();
        let epoch = self.life.epoch();
        let id = control.take_id()?;
        let create = |opcode, at: &Span<S>, entries: u32, cdw11| Command {
            opcode,
            prp1: U64::new(at.iova().raw()),
            // The size counts from 0.
            cdw10: U32::new(u32::from(id) | (entries - 1) << 16),
            cdw11: U32::new(create_cq::CONTIGUOUS | cdw11),
            ..Command::default()
        };
        let interrupts = vector.map_or(0, |vector| create_cq::INTERRUPTS | u32::from(vector) << 16);
        let create_cq = create(admin::CREATE_CQ, &cq, sizes.completion, interrupts);
        let create_sq = create(admin::CREATE_SQ, &sq, sizes.submission, u32::from(id) << 16);
        let Err(error) = self
            .execute(&mut control, "create completion queue", create_cq)
            .map_err(|error| (error, false))
            .and_then(|_| {
                self.execute(&mut control, "create submission queue", create_sq)
                    .map_err(|error| (error, true))
            })
        else {
            let facts = control.facts.clone();
            let namespaces = self.life.namespaces() & !1;
            return Ok(Attached { id, epoch, facts, namespaces, sq, cq });
        };
        let (error, has_cq) = error;
        // An error status says that the queue was not created, and `NeedsReset` that the command was not sent; silence
        // says nothing.
        let refused = matches!(error, Error::Admin { .. } | Error::NeedsReset);
        let forgotten = refused && (!has_cq || self.delete(&mut control, admin::DELETE_CQ, id).is_ok());
        let grave = Grave::of(vec![sq, cq]);
        self.settle(&mut control, grave, id, forgotten);
        Err(error)
    }

    /// Deletes the queue pair `id` of generation `epoch`, and releases `grave` when the controller reaches it no more.
    pub(in crate::driver) fn detach_queue(&self, id: u16, serial: u32, epoch: u64, grave: Grave<S>) {
        let mut control = self.control();
        if let Some(admin) = &mut control.admin {
            admin.forget_aborts(serial);
        }
        let forgotten = self.life.epoch() != epoch
            || self
                .delete(&mut control, admin::DELETE_SQ, id)
                .and_then(|()| self.delete(&mut control, admin::DELETE_CQ, id))
                .is_ok();
        self.settle(&mut control, grave, id, forgotten);
    }

    /// Releases the memory and the identifier, or keeps both until the controller is disabled.
    fn settle(&self, control: &mut Control<S>, mut grave: Grave<S>, id: u16, forgotten: bool) {
        if forgotten {
            control.give_id(id);
            self.release(grave);
        } else {
            grave.id = Some(id);
            control.graves.push(grave);
            self.life.quarantined_queues.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn delete(&self, control: &mut Control<S>, opcode: u8, id: u16) -> Result<(), Error> {
        let what =
            if opcode == admin::DELETE_SQ { "delete submission queue" } else { "delete completion queue" };
        let command = Command { opcode, cdw10: U32::new(id.into()), ..Command::default() };
        self.execute(control, what, command).map(drop)
    }

    /// Sends an admin command and waits.
    pub(super) fn execute(
        &self,
        control: &mut Control<S>,
        what: &'static str,
        command: Command,
    ) -> Result<u32, Error> {
        let admin = control.admin.as_mut().ok_or(Error::NeedsReset)?;
        admin.execute(&self.registers, self.cap, &self.config, what, command)
    }
}

impl<S: ChunkSource + Clone> Control<S> {
    /// Whether the controller takes admin commands.
    pub(super) fn is_usable(&self) -> bool {
        self.admin.as_ref().is_some_and(Admin::is_usable)
    }

    /// A queue identifier that no [`Queue`](crate::driver::Queue) has.
    fn take_id(&mut self) -> Result<u16, Error> {
        let limit = self.facts.identity.queues;
        for id in 1..=limit {
            let index = usize::from(id) - 1;
            if self.ids.len() <= index {
                self.ids.resize(index + 1, false);
            }
            if let Some(taken) = self.ids.get_mut(index).filter(|taken| !**taken) {
                *taken = true;
                return Ok(id);
            }
        }
        Err(Error::NoQueueLeft { limit })
    }

    pub(super) fn give_id(&mut self, id: u16) {
        if let Some(taken) = self.ids.get_mut(usize::from(id).wrapping_sub(1)) {
            *taken = false;
        }
    }
}
