//! Maps that fail: before the first page, in the middle of a batch, and in the middle of a buffer.

use super::{PAGE, Writes};
use crate::pages::Pages;
use crate::report::Report;
use pinfold::soft::SoftConfig;
use pinfold::{
    BackendError, Domain, FromDevice, Iova, IovaRange, MappingPolicy, OwnedPiece, PageSize,
};
use std::error::Error;

const BATCH: usize = 64;
/// The buffer of the batch that was never passed to the domain.
const FOREIGN: usize = 40;
/// Larger than what the table below has pages for.
const LONG: usize = 512 << 20;
const TABLE: usize = 256 << 10;
/// Fits into it.
const FITS: usize = 64 << 20;
const FAILURES: usize = 10;
const GIB: u64 = 1 << 30;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    report.section("one page of 4 KiB, as in the published case");
    let small = small(report)?;
    report.section("a batch with one buffer that the domain does not know");
    let batch = batch(report)?;
    report.section("a buffer for which the I/O page table is too small");
    let long = long(report)?;
    report.promise("what is registered is reached, also a single page", small);
    report.promise("a batch is mapped as a whole or not at all, and names the buffer", batch);
    report.promise("a map that fails in the middle leaves no page mapped", long);
    Ok(())
}

fn small(report: &mut Report) -> Result<bool, Box<dyn Error>> {
    let domain = Domain::soft()?;
    let device = domain.port().ok_or("not a software IOMMU")?;
    let memory = Pages::new(PAGE)?.owned()?;
    memory.map_into(&domain, MappingPolicy::PerUse)?;
    let mapping = domain.map(memory.take().ok_or("taken")?, FromDevice)?;
    let mut writes = Writes::default();
    writes.fill(&device, mapping.iova(), 7);
    drop(mapping.unmap()?);
    let mut pages = memory.reclaim::<Pages>()?;
    let seen = pages.bytes().iter().filter(|byte| **byte == 7).count();
    report.figure("bytes registered", pages.len(), "");
    report.figure("bytes that the device wrote and the program sees", seen, "");
    Ok(seen == PAGE && writes.faulted == 0)
}

fn piece(domain: Option<&Domain>, len: usize) -> Result<OwnedPiece, Box<dyn Error>> {
    let memory = Pages::new(len)?.owned()?;
    if let Some(domain) = domain {
        memory.map_into(domain, MappingPolicy::PerUse)?;
    }
    Ok(memory.take().ok_or("taken")?)
}

/// Returns how many bytes devices can reach by the table.
fn reachable(domain: &Domain) -> Result<u64, Box<dyn Error>> {
    let runs = domain.mapped().ok_or("the table cannot be read")?;
    Ok(runs.map(|run| run.iova.len()).sum())
}

fn batch(report: &mut Report) -> Result<bool, Box<dyn Error>> {
    let domain = Domain::soft()?;
    let pieces = (0..BATCH)
        .map(|number| piece((number != FOREIGN).then_some(&domain), 16 * PAGE))
        .collect::<Result<Vec<_>, _>>()?;
    let mut owner = domain.local();
    let Err(failed) = owner.map_many(pieces, FromDevice) else {
        return Err("a buffer that the domain does not know was mapped".into());
    };
    let typed = matches!(failed.error, BackendError::NotRegistered { .. });
    report.said("the map", &failed);
    report.figure("buffers of the batch", BATCH, "");
    report.figure("buffers that came back", failed.payloads.len(), "");
    let reached = reachable(&domain)?;
    report.figure("bytes that the device can reach afterwards", reached, "");
    Ok(typed && failed.index == FOREIGN && failed.payloads.len() == BATCH && reached == 0)
}

fn long(report: &mut Report) -> Result<bool, Box<dyn Error>> {
    let config =
        SoftConfig { table_bytes: TABLE, max_leaf: PageSize::Size4K, ..SoftConfig::default() };
    let domain = Domain::soft_with(config)?;
    let device = domain.port().ok_or("not a software IOMMU")?;
    let mut payload = Some(piece(Some(&domain), LONG)?);
    let (mut failures, mut typed, mut reached) = (0, true, 0);
    while let Some(piece) = payload.take_if(|_| failures < FAILURES) {
        let Err(failed) = domain.map(piece, FromDevice) else {
            return Err("the table held more than its memory".into());
        };
        if failures == 0 {
            report.said("the map", &failed);
        }
        typed &= matches!(failed.error, BackendError::Table(_));
        payload = failed.payload;
        reached += reachable(&domain)?;
        failures += 1;
    }
    let returned = payload.map_or(0, |piece| piece.len());
    report.figure("bytes of the buffer", LONG, "");
    report.figure("maps of it that failed", failures, "");
    report.figure("bytes of it that came back after the last", returned, "");
    report.figure("bytes that the device could reach after any of them", reached, "");

    // The table is usable: what fits is mapped. When it is unmapped, all addresses around it fault,
    // which are those of the maps that failed.
    let fits = domain.map(piece(Some(&domain), FITS)?, FromDevice)?;
    let mut inside = Writes::default();
    inside.fill(&device, fits.iova(), 7);
    let around = Iova::new(fits.iova().start().raw() / GIB * GIB);
    drop(fits.unmap()?);
    let mut elsewhere = Writes::default();
    elsewhere.fill(&device, IovaRange::new(around, GIB)?, 7);
    report.figure("pages of a buffer of 64 MiB that the device wrote then", inside.arrived, "");
    report.figure(
        "writes that faulted, to the GiB around it, after its unmap",
        elsewhere.faulted,
        "",
    );
    Ok(typed
        && failures == FAILURES
        && returned == LONG
        && reached == 0
        && inside.arrived == (FITS / PAGE) as u64
        && elsewhere.faulted == GIB / PAGE as u64)
}
