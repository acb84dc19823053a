//! The program's processes: their memory, descriptors, limits, and where a thread is in its code.

use crate::span::Span;
use crate::symbols::Elf;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

/// The number of words of a stack that are kept for its frames, the most frames that are followed,
/// and the most that are described.
const STACK_WORDS: usize = 96;
const FRAMES: usize = 6;
const PLACES: usize = 3;

/// What a file is: its device and number.
pub(crate) type Inode = (u64, u64);

/// One address space of a process. After the process has executed another program or has ended, an
/// access fails: it never reaches the new program.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The process (its first thread).
    pub(crate) pid: u32,
    file: File,
}

impl Memory {
    /// Opens the memory of a thread's process.
    pub(crate) fn of(tid: u32) -> io::Result<Self> {
        // `/proc/TID/mem` keeps the address space that the process has now.
        let file = File::options().read(true).write(true).open(format!("/proc/{tid}/mem"))?;
        Ok(Self { pid: group_leader(tid).unwrap_or(tid), file })
    }

    /// Reads all of `to`; otherwise an error, and `to` may be read in part.
    pub(crate) fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(to, at)
    }

    /// Reads as much of `to` as there is, and returns how much.
    pub(crate) fn read_part(&self, at: u64, to: &mut [u8]) -> usize {
        self.file.read_at(to, at).unwrap_or(0)
    }

    /// Writes all of `from`; otherwise an error, and a part may be written.
    pub(crate) fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.file.write_all_at(from, at)
    }

    /// Returns whether the process still has this address space.
    pub(crate) fn is_alive(&self) -> bool {
        // A process that has ended has no pages, and a read ends at once. Page 0 is not mapped, so
        // that of a live one fails.
        !matches!(self.file.read_at(&mut [0], 0), Ok(0))
    }

    /// Reads a string of at most `limit` bytes that ends with a zero.
    ///
    /// # Errors
    /// `EFAULT` where it is not readable, `ENAMETOOLONG` where it is longer.
    pub(crate) fn string(&self, at: u64, limit: usize) -> Result<Vec<u8>, i32> {
        let mut text = Vec::new();
        let mut piece = [0; 256];
        while text.len() < limit {
            let from = at.checked_add(text.len() as u64).ok_or(libc::EFAULT)?;
            // Not across a page, behind which there may be nothing.
            let room = usize::try_from(4096 - from % 4096).unwrap_or(1).min(piece.len());
            let room = piece.get_mut(..room).unwrap_or_default();
            let got = self.read_part(from, room);
            let got = room.get(..got).filter(|got| !got.is_empty()).ok_or(libc::EFAULT)?;
            match got.iter().position(|byte| *byte == 0) {
                Some(end) => {
                    text.extend_from_slice(got.get(..end).unwrap_or_default());
                    return Ok(text);
                }
                None => text.extend_from_slice(got),
            }
        }
        Err(libc::ENAMETOOLONG)
    }

    /// Returns where a thread's process has mapped a part of a file, shared.
    pub(crate) fn shared_maps(tid: u32, inode: Inode, part: Span) -> Vec<Span> {
        let maps = fs::read_to_string(format!("/proc/{tid}/maps")).unwrap_or_default();
        let ranges = maps.lines().filter_map(Range::parse);
        let ranges = ranges.filter(|range| range.shared && range.inode == Some(inode));
        let overlap = |range: Range<'_>| {
            let file = Span::new(range.offset, range.end - range.start)?;
            let (first, last) = (file.first.max(part.first), file.last.min(part.last));
            (first <= last).then(|| Span {
                first: range.start + (first - file.first),
                last: range.start + (last - file.first),
            })
        };
        ranges.filter_map(overlap).collect()
    }

    /// Returns whether `len` bytes at `at` are mapped in a thread's process, and writable if `write`.
    pub(crate) fn is_mapped(tid: u32, at: u64, len: u64, write: bool) -> bool {
        // The process's first thread may have ended: it then has no maps.
        let Ok(maps) = fs::read_to_string(format!("/proc/{tid}/maps")) else { return false };
        let Some(end) = at.checked_add(len) else { return false };
        let mut from = at;
        for range in maps.lines().filter_map(Range::parse) {
            if range.end <= from {
                continue;
            }
            if range.start > from || !range.readable || write && !range.writable {
                return false;
            }
            from = range.end;
            if from >= end {
                return true;
            }
        }
        false
    }
}

