//! Reports: the counters of an object, as an array of structs and as JSON, by one table for each
//! kind of object (`pinfold::core::counters`).

use crate::arena::{ARENAS, pf_arena_t};
use crate::domain::{DOMAINS, pf_domain_t};
use crate::failure::{Failure, call, fail};
use crate::handle::kind_of;
use crate::nvme::{NVMES, pf_nvme_t};
use crate::pages::{PAGES, pf_pages_t};
use crate::pool::{POOLS, pf_pool_t};
use crate::queue::{QUEUES, pf_queue_t};
use pinfold::core::counters::{Counter, Counters, Kind};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

/// The way a counter changes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum pf_counter_kind {
    /// A count that grows: events so far.
    PF_COUNTER_TOTAL = 0,
    /// A count that grows and shrinks: the current value.
    PF_COUNTER_LEVEL = 1,
    /// The highest value so far.
    PF_COUNTER_PEAK = 2,
}

/// A counter of an object.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pf_counter {
    /// Its name, as in JSON and in docs/counters.md. All strings stay valid for good.
    pub name: *const c_char,
    /// "count", "bytes" or "ns".
    pub unit: *const c_char,
    /// Its meaning, in a sentence.
    pub meaning: *const c_char,
    /// Its value.
    pub value: u64,
    /// The way it changes: enum pf_counter_kind.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
}

/// Reads the counters of an object.
///
/// @handle: a domain, an arena, a pool, a page pool, a controller or a queue.
/// @counters: where they are stored; NULL to learn their number.
/// @max: how many fit there.
///
/// Owners count without locks or shared writes, so the counters are exact whenever no thread is in
/// a call with the object, and may be of slightly different times else. The peak of an
/// arena's frames is approximate: it is noted as frames come and go. A domain's are followed by
/// those of its IOMMU and of its invalidation queue.
///
/// Return: how many counters the object has, of which the first `max` are stored; or -errno: EBADF;
/// EBUSY (a thread is in a call with the page pool or queue, which belongs to one; its calls wait
/// for this one, and are not refused for it, except a `*_destroy`).
/// Thread: any. Allocates. Since 0.2.
///
/// # Safety
/// `counters` is null, or can be written for `max` counters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_stats(
    handle: *const c_void,
    counters: *mut pf_counter,
    max: c_uint,
) -> c_int {
    call(|| {
        let (all, max) = (read(handle)?, max as usize);
        let wanted = if counters.is_null() { 0 } else { max };
        for (at, (counter, value)) in all.iter().take(wanted).enumerate() {
            let Some(names) = names(counter) else { continue };
            let kind = match counter.kind {
                Kind::Total => pf_counter_kind::PF_COUNTER_TOTAL,
                Kind::Level => pf_counter_kind::PF_COUNTER_LEVEL,
                Kind::Peak => pf_counter_kind::PF_COUNTER_PEAK,
            } as u32;
            let [name, unit, meaning] = names.each_ref().map(|text| text.as_ptr());
            let counter = pf_counter { name, unit, meaning, value: *value, kind, reserved: 0 };
            // SAFETY: less than `max`, for which the caller promises room.
            let place = unsafe { counters.add(at) };
            // SAFETY: as before. C need not align it.
            unsafe { place.write_unaligned(counter) };
        }
        c_int::try_from(all.len()).map_err(|_| fail!(EOVERFLOW, "{} counters", all.len()))
    })
}

/// Reads the counters of an object as one JSON object, their values by their names.
///
/// @handle: as for pf_stats().
/// @buffer: where the text is stored, with a NUL behind it; cut at `len` - 1 bytes. NULL to learn
/// its length.
/// @len: the size of the buffer.
///
/// Return: the length of the whole text, without the NUL; or -errno: as pf_stats().
/// Thread: any. Allocates. Since 0.2.
///
/// # Safety
/// `buffer` is null, or can be written for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_stats_json(
    handle: *const c_void,
    buffer: *mut c_char,
    len: usize,
) -> c_int {
    call(|| {
        let map: serde_json::Map<String, serde_json::Value> = read(handle)?
            .iter()
            .map(|(counter, value)| (counter.name.to_owned(), (*value).into()))
            .collect();
        // SAFETY: as the caller promises.
        unsafe { write_text(&serde_json::Value::Object(map).to_string(), buffer, len) }
    })
}

/// Stores a text as snprintf does, and returns its length.
///
/// # Safety
/// `buffer` is null, or can be written for `len` bytes.
pub(crate) unsafe fn write_text(
    text: &str,
    buffer: *mut c_char,
    len: usize,
) -> Result<c_int, Failure> {
    if let Some(room) = len.checked_sub(1).filter(|_| !buffer.is_null()) {
        let stored = text.len().min(room);
        // SAFETY: `stored` bytes and the NUL are at most `len`; the text is not in the buffer.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), stored) };
        // SAFETY: `stored` is less than `len`.
        let end = unsafe { buffer.add(stored) };
        // SAFETY: as before.
        unsafe { end.write(0) };
    }
    c_int::try_from(text.len()).map_err(|_| fail!(EOVERFLOW, "a text of {} bytes", text.len()))
}

