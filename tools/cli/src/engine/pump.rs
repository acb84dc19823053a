//! Copies all bytes of one target to another, except holes where the destination has them too: the
//! ranges of the source that hold data, the requests that move them, and the pump that keeps these
//! in flight. Holes are skipped, or written as zeroes where the destination may hold other data.
//! Each buffer cycles through `idle → reading → writing → idle`; all buffers are used concurrently,
//! and the targets complete in any order.

use super::worker::{EngineError, RequestStats, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::target::{
    Completion, DataBuffer, Io, IoDirection, Request, SubmitError, Target,
};
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::ops::Range;
use std::time::{Duration, Instant};

/// The unit of ranges: the block of most file systems, and a multiple of every target's.
const GRAIN: u64 = 4096;
/// The most ranges that are distinguished: beyond that, short holes become data.
const MAX_RANGES: usize = 1 << 16;

/// The parts of a source that hold data, ascending and apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Ranges {
    data: Vec<Range<u64>>,
    total: u64,
}

impl Ranges {
    /// Creates the ranges of a source without holes.
    pub(crate) fn whole(total: u64) -> Self {
        let data = if total == 0 { Vec::new() } else { std::iter::once(0..total).collect() };
        Self { data, total }
    }

    /// Asks the file system for the data of the first `total` bytes of `file` (SEEK_DATA,
    /// SEEK_HOLE; Linux 3.1). Where it does not know, all is data.
    pub(crate) fn of_file(file: &File, total: u64) -> Self {
        let data = |at| seek(file, SeekFrom::Data(at));
        let hole = |at| seek(file, SeekFrom::Hole(at));
        let extents = std::iter::successors(Some(Ok(0..0)), |last: &Result<Range<u64>, _>| {
            let at = last.as_ref().ok()?.end;
            match data(at) {
                Ok(start) if start < total => Some(hole(start).map(|end| start..end.min(total))),
                // No data is left.
                Ok(_) | Err(rustix::io::Errno::NXIO) => None,
                Err(errno) => Some(Err(errno)),
            }
        });
        // `collect` stops at the first error.
        Self::of_extents(extents.skip(1), total, MAX_RANGES).unwrap_or_else(|_| Self::whole(total))
    }

    /// Merges extents to at most `most` ranges of whole grains, which become larger as long as
    /// there are more.
    fn of_extents<E>(
        extents: impl Iterator<Item = Result<Range<u64>, E>>,
        total: u64,
        most: usize,
    ) -> Result<Self, E> {
        let (mut data, mut grain): (Vec<Range<u64>>, _) = (Vec::new(), GRAIN);
        for extent in extents {
            append(&mut data, extent?, grain, total);
            while data.len() > most {
                grain *= 2;
                let finer = std::mem::take(&mut data);
                finer.into_iter().for_each(|range| append(&mut data, range, grain, total));
            }
        }
        Ok(Self { data, total })
    }

    /// Returns the ranges with data.
    pub(crate) fn data(&self) -> &[Range<u64>] {
        &self.data
    }

    /// Returns all bytes, with the holes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bytes of the ranges with data.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns the requests of at most `block` bytes that move the data, and with `holes` those
    /// that write the holes.
    pub(crate) fn pieces(&self, block: usize, holes: bool) -> impl Iterator<Item = Piece> + '_ {
        let gaps = std::iter::once(0).chain(self.data.iter().map(|range| range.end));
        let starts = self.data.iter().map(|range| range.start).chain(std::iter::once(self.total));
        let gaps =
            gaps.zip(starts).map(move |(from, to)| (if holes { from..to } else { to..to }, true));
        let data = self
            .data
            .iter()
            .map(|range| (range.clone(), false))
            .chain(std::iter::once((0..0, false)));
        gaps.zip(data).flat_map(|(gap, data)| [gap, data]).flat_map(move |(range, is_hole)| {
            let step = (block as u64).max(1);
            let starts = std::iter::successors(Some(range.start), move |at| at.checked_add(step));
            starts.take_while(move |at| *at < range.end).map(move |offset| Piece {
                offset,
                len: usize::try_from(range.end - offset).unwrap_or(usize::MAX).min(block),
                is_hole,
            })
        })
    }
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// The first byte.
    pub(crate) offset: u64,
    /// The number of bytes.
    pub(crate) len: usize,
    /// Whether it is zeroes that are not read.
    pub(crate) is_hole: bool,
}

