//! The IOMMU of a container: type 1, versions 1 and 2 (`linux/vfio.h`).

use super::abi::{Answer, Capabilities, Struct};
use super::{Caller, Shared};
use crate::findings;
use crate::process::Memory;
use crate::space::{Entry, Space, Span};
use std::sync::Arc;

/// `VFIO_TYPE1_IOMMU`, `VFIO_TYPE1v2_IOMMU`, and the extensions that the kernel knows beside them.
pub(crate) const TYPE1: u64 = 1;
pub(crate) const TYPE1_V2: u64 = 3;
pub(crate) const DMA_CC_IOMMU: u64 = 4;
/// Nested domains, which Linux 6.13 has removed.
pub(crate) const NESTING: u64 = 6;
pub(crate) const UNMAP_ALL: u64 = 9;
pub(crate) const UPDATE_VADDR: u64 = 10;

/// The module's parameter `dma_entry_limit`.
const ENTRY_LIMIT: usize = 65_535;
/// The page sizes that the kernel reports: all from 4 KiB on that the IOMMU has.
const PAGE_SIZES: u64 = 0x4020_1000;
const PAGE_MASK: u64 = 0xfff;
/// From how many mappings of one page on that is noted.
const OFTEN: usize = 16;

const MAP_READ: u32 = 1;
const MAP_WRITE: u32 = 2;
const MAP_VADDR: u32 = 4;
const UNMAP_DIRTY: u32 = 1;
const UNMAP_FLAG_ALL: u32 = 2;
const UNMAP_VADDR: u32 = 4;

/// Returns the addresses that the IOMMU translates: those of its width, without the window of
/// interrupts.
pub(crate) fn ranges(bits: u32) -> [Span; 2] {
    let last = 1u64.checked_shl(bits).map_or(u64::MAX, |end| end - 1);
    [Span { first: 0, last: 0xfedf_ffff }, Span { first: 0xfef0_0000, last }]
}

/// Returns whether all of `span` is translated.
pub(crate) fn is_translated(bits: u32, span: Span) -> bool {
    ranges(bits).iter().any(|range| range.holds(&span))
}

/// An IOMMU that is set in a container.
#[derive(Clone, Debug)]
pub(crate) struct Type1 {
    pub(crate) version_2: bool,
    pub(crate) space: Arc<Space>,
}

impl Type1 {
    /// `VFIO_IOMMU_GET_INFO`.
    pub(crate) fn info(&self, shared: &Shared, caller: &Caller) -> Answer {
        const LEAST: usize = 16;
        const WHOLE: usize = 24;
        let at = caller.argument;
        let mut info = Struct::sized(&caller.memory, at, LEAST)?;
        let given = usize::try_from(info.u32(0)).unwrap_or(WHOLE).min(WHOLE);
        info.0.resize(WHOLE, 0);
        // Page sizes are valid, and there is a chain.
        info.set_u32(4, 1 | 2);
        info.set_u64(8, PAGE_SIZES);
        info.set_u32(16, 0);
        let mut chain = Capabilities::default();
        let mut body = Vec::new();
        // Migration: flags, the page sizes of the bitmap, the largest bitmap.
        body.extend([0; 8]);
        body.extend(4096u64.to_ne_bytes());
        body.extend((256u64 << 20).to_ne_bytes());
        chain.add(WHOLE, 2, 1, &body);
        let left = u32::try_from(ENTRY_LIMIT.saturating_sub(self.space.count())).unwrap_or(0);
        chain.add(WHOLE, 3, 1, &left.to_ne_bytes());
        let ranges = ranges(shared.iova_bits);
        let mut body = vec![];
        body.extend(u32::try_from(ranges.len()).unwrap_or(0).to_ne_bytes());
        body.extend([0; 4]);
        for range in ranges {
            body.extend(range.first.to_ne_bytes());
            body.extend(range.last.to_ne_bytes());
        }
        chain.add(WHOLE, 1, 1, &body);
        chain.finish(&mut info, WHOLE, 16, &caller.memory, at)?;
        info.0.truncate(given);
        info.write(&caller.memory, at)
    }

    /// `VFIO_IOMMU_MAP_DMA`: returns what it has mapped.
    pub(crate) fn map(&self, shared: &Shared, caller: &Caller) -> Result<Span, i32> {
        let map = Struct::sized(&caller.memory, caller.argument, 32)?;
        let (flags, vaddr, iova, size) = (map.u32(4), map.u64(8), map.u64(16), map.u64(24));
        if flags & !(MAP_READ | MAP_WRITE | MAP_VADDR) != 0 {
            return Err(libc::EINVAL);
        }
        let rights = flags & (MAP_READ | MAP_WRITE);
        if (rights != 0) == (flags & MAP_VADDR != 0) {
            return Err(libc::EINVAL);
        }
        if size == 0 || (size | iova | vaddr) & PAGE_MASK != 0 {
            return Err(libc::EINVAL);
        }
        let span = Span::new(iova, size).ok_or(libc::EINVAL)?;
        Span::new(vaddr, size).ok_or(libc::EINVAL)?;
        let refused = |errno| {
            self.space.refused(span, caller.site(), errno);
            errno
        };
        if flags & MAP_VADDR != 0 {
            // No unmap has invalidated an address.
            let known = self.space.overlapping(span).is_some();
            return Err(refused(if known { libc::EINVAL } else { libc::ENOENT }));
        }
        if self.space.overlapping(span).is_some() {
            return Err(refused(libc::EEXIST));
        }
        let count = self.space.count();
        if count >= ENTRY_LIMIT {
            return Err(refused(libc::ENOSPC));
        }
        if !is_translated(shared.iova_bits, span) {
            return Err(refused(libc::EINVAL));
        }
        let (read, write) = (flags & MAP_READ != 0, flags & MAP_WRITE != 0);
        add(shared, caller, &self.space, span, vaddr, [read, write], true).map_err(refused)?;
        if count + 1 == ENTRY_LIMIT / 10 * 9 {
            let text = format!("{} of {ENTRY_LIMIT} mappings of a container are in use", count + 1);
            shared.findings.add(&findings::ENTRY_LIMIT, text, || vec![caller.site().describe()]);
        }
        Ok(span)
    }

