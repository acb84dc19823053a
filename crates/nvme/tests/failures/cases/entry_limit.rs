//! 256 GiB, mapped in small pieces and as a whole, against the kernel's limit of entries.

use super::PAGE;
use crate::pages::Pages;
use crate::report::Report;
use pinfold::core::access::Access;
use pinfold::core::domain::{
    Backend, BackendStats, Domain as CoreDomain, Properties, Revocation, Wait, WindowToken,
};
use pinfold::core::iova::IovaSpace;
use pinfold::{
    BackendError, Bidirectional, DmaMemory, Domain, Iova, IovaRange, MappingPolicy, Ticket,
    Unrevoked,
};
use std::error::Error;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

const MEMORY: usize = 256 << 30;
const LARGE: usize = 2 << 20;
const GIB: usize = 1 << 30;
/// The kernel's limit.
const PARAMETER: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
/// Its default, for a kernel without the module.
const DEFAULT_LIMIT: u64 = 65_535;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    report.section("256 GiB, against a counter of entries that refuses as the kernel does");
    let limit = match std::fs::read_to_string(PARAMETER) {
        Ok(text) => text.trim().parse()?,
        Err(_) => {
            report.note("the kernel's module is not loaded here: its default limit is used");
            DEFAULT_LIMIT
        }
    };
    report.figure("entries allowed", limit, "");
    let small = count(limit, PAGE)?;
    let large = count(limit, LARGE)?;
    let whole = count(limit, MEMORY)?;
    report.figure("entries needed for pieces of 4 KiB", MEMORY / PAGE, "");
    report.figure("  bytes mapped when the next map was refused", small.mapped, "");
    report.figure("entries needed for pieces of 2 MiB", MEMORY / LARGE, "");
    report.figure("  bytes mapped when the next map was refused", large.mapped, "");
    report.figure("entries made for the memory as a whole", whole.entries, "");
    report.figure("  bytes mapped", whole.mapped, "");
    let refused = small.refused.as_ref().ok_or("nothing was refused")?;
    report.said("the refused map", refused);

    report.section("here, on the software IOMMU");
    let soft = soft(report)?;
    report.promise(
        "the limit is a typed error that names it and the command that raises it",
        is_named(&small.refused, limit) && is_named(&large.refused, limit),
    );
    report.promise(
        "as a whole, the memory needs one entry",
        whole.entries == 1 && whole.refused.is_none() && whole.mapped == MEMORY as u64,
    );
    report.promise("the device reaches both ends of it", soft);
    Ok(())
}

/// Whether the map was refused by the error that names the limit.
fn is_named(refused: &Option<BackendError>, entries: u64) -> bool {
    matches!(refused, Some(BackendError::NoEntries { limit, .. }) if *limit == entries)
}

/// The mappings made before the first refusal.
struct Counted {
    entries: u64,
    mapped: u64,
    refused: Option<BackendError>,
}

