//! The data pointer of a command, as the controller takes it: which memory is its data, which is a list,
//! and what of the PRPs is wrong.

use crate::findings;
use crate::space::{Space, Span};
use crate::watch::{LastBlock, Wrong};
use pinfold_nvme::spec::{Command, SglDescriptor};
use std::cmp::Ordering;

/// The most entries of one command that are followed.
const ENTRIES: usize = 4096;

/// What a data pointer names, as far as it is valid.
#[derive(Debug, Default)]
pub(super) struct Pointer {
    /// The data, in order; adjacent pieces are one.
    pub(super) data: Vec<Span>,
    /// The PRP lists, or the segments of an SGL.
    pub(super) lists: Vec<Span>,
    /// What is wrong with PRP2 or with a list, where the controller comes upon it.
    pub(super) wrong: Option<Wrong>,
    /// Of PRPs: whether the last block alone needs the last page.
    is_block_over: bool,
}

/// Returns how many pages follow the first one, of `bytes` at PRP1.
fn further_pages(prp1: u64, bytes: u64, page: u64) -> u64 {
    bytes.saturating_sub(page - prp1 % page).div_ceil(page)
}

/// Describes what the controller takes PRP2 for; empty where it does not look at it.
pub(super) fn meaning_of_prp2(command: &Command, bytes: u64, page: u64) -> String {
    if command.flags & Command::PSDT_SGL != 0 {
        return String::new();
    }
    match further_pages(command.prp1.get(), bytes, page) {
        0 => String::new(),
        1 => " (the second page)".to_owned(),
        pages => format!(" (a list of {pages} entries)"),
    }
}

impl Pointer {
    /// Follows the data pointer of a command with `bytes` of data, more than 0, in blocks of `block`
    /// where their number is 0-based, and otherwise of 0.
    pub(super) fn of(
        command: &Command,
        [bytes, block]: [u64; 2],
        page: u64,
        space: Option<&Space>,
    ) -> Self {
        let pages = |bytes| further_pages(command.prp1.get(), bytes, page);
        let is_block_over = bytes > block && pages(bytes - block) < pages(bytes);
        let mut found = Self { is_block_over, ..Self::default() };
        if command.flags & Command::PSDT_SGL != 0 {
            let sgl = command.sgl1();
            let (at, len) = (sgl.address.get(), u64::from(sgl.length.get()));
            match sgl.kind {
                SglDescriptor::DATA_BLOCK => found.add(at, len.min(bytes)),
                _ => found.follow_segments(space, sgl, bytes),
            }
            return found;
        }
        let (prp1, prp2) = (command.prp1.get(), command.prp2.get());
        let first = (page - prp1 % page).min(bytes);
        found.add(prp1, first);
        let left = bytes - first;
        if left == 0 {
            return found;
        }
        if left <= page {
            let what = || {
                format!("the controller takes PRP2 {prp2:#x} for the second page of {bytes} bytes")
            };
            found.check(space, prp2, left, page, true, what);
            found.add(prp2, left);
        } else if let Some(space) = space {
            found.follow(space, prp2, left, page);
        }
        found
    }

    /// Follows the segments of an SGL from `segment` on, for `left` bytes of data. What is wrong with
    /// them the controller says when it reads them.
    fn follow_segments(&mut self, space: Option<&Space>, segment: SglDescriptor, mut left: u64) {
        const BYTES: u64 = SglDescriptor::BYTES as u64;
        let mut followed = 0;
        let mut next = Some(segment);
        while let Some(segment) = next.take() {
            if !matches!(segment.kind, SglDescriptor::SEGMENT | SglDescriptor::LAST_SEGMENT) {
                return;
            }
            let (at, len) = (segment.address.get(), u64::from(segment.length.get()));
            let Some(list) = Span::new(at, len) else { return };
            self.lists.push(list);
            let Some(space) = space else { return };
            for number in 0..len / BYTES {
                let mut bytes = [0; SglDescriptor::BYTES];
                if followed == ENTRIES || space.read(at + number * BYTES, &mut bytes).is_err() {
                    return;
                }
                followed += 1;
                let descriptor: SglDescriptor = zerocopy::transmute!(bytes);
                if descriptor.kind == SglDescriptor::DATA_BLOCK {
                    let piece = u64::from(descriptor.length.get()).min(left);
                    self.add(descriptor.address.get(), piece);
                    left -= piece;
                } else {
                    // Only the last one of a segment leads to another one.
                    let leads =
                        segment.kind == SglDescriptor::SEGMENT && (number + 1) * BYTES == len;
                    next = leads.then_some(descriptor);
                }
            }
        }
    }

