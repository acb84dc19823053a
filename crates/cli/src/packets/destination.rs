//! The target of `receive --to`: its memory, its file, and how it is opened.

use crate::args::{StackArgs, TargetSpec};
use crate::failure::Failure;
use crate::setup::error::OpenError;
use crate::setup::memory::BufferNeed;
use crate::setup::open::OpenTarget;
use crate::setup::options::TargetOptions;
use crate::setup::resolve::{BLOCK, ResolvedTarget};
use crate::setup::stack::Stack;
use crate::units::ByteSize;
use pinfold::{ArenaMemory, Domain};
use pinfold_xdp::PacketPage;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::capture::sync_folder;
use super::slot::SLOT;

/// How many requests of a queue are in flight at most.
pub(crate) const DEPTH: usize = 256;

/// The memory that packets are received into, in the address space of the target's controller.
#[derive(Debug)]
pub(crate) struct Destination<'a> {
    spec: &'a TargetSpec,
    stack: Stack,
    queues: usize,
}

impl<'a> Destination<'a> {
    /// Allocates the memory of all queues, `memory` bytes for each.
    pub(crate) fn prepare(
        spec: &'a TargetSpec,
        memory: u64,
        queues: usize,
    ) -> Result<Self, Failure> {
        let controllers = match spec {
            TargetSpec::File(_) => 0,
            TargetSpec::SoftMemory(..) | TargetSpec::SoftImage(..) => 1,
            TargetSpec::Vfio { .. } => {
                let reason = "a real controller's address space changes by system calls, which a page of each packet would need: \
                    name file:PATH (it may be an NVMe disk of the kernel), soft:SIZE or soft:IMAGE";
                let (option, value) = ("to", spec.to_string());
                return Err(
                    OpenError::Unsupported { option, value, reason: reason.to_owned() }.into()
                );
            }
        };
        if let TargetSpec::SoftMemory(ByteSize(capacity @ ..SLOT), _) = spec {
            return Err(too_small(spec, *capacity));
        }
        let domain = Domain::soft().map_err(OpenError::Domain)?;
        let in_flight =
            BufferNeed { count: DEPTH.saturating_mul(queues), bytes: 4096, lower: "--memory SIZE" };
        let memory = memory.saturating_mul(queues as u64);
        let stack =
            Stack::with_memory(StackArgs::default(), domain, memory, in_flight, controllers)?;
        Ok(Self { spec, stack, queues })
    }

    /// Returns the memory, which the sockets receive into.
    pub(crate) fn memory(&self) -> &ArenaMemory {
        &self.stack.data
    }

    /// Creates the file, or finds the image. `replace` allows what it holds to be overwritten.
    pub(crate) fn resolve(&self, replace: bool) -> Result<(ResolvedTarget, Option<File>), Failure> {
        let spec = self.spec;
        Ok(match spec {
            TargetSpec::File(path) => {
                let file = create(spec, path, replace)?;
                let same = file.try_clone().map_err(|error| system(spec, error))?;
                (ResolvedTarget::staged(spec, path, file, 0), Some(same))
            }
            TargetSpec::SoftMemory(size, _) => (ResolvedTarget::memory(spec, *size, size.0)?, None),
            TargetSpec::SoftImage(path, _) => {
                let (target, capacity) = ResolvedTarget::image(spec, path, true)?;
                if target.holds_data() && !replace {
                    return Err(OpenError::HoldsData(spec.to_string()).into());
                }
                if capacity < SLOT {
                    return Err(too_small(spec, capacity));
                }
                (target, None)
            }
            TargetSpec::Vfio { .. } => return Err(OpenError::NoNamespace(spec.to_string()).into()),
        })
    }

    /// Opens the target with a queue for each socket.
    pub(crate) fn open(
        &self,
        target: ResolvedTarget,
    ) -> Result<OpenTarget<'_, PacketPage>, OpenError> {
        let options = TargetOptions {
            alignment: usize::try_from(BLOCK).unwrap_or(4096),
            depth: DEPTH,
            jobs: self.queues,
            jobs_option: "queue",
            poll: false,
            direct: true,
            moves: true,
        };
        OpenTarget::open(target, &self.stack, options)
    }
}

/// Makes a new file and the packets in its first `bytes` bytes durable: its slots, its length and
/// its name.
pub(crate) fn complete(spec: &TargetSpec, file: &File, bytes: u64) -> Result<(), OpenError> {
    // The last slot is as long as all others.
    let synced = file.set_len(bytes).and_then(|()| file.sync_all());
    let named = synced.and_then(|()| match spec {
        TargetSpec::File(path) => sync_folder(path),
        _ => Ok(()),
    });
    named.map_err(|error| system(spec, error))
}

fn too_small(spec: &TargetSpec, capacity: u64) -> Failure {
    Failure::TooSmall { target: spec.to_string(), capacity, needed: SLOT }
}

fn system(spec: &TargetSpec, error: io::Error) -> OpenError {
    OpenError::System { name: spec.to_string(), error }
}

/// Creates a file, or empties an existing one.
fn create(spec: &TargetSpec, path: &Path, replace: bool) -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    // Also for reading: a pipe is then opened without waiting for its other end, and refused.
    // Packets of others are nobody else's to read.
    options.read(true).write(true).create(true).create_new(!replace).truncate(replace).mode(0o600);
    let file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => OpenError::HoldsData(spec.to_string()),
        _ => system(spec, error),
    })?;
    if file.metadata().map_err(|error| system(spec, error))?.is_file() {
        Ok(file)
    } else {
        Err(OpenError::NotRegular(spec.to_string()))
    }
}