/// Appends a range, extended to whole grains within `total`, and merges it with the last one.
fn append(data: &mut Vec<Range<u64>>, range: Range<u64>, grain: u64, total: u64) {
    let start = range.start / grain * grain;
    let end = range.end.checked_next_multiple_of(grain).unwrap_or(total).min(total);
    match data.last_mut() {
        Some(last) if start <= last.end => last.end = last.end.max(end),
        _ => data.push(start..end),
    }
}

/// The bytes to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// The number of bytes, from offset 0 of both targets.
    pub(crate) total: u64,
    /// Bytes of one request.
    pub(crate) block: usize,
}

/// The bytes to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer<'r> {
    /// The data and the holes of the source.
    pub(crate) ranges: &'r Ranges,
    /// Bytes of one request.
    pub(crate) block: usize,
    /// Whether holes are written, as zeroes that are not read: the destination may hold something
    /// else there.
    pub(crate) write_holes: bool,
}

impl Transfer<'_> {
    /// Returns how many bytes are written.
    pub(crate) fn bytes(&self) -> u64 {
        if self.write_holes { self.ranges.total() } else { self.ranges.data_bytes() }
    }
}

/// The statistics of a pump.
#[derive(Debug)]
pub(crate) struct PumpStats {
    /// The number of bytes written.
    pub(crate) bytes: u64,
    /// From the first request to the end of the flush.
    pub(crate) elapsed: Duration,
    /// The part of it that the flush took.
    pub(crate) flush: Duration,
    /// The reads from the source.
    pub(crate) reads: RequestStats,
    /// The writes to the destination.
    pub(crate) writes: RequestStats,
}

struct Pump<'t, 'r, B> {
    source: Worker<'t, B>,
    destination: Worker<'t, B>,
    idle: Vec<B>,
    /// Completed requests that have not been processed.
    read: Vec<Completion<B>>,
    wrote: Vec<Completion<B>>,
    /// The pieces that have not been started.
    pieces: Box<dyn Iterator<Item = Piece> + 'r>,
    transfer: Transfer<'r>,
    written: u64,
}

