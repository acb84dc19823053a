//! Submission entries for a program's own ring, driven with the crate [`io_uring`], from the memory
//! to transfer.
//!
//! [`RingBuffers`] registers memory with the ring; the functions here create a `READ_FIXED` or
//! `WRITE_FIXED` entry for a part of it, with its index in the table. Pinfold owns memory and
//! table; the program owns the ring, sets flags and user data of the entry, and pushes it.
//!
//! ```
//! use io_uring::{IoUring, types};
//! use pinfold::adapters::io_uring::read;
//! use pinfold::uring::RingBuffers;
//! use pinfold::Arena;
//! use std::os::fd::AsRawFd;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(mut ring) = IoUring::new(8) else { return Ok(()) };
//! let file = std::fs::File::open("/proc/self/exe")?;
//! let arena = Arena::builder().size(4 << 20).build_unmapped()?;
//! let table = RingBuffers::register(&ring, &[arena.fixed()])?;
//! let buffer = arena.alloc(4096)?;
//!
//! let entry = read(&table, types::Fd(file.as_raw_fd()), buffer.memory())?.offset(0).build();
//! // SAFETY: file and buffer live until the completion, and the buffer is not accessed meanwhile.
//! unsafe { ring.submission().push(&entry)? };
//! ring.submit_and_wait(1)?;
//! assert_eq!(ring.completion().next().map(|entry| entry.result()), Some(4096));
//! # Ok(()) }
//! ```

use crate::uring::RingBuffers;
use ::io_uring::{opcode, types};
use pinfold_core::mem::DmaMemory;

/// Why there is no entry for a piece of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotFixed {
    /// It is not registered as a whole.
    #[error(
        "{len} bytes at {addr:#x} are not in one entry of the ring's table: register them, or split at the end of an entry"
    )]
    NotRegistered {
        /// Its address.
        addr: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// It is longer than the 32 bits of an entry's length. (Never memory of a table, where a place
    /// has at most 1 GiB.)
    #[error("{len} bytes in one entry: {limit} are possible", limit = u32::MAX)]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
}

/// Creates an entry that reads from the file to all of `memory`.
///
/// Logarithmic in the places of the table; no system call. `READ_FIXED`: since Linux 5.1.
///
/// # Errors
/// [`NotFixed`].
pub fn read(
    table: &RingBuffers<'_>,
    file: types::Fd,
    memory: DmaMemory<'_>,
) -> Result<opcode::ReadFixed, NotFixed> {
    let (at, len, index) = place(table, memory)?;
    Ok(opcode::ReadFixed::new(file, at, len, index))
}

/// Creates an entry that writes all of `memory` to the file.
///
/// Logarithmic in the places of the table; no system call. `WRITE_FIXED`: since Linux 5.1.
///
/// # Errors
/// [`NotFixed`].
pub fn write(
    table: &RingBuffers<'_>,
    file: types::Fd,
    memory: DmaMemory<'_>,
) -> Result<opcode::WriteFixed, NotFixed> {
    let (at, len, index) = place(table, memory)?;
    Ok(opcode::WriteFixed::new(file, at, len, index))
}

/// Returns the address, the length and the table index of `memory`, for entries that have no
/// function here, and for registered files ([`types::Fixed`]).
///
/// Logarithmic in the places of the table; no system call.
///
/// # Errors
/// [`NotFixed`].
fn place(table: &RingBuffers<'_>, memory: DmaMemory<'_>) -> Result<(*mut u8, u32, u16), NotFixed> {
    let (addr, len) = (memory.addr(), memory.len());
    let index = table.index_of(memory).ok_or(NotFixed::NotRegistered { addr, len })?;
    let short = u32::try_from(len).map_err(|_| NotFixed::TooLong { len })?;
    Ok((memory.as_ptr().as_ptr(), short, index.get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Domain};
    use ::io_uring::{IoUring, squeue};
    use std::fs::File;
    use std::os::fd::AsRawFd;

    fn transfer(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the tests keep file and memory until the completion, which is waited for here.
        unsafe { ring.submission().push(entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    fn arena() -> Arena {
        Arena::builder().size(1 << 20).build(&Domain::soft().unwrap()).unwrap()
    }

    #[test]
    fn data_round_trips_also_with_registered_files() {
        let Ok(mut ring) = IoUring::new(8) else { return };
        let (arena, file) = (arena(), tempfile::tempfile().unwrap());
        let (from, to) = (arena.alloc(8192).unwrap(), arena.alloc(8192).unwrap());
        let table = RingBuffers::register(&ring, &[arena.fixed()]).unwrap();
        from.memory().fill(0, 8192, 0xc3).unwrap();
        let fd = types::Fd(file.as_raw_fd());
        let part = from.memory().part(100, 5000).unwrap();
        assert_eq!(transfer(&mut ring, &write(&table, fd, part).unwrap().offset(3).build()), 5000);
        assert_eq!(
            transfer(&mut ring, &read(&table, fd, to.memory()).unwrap().offset(3).build()),
            5000
        );
        let mut back = [0; 5000];
        to.memory().copy_to_slice(0, &mut back).unwrap();
        assert_eq!(back, [0xc3; 5000]);

        ring.submitter().register_files(&[file.as_raw_fd()]).unwrap();
        let (at, len, index) = place(&table, to.memory()).unwrap();
        let entry = opcode::ReadFixed::new(types::Fixed(0), at, len, index).offset(4000).build();
        assert_eq!(transfer(&mut ring, &entry), 1003);
    }

    #[test]
    fn memory_that_is_not_registered_gets_no_entry() {
        let Ok(ring) = IoUring::new(8) else { return };
        let (arena, other, file) = (arena(), self::arena(), File::open("/dev/null").unwrap());
        let fd = types::Fd(file.as_raw_fd());
        let (mine, theirs) = (arena.alloc(4096).unwrap(), other.alloc(4096).unwrap());
        let table = RingBuffers::register(&ring, &[arena.fixed()]).unwrap();
        assert!(read(&table, fd, mine.memory()).is_ok());
        let (addr, len) = (theirs.memory().addr(), 4096);
        let refused = NotFixed::NotRegistered { addr, len };
        assert_eq!(read(&table, fd, theirs.memory()).err(), Some(refused));
        assert_eq!(write(&table, fd, theirs.memory()).err(), Some(refused));
        let table = RingBuffers::register(&ring, &[arena.fixed()]);
        assert!(table.is_err(), "a ring has one table");
    }

    #[test]
    fn memory_across_two_places_gets_no_entry() {
        let Ok(ring) = IoUring::new(8) else { return };
        let arena = arena();
        let buffer = arena.alloc(8192).unwrap();
        let halves = [0, 4096].map(|at| buffer.memory().part(at, 4096).unwrap());
        let table = RingBuffers::register(&ring, &halves.map(Into::into)).unwrap();
        assert_eq!(halves.map(|half| place(&table, half).map(|(.., index)| index)), [Ok(0), Ok(1)]);
        assert!(matches!(
            place(&table, buffer.memory()),
            Err(NotFixed::NotRegistered { len: 8192, .. })
        ));
    }
}
