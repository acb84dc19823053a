//! Reads a trace: from lines to devices with mappings.

use super::assign::{Assigner, Call, Context};
use super::build::{Builder, SyntheticMemory, UNMAP_BYTES};
use super::error::TraceError;
use super::parse::{Action, Damage, Event, Line};
use super::source::{self, Lines, Piece};
use super::trace::{Device, Summary, Trace};
use std::collections::{HashMap, HashSet};
use std::io::Read;

/// The most devices in a trace.
const MAX_DEVICES: usize = 4096;
/// The most damaged lines that are remembered.
const REMEMBERED: usize = 5;
/// The number of lines between two reports of progress.
const REPORT_EVERY: u64 = 1 << 14;
/// The number of maps and unmaps read by default.
pub const MAX_OPERATIONS: u64 = 10_000_000;
/// The most memory of a trace by default, read and replayed by one policy.
pub const MAX_BYTES: u64 = 4 << 30;

/// The limits of reading a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The most maps and unmaps: reading ends there.
    pub operations: u64,
    /// The most memory that they take, read and replayed by one policy at a time, beside the I/O
    /// page tables: more is refused. An estimate from above: 160 bytes for a map, 100 for each run
    /// of its memory and of its addresses, 40 for an unmap, and while it is mapped 400 more, and 16
    /// for each segment of a scatter list.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { operations: MAX_OPERATIONS, bytes: MAX_BYTES }
    }
}

impl Trace {
    /// Reads a trace from its text, which may be compressed by gzip or zstd, within `limits`. Calls
    /// `keep_going` with the number of lines now and then, which returns whether to go on.
    ///
    /// Takes time in proportion to the text, and memory for the operations and the mappings that
    /// are live. Lines that cannot be read are counted ([`Summary::damaged`]); input that ends with
    /// an error is used up to there ([`Summary::ended_early`]).
    ///
    /// # Errors
    /// [`TraceError::Read`] if nothing can be read, [`TraceError::Format`], [`TraceError::Empty`],
    /// [`TraceError::NoEvents`], [`TraceError::TooManyDevices`], [`TraceError::Memory`],
    /// [`TraceError::Stopped`] if `keep_going` returned false.
    pub fn read(
        input: impl Read,
        limits: &Limits,
        keep_going: &dyn Fn(u64) -> bool,
    ) -> Result<Self, TraceError> {
        let mut lines = Lines::new(source::open(input)?);
        let mut reader = Reader { limits: *limits, ..Reader::default() };
        loop {
            match lines.next() {
                Ok(Piece::End) => break,
                Ok(Piece::Line(line)) => {
                    reader.line(Line::parse(&String::from_utf8_lossy(line)))?
                }
                Ok(Piece::TooLong) => reader.line(Line::Damaged(Damage::TooLong))?,
                Err(error) if reader.summary.lines == 0 => return Err(TraceError::Read(error)),
                Err(error) => {
                    reader.summary.ended_early = Some(error.to_string());
                    break;
                }
            }
            if reader.summary.lines.is_multiple_of(REPORT_EVERY)
                && !keep_going(reader.summary.lines)
            {
                return Err(TraceError::Stopped);
            }
            if reader.summary.limited {
                break;
            }
        }
        reader.finish()
    }
}

fn device_live(devices: &[Builder]) -> u64 {
    devices.iter().map(Builder::live_mappings).sum()
}

/// The state between two lines.
#[derive(Default)]
struct Reader {
    limits: Limits,
    operations: u64,
    /// The memory of the operations and the live mappings, and the most that these have taken.
    kept: u64,
    live: u64,
    live_peak: u64,
    summary: Summary,
    devices: Vec<Builder>,
    by_name: HashMap<String, usize>,
    assigner: Assigner,
    synthetic: SyntheticMemory,
    cpus: HashSet<u32>,
    /// The times of the first event, and of the latest.
    first_ns: Option<u64>,
    latest_ns: u64,
    /// Whether an event had no time in seconds.
    timeless: bool,
    /// The calls of the present event.
    calls: Vec<Call>,
}

