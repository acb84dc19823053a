//! Packets to a target: a disk reads each from the page that the network wrote it to.

use super::capture::sync_folder;
use super::counts::Counts;
use crate::args::{StackArgs, TargetSpec};
use crate::failure::Failure;
use crate::setup::error::OpenError;
use crate::setup::open::{OpenTarget, TargetOptions};
use crate::setup::resolve::{BLOCK, ResolvedTarget, refuse_to_replace};
use crate::setup::stack::{BufferNeed, Stack};
use crate::signal::Interrupt;
use crate::targets::target::{
    Completion, Io, IoDirection, Request, SubmitError, Target, TargetError,
};
use crate::units::ByteSize;
use pinfold::page_pool::Tag;
use pinfold::{ArenaMemory, Domain};
use pinfold_core::domain::Pinned;
use pinfold_core::mem::AccessError;
use pinfold_xdp::{Packet, PacketPage, Socket};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The slots of a target that all queues store to.
#[derive(Debug)]
pub(crate) struct Slots {
    next: AtomicU64,
    /// The number of slots of the target.
    limit: u64,
    /// When the run began, since 1970: it tells its slots from those of an earlier one.
    run: Duration,
}

impl Slots {
    /// Creates the slots of a target of `capacity` bytes; `None` if it grows.
    pub(crate) fn new(capacity: Option<u64>) -> Self {
        let limit = capacity.map_or(u64::MAX / SLOT, |bytes| bytes / SLOT);
        let run = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { next: AtomicU64::new(0), limit, run }
    }

    /// Takes the next slot; `None` if the target is full.
    fn take(&self) -> Option<u64> {
        let next = |taken: u64| (taken < self.limit).then_some(taken + 1);
        // Relaxed: only the number matters.
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
    }

    /// Returns how many bytes the slots take that have been taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.next.load(Ordering::Relaxed) * SLOT
    }
}

/// A queue's way to the target.
pub(crate) struct Store<'t> {
    target: &'t mut (dyn Target<PacketPage> + Send),
    slots: &'t Slots,
    /// Holds the pages that are being written.
    holder: Tag,
    depth: usize,
    in_flight: usize,
    completed: Vec<Completion<PacketPage>>,
    interrupt: &'t Interrupt,
}

impl<'t> Store<'t> {
    /// Stores to `target` with up to `depth` requests in flight. Once `interrupt` is raised, a
    /// request that a controller refuses for the moment fails instead of being sent again.
    pub(crate) fn new(
        target: &'t mut (dyn Target<PacketPage> + Send),
        slots: &'t Slots,
        holder: Tag,
        depth: usize,
        interrupt: &'t Interrupt,
    ) -> Self {
        let completed = Vec::with_capacity(depth);
        Self { target, slots, holder, depth, in_flight: 0, completed, interrupt }
    }

    /// Returns how many packets can be stored now. Packets beyond them stay in the receive ring.
    pub(super) fn room(&self) -> usize {
        self.depth - self.in_flight
    }

    /// Returns whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Starts to write a packet, if the target has a slot for it.
    pub(super) fn write(
        &mut self,
        packet: Packet,
        received: Duration,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let page = packet
            .into_page()
            .and_then(|page| if has_room(&page) { Ok(page) } else { Err(Packet::from(page)) });
        let (page, number) = match page.map(|page| (page, self.slots.take())) {
            Ok((page, Some(number))) => (page, number),
            Ok((page, None)) => {
                counts.not_stored += 1;
                socket.recycle(page.into());
                return Ok(());
            }
            Err(packet) => {
                counts.not_stored += 1;
                socket.recycle(packet);
                return Ok(());
            }
        };
        page.hold_for(self.holder);
        let block = self.target.info().alignment;
        let len = complete_slot(&page, number, received, self.slots.run, block);
        let len = len.inspect_err(|_| counts.not_stored += 1)?;
        let io = Io::new(IoDirection::Write, number * SLOT, len);
        match self.target.submit(Request { io, buffer: page }) {
            Ok(()) => {
                self.in_flight += 1;
                Ok(())
            }
            Err(SubmitError { buffer, error }) => {
                counts.not_stored += 1;
                if let Some(page) = buffer {
                    socket.recycle(page.into());
                }
                Err(error)
            }
        }
    }

    /// Submits what was started, and returns the pages of what has been written to the socket's
    /// pool.
    pub(super) fn collect(
        &mut self,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let polled = self.target.poll(&mut self.completed);
        self.settle(socket, counts).and(polled)
    }

