//! The right order: that no stale page is reached, and that the unit's walk finds what the table
//! maps.

use super::machine::{BUFFER_BYTES, Machine, Pages};
use super::{Result, late};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::{Iova, PageSize};
use pinfold_core::domain::{Mapping, Pinned};
use pinfold_core::mem::DmaMemory;
use std::ptr::NonNull;

const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// Numbers at random, the same for a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// A part of what the program has, as a payload.
///
/// The memory is the hugepages', which are never freed; a round uses each of them once at a time.
pub(crate) fn part(memory: DmaMemory<'_>, first: usize, count: usize) -> Result<Pages> {
    let part = memory.part(first * PAGE, count * PAGE)?;
    Ok(Pages { base: part.as_ptr(), len: part.len() })
}

/// Leaves of 4 KiB, 2 MiB, 1 GiB are counted in this order.
fn size_number(size: PageSize) -> usize {
    match size {
        PageSize::Size4K => 0,
        PageSize::Size2M => 1,
        PageSize::Size1G => 2,
    }
}

/// The number of mapped leaves of each size.
#[derive(Default)]
struct Leaves([u64; 3]);

impl Leaves {
    fn count(&mut self, machine: &Machine, mapping: &Mapping<Pages, Bidirectional>) -> Result<()> {
        let iova = mapping.iova();
        for run in machine.domain.mapped().ok_or("the table cannot be read")? {
            if iova.overlaps(&run.iova) {
                self.0[size_number(run.page_size)] += 1;
            }
        }
        Ok(())
    }
}

/// A transfer of the device, and what it has to be or must not be.
struct Transfer {
    round: usize,
    at: usize,
    words: usize,
    /// The first word; each further one is 2 more.
    first: u64,
    wanted: bool,
}

/// Bytes of the device's buffer for one transfer, and rounds until they are looked at.
const SLOT: usize = 120;
const GROUP: usize = BUFFER_BYTES / (2 * SLOT);

/// Maps parts of hugepages at random, in leaves of 4 KiB, 2 MiB and 1 GiB, and revokes them by each
/// policy in turn: whether the device ever reads what was written after that. What is mapped it must
/// read, at every offset and in every length.
pub(crate) fn right_order(machine: &Machine, rounds: usize, seed: u64) -> Result<bool> {
    let whole = [machine.pages(HUGE)?, machine.pages(HUGE)?];
    let mut random = Random(seed);
    let mut owner = machine.domain.local();
    let (mut leaves, mut transfers) = (Leaves::default(), Vec::new());
    for round in 0..rounds {
        // Every fourth time a whole hugepage, which has one leaf, and now and then the large one. The
        // first three rounds have one of each size.
        let choice = if round < 3 { round } else { random.below(16) };
        let pages = match (choice, &machine.gigabyte) {
            (2, _) if round == 2 => part(whole[0].memory(), 1, 1 + random.below(511))?,
            (0, Some(gigabyte)) => part(gigabyte.memory(), 0, gigabyte.len / PAGE)?,
            (0..4, _) => part(whole[random.below(2)].memory(), 0, HUGE / PAGE)?,
            _ => {
                let first = random.below(512);
                let count = 1 + random.below(512 - first);
                part(whole[random.below(2)].memory(), first, count)?
            }
        };
        let words = 1 + random.below(SLOT / 8);
        let offset = random.below(pages.len / 8 - words + 1) * 8;
        let first = ((round as u64 + 1) << 8) + 1;
        let write = |memory: DmaMemory<'_>, secret: u64| -> Result<()> {
            for word in 0..words {
                memory.write_u64(offset + word * 8, first + 2 * word as u64 + secret)?;
            }
            Ok(())
        };
        write(pages.memory(), 0)?;
        let policy = round % 4;
        let mapping = match policy {
            0 => machine.domain.map(pages, Bidirectional),
            _ => owner.map(pages, Bidirectional),
        };
        let mapping = mapping.map_err(|refused| refused.error)?;
        if round % 64 < 8 || choice == 0 {
            leaves.count(machine, &mapping)?;
        }
        let iova = mapping.iova().start().raw() + offset as u64;
        let at = round % GROUP * 2 * SLOT;
        machine.edu.read(iova, at as u64, words as u64 * 8);
        transfers.push(Transfer { round, at, words, first, wanted: true });
        let pages = match policy {
            0 => mapping.unmap()?,
            1 => owner.unmap(mapping)?,
            2 => late(owner.revoke(mapping))?,
            _ => {
                let mut revoked = Vec::new();
                owner.revoke_many([mapping], &mut revoked);
                late(revoked.pop().ok_or("nothing was revoked")?)?
            }
        };
        write(pages.memory(), 1)?;
        let at = at + SLOT;
        machine.edu.read(iova, at as u64, words as u64 * 8);
        transfers.push(Transfer { round, at, words, first: first + 1, wanted: false });
        if (round + 1) % GROUP == 0 || round + 1 == rounds {
            machine.edu.write(machine.seen.iova().start().raw(), BUFFER_BYTES as u64);
            for transfer in transfers.drain(..) {
                if is_stale(machine, &transfer)? {
                    return Ok(true);
                }
            }
        }
    }
    let [small, huge, giant] = leaves.0;
    println!("runs of leaves of 4 KiB, 2 MiB, 1 GiB in a sample: {small}, {huge}, {giant}");
    if small == 0 || huge == 0 || giant == 0 && machine.gigabyte.is_some() {
        return Err("a size of leaves was not mapped: it takes three rounds at least".into());
    }
    Ok(false)
}

