//! Descriptions of memory for a device, in list pages that a C program passes: PRP entries, and SGL
//! descriptors, as [`pinfold_core::gather`] lays them out.

use crate::block::pf_block_t;
use crate::failure::{Failure, check_out, fail};
use pinfold::core::gather::prp::{ControllerPage, ListPage, ListPages, Prps};
use pinfold::core::gather::sgl::Sgl;
use pinfold::core::gather::{GatherError, LayoutError, Profile};
use pinfold::{DmaMemory, Iova, Segment};
use std::ffi::c_uint;
use std::fmt;
use std::ptr::NonNull;

/// The most list pages of a description: 64 of 4 KiB describe 127 MiB by PRP entries.
pub(crate) const MOST_LISTS: usize = 64;

/// The list pages of a call: the caller's array, of which each element is read when it is taken.
pub(crate) struct Lists {
    first: *const pf_block_t,
    taken: usize,
    count: usize,
}

/// No list page is left.
#[derive(Debug)]
pub(crate) struct NoLists {
    count: usize,
}

impl fmt::Display for NoLists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} list pages are in use: pass more, or split the transfer", self.count)
    }
}

impl Lists {
    /// Describes `count` list pages, of which the first [`MOST_LISTS`] are used.
    ///
    /// # Errors
    /// `EFAULT`, `EINVAL`: one has no memory, or is not aligned to 8 bytes.
    ///
    /// # Safety
    /// `first` is null or has `count` elements, which nothing changes as long as the value is used.
    /// The memory of each can be written, and is not accessed otherwise except as shared memory.
    pub(crate) unsafe fn new(first: *const pf_block_t, count: c_uint) -> Result<Self, Failure> {
        if count > 0 {
            check_out(first, "lists")?;
        }
        let lists = Self { first, taken: 0, count: (count as usize).min(MOST_LISTS) };
        for index in 0..lists.count {
            let List(list) = lists.read(index);
            if list.va.is_null() {
                return Err(fail!(EFAULT, "list page {index} has no memory: its va is NULL"));
            }
            if list.va.addr() % 8 != 0 {
                let va = list.va;
                return Err(fail!(EINVAL, "list page {index} at {va:p} is not aligned to 8 bytes"));
            }
        }
        Ok(lists)
    }

    /// Reads an element, whose index is below the count.
    fn read(&self, index: usize) -> List {
        // SAFETY: one of the elements, as promised to `new`. C need not align them.
        List(unsafe { self.first.wrapping_add(index).read_unaligned() })
    }
}

/// A list page that the caller passed, which stays the caller's.
pub(crate) struct List(pf_block_t);

impl ListPage for List {
    fn iova(&self) -> Iova {
        Iova::new(self.0.iova)
    }

    fn memory(&self) -> DmaMemory<'_> {
        match NonNull::new(self.0.va) {
            // SAFETY: as promised to `Lists::new`.
            Some(base) => unsafe { DmaMemory::from_raw(base.cast(), self.0.len as usize) },
            None => DmaMemory::EMPTY,
        }
    }

    fn quarantine(self) {}
}

impl ListPages for Lists {
    type Page = List;
    type TakeError = NoLists;

    fn take(&mut self) -> Result<List, NoLists> {
        if self.taken == self.count {
            return Err(NoLists { count: self.count });
        }
        self.taken += 1;
        Ok(self.read(self.taken - 1))
    }

    fn give(&mut self, _: List) {}
}

/// Lays out the segments as PRP entries for pages of 4 KiB, and returns PRP1 and PRP2, and how many
/// list pages were used.
///
/// # Errors
/// `EINVAL`; `ENOSPC` if there are too few list pages.
pub(crate) fn prp(
    segments: impl IntoIterator<Item = Segment>,
    mut lists: Lists,
) -> Result<([u64; 2], usize), Failure> {
    let laid_out = Prps::<List, MOST_LISTS>::new(ControllerPage::SIZE_4K, segments, &mut lists);
    let prps = laid_out.map_err(|error| match &error {
        LayoutError::Take(_) | LayoutError::TooLong { .. } => fail!(ENOSPC, "{error}"),
        _ => fail!(EINVAL, "{error}"),
    })?;
    Ok(([prps.prp1(), prps.prp2()], prps.list_pages()))
}

/// Lays out the segments as SGL descriptors, and returns the descriptor of the command, and how
/// many list pages were used.
///
/// # Errors
/// As [`prp`].
pub(crate) fn sgl(
    segments: impl IntoIterator<Item = Segment>,
    mut lists: Lists,
) -> Result<([u8; 16], usize), Failure> {
    let any = Profile::new(u32::MAX, u64::from(u32::MAX), 0, 1);
    let any = any.map_err(|error| fail!(EINVAL, "{error}"))?;
    let laid_out = Sgl::<List, MOST_LISTS>::new(&any, segments, &mut lists);
    let sgl = laid_out.map_err(|error| match &error {
        LayoutError::Take(_) | LayoutError::TooLong { .. } => fail!(ENOSPC, "{error}"),
        _ => fail!(EINVAL, "{error}"),
    })?;
    let mut bytes = [0; 16];
    for (to, word) in bytes.chunks_exact_mut(8).zip(sgl.sgl1().words()) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    Ok((bytes, sgl.list_pages()))
}

