//! Tags of pages: every page carries eight words that identify its owner.

use pinfold_core::addr::Iova;
use pinfold_core::mem::DmaMemory;

pub(crate) const PAGE: u64 = 4096;
/// Bytes from one tagged word of a page to the next.
pub(crate) const STEP: u64 = 512;
pub(crate) const WORDS: u64 = PAGE / STEP;

const KIND: u32 = 60;
const GENERATION: u32 = 36;
const NUMBER: u64 = (1 << GENERATION) - 1;
const GENERATIONS: u64 = (1 << (KIND - GENERATION)) - 1;

/// The owner of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Never tagged.
    Blank = 0,
    /// The owner's: no device may read or write it. The number is that of the page in this process.
    Owned = 1,
    /// About to be mapped, at an address not yet known. The number is that of the page in this
    /// process.
    Leaving = 2,
    /// Mapping. The number is that of the page in the address space of the device.
    Mapping = 3,
    /// Written by a device. The number is that of the page that the device addressed.
    Device = 4,
    /// Where poisoned table entries lead.
    Trap = 5,
    /// None of these.
    Other = 15,
}

/// A tagged word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    pub(crate) generation: u64,
    pub(crate) number: u64,
}

impl Tag {
    pub(crate) fn word(self) -> u64 {
        (self.kind as u64) << KIND
            | (self.generation & GENERATIONS) << GENERATION
            | (self.number & NUMBER)
    }

    pub(crate) fn of(word: u64) -> Self {
        let kind = match word >> KIND {
            0 if word == 0 => Kind::Blank,
            1 => Kind::Owned,
            2 => Kind::Leaving,
            3 => Kind::Mapping,
            4 => Kind::Device,
            5 => Kind::Trap,
            _ => Kind::Other,
        };
        Self { kind, generation: word >> GENERATION & GENERATIONS, number: word & NUMBER }
    }

    pub(crate) fn device(at: Iova) -> Self {
        Self { kind: Kind::Device, generation: 0, number: at.raw() / PAGE }
    }

    pub(crate) fn mapped(at: Iova, generation: u64) -> Self {
        Self { kind: Kind::Mapping, generation: generation & GENERATIONS, number: at.raw() / PAGE }
    }
}

/// Whether generation `a` is older than `b`, although the numbers wrap.
pub(crate) fn is_older(a: u64, b: u64) -> bool {
    let behind = b.wrapping_sub(a) & GENERATIONS;
    behind != 0 && behind <= GENERATIONS / 2
}

/// Tags every page of `memory` as `tag` says of its number there.
pub(crate) fn write(memory: DmaMemory, tag: impl Fn(u64) -> Tag) {
    each(memory, |page, offset| memory.write_u64(offset, tag(page).word()).unwrap());
}

/// Tags `memory` by its addresses in this process.
pub(crate) fn write_kind(memory: DmaMemory, kind: Kind) {
    let first = memory.addr() as u64 / PAGE;
    write(memory, |page| Tag { kind, generation: 0, number: first + page });
}

/// The first word of `memory` that is not `right`: its page, and what it says.
pub(crate) fn find(memory: DmaMemory, right: impl Fn(u64, Tag) -> bool) -> Option<(u64, Tag)> {
    let mut wrong = None;
    each(memory, |page, offset| {
        let tag = Tag::of(memory.read_u64(offset).unwrap());
        if wrong.is_none() && !right(page, tag) {
            wrong = Some((page, tag));
        }
    });
    wrong
}

/// The first word that says something else than `kind` and the page's address in this process.
pub(crate) fn find_not(memory: DmaMemory, kind: Kind) -> Option<(u64, Tag)> {
    let first = memory.addr() as u64 / PAGE;
    find(memory, |page, tag| tag.kind == kind && tag.number == (first + page) & NUMBER)
}

fn each(memory: DmaMemory, mut act: impl FnMut(u64, usize)) {
    for offset in (0..memory.len()).step_by(STEP as usize) {
        act(offset as u64 / PAGE, offset);
    }
}
