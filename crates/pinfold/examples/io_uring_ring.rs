//! `cargo run -p pinfold --example io_uring_ring --features io-uring`
//!
//! A program with its own io_uring, driven by the crate `io-uring`, and Pinfold's memory: it copies
//! a file through registered hugepages, eight pieces at a time. No device and no domain is
//! involved.

use io_uring::{IoUring, squeue, types};
use pinfold::adapters::io_uring::{read, write};
use pinfold::uring::RingBuffers;
use pinfold::{Arena, Buffer, DmaMemory};
use std::error::Error;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;

const PIECE: usize = 64 << 10;
const DEPTH: u32 = 8;

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
    let mut ring = match IoUring::new(DEPTH) {
        Ok(ring) => ring,
        Err(error) => {
            println!("this system has no io_uring ({error})");
            return Ok(());
        }
    };
    // Pinned memory, and the ring's table of fixed buffers.
    let arena = Arena::builder().size(1 << 20).build_unmapped()?;
    println!("{}", arena.report());
    let table = RingBuffers::register(&ring, &[arena.fixed()])?;
    let buffers = (0..DEPTH).map(|_| arena.alloc(PIECE)).collect::<Result<Vec<Buffer>, _>>()?;

    let (mut from, mut to) = (File::open("/proc/self/exe")?, tempfile::tempfile()?);
    let (source, target) = (types::Fd(from.as_raw_fd()), types::Fd(to.as_raw_fd()));
    let len = from.metadata()?.len();
    let offsets: Vec<u64> = (0..len).step_by(PIECE).collect();
    for batch in offsets.chunks(buffers.len()) {
        let mut pieces: Vec<(DmaMemory<'_>, u64)> = Vec::new();
        for (buffer, &offset) in buffers.iter().zip(batch) {
            // The last piece of the file may be shorter.
            let bytes = usize::try_from(len - offset)?.min(PIECE);
            pieces.push((buffer.memory().part(0, bytes)?, offset));
        }
        let mut entries = Vec::new();
        for &(memory, offset) in &pieces {
            entries.push((read(&table, source, memory)?.offset(offset).build(), memory.len()));
        }
        submit(&mut ring, &entries)?;
        entries.clear();
        for &(memory, offset) in &pieces {
            entries.push((write(&table, target, memory)?.offset(offset).build(), memory.len()));
        }
        submit(&mut ring, &entries)?;
    }
    println!("copied {len} bytes in {} pieces", offsets.len());

    let (mut original, mut copy) = (Vec::new(), Vec::new());
    from.read_to_end(&mut original)?;
    to.rewind()?;
    to.read_to_end(&mut copy)?;
    if original == copy { Ok(()) } else { Err("the copy differs".into()) }
}

/// Submits the entries and waits for all of them. Each must transfer as many bytes as it says.
fn submit(ring: &mut IoUring, entries: &[(squeue::Entry, usize)]) -> Result<(), Box<dyn Error>> {
    for (number, (entry, _)) in (0..).zip(entries) {
        let entry = entry.clone().user_data(number);
        // SAFETY: files and buffers live until the end of `main`, and the buffers are not accessed
        // before the completions, which are awaited below.
        unsafe { ring.submission().push(&entry) }?;
    }
    ring.submit_and_wait(entries.len())?;
    for completion in ring.completion() {
        let bytes = usize::try_from(completion.result()).map_err(|_| "a transfer failed")?;
        let (_, len) =
            entries.get(usize::try_from(completion.user_data())?).ok_or("unknown completion")?;
        if bytes != *len {
            return Err(format!("{bytes} of {len} bytes were transferred").into());
        }
    }
    Ok(())
}
