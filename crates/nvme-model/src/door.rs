//! A controller for programs outside this process: registers in shared memory, interrupts that the
//! program chooses, and an observer.
//!
//! ```
//! use pinfold::Domain;
//! use pinfold_nvme_model::{Door, MemoryMedia, ModelConfig, ModelController, ModelEvent, Namespace};
//! use std::sync::{Arc, mpsc};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let port = domain.port().ok_or("not a software IOMMU")?;
//! let namespace = Namespace::new(Arc::new(MemoryMedia::new(1 << 20)?), 512)?;
//! let (send, _events) = mpsc::channel();
//! let observe = move |event: &ModelEvent<'_>| drop(send.send(format!("{event:?}")));
//! let door = Door { observer: Some(Arc::new(observe)), ..Door::default() };
//! let model = ModelController::spawn_behind(port, ModelConfig::new(vec![namespace]), door)?;
//! # drop(model);
//! # Ok(())
//! # }
//! ```

use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Status};
use std::fmt;
use std::sync::Arc;

/// Registers in memory that a driver reads and writes without the controller's knowledge. The
/// controller polls them.
///
/// Offsets are those of BAR 0 and multiples of 4; values are the host's. An offset outside reads as
/// 0, and a write there has no effect.
pub trait RegisterWindow: Send + Sync + 'static {
    /// Returns the value of a register.
    fn load(&self, at: u32) -> u32;
    /// Stores the value of a register after all earlier writes.
    fn store(&self, at: u32, value: u32);
    /// Stores a value and returns the previous one, as one access.
    fn swap(&self, at: u32, value: u32) -> u32;
    /// Returns the size of the part that has registers and doorbells, in bytes.
    fn len(&self) -> u32;
    /// Returns whether there are no registers.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The value of a doorbell that has not been written since the controller last read it. No queue
/// has so many entries.
pub(crate) const UNWRITTEN: u32 = u32::MAX;

/// Receives the controller's interrupts.
pub trait InterruptSink: Send + Sync + 'static {
    /// Raises interrupt `vector`.
    fn raise(&self, vector: u16);
}

/// Receives what a controller does, on the controller's thread.
pub trait Observer: Send + Sync + 'static {
    /// Called for each event.
    fn observe(&self, event: &ModelEvent<'_>);
}

impl<F: Fn(&ModelEvent<'_>) + Send + Sync + 'static> Observer for F {
    fn observe(&self, event: &ModelEvent<'_>) {
        self(event);
    }
}

/// One of a queue pair's queues.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum QueueKind {
    /// A submission queue.
    Submission,
    /// A completion queue.
    Completion,
}

impl fmt::Display for QueueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Submission => "submission",
            Self::Completion => "completion",
        })
    }
}

/// An event of a controller.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ModelEvent<'a> {
    /// CC.EN was set. `valid`: the admin queues and CC have values that the controller supports.
    Enabled {
        /// ASQ.
        asq: Iova,
        /// ACQ.
        acq: Iova,
        /// The entries of the admin queues.
        entries: [u32; 2],
        /// Whether the controller becomes ready.
        valid: bool,
    },
    /// CC.EN was cleared, or the function was reset: all queues are gone.
    Disabled {
        /// The I/O commands that had been submitted and not fetched.
        unfetched: u32,
    },
    /// CC.SHN requested a shutdown, and it is complete.
    ShutDown,
    /// CSTS.CFS was set.
    Failed,
    /// The controller was removed.
    Removed,
    /// AQA, ASQ or ACQ changed while the controller was enabled (Base 3.1.3.8).
    AdminQueuesChanged,
    /// CC.EN changed before CSTS.RDY followed the last change (Base 3.1.3.5).
    EarlyChange,
    /// A doorbell was written with an invalid value (Base 5.2): `entries` is 0 if the queue does
    /// not exist.
    BadDoorbell {
        /// The offset of the register.
        at: u32,
        /// The queue and its kind, if the offset is that of a doorbell.
        queue: Option<(u16, QueueKind)>,
        /// The value.
        value: u32,
        /// The number of entries of the queue.
        entries: u32,
        /// The limit that the value passed: for the head of a completion queue, the first empty
        /// entry; for the tail of a submission queue, the head.
        passed: Option<u32>,
    },
    /// A queue was created.
    Created {
        /// Its kind.
        kind: QueueKind,
        /// Its identifier.
        id: u16,
        /// Its memory.
        base: Iova,
        /// Its number of entries.
        entries: u32,
    },
    /// A queue was deleted.
    Deleted {
        /// Its kind.
        kind: QueueKind,
        /// Its identifier.
        id: u16,
    },
    /// A command was fetched.
    Fetched {
        /// The submission queue.
        queue: u16,
        /// The address of its entry.
        at: Iova,
        /// The command.
        command: &'a Command,
    },
    /// A command is about to be executed. Until [`Executed`](Self::Executed) all accesses to
    /// memory are its own.
    Executing {
        /// The submission queue.
        queue: u16,
        /// The command.
        command: &'a Command,
    },
    /// The accesses of the command are over.
    Executed {
        /// The submission queue.
        queue: u16,
        /// The command.
        command: &'a Command,
        /// Its status, if it completes now.
        status: Option<Status>,
    },
    /// The completion of a command is about to be written: not while its queue is full.
    Completing {
        /// The submission queue.
        queue: u16,
        /// The command identifier.
        cid: u16,
        /// The status.
        status: Status,
    },
    /// A completion waits because its queue is full. The command is in flight until it is written
    /// ([`Completing`](Self::Completing)), or its submission queue is deleted.
    CompletionQueueFull {
        /// The submission queue of the command.
        queue: u16,
        /// The command identifier.
        cid: u16,
        /// The head of the completion queue, as its doorbell says.
        head: u32,
    },
}

/// The interface of a controller to a program, and its observer. The default is
/// [`ModelRegisters`](crate::ModelRegisters), the eventfds of
/// [`ModelController::interrupt`](crate::ModelController::interrupt), and no observer.
#[derive(Clone, Default)]
pub struct Door {
    /// Registers in shared memory, which replace [`ModelRegisters`](crate::ModelRegisters): those
    /// then only read.
    pub window: Option<Arc<dyn RegisterWindow>>,
    /// Receives the interrupts in place of the eventfds.
    pub interrupts: Option<Arc<dyn InterruptSink>>,
    /// Receives the events.
    pub observer: Option<Arc<dyn Observer>>,
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door")
            .field("window", &self.window.is_some())
            .field("interrupts", &self.interrupts.is_some())
            .field("observer", &self.observer.is_some())
            .finish()
    }
}