type Read = Vec<(&'static Counter, u64)>;

/// Reads the counters of the object that a handle of any kind is of.
fn read(handle: *const c_void) -> Result<Read, Failure> {
    let (handle, mut all) = (handle.cast_mut(), Vec::new());
    match kind_of(handle) {
        Some(kind) if kind == DOMAINS.kind() => {
            let stats = DOMAINS.get(handle.cast::<pf_domain_t>())?.state.domain.stats();
            add(&mut all, &stats);
            add(&mut all, &stats.backend);
            add(&mut all, &stats.backend.invalidations);
        }
        Some(kind) if kind == ARENAS.kind() => {
            add(&mut all, &ARENAS.get(handle.cast::<pf_arena_t>())?.arena.stats());
        }
        Some(kind) if kind == POOLS.kind() => {
            add(&mut all, &POOLS.get(handle.cast::<pf_pool_t>())?.stats());
        }
        Some(kind) if kind == PAGES.kind() => {
            let (stats, counts) = PAGES.get(handle.cast::<pf_pages_t>())?.stats()?;
            add(&mut all, &stats);
            add(&mut all, &counts);
        }
        Some(kind) if kind == NVMES.kind() => {
            add(&mut all, &NVMES.get(handle.cast::<pf_nvme_t>())?.device.controller.stats());
        }
        Some(kind) if kind == QUEUES.kind() => {
            add(&mut all, &QUEUES.get_briefly(handle.cast::<pf_queue_t>())?.stats());
        }
        _ => {
            return Err(fail!(
                EBADF,
                "{handle:p} is no handle of an object with counters: pass a domain, an arena, a pool, a page pool, a controller or a queue"
            ));
        }
    }
    Ok(all)
}

fn add<C: Counters>(all: &mut Read, counters: &C) {
    counters.for_each(&mut |counter, value| all.push((counter, value)));
}

/// Name, unit and meaning of a counter, for C.
type Names = [CString; 3];

/// Returns the strings of a counter: made once for each, and kept for good.
fn names(counter: &'static Counter) -> Option<&'static Names> {
    static MADE: Mutex<BTreeMap<usize, &'static Names>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    match made.entry(std::ptr::from_ref(counter).addr()) {
        Entry::Occupied(there) => Some(*there.get()),
        Entry::Vacant(place) => {
            let text = |text: &str| CString::new(text).ok();
            let names = [text(counter.name)?, text(counter.unit.name())?, text(counter.meaning)?];
            Some(*place.insert(Box::leak(Box::new(names))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::arena::ArenaStats;
    use pinfold::core::counters::Unit;
    use pinfold::core::dma_pool::DmaPoolStats;
    use pinfold::core::domain::{BackendStats, DomainStats};
    use pinfold::core::invalidate::InvalidationStats;
    use pinfold::core::page_pool::{Counts, PagePoolStats};
    use pinfold_nvme::driver::{ControllerStats, QueueStats};
    use std::fmt::Write;

    const PAGE: &str = include_str!("../../../docs/counters.md");

    /// All tables of the registry.
    const TABLES: [(&str, &[Counter]); 9] = [
        ("Domain", DomainStats::TABLE),
        ("Backend", BackendStats::TABLE),
        ("Invalidation queue", InvalidationStats::TABLE),
        ("Arena", ArenaStats::TABLE),
        ("DMA pool", DmaPoolStats::TABLE),
        ("Page pool", PagePoolStats::TABLE),
        ("Page pool, as the kernel counts", Counts::TABLE),
        ("NVMe controller", ControllerStats::TABLE),
        ("NVMe queue", QueueStats::TABLE),
    ];

    /// Run with `PINFOLD_WRITE_DOCS=1` to write the page anew.
    #[test]
    fn the_page_of_counters_is_what_the_tables_say() {
        let (head, _) = PAGE.split_once("\n## ").unwrap();
        let mut page = format!("{head}\n");
        for (name, table) in TABLES {
            write!(
                page,
                "## {name}\n\n| name | kind | unit | meaning |\n| --- | --- | --- | --- |\n"
            )
            .unwrap();
            for Counter { name, kind, unit, meaning, .. } in table {
                assert!(meaning.ends_with('.') && !meaning.contains('['), "{name}: {meaning}");
                assert_eq!(name.ends_with("bytes"), *unit == Unit::Bytes, "{name}");
                assert_eq!(name.ends_with("_ns"), *unit == Unit::Nanoseconds, "{name}");
                let same = table.iter().filter(|other| other.name == *name).count();
                assert_eq!(same, 1, "{name}");
                writeln!(page, "| `{name}` | {} | {} | {meaning} |", kind.name(), unit.name())
                    .unwrap();
            }
            page.push('\n');
        }
        let page = format!("{}\n", page.trim_end());
        if std::env::var_os("PINFOLD_WRITE_DOCS").is_some() {
            std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/counters.md"), &page)
                .unwrap();
        }
        assert!(PAGE == page, "docs/counters.md differs: run this test with PINFOLD_WRITE_DOCS=1");
    }

    #[test]
    fn a_text_is_cut_to_its_buffer_and_its_length_is_returned() {
        let mut buffer = [0x7f; 4];
        // SAFETY: as long as it says.
        let needed = unsafe { write_text("12345", buffer.as_mut_ptr(), 4) }.unwrap();
        assert_eq!((needed, buffer.map(|byte| byte as u8)), (5, *b"123\0"));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { write_text("12345", std::ptr::null_mut(), 4) }.unwrap(), 5);
        // SAFETY: nothing is written.
        assert_eq!(unsafe { write_text("12345", buffer.as_mut_ptr(), 0) }.unwrap(), 5);
    }
}
