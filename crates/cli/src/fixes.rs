//! The commands that get a run what it was refused: one for each limit, with what all parts of the run need together.

use crate::stack::Stack;
use pinfold::MemlockLimit;
use pinfold::arena::{NotLocked, Residency, SourceUnavailable, UnavailableReason};
use pinfold::probe::hugepages::{self, HugetlbPool};
use pinfold_core::addr::PageSize;
use std::collections::BTreeMap;
use std::path::Path;

/// The commands for `stack`, and for rings that could not register its memory: what each must be allowed to lock.
pub(crate) fn of(stack: &Stack, registered: impl Iterator<Item = u64>) -> Vec<String> {
    let pool = |page| hugepages::pool(Path::new("/sys"), page);
    let unavailable = stack.arenas().flat_map(|arena| arena.report().unavailable).collect::<Vec<_>>();
    let mut fixes = sources(unavailable.iter(), pool);
    let not_locked = stack.arenas().filter_map(|arena| match arena.report().residency {
        Residency::NotLocked(NotLocked::Limit { requested, limit, .. }) => Some((requested, limit)),
        _ => None,
    });
    fixes.extend(memlock(not_locked, registered.max()));
    fixes
}

/// Hugepages that are missing are added up and put on top of what the pool has; the other commands are told once.
fn sources<'a>(
    unavailable: impl Iterator<Item = &'a SourceUnavailable>,
    pool: impl Fn(PageSize) -> Option<HugetlbPool>,
) -> Vec<String> {
    let mut needed: BTreeMap<u64, (PageSize, u64)> = BTreeMap::new();
    let mut fixes: Vec<String> = Vec::new();
    for SourceUnavailable { reason, fix, .. } in unavailable {
        match (reason, fix) {
            (UnavailableReason::FewHugepages { page, needed: pages, .. }, _) => {
                needed.entry(page.bytes()).or_insert((*page, 0)).1 += pages;
            }
            (_, Some(fix)) if !fixes.contains(fix) => fixes.push(fix.clone()),
            _ => {}
        }
    }
    let reserve = |(page, pages): (PageSize, u64)| {
        let pool = pool(page)?;
        let missing = pages.saturating_sub(pool.available());
        Some(hugepages::reserve_command(page, pool.total.saturating_add(missing), None))
    };
    needed.into_values().filter_map(reserve).chain(fixes).collect()
}

/// One limit for what is locked (the last of the refusals knows of most that is) and for what a ring registers: the kernel
/// counts them apart, and compares each with it.
fn memlock(not_locked: impl Iterator<Item = (u64, MemlockLimit)>, registered: Option<u64>) -> Option<String> {
    let (asked, limit) =
        not_locked.fold((0u64, None), |(all, _), (asked, limit)| (all.saturating_add(asked), Some(limit)));
    let locked = limit.map_or(0, |limit| asked.saturating_add(limit.used.unwrap_or(0)));
    let most = locked.max(registered.unwrap_or(0));
    if most == 0 {
        return None;
    }
    match limit {
        Some(limit) => Some(limit.raise_command(most.saturating_sub(limit.used.unwrap_or(0)))),
        None => Some(format!("sudo prlimit --pid $$ --memlock={most}:{most}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::Source;

    fn few(page: PageSize, needed: u64, free: u64, total: u64) -> SourceUnavailable {
        let reason = UnavailableReason::FewHugepages { page, needed, free, total };
        SourceUnavailable { source: Source::Hugetlb2M, reason, fix: Some("of this arena alone".into()) }
    }

    fn pool(total: u64, free: u64) -> impl Fn(PageSize) -> Option<HugetlbPool> {
        move |page| {
            let page_bytes = page.bytes();
            Some(HugetlbPool { page_bytes, node: None, total, free, reserved: 0, overcommit: 0 })
        }
    }

    #[test]
    fn the_pages_of_all_arenas_are_one_command_on_top_of_what_there_is() {
        let page = PageSize::Size2M;
        let both = [few(page, 8, 0, 0), few(page, 3, 0, 0)];
        assert_eq!(sources(both.iter(), pool(0, 0)), ["sudo sysctl vm.nr_hugepages=11"]);
        // Others have five, and two are free.
        assert_eq!(sources(both.iter(), pool(7, 2)), ["sudo sysctl vm.nr_hugepages=16"]);
        // The data got none of the four that there were, and the controllers three of them.
        assert_eq!(sources([few(page, 8, 4, 4)].iter(), pool(4, 1)), ["sudo sysctl vm.nr_hugepages=11"]);
        let large = [few(PageSize::Size1G, 1, 0, 0), few(page, 512, 0, 0)];
        assert_eq!(sources(large.iter(), pool(0, 0)).len(), 2, "a pool for each size");
    }

    #[test]
    fn other_commands_are_told_once() {
        let off = || SourceUnavailable {
            source: Source::Transparent,
            reason: UnavailableReason::TransparentOff,
            fix: Some("on".into()),
        };
        assert_eq!(sources([off(), off()].iter(), pool(0, 0)), ["on"]);
        assert!(sources([].iter(), pool(0, 0)).is_empty());
    }

    #[test]
    fn what_is_to_be_locked_is_one_limit() {
        let limit = |used| MemlockLimit { soft: Some(8 << 20), hard: None, used: Some(used), lifted: false };
        let two = || [(16 << 20, limit(0)), (4 << 20, limit(1 << 20))].into_iter();
        assert_eq!(memlock(two(), None).unwrap(), "ulimit -l 21504");
        assert_eq!(memlock(two(), Some(1 << 20)).unwrap(), "ulimit -l 21504");
        assert_eq!(memlock(two(), Some(64 << 20)).unwrap(), "ulimit -l 65536");
        assert_eq!(memlock([].into_iter(), Some(4096)).unwrap(), "sudo prlimit --pid $$ --memlock=4096:4096");
        assert_eq!(memlock([].into_iter(), None), None);
    }
}
