//! The commands that give a run the memory it was refused: one for each limit, with the sum of what
//! its parts need.

use crate::setup::stack::Stack;
use pinfold::MemlockLimit;
use pinfold::arena::{NotLocked, Residency, SourceUnavailable, UnavailableReason};
use pinfold::probe::SystemMemory;
use pinfold::probe::control_group::{self, GroupLimit};
use pinfold::probe::hugepages::{self, HugetlbPool};
use pinfold_core::addr::PageSize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Returns the commands for `stack`, and for rings to which the limit of locked memory refused
/// `to_rings` bytes.
pub(super) fn commands(stack: &Stack, to_rings: u64) -> Vec<String> {
    let pool = |page| hugepages::pool(Path::new("/sys"), page);
    let unavailable =
        stack.arenas().flat_map(|(_, arena)| arena.report().unavailable).collect::<Vec<_>>();
    let available = SystemMemory::read(Path::new("/proc")).available;
    let mut fixes = sources(unavailable.iter(), pool, available);
    let not_locked = stack.arenas().filter_map(|(_, arena)| match arena.report().residency {
        Residency::NotLocked(NotLocked::Limit { requested, limit, .. }) => Some((requested, limit)),
        _ => None,
    });
    fixes.extend(memlock(not_locked, to_rings, pinfold::MemlockLimit::here));
    fixes.iter().map(|fix| pinfold::probe::placed(fix)).collect()
}

/// Sums up the missing hugepages, on top of those the pool has, and returns every other command
/// once.
fn sources<'a>(
    unavailable: impl Iterator<Item = &'a SourceUnavailable>,
    pool: impl Fn(PageSize) -> Option<HugetlbPool>,
    available: u64,
) -> Vec<String> {
    let mut needed: BTreeMap<u64, (PageSize, u64)> = BTreeMap::new();
    let mut groups: BTreeMap<PathBuf, (GroupLimit, u64)> = BTreeMap::new();
    let mut fixes: Vec<String> = Vec::new();
    for SourceUnavailable { reason, fix, .. } in unavailable {
        match (reason, fix) {
            (UnavailableReason::FewHugepages { page, needed: pages, .. }, _) => {
                needed.entry(page.bytes()).or_insert((*page, 0)).1 += pages;
            }
            (UnavailableReason::ControlGroup { needed, limits, .. }, _) => {
                for limit in limits {
                    groups.entry(limit.file.clone()).or_insert((limit.clone(), 0)).1 += needed;
                }
            }
            (_, Some(fix)) if !fixes.contains(fix) => fixes.push(fix.clone()),
            _ => {}
        }
    }
    let reserve = |(page, pages): (PageSize, u64)| {
        let pool = pool(page)?;
        let missing = pages.saturating_sub(pool.available());
        hugepages::grow_command(page, (pool.total, missing), None, available).ok()
    };
    let raise = |(limit, bytes)| control_group::raise_command(&[limit], bytes);
    needed
        .into_values()
        .filter_map(reserve)
        .chain(groups.into_values().map(raise))
        .chain(fixes)
        .collect()
}

