//! The walker: reads a table as VT-d specifies it, without the core's code that writes it.
//!
//! Second stage (VT-d specification, "Second-Stage Paging Entries"): bit 0 allows reads, bit 1
//! writes; with neither the entry is not present, whatever the rest says; bits 8..=10 are reserved
//! in a leaf, as are bits 52 and up here.
//!
//! First stage ("First-Stage Paging Entries"): bit 0 means present and allows reads, bit 1 writes;
//! an entry without bit 2 is for privileged requests only; bit 63 is reserved here.
//!
//! In both, bit 7 makes an entry of level 2 or 3 a leaf; bits 12..=51 are the address, those beyond
//! the width of physical addresses reserved; in a large leaf the address bits below its size are
//! reserved.

use crate::config::Stage;
use crate::device::State;
use crate::fault::FaultKind;
use crate::int::to_usize;
use crate::memory::inside;
use crate::tlb::{Held, Leaf};
use crate::unit::Unit;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, PageSize};
use std::sync::atomic::Ordering;

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const LEAF: u64 = 1 << 7;
const USER: u64 = 1 << 2;

/// Finds the leaf for `iova`, starting at the lowest table page in the device's walk cache.
pub(super) fn walk(unit: &Unit, state: &mut State, iova: Iova) -> Result<Leaf, FaultKind> {
    let (levels, root) = unit.root().ok_or(FaultKind::NotMapped)?;
    // In the first stage the highest bit repeats itself up to bit 63: the domain maps in the lower
    // half only.
    let half = u32::from(unit.config.stage == Stage::First);
    if iova.raw() >> (12 + 9 * u32::from(levels) - half) != 0 {
        return Err(FaultKind::TooWide);
    }
    let both = Access::READ | Access::WRITE;
    let (mut level, mut at) = match state.walks.lowest(iova) {
        Some((level, Some(held))) => (level, held),
        Some((_, None)) => return Err(FaultKind::NotMapped),
        None => (levels, Held { page: root, access: both }),
    };
    loop {
        let shift = 12 + 9 * (u32::from(level) - 1);
        let index = to_usize(iova.raw() >> shift & 511);
        let page = unit.tables.page(at.page).ok_or(FaultKind::BadTable)?;
        let entry = page.entries().get(index).ok_or(FaultKind::BadTable)?.load(Ordering::Acquire);
        state.count_walk_read(unit.walk_ns);
        let Some(allowed) = access(unit.config.stage, entry) else {
            if unit.config.caching_mode {
                state.put_absent(level, iova);
            }
            return Err(FaultKind::NotMapped);
        };
        let access = at.access & allowed;
        if (entry & ADDRESS) >> unit.config.phys_bits.min(52) != 0 {
            return Err(FaultKind::ReservedBits);
        }
        if level == 1 || entry & LEAF != 0 {
            return leaf(unit, state, entry, level, access);
        }
        let page = unit.tables.page_at(entry & ADDRESS).ok_or(FaultKind::BadTable)?;
        level -= 1;
        at = Held { page, access };
        state.walks.put(level, iova, Some(at));
    }
}

/// Returns the access that an entry allows, unless it is not present.
fn access(stage: Stage, entry: u64) -> Option<Access> {
    match stage {
        Stage::Second => (entry & 3 != 0).then_some(Access::from_bits_truncate((entry & 3) as u8)),
        Stage::First if entry & 1 == 0 => None,
        Stage::First if entry & USER == 0 => Some(Access::empty()),
        Stage::First if entry & 2 == 0 => Some(Access::READ),
        Stage::First => Some(Access::READ | Access::WRITE),
    }
}

fn leaf(
    unit: &Unit,
    state: &mut State,
    entry: u64,
    level: u8,
    access: Access,
) -> Result<Leaf, FaultKind> {
    let size = match level {
        1 => PageSize::Size4K,
        2 => PageSize::Size2M,
        3 => PageSize::Size1G,
        _ => return Err(FaultKind::ReservedBits),
    };
    let addr = entry & ADDRESS;
    let reserved = match unit.config.stage {
        Stage::First => 1 << 63,
        Stage::Second => 0xfff << 52 | 7 << 8,
    };
    if addr & size.mask() != 0 || entry & reserved != 0 {
        return Err(FaultKind::ReservedBits);
    }
    let (addr, len) = (to_usize(addr), to_usize(size.bytes()));
    let memory = unit.find(state, addr, len).ok_or(FaultKind::NotRegistered)?;
    Ok(Leaf { memory: inside(memory, addr, len), access, size })
}