impl Reader {
    fn line(&mut self, line: Line<'_>) -> Result<(), TraceError> {
        let summary = &mut self.summary;
        summary.lines += 1;
        match line {
            Line::Header => {}
            Line::Lost { events } => {
                if summary.losses == 0 {
                    summary.first_loss = summary.lines;
                }
                summary.losses += 1;
                summary.lost_events = summary.lost_events.saturating_add(events.unwrap_or(0));
            }
            Line::Other => summary.other_events += 1,
            Line::Damaged(damage) => {
                summary.damaged += 1;
                if summary.first_damaged.len() < REMEMBERED {
                    summary.first_damaged.push((summary.lines, damage));
                }
            }
            Line::Event(event) => self.event(&event)?,
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<(), TraceError> {
        // A kernel has a few thousand at most; a damaged number must not take memory.
        if self.cpus.len() < 1 << 16 {
            self.cpus.insert(event.cpu);
        }
        let time_ns = self.time(event);
        let context = (event.cpu, event.pid);
        let device = match event.action {
            Action::IommuMap { iova, memory, size } => {
                self.call(context, Call { iova, size, memory: Some(memory), done: size });
                return Ok(());
            }
            Action::IommuUnmap { iova, size, unmapped } => {
                self.call(context, Call { iova, size, memory: None, done: unmapped });
                return Ok(());
            }
            Action::Attach { device } | Action::Fault { device } => {
                self.summary.iommu_events += 1;
                device
            }
            Action::Map { device, .. }
            | Action::MapList { device, .. }
            | Action::Unmap { device, .. }
            | Action::UnmapList { device, .. }
            | Action::Failed { device } => {
                self.summary.dma_events += 1;
                device
            }
        };
        let number = self.device(device)?;
        let Some(device) = self.devices.get_mut(number) else { return Ok(()) };
        match event.action {
            Action::Attach { .. } => device.counts().attached += 1,
            Action::Fault { .. } => device.counts().faults += 1,
            Action::Failed { .. } => device.counts().failed += 1,
            Action::Unmap { .. } | Action::UnmapList { .. } => {
                let Some((hull, bytes)) = device.unmap(&event.action, time_ns) else {
                    return Ok(());
                };
                self.operations += 1;
                self.live = self.live.saturating_sub(bytes);
                self.kept += UNMAP_BYTES;
                self.assigner.take(context, false, hull, &mut self.calls);
                self.calls.iter().for_each(|call| device.count_unmap(*call));
                if self.calls.is_empty() {
                    self.assigner.expect(context, number, hull);
                }
            }
            _ => {
                let Some(hull) = Builder::hull_of(&event.action) else { return Ok(()) };
                self.assigner.take(context, true, hull, &mut self.calls);
                let taken =
                    device.map(&event.action, time_ns, &mut self.calls, &mut self.synthetic);
                self.kept += taken.kept;
                self.live += taken.live;
                self.live_peak = self.live_peak.max(self.live);
                self.operations += 1;
            }
        }
        // The list of a single line is bounded by its length.
        if self.kept + self.live_peak > self.limits.bytes {
            let (line, operations, limit) =
                (self.summary.lines, self.operations, self.limits.bytes);
            return Err(TraceError::Memory {
                line,
                operations,
                live: device_live(&self.devices),
                limit,
            });
        }
        self.summary.limited = self.operations >= self.limits.operations;
        Ok(())
    }

    fn call(&mut self, context: Context, call: Call) {
        self.summary.iommu_events += 1;
        if let Some(device) =
            self.assigner.add(context, call).and_then(|at| self.devices.get_mut(at))
        {
            device.count_unmap(call);
        }
    }

    /// Returns the time since the first event.
    fn time(&mut self, event: &Event<'_>) -> u64 {
        let Some(now) = event.time_ns else {
            self.timeless = true;
            return 0;
        };
        let first = *self.first_ns.get_or_insert(now);
        if now < self.latest_ns {
            self.summary.out_of_order += 1;
        }
        self.latest_ns = self.latest_ns.max(now);
        now.saturating_sub(first)
    }

    fn device(&mut self, name: &str) -> Result<usize, TraceError> {
        if let Some(number) = self.by_name.get(name) {
            return Ok(*number);
        }
        let number = self.devices.len();
        if number == MAX_DEVICES {
            return Err(TraceError::TooManyDevices {
                line: self.summary.lines,
                limit: MAX_DEVICES,
            });
        }
        self.devices.push(Builder::new(name));
        self.by_name.insert(name.to_owned(), number);
        Ok(number)
    }

    fn finish(self) -> Result<Trace, TraceError> {
        let Self { mut summary, devices, assigner, cpus, first_ns, latest_ns, timeless, .. } = self;
        let devices: Vec<Device> = devices.into_iter().filter_map(Builder::finish).collect();
        if summary.lines == 0 {
            return Err(TraceError::Empty);
        }
        if devices.is_empty() {
            return Err(TraceError::NoEvents {
                lines: summary.lines,
                damaged: summary.damaged,
                iommu: summary.iommu_events,
                first: summary
                    .first_damaged
                    .first()
                    .map(|(line, damage)| format!("line {line}, {damage}")),
            });
        }
        summary.iommu_unassigned = assigner.finish();
        summary.cpus = cpus.len() as u64;
        summary.duration_ns = first_ns.filter(|_| !timeless).map(|first| latest_ns - first);
        Ok(Trace { devices, summary })
    }
}