    /// `VFIO_IOMMU_UNMAP_DMA`.
    pub(crate) fn unmap(&self, shared: &Shared, caller: &Caller) -> Answer {
        let mut unmap = Struct::sized(&caller.memory, caller.argument, 24)?;
        let (flags, iova, size) = (unmap.u32(4), unmap.u64(8), unmap.u64(16));
        if flags & !(UNMAP_DIRTY | UNMAP_FLAG_ALL | UNMAP_VADDR) != 0
            || flags & UNMAP_DIRTY != 0 && flags & (UNMAP_FLAG_ALL | UNMAP_VADDR) != 0
        {
            return Err(libc::EINVAL);
        }
        if flags & (UNMAP_DIRTY | UNMAP_VADDR) != 0 {
            shared.not_covered("VFIO_IOMMU_UNMAP_DMA with flags for migration or an exec");
            return Err(libc::EINVAL);
        }
        let all = flags & UNMAP_FLAG_ALL != 0;
        let span = if all {
            (iova == 0 && size == 0).then_some(Span { first: 0, last: u64::MAX })
        } else if (iova | size) & PAGE_MASK != 0 {
            None
        } else {
            Span::new(iova, size)
        };
        let span = span.ok_or(libc::EINVAL)?;
        if !all && self.version_2 {
            let first = self.space.at(span.first);
            let last = self.space.at(span.last);
            if first.is_some_and(|map| map.span.first != span.first)
                || last.is_some_and(|map| map.span.last != span.last)
            {
                let text = format!("an unmap of {span} would cut a mapping, and was refused");
                shared.findings.add(&findings::UNMAP_PART, text, || vec![caller.site().describe()]);
                return Err(libc::EINVAL);
            }
        }
        // Version 1 unmaps nothing where a mapping begins before, and whole one that ends behind.
        let begins_before =
            !all && self.space.at(span.first).is_some_and(|map| map.span.first < span.first);
        let removed = if begins_before { 0 } else { remove(shared, caller, &self.space, span) };
        if removed == 0 && !all {
            let text = format!("an unmap of {span} found nothing that is mapped");
            shared.findings.add(&findings::UNMAP_NOTHING, text, || vec![caller.site().describe()]);
        }
        unmap.set_u64(16, removed);
        unmap.write(&caller.memory, caller.argument)
    }
}

/// Returns whether the caller may lock `more` bytes beside those that it has in an address space.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn may_lock(caller: &Caller, space: &Space, more: u64) -> Result<(), i32> {
    let limit = crate::process::lock_limit(caller.tid);
    let locked = space.charged(caller.memory.pid).saturating_add(more);
    if limit.is_some_and(|limit| locked > limit) { Err(libc::ENOMEM) } else { Ok(()) }
}

/// Adds a mapping of the caller's memory, which overlaps no other.
pub(crate) fn add(
    shared: &Shared,
    caller: &Caller,
    space: &Space,
    span: Span,
    vaddr: u64,
    [read, write]: [bool; 2],
    is_locked: bool,
) -> Result<(), i32> {
    if !Memory::is_mapped(caller.tid, vaddr, span.len(), write) {
        return Err(libc::EFAULT);
    }
    if is_locked {
        may_lock(caller, space, span.len())?;
    }
    let site = caller.site();
    let memory = caller.memory.clone();
    if space.copies(memory.pid, vaddr) + 1 == OFTEN {
        let text = format!("the page at {vaddr:#x} is mapped {OFTEN} times");
        shared.findings.add(&findings::MAPPED_OFTEN, text, || vec![site.describe()]);
    }
    space.insert(Entry { span, vaddr, read, write, memory, serial: 0, site });
    Ok(())
}

/// Removes the mappings that begin in a range, and returns their bytes.
pub(crate) fn remove(shared: &Shared, caller: &Caller, space: &Arc<Space>, span: Span) -> u64 {
    let site = caller.site();
    for function in
        shared.functions.iter().filter(|f| f.watch.is_attached(space) && !f.is_disabled())
    {
        function.watch.before_unmap(span, &site);
    }
    let removed = space.remove(span, &site);
    removed.iter().fold(0u64, |sum, map| sum.saturating_add(map.span.len()))
}
