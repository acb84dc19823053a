//! The allocated parts of a file, found on a thread of their own: a file system may look at every
//! page or ask another machine, and all clients of an event loop would wait for the answer to one.
//!
//! A client has one question there at a time, so that each waits for at most one of every other.

use super::payload::{Key, PAGE};
use pinfold_nbd::Request;
use pinfold_nbd::protocol::ExtentFlags;
use pinfold_nvme::EventFd;
use rustix::fs::{SeekFrom, fstat, fstatfs, seek};
use rustix::io::Errno;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// The most extents in a reply, which fits into a page: a header, the number of the context, and 8
/// bytes for each.
const MOST: usize = (PAGE - 24) / 8;
/// `TMPFS_MAGIC` of statfs(2).
const TMPFS: i64 = 0x0102_1994;
/// The number of pages of tmpfs that one system call examines in the time that the call itself
/// takes.
const PAGES_PER_CALL: u64 = 8;

/// The extents of a range: the length and the state of each.
pub(crate) type Extents = Vec<(u32, ExtentFlags)>;

/// A range of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// The first extent is enough.
    pub(crate) one: bool,
}

impl Span {
    /// Returns its extents where nothing is known: all of it may be allocated.
    pub(super) fn unknown(self) -> Extents {
        vec![(self.length, ExtentFlags::empty())]
    }
}

/// A client's question.
pub(super) struct Question {
    pub(super) client: Key,
    pub(super) request: Request,
    pub(super) span: Span,
    pub(super) answers: Sender<Answer>,
    /// Signalled with the answer.
    pub(super) wake: Arc<EventFd>,
}

/// The answer to a client.
pub(super) struct Answer {
    pub(super) client: Key,
    pub(super) request: Request,
    pub(super) extents: Extents,
}

/// The thread that finds the extents of a file for all event loops. It ends when this is dropped
/// and the present question is answered.
#[derive(Debug)]
pub(crate) struct ExtentFinder {
    questions: Sender<Question>,
}

impl ExtentFinder {
    /// Starts the thread for a file.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated, or the thread cannot be started.
    pub(crate) fn of_file(file: &File) -> std::io::Result<Self> {
        let file = file.try_clone()?;
        Self::start(move |span| extents(&file, span))
    }

    /// Starts the thread, which calls `find` for each question.
    pub(super) fn start(
        mut find: impl FnMut(Span) -> Extents + Send + 'static,
    ) -> std::io::Result<Self> {
        let (questions, received) = channel::<Question>();
        std::thread::Builder::new().name("extents".into()).spawn(move || {
            for Question { client, request, span, answers, wake } in received {
                // It fails if the event loop has ended.
                let _ = answers.send(Answer { client, request, extents: find(span) });
                wake.signal();
            }
        })?;
        Ok(Self { questions })
    }

    /// Sends a question to the thread; returns it if the thread has ended.
    pub(super) fn ask(&self, question: Question) -> Result<(), Question> {
        self.questions.send(question).map_err(|unsent| unsent.0)
    }
}

/// Returns the extents of a range in order: one at least, one alone if that is enough, and possibly
/// not up to its end. Where the file system cannot tell, everything is allocated.
fn extents(file: &File, span: Span) -> Extents {
    let end = span.offset.saturating_add(u64::from(span.length));
    let mut extents = Vec::new();
    let mut at = span.offset;
    while at < end && extents.len() < if span.one { 1 } else { MOST } {
        let (until, flags) = extent(file, at, end).unwrap_or((end, ExtentFlags::empty()));
        let until = until.clamp(at + 1, end);
        // Both are inside of the span.
        extents.push((u32::try_from(until - at).unwrap_or(span.length), flags));
        at = until;
    }
    extents
}

/// Returns the end of the extent that contains `at`, or a place behind `end`, and its state.
fn extent(file: &File, at: u64, end: u64) -> Option<(u64, ExtentFlags)> {
    let hole = ExtentFlags::HOLE | ExtentFlags::ZERO;
    match seek(file, SeekFrom::Data(at)) {
        // Nothing but a hole follows.
        Err(Errno::NXIO) => Some((u64::MAX, hole)),
        Err(_) => None,
        Ok(data) if data > at => Some((data, hole)),
        Ok(_) => Some((data_end(file, at, end)?, ExtentFlags::empty())),
    }
}

