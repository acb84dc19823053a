//! Errors of the driver.

use crate::spec::Status;
use pinfold_core::dma_pool::{AllocError, CreateError, SourceError};
use std::fmt;

/// Why a controller could not be started, reset or queried.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Its registers read as all ones.
    #[error(
        "the controller is gone: its registers read as all ones; check that the device is present"
    )]
    Gone,
    /// CSTS.CFS is set.
    #[error("the controller reports a fatal status (CSTS.CFS): reset it")]
    Fatal,
    /// CSTS.RDY did not follow CC.EN within CAP.TO or CRTO. Memory that it may access is
    /// quarantined.
    #[error(
        "the controller did not become {wanted} within {limit_ms} ms (CAP.TO, CRTO): reset the device"
    )]
    NotReady {
        /// "ready" or "disabled".
        wanted: &'static str,
        /// The time limit.
        limit_ms: u64,
    },
    /// CAP.CSS lacks the NVM command set.
    #[error("the controller does not support the NVM command set (CAP.CSS bit 37)")]
    NoNvmCommandSet,
    /// The smallest page is larger than 4096 bytes (CAP.MPSMIN).
    #[error(
        "the controller's smallest page has {min_bytes} bytes (CAP.MPSMIN): this driver uses 4096"
    )]
    PageSize {
        /// The smallest page.
        min_bytes: u64,
    },
    /// Queue entries of 64 and 16 bytes are not supported (SQES, CQES).
    #[error(
        "the controller does not support queue entries of 64 and 16 bytes (SQES {sqes:#04x}, CQES {cqes:#04x})"
    )]
    EntrySize {
        /// SQES.
        sqes: u8,
        /// CQES.
        cqes: u8,
    },
    /// Memory for a queue or a buffer could not be allocated.
    #[error("cannot allocate {what}: {error}")]
    Source {
        /// The purpose of the memory.
        what: &'static str,
        /// The cause.
        error: SourceError,
    },
    /// The device is not in the domain of the memory for its rings.
    #[error(
        "the memory for rings is in another domain than the controller: use an arena of the controller's domain"
    )]
    OtherDomain,
    /// Memory of the source is misaligned or outside of it.
    #[error("the memory for {what} is not inside its source, or not addressable by the device")]
    BadSource {
        /// The purpose of the memory.
        what: &'static str,
    },
    /// The pool of list pages could not be created.
    #[error("cannot create the pool of list pages: {0}")]
    Lists(#[from] CreateError),
    /// An admin command failed.
    #[error("{what}: the controller returned {status}")]
    Admin {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// A command of the program's own changes state that the driver relies on.
    #[error("a command that changes {what} is not sent: that is the driver's own")]
    OwnedByDriver {
        /// The state that it changes.
        what: &'static str,
    },
    /// A command of the program's own is not known, so that it cannot be known to be harmless.
    #[error(
        "admin command {opcode:#04x} is not sent: it is none that the driver knows, and no vendor's"
    )]
    NotSent {
        /// Its opcode.
        opcode: u8,
    },
    /// The data of an admin command are longer than the page that the controller gets for them.
    #[error("{bytes} bytes of data: an admin command has at most 4096 at a time, from an offset")]
    DataLength {
        /// Their length.
        bytes: u64,
    },
    /// An admin command did not complete.
    #[error("{what}: no completion within {limit_ms} ms: reset the controller")]
    AdminTimeout {
        /// The command.
        what: &'static str,
        /// The time limit.
        limit_ms: u64,
    },
    /// An earlier command timed out, or a reset failed.
    #[error("the controller is not usable since a command or a reset failed: reset it")]
    NeedsReset,
    /// The queue depth is out of range.
    #[error(
        "a queue depth of {depth}: this controller supports 1 to {limit} (CAP.MQES, at most 1023)"
    )]
    Depth {
        /// The requested depth.
        depth: usize,
        /// The largest depth.
        limit: usize,
    },
    /// There is no memory for the state of a queue.
    #[error("cannot allocate the state of a queue of {depth} requests: use a smaller depth")]
    NoMemory {
        /// The requested depth.
        depth: usize,
    },
    /// All queue pairs are in use.
    #[error("all {limit} I/O queue pairs that the controller granted are in use: drop one")]
    NoQueueLeft {
        /// The number of queue pairs.
        limit: u16,
    },
}