/// Looks at what a transfer has read: whether it is what it must not be.
///
/// # Errors
/// It is not what it has to be.
fn is_stale(machine: &Machine, transfer: &Transfer) -> Result<bool> {
    let Transfer { round, at, words, first, wanted } = *transfer;
    for word in 0..words {
        let read = machine.seen.memory().read_u64(at + word * 8)?;
        let written = first + 2 * word as u64;
        match (wanted, read == written) {
            (true, false) => {
                let what = format!("round {round}: the device reads {read:#x}, not {written:#x}");
                return Err(what.into());
            }
            (false, true) => {
                println!("round {round}: the device reads {read:#x} after the revocation");
                return Ok(true);
            }
            _ => {}
        }
    }
    Ok(false)
}

/// A word of a payload, and the address at which the device finds it while it is mapped.
struct Mark {
    iova: u64,
    memory: NonNull<u8>,
}

/// Maps and unmaps at random, up to thirteen payloads at a time, the first in a leaf of 1 GiB if the
/// machine has one, and compares what the device reads through the first and the last page of each and
/// through pages at random, and through what was unmapped, with what the table has.
pub(crate) fn walk_agrees(machine: &Machine, steps: usize, seed: u64) -> Result<()> {
    let mut free = (0..12).map(|_| machine.pages(HUGE)).collect::<Result<Vec<_>>>()?;
    if let Some(gigabyte) = &machine.gigabyte {
        free.push(part(gigabyte.memory(), 0, gigabyte.len / PAGE)?);
    }
    let mut random = Random(seed);
    let mut live: Vec<(Mapping<Pages, Bidirectional>, Pages, Vec<Mark>)> = Vec::new();
    let (mut value, mut read) = (0, [0_u64; 3]);
    for step in 0..steps {
        let mut gone = Vec::new();
        for _ in 0..4 {
            // The large leaf is there when the first sample is read.
            let unmaps = step > 0 && random.below(2) == 0 && !live.is_empty();
            if unmaps || free.is_empty() {
                let (mapping, whole, marks) = live.swap_remove(random.below(live.len()));
                mapping.unmap()?;
                for mark in &marks {
                    value += 1;
                    word(mark).write_u64(0, value)?;
                }
                gone.extend(marks);
                free.push(whole);
            } else {
                let first_of_all = value == 0;
                let at = if first_of_all { free.len() - 1 } else { random.below(free.len()) };
                let whole = free.swap_remove(at);
                let all = whole.len / PAGE;
                let (first, count) = if first_of_all || random.below(3) == 0 {
                    (0, all)
                } else {
                    let first = random.below(all);
                    (first, 1 + random.below((all - first).min(2048)))
                };
                let memory = whole.memory();
                let (mapping, iova) = machine.map(part(memory, first, count)?)?;
                let pages = [0, count - 1, random.below(count), random.below(count)];
                let mut marks = Vec::new();
                for page in pages {
                    value += 1;
                    let at = page * PAGE + random.below(512) * 8;
                    let part = memory.part(first * PAGE + at, 8)?;
                    part.write_u64(0, value)?;
                    marks.push(Mark { iova: iova + at as u64, memory: part.as_ptr() });
                }
                live.push((mapping, whole, marks));
            }
        }
        let mapped = live.iter().flat_map(|(_, _, marks)| marks).map(|mark| (mark, true));
        let mut sample: Vec<_> = mapped.chain(gone.iter().map(|mark| (mark, false))).collect();
        while sample.len() > 12 {
            sample.swap_remove(random.below(sample.len()));
        }
        for (number, (mark, _)) in sample.iter().enumerate() {
            machine.edu.read(mark.iova, number as u64 * 8, 8);
        }
        machine.edu.write(machine.seen.iova().start().raw(), sample.len() as u64 * 8);
        for (number, (mark, is_mapped)) in sample.iter().enumerate() {
            let found = machine.seen.memory().read_u64(number * 8)?;
            // Written since the last sample, for what is gone: nothing old in the buffer is equal.
            let now = word(mark).read_u64(0)?;
            let mut table = machine.domain.mapped().ok_or("the table cannot be read")?;
            let run = table.find(|run| run.iova.contains(Iova::new(mark.iova)));
            let maps = run.is_some();
            match (*is_mapped, maps) {
                (true, false) => {
                    return Err(format!("step {step}: the table lacks {:#x}", mark.iova).into());
                }
                // Of another payload since.
                (false, true) => continue,
                _ => {}
            }
            if (found == now) != maps {
                let what = format!(
                    "step {step}: at {:#x} the device reads {found}, and the memory has {now} (mapped: {maps})",
                    mark.iova
                );
                return Err(what.into());
            }
            read[run.map_or(0, |run| size_number(run.page_size))] += 1;
        }
    }
    let [small, huge, giant] = read;
    println!(
        "ok: the unit's walk agrees with the table in {steps} states: in {huge} pages of leaves of 2 MiB, {giant} of 1 GiB, {small} others"
    );
    if small == 0 || huge == 0 || machine.gigabyte.is_some() && giant == 0 {
        return Err("no page was read in a leaf of one of the sizes".into());
    }
    Ok(())
}

fn word(mark: &Mark) -> DmaMemory<'_> {
    // SAFETY: in hugepages that are never freed, and no reference to them exists.
    unsafe { DmaMemory::from_raw(mark.memory, 8) }
}