    /// Follows the list at `list` for `left` bytes.
    fn follow(&mut self, space: &Space, prp2: u64, mut left: u64, page: u64) {
        let count = left.div_ceil(page);
        let takes = format!("the controller takes PRP2 {prp2:#x} for a list of {count} entries");
        let mut list = prp2;
        let mut number = 0;
        // Without the last block it would be the second page.
        let is_page = count == 2 && prp2.is_multiple_of(page);
        if !prp2.is_multiple_of(8) {
            self.is_wrong(None, false, || format!("{takes}, and it is no multiple of 8"));
            return;
        }
        for _ in 0..ENTRIES {
            let mut entry = [0; 8];
            if space.read(list, &mut entry).is_err() {
                // Where a mapping was there or was refused, that is the fault.
                if space.at(list).is_some_and(|map| !map.read) || space.is_unknown(list) {
                    let text = || format!("{takes}, and {list:#x} is not mapped for it to be read");
                    self.is_wrong(Span::new(list, 8), is_page, text);
                }
                return;
            }
            // A list goes on behind its last entry in the same page, or in another one.
            match self.lists.last_mut() {
                Some(known) if known.last.checked_add(1) == Some(list) => known.last = list | 7,
                _ => self.lists.extend(Span::new(list, 8)),
            }
            let value = u64::from_le_bytes(entry);
            if list % page == page - 8 && left > page {
                if !value.is_multiple_of(page) {
                    self.is_wrong(None, false, || {
                        format!("{takes}, whose link at {list:#x} is {value:#x}")
                    });
                    return;
                }
                list = value;
                continue;
            }
            let piece = left.min(page);
            let what = || format!("{takes}, of which entry {number} is {value:#x}");
            let is_over = is_page || number + 1 == count;
            self.check(Some(space), value, piece, page, is_over, what);
            self.add(value, piece);
            left -= piece;
            if left == 0 {
                return;
            }
            number += 1;
            list = list.wrapping_add(8);
        }
    }

    /// Adds data.
    fn add(&mut self, at: u64, len: u64) {
        match self.data.last_mut() {
            Some(known) if known.last.checked_add(1) == Some(at) => {
                known.last = known.last.saturating_add(len);
            }
            _ => self.data.extend(Span::new(at, len)),
        }
    }

    /// Returns the last block of `block` bytes, if it is not the only one.
    pub(super) fn last_block(&self, block: u64) -> Option<LastBlock> {
        let (last, others) = self.data.split_last()?;
        let first = last.last.checked_sub(block.checked_sub(1)?)?;
        let before = match first.cmp(&last.first) {
            Ordering::Greater => first - 1,
            Ordering::Equal => others.last()?.last,
            Ordering::Less => return None,
        };
        Some(LastBlock { span: Span { first, last: last.last }, before })
    }

    /// Checks a PRP that is `what`: the address of a page, of which `len` bytes are used. `is_over`:
    /// a block less might not need it.
    fn check(
        &mut self,
        space: Option<&Space>,
        at: u64,
        len: u64,
        page: u64,
        is_over: bool,
        what: impl FnOnce() -> String,
    ) {
        if !at.is_multiple_of(page) {
            self.is_wrong(None, is_over, || format!("{}: not the address of a page", what()));
        } else if space.is_some_and(|space| space.is_unknown(at)) {
            self.is_wrong(Span::new(at, len), is_over, || {
                format!("{}: nothing was ever mapped there", what())
            });
        }
    }