/// The most bytes of a segment whose length has 32 bits, in whole pages.
const MOST_BYTES: u64 = 0xffff_f000;

/// Yields the segments, cut where their length exceeds 32 bits, and at most `max`.
///
/// # Errors
/// `ENOSPC`: there are more.
pub(crate) fn segments(
    segments: impl IntoIterator<Item = Segment>,
    max: u32,
) -> Result<impl Iterator<Item = Result<Segment, Failure>>, Failure> {
    let profile = Profile::new(max, MOST_BYTES, 0, 1);
    let profile = profile.map_err(|_| fail!(ENOSPC, "room for 0 segments: pass at least 1"))?;
    let cut = profile.gather(segments);
    Ok(cut.map(|segment| {
        segment.map_err(|error| match error {
            GatherError::TooMany { .. } => fail!(ENOSPC, "{error}"),
            _ => fail!(EINVAL, "{error}"),
        })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::core::dma_pool::PoolLocal;
    use pinfold::{Arena, DmaPool, Domain};
    use proptest::prelude::*;

    /// Pages of memory for lists, and their addresses for the controller.
    fn pages(count: usize, bytes: usize) -> (Vec<u64>, Vec<pf_block_t>) {
        let mut memory = vec![0u64; (count + 1) * bytes / 8];
        let base: *mut u8 = memory.as_mut_ptr().cast();
        let first = base.addr().next_multiple_of(bytes) - base.addr();
        let block = |at| pf_block_t {
            va: base.wrapping_add(first + at * bytes).cast(),
            iova: 0x7000_0000 + (at * bytes) as u64,
            len: u32::try_from(bytes).unwrap(),
            tag: 0,
        };
        (memory, (0..count).map(block).collect())
    }

    /// # Safety
    /// As for [`Lists::new`].
    unsafe fn lists(blocks: &[pf_block_t]) -> Result<Lists, Failure> {
        // SAFETY: as the caller promises.
        unsafe { Lists::new(blocks.as_ptr(), u32::try_from(blocks.len()).unwrap()) }
    }

    /// The crate's own, with list pages of a pool.
    fn pool() -> PoolLocal {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(8 << 20).build(&domain).unwrap();
        DmaPool::builder("lists").block(4096).align(4096).build(&arena).unwrap().local()
    }

    /// All words of a list, with the addresses of other list pages as their numbers.
    fn words(list: DmaMemory<'_>, count: usize, number: impl Fn(u64) -> Option<usize>) -> Vec<u64> {
        let word = |at| u64::from_le(list.read_u64(at * 8).unwrap());
        (0..count).map(word).map(|word| number(word).map_or(word, |at| at as u64 + 1)).collect()
    }

    /// Records the pages of a pool's lists as they are allocated.
    struct Noting<'l>(&'l mut PoolLocal, Vec<(u64, usize)>);

    impl ListPages for Noting<'_> {
        type Page = <PoolLocal as ListPages>::Page;
        type TakeError = <PoolLocal as ListPages>::TakeError;

        fn take(&mut self) -> Result<Self::Page, Self::TakeError> {
            let page = self.0.take()?;
            self.1.push((page.iova().raw(), page.memory().addr()));
            Ok(page)
        }

        fn give(&mut self, page: Self::Page) {
            self.0.give(page);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn prp_lists_agree_with_those_of_a_pool(offset in 0u64..4096 * 4, len in 1u64..9 << 20) {
            let segment = Segment { iova: Iova::new(0x10_0000_0000 + offset / 4 * 4), len };
            let (_memory, blocks) = pages(8, 4096);
            // SAFETY: the memory of the blocks is live, and used here only.
            let (entries, used) = prp([segment], unsafe { lists(&blocks) }.unwrap()).unwrap();
            let mut local = pool();
            let mut own = Noting(&mut local, Vec::new());
            let prps = Prps::<_, 8>::new(ControllerPage::SIZE_4K, [segment], &mut own).unwrap();
            let taken = std::mem::take(&mut own.1);
            prop_assert_eq!((entries[0], used), (prps.prp1(), prps.list_pages()));
            let theirs = |word| taken.iter().position(|(iova, _)| *iova == word);
            let ours = |word| blocks.iter().position(|block| block.iova == word);
            prop_assert_eq!(ours(entries[1]), theirs(prps.prp2()));
            if used == 0 {
                prop_assert_eq!(entries[1], prps.prp2());
            }
            // Entries, and a pointer at the end of each full list but the last.
            let mut left = prps.entries().saturating_sub(1);
            for (at, (_, addr)) in taken.iter().enumerate() {
                let here = if left > 512 { 512 } else { left };
                left -= if left > 512 { 511 } else { left };
                let here = usize::try_from(here).unwrap();
                let base = NonNull::new(std::ptr::with_exposed_provenance_mut(*addr)).unwrap();
                // SAFETY: a block of the pool, which is held.
                let theirs = words(unsafe { DmaMemory::from_raw(base, 4096) }, here, theirs);
                prop_assert_eq!(words(List(blocks[at]).memory(), here, ours), theirs);
            }
            prps.release(&mut own);
        }

        #[test]
        fn sgls_agree_with_those_of_a_pool(starts in prop::collection::vec((0u64..1 << 30, 1u64..1 << 33), 1..700)) {
            let mut end = 0;
            let segments: Vec<_> = starts.into_iter().map(|(gap, len)| {
                let iova = Iova::new(end + gap + 1);
                end = iova.raw() + len;
                Segment { iova, len }
            }).collect();
            let (_memory, blocks) = pages(16, 4096);
            // SAFETY: the memory of the blocks is live, and used here only.
            let (bytes, used) = sgl(segments.clone(), unsafe { lists(&blocks) }.unwrap()).unwrap();
            let mut local = pool();
            let mut own = Noting(&mut local, Vec::new());
            let any = Profile::new(u32::MAX, u64::from(u32::MAX), 0, 1).unwrap();
            let sgl = Sgl::<_, 16>::new(&any, segments, &mut own).unwrap();
            let taken = std::mem::take(&mut own.1);
            prop_assert_eq!(used, sgl.list_pages());
            let theirs = |word| taken.iter().position(|(iova, _)| *iova == word);
            let ours = |word| blocks.iter().position(|block| block.iova == word);
            let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            prop_assert_eq!(ours(first), theirs(sgl.sgl1().iova().raw()));
            prop_assert_eq!(&bytes[8..], &sgl.sgl1().words()[1].to_le_bytes());
            let mut left = usize::try_from(sgl.data_blocks()).unwrap();
            for (at, (_, addr)) in taken.iter().enumerate() {
                let here = left.min(256);
                left -= if left > 256 { 255 } else { left };
                let base = NonNull::new(std::ptr::with_exposed_provenance_mut(*addr)).unwrap();
                // SAFETY: a block of the pool, which is held.
                let theirs = words(unsafe { DmaMemory::from_raw(base, 4096) }, here * 2, theirs);
                prop_assert_eq!(words(List(blocks[at]).memory(), here * 2, ours), theirs);
            }
            sgl.release(&mut own);
        }
    }

    #[test]
    fn list_pages_that_cannot_be_used_are_refused() {
        let segment = |len| [Segment { iova: Iova::new(0x1000), len }];
        let (_memory, mut blocks) = pages(2, 4096);
        // SAFETY: the memory of the blocks is live, and used here only.
        let refused = |blocks: &[pf_block_t], len| match unsafe { lists(blocks) } {
            Ok(lists) => prp(segment(len), lists).map_or_else(|failure| failure.errno(), |_| 0),
            Err(failure) => failure.errno(),
        };
        assert_eq!(refused(&blocks, 1 << 20), 0);
        assert_eq!(refused(&[], 8192), 0);
        assert_eq!(refused(&[], 8193), libc::ENOSPC);
        assert_eq!(refused(&blocks, 8 << 20), libc::ENOSPC);
        assert_eq!(refused(&blocks, 0), libc::EINVAL);
        blocks[0].len = 4095;
        assert_eq!(refused(&blocks, 1 << 20), libc::EINVAL);
        (blocks[0].len, blocks[0].iova) = (4096, 0x7000_0800);
        assert_eq!(refused(&blocks, 1 << 20), libc::EINVAL);
        blocks[1].va = blocks[1].va.wrapping_byte_add(4);
        assert_eq!(refused(&blocks, 1 << 20), libc::EINVAL);
        blocks[1].va = std::ptr::null_mut();
        assert_eq!(refused(&blocks, 1 << 20), libc::EFAULT);
    }

    #[test]
    fn segments_are_cut_where_their_length_has_no_room() {
        let memory = [Segment { iova: Iova::new(0x1000), len: 9 << 30 }];
        let cut: Vec<_> = segments(memory, 3).unwrap().map(Result::unwrap).collect();
        assert_eq!(cut.iter().map(|one| one.len).sum::<u64>(), 9 << 30);
        assert!(cut.iter().all(|one| u32::try_from(one.len).is_ok()));
        let refused = segments(memory, 2).unwrap().find_map(Result::err).unwrap();
        assert_eq!(refused.errno(), libc::ENOSPC);
        assert_eq!(segments(memory, 0).map(drop).unwrap_err().errno(), libc::ENOSPC);
    }
}
