//! What a real controller does when it is given memory that was taken back: `iommu_fault BDF NSID`. It writes over the
//! first 64 KiB of the namespace. The controller must be bound to `vfio-pci`.
//!
//! - Data: a buffer is mapped, its addresses are noted, its mapping is revoked, and a command is sent with these
//!   addresses. Not a byte of the buffer may change, and not a byte of what is in it may reach the namespace. What the
//!   controller says is printed. (A real one says that the transfer failed; QEMU's, 7.2 at least, takes no notice
//!   of data that it could not move, and says that all went well.)
//! - A PRP list: its memory is unmapped while the command is in flight. The command must end with an error status, and the
//!   namespace hold what it held.

use pinfold::vfio::Options;
use pinfold::{Arena, Buffer, MappingPolicy};
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::Segment;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::DomainId;
use pinfold_core::frame::{Frame, Order};
use pinfold_core::page_pool::RevocableSource;
use pinfold_nvme::driver::{CommandError, Config, Controller, InFlight, Outcome, Payload, Queue};
use pinfold_nvme::vfio::{PciController, PciRegisters};
use std::error::Error;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type IoQueue = Queue<Arc<PciRegisters>, Rings>;
type BoxResult<T> = Result<T, Box<dyn Error>>;

/// An arena that knows which chunks were taken of it.
#[derive(Clone)]
struct Rings {
    arena: Arena,
    taken: Arc<Mutex<Vec<(Frame, Order)>>>,
}

// SAFETY: what is promised is the arena's promise: each call is handed on as it is.
unsafe impl ChunkSource for Rings {
    fn span(&self) -> NonNull<[u8]> {
        self.arena.span()
    }
    fn iova(&self) -> pinfold_core::addr::Iova {
        ChunkSource::iova(&self.arena)
    }
    fn domain(&self) -> Option<DomainId> {
        ChunkSource::domain(&self.arena)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let frame = self.arena.acquire(order)?;
        self.taken().push((frame, order));
        Ok(frame)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller makes the same promise.
        unsafe { self.arena.release(frame, order) };
    }
}

impl Rings {
    fn taken(&self) -> MutexGuard<'_, Vec<(Frame, Order)>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Addresses that must not be used any more.
struct Stale(Segment, DomainId);

// SAFETY: it is not so, on purpose: the addresses were mapped once. The IOMMU turns each access to them into a fault, which
// is what this program shows, and nothing else is mapped there meanwhile.
unsafe impl Payload<Bidirectional> for Stale {
    fn domain(&self) -> Option<DomainId> {
        Some(self.1)
    }
    fn segment(&self, index: usize) -> Option<Segment> {
        (index == 0).then_some(self.0)
    }
}

struct Bench {
    pci: PciController,
    rings: Rings,
    data: Arena,
    queue: IoQueue,
    nsid: u32,
    block: usize,
    /// The most bytes in one command.
    most: usize,
}

/// What the controller said.
fn finish<P>(queue: &mut IoQueue, in_flight: InFlight<P>) -> BoxResult<(P, Result<(), CommandError>)> {
    let completion = queue.wait()?.ok_or("nothing in flight")?;
    match in_flight.finish(completion) {
        Outcome::Completed { payload, result } => Ok((payload, result)),
        _ => Err("no answer in time".into()),
    }
}

impl Bench {
    fn open(address: &str, nsid: u32) -> BoxResult<Self> {
        let pci = PciController::open(address, &Options::new(), 0)?;
        let rings =
            Arena::builder().size(4 << 20).mapping_policy(MappingPolicy::PerUse).build(pci.domain())?;
        let rings = Rings { arena: rings, taken: Arc::default() };
        let data =
            Arena::builder().size(4 << 20).mapping_policy(MappingPolicy::PerUse).build(pci.domain())?;
        let controller = Controller::start(
            pci.registers(),
            rings.clone(),
            Config { use_sgls: false, ..Config::default() },
        )?;
        let namespace = controller.namespaces().into_iter().find(|namespace| namespace.nsid == nsid);
        let block = namespace.ok_or("no such namespace")?.block_bytes as usize;
        let queue = controller.create_queue(8)?;
        // What is taken from here on is list pages.
        rings.taken().clear();
        let most = controller.identify().max_transfer_bytes as usize;
        Ok(Self { pci, rings, data, queue, nsid, block, most })
    }

    fn blocks(&self, bytes: usize) -> u32 {
        u32::try_from(bytes / self.block).unwrap_or(0)
    }

    fn filled(&self, bytes: usize, byte: u8) -> BoxResult<Buffer> {
        let buffer = self.data.alloc(bytes)?;
        buffer.memory().fill(0, bytes, byte)?;
        Ok(buffer)
    }

    fn write(&mut self, bytes: usize, byte: u8) -> BoxResult<()> {
        Ok(self.try_write(bytes, byte)??)
    }

    fn try_write(&mut self, bytes: usize, byte: u8) -> BoxResult<Result<(), CommandError>> {
        let buffer = self.filled(bytes, byte)?;
        let domain = self.pci.domain().clone();
        let mapped = domain.map(buffer, ToDevice)?;
        let flight = self.queue.write(self.nsid, 0, self.blocks(bytes), mapped)?;
        let (mapped, result) = finish(&mut self.queue, flight)?;
        drop(mapped.unmap()?);
        Ok(result)
    }