    /// Like [`collect`](Self::collect), after waiting for a completion.
    pub(super) fn wait(
        &mut self,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        if self.interrupt.is_raised() {
            self.target.abandon_retries();
        }
        let waited = self.target.wait(&mut self.completed);
        self.settle(socket, counts).and(waited)
    }

    /// Waits until everything is written and durable, also behind a write that failed. Returns the
    /// first error.
    pub(super) fn finish(
        &mut self,
        socket: &mut Socket,
        counts: &mut Counts,
    ) -> Result<(), TargetError> {
        let mut finished = Ok(());
        while self.in_flight > 0 {
            let before = self.in_flight;
            let waited = self.wait(socket, counts);
            let is_stuck = waited.is_err() && self.in_flight == before;
            finished = finished.and(waited);
            if is_stuck {
                break;
            }
        }
        finished.and(self.target.sync(self.interrupt))
    }

    fn settle(&mut self, socket: &mut Socket, counts: &mut Counts) -> Result<(), TargetError> {
        let mut settled = Ok(());
        for Completion { buffer, result, .. } in self.completed.drain(..) {
            self.in_flight -= 1;
            if let Some(page) = buffer {
                socket.recycle(page.into());
            }
            match result {
                Ok(_) => counts.stored += 1,
                Err(error) => {
                    counts.not_stored += 1;
                    settled = settled.and(Err(error));
                }
            }
        }
        settled
    }
}

impl std::fmt::Debug for Store<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("slots", &self.slots)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

// The target of `receive --to`: its memory, its file, and how it is opened.

/// The most requests in flight of a queue.
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
            TargetSpec::Pci { .. } => {
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
        let in_flight = BufferNeed {
            count: DEPTH.saturating_mul(queues),
            bytes: 4096,
            threads: queues,
            lower: "--memory SIZE",
        };
        let memory = memory.saturating_mul(queues as u64);
        let stack =
            Stack::with_memory(StackArgs::default(), domain, memory, in_flight, controllers)
                .map_err(OpenError::from)?;
        Ok(Self { spec, stack, queues })
    }

    /// Returns the memory, which the sockets receive into.
    pub(crate) fn memory(&self) -> &ArenaMemory {
        &self.stack.data
    }

    /// Creates the file, or finds the image. `replace` allows its content to be overwritten.
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
            TargetSpec::Pci { .. } => return Err(OpenError::NoNamespace(spec.to_string()).into()),
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
            one_thread: false,
        };
        OpenTarget::open(target, &self.stack, options)
    }
}

/// Makes a new file and the packets in its first `bytes` bytes durable: its slots, its length and
/// its name.
pub(crate) fn complete_file(spec: &TargetSpec, file: &File, bytes: u64) -> Result<(), OpenError> {
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
    if replace {
        refuse_to_replace(path, spec)?;
    }
    let mut options = OpenOptions::new();
    // Also for reading: a pipe is then opened without waiting for its other end, and refused.
    // Other users may not read the packets.
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

// The stored form of a packet: a slot of 4096 bytes, in which the packet lies where it was
// received.

/// The distance of two slots in bytes: a page.
pub(crate) const SLOT: u64 = 4096;
/// Bytes of the header.
const HEADER: usize = 40;
/// The first bytes of a slot. A slot without them holds no packet.
const MAGIC: [u8; 8] = *b"PINFOLD1";

/// Returns whether there is room for a header in front of the packet. The kernel reserves 256 bytes
/// there.
pub(crate) fn has_room(page: &PacketPage) -> bool {
    page.offset() >= HEADER
}

/// Completes the page as slot `number` of the run that began at `run`: the header, and zeroes for
/// everything up to the end of the packet's last block of `block` bytes that is not the packet.
/// Returns how many bytes are to be written.
///
/// # Errors
/// [`AccessError`] if there is no room for the header.
pub(crate) fn complete_slot(
    page: &PacketPage,
    number: u64,
    received: Duration,
    run: Duration,
    block: usize,
) -> Result<usize, AccessError> {
    let (memory, offset, len) = (page.memory(), page.offset(), page.len());
    let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    let nanoseconds =
        |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_le_bytes();
    let mut header = [0; HEADER];
    let fields = [MAGIC, number.to_le_bytes(), nanoseconds(received)].into_iter().flatten();
    let fields = fields.chain(word(offset)).chain(word(len)).chain(nanoseconds(run));
    header.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
    let end = offset.saturating_add(len);
    let bytes = end.next_multiple_of(block).min(memory.len());
    memory.copy_from_slice(0, &header)?;
    // The remains of an earlier packet in the page are not stored with this one.
    memory.fill(HEADER, offset.saturating_sub(HEADER), 0)?;
    memory.fill(end, bytes.saturating_sub(end), 0)?;
    Ok(bytes)
}