/// Why a request was not accepted. Nothing has changed, and the payload is returned with it.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reject {
    /// The payload is mapped in another domain than the controller's rings.
    #[error(
        "the payload is mapped in another domain than the controller: map it in the domain of its rings"
    )]
    OtherDomain,
    /// The queue is full.
    #[error("{depth} requests are in flight, the depth of the queue: poll for completions first")]
    QueueFull {
        /// The queue depth.
        depth: usize,
    },
    /// The namespace does not exist or is not supported.
    #[error("no namespace {nsid} that this driver supports: Controller::namespaces() lists those")]
    NoSuchNamespace {
        /// The namespace.
        nsid: u32,
    },
    /// The namespace has another block size now, or is gone.
    #[error(
        "namespace {nsid} was detached or formatted since the queue was created: identify it again, create a new queue"
    )]
    NamespaceChanged {
        /// The namespace.
        nsid: u32,
    },
    /// The range is empty or not inside the namespace.
    #[error(
        "{blocks} blocks at {slba}: namespace {nsid} has {size} blocks, and a request at least 1"
    )]
    OutOfRange {
        /// The namespace.
        nsid: u32,
        /// The first block.
        slba: u64,
        /// The number of blocks.
        blocks: u64,
        /// The size of the namespace.
        size: u64,
    },
    /// The payload is shorter than the blocks.
    #[error(
        "{needed} bytes of blocks, but a payload of {has} bytes: transfer fewer blocks, or set the extent of the payload"
    )]
    PayloadTooShort {
        /// The bytes of the blocks.
        needed: u64,
        /// The bytes of the payload.
        has: u64,
    },
    /// A command of the program's own has other blocks than its payload has bytes, or is too long.
    #[error(
        "a command for {needed} bytes, with a payload of {bytes}: both must be the same, and at most {limit}"
    )]
    CommandLength {
        /// The bytes of its blocks.
        needed: u64,
        /// The bytes of its payload.
        bytes: u64,
        /// The largest transfer.
        limit: u32,
    },
    /// The data of a command of the program's own do not go the way of its payload.
    #[error(
        "command {opcode:#04x}: its lowest two bits say which way its data go, or that it has none"
    )]
    Direction {
        /// Its opcode.
        opcode: u8,
    },
    /// A command of the program's own changes state that the driver relies on.
    #[error("a command that changes {what} is not sent: that is the driver's own")]
    OwnedByDriver {
        /// The state that it changes.
        what: &'static str,
    },
    /// A command of the program's own has data in both directions.
    #[error("command {opcode:#04x} is not sent: its data would go both ways")]
    NotSent {
        /// Its opcode.
        opcode: u8,
    },
    /// The controller has no dataset management (ONCS bit 2).
    #[error("the controller does not support discard (ONCS bit 2, dataset management)")]
    NoDiscard,
    /// The controller has no write zeroes (ONCS bit 3).
    #[error("the controller does not support write zeroes (ONCS bit 3): write a payload of zeroes")]
    NoWriteZeroes,
    /// The payload cannot be described to the controller, or no list page was free.
    #[error("the payload cannot be described to the controller: {0}")]
    Layout(#[from] LayoutError),
    /// CSTS.CFS was set, too many commands timed out, or the controller was reset: the queue
    /// accepts nothing more.
    #[error(
        "the queue accepts no more requests until the controller is reset and a new queue created"
    )]
    NeedsReset,
}

/// Why a payload could not be described to the controller.
pub type LayoutError = pinfold_core::gather::LayoutError<AllocError>;

/// A request that was not accepted, with its payload.
///
/// `?` converts it to its [`Reject`] or to a boxed error and drops the payload, which no device can
/// access.
pub struct Rejected<P> {
    /// The payload of the request.
    pub payload: P,
    /// Why it was not accepted.
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

// Not `Error` itself: then `?` would ask for a payload that lives for `'static`.
impl<P> From<Rejected<P>> for Reject {
    fn from(rejected: Rejected<P>) -> Self {
        rejected.reason
    }
}

impl<P> From<Rejected<P>> for Box<dyn std::error::Error> {
    fn from(rejected: Rejected<P>) -> Self {
        rejected.reason.into()
    }
}

impl<P> From<Rejected<P>> for Box<dyn std::error::Error + Send + Sync> {
    fn from(rejected: Rejected<P>) -> Self {
        rejected.reason.into()
    }
}

/// Why an accepted request failed. The controller no longer accesses the payload.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The controller returned an error status. [`Status::may_retry`] tells whether to try again.
    #[error("the controller returned {0}")]
    Status(Status),
    /// It did not complete in time and was aborted.
    #[error("the request did not complete in time and was aborted")]
    Aborted,
    /// The controller was reset meanwhile.
    #[error("the controller was reset before the request completed")]
    Reset,
    /// A later part of the request could not be described to the controller.
    #[error("a part of the request cannot be described to the controller: {0}")]
    Layout(LayoutError),
    /// A part of the request was still to be sent, or sent again, when its namespace was found to
    /// have another block size, or to be gone. Commands that were sent before may have been
    /// executed.
    #[error(
        "namespace {nsid} was detached or formatted before all of the request was carried out: identify it again, create a \
         new queue"
    )]
    NamespaceChanged {
        /// The namespace.
        nsid: u32,
    },
    /// The deadline passed before a command slot was free or an overlapping request of another queue
    /// had completed, or it was given up before.
    #[error("the request was never sent: earlier commands do not complete")]
    NotSent,
}

/// Why a queue cannot be polled. The requests stay in flight until the controller is reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PollError {
    /// CSTS.CFS is set.
    #[error("the controller reports a fatal status (CSTS.CFS): reset it")]
    Fatal,
    /// Its registers read as all ones.
    #[error("the controller is gone: its registers read as all ones")]
    Gone,
    /// CSTS.RDY was cleared by something other than this driver.
    #[error(
        "the controller has stopped (CSTS.RDY is 0): another program reset it, or it lost power; reset it"
    )]
    Stopped,
    /// The system requests the device
    /// ([`Registers::is_removal_requested`](crate::Registers::is_removal_requested)).
    #[error("the controller is being removed: the system requests the device")]
    RemovalRequested,
}