/// Returns the end of the data at `at`, or a place behind `end`.
///
/// No call says where it should stop: `SEEK_HOLE` goes to the end of the data. File systems on
/// disks have few extents on the way, but tmpfs looks at each page. There, the pages of a range
/// that is short for its file are looked at one by one.
fn data_end(file: &File, at: u64, end: u64) -> Option<u64> {
    let length = || fstat(file).ok().and_then(|stat| u64::try_from(stat.st_size).ok());
    let is_short =
        || length().is_some_and(|len| (end - at) * PAGES_PER_CALL < len.saturating_sub(at));
    if !fstatfs(file).is_ok_and(|system| system.f_type == TMPFS) || !is_short() {
        return seek(file, SeekFrom::Hole(at)).ok();
    }
    let page = PAGE as u64;
    let mut next = (at / page + 1) * page;
    while next < end {
        match seek(file, SeekFrom::Data(next)) {
            Ok(data) if data == next => next += page,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(_) => return None,
        }
    }
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
    use std::os::unix::fs::FileExt;
    use std::time::Instant;

    const HOLE: ExtentFlags = ExtentFlags::HOLE.union(ExtentFlags::ZERO);
    const DATA: ExtentFlags = ExtentFlags::empty();

    fn span(offset: u64, length: u32) -> Span {
        Span { offset, length, one: false }
    }

    #[test]
    fn holes_and_data_alternate() {
        let dir = tempfile::tempdir().unwrap();
        let on_disk = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(dir.path().join("f"))
            .unwrap();
        for file in [on_disk, memory_file()] {
            file.set_len(4 << 20).unwrap();
            file.write_all_at(&[1; 65_536], 1 << 20).unwrap();
            let found = extents(&file, span(0, 4 << 20));
            assert_eq!(found, [(1 << 20, HOLE), (65_536, DATA), ((3 << 20) - 65_536, HOLE)]);
            let one = Span { one: true, ..span(0, 4 << 20) };
            assert_eq!(extents(&file, one), [(1 << 20, HOLE)]);
            assert_eq!(extents(&file, span((1 << 20) + 4096, 4096)), [(4096, DATA)]);
            assert_eq!(extents(&file, span((1 << 20) + 65_535, 2)), [(1, DATA), (1, HOLE)]);
            assert_eq!(extents(&file, span((4 << 20) - 1, 4096)), [(4096, HOLE)], "truncated");
        }
        let (pipe, _end) = std::io::pipe().unwrap();
        let pipe = std::os::fd::OwnedFd::from(pipe).into();
        assert_eq!(extents(&pipe, span(5, 100)), [(100, DATA)], "it cannot tell");
    }

    /// A file on tmpfs.
    fn memory_file() -> File {
        memfd_create(c"extents", MemfdFlags::CLOEXEC).unwrap().into()
    }

    /// Every range of some pages, in a file so large that its pages are looked at one by one.
    #[test]
    fn a_short_range_has_the_extents_of_a_long_one() {
        let file = memory_file();
        let pages = 16_u64;
        file.set_len(1 << 20).unwrap();
        let is_data = |page: u64| [0, 1, 4, 5, 6, 9, 12, 13, 14, 15].contains(&page);
        (0..pages).filter(|page| is_data(*page)).for_each(|page| {
            file.write_all_at(&[1], page * 4096 + 77).unwrap();
        });
        for from in (0..pages * 4096).step_by(1000) {
            for length in [1, 4095, 4096, 4097, 20_000] {
                let mut at = from;
                for (length, flags) in extents(&file, span(from, length)) {
                    let last = (at + u64::from(length) - 1) / 4096;
                    for page in at / 4096..=last {
                        assert_eq!(is_data(page), flags == DATA, "{from}+{length}: {page}");
                    }
                    at += u64::from(length);
                }
                assert_eq!(at, from + u64::from(length));
            }
        }
    }

    /// The time for a page of the file is compared with that of the system's own walk to the end of
    /// its data.
    #[test]
    fn a_short_range_costs_no_walk_to_the_end_of_the_data() {
        let file = memory_file();
        fallocate(&file, FallocateFlags::empty(), 0, 64 << 20).unwrap();
        (0..64).for_each(|at| file.write_all_at(&[1; 1 << 20], at << 20).unwrap());
        let time = |each: &dyn Fn()| {
            let start = Instant::now();
            (0..100).for_each(|_| each());
            start.elapsed()
        };
        let walk = time(&|| assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(64 << 20)));
        let page = time(&|| assert_eq!(extents(&file, span(0, 4096)), [(4096, DATA)]));
        assert!(page < walk / 4, "{page:?}, and {walk:?} to the end");
    }
}