/// Moves the bytes of `transfer` and flushes `to`; returns what it did, also where it failed. The
/// buffers, each of `transfer.block` bytes or more, are in `buffers` again when this returns,
/// whether it succeeds or not, except those that had to be quarantined.
pub(crate) fn pump<B: DataBuffer>(
    from: &mut dyn Target<B>,
    to: &mut dyn Target<B>,
    transfer: Transfer<'_>,
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> (PumpStats, Result<(), EngineError>) {
    let began = Instant::now();
    let depth = buffers.len();
    let mut pump = Pump {
        source: Worker::new(from, depth),
        destination: Worker::new(to, depth),
        idle: std::mem::take(buffers),
        read: Vec::with_capacity(depth),
        wrote: Vec::with_capacity(depth),
        pieces: Box::new(transfer.ranges.pieces(transfer.block, transfer.write_holes)),
        transfer,
        written: 0,
    };
    let result = pump.run(progress, interrupt);
    buffers.append(&mut pump.idle);
    buffers.extend(
        pump.read.drain(..).chain(pump.wrote.drain(..)).filter_map(|completion| completion.buffer),
    );
    pump.source.drain(buffers);
    pump.destination.drain(buffers);
    let flush = result.and_then(|()| {
        pump.destination.sync(interrupt).map_err(|error| EngineError::of_flush(error, interrupt))
    });
    let stats = PumpStats {
        bytes: pump.written,
        elapsed: began.elapsed(),
        flush: *flush.as_ref().unwrap_or(&Duration::ZERO),
        reads: pump.source.stats().reads.clone(),
        writes: pump.destination.stats().writes.clone(),
    };
    (stats, flush.map(drop))
}

impl<B: DataBuffer> Pump<'_, '_, B> {
    fn run(&mut self, progress: &Progress, interrupt: &Interrupt) -> Result<(), EngineError> {
        while self.written < self.transfer.bytes() {
            if interrupt.is_raised() {
                return Err(EngineError::Interrupted);
            }
            self.start_pieces()?;
            let mut completed = self.destination.collect(false, |write| self.wrote.push(write))?;
            completed += self.source.collect(false, |read| self.read.push(read))?;
            if completed == 0 {
                // Both targets make progress by themselves; waiting for one delays the other by one
                // request at most.
                if self.destination.in_flight() > 0 {
                    self.destination.collect(true, |write| self.wrote.push(write))?;
                } else if self.source.in_flight() > 0 {
                    self.source.collect(true, |read| self.read.push(read))?;
                } else {
                    return Err(EngineError::NoBuffers);
                }
            }
            self.process(progress)?;
        }
        Ok(())
    }

    /// Reads into all idle buffers, as one batch, or writes a hole from them.
    fn start_pieces(&mut self) -> Result<(), EngineError> {
        let mut reads = Vec::new();
        let mut result = Ok(());
        while result.is_ok() && !self.idle.is_empty() {
            let Some(Piece { offset, len, is_hole }) = self.pieces.next() else { break };
            let Some(buffer) = self.idle.pop() else { break };
            if is_hole {
                result = self.write_hole(offset, len, buffer);
            } else {
                reads.push(Request { io: Io::new(IoDirection::Read, offset, len), buffer });
            }
        }
        if let Err(error) = result {
            self.idle.extend(reads.into_iter().map(|read| read.buffer));
            return Err(error);
        }
        self.source.submit_many(reads).map_err(|rejected| {
            self.idle.extend(rejected.buffers);
            (*rejected.error).into()
        })
    }

    fn write_hole(&mut self, offset: u64, len: usize, mut buffer: B) -> Result<(), EngineError> {
        let padded = len.next_multiple_of(self.destination.info().block);
        if let Err(error) = buffer.zero(0, padded) {
            self.idle.push(buffer);
            return Err(error.into());
        }
        let submitted = self.destination.submit_io(Io::zeroes(offset, len), buffer);
        submitted.map_err(|rejected| self.rejected(rejected))
    }

    /// Handles all completions, so that no buffer is lost, and returns the first error.
    fn process(&mut self, progress: &Progress) -> Result<(), EngineError> {
        let mut first = Ok(());
        while let Some(write) = self.wrote.pop() {
            self.idle.extend(write.buffer);
            match write.result {
                Ok(len) => {
                    self.written += len as u64;
                    progress.add(len as u64);
                }
                Err(error) => first = first.and(Err(error.into())),
            }
        }
        while let Some(read) = self.read.pop() {
            let written = self.write(read, first.is_ok());
            first = first.and(written);
        }
        first
    }

    /// Writes the read data, unless the pump has failed.
    fn write(&mut self, read: Completion<B>, continues: bool) -> Result<(), EngineError> {
        let Completion { io, buffer, result } = read;
        let Some(mut buffer) = buffer else { return result.map(|_| ()).map_err(Into::into) };
        let complete = match result {
            Ok(got) if got < io.len => Err(EngineError::SourceEnded {
                name: self.source.info().name.clone(),
                at: io.offset + got as u64,
                expected: self.transfer.ranges.total(),
            }),
            other => other.map_err(Into::into),
        };
        let padding = io.len.next_multiple_of(self.destination.info().block) - io.len;
        let ready = complete.and_then(|_| Ok(buffer.zero(io.len, padding)?));
        if !continues || ready.is_err() {
            self.idle.push(buffer);
            return ready;
        }
        let submitted = self.destination.submit(IoDirection::Write, io.offset, io.len, buffer);
        submitted.map_err(|rejected| self.rejected(rejected))
    }

    fn rejected(&mut self, rejected: SubmitError<B>) -> EngineError {
        self.idle.extend(rejected.buffer);
        rejected.error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::targets::fake::{Fake, Fault};
    use std::os::unix::fs::FileExt;

    fn data(len: usize) -> Vec<u8> {
        (0u8..=250).cycle().take(len).collect()
    }

    fn buffers(depth: usize, block: usize) -> Vec<Vec<u8>> {
        vec![vec![0xcc; block.next_multiple_of(4096)]; depth]
    }

    fn execute(
        from: &mut Fake,
        to: &mut Fake,
        Plan { total, block }: Plan,
        buffers: &mut Vec<Vec<u8>>,
    ) -> Result<PumpStats, EngineError> {
        let transfer = Transfer { ranges: &Ranges::whole(total), block, write_holes: false };
        let (stats, result) =
            pump(from, to, transfer, buffers, &Progress::hidden(), &Interrupt::default());
        result.map(|()| stats)
    }

    #[test]
    fn holes_are_skipped_or_written_as_zeroes() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(300_000).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 5000], 100_000).unwrap();
        let ranges = Ranges::of_file(&file, 300_000);
        let source = data(300_000);
        if ranges == Ranges::whole(300_000) {
            return; // a file system without holes
        }
        // The data that the source holds there is not read.
        let data = usize::try_from(ranges.data()[0].start).unwrap()
            ..usize::try_from(ranges.data()[0].end).unwrap();
        for write_holes in [false, true] {
            let mut from = Fake::new(source.clone(), 1);
            let mut to = Fake::new(vec![0xee; 300_032], 512);
            let transfer = Transfer { ranges: &ranges, block: 4096, write_holes };
            let mut buffers = buffers(3, 4096);
            let (stats, result) = pump(
                &mut from,
                &mut to,
                transfer,
                &mut buffers,
                &Progress::hidden(),
                &Interrupt::default(),
            );
            result.unwrap();
            assert_eq!((stats.bytes, buffers.len()), (transfer.bytes(), 3));
            assert_eq!(stats.reads.bytes, ranges.data_bytes());
            assert!(to.data[data.clone()] == source[data.clone()]);
            let hole = if write_holes { 0 } else { 0xee };
            assert!(
                to.data[..data.start]
                    .iter()
                    .chain(&to.data[data.end..300_000])
                    .all(|byte| *byte == hole)
            );
        }
    }

    #[test]
    fn every_size_is_copied_in_any_order_of_completion() {
        for len in [0, 1, 511, 512, 513, 4095, 4096, 4097, 65_536, 100_003] {
            for (block, depth) in [(512, 1), (512, 7), (4096, 3), (65_536, 64)] {
                let mut from = Fake::new(data(len), 1);
                let mut to = Fake::new(Vec::new(), 512).grows();
                let mut buffers = buffers(depth, block);
                let plan = Plan { total: len as u64, block };
                let stats = execute(&mut from, &mut to, plan, &mut buffers).unwrap();
                assert_eq!(stats.bytes, len as u64);
                assert_eq!(stats.writes.requests, len.div_ceil(block) as u64);
                assert_eq!(stats.reads.queueing.summary(&[]).count, stats.reads.requests);
                assert_eq!(to.data.len(), len.next_multiple_of(512));
                assert_eq!(to.data[..len], from.data[..]);
                assert!(to.data[len..].iter().all(|&byte| byte == 0));
                assert!(to.synced && buffers.len() == depth);
                assert!(from.peak <= depth && to.peak <= depth);
            }
        }
    }

    #[test]
    fn a_truncated_source_is_reported_with_its_end() {
        let mut from = Fake::new(data(100_000), 1);
        from.shrink = Some((5, 6000));
        let mut to = Fake::new(Vec::new(), 512).grows();
        let mut buffers = buffers(4, 4096);
        let error = execute(&mut from, &mut to, Plan { total: 100_000, block: 4096 }, &mut buffers)
            .unwrap_err();
        assert!(
            matches!(error, EngineError::SourceEnded { expected: 100_000, at, .. } if at >= 6000),
            "{error:?}"
        );
        assert_eq!((buffers.len(), to.synced), (4, false));
    }

    #[test]
    fn a_failure_anywhere_returns_all_buffers() {
        for fault in [Fault::Fail, Fault::Reject, Fault::Quarantine] {
            for at in [1, 2, 9, 20] {
                for side in 0..2 {
                    let mut from = Fake::new(data(100_000), 1);
                    let mut to = Fake::new(Vec::new(), 512).grows();
                    [&mut from, &mut to][side].fault = Some((at, fault));
                    let mut buffers = buffers(4, 4096);
                    let plan = Plan { total: 100_000, block: 4096 };
                    let error = execute(&mut from, &mut to, plan, &mut buffers).unwrap_err();
                    assert!(
                        matches!(error, EngineError::Target(_)),
                        "{fault:?} {at} {side}: {error:?}"
                    );
                    let lost = usize::from(fault == Fault::Quarantine);
                    assert_eq!(buffers.len(), 4 - lost, "{fault:?} {at} {side}");
                    assert!(from.in_flight.is_empty() && to.in_flight.is_empty() && !to.synced);
                }
            }
        }
    }

    #[test]
    fn an_interrupt_returns_all_buffers() {
        let mut from = Fake::new(data(100_000), 1);
        let mut to = Fake::new(Vec::new(), 512).grows();
        let mut buffers = buffers(4, 4096);
        let interrupt = Interrupt::default();
        interrupt.raise();
        let transfer =
            Transfer { ranges: &Ranges::whole(100_000), block: 4096, write_holes: false };
        let (_, result) =
            pump(&mut from, &mut to, transfer, &mut buffers, &Progress::hidden(), &interrupt);
        let error = result.unwrap_err();
        assert!(matches!(error, EngineError::Interrupted));
        assert_eq!((buffers.len(), to.synced), (4, false));
    }

    #[test]
    fn a_pump_without_buffers_fails_instead_of_hanging() {
        let mut from = Fake::new(data(10), 1);
        let mut to = Fake::new(Vec::new(), 512).grows();
        let error = execute(&mut from, &mut to, Plan { total: 10, block: 512 }, &mut Vec::new())
            .unwrap_err();
        assert!(matches!(error, EngineError::NoBuffers));
    }

    fn of(extents: &[Range<u64>], total: u64, most: usize) -> Ranges {
        let extents = extents.iter().map(|range| Ok::<_, ()>(range.clone()));
        Ranges::of_extents(extents, total, most).unwrap()
    }

    #[test]
    fn the_data_of_a_file_is_found() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        assert_eq!(Ranges::of_file(&file, 0), Ranges::whole(0));
        file.set_len(10 << 20).unwrap();
        file.write_all_at(b"data", (4 << 20) + 5).unwrap();
        let ranges = Ranges::of_file(&file, 10 << 20);
        // A file system without holes has one range.
        assert!(ranges.data_bytes() == 4096 || ranges == Ranges::whole(10 << 20), "{ranges:?}");
        if ranges.data_bytes() == 4096 {
            let [data] = ranges.data() else { panic!("{ranges:?}") };
            assert_eq!((data.start, data.end), (4 << 20, (4 << 20) + 4096));
            assert_eq!(Ranges::of_file(&file, (4 << 20) + 9).data_bytes(), 9);
            assert_eq!(Ranges::of_file(&file, 4 << 20).data_bytes(), 0);
        }
        // A pipe cannot say.
        let (reader, _writer) = std::io::pipe().unwrap();
        let reader: std::os::fd::OwnedFd = reader.into();
        assert_eq!(Ranges::of_file(&reader.into(), 77), Ranges::whole(77));
    }

    #[test]
    fn a_file_in_very_many_parts_has_few_ranges() {
        let extents: Vec<_> = (0..1000u64).map(|part| part * 8192..part * 8192 + 1).collect();
        let ranges = of(&extents, 1000 * 8192, 10);
        assert!(ranges.data().len() <= 10, "{}", ranges.data().len());
        assert_eq!(of(&extents, 1000 * 8192, 1000).data_bytes(), 1000 * 4096);
    }

    #[test]
    fn pieces_cover_the_data_once_and_nothing_else() {
        let mut random = Random::new(1);
        for _ in 0..300 {
            let mut below = |limit: u64| random.below(limit);
            let (block, most) = (
                512 * (1 + usize::try_from(below(100)).unwrap()),
                1 + usize::try_from(below(8)).unwrap(),
            );
            let mut at = 0;
            let extents: Vec<_> = (0..below(12))
                .map(|_| {
                    let start = at + below(40_000);
                    at = start + 1 + below(40_000);
                    start..at
                })
                .collect();
            let total = at + below(10_000);
            let ranges = of(&extents, total, most);
            assert!(ranges.data().len() <= most);
            let mut kinds = vec![None; usize::try_from(total).unwrap()];
            for Piece { offset, len, is_hole } in ranges.pieces(block, true) {
                assert!((1..=block).contains(&len) && offset % 512 == 0);
                for kind in &mut kinds[usize::try_from(offset).unwrap()..][..len] {
                    assert_eq!(kind.replace(is_hole), None, "twice");
                }
            }
            assert!(kinds.iter().all(Option::is_some));
            for Range { start, end } in extents {
                let extent = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
                assert!(kinds[extent].iter().all(|kind| *kind == Some(false)));
            }
            let data: Vec<_> = ranges.pieces(block, true).filter(|piece| !piece.is_hole).collect();
            assert_eq!(data.iter().map(|piece| piece.len as u64).sum::<u64>(), ranges.data_bytes());
            assert_eq!(ranges.pieces(block, false).collect::<Vec<_>>(), data);
        }
    }
}
