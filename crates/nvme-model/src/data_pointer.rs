//! Resolves a command's data pointer, PRPs or an SGL, to runs of bus addresses.

mod sgl;

use crate::bus::Bus;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, SglSupport, Status};
use std::ops::Deref;

// PRP entries and lists (Base 4.1.1).

/// Appends the runs of `len` bytes that `prp1` and `prp2` describe. `page` is scratch space of the
/// size of a page.
fn resolve(
    bus: &impl Bus,
    [prp1, prp2]: [u64; 2],
    len: usize,
    page: &mut [u8],
    runs: &mut Runs,
) -> Result<(), Status> {
    if prp1 & 3 != 0 {
        return Err(Status::PRP_OFFSET_INVALID);
    }
    let page_bytes = page.len();
    let mask = page_bytes as u64 - 1;
    let first = usize::try_from(page_bytes as u64 - (prp1 & mask)).unwrap_or(page_bytes).min(len);
    runs.push(prp1, first)?;
    match len - first {
        0 => Ok(()),
        left if left <= page_bytes => {
            if prp2 & mask != 0 {
                return Err(Status::PRP_OFFSET_INVALID);
            }
            runs.push(prp2, left)
        }
        left => follow(bus, prp2, left, page, runs),
    }
}

/// Follows the list at `list` for `left` bytes.
fn follow(
    bus: &impl Bus,
    mut list: u64,
    mut left: usize,
    page: &mut [u8],
    runs: &mut Runs,
) -> Result<(), Status> {
    let page_bytes = page.len();
    let mask = page_bytes as u64 - 1;
    loop {
        if !list.is_multiple_of(8) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let room = usize::try_from((page_bytes as u64 - (list & mask)) / 8).unwrap_or(1);
        let wanted = left.div_ceil(page_bytes);
        let count = wanted.min(room);
        let bytes = page.get_mut(..count * 8).ok_or(Status::INTERNAL_ERROR)?;
        bus.read(Iova::new(list), bytes).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        let mut entries = bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_le_bytes(*entry));
        // The last entry of a full page is the address of the next one.
        let link = if wanted > room { entries.next_back() } else { None };
        for entry in entries {
            if entry & mask != 0 {
                return Err(Status::PRP_OFFSET_INVALID);
            }
            let piece = left.min(page_bytes);
            runs.push(entry, piece)?;
            left -= piece;
        }
        // The next list begins a page, so each further iteration yields 511 entries or more, and no chain
        // is endless.
        match link {
            None => return Ok(()),
            Some(next) if next & mask != 0 => return Err(Status::PRP_OFFSET_INVALID),
            Some(next) => list = next,
        }
    }
}

// Runs of bus addresses.

/// A run of bus addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) iova: Iova,
    pub(crate) len: usize,
}

/// The runs of a command's data, in order; adjacent pieces are one run.
#[derive(Debug, Default)]
pub(crate) struct Runs(Vec<Run>);

impl Runs {
    fn clear(&mut self) {
        self.0.clear();
    }

    fn push(&mut self, at: u64, len: usize) -> Result<(), Status> {
        if at.checked_add(len as u64).is_none() {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        match self.0.last_mut() {
            Some(last) if last.iova.raw() + last.len as u64 == at => last.len += len,
            _ => self.0.push(Run { iova: Iova::new(at), len }),
        }
        Ok(())
    }
}

impl Deref for Runs {
    type Target = [Run];

    fn deref(&self) -> &[Run] {
        &self.0
    }
}

// The data pointer of a command, PRPs or SGL.

/// Resolves data pointers; keeps its memory from one command to the next.
#[derive(Debug)]
pub(crate) struct Resolver {
    sgls: SglSupport,
    runs: Runs,
    /// A buffer of the size of a page (CC.MPS).
    page: Box<[u8]>,
}

impl Resolver {
    pub(crate) fn new(sgls: SglSupport, page_bytes: usize) -> Self {
        Self { sgls, runs: Runs::default(), page: vec![0; page_bytes].into() }
    }

    /// Returns the first run of the last command.
    pub(crate) fn first(&self) -> Option<&Run> {
        self.runs.first()
    }