    /// Whether the first `bytes` bytes of the namespace are all `byte`, or what else the first of them is.
    fn holds(&mut self, bytes: usize, byte: u8) -> BoxResult<Option<u8>> {
        let buffer = self.filled(bytes, 0xee)?;
        let domain = self.pci.domain().clone();
        let mapped = domain.map(buffer, FromDevice)?;
        let flight = self.queue.read(self.nsid, 0, self.blocks(bytes), mapped)?;
        let (mapped, result) = finish(&mut self.queue, flight)?;
        result?;
        let buffer = mapped.unmap()?;
        let mut found = vec![0; bytes];
        buffer.memory().copy_to_slice(0, &mut found)?;
        Ok(found.into_iter().find(|other| *other != byte))
    }

    /// A buffer full of `byte` and the addresses at which the controller found it before it was taken back.
    fn taken_back(&self, bytes: usize, byte: u8) -> BoxResult<(Buffer, Stale)> {
        let mapped = self.pci.domain().map(self.filled(bytes, byte)?, Bidirectional)?;
        let stale = Stale(mapped.segment(), self.pci.domain().id());
        Ok((mapped.unmap()?, stale))
    }

    /// A read into memory that was taken back: not a byte of it may change.
    fn read_into_stale(&mut self, bytes: usize) -> BoxResult<()> {
        let (buffer, stale) = self.taken_back(bytes, 0x5a)?;
        let flight = self.queue.read(self.nsid, 0, self.blocks(bytes), stale)?;
        let (_, result) = finish(&mut self.queue, flight)?;
        let mut found = vec![0; bytes];
        buffer.memory().copy_to_slice(0, &mut found)?;
        if found.iter().any(|byte| *byte != 0x5a) {
            return Err("the controller wrote to memory that was taken back".into());
        }
        println!(
            "read of {bytes} bytes into memory that was taken back: {}; not a byte changed",
            said(&result)
        );
        Ok(())
    }

    /// A write from memory that was taken back: what it holds must not reach the namespace.
    fn write_from_stale(&mut self, bytes: usize) -> BoxResult<()> {
        self.write(bytes, 0x11)?;
        let (buffer, stale) = self.taken_back(bytes, 0x22)?;
        let flight = self.queue.write(self.nsid, 0, self.blocks(bytes), stale)?;
        let (_, result) = finish(&mut self.queue, flight)?;
        drop(buffer);
        let kept = match self.holds(bytes, 0x11)? {
            None => "it holds what it held".to_owned(),
            Some(0x22) => return Err("what was taken back reached the namespace".into()),
            Some(other) if result.is_err() => {
                return Err(format!("the write failed, and the namespace holds {other:#04x}").into());
            }
            Some(other) => {
                format!("the namespace holds {other:#04x} now, and nothing of what was taken back")
            }
        };
        println!("write of {bytes} bytes from memory that was taken back: {}; {kept}", said(&result));
        Ok(())
    }

    /// A write whose PRP list was taken back: an error status, and nothing written.
    fn write_by_stale_list(&mut self) -> BoxResult<()> {
        // One command, so that there is one list.
        let bytes = self.most.min(64 << 10);
        self.write(bytes, 0x11)?;
        let lists = std::mem::take(&mut *self.rings.taken());
        if lists.is_empty() {
            return Err("a write of several pages took no list page".into());
        }
        for (first, order) in lists {
            // SAFETY: the chunk is allocated and not used by this program any more; it is released as one that cannot be
            // taken from the device a second time, and so never used again.
            unsafe { self.rings.arena.hide(first, order) }?;
        }
        let result = self.try_write(bytes, 0x22)?;
        let Err(CommandError::Status(status)) = result else {
            return Err(format!("a write whose PRP list was taken back: {}", said(&result)).into());
        };
        println!("write of {bytes} bytes by a PRP list that was taken back: the controller says {status}");
        if let Some(other) = self.holds(4096, 0x11)? {
            return Err(format!("the namespace holds {other:#04x}").into());
        }
        Ok(())
    }
}

fn said(result: &Result<(), CommandError>) -> String {
    match result {
        Ok(()) => "the controller says success".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn main() -> BoxResult<()> {
    let mut args = std::env::args().skip(1);
    let (address, nsid) = args.next().zip(args.next()).ok_or("usage: iommu_fault BDF NSID")?;
    let mut bench = Bench::open(&address, nsid.parse()?)?;
    for bytes in [4096, 64 << 10] {
        bench.write(bytes, 0x11)?;
        bench.read_into_stale(bytes)?;
        bench.write_from_stale(bytes)?;
    }
    bench.write(64 << 10, 0x33)?;
    if bench.holds(64 << 10, 0x33)?.is_some() {
        return Err("the controller does not work afterwards".into());
    }
    println!("afterwards it reads and writes as before");
    bench.write_by_stale_list()?;
    bench.write(4096, 0x44)?;
    if bench.holds(4096, 0x44)?.is_some() {
        return Err("the controller does not work after its list was taken back".into());
    }
    println!("afterwards it reads and writes as before");
    Ok(())
}
