//! `cargo run -p pinfold-virtio --example virtio_blk_vfio BDF IN OUT`
//!
//! The virtio-blk driver of `virtio-drivers` on Pinfold's memory, with a PCI device behind an
//! IOMMU, through VFIO. (`vm/run` provides such a device without hardware;
//! `vm/guest/tests/virtio.sh` runs this there.)
//!
//! `virtio_blk_vfio BDF IN OUT`: reads the first bytes of the disk, as many as IN has, into OUT,
//! then writes IN to the disk and reads it back. It fails if the data differs or memory has leaked.

use pinfold::vfio::{Device, Options};
use pinfold::{Arena, Buffer};
use pinfold_virtio::{Installed, PinfoldHal, Process, install, pci};
use std::error::Error;
use std::fs;
use std::process::ExitCode;
use virtio_drivers::device::blk::{BlkReq, BlkResp, SECTOR_SIZE, VirtIOBlk};

type Driver = VirtIOBlk<PinfoldHal, pci::Transport>;
type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The number of bytes moved by a request.
const PIECE: usize = 64 << 10;
/// The number of requests in flight at once.
const DEPTH: usize = 8;

/// A driver, and a buffer of Pinfold's for payloads in place.
struct Rig {
    driver: Driver,
    buffer: Buffer,
}

impl Rig {
    /// Moves data by payloads on the heap, which are copied; one request at a time.
    fn by_copy(&mut self, from: usize, data: &mut [u8], write: bool) -> Result<()> {
        for (number, piece) in data.chunks_mut(PIECE).enumerate() {
            let sector = (from + number * PIECE) / SECTOR_SIZE;
            match write {
                true => self.driver.write_blocks(sector, piece)?,
                false => self.driver.read_blocks(sector, piece)?,
            }
        }
        Ok(())
    }

    /// Moves data by payloads in the buffer, which are mapped in place; `DEPTH` requests at a time.
    fn in_place(&mut self, from: usize, data: &mut [u8], write: bool) -> Result<()> {
        for (number, run) in data.chunks_mut(DEPTH * PIECE).enumerate() {
            let sector = (from + number * DEPTH * PIECE) / SECTOR_SIZE;
            let frames =
                self.buffer.as_mut_slice()?.get_mut(..run.len()).ok_or("the buffer is short")?;
            if write {
                frames.copy_from_slice(run);
            }
            submit_and_wait(&mut self.driver, sector, frames, write)?;
            if !write {
                run.copy_from_slice(frames);
            }
        }
        Ok(())
    }
}

/// The state of a request in flight.
#[derive(Default)]
struct InFlight {
    req: BlkReq,
    resp: BlkResp,
    token: u16,
}

/// Submits all pieces of `data` and waits for their completions.
fn submit_and_wait(driver: &mut Driver, sector: usize, data: &mut [u8], write: bool) -> Result<()> {
    let mut in_flight: Vec<InFlight> = data.chunks(PIECE).map(|_| InFlight::default()).collect();
    for (number, (piece, place)) in data.chunks_mut(PIECE).zip(&mut in_flight).enumerate() {
        let InFlight { req, resp, token } = place;
        let sector = sector + number * PIECE / SECTOR_SIZE;
        *token = if write {
            // SAFETY: piece, header and status are neither moved nor accessed until the completion
            // below.
            unsafe { driver.write_blocks_nb(sector, req, piece, resp) }?
        } else {
            // SAFETY: as above.
            unsafe { driver.read_blocks_nb(sector, req, piece, resp) }?
        };
    }
    for _ in 0..in_flight.len() {
        let used = loop {
            match driver.peek_used() {
                Some(token) => break token,
                None => std::hint::spin_loop(),
            }
        };
        let mut places = data.chunks_mut(PIECE).zip(&mut in_flight);
        let (piece, place) = places
            .find(|(_, place)| place.token == used)
            .ok_or("a completion of an unknown request")?;
        let InFlight { req, resp, token } = place;
        let completed = if write {
            // SAFETY: the same three as in the submission.
            unsafe { driver.complete_write_blocks(*token, req, piece, resp) }
        } else {
            // SAFETY: as above.
            unsafe { driver.complete_read_blocks(*token, req, piece, resp) }
        };
        completed?;
    }
    Ok(())
}

fn work(
    stack: &Installed<Process>,
    device: &Device,
    [_, input, output]: &[String; 3],
) -> Result<()> {
    let mut data = fs::read(input)?;
    let transport = pci::open(device)?;
    let mut rig =
        Rig { driver: VirtIOBlk::new(transport)?, buffer: stack.arena().alloc(DEPTH * PIECE)? };
    let bytes = rig.driver.capacity() * SECTOR_SIZE as u64;
    let mut id = [0; 20];
    let id_len = rig.driver.device_id(&mut id)?;
    println!(
        "a disk of {bytes} bytes, {:?}",
        String::from_utf8_lossy(id.get(..id_len).unwrap_or_default())
    );
    if data.is_empty() || !data.len().is_multiple_of(SECTOR_SIZE) || data.len() as u64 > bytes {
        return Err(format!(
            "{input} has {} bytes: whole sectors are needed, at most the size of the disk",
            data.len()
        )
        .into());
    }

    // Each half is read by one method and written by the other.
    let middle = data.len() / SECTOR_SIZE / 2 * SECTOR_SIZE;
    let mut back = vec![0; data.len()];
    let (first, second) = back.split_at_mut(middle);
    rig.by_copy(0, first, false)?;
    rig.in_place(middle, second, false)?;
    fs::write(output, &back)?;
    println!("{} bytes read from the disk to {output}", back.len());

    let (first, second) = data.split_at_mut(middle);
    rig.in_place(0, first, true)?;
    rig.by_copy(middle, second, true)?;
    rig.driver.flush()?;
    println!("{} bytes written from {input}", data.len());

    back.fill(0);
    let (first, second) = back.split_at_mut(middle);
    rig.by_copy(0, first, false)?;
    rig.in_place(middle, second, false)?;
    let live = device.domain().stats().backend;
    println!("in use: {} IOMMU entries, {} bytes pinned", live.entries, live.pinned_bytes);
    if back == data { Ok(()) } else { Err("the data read back differs".into()) }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("virtio_blk_vfio: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words = <[String; 3]>::try_from(words).map_err(|_| "usage: virtio_blk_vfio BDF IN OUT")?;
    let device = Device::open(&words[0], &Options::new())?;
    let domain = device.domain().clone();
    println!("{} in a domain of its own ({})", device.address(), domain.name());
    let stack = install::<Process>(&domain, Arena::builder().size(8 << 20))?;
    println!("an arena of {} bytes from {}", stack.arena().len(), stack.arena().report().source);
    let worked = work(&stack, &device, &words);

    // Check for leaks even if the work has failed.
    let report = stack.finish()?;
    println!("{report}");
    let (stats, leaked) = (domain.stats(), pinfold::quarantined_bytes());
    println!(
        "afterwards: {} IOMMU entries, {} bytes pinned, {} bytes quarantined in the domain, {leaked} in arenas",
        stats.backend.entries, stats.backend.pinned_bytes, stats.quarantined_bytes
    );
    worked?;
    let clean = report.is_clean()
        && [stats.backend.entries, stats.backend.pinned_bytes, stats.quarantined_bytes, leaked]
            == [0; 4];
    if clean { Ok(()) } else { Err("memory has leaked".into()) }
}
