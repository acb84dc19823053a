//! Memory: pages, NUMA nodes, and the limit of locked memory.

use crate::probe::facts::{Facts, NumaNode};
use crate::probe::finding::{Finding, State, bytes, finding};
use crate::sys::hugepages::{self, HugetlbPool, Thp};
use pinfold_core::addr::PageSize;

/// Many times what `pinfold copy` needs by default.
const ENOUGH_TO_LOCK: u64 = 256 << 20;
/// How much the suggested commands reserve.
const SUGGESTED: u64 = 1 << 30;

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![memory(facts)];
    for page in [PageSize::Size2M, PageSize::Size1G] {
        all.push(hugetlb(facts, page));
    }
    all.push(transparent(facts.thp));
    all.push(memlock(facts));
    all.push(numa(facts));
    all
}

fn memory(facts: &Facts) -> Finding {
    match (facts.memory_bytes, facts.available_bytes) {
        (Some(total), Some(free)) => {
            finding("memory", State::Good, format!("{} of {} available", bytes(free), bytes(total)))
        }
        (Some(total), None) => finding("memory", State::Good, bytes(total)),
        _ => finding("memory", State::Limited, "unknown: /proc/meminfo is not readable"),
    }
}

fn hugetlb(facts: &Facts, page: PageSize) -> Finding {
    let what = format!("hugepages {page}");
    let of_size = |pool: &&HugetlbPool| pool.page_bytes == page.bytes();
    let Some(pool) = facts.hugetlb.iter().filter(of_size).find(|pool| pool.node.is_none()) else {
        return finding(what, State::Missing, "this kernel or processor has no pages of this size");
    };
    let nodes: Vec<String> = facts
        .hugetlb
        .iter()
        .filter(of_size)
        .filter_map(|pool| Some(format!("node {}: {} of {}", pool.node?, pool.free, pool.total)))
        .collect();
    let by_node = if nodes.len() > 1 { format!(" ({})", nodes.join(", ")) } else { String::new() };
    let detail = format!("{} free of {} reserved{by_node}", pool.available(), pool.total);
    let want = pool.total.saturating_add((SUGGESTED / page.bytes()).max(1));
    let command = hugepages::reserve_command(page, want, None);
    match (pool.available(), pool.total) {
        (1.., _) => finding(what, State::Good, detail),
        (0, 1..) => finding(what, State::Limited, detail).fixed_by(command),
        (0, 0) => finding(what, State::Missing, "none reserved").fixed_by(command),
    }
}

fn transparent(thp: Option<Thp>) -> Finding {
    let what = "transparent hugepages";
    match thp {
        Some(Thp::Always) => finding(what, State::Good, "always"),
        Some(Thp::Madvise) => {
            finding(what, State::Good, "madvise: for programs that request them, as Pinfold does")
        }
        Some(Thp::Never) => finding(what, State::Missing, "never: switched off")
            .fixed_by("sudo sh -c 'echo madvise > /sys/kernel/mm/transparent_hugepage/enabled'"),
        None => finding(what, State::Missing, "this kernel has none"),
    }
}

fn memlock(facts: &Facts) -> Finding {
    let limit = &facts.memlock;
    let what = "MEMLOCK";
    let words = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), bytes);
    let used = limit.used.map_or(String::new(), |used| format!(", {} used", bytes(used)));
    let detail = format!("soft {}, hard {}{used}", words(limit.soft), words(limit.hard));
    if limit.lifted {
        return finding(what, State::Good, format!("{detail}; CAP_IPC_LOCK lifts it"));
    }
    match limit.left() {
        None => finding(what, State::Good, detail),
        Some(left) if left >= ENOUGH_TO_LOCK => finding(what, State::Good, detail),
        Some(_) => finding(what, State::Limited, detail).fixed_by(limit.raise_command(SUGGESTED)),
    }
}

fn numa(facts: &Facts) -> Finding {
    let node = |node: &NumaNode| match (node.free_bytes, node.total_bytes) {
        (Some(free), Some(total)) => {
            format!("node {}: {} of {} free", node.node, bytes(free), bytes(total))
        }
        _ => format!("node {}", node.node),
    };
    let detail: Vec<String> = facts.nodes.iter().map(node).collect();
    match detail.len() {
        0 => finding("NUMA", State::Limited, "unknown: the online nodes are not listed"),
        _ => finding("NUMA", State::Good, detail.join(", ")),
    }
}
