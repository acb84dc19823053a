//! What the program ends with.

use crate::copy::error::PumpError;
use crate::copy::staged::StagedError;
use crate::memory::MemoryError;
use crate::open::OpenError;
use crate::stack::StackError;
use crate::targets::TargetError;
use crate::units::ByteSize;
use std::path::PathBuf;
use std::process::ExitCode;

/// What the program ends with; `--help` explains them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exit {
    /// The run failed.
    Failed,
    /// The command line asks for something that is unknown or impossible.
    Usage,
    /// SIGINT, SIGTERM or SIGHUP.
    Interrupted,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Interrupted => 130,
        })
    }
}

/// A number on the command line beyond what there is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum LimitError {
    /// `--bs 0`, `--bs 3`.
    #[error(
        "--bs {asked}: a request must be a multiple of {block} bytes, the block of {target}, and at least one"
    )]
    Block {
        /// What was asked for.
        asked: u64,
        /// The target's block.
        block: usize,
        /// The target.
        target: String,
    },
    /// `--bs 1T`.
    #[error("--bs {asked}: one request to {target} moves at most {limit} bytes ({})", ByteSize(*.limit))]
    Transfer {
        /// What was asked for.
        asked: u64,
        /// The target's largest request.
        limit: u64,
        /// The target.
        target: String,
    },
    /// `--iodepth 0`.
    #[error("--iodepth 0: at least one request must be in flight")]
    NoDepth,
    /// `--iodepth 1000000000`.
    #[error("--iodepth {asked}: {target} takes at most {limit} requests at a time")]
    Depth {
        /// What was asked for.
        asked: u64,
        /// The target's limit.
        limit: u64,
        /// The target.
        target: String,
    },
    /// A region with no room for one request.
    #[error("--size {size}: {target} is used in requests of {block} bytes, so it must be at least that")]
    Region {
        /// What was asked for.
        size: u64,
        /// The size of a request.
        block: u64,
        /// The target.
        target: String,
    },
    /// `--numjobs 100 --size 4k`.
    #[error(
        "--numjobs {jobs}: {target} is used in {blocks} requests' worth of bytes, and each job needs one at least"
    )]
    Jobs {
        /// What was asked for.
        jobs: usize,
        /// How many requests there are.
        blocks: u64,
        /// The target.
        target: String,
    },
    /// A size where the target has one of its own.
    #[error("--size {size}: {target} has only {capacity} bytes")]
    Beyond {
        /// What was asked for.
        size: u64,
        /// What it has.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// `io NEW-FILE` without a size.
    #[error(
        "{0} does not exist: say with --size how large it shall be made for the run, or name a file that exists"
    )]
    SizeNeeded(String),
    /// A source that would be all zeroes.
    #[error("{0} as a source holds nothing but zeroes: name a file or an image")]
    EmptySource(String),
}

/// Why the program does not end with 0.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A number on the command line is beyond what there is.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The run needs more memory than there is.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A target could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The memory could not be had.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The bytes were not all moved.
    #[error(transparent)]
    Pump(#[from] PumpError),
    /// The destination could not be prepared or finished.
    #[error(transparent)]
    Staged(#[from] StagedError),
    /// A target's medium is too small.
    #[error("{target} has {capacity} bytes and {needed} are needed: name one of {} or more", crate::units::ByteSize(*.needed))]
    TooSmall {
        /// The target.
        target: String,
        /// What it has.
        capacity: u64,
        /// What is needed.
        needed: u64,
    },
    /// The source is longer than it was.
    #[error(
        "{name} grew from {before} to {after} bytes while it was read: copy it again when nobody writes it"
    )]
    SourceGrew {
        /// The source.
        name: String,
        /// Bytes at the start.
        before: u64,
        /// Bytes at the end.
        after: u64,
    },
    /// What was read back differs.
    #[error(
        "{destination} is not what {source_name} is (SHA-256 {wrote} and {read}), so it was not kept: \
         either the source was written meanwhile, or a device failed; try again, then check the devices"
    )]
    Differs {
        /// The source.
        source_name: String,
        /// The destination.
        destination: String,
        /// The hash of the source.
        read: String,
        /// The hash of the destination.
        wrote: String,
    },
    /// A device was not given to VFIO, or not given back.
    #[error(transparent)]
    Bind(#[from] pinfold::pci::BindError),
    /// A suite was not measured.
    #[error(transparent)]
    Bench(#[from] pinfold_bench::BenchError),
    /// The kernel's side of a comparison was not measured.
    #[error(transparent)]
    Kernel(#[from] crate::bench::kernel::KernelError),
    /// A picture could not be written.
    #[error("{} could not be written: {error}; name a folder that may be written with --plot", path.display())]
    Plot {
        /// The picture, or its folder.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The handlers for signals could not be set.
    #[error("handlers for signals could not be set: {0}")]
    Signals(std::io::Error),
    /// What was to be printed could not be.
    #[error("standard output could not be written: {0}")]
    Output(std::io::Error),
    /// What was to be printed could not be put into JSON.
    #[error("the account could not be put into JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl From<TargetError> for Failure {
    fn from(error: TargetError) -> Self {
        Self::Pump(error.into())
    }
}

impl Failure {
    /// What happened and what to do, on one line: a name may hold line ends, and what a terminal takes for commands.
    pub(crate) fn line(&self) -> String {
        let mut line = String::new();
        for c in self.to_string().chars() {
            if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
        }
        line
    }

    /// What the program ends with.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Limit(_) | Self::Memory(_) | Self::Open(OpenError::Memory(_)) => Exit::Usage,
            Self::Pump(PumpError::Interrupted) => Exit::Interrupted,
            _ => Exit::Failed,
        }
    }
}