/// Maps the memory in pieces, until all of it is mapped or a map is refused.
fn count(limit: u64, piece: usize) -> Result<Counted, Box<dyn Error>> {
    let pages = Pages::new(MEMORY)?;
    let base = NonNull::new(std::ptr::with_exposed_provenance_mut(pages.addr()));
    // SAFETY: the pages are mapped until the end of the function, where the domain is dropped; no
    // reference to them is created.
    let memory = unsafe { DmaMemory::from_raw(base.ok_or("mapped at address 0")?, MEMORY) };
    let entries = Counter { limit, ..Counter::default() };
    let domain = CoreDomain::new(Arc::new(entries), IovaSpace::new(48)?);
    // SAFETY: as above.
    unsafe { domain.register_memory(memory) }?;
    let mut mapped = 0;
    let mut refused = None;
    for offset in (0..MEMORY).step_by(piece) {
        // SAFETY: as above. The mapping is dropped, and lasts as long as the domain.
        match unsafe { domain.map_static(memory.part(offset, piece)?, Access::READ) } {
            Ok(_mapping) => mapped += piece as u64,
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let entries = domain.stats().backend.entries;
    domain.unregister_memory(memory)?;
    Ok(Counted { entries, mapped, refused })
}

/// Maps all of the memory on the software IOMMU: in one piece, and in many at once. Returns whether
/// the device reaches both ends.
fn soft(report: &mut Report) -> Result<bool, Box<dyn Error>> {
    let domain = Domain::soft()?;
    let device = domain.port().ok_or("not a software IOMMU")?;
    let memory = Pages::aligned(MEMORY, GIB)?.owned()?;
    memory.map_into(&domain, MappingPolicy::Whole)?;
    let stats = domain.stats();
    report.figure("mappings made for the memory as a whole", stats.static_mappings, "");
    report.figure("  pages of the I/O page table", stats.backend.table_pages, "");
    let piece = memory.take().ok_or("taken")?;
    let mapping = domain.map(piece, Bidirectional)?;
    let range = mapping.iova();
    let ends = [range.start(), Iova::new(range.end().raw() - PAGE as u64)];
    let mut reached = range.len() == MEMORY as u64;
    for (at, offset) in ends.into_iter().zip([0, MEMORY - PAGE]) {
        device.write(at, b"from the device")?;
        let mut seen = [0; 15];
        mapping.memory().copy_to_slice(offset, &mut seen)?;
        reached &= &seen == b"from the device";
    }
    drop(mapping.unmap()?);
    drop(memory.reclaim::<Pages>()?);

    // Its own table has no limit of entries: as many mappings as pieces, at the same time.
    let memory = Pages::aligned(MEMORY, GIB)?.owned()?;
    memory.map_into(&domain, MappingPolicy::PerUse)?;
    let mut rest = memory.take().ok_or("taken")?;
    let mut pieces = Vec::with_capacity(MEMORY / LARGE);
    while rest.len() > LARGE {
        let behind = rest.split_off(LARGE)?;
        pieces.push(std::mem::replace(&mut rest, behind));
    }
    pieces.push(rest);
    let mut owner = domain.local();
    let mappings = owner.map_many(pieces, Bidirectional)?;
    report.figure("mappings of 2 MiB at the same time", domain.stats().live, "");
    report.figure("  pages of the I/O page table", domain.stats().backend.table_pages, "");
    let mut revoked = Vec::with_capacity(mappings.len());
    owner.revoke_many(mappings.into_iter().map(Unrevoked::from), &mut revoked);
    for one in revoked {
        owner.wait(one)?;
    }
    drop(memory.reclaim::<Pages>()?);
    Ok(reached)
}

/// Counts entries as the kernel's table does, and maps nothing.
#[derive(Default)]
struct Counter {
    limit: u64,
    entries: AtomicU64,
}

impl Backend for Counter {
    fn properties(&self) -> Properties {
        Properties::new("counter")
    }

    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }

    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }

    fn map(
        &self,
        _: IovaRange,
        _: DmaMemory,
        _: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        let limit = self.limit;
        let below = |entries: u64| (entries < limit).then_some(entries + 1);
        match self.entries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, below) {
            Ok(_) => Ok(()),
            Err(_) => {
                let more = limit.saturating_mul(2);
                let remedy = format!("echo {more} | sudo tee {PARAMETER}");
                Err(BackendError::NoEntries { limit, remedy })
            }
        }
    }

    fn revoke<'w>(
        &self,
        _: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        self.entries.fetch_sub(1 + rest.count() as u64, Ordering::Relaxed);
        Ok(Ticket::COMPLETED)
    }

    fn wait(&self, _: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> {
        Poll::Ready(Ok(()))
    }

    fn stats(&self) -> BackendStats {
        let mut stats = BackendStats::default();
        stats.entries = self.entries.load(Ordering::Relaxed);
        stats.entries_limit = Some(self.limit);
        stats
    }
}
