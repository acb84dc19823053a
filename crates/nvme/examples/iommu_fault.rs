//! `cargo run -p pinfold-nvme --example iommu_fault BDF NSID`
//!
//! Shows that a real controller cannot access revoked memory: `iommu_fault BDF NSID`. Overwrites
//! the first 64 KiB of the namespace. The controller must be bound to `vfio-pci`.
//!
//! - Data: a buffer is mapped and unmapped again, and a command is sent with its former addresses.
//!   No byte of the buffer may change, and none may reach the namespace. The status of the command
//!   is printed: a real controller returns a transfer error, while QEMU's (at least 7.2) ignores
//!   the failed transfer and returns success.
//! - A PRP list: its memory is unmapped before the command that uses it is sent. The command must
//!   end with an error status, and the namespace must be unchanged.

use pinfold::core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold::core::addr::Segment;
use pinfold::core::dma_pool::{ChunkSource, SourceError};
use pinfold::core::domain::DomainId;
use pinfold::core::frame::{Frame, Order};
use pinfold::core::page_pool::RevocableSource;
use pinfold::vfio::Options;
use pinfold::{Arena, Buffer, MappingPolicy};
use pinfold_nvme::driver::{CommandError, Config, Controller, InFlight, Outcome, Payload, Queue};
use pinfold_nvme::vfio::{PciController, PciRegisters};
use std::error::Error;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

type IoQueue = Queue<Arc<PciRegisters>, Rings>;
/// The result of all of it.
pub(crate) type BoxResult<T> = Result<T, Box<dyn Error>>;

/// An arena that records which chunks were acquired.
#[derive(Clone)]
struct Rings {
    arena: Arena,
    acquired: Arc<Mutex<Vec<(Frame, Order)>>>,
}

// SAFETY: what is promised is the arena's promise: each call is forwarded unchanged.
unsafe impl ChunkSource for Rings {
    fn span(&self) -> NonNull<[u8]> {
        self.arena.span()
    }
    fn iova(&self) -> pinfold::core::addr::Iova {
        ChunkSource::iova(&self.arena)
    }
    fn domain(&self) -> Option<DomainId> {
        ChunkSource::domain(&self.arena)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let frame = self.arena.acquire(order)?;
        self.acquired().push((frame, order));
        Ok(frame)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller makes the same promise.
        unsafe { self.arena.release(frame, order) };
    }
}

impl Rings {
    fn acquired(&self) -> MutexGuard<'_, Vec<(Frame, Order)>> {
        self.acquired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Addresses whose mapping has ended.
struct Stale(Segment, DomainId);

// SAFETY: violated on purpose: the addresses are mapped no longer. The IOMMU turns each access to
// them into a fault, which is what this program shows, and nothing else is mapped there meanwhile.
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
    /// The largest transfer of one command, bytes.
    max_transfer: usize,
}

/// Waits for the command; returns its payload and its result.
fn finish<P>(
    queue: &mut IoQueue,
    in_flight: InFlight<P>,
) -> BoxResult<(P, Result<(), CommandError>)> {
    let completion = queue.wait()?.ok_or("nothing in flight")?;
    match in_flight.finish(completion) {
        Outcome::Completed { payload, result } => Ok((payload, result)),
        _ => Err("the command timed out".into()),
    }
}

