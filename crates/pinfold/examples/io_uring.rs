//! A program's own ring, driven with the crate `io-uring`, and Pinfold's memory registered with it: a file is copied, eight
//! pieces at a time.
//!
//! `cargo run -p pinfold --example io_uring --features io-uring`

use io_uring::{IoUring, squeue, types};
use pinfold::adapters::io_uring::{read, write};
use pinfold::uring::RingBuffers;
use pinfold::{Arena, Buffer, Domain};
use pinfold_core::mem::DmaMemory;
use std::error::Error;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;

const PIECE: usize = 64 << 10;
const DEPTH: u32 = 8;

/// Hands the entries to the kernel and waits for all of them. Each must move as many bytes as it says.
fn go(ring: &mut IoUring, entries: &[(squeue::Entry, usize)]) -> Result<(), Box<dyn Error>> {
    for (number, (entry, _)) in (0..).zip(entries) {
        let entry = entry.clone().user_data(number);
        // SAFETY: the files and the buffers live until the end of `main`, and nobody reaches the buffers before the
        // completions, which are waited for below.
        unsafe { ring.submission().push(&entry) }?;
    }
    ring.submit_and_wait(entries.len())?;
    for over in ring.completion() {
        let moved = usize::try_from(over.result()).map_err(|_| "the kernel refused a transfer")?;
        let (_, len) = entries.get(usize::try_from(over.user_data())?).ok_or("whose is that?")?;
        if moved != *len {
            return Err(format!("{moved} bytes of {len} were moved").into());
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut ring = match IoUring::new(DEPTH) {
        Ok(ring) => ring,
        Err(error) => {
            println!("this system has no io_uring ({error}): there is nothing to show");
            return Ok(());
        }
    };
    let arena = Arena::builder().size(1 << 20).build(&Domain::soft()?)?;
    let table = RingBuffers::register(&ring, &[arena.fixed()])?;
    println!("{} bytes are registered, in {} of the table's places", table.bytes(), table.len());

    let (mut from, mut to) = (File::open("/proc/self/exe")?, tempfile::tempfile()?);
    let (source, target) = (types::Fd(from.as_raw_fd()), types::Fd(to.as_raw_fd()));
    let len = from.metadata()?.len();
    let buffers = (0..DEPTH).map(|_| arena.alloc(PIECE)).collect::<Result<Vec<Buffer>, _>>()?;
    let offsets: Vec<u64> = (0..len).step_by(PIECE).collect();
    for round in offsets.chunks(buffers.len()) {
        // The last piece of the file may be a short one.
        let mut pieces: Vec<(DmaMemory<'_>, u64)> = Vec::new();
        for (buffer, &offset) in buffers.iter().zip(round) {
            let short = usize::try_from(len - offset)?.min(PIECE);
            pieces.push((buffer.memory().part(0, short)?, offset));
        }
        let reads = pieces.iter().map(|&(memory, offset)| {
            Ok((read(&table, source, memory)?.offset(offset).build(), memory.len()))
        });
        go(&mut ring, &reads.collect::<Result<Vec<_>, Box<dyn Error>>>()?)?;
        let writes = pieces.iter().map(|&(memory, offset)| {
            Ok((write(&table, target, memory)?.offset(offset).build(), memory.len()))
        });
        go(&mut ring, &writes.collect::<Result<Vec<_>, Box<dyn Error>>>()?)?;
    }
    println!("{len} bytes were copied in {} pieces", offsets.len());

    let (mut original, mut copy) = (Vec::new(), Vec::new());
    from.read_to_end(&mut original)?;
    to.rewind()?;
    to.read_to_end(&mut copy)?;
    if original == copy { Ok(()) } else { Err("the copy differs".into()) }
}