/// Returns the command that raises RLIMIT_MEMLOCK for locked memory (the last refusal has the
/// highest usage) and for memory of rings: the kernel counts the one by process, the other by user,
/// and compares each with the limit. Whatever the user's processes have is within the present
/// limit, so that and what was refused is enough.
fn memlock(
    not_locked: impl Iterator<Item = (u64, MemlockLimit)>,
    to_rings: u64,
    here: impl Fn() -> MemlockLimit,
) -> Option<String> {
    let (requested, limit) = not_locked.fold((0u64, None), |(all, _), (requested, limit)| {
        (all.saturating_add(requested), Some(limit))
    });
    let locked = limit.map_or(0, |limit| requested.saturating_add(limit.used.unwrap_or(0)));
    if locked == 0 && to_rings == 0 {
        return None;
    }
    let limit = limit.unwrap_or_else(here);
    let soft = limit.soft.unwrap_or(0);
    match soft.saturating_add(to_rings) {
        user if to_rings > 0 && user >= locked => Some(limit.raise_command_for_user(to_rings)),
        _ => Some(limit.raise_command(locked.saturating_sub(limit.used.unwrap_or(0)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::Source;

    fn few(page: PageSize, needed: u64, free: u64, total: u64) -> SourceUnavailable {
        let reason = UnavailableReason::FewHugepages { page, needed, free, total };
        SourceUnavailable {
            source: Source::Hugetlb2M,
            reason,
            fix: Some("of this arena alone".into()),
        }
    }

    fn sources<'a>(
        unavailable: impl Iterator<Item = &'a SourceUnavailable>,
        pool: impl Fn(PageSize) -> Option<HugetlbPool>,
    ) -> Vec<String> {
        super::sources(unavailable, pool, 64 << 30)
    }

    fn pool(total: u64, free: u64) -> impl Fn(PageSize) -> Option<HugetlbPool> {
        move |page| {
            let page_bytes = page.bytes();
            Some(HugetlbPool { page_bytes, node: None, total, free, reserved: 0, overcommit: 0 })
        }
    }

    #[test]
    fn the_pages_of_all_arenas_are_one_command_beyond_the_pool() {
        let page = PageSize::Size2M;
        let both = [few(page, 8, 0, 0), few(page, 3, 0, 0)];
        assert_eq!(sources(both.iter(), pool(0, 0)), ["sudo sysctl vm.nr_hugepages=11"]);
        // Five are in use elsewhere, and two are free.
        assert_eq!(sources(both.iter(), pool(7, 2)), ["sudo sysctl vm.nr_hugepages=16"]);
        // The data arena got none of the four pages, and the control arena three.
        assert_eq!(
            sources([few(page, 8, 4, 4)].iter(), pool(4, 1)),
            ["sudo sysctl vm.nr_hugepages=11"]
        );
        let large = [few(PageSize::Size1G, 1, 0, 0), few(page, 512, 0, 0)];
        assert_eq!(sources(large.iter(), pool(0, 0)).len(), 2, "a pool for each size");
        let words = super::sources(both.iter(), pool(0, 0), 270 << 20);
        assert!(words.is_empty(), "the pages would leave nothing: {words:?}");
    }

    #[test]
    fn a_control_group_is_raised_once_for_all_arenas() {
        let refused = |needed| {
            let limit =
                GroupLimit { file: "/cg/hugetlb.2MB.max".into(), limit: 4 << 20, used: 2 << 20 };
            let page = PageSize::Size2M;
            let reason = UnavailableReason::ControlGroup { page, needed, limits: vec![limit] };
            SourceUnavailable {
                source: Source::Hugetlb2M,
                reason,
                fix: Some("of this arena alone".into()),
            }
        };
        let both = [refused(8 << 20), refused(4 << 20)];
        assert_eq!(
            sources(both.iter(), pool(8, 8)),
            ["sudo sh -c 'echo 14680064 > /cg/hugetlb.2MB.max'"],
            "on top of what is in use"
        );
    }

    #[test]
    fn other_commands_are_returned_once() {
        let off = || SourceUnavailable {
            source: Source::Thp,
            reason: UnavailableReason::TransparentOff,
            fix: Some("on".into()),
        };
        assert_eq!(sources([off(), off()].iter(), pool(0, 0)), ["on"]);
        assert!(sources([].iter(), pool(0, 0)).is_empty());
    }

    #[test]
    fn locked_memory_is_one_limit() {
        let limit = |used| MemlockLimit {
            soft: Some(8 << 20),
            hard: None,
            used: Some(used),
            lifted: false,
        };
        let here = || limit(1 << 20);
        let two = || [(16 << 20, limit(0)), (4 << 20, limit(1 << 20))].into_iter();
        assert_eq!(memlock(two(), 0, here).unwrap(), "ulimit -l 21504");
        assert_eq!(memlock(two(), 1 << 20, here).unwrap(), "ulimit -l 21504");
        assert_eq!(memlock(two(), 64 << 20, here).unwrap(), "ulimit -l 73728");
        assert_eq!(memlock([].into_iter(), 16 << 20, here).unwrap(), "ulimit -l 24576");
        assert_eq!(memlock([].into_iter(), 0, here), None);
    }
}