impl Bench {
    fn open(address: &str, nsid: u32) -> BoxResult<Self> {
        let pci = PciController::open(address, &Options::new(), 0)?;
        let rings = Arena::builder()
            .size(4 << 20)
            .mapping_policy(MappingPolicy::PerUse)
            .build(pci.domain())?;
        let rings = Rings { arena: rings, acquired: Arc::default() };
        let data = Arena::builder()
            .size(4 << 20)
            .mapping_policy(MappingPolicy::PerUse)
            .build(pci.domain())?;
        let controller = Controller::start(
            pci.registers(),
            rings.clone(),
            // A transfer error may be retried, which the driver does for so long.
            Config { use_sgls: false, retry_limit: Duration::ZERO, ..Config::default() },
        )?;
        let namespace =
            controller.namespaces().into_iter().find(|namespace| namespace.nsid == nsid);
        let block = namespace.ok_or("no such namespace")?.block_bytes as usize;
        let queue = controller.create_queue(8)?;
        // All chunks acquired from here on are list pages.
        rings.acquired().clear();
        let max_transfer = controller.identify().max_transfer_bytes as usize;
        Ok(Self { pci, rings, data, queue, nsid, block, max_transfer })
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

    /// Returns the first of the first `bytes` bytes of the namespace that is not `byte`, if there
    /// is one.
    fn other_than(&mut self, bytes: usize, byte: u8) -> BoxResult<Option<u8>> {
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

    /// Returns a buffer full of `byte`, and the addresses at which it was mapped before.
    fn revoked(&self, bytes: usize, byte: u8) -> BoxResult<(Buffer, Stale)> {
        let mapped = self.pci.domain().map(self.filled(bytes, byte)?, Bidirectional)?;
        let stale = Stale(mapped.segment(), self.pci.domain().id());
        Ok((mapped.unmap()?, stale))
    }

    /// Reads into revoked memory: no byte of it may change.
    fn read_into_stale(&mut self, bytes: usize) -> BoxResult<()> {
        let (buffer, stale) = self.revoked(bytes, 0x5a)?;
        let flight = self.queue.read(self.nsid, 0, self.blocks(bytes), stale)?;
        let (_, result) = finish(&mut self.queue, flight)?;
        let mut found = vec![0; bytes];
        buffer.memory().copy_to_slice(0, &mut found)?;
        if found.iter().any(|byte| *byte != 0x5a) {
            return Err("the controller wrote to revoked memory".into());
        }
        println!(
            "read of {bytes} bytes into revoked memory: {}; no byte changed",
            describe(&result)
        );
        Ok(())
    }

    /// Writes from revoked memory: its contents must not reach the namespace.
    fn write_from_stale(&mut self, bytes: usize) -> BoxResult<()> {
        self.write(bytes, 0x11)?;
        let (buffer, stale) = self.revoked(bytes, 0x22)?;
        let flight = self.queue.write(self.nsid, 0, self.blocks(bytes), stale)?;
        let (_, result) = finish(&mut self.queue, flight)?;
        drop(buffer);
        let kept = match self.other_than(bytes, 0x11)? {
            None => "the namespace is unchanged".to_owned(),
            Some(0x22) => return Err("revoked memory reached the namespace".into()),
            Some(other) if result.is_err() => {
                return Err(
                    format!("the write failed, and the namespace holds {other:#04x}").into()
                );
            }
            Some(other) => {
                format!("the namespace holds {other:#04x} now, and no byte of the revoked memory")
            }
        };
        println!("write of {bytes} bytes from revoked memory: {}; {kept}", describe(&result));
        Ok(())
    }

    /// Writes with a PRP list in revoked memory: an error status, and nothing written.
    fn write_by_stale_list(&mut self) -> BoxResult<()> {
        // One command, so that there is one list.
        let bytes = self.max_transfer.min(64 << 10);
        self.write(bytes, 0x11)?;
        let lists = std::mem::take(&mut *self.rings.acquired());
        if lists.is_empty() {
            return Err("a write of several pages used no list page".into());
        }
        for (first, order) in lists {
            // SAFETY: the chunk is allocated, and this program no longer uses it. Its release
            // fails, because it cannot be unmapped a second time, so it is never used again.
            unsafe { self.rings.arena.hide(first, order) }?;
        }
        let result = self.try_write(bytes, 0x22)?;
        let Err(CommandError::Status(status)) = result else {
            return Err(format!("a write with a revoked PRP list: {}", describe(&result)).into());
        };
        println!(
            "write of {bytes} bytes with a revoked PRP list: the controller returned {status}"
        );
        if let Some(other) = self.other_than(4096, 0x11)? {
            return Err(format!("the namespace holds {other:#04x}").into());
        }
        Ok(())
    }
}

fn describe(result: &Result<(), CommandError>) -> String {
    match result {
        Ok(()) => "the controller returned success".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Does what the first lines say. Also used by the tests of `pinfold check`.
pub(crate) fn run(words: &[String]) -> BoxResult<()> {
    let [address, nsid] = words else { return Err("usage: iommu_fault BDF NSID".into()) };
    let mut bench = Bench::open(address, nsid.parse()?)?;
    for bytes in [4096, 64 << 10] {
        bench.write(bytes, 0x11)?;
        bench.read_into_stale(bytes)?;
        bench.write_from_stale(bytes)?;
    }
    bench.write(64 << 10, 0x33)?;
    if bench.other_than(64 << 10, 0x33)?.is_some() {
        return Err("the controller does not work after the faults".into());
    }
    println!("the controller still reads and writes");
    bench.write_by_stale_list()?;
    bench.write(4096, 0x44)?;
    if bench.other_than(4096, 0x44)?.is_some() {
        return Err("the controller does not work after its PRP list was revoked".into());
    }
    println!("the controller still reads and writes");
    Ok(())
}
