//! Memory: pages, NUMA nodes, and the limit of locked memory.

use crate::probe::facts::{Facts, NumaNode};
use crate::probe::findings::{Finding, State, bytes, finding};
use crate::sys::control_group;
use crate::sys::hugepages::{self, HugetlbPool, Thp};
use crate::sys::limits::{MapLimit, MapSetting, SystemMemory};
use crate::sys::threads::ThreadLimit;
use pinfold_core::addr::PageSize;

/// Many times what `pinfold copy` needs by default, to use and to lock.
const ENOUGH: u64 = 256 << 20;
/// A server of many clients, or as many queues.
const ENOUGH_FILES: u64 = 256;
/// A server or a reception with a thread for each queue.
const ENOUGH_THREADS: u64 = 64;
/// The bytes that the suggested commands reserve.
pub(super) const SUGGESTED: u64 = 1 << 30;

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![memory(facts)];
    all.extend(facts.live.map_limits.iter().map(mapped));
    for page in [PageSize::Size2M, PageSize::Size1G] {
        all.push(hugetlb(facts, page));
    }
    all.push(transparent(facts));
    all.push(memlock(facts));
    all.push(open_files(facts));
    all.push(threads(facts));
    all.push(numa(facts));
    all
}

/// Memory, and the least that a control group leaves of it.
fn memory(facts: &Facts) -> Finding {
    let SystemMemory { total, available, without_cache } = &facts.memory;
    let mut detail = match without_cache {
        None => format!("{} of {} available", bytes(*available), bytes(*total)),
        Some(why) => {
            format!("{} of {} free, without page cache ({why})", bytes(*available), bytes(*total))
        }
    };
    let mut state = if without_cache.is_some() { State::Limited } else { State::Good };
    let mut remedy = None;
    if *available < ENOUGH {
        state = State::Limited;
        // Pages that a pool holds and nothing uses are no one's memory.
        let page = PageSize::Size2M;
        let pool = facts.hugetlb.iter().find(|pool| {
            pool.page_bytes == page.bytes() && pool.node.is_none() && pool.available() > 0
        });
        if let Some(pool) = pool {
            let held = bytes(pool.available().saturating_mul(page.bytes()));
            detail += &format!("; {held} more are unused hugepages");
            let excess = (2 * ENOUGH - available).div_ceil(page.bytes()).min(pool.available());
            remedy = Some(hugepages::reserve_command(page, pool.total - excess, None));
        }
    }
    if let Some(group) = facts.memory_groups.tightest() {
        let file = group.file.display();
        detail += &format!("; {} of {} left by {file}", bytes(group.left()), bytes(group.limit));
        if group.left() < ENOUGH {
            state = State::Limited;
            remedy = Some(control_group::raise_command(
                &facts.memory_groups.refusing(ENOUGH),
                2 * ENOUGH,
            ));
        }
    }
    if let Some(why) = &facts.memory_groups.unknown {
        detail += &format!("; a control group's limit is not known ({why})");
        state = State::Limited;
    }
    Finding { remedy, ..finding("memory", state, detail) }
}

/// A limit on what the process maps.
fn mapped(limit: &MapLimit) -> Finding {
    let what = match limit.setting {
        MapSetting::AddressSpace => "address space",
        MapSetting::Data => "data segment",
        MapSetting::Commit => "commit limit",
    };
    let detail =
        format!("{} of {} left by {}", bytes(limit.left), bytes(limit.limit), limit.setting);
    match limit.left >= ENOUGH {
        true => finding(what, State::Good, detail),
        false => finding(what, State::Limited, detail).fixed_if(limit.raise(2 * ENOUGH)),
    }
}

/// The limits on threads: the one that leaves the fewest.
fn threads(facts: &Facts) -> Finding {
    let what = "threads";
    match facts.live.thread_limits.iter().min_by_key(|limit| limit.left()) {
        None => finding(what, State::Good, "no limit can be read here"),
        Some(limit) if limit.left() >= ENOUGH_THREADS => {
            finding(what, State::Good, ThreadLimit::text(limit))
        }
        Some(limit) => {
            let words = ThreadLimit::text(limit);
            finding(what, State::Limited, words).fixed_if(limit.raise(2 * ENOUGH_THREADS))
        }
    }
}

