//! Part of what is mapped is unmapped and given back, and new memory gets the same addresses.

use super::{PAGE, Writes};
use crate::pages::{Pages, memory_file};
use crate::report::Report;
use pinfold::memory::Reclaim;
use pinfold::{Domain, FromDevice, Mapping, MappingPolicy, OwnedMemory, OwnedPiece};
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;

const BUFFER: usize = 2 << 20;
const BUFFERS: usize = 16;
/// The buffers that are given back.
const RETURNED: Range<usize> = 8..12;
const OLD: u8 = 0x11;
const NEW: u8 = 0x22;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    report.section("there, in a model of such a table over real pages");
    there(report)?;
    report.section("here");
    here(report)
}

/// Returns the address of `BUFFERS` buffers where nothing is mapped.
fn vacant() -> Result<usize, Box<dyn Error>> {
    Ok(Pages::aligned(BUFFERS * BUFFER, BUFFER)?.addr())
}

/// A table that removes whole entries only, and reports what it removed rather than an error; its
/// entries pin the pages that they were made for.
#[derive(Default)]
struct WholeEntries(BTreeMap<usize, Pages>);

impl WholeEntries {
    /// Returns whether the entry was made.
    fn map(&mut self, addr: usize, pinned: Pages) -> bool {
        let before = self.0.range(..addr + pinned.len()).next_back();
        let vacant = before.is_none_or(|(start, entry)| start + entry.len() <= addr);
        if vacant {
            self.0.insert(addr, pinned);
        }
        vacant
    }

    /// Returns how many bytes were unmapped.
    fn unmap(&mut self, addr: usize, len: usize) -> usize {
        let whole = self.0.get(&addr).is_some_and(|entry| entry.len() == len);
        if whole { self.0.remove(&addr).map_or(0, |entry| entry.len()) } else { 0 }
    }

    /// Has the device fill a range. Returns how many bytes arrived somewhere.
    fn fill(&mut self, addr: usize, len: usize, value: u8) -> usize {
        let Some((start, entry)) = self.0.range_mut(..=addr).next_back() else { return 0 };
        let at = addr - start;
        let Some(bytes) = entry.bytes().get_mut(at..at + len) else { return 0 };
        bytes.fill(value);
        len
    }
}

fn there(report: &mut Report) -> Result<(), Box<dyn Error>> {
    let start = vacant()?;
    let addr = |number: usize| start + number * BUFFER;
    let file = memory_file((BUFFERS * BUFFER) as u64)?;
    let mut buffers = (0..BUFFERS)
        .map(|number| Pages::of_file(addr(number), BUFFER, &file, (number * BUFFER) as u64))
        .collect::<Result<Vec<_>, _>>()?;
    let mut table = WholeEntries::default();
    table.map(start, Pages::of_file(0, BUFFERS * BUFFER, &file, 0)?);

    // Unmapped as far as the program can tell, and given back.
    let (mut unmapped, mut refused, mut written, mut seen) = (0, 0, 0, 0);
    for number in RETURNED {
        unmapped += table.unmap(addr(number), BUFFER);
    }
    drop(buffers.drain(RETURNED));
    // New memory at the same addresses. The map is refused, since an entry is there; the program
    // takes that for success.
    for number in RETURNED {
        let mut fresh = Pages::at(addr(number), BUFFER)?;
        let pinned = Pages::new(BUFFER)?;
        refused += u64::from(!table.map(addr(number), pinned));
        written += table.fill(addr(number), BUFFER, NEW);
        seen += fresh.bytes().iter().filter(|byte| **byte == NEW).count();
    }
    report.figure("bytes of one mapping", BUFFERS * BUFFER, "");
    report.figure("bytes to be unmapped in it", RETURNED.len() * BUFFER, "");
    report.figure("bytes that were unmapped, without an error", unmapped, "");
    report.figure("maps of new memory there, refused and ignored", refused, "");
    report.figure("bytes that the device wrote for the new memory", written, "");
    report.figure("of these in the new memory", seen, "");
    Ok(())
}

/// A buffer at an address of the program's choice, mapped for the device to write.
struct Buffer {
    memory: OwnedMemory,
    mapping: Mapping<OwnedPiece, FromDevice>,
}

impl Buffer {
    fn map(addr: usize, domain: &Domain) -> Result<Self, Box<dyn Error>> {
        let memory = Pages::at(addr, BUFFER)?.owned()?;
        memory.map_into(domain, MappingPolicy::PerUse)?;
        let mapping = domain.map(memory.take().ok_or("taken")?, FromDevice)?;
        Ok(Self { memory, mapping })
    }

    /// Returns how many bytes have this value, as the program sees them.
    fn count(&self, value: u8) -> Result<u64, Box<dyn Error>> {
        let mut bytes = vec![0; BUFFER];
        self.mapping.memory().copy_to_slice(0, &mut bytes)?;
        Ok(bytes.iter().map(|byte| u64::from(*byte == value)).sum())
    }
}

fn here(report: &mut Report) -> Result<(), Box<dyn Error>> {
    let start = vacant()?;
    let addr = |number: usize| start + number * BUFFER;
    let domain = Domain::soft()?;
    let device = domain.port().ok_or("not a software IOMMU")?;
    let mut buffers = (0..BUFFERS)
        .map(|number| Buffer::map(addr(number), &domain))
        .collect::<Result<Vec<_>, _>>()?;
    let mut first = Writes::default();
    buffers.iter().for_each(|buffer| first.fill(&device, buffer.mapping.iova(), OLD));
    report.figure("mappings", buffers.len(), "");
    report.figure("pages that the device wrote", first.arrived, "");

    // The pages are given back: not while they are mapped, and at once afterwards.
    let (mut late, mut busy) = (Writes::default(), 0);
    for Buffer { memory, mapping } in buffers.drain(RETURNED) {
        let Err(error) = memory.reclaim::<Pages>() else {
            return Err("memory was returned while the device could write to it".into());
        };
        if busy == 0 {
            report.said("giving back what is mapped", &error);
        }
        let Reclaim::InUse { memory, .. } = error else { return Err(error.into()) };
        busy += 1;
        let iova = mapping.iova();
        drop(mapping.unmap()?);
        drop(memory.reclaim::<Pages>()?);
        late.fill(&device, iova, OLD);
    }
    report.figure("buffers that were not given back while mapped", busy, "");
    report.figure("pages that the device wrote after the unmap", late.arrived, "");
    report.figure("writes after the unmap that faulted", late.faulted, "");

    // New memory at the same addresses.
    for number in RETURNED {
        buffers.insert(number, Buffer::map(addr(number), &domain)?);
    }
    let mut again = Writes::default();
    buffers.iter().for_each(|buffer| again.fill(&device, buffer.mapping.iova(), NEW));
    let seen = buffers.iter().map(|buffer| buffer.count(NEW)).sum::<Result<u64, _>>()?;
    let written = again.arrived * PAGE as u64;
    report.figure("bytes that the device wrote to old and new buffers", written, "");
    report.figure("of these in the program's buffers", seen, "");

    let (returned, pages) = (RETURNED.len() as u64, (BUFFER / PAGE) as u64);
    report.promise("what is mapped cannot be given back", busy == returned);
    report.promise(
        "after the unmap every write of the device faults",
        late.arrived == 0 && late.faulted == returned * pages,
    );
    report.promise(
        "what is mapped anew receives all that the device writes",
        written == (BUFFERS * BUFFER) as u64 && seen == written,
    );
    Ok(())
}
