//! Calls by which memory goes that a device may still access: what `--watch-memory` looks at, before
//! the kernel carries them out.

use crate::process::{self, Memory};
use crate::space::{PAGE, Span};
use crate::sys::seccomp::Notification;

/// The memory that a call takes away, and the call's name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Going {
    pub(crate) call: &'static str,
    pub(crate) memory: Vec<Span>,
}

/// The end of the addresses that a program can have, with five levels of page tables.
const USER_END: u64 = 1 << 56;

/// The calls.
pub(crate) const CALLS: [i64; 6] = [
    libc::SYS_munmap,
    libc::SYS_mmap,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
];

/// Returns what one of the [calls](CALLS) takes away; `None` for another one, or nothing.
pub(crate) fn going(call: &Notification) -> Option<Going> {
    let [first, second, third, fourth, fifth, _] = call.args;
    // Lengths are rounded up to pages. What is not aligned, or leaves a program's part of the address
    // space, is refused.
    let pages = |at: u64, len: u64| {
        let span = Span::new(at, len.checked_next_multiple_of(PAGE)?)?;
        (at.is_multiple_of(PAGE) && span.last < USER_END).then_some(span)
    };
    let fd = || u32::try_from(first & 0xffff_ffff).unwrap_or(0).cast_signed();
    let (name, spans) = match call.number {
        libc::SYS_munmap => ("munmap", vec![pages(first, second)]),
        libc::SYS_mmap => ("mmap with MAP_FIXED", vec![pages(first, second)]),
        libc::SYS_madvise => ("madvise", vec![pages(first, second)]),
        libc::SYS_mremap => {
            let flags = fourth;
            let may_move = flags & u64::from(libc::MREMAP_MAYMOVE.cast_unsigned()) != 0;
            let is_fixed = flags & u64::from(libc::MREMAP_FIXED.cast_unsigned()) != 0;
            let old = pages(first, second);
            let target = pages(fifth, third).filter(|_| is_fixed && old.is_some());
            let gone = if is_fixed {
                old.filter(|_| target.is_some())
            } else if may_move && third > second {
                old
            } else {
                // What it is shortened by.
                let kept = third.checked_next_multiple_of(PAGE)?;
                second.checked_sub(kept).and_then(|rest| pages(first.checked_add(kept)?, rest))
            };
            ("mremap", vec![gone, target])
        }
        libc::SYS_ftruncate => {
            let behind = Span::new(second, u64::MAX - second);
            return Some(file("ftruncate", call.tid, fd(), behind));
        }
        libc::SYS_fallocate => {
            return Some(file("fallocate", call.tid, fd(), Span::new(third, fourth)));
        }
        _ => return None,
    };
    Some(Going { call: name, memory: spans.into_iter().flatten().collect() })
}

/// Returns where a process has mapped a part of a file, shared.
fn file(call: &'static str, tid: u32, fd: i32, part: Option<Span>) -> Going {
    let inode = process::inode_of(tid, fd);
    let memory = match (inode, part) {
        (Some(inode), Some(part)) => Memory::shared_maps(tid, inode, part),
        _ => Vec::new(),
    };
    Going { call, memory }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, AsRawFd};

    fn spans(number: i64, args: [u64; 6]) -> Vec<(u64, u64)> {
        let (id, tid, arch, pc) = (0, std::process::id(), 0, 0);
        let going = going(&Notification { id, tid, number, arch, pc, args }).unwrap();
        going.memory.iter().map(|span| (span.first, span.last)).collect()
    }

    const NONE: [(u64, u64); 0] = [];

    #[test]
    fn lengths_are_rounded_up_to_pages() {
        for number in [libc::SYS_munmap, libc::SYS_madvise, libc::SYS_mmap] {
            assert_eq!(spans(number, [0x10000, 1, 4, 0, 0, 0]), [(0x10000, 0x10fff)]);
            assert_eq!(spans(number, [0x10000, 0x2000, 4, 0, 0, 0]), [(0x10000, 0x11fff)]);
            assert_eq!(spans(number, [0x10000, 0, 4, 0, 0, 0]), NONE);
            // These fail.
            assert_eq!(spans(number, [0x10000, u64::MAX, 4, 0, 0, 0]), NONE);
            assert_eq!(spans(number, [0x10000, 1 << 56, 4, 0, 0, 0]), NONE);
            assert_eq!(spans(number, [0x10800, 0x1000, 4, 0, 0, 0]), NONE);
        }
    }

    #[test]
    fn memory_that_shrinks_loses_its_end_and_what_moves_all_of_it() {
        let remap =
            |old, new, flags, to| spans(libc::SYS_mremap, [0x10000, old, new, flags, to, 0]);
        assert_eq!(remap(0x3000, 0x1000, 1, 0), [(0x11000, 0x12fff)]);
        assert_eq!(remap(0x3000, 0x3000, 1, 0), NONE);
        assert_eq!(remap(0x3000, 0x4000, 0, 0), NONE, "in place, or not at all");
        assert_eq!(remap(0x3000, 0x4000, 1, 0), [(0x10000, 0x12fff)]);
        let fixed = remap(0x1000, 0x2000, 3, 0x80000);
        assert_eq!(fixed, [(0x10000, 0x10fff), (0x80000, 0x81fff)]);
        // These fail.
        assert_eq!(remap(0, 0x2000, 3, 0x80000), NONE);
        assert_eq!(remap(0x1000, 0x2000, 3, 0x80800), NONE);
    }

    #[test]
    fn a_hole_is_where_its_file_is_mapped() {
        let file = tempfile::tempfile().unwrap();
        let window = crate::sys::window::SharedMemory::new("test", 0x4000, 0).unwrap();
        let fd = |fd: i32| u64::from(fd.cast_unsigned());
        let own = fd(window.as_fd().as_raw_fd());
        let whole = spans(libc::SYS_fallocate, [own, 3, 0, 0x4000, 0, 0]);
        let [(first, last)] = whole[..] else { panic!("{whole:?}") };
        assert_eq!(last - first, 0x3fff);
        let part = spans(libc::SYS_fallocate, [own, 3, 0x1000, 0x1000, 0, 0]);
        assert_eq!(part, [(first + 0x1000, first + 0x1fff)]);
        assert_eq!(spans(libc::SYS_ftruncate, [own, 0x3000, 0, 0, 0, 0]), [(first + 0x3000, last)]);
        assert_eq!(spans(libc::SYS_ftruncate, [own, 0x4000, 0, 0, 0, 0]), NONE);
        // A file that is not mapped, and none.
        assert_eq!(spans(libc::SYS_ftruncate, [fd(file.as_raw_fd()), 0, 0, 0, 0, 0]), NONE);
        assert_eq!(spans(libc::SYS_ftruncate, [fd(-1), 0, 0, 0, 0, 0]), NONE);
    }
}