/// A line of `/proc/PID/maps`.
struct Range<'a> {
    start: u64,
    end: u64,
    offset: u64,
    readable: bool,
    writable: bool,
    executable: bool,
    shared: bool,
    inode: Option<Inode>,
    path: &'a str,
}

/// Returns what a line says of its file: `08:01` and the number.
fn inode(device: &str, number: &str) -> Option<Inode> {
    let (major, minor) = device.split_once(':')?;
    let number_of = |text| u32::from_str_radix(text, 16).ok();
    let device = rustix::fs::makedev(number_of(major)?, number_of(minor)?);
    Some((device, number.parse().ok()?))
}

impl<'a> Range<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?.as_bytes();
        let offset = u64::from_str_radix(words.next()?, 16).ok()?;
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            offset,
            readable: rights.first() == Some(&b'r'),
            writable: rights.get(1) == Some(&b'w'),
            executable: rights.get(2) == Some(&b'x'),
            shared: rights.get(3) == Some(&b's'),
            inode: inode(words.next()?, words.next()?),
            path: words.next().unwrap_or_default().trim_start(),
        })
    }
}

fn status(tid: u32, key: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// Returns the process of a thread.
pub(crate) fn group_leader(tid: u32) -> Option<u32> {
    status(tid, "Tgid")?.parse().ok()
}

/// Returns how many bytes a thread's process may lock; `None` if it has CAP_IPC_LOCK or no limit.
pub(crate) fn lock_limit(tid: u32) -> Option<u64> {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let capabilities = u64::from_str_radix(&status(tid, "CapEff")?, 16).ok()?;
    if capabilities & CAP_IPC_LOCK != 0 {
        return None;
    }
    let limits = fs::read_to_string(format!("/proc/{tid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns whether a thread opens files as root, or as the user of this process.
pub(crate) fn may_open(tid: u32) -> bool {
    let user = status(tid, "Uid").and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
    user.is_some_and(|user: u32| user == 0 || user == rustix::process::geteuid().as_raw())
}

/// Returns what a descriptor of a thread refers to.
pub(crate) fn inode_of(tid: u32, fd: i32) -> Option<Inode> {
    let found = fs::metadata(format!("/proc/{tid}/fd/{fd}")).ok()?;
    Some((found.dev(), found.ino()))
}

/// Returns whether a thread's memory may not be accessed, and its descriptors not be looked at.
pub(crate) fn is_hidden(tid: u32) -> bool {
    Memory::of(tid).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Returns a copy of an eventfd of a thread.
///
/// # Errors
/// `EBADF` where there is no such descriptor, `EINVAL` where it is another file.
pub(crate) fn take_eventfd(tid: u32, fd: i32) -> Result<OwnedFd, i32> {
    if fd < 0 {
        return Err(libc::EBADF);
    }
    let taken = take_fd(tid, fd).map_err(|_| libc::EBADF)?;
    // Only the copy stays what it is: another thread may put a file at the number, which an
    // interrupt would then write to.
    let link = fs::read_link(format!("/proc/self/fd/{}", taken.as_raw_fd()));
    match link.is_ok_and(|link| link.to_string_lossy().starts_with("anon_inode:[eventfd")) {
        true => Ok(taken),
        false => Err(libc::EINVAL),
    }
}

/// Returns a copy of a descriptor of a thread.
fn take_fd(tid: u32, fd: i32) -> io::Result<OwnedFd> {
    let open = |tid: u32, flags| {
        let pid = i32::try_from(tid).ok().and_then(Pid::from_raw);
        Ok(rustix::process::pidfd_open(pid.ok_or(io::ErrorKind::NotFound)?, flags)?)
    };
    // `PIDFD_THREAD` (Linux 6.9): a thread may have descriptors of its own, and its process's first
    // thread, which stands for the process before, may have ended.
    let thread = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
    let process = open(tid, thread).or_else(|error: io::Error| match error.raw_os_error() {
        Some(libc::EINVAL) => open(group_leader(tid).unwrap_or(tid), PidfdFlags::empty()),
        _ => Err(error),
    })?;
    Ok(rustix::process::pidfd_getfd(process, fd, PidfdGetfdFlags::empty())?)
}

/// Where a thread was when it made a system call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Site {
    pub(crate) tid: u32,
    pid: u32,
    pc: u64,
    /// The words above the stack pointer.
    stack: Box<[u64]>,
}

impl Site {
    /// Notes where a thread is that waits in a system call.
    pub(crate) fn of(tid: u32, pc: u64, memory: &Memory) -> Self {
        let mut site = Self { tid, pid: memory.pid, pc, stack: Box::default() };
        let line = fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap_or_default();
        let sp = line.split_whitespace().rev().nth(1).and_then(|word| word.strip_prefix("0x"));
        if let Some(sp) = sp.and_then(|sp| u64::from_str_radix(sp, 16).ok()) {
            let mut bytes = [0; STACK_WORDS * 8];
            let got = memory.read_part(sp, &mut bytes);
            let words = bytes.get(..got).unwrap_or_default().as_chunks::<8>().0;
            site.stack = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        }
        site
    }

    /// Describes the place: the thread, and the code that called the system's library, as far as
    /// there is unwind data; otherwise where the system call was made.
    pub(crate) fn describe(&self) -> String {
        // The thread may have ended meanwhile, or the process's first thread, which then has none.
        let maps_of = |task| fs::read_to_string(format!("/proc/{task}/maps")).unwrap_or_default();
        let maps = Some(maps_of(self.pid)).filter(|maps| !maps.is_empty());
        let maps = maps.unwrap_or_else(|| maps_of(self.tid));
        let ranges: Vec<Range<'_>> =
            maps.lines().filter_map(Range::parse).filter(|range| range.executable).collect();
        let mut frames: Vec<Frame> = Vec::new();
        let (mut pc, mut end) = (self.pc, 0u64);
        while let Some(range) = ranges.iter().find(|range| (range.start..range.end).contains(&pc)) {
            // A return address is behind its call.
            let behind = u64::from(!frames.is_empty());
            let offset = (pc - range.start + range.offset).saturating_sub(behind);
            let elf = Elf::open(range.path);
            frames.push(Frame::new(range.path, offset, elf.as_ref()));
            if frames.len() == FRAMES {
                break;
            }
            let bytes = elf.and_then(|elf| elf.frame_bytes(offset));
            let next = bytes.and_then(|bytes| end.checked_add(bytes));
            let word = next.and_then(|next| usize::try_from(next / 8).ok()?.checked_sub(1));
            let (Some(next), Some(word)) = (next, word.and_then(|word| self.stack.get(word)))
            else {
                break;
            };
            (pc, end) = (*word, next);
        }
        // The library's wrapper of the system call says nothing, if its caller is known.
        let first = frames.iter().position(|frame| !frame.is_wrapper).unwrap_or(0);
        let places: Vec<&str> =
            frames.iter().skip(first).take(PLACES).map(|frame| frame.place.as_str()).collect();
        match places.is_empty() {
            true => format!("thread {}, {:#x}", self.tid, self.pc),
            false => format!("thread {}, {}", self.tid, places.join(", called by ")),
        }
    }
}

/// A function on the stack of a thread.
struct Frame {
    place: String,
    /// It is the system's library, or its wrapper of the call.
    is_wrapper: bool,
}

impl Frame {
    fn new(path: &str, offset: u64, elf: Option<&Elf>) -> Self {
        let file = path.rsplit('/').next().unwrap_or_default();
        let symbol = elf.and_then(|elf| elf.symbol(offset));
        let function = symbol.as_deref().and_then(|symbol| symbol.split('+').next());
        let function = function.map(|name| name.trim_start_matches('_'));
        let is_library = file.starts_with("libc.so") || file.starts_with("libc-");
        let is_wrapper = is_library || matches!(function, Some("ioctl" | "syscall"));
        let place = match symbol {
            Some(symbol) => format!("{symbol} ({file}+{offset:#x})"),
            None => format!("{file}+{offset:#x}"),
        };
        Self { place, is_wrapper }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Memory {
        Memory::of(std::process::id()).unwrap()
    }

    #[test]
    fn memory_is_read_and_written() {
        let mut value = [1u8, 2, 3, 4];
        let at = value.as_mut_ptr().expose_provenance() as u64;
        let memory = own();
        memory.write(at + 1, &[9]).unwrap();
        let mut got = [0; 4];
        memory.read(at, &mut got).unwrap();
        assert_eq!(got, [1, 9, 3, 4]);
        assert_eq!(std::hint::black_box(value), [1, 9, 3, 4]);
        assert!(memory.read(8, &mut got).is_err() && memory.read(u64::MAX, &mut got).is_err());
        assert!(memory.is_alive());
    }

    #[test]
    fn memory_of_an_ended_process_is_gone() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let memory = Memory::of(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!memory.is_alive() && memory.read(0x1000, &mut [0]).is_err());
    }

    #[test]
    fn only_eventfds_are_taken() {
        let own = std::process::id();
        let event = rustix::event::eventfd(7, rustix::event::EventfdFlags::empty()).unwrap();
        let taken = take_eventfd(own, event.as_raw_fd()).unwrap();
        let mut count = [0; 8];
        rustix::io::read(&taken, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 7);
        let file = tempfile::tempfile().unwrap();
        assert_eq!(take_eventfd(own, file.as_raw_fd()).unwrap_err(), libc::EINVAL);
        assert_eq!(take_eventfd(own, -1).unwrap_err(), libc::EBADF);
    }

    #[test]
    fn strings_end_with_a_zero() {
        let text = c"/dev/vfio/vfio";
        let at = text.as_ptr().expose_provenance() as u64;
        assert_eq!(own().string(at, 4096).unwrap(), text.to_bytes());
        assert_eq!(own().string(at, 3), Ok(text.to_bytes().to_vec()), "it ends in the first piece");
        assert_eq!(own().string(16, 64), Err(libc::EFAULT));
        let long = [b'a'; 1024];
        let at = long.as_ptr().expose_provenance() as u64;
        assert_eq!(own().string(at, 512), Err(libc::ENAMETOOLONG));
    }

    #[test]
    fn rights_of_memory_are_seen() {
        static CONSTANT: [u8; 64] = [7; 64];
        let constant = CONSTANT.as_ptr().expose_provenance() as u64;
        let mut value = [0u8; 64];
        let at = value.as_mut_ptr().expose_provenance() as u64;
        assert!(Memory::is_mapped(std::process::id(), at, 64, true));
        assert!(
            Memory::is_mapped(std::process::id(), constant, 64, false)
                && !Memory::is_mapped(std::process::id(), constant, 64, true)
        );
        assert!(
            !Memory::is_mapped(std::process::id(), at, 1 << 46, false)
                && !Memory::is_mapped(std::process::id(), at, u64::MAX, false)
        );
        assert!(!Memory::is_mapped(std::process::id(), 4096, 1, false));
    }
}
