//! What goes wrong, and what to do about it.

use crate::spec::Status;
use pinfold_core::dma_pool::{CreateError, SourceError};
use pinfold_core::gather::prp::{PoolTakeError, PrpError};
use std::fmt;

/// Why the controller could not be started, reset or asked.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Its registers read as all ones.
    #[error("the controller is gone: its registers read as all ones; check that the device is still there")]
    Gone,
    /// CSTS.CFS.
    #[error("the controller reports a fatal status (CSTS.CFS): reset it")]
    Fatal,
    /// CSTS.RDY did not follow CC.EN within CAP.TO or CRTO. Memory that it may reach is quarantined.
    #[error("the controller did not become {wanted} within {limit_ms} ms (CAP.TO, CRTO): reset the device")]
    NotReady {
        /// "ready" or "disabled".
        wanted: &'static str,
        /// How long that may take.
        limit_ms: u64,
    },
    /// It has no NVM command set (CAP.CSS).
    #[error("the controller has no NVM command set (CAP.CSS bit 37)")]
    NoNvmCommandSet,
    /// It takes no pages of 4096 bytes (CAP.MPSMIN).
    #[error("the controller's smallest page has {min_bytes} bytes (CAP.MPSMIN): this driver works with 4096")]
    PageSize {
        /// The smallest page.
        min_bytes: u64,
    },
    /// No memory for a queue or a buffer.
    #[error("no memory for {what}: {error}")]
    Source {
        /// For what.
        what: &'static str,
        /// Why not.
        error: SourceError,
    },
    /// The device behind the registers is not in the domain of the memory that it was to be given.
    #[error(
        "the memory for rings is in another domain than the controller: take it from an arena of its own domain"
    )]
    OtherDomain,
    /// Memory that the source gave is not where it should be.
    #[error("the memory for {what} is not inside its source, or not addressable by the device")]
    BadSource {
        /// For what.
        what: &'static str,
    },
    /// No PRP list pages.
    #[error("no pool of PRP list pages: {0}")]
    Lists(#[from] CreateError),
    /// An admin command failed.
    #[error("{what}: the controller says {status}")]
    Admin {
        /// What the command was.
        what: &'static str,
        /// What it said.
        status: Status,
    },
    /// An admin command did not complete.
    #[error("{what}: no answer from the controller within {limit_ms} ms: reset it")]
    AdminTimeout {
        /// What the command was.
        what: &'static str,
        /// How long was waited.
        limit_ms: u64,
    },
    /// An admin command timed out before, or a reset failed.
    #[error("the controller is not usable since a command or a reset failed: reset it")]
    NeedsReset,
    /// A queue depth that can not be had.
    #[error("a queue depth of {depth}: this controller allows 1 to {limit} (CAP.MQES and the driver's 1024)")]
    Depth {
        /// What was asked for.
        depth: usize,
        /// The most.
        limit: usize,
    },
    /// All queue pairs are taken.
    #[error("all {limit} I/O queue pairs that the controller granted are in use: drop one")]
    NoQueueLeft {
        /// How many there are.
        limit: u16,
    },
}

/// Why a request was not accepted. Nothing has changed, and the payload comes back with it.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reject {
    /// The payload is mapped in another domain than the controller's rings.
    #[error(
        "the payload is mapped in another domain than the controller's: map it in the one that `start` was given"
    )]
    OtherDomain,
    /// As many requests are under way as the queue is deep.
    #[error("{depth} requests are under way, as many as the queue is deep: poll for completions first")]
    QueueFull {
        /// How deep the queue is.
        depth: usize,
    },
    /// There is no such namespace.
    #[error("no namespace {nsid} that this driver can use")]
    NoSuchNamespace {
        /// Which one was named.
        nsid: u32,
    },
    /// The controller reported that the namespace changed, and its blocks have another size now or it is gone.
    #[error(
        "namespace {nsid} was detached or formatted since the queue was created: look at it again, create a new queue"
    )]
    NamespaceChanged {
        /// Which one.
        nsid: u32,
    },
    /// Outside the namespace, or no blocks at all.
    #[error("{blocks} blocks at {slba}: namespace {nsid} has {size}, and a request at least 1")]
    OutOfRange {
        /// The namespace.
        nsid: u32,
        /// The first block.
        slba: u64,
        /// How many.
        blocks: u64,
        /// How many there are.
        size: u64,
    },
    /// The payload is shorter than the blocks.
    #[error("{needed} bytes of blocks, but a payload of {has}")]
    PayloadTooShort {
        /// What the blocks come to.
        needed: u64,
        /// What the payload has.
        has: u64,
    },
    /// The controller has no dataset management (ONCS bit 2).
    #[error("the controller can not discard (ONCS bit 2: no dataset management)")]
    NoDiscard,
    /// The payload can not be described by PRPs, or there is no page to do so.
    #[error("the payload can not be given to the controller: {0}")]
    Layout(#[from] LayoutError),
    /// CSTS.CFS was seen, too many commands timed out, or the controller was reset: this queue takes nothing more.
    #[error("the queue takes no more requests until the controller is reset and a new queue created")]
    NeedsReset,
}

/// Why PRPs could not be laid out.
pub type LayoutError = PrpError<PoolTakeError>;

/// A request that was not accepted, and its payload.
pub struct Rejected<P> {
    /// What was to be moved.
    pub payload: P,
    /// Why it was not.
    pub reason: Reject,
}

impl<P> fmt::Debug for Rejected<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejected").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<P> fmt::Display for Rejected<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.reason, f)
    }
}

impl<P> std::error::Error for Rejected<P> {}

/// Why a request that was accepted did not succeed. The controller is done with the payload.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The controller said so. [`Status::may_retry`] tells whether it makes sense to try again.
    #[error("the controller says {0}")]
    Status(Status),
    /// It did not complete in time and was aborted.
    #[error("the request did not complete in time and was aborted")]
    Aborted,
    /// The controller was reset meanwhile.
    #[error("the controller was reset before the request was complete")]
    Reset,
    /// A later part of the request could not be laid out.
    #[error("a part of the request could not be given to the controller: {0}")]
    Layout(LayoutError),
    /// The deadline passed while the request waited for room behind commands that do not complete.
    #[error("the request was never sent: commands before it do not complete")]
    NotSent,
}

/// Why a queue can not be polled. The requests stay in flight until the controller is reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PollError {
    /// CSTS.CFS.
    #[error("the controller reports a fatal status (CSTS.CFS): reset it")]
    Fatal,
    /// Its registers read as all ones.
    #[error("the controller is gone: its registers read as all ones")]
    Gone,
    /// CSTS.RDY went away, and nobody here disabled it.
    #[error("the controller has stopped (CSTS.RDY is 0): somebody else reset it, or it lost power; reset it")]
    Stopped,
    /// The system asks for it back ([`Registers::is_removal_requested`](crate::Registers::is_removal_requested)).
    #[error("the controller is being taken away: the system asks for it back")]
    RemovalRequested,
}
