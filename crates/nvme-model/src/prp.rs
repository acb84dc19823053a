//! From PRP entries to runs of bus addresses (Base 4.1.1).

use crate::bus::Bus;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{PAGE, PAGE_BYTES, Status};

/// A run of bus addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) iova: Iova,
    pub(crate) len: usize,
}

/// The room that resolving needs; kept, so that it is taken once.
#[derive(Debug)]
pub(crate) struct Resolver {
    runs: Vec<Run>,
    list: Box<[u8; PAGE_BYTES]>,
}

impl Resolver {
    pub(crate) fn new() -> Self {
        Self { runs: Vec::with_capacity(64), list: Box::new([0; PAGE_BYTES]) }
    }

    /// The first run of the last command.
    pub(crate) fn first(&self) -> Option<&Run> {
        self.runs.first()
    }

    /// The runs of `len` bytes that `prp1` and `prp2` describe; pages that abut are one run.
    pub(crate) fn resolve(
        &mut self,
        bus: &impl Bus,
        prp1: u64,
        prp2: u64,
        len: usize,
    ) -> Result<&[Run], Status> {
        self.runs.clear();
        if prp1 & 3 != 0 {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let first = usize::try_from(PAGE - prp1 % PAGE).unwrap_or(PAGE_BYTES).min(len);
        self.push(prp1, first)?;
        let left = len - first;
        if left == 0 {
            return Ok(&self.runs);
        }
        if left <= PAGE_BYTES {
            if !prp2.is_multiple_of(PAGE) {
                return Err(Status::PRP_OFFSET_INVALID);
            }
            self.push(prp2, left)?;
        } else {
            self.walk(bus, prp2, left)?;
        }
        Ok(&self.runs)
    }

    /// Follows the list at `list` for `left` bytes.
    fn walk(&mut self, bus: &impl Bus, mut list: u64, mut left: usize) -> Result<(), Status> {
        loop {
            if !list.is_multiple_of(8) {
                return Err(Status::PRP_OFFSET_INVALID);
            }
            let room = usize::try_from((PAGE - list % PAGE) / 8).unwrap_or(1);
            let wanted = left.div_ceil(PAGE_BYTES);
            let chained = wanted > room;
            let count = wanted.min(room);
            let bytes = self.list.get_mut(..count * 8).ok_or(Status::INTERNAL_ERROR)?;
            bus.read(Iova::new(list), bytes).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            let data = if chained { count - 1 } else { count };
            for i in 0..data {
                let piece = left.min(PAGE_BYTES);
                let entry = self.entry(i)?;
                if entry % PAGE != 0 {
                    return Err(Status::PRP_OFFSET_INVALID);
                }
                self.push(entry, piece)?;
                left -= piece;
            }
            if !chained {
                return Ok(());
            }
            // The last entry of a page leads to the next page of the list, which begins a page: so after the first
            // turn each one gives 511 entries of data, and no chain goes round for ever.
            list = self.entry(data)?;
            if !list.is_multiple_of(PAGE) {
                return Err(Status::PRP_OFFSET_INVALID);
            }
        }
    }

    fn entry(&self, index: usize) -> Result<u64, Status> {
        let bytes = self.list.get(index * 8..index * 8 + 8).and_then(|b| b.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or(Status::INTERNAL_ERROR)
    }

    fn push(&mut self, at: u64, len: usize) -> Result<(), Status> {
        if at.checked_add(len as u64).is_none() {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        match self.runs.last_mut() {
            Some(last) if last.iova.raw() + last.len as u64 == at => last.len += len,
            _ => self.runs.push(Run { iova: Iova::new(at), len }),
        }
        Ok(())
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
        let mut resolver = Resolver::new();
        Ok(resolver.resolve(bus, prp1, prp2, len)?.iter().map(|r| (r.iova.raw(), r.len)).collect())
    }

    #[test]
    fn one_and_two_pages_need_no_list() {
        let bus = Pages::default();
        assert_eq!(runs(&bus, 0x1ff0, 0, 16), Ok(vec![(0x1ff0, 16)]));
        assert_eq!(runs(&bus, 0x1ff0, 0x9000, 4112), Ok(vec![(0x1ff0, 16), (0x9000, 4096)]));
        assert_eq!(runs(&bus, 0x1000, 0x2000, 8192), Ok(vec![(0x1000, 8192)]));
        assert_eq!(runs(&bus, 0x1002, 0, 16), Err(Status::PRP_OFFSET_INVALID));
        assert_eq!(runs(&bus, 0x1000, 0x2004, 8192), Err(Status::PRP_OFFSET_INVALID));
        assert_eq!(runs(&bus, u64::MAX - 4095, u64::MAX - 4095, 4097), Err(Status::DATA_TRANSFER_ERROR));
    }

    #[test]
    fn lists_are_followed_to_their_end() {
        let bus = Pages::default();
        let set = |at: u64, value: u64| bus.0.lock().unwrap().insert(at, value);
        // A list that begins three entries before the end of its page: two pages of data, then a link.
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
}
