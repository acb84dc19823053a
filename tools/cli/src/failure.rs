//! Why the program failed, and its exit codes.

use crate::engine::worker::EngineError;
use crate::output::{self, OutputError};
use crate::packets::capture::CaptureError;
use crate::server::error::ServeError;
use crate::setup::error::{LimitError, OpenError};
use crate::setup::staged::StagedError;
use crate::targets::target::TargetError;
use crate::units::ByteSize;
use pinfold_replay::{ReplayError, TraceError};
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit codes; `--help` explains them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exit {
    /// The run failed.
    Failed,
    /// The command line requests something unknown or impossible.
    Usage,
    /// SIGINT, SIGTERM, SIGHUP or SIGXCPU.
    Interrupted,
    /// A command that the program has run failed with this code.
    Command(u8),
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Interrupted => 130,
            Exit::Command(code) => code,
        })
    }
}

/// The exit code of `check` where it failed itself: those below are the program's.
const CHECK_FAILED: u8 = 125;

/// Why the program failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A number on the command line exceeds a limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A target could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// An engine ended early.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The destination could not be created or committed.
    #[error(transparent)]
    Staged(#[from] StagedError),
    /// A target is too small.
    #[error("{target} has {capacity} bytes and {needed} are needed: name one of {} or more", ByteSize(*.needed))]
    TooSmall {
        /// The target.
        target: String,
        /// Its capacity.
        capacity: u64,
        /// The number of bytes needed.
        needed: u64,
    },
    /// The source has grown.
    #[error(
        "{name} grew from {before} to {after} bytes while it was read: copy it again when no program writes it"
    )]
    SourceGrew {
        /// The source.
        name: String,
        /// Its length at the start.
        before: u64,
        /// Its length at the end.
        after: u64,
    },
    /// Source and destination differ.
    #[error(
        "{destination} differs from {source_name} (SHA-256 {destination_hash} and {source_hash}) and was removed: the \
         source was written meanwhile, or a device failed; try again, then check the devices"
    )]
    Differs {
        /// The source.
        source_name: String,
        /// The destination.
        destination: String,
        /// The hash of the source.
        source_hash: String,
        /// The hash of the destination.
        destination_hash: String,
    },
    /// The server could not start, or an event loop failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A program could not be checked.
    #[error("{}{}", .0, limit_of(.0))]
    Check(#[from] pinfold_check::CheckError),
    /// A file of `check` cannot be used.
    #[error("cannot {attempt} {name}: {error}{}", output::advice_or(error, ""))]
    CheckFile {
        /// The attempted operation.
        attempt: &'static str,
        /// The file.
        name: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// A file of suppressions has an unknown identifier.
    #[error("{file}: {id:?} is not the identifier of a finding (docs/check.md lists them)")]
    CheckSuppressed {
        /// The file.
        file: String,
        /// The identifier.
        id: String,
    },
    /// A property of the devices has two values.
    #[error("--knob {first} and --knob {second}: give each knob once")]
    CheckKnobs {
        /// The first value.
        first: pinfold_check::Knob,
        /// The second one.
        second: pinfold_check::Knob,
    },
    /// There are more devices than bus numbers.
    #[error(
        "device {number} has no address: buses are numbered from 1 to 255; give the others their own, as in \
         0001:01:00.0=soft:1G"
    )]
    CheckDevices {
        /// The number of the first device without one.
        number: u32,
    },
    /// A device could not be bound or unbound.
    #[error(transparent)]
    Bind(#[from] pinfold::pci::BindError),
    /// A trace could not be read.
    #[error("{name}: {error}{}", missing(error))]
    Trace {
        /// The file.
        name: String,
        /// The error.
        error: TraceError,
    },
    /// A trace could not be replayed.
    #[error("{}", replay_error(error))]
    Replay {
        /// The error.
        error: ReplayError,
    },
    /// A picture could not be written.
    #[error("{} could not be written: {error}{}", path.display(), output::advice_or(error, "; name a writable folder with --svg"))]
    Svg {
        /// The picture, or its folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A queue could not be opened.
    #[error(transparent)]
    Receive(#[from] pinfold_xdp::OpenError),
    /// A queue failed.
    #[error(transparent)]
    Socket(#[from] pinfold_xdp::SocketError),
    /// Packets could not be written.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The machine may become unreachable.
    #[error(
        "{interface} carries the default route{}: the kernel would get none of its packets, and this machine may become \
         unreachable; name another interface, or --force",
        if over == interface { String::new() } else { format!(" of {over}") }
    )]
    DefaultRoute {
        /// The interface.
        interface: String,
        /// The interface of the route: it, or one that depends on it.
        over: String,
    },
    /// The machine may become unreachable, as far as is known.
    #[error(
        "whether {interface} carries the default route is not known ({error}): without its packets this machine may become \
         unreachable; --force receives them in any case"
    )]
    RoutesUnknown {
        /// The interface.
        interface: String,
        /// Why it is not known.
        error: pinfold_xdp::system::RouteError,
    },
    /// A thread could not be started.
    #[error("a thread could not be started: {0}")]
    Thread(String),
    /// The signal handlers could not be installed.
    #[error("handlers for signals could not be installed: {0}")]
    Signals(std::io::Error),
    /// The report could not be printed.
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Returns the next step where a trace does not exist.
fn missing(error: &TraceError) -> &'static str {
    match error {
        TraceError::Read(error) if error.kind() == std::io::ErrorKind::NotFound => {
            ": check the path"
        }
        _ => "",
    }
}

/// Formats why a replay failed, with the option to raise where the policy's error names a field.
fn replay_error(error: &ReplayError) -> String {
    match error.table_full() {
        Some((policy, device, operation)) => {
            format!(
                "{policy}, {device}, operation {operation}: the I/O page table is full; raise --table-bytes"
            )
        }
        None => error.to_string(),
    }
}

impl From<TargetError> for Failure {
    fn from(error: TargetError) -> Self {
        Self::Engine(error.into())
    }
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        Self::Replay { error }
    }
}

/// Returns what to do where a limit is what refused a check.
fn limit_of(error: &pinfold_check::CheckError) -> &'static str {
    output::limit(error.system())
}

impl Failure {
    /// Formats what happened and what to do, on one line: names may contain line ends and terminal
    /// escapes.
    pub(crate) fn line(&self) -> String {
        let mut line = String::new();
        for c in self.to_string().chars() {
            if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
        }
        line
    }

    /// Returns the exit code.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Limit(_)
            | Self::Open(
                OpenError::Memory(_) | OpenError::Unsupported { .. } | OpenError::Spec(_),
            ) => Exit::Usage,
            Self::Serve(error) if error.is_usage() => Exit::Usage,
            Self::Serve(ServeError::Command { code, .. }) => Exit::Command(*code),
            Self::Check(pinfold_check::CheckError::Device(pinfold_check::DeviceError::Twice {
                ..
            })) => Exit::Usage,
            Self::Check(_) | Self::CheckFile { .. } | Self::CheckSuppressed { .. } => {
                Exit::Command(CHECK_FAILED)
            }
            Self::CheckDevices { .. } | Self::CheckKnobs { .. } => Exit::Usage,
            Self::Engine(EngineError::Interrupted) => Exit::Interrupted,
            _ => Exit::Failed,
        }
    }
}
