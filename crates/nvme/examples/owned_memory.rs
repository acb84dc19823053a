//! `cargo run -p pinfold-nvme --example owned_memory`
//!
//! Moves a file through the program's own hugepages to an NVMe controller and reads it back.
//!
//! One piece of memory is registered with the ring that reads the file (as a fixed buffer) and
//! mapped once into the device's domain; no byte is copied in between. It runs on the model
//! controller: no hardware, no privileges.

use pinfold::uring::{FileQueue, Options};
use pinfold::{Arena, DmaMemory, Domain, FromDevice, MappingPolicy, OwnedMemory, ToDevice};
use pinfold_nvme::driver::{Config, Controller, InFlight, Outcome, Queue};
use pinfold_nvme_model::{MemoryMedia, ModelConfig, ModelController, ModelRegisters, Namespace};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::error::Error;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

const BYTES: usize = 2 << 20;
const BLOCK: usize = 512;

/// Memory that the program has mapped itself, and unmaps when nothing uses it any more.
struct OwnPages {
    memory: NonNull<[u8]>,
    hugepages: bool,
}

// SAFETY: plain memory, which only `drop` and the value that owns this reach.
unsafe impl Send for OwnPages {}

impl OwnPages {
    /// Maps one hugepage of 2 MiB, or plain pages if none is reserved.
    fn map() -> Result<Self, Box<dyn Error>> {
        let (prot, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let (plain, huge) = (MapFlags::PRIVATE, MapFlags::PRIVATE | MapFlags::HUGETLB);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let mapped = unsafe { mmap_anonymous(null, BYTES, prot, huge) };
        let hugepages = mapped.is_ok();
        let at = match mapped {
            Ok(at) => at,
            // SAFETY: likewise.
            Err(_) => unsafe { mmap_anonymous(null, BYTES, prot, plain) }?,
        };
        let base = NonNull::new(at.cast::<u8>()).ok_or("mapped at address 0")?;
        Ok(Self { memory: NonNull::slice_from_raw_parts(base, BYTES), hugepages })
    }
}

impl Drop for OwnPages {
    fn drop(&mut self) {
        // SAFETY: all of what `map` mapped; its owner drops it when no device and no piece reaches
        // the memory.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), BYTES) };
    }
}

/// Waits for the only command in flight and returns its payload.
fn finish<P>(
    queue: &mut Queue<ModelRegisters, Arena>,
    command: InFlight<P>,
) -> Result<P, Box<dyn Error>> {
    let completion = queue.wait()?.ok_or("no command is in flight")?;
    match command.finish(completion) {
        Outcome::Completed { payload, result } => result.map(|_| payload).map_err(Into::into),
        _ => Err("the command timed out".into()),
    }
}

fn checksum(memory: DmaMemory<'_>, len: usize) -> Result<u64, Box<dyn Error>> {
    let mut bytes = vec![0; len];
    memory.copy_to_slice(0, &mut bytes)?;
    let add = |sum: u64, byte: &u8| sum.wrapping_mul(31).wrapping_add((*byte).into());
    Ok(bytes.iter().fold(7, add))
}

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).map_or_else(std::env::current_exe, |arg| Ok(arg.into()));
    let path: PathBuf = path?;

    // The memory is the program's own, of any origin; it is passed by value.
    let pages = OwnPages::map()?;
    let (hugepages, at) = (pages.hugepages, pages.memory);
    // SAFETY: `pages` keeps the mapping until it is dropped, and nothing else accesses it.
    let memory = unsafe { OwnedMemory::new(at, pages) }?;

    // The controller, and the memory in its domain: mapped once, as an arena is.
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(8 << 20).build(&domain)?;
    let namespace = Namespace::new(Arc::new(MemoryMedia::new(64 << 20)?), 512)?;
    let port = domain.port().ok_or("not a software IOMMU")?;
    let model = ModelController::spawn(port, ModelConfig::new(vec![namespace]))?;
    let controller = Controller::start(model.registers(), arena, Config::default())?;
    let mut commands = controller.create_queue(8)?;
    memory.map_into(&domain, MappingPolicy::Whole)?;
    println!("{} bytes: {}", memory.len(), memory.survey()?.forecast());

    // The ring, with the same memory as a fixed buffer.
    let options = Options { fixed: &[memory.fixed()], ..Options::default() };
    let mut file = FileQueue::open(&path, OpenOptions::new().read(true), &options)?;
    for note in file.notes() {
        println!("{note}");
    }
    let fixed = file.fixed_bytes();
    let len = usize::try_from(file.len()?)?.min(BYTES) / BLOCK * BLOCK;
    if len == 0 {
        return Err(format!("{} has no whole block of {BLOCK} bytes", path.display()).into());
    }

    // File to memory ...
    let mut done = Vec::new();
    file.read(memory.take().ok_or("taken")?, 0, len, 0)?;
    file.wait(1, &mut done)?;
    let read = done.pop().ok_or("no completion")?;
    read.result?;
    let mut piece = read.buffer;
    let expected = checksum(piece.memory(), len)?;

    // ... to the controller, and back into the same memory.
    let blocks = u32::try_from(len / BLOCK)?;
    piece.set_extent(0, len)?;
    let mapping = domain.map(piece, ToDevice)?;
    let write = commands.write(1, 0, blocks, mapping)?;
    let piece = finish(&mut commands, write)?.unmap()?;
    piece.memory().fill(0, len, 0)?;
    let mapping = domain.map(piece, FromDevice)?;
    let read = commands.read(1, 0, blocks, mapping)?;
    let piece = finish(&mut commands, read)?.unmap()?;
    if checksum(piece.memory(), len)? != expected {
        return Err("the controller returned other bytes".into());
    }
    let kind = if hugepages { "a hugepage" } else { "plain pages" };
    println!(
        "{len} bytes through {kind} of the program; fixed bytes {fixed}\n{}",
        commands.stats()
    );

    // The program has its memory back when neither the ring nor the device can reach it.
    drop((piece, file, commands, controller, model));
    let pages: OwnPages = memory.reclaim()?;
    drop(pages);
    Ok(())
}
