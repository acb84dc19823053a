//! What a real controller does when it is given memory that was taken back: `iommu_fault BDF NSID`. It writes over the
//! first 64 blocks of the namespace. The controller must be bound to `vfio-pci`.
//!
//! A buffer is mapped, its addresses are noted, and its mapping is revoked. Then a command is sent with these addresses.
//! The IOMMU must keep the controller from the buffer, and the namespace must hold what it held or what was asked for:
//! never something else under a status that says success.
#![forbid(unsafe_code)]

use pinfold::vfio::Options;
use pinfold::{Arena, Buffer, Exposure};
use pinfold_core::access::{Both, FromDevice, ToDevice};
use pinfold_core::addr::Segment;
use pinfold_nvme::driver::{CommandError, Config, Controller, Finished, InFlight, Payload, Queue};
use pinfold_nvme::vfio::{PciController, PciRegisters};
use std::error::Error;
use std::sync::Arc;

type IoQueue = Queue<Arc<PciRegisters>, Arena>;
type Outcome<T> = Result<T, Box<dyn Error>>;

/// Addresses that nobody may use any more.
struct Stale(Segment);

impl Payload<Both> for Stale {
    fn segment(&self, index: usize) -> Option<Segment> {
        (index == 0).then_some(self.0)
    }
}

struct Bench {
    pci: PciController,
    data: Arena,
    queue: IoQueue,
    nsid: u32,
    block: usize,
}

/// What the controller said.
fn finish<P>(queue: &mut IoQueue, in_flight: InFlight<P>) -> Outcome<(P, Result<(), CommandError>)> {
    let completion = queue.wait()?.ok_or("nothing was under way")?;
    match in_flight.finish(completion) {
        Finished::Done { payload, result } => Ok((payload, result)),
        _ => Err("no answer in time".into()),
    }
}

impl Bench {
    fn open(address: &str, nsid: u32) -> Outcome<Self> {
        let pci = PciController::open(address, &Options::new(), 0)?;
        let rings = Arena::builder().size(4 << 20).exposure(Exposure::Whole).build(pci.domain())?;
        let data = Arena::builder().size(4 << 20).exposure(Exposure::PerUse).build(pci.domain())?;
        let controller = Controller::start(pci.registers(), rings, Config::default())?;
        let namespace = controller.namespaces().into_iter().find(|namespace| namespace.nsid == nsid);
        let block = namespace.ok_or("no such namespace")?.block_bytes as usize;
        let queue = controller.create_queue(8)?;
        Ok(Self { pci, data, queue, nsid, block })
    }

    fn blocks(&self, bytes: usize) -> u32 {
        u32::try_from(bytes / self.block).unwrap_or(0)
    }

    fn filled(&self, bytes: usize, byte: u8) -> Outcome<Buffer> {
        let buffer = self.data.alloc(bytes)?;
        buffer.memory().fill(0, bytes, byte)?;
        Ok(buffer)
    }

    fn write(&mut self, bytes: usize, byte: u8) -> Outcome<()> {
        let buffer = self.filled(bytes, byte)?;
        let domain = self.pci.domain().clone();
        let mapped = domain.map(buffer, ToDevice)?;
        let flight = self.queue.write(self.nsid, 0, self.blocks(bytes), mapped).map_err(|r| r.reason)?;
        let (mapped, result) = finish(&mut self.queue, flight)?;
        result?;
        drop(mapped.unmap()?);
        Ok(())
    }

    /// Whether the first `bytes` bytes of the namespace are all `byte`, or what else the first of them is.
    fn holds(&mut self, bytes: usize, byte: u8) -> Outcome<Option<u8>> {
        let buffer = self.filled(bytes, 0xee)?;
        let domain = self.pci.domain().clone();
        let mapped = domain.map(buffer, FromDevice)?;
        let flight = self.queue.read(self.nsid, 0, self.blocks(bytes), mapped).map_err(|r| r.reason)?;
        let (mapped, result) = finish(&mut self.queue, flight)?;
        result?;
        let buffer = mapped.unmap()?;
        let mut found = vec![0; bytes];
        buffer.memory().copy_to_slice(0, &mut found)?;
        Ok(found.into_iter().find(|other| *other != byte))
    }

    /// A buffer full of `byte` and the addresses at which the controller found it before it was taken back.
    fn taken_back(&self, bytes: usize, byte: u8) -> Outcome<(Buffer, Stale)> {
        let mapped = self.pci.domain().map(self.filled(bytes, byte)?, Both)?;
        let stale = Stale(mapped.segment());
        Ok((mapped.unmap()?, stale))
    }

    /// A read into memory that was taken back: not a byte of it may change.
    fn read_into_stale(&mut self, bytes: usize) -> Outcome<()> {
        let (buffer, stale) = self.taken_back(bytes, 0x5a)?;
        let flight = self.queue.read(self.nsid, 0, self.blocks(bytes), stale).map_err(|r| r.reason)?;
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
    fn write_from_stale(&mut self, bytes: usize) -> Outcome<bool> {
        self.write(bytes, 0x11)?;
        let (buffer, stale) = self.taken_back(bytes, 0x22)?;
        let flight = self.queue.write(self.nsid, 0, self.blocks(bytes), stale).map_err(|r| r.reason)?;
        let (_, result) = finish(&mut self.queue, flight)?;
        drop(buffer);
        let other = self.holds(bytes, 0x11)?;
        let kept = match other {
            None => "the namespace holds what it held".to_owned(),
            Some(0x22) => return Err("what was taken back reached the namespace".into()),
            Some(other) => format!("the namespace holds {other:#04x} now"),
        };
        println!("write of {bytes} bytes from memory that was taken back: {}; {kept}", said(&result));
        Ok(result.is_err() || other.is_none())
    }
}

fn said(result: &Result<(), CommandError>) -> String {
    match result {
        Ok(()) => "the controller says success".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let (address, nsid) = args.next().zip(args.next()).ok_or("usage: iommu_fault BDF NSID")?;
    let mut bench = Bench::open(&address, nsid.parse()?)?;
    let mut told = true;
    for bytes in [4096, 64 << 10] {
        bench.write(bytes, 0x11)?;
        bench.read_into_stale(bytes)?;
        told &= bench.write_from_stale(bytes)?;
    }
    bench.write(64 << 10, 0x33)?;
    if bench.holds(64 << 10, 0x33)?.is_some() {
        return Err("the controller does not work afterwards".into());
    }
    println!("afterwards it reads and writes as before");
    if !told {
        return Err("a write from memory that was taken back succeeded, and wrote something else".into());
    }
    Ok(())
}
