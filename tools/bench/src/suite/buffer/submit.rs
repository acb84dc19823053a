//! Submitting a read of 8 MiB to the kernel.

use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold::uring::{Completion, FileQueue, Fixed, Note, Options};
use pinfold::{Arena, Buffer, Domain, Source};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

const BYTES: usize = 8 << 20;
/// The number of blocks of that size in the file.
const BLOCKS: u64 = 8;

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    // In the current folder first, which is usually on a disk: temporary files may be in memory,
    // which is read by copying.
    let Some(file) =
        Scratch::create(Path::new(".")).or_else(|| Scratch::create(&std::env::temp_dir()))
    else {
        return Ok(Vec::new());
    };
    case(harness, "io-submit", harness.scale(64).max(8), &file)
}

/// Measures reads with `depth` of them in flight.
fn case(
    harness: &Harness<'_>,
    case: &'static str,
    depth: usize,
    file: &Scratch,
) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    // Each arena has the buffers of two subjects.
    let builder = || Arena::builder().size((2 * depth * BYTES) as u64);
    let (hugepages, plain) =
        (builder().build(&domain)?, builder().source(Source::Plain).build(&domain)?);
    let (huge, small) = ([hugepages.fixed()], [plain.fixed()]);
    let subjects: [(&'static str, &Arena, &[Fixed<'_>]); 4] = [
        ("pinfold", &hugepages, &huge),
        ("unregistered", &hugepages, &[]),
        ("pages-4k", &plain, &small),
        ("pages-4k-unreg.", &plain, &[]),
    ];
    let mut readers = Vec::new();
    for (name, arena, fixed) in subjects {
        let options = Options {
            depth: u32::try_from(depth).unwrap_or(1),
            fixed,
            one_thread: true,
            ..Options::default()
        };
        let queue: FileQueue<'_, Buffer> = FileQueue::new(file.open()?, &file.path, &options)?;
        if queue.notes().iter().any(|note| !matches!(note, Note::NotDeferred { .. })) {
            // Without O_DIRECT, a ring or the right to pin there is nothing to compare;
            // `pinfold doctor` shows the reason.
            return Ok(Vec::new());
        }
        let idle = (0..depth).map(|_| arena.alloc_zeroed(BYTES)).collect::<Result<_, _>>()?;
        readers.push((name, Reader { queue, idle, done: Vec::with_capacity(depth) }));
    }
    let times = harness.scale(64).max(8) + depth;
    let subject = |(name, reader)| subject(name, case, reader, times);
    harness.interleave(readers.into_iter().map(subject).collect())
}

fn subject<'m>(
    name: &'static str,
    case: &'static str,
    mut reader: Reader<'m>,
    times: usize,
) -> Subject<'m, BenchError> {
    Subject::new(name, move |out: &mut Samples| {
        out.cost(case, reader.reads(times)?, times);
        Ok(())
    })
}

/// A queue and its buffers.
struct Reader<'m> {
    queue: FileQueue<'m, Buffer>,
    idle: Vec<Buffer>,
    done: Vec<Completion<Buffer>>,
}

impl Reader<'_> {
    /// Returns what it costs to submit `times` reads, one per call, with as many in flight as there
    /// are buffers.
    fn reads(&mut self, times: usize) -> Result<Cost, BenchError> {
        let mut cost = Cost::default();
        for i in 0..times as u64 {
            if self.idle.is_empty() {
                self.wait(1)?;
            }
            let Some(buffer) = self.idle.pop() else { break };
            let offset = i % BLOCKS * BYTES as u64;
            self.queue.read(buffer, offset, BYTES, i).map_err(|rejected| rejected.error)?;
            let (submission, submitted) = Cost::of(|| self.queue.submit());
            submitted?;
            cost = cost + submission;
        }
        self.wait(usize::MAX)?;
        Ok(cost)
    }

    fn wait(&mut self, min: usize) -> Result<(), BenchError> {
        self.queue.wait(min, &mut self.done)?;
        for completed in self.done.drain(..) {
            completed.result?;
            self.idle.push(completed.buffer);
        }
        Ok(())
    }
}

/// A file of 64 MiB without a name, so that nothing remains of it however the program ends.
struct Scratch {
    path: PathBuf,
    file: File,
}

impl Scratch {
    /// Creates the file, or returns `None` where that fails.
    fn create(folder: &Path) -> Option<Self> {
        let path = folder.join(format!(".pinfold-bench-{}", std::process::id()));
        let mut file =
            OpenOptions::new().read(true).write(true).create_new(true).open(&path).ok()?;
        std::fs::remove_file(&path).ok()?;
        let content: Vec<u8> = (0..BYTES).map(|i| (i % 251).to_le_bytes()[0]).collect();
        for _ in 0..BLOCKS {
            file.write_all(&content).ok()?;
        }
        file.sync_all().ok()?;
        Some(Self { path, file })
    }

    fn open(&self) -> Result<File, BenchError> {
        self.file.try_clone().map_err(BenchError::Scratch)
    }
}
