//! More than 1 GiB of memory, registered with a ring, and a read across the border.

use crate::pages::Pages;
use crate::report::Report;
use io_uring::IoUring;
use pinfold::uring::{FileQueue, Options, RingBuffers};
use pinfold::{OwnedMemory, OwnedPiece};
use std::error::Error;
use std::fs::OpenOptions;
use std::io::Write;

const GIB: usize = 1 << 30;
const MEMORY: usize = GIB + GIB / 2;
const TRANSFER: usize = 1 << 20;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    let mut pages = Pages::large(MEMORY)?;
    report.section("there: the memory as one buffer of a ring");
    report.figure("bytes of the memory", MEMORY, "");
    let bytes = pages.bytes();
    let whole = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    match IoUring::new(8) {
        // SAFETY: the pages stay mapped until the ring has been closed, at the end of this arm.
        Ok(ring) => match unsafe { ring.submitter().register_buffers(&[whole]) } {
            Ok(()) => report.said("the kernel", "registered"),
            Err(error) => report.said("the kernel", error),
        },
        Err(error) => report.said("the kernel", error),
    }

    report.section("here: the same memory, registered by its owner");
    let memory = pages.owned()?;
    let piece = memory.take().ok_or("taken")?;
    places(report, &memory, &piece)?;
    let (right, registered) = transfers(report, &memory, piece)?;
    report.promise("transfers below, across and above the border are right", right);
    report.promise("all of the memory is registered, or a note says why it is not", registered);
    Ok(())
}

/// Where the transfers are: below the border, across it, and above it.
const PLACES: [usize; 3] = [GIB - TRANSFER - TRANSFER / 2, GIB - TRANSFER / 2, GIB + TRANSFER / 2];

/// Shows the places of a ring's table, for a program with a ring of its own.
fn places(
    report: &mut Report,
    memory: &OwnedMemory,
    piece: &OwnedPiece,
) -> Result<(), Box<dyn Error>> {
    let ring = IoUring::new(8);
    let table = match ring.as_ref().map(|ring| RingBuffers::register(ring, &[memory.fixed()])) {
        Ok(Ok(table)) => Some(table),
        Ok(Err(error)) => {
            report.note(error);
            None
        }
        Err(error) => {
            report.note(format!("no io_uring here: {error}"));
            None
        }
    };
    let table = table.as_ref();
    report.figure("places of the table", table.map_or(0, RingBuffers::len), "");
    let mut inside = 0;
    for at in PLACES {
        let part = piece.memory().part(at, TRANSFER)?;
        inside += usize::from(table.is_some_and(|table| table.index_of(part).is_some()));
    }
    report.figure("transfers of 1 MiB: below, across and above 1 GiB", PLACES.len(), "");
    report.figure("  of these in one place: fixed buffers", inside, "");
    Ok(())
}

/// Reads a file below, across and above the border. Returns whether the bytes are right, and
/// whether all of the memory is registered or a note says why it is not.
fn transfers(
    report: &mut Report,
    memory: &OwnedMemory,
    piece: OwnedPiece,
) -> Result<(bool, bool), Box<dyn Error>> {
    let mut file = tempfile::NamedTempFile::new()?;
    let bytes = PLACES.len() * TRANSFER;
    let expected: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    file.write_all(&expected)?;
    file.as_file().sync_all()?;

    let options = Options { fixed: &[memory.fixed()], ..Options::default() };
    let mut queue = FileQueue::open(file.path(), OpenOptions::new().read(true), &options)?;
    queue.notes().iter().for_each(|note| report.note(note));
    report.figure("bytes registered with the queue", queue.fixed_bytes(), "");
    let registered = queue.fixed_bytes() == MEMORY as u64 || !queue.notes().is_empty();

    let mut below = piece;
    let mut rest = below.split_off(PLACES[0])?;
    for number in 0..PLACES.len() {
        let behind = rest.split_off(TRANSFER)?;
        let transfer = std::mem::replace(&mut rest, behind);
        let offset = (number * TRANSFER) as u64;
        queue.read(transfer, offset, TRANSFER, number as u64)?;
    }
    let mut done = Vec::new();
    while done.len() < PLACES.len() {
        queue.wait(1, &mut done)?;
    }
    let mut right = 0;
    for read in done {
        read.result?;
        let mut bytes = vec![0; TRANSFER];
        read.buffer.memory().copy_to_slice(0, &mut bytes)?;
        let at = usize::try_from(read.tag)? * TRANSFER;
        let expected = expected.get(at..at + TRANSFER).ok_or("beyond the file")?;
        right += bytes.iter().zip(expected).filter(|(read, written)| read == written).count();
    }
    report.figure("bytes read", PLACES.len() * TRANSFER, "");
    report.figure("of these as they are in the file", right, "");
    Ok((right == PLACES.len() * TRANSFER, registered))
}