    /// Keeps the first text, and all addresses.
    fn is_wrong(&mut self, at: Option<Span>, is_over: bool, text: impl FnOnce() -> String) {
        let likely = (is_over && self.is_block_over).then_some(findings::NLB);
        let wrong =
            self.wrong.get_or_insert_with(|| Wrong { text: text(), at: Vec::new(), likely });
        if at != wrong.at.last().copied() {
            wrong.at.extend(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Memory, Site};
    use crate::space::Entry;
    use std::sync::Arc;
    use zerocopy::little_endian::{U32, U64};

    const PAGE: u64 = 4096;

    /// Two pages of lists at 0x10000, and eight of data, without memory, at 0x20000. The lists'
    /// entries are `words`, by their number in both pages.
    fn found(prps: [u64; 2], bytes: u64, words: &[(usize, u64)]) -> Pointer {
        found_as(0, prps, bytes, words)
    }

    fn found_as(flags: u8, prps: [u64; 2], bytes: u64, words: &[(usize, u64)]) -> Pointer {
        let mut lists = vec![0u64; 1024];
        for (at, word) in words {
            lists[*at] = word.to_le();
        }
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let space = Space::default();
        let vaddr = lists.as_mut_ptr().expose_provenance() as u64;
        for (at, len, vaddr, read) in [(0x1_0000, 2, vaddr, true), (0x2_0000, 8, 0, false)] {
            let (span, memory) = (Span::new(at, len * PAGE).unwrap(), memory.clone());
            let (write, serial, site) = (true, 0, Site::default());
            space.insert(Entry { span, vaddr, read, write, memory, serial, site });
        }
        let (prp1, prp2) = (U64::new(prps[0]), U64::new(prps[1]));
        let command = Command { flags, prp1, prp2, ..Command::default() };
        let found = Pointer::of(&command, [bytes, 512], PAGE, Some(&space));
        std::hint::black_box(&lists);
        found
    }

    fn spans(spans: &[Span]) -> Vec<(u64, u64)> {
        spans.iter().map(|span| (span.first, span.len())).collect()
    }

    #[test]
    fn data_and_lists_are_followed() {
        let one = found([0x2_0010, 0], 16, &[]);
        assert_eq!((spans(&one.data), one.lists.len()), (vec![(0x2_0010, 16)], 0));
        assert!(one.wrong.is_none(), "PRP2 is not used");
        let two = found([0x2_0ff0, 0x2_2000], 0x20, &[]);
        assert_eq!(spans(&two.data), [(0x2_0ff0, 16), (0x2_2000, 16)]);
        // Two entries at the end of a page, of which the second is the link to the other page.
        let words = [(510, 0x2_3000), (511, 0x1_1000), (512, 0x2_4000), (513, 0x2_6000)];
        let chain = found([0x2_0000, 0x1_0ff0], 4 * PAGE, &words);
        let data = [(0x2_0000, PAGE), (0x2_3000, 2 * PAGE), (0x2_6000, PAGE)];
        assert_eq!(spans(&chain.data), data);
        assert_eq!(spans(&chain.lists), [(0x1_0ff0, 32)]);
        assert!(chain.wrong.is_none());
        // The last entry of all may be the last one of its page.
        let full = found([0x2_0000, 0x1_0ff0], 3 * PAGE, &[(510, 0x2_3000), (511, 0x2_5000)]);
        assert_eq!(spans(&full.data).len(), 3);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |prp2, pages, words: &[(usize, u64)]| {
            let wrong = found([0x2_0000, prp2], pages * PAGE, words).wrong.unwrap();
            (wrong.text, spans(&wrong.at))
        };
        let (text, at) = wrong(0, 2, &[]);
        assert!(text.contains("PRP2 0x0 for the second page of 8192 bytes: nothing"), "{text}");
        assert_eq!(at, [(0, PAGE)]);
        let (text, at) = wrong(0x2_1008, 2, &[]);
        assert!(text.ends_with("not the address of a page") && at.is_empty(), "{text}");
        // The first entry is named, and all addresses.
        let (text, at) = wrong(0x1_0000, 4, &[(0, 0x2_1000), (1, 0x9_0000)]);
        assert!(text.contains("a list of 3 entries, of which entry 1 is 0x90000"), "{text}");
        assert_eq!(at, [(0x9_0000, PAGE), (0, PAGE)]);
        let (text, _) = wrong(0x1_0000, 3, &[(0, 0x2_1000), (1, 0x2_0808)]);
        assert!(text.contains("entry 1 is 0x20808: not the address"), "{text}");
        let (text, at) = wrong(0x1_0004, 3, &[]);
        assert!(text.contains("no multiple of 8") && at.is_empty(), "{text}");
        let (text, _) = wrong(0x1_0ff8, 3, &[(511, 0x1_1008)]);
        assert!(text.contains("link at 0x10ff8 is 0x11008"), "{text}");
        // A list that may not be read, and one that is nowhere.
        for list in [0x2_1000, 0x9_0000] {
            let (text, at) = wrong(list, 3, &[]);
            assert!(text.contains("a list of 2 entries, and") && text.ends_with("to be read"));
            assert_eq!(at, [(list, 8)]);
        }
    }

    #[test]
    fn a_page_for_the_last_block_alone_is_named() {
        let likely = |prps, blocks: u64, words: &[(usize, u64)]| {
            found(prps, blocks * 512, words).wrong.unwrap().likely.is_some()
        };
        // A second page, and a list in place of one.
        let cases = [(9, true), (10, false), (16, false)];
        assert_eq!(cases.map(|(blocks, _)| likely([0x2_0000, 0], blocks, &[])), cases.map(|c| c.1));
        assert!(!likely([0x2_0e01, 0], 1, &[]), "one block is the least");
        let cases = [(17, true), (18, false), (24, false)];
        assert_eq!(
            cases.map(|(blocks, _)| likely([0x2_0000, 0x2_1000], blocks, &[])),
            cases.map(|c| c.1)
        );
        // Of a list the last entry.
        let list = |last, blocks| likely([0x2_0000, 0x1_0008], blocks, &[(1, 0x2_1000), (2, last)]);
        assert!(list(0, 17) && list(0x2_0808, 17) && !list(0, 24));
        assert!(!likely([0x2_0000, 0x1_0008], 25, &[(1, 0), (2, 0x2_1000), (3, 0x2_2000)]));
        assert!(!likely([0x2_0000, 0x1_0004], 17, &[]));
    }

    #[test]
    fn the_last_of_several_blocks_is_found() {
        let last = |prps, bytes, block| {
            let found = found(prps, bytes, &[]).last_block(block);
            found.map(|LastBlock { span, before }| (span.first, span.last, before))
        };
        assert_eq!(last([0x2_0000, 0], 1024, 512), Some((0x2_0200, 0x2_03ff, 0x2_01ff)));
        assert_eq!(last([0x2_0000, 0x2_3000], 4608, 512), Some((0x2_3000, 0x2_31ff, 0x2_0fff)));
        let alone = [last([0x2_0000, 0], 512, 512), last([0x2_0d00, 0x2_3000], 1024, 512)];
        assert_eq!(alone, [None; 2], "the only one, and one in two pieces");
        assert_eq!(last([0x2_0000, 0], 1024, 0), None);
    }

    #[test]
    fn the_meaning_of_prp2_follows_from_the_pages() {
        let meaning = |offset: u64, bytes| {
            let command = Command { prp1: U64::new(0x1000 + offset), ..Command::default() };
            meaning_of_prp2(&command, bytes, PAGE)
        };
        assert_eq!(meaning(0, 0), "");
        assert_eq!(meaning(0, PAGE), "");
        assert_eq!(meaning(4, PAGE), " (the second page)");
        assert_eq!(meaning(0, 2 * PAGE), " (the second page)");
        assert_eq!(meaning(4, 2 * PAGE), " (a list of 2 entries)");
        let command = Command { flags: Command::PSDT_SGL, nsid: U32::new(1), ..Command::default() };
        assert_eq!(meaning_of_prp2(&command, 3 * PAGE, PAGE), "");
    }

    #[test]
    fn the_first_segment_of_an_sgl_is_a_list() {
        let sgl = |kind: u8| {
            let mut command = Command { flags: Command::PSDT_SGL, ..Command::default() };
            command.prp1 = U64::new(0x5000);
            command.prp2 = U64::new(u64::from(kind) << 56 | 32);
            let found = Pointer::of(&command, [4096, 512], PAGE, None);
            (spans(&found.data), spans(&found.lists))
        };
        assert_eq!(sgl(0), (vec![(0x5000, 32)], vec![]));
        assert_eq!(sgl(0x20), (vec![], vec![(0x5000, 32)]));
        assert_eq!(sgl(0x30), (vec![], vec![(0x5000, 32)]));
        assert_eq!(sgl(0x10), (vec![], vec![]), "a bit bucket");
    }

    #[test]
    fn the_segments_of_an_sgl_are_followed() {
        const SEGMENT: u64 = 0x20 << 56;
        const LAST: u64 = 0x30 << 56;
        let sgl = |words: &[(usize, u64)]| {
            let found = found_as(Command::PSDT_SGL, [0x1_0000, SEGMENT | 48], 2 * PAGE, words);
            (spans(&found.data), spans(&found.lists))
        };
        // Two data blocks, one of them empty, and a segment with another one that is too long.
        let words = [(0, 0x2_0000), (1, PAGE), (2, 0x2_3000), (4, 0x1_1000), (5, LAST | 16)];
        let words = [&words[..], &[(512, 0x2_5000), (513, 9 * PAGE)]].concat();
        let lists = vec![(0x1_0000, 48), (0x1_1000, 16)];
        assert_eq!(sgl(&words), (vec![(0x2_0000, PAGE), (0x2_5000, PAGE)], lists));
        // One that leads nowhere, and one that leads to itself.
        let (_, lists) = sgl(&[(4, 0x9_0000), (5, LAST | 16)]);
        assert_eq!(lists, [(0x1_0000, 48), (0x9_0000, 16)]);
        let (data, lists) = sgl(&[(4, 0x1_0000), (5, SEGMENT | 48)]);
        assert_eq!((data.len(), lists.len()), (0, ENTRIES / 3 + 1));
        // A segment in the middle of another one, or in the last one, is none.
        assert_eq!(sgl(&[(2, 0x1_1000), (3, SEGMENT | 16)]).1.len(), 1);
        assert_eq!(
            sgl(&[(4, 0x1_1000), (5, LAST | 16), (512, 0x1_0000), (513, LAST | 16)]).1.len(),
            2
        );
    }
}
