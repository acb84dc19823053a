//! The state of the executing thread.

use crate::bus::{Bus, BusFault};
use crate::config::ModelConfig;
use crate::data_pointer::Resolver;
use crate::faults::Faults;
use crate::namespace::Namespace;
use crate::queues::{CommandId, CommandResult, Queues};
use crate::registers::RegisterFile;
use crate::stats::Counters;
use pinfold_core::addr::Iova;
use pinfold_nvme::EventFd;
use pinfold_nvme::spec::{Command, Csts, PAGE_BYTES};
use std::sync::Arc;
use std::time::Instant;

/// When a held command continues.
#[derive(Clone, Copy, Debug)]
pub(super) enum Due {
    /// On [`Faults::release`].
    Release,
    /// After this many I/O commands, or when the controller is idle.
    Index(u64),
}

#[derive(Debug)]
pub(super) struct HeldCommand {
    pub(super) queue: u16,
    pub(super) command: Command,
    pub(super) due: Due,
}

/// A write that [`Fault::RogueWrite`](crate::Fault::RogueWrite) has scheduled.
#[derive(Debug)]
pub(super) struct RogueWrite {
    pub(super) index: u64,
    pub(super) iova: Iova,
    pub(super) len: usize,
}

/// What an engine shares with its controller.
pub(crate) struct EngineParts<B> {
    pub(crate) registers: Arc<RegisterFile>,
    pub(crate) bus: B,
    pub(crate) faults: Faults,
    pub(crate) vectors: Vec<Arc<EventFd>>,
    pub(crate) counters: Arc<Counters>,
}

pub(crate) struct Engine<B> {
    pub(super) registers: Arc<RegisterFile>,
    pub(super) bus: B,
    pub(super) faults: Faults,
    pub(super) vectors: Vec<Arc<EventFd>>,
    pub(super) counters: Arc<Counters>,
    pub(super) config: ModelConfig,
    pub(super) queues: Queues,
    pub(super) enabled: bool,
    /// ACRE: the host waits as CRD says.
    pub(super) advanced_retry: bool,
    /// Until when I/O commands fail, if they do.
    pub(super) not_ready_until: Option<Instant>,
    /// I/O commands fetched since the start.
    pub(super) index: u64,
    pub(super) held: Vec<HeldCommand>,
    pub(super) rogue_writes: Vec<RogueWrite>,
    /// Command identifiers of outstanding event requests.
    pub(super) event_requests: Vec<u16>,
    /// A doorbell error that has not been reported.
    pub(super) doorbell_error: Option<u32>,
    /// Log pages whose events are masked: one was reported, and the page has not been read since.
    pub(super) masked: Vec<u8>,
    pub(super) resolver: Resolver,
}

impl<B: Bus> Engine<B> {
    pub(crate) fn new(parts: EngineParts<B>, config: ModelConfig) -> Self {
        let EngineParts { registers, bus, faults, vectors, counters } = parts;
        Self {
            registers,
            bus,
            faults,
            vectors,
            counters,
            queues: Queues::new(config.queues),
            resolver: Resolver::new(config.sgls),
            config,
            enabled: false,
            advanced_retry: false,
            not_ready_until: None,
            index: 0,
            held: Vec::new(),
            rogue_writes: Vec::new(),
            event_requests: Vec::new(),
            doorbell_error: None,
            masked: Vec::new(),
        }
    }

    pub(super) fn namespaces(&self) -> &[Namespace] {
        &self.config.namespaces
    }

    /// Completes a command and counts it.
    pub(super) fn complete(
        &mut self,
        command: CommandId,
        mut result: CommandResult,
    ) -> Result<(), BusFault> {
        if !self.advanced_retry {
            result.status = result.status.with_retry_delay(0);
        }
        Counters::add(&self.counters.commands, 1);
        Counters::add(&self.counters.errors, u64::from(!result.status.is_success()));
        self.queues.complete(&self.registers, &self.bus, command, result)
    }

    /// Returns where the last command had its data, at most one page of it.
    pub(super) fn first_run(&self) -> Option<(Iova, usize)> {
        self.resolver.first().map(|run| (run.iova, run.len.min(PAGE_BYTES)))
    }

    /// Sets CSTS.CFS.
    pub(super) fn fail(&mut self) {
        self.registers.set_csts(self.registers.csts() | Csts::FATAL);
    }
}