fn hugetlb(facts: &Facts, page: PageSize) -> Finding {
    let what = format!("hugepages {page}");
    let of_size = |pool: &&HugetlbPool| pool.page_bytes == page.bytes();
    let (tried, groups) = match page {
        PageSize::Size1G => (&facts.live.hugetlb_1g, &facts.hugetlb_groups[1]),
        _ => (&facts.live.hugetlb_2m, &facts.hugetlb_groups[0]),
    };
    let Some(pool) = facts.hugetlb.iter().filter(of_size).find(|pool| pool.node.is_none()) else {
        return match (tried, facts.why_unreadable("kernel/mm/hugepages")) {
            (Ok(()), Some(why)) => finding(
                what,
                State::Good,
                format!("one can be allocated; how many is unknown ({why})"),
            ),
            (Err(refused), Some(why)) => finding(
                what,
                State::Limited,
                format!("unknown ({why}); one cannot be allocated: {}", refused.reason),
            ),
            (_, None) => {
                finding(what, State::Missing, "this kernel or processor has no pages of this size")
            }
        };
    };
    let nodes: Vec<String> = facts
        .hugetlb
        .iter()
        .filter(of_size)
        .filter_map(|pool| Some(format!("node {}: {} of {}", pool.node?, pool.free, pool.total)))
        .collect();
    let by_node = if nodes.len() > 1 { format!(" ({})", nodes.join(", ")) } else { String::new() };
    let mut detail = format!("{} free of {} reserved{by_node}", pool.available(), pool.total);
    let available = facts.memory.available;
    let suggested = (SUGGESTED.min(hugepages::room(available) / 2) / page.bytes()).max(1);
    let command = hugepages::grow_command(page, (pool.total, suggested), None, available);
    // As many as are free should be usable, up to the suggested number.
    let usable = pool.available().min(suggested).saturating_mul(page.bytes());
    let refusing = groups.refusing(usable);
    if pool.available() > 0 && !refusing.is_empty() {
        let all: Vec<String> = refusing.iter().map(ToString::to_string).collect();
        detail += &format!("; a control group allows fewer: {}", all.join(", "));
        let state = if tried.is_ok() { State::Limited } else { State::Missing };
        return finding(what, state, detail)
            .fixed_by(control_group::raise_command(&refusing, usable));
    }
    match (pool.available(), pool.total) {
        (1.., _) => match tried {
            Ok(()) => finding(what, State::Good, detail),
            // Another process may have taken the last pages meanwhile: then that is the reason,
            // with its own command.
            Err(refused) => Finding {
                remedy: refused.fix.clone(),
                ..finding(
                    what,
                    State::Missing,
                    format!("{detail}, and none can be allocated: {}", refused.reason),
                )
            },
        },
        (0, _) if tried.is_ok() => finding(
            what,
            State::Good,
            format!("{detail}; the kernel adds pages as needed ({} at most)", pool.overcommit),
        ),
        (0, 1..) => finding(what, State::Limited, detail).fixed_if(command),
        (0, 0) if page == PageSize::Size1G => {
            let detail = "none reserved; at run time only where 1 GiB is free in one piece, at boot by hugepagesz=1G hugepages=1";
            finding(what, State::Missing, detail).fixed_if(command)
        }
        (0, 0) => finding(what, State::Missing, "none reserved").fixed_if(command),
    }
}

fn transparent(facts: &Facts) -> Finding {
    let what = "transparent hugepages";
    let mode = match facts.thp {
        Some(Thp::Always) => "always",
        Some(Thp::Madvise) => "madvise: for programs that request them, as Pinfold does",
        Some(Thp::Never) => {
            let switch = facts.thp_switch.display();
            let command = hugepages::thp_switch_command(&facts.thp_switch);
            return finding(what, State::Missing, format!("never: switched off ({switch})"))
                .fixed_by(command);
        }
        None => match facts.why_unreadable("kernel/mm/transparent_hugepage") {
            Some(_) => "the mode is not known",
            None => return finding(what, State::Missing, "this kernel has none"),
        },
    };
    match &facts.live.transparent {
        Ok(()) => finding(what, State::Good, mode),
        Err(refused) => Finding {
            remedy: refused.fix.clone(),
            ..finding(
                what,
                State::Missing,
                format!("{mode}; none can be allocated: {}", refused.reason),
            )
        },
    }
}

fn memlock(facts: &Facts) -> Finding {
    let limit = &facts.memlock;
    let what = "MEMLOCK";
    let words = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), bytes);
    let used =
        limit.used.map_or(String::new(), |used| format!(", {} used by this process", bytes(used)));
    let detail = format!("soft {}, hard {}{used}", words(limit.soft), words(limit.hard));
    if limit.lifted {
        return finding(what, State::Good, format!("{detail}; CAP_IPC_LOCK lifts it"));
    }
    // No file tells what the user's other processes have.
    let detail = format!("{detail}; io_uring and AF_XDP count all processes of this user");
    match limit.left() {
        None => finding(what, State::Good, detail),
        Some(left) if left >= ENOUGH => finding(what, State::Good, detail),
        Some(_) => finding(what, State::Limited, detail).fixed_if(limit.raise_for_user(SUGGESTED)),
    }
}

fn open_files(facts: &Facts) -> Finding {
    let files = &facts.live.open_files;
    let words =
        |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let open = files.open.map_or(String::new(), |open| format!(", {open} open"));
    let detail = format!("soft {}, hard {}{open}", words(files.soft), words(files.hard));
    match files.left() {
        Some(left) if left < ENOUGH_FILES => {
            let needed = files.open.unwrap_or(0).saturating_add(ENOUGH_FILES);
            finding("open files", State::Limited, detail).fixed_if(files.raise(needed))
        }
        _ => finding("open files", State::Good, detail),
    }
}

fn numa(facts: &Facts) -> Finding {
    let node = |node: &NumaNode| match (node.free_bytes, node.total_bytes) {
        (Some(free), Some(total)) => {
            format!("node {}: {} of {} free", node.node, bytes(free), bytes(total))
        }
        _ => format!("node {}", node.node),
    };
    if let Some(why) = facts.why_unreadable("devices/system/node") {
        return finding("NUMA", State::Limited, format!("unknown: {why}"));
    }
    let detail: Vec<String> = facts.nodes.iter().map(node).collect();
    match detail.len() {
        0 => finding("NUMA", State::Limited, "unknown: the online nodes are not listed"),
        _ => finding("NUMA", State::Good, detail.join(", ")),
    }
}
