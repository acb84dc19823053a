//! PRP entries and lists (Base 4.1.1).

use crate::bus::Bus;
use crate::data_pointer::runs::Runs;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{PAGE, PAGE_BYTES, Status};

/// Appends the runs of `len` bytes that `prp1` and `prp2` describe. `page` is scratch space.
pub(super) fn resolve(
    bus: &impl Bus,
    [prp1, prp2]: [u64; 2],
    len: usize,
    page: &mut [u8; PAGE_BYTES],
    runs: &mut Runs,
) -> Result<(), Status> {
    if prp1 & 3 != 0 {
        return Err(Status::PRP_OFFSET_INVALID);
    }
    let first = usize::try_from(PAGE - prp1 % PAGE).unwrap_or(PAGE_BYTES).min(len);
    runs.push(prp1, first)?;
    match len - first {
        0 => Ok(()),
        left if left <= PAGE_BYTES => {
            if !prp2.is_multiple_of(PAGE) {
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
    page: &mut [u8; PAGE_BYTES],
    runs: &mut Runs,
) -> Result<(), Status> {
    loop {
        if !list.is_multiple_of(8) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let room = usize::try_from((PAGE - list % PAGE) / 8).unwrap_or(1);
        let wanted = left.div_ceil(PAGE_BYTES);
        let count = wanted.min(room);
        let bytes = page.get_mut(..count * 8).ok_or(Status::INTERNAL_ERROR)?;
        bus.read(Iova::new(list), bytes).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        let mut entries = bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_le_bytes(*entry));
        // The last entry of a full page is the address of the next one.
        let link = if wanted > room { entries.next_back() } else { None };
        for entry in entries {
            if !entry.is_multiple_of(PAGE) {
                return Err(Status::PRP_OFFSET_INVALID);
            }
            let piece = left.min(PAGE_BYTES);
            runs.push(entry, piece)?;
            left -= piece;
        }
        // The next list begins a page, so each further turn yields 511 entries, and no chain is
        // endless.
        match link {
            None => return Ok(()),
            Some(next) if !next.is_multiple_of(PAGE) => return Err(Status::PRP_OFFSET_INVALID),
            Some(next) => list = next,
        }
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
        let mut runs = Runs::default();
        resolve(bus, [prp1, prp2], len, &mut [0; PAGE_BYTES], &mut runs)?;
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
}