    /// Returns the runs of the `len` bytes of data of `command`.
    pub(crate) fn resolve(
        &mut self,
        bus: &impl Bus,
        command: &Command,
        len: usize,
    ) -> Result<&[Run], Status> {
        self.runs.clear();
        let (page, runs) = (&mut *self.page, &mut self.runs);
        let align = match self.sgls {
            SglSupport::Unsupported => None,
            SglSupport::AnyAlignment => Some(1),
            SglSupport::DwordAligned => Some(4),
        };
        match (command.flags, align) {
            (0, _) => {
                let prps = [command.prp1.get(), command.prp2.get()];
                resolve(bus, prps, len, page, runs)?;
            }
            (Command::PSDT_SGL, Some(align)) => {
                sgl::resolve(bus, command.sgl1(), len, align, page, runs)?
            }
            _ => return Err(Status::INVALID_FIELD.do_not_retry()),
        }
        Ok(&self.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::BusFault;
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    /// Memory of pages that were written.
    #[derive(Default)]
    struct Pages(Mutex<BTreeMap<u64, u64>>);

    impl Bus for Pages {
        fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
            let words = self.0.lock().unwrap();
            for (i, to) in to.chunks_exact_mut(8).enumerate() {
                let word = words.get(&(iova.raw() + i as u64 * 8)).copied().unwrap_or(0xdead_b000);
                to.copy_from_slice(&word.to_le_bytes());
            }
            Ok(())
        }
        fn write(&self, _: Iova, _: &[u8]) -> Result<(), BusFault> {
            Ok(())
        }
        fn write_u32_release(&self, _: Iova, _: u32) -> Result<(), BusFault> {
            Ok(())
        }
    }

    fn runs(bus: &Pages, prp1: u64, prp2: u64, len: usize) -> Result<Vec<(u64, usize)>, Status> {
        runs_of_pages(4096, bus, [prp1, prp2], len)
    }

    fn runs_of_pages(
        page_bytes: usize,
        bus: &Pages,
        prps: [u64; 2],
        len: usize,
    ) -> Result<Vec<(u64, usize)>, Status> {
        let mut runs = Runs::default();
        resolve(bus, prps, len, &mut vec![0; page_bytes], &mut runs)?;
        Ok(runs.iter().map(|run| (run.iova.raw(), run.len)).collect())
    }

    #[test]
    fn one_and_two_pages_need_no_list() {
        let bus = Pages::default();
        assert_eq!(runs(&bus, 0x1ff0, 0, 16), Ok(vec![(0x1ff0, 16)]));
        assert_eq!(runs(&bus, 0x1ff0, 0x9000, 4112), Ok(vec![(0x1ff0, 16), (0x9000, 4096)]));
        assert_eq!(runs(&bus, 0x1000, 0x2000, 8192), Ok(vec![(0x1000, 8192)]));
        assert_eq!(runs(&bus, 0x1002, 0, 16), Err(Status::PRP_OFFSET_INVALID));
        assert_eq!(runs(&bus, 0x1000, 0x2004, 8192), Err(Status::PRP_OFFSET_INVALID));
        assert_eq!(
            runs(&bus, u64::MAX - 4095, u64::MAX - 4095, 4097),
            Err(Status::DATA_TRANSFER_ERROR)
        );
    }

    #[test]
    fn lists_are_followed_to_their_end() {
        let bus = Pages::default();
        let set = |at: u64, value: u64| bus.0.lock().unwrap().insert(at, value);
        // A list that begins three entries before the end of its page: two pages of data, then a
        // link.
        let list = 0x8000 - 24;
        set(list, 0x2000);
        set(list + 8, 0x4000);
        set(list + 16, 0xa000);
        set(0xa000, 0x5000);
        set(0xa008, 0x6000);
        assert_eq!(runs(&bus, 0x1000, list, 5 * 4096), Ok(vec![(0x1000, 8192), (0x4000, 12288)]));
        set(0xa000, 0x5008);
        assert_eq!(runs(&bus, 0x1000, list, 5 * 4096), Err(Status::PRP_OFFSET_INVALID));
        assert_eq!(runs(&bus, 0x1000, list + 4, 5 * 4096), Err(Status::PRP_OFFSET_INVALID));
        // A list pointer in the last slot of a page holds only a link.
        set(0x8ff8, 0xb000);
        set(0xb000, 0x2000);
        set(0xb008, 0x3000);
        assert_eq!(runs(&bus, 0x1000, 0x8ff8, 3 * 4096), Ok(vec![(0x1000, 3 * 4096)]));
    }

    #[test]
    fn entries_describe_pages_of_8_kib() {
        let bus = Pages::default();
        let runs = |prps, len| runs_of_pages(8192, &bus, prps, len);
        assert_eq!(runs([0x3ff0, 0x8000], 4096), Ok(vec![(0x3ff0, 16), (0x8000, 4080)]));
        assert_eq!(runs([0x2000, 0], 8192), Ok(vec![(0x2000, 8192)]));
        assert_eq!(runs([0x2000, 0x5000], 8193), Err(Status::PRP_OFFSET_INVALID));
        let set = |at: u64, value: u64| bus.0.lock().unwrap().insert(at, value);
        // An entry in the middle of the page of 8 KiB, at the end of one of 4 KiB, is no link.
        set(0x8ff8, 0xa000);
        set(0x9000, 0xe000);
        let found = runs([0x2000, 0x8ff8], 3 * 8192);
        assert_eq!(found, Ok(vec![(0x2000, 8192), (0xa000, 8192), (0xe000, 8192)]));
        set(0x9000, 0xf000);
        assert_eq!(runs([0x2000, 0x8ff8], 3 * 8192), Err(Status::PRP_OFFSET_INVALID));
        set(0x9ff8, 0xb000);
        assert_eq!(runs([0x2000, 0x9ff8], 3 * 8192), Err(Status::PRP_OFFSET_INVALID));
    }
}
