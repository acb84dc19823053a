//! The suite `vfio`: what a mapping costs where the kernel owns the table, and what an arena that
//! is mapped as a whole saves.
//!
//! It needs a device that is bound to VFIO (`pinfold bind`) and that this user may open. In
//! `randread-4k-64` the controller changes its driver in turn.

mod iops;
mod kernel;

pub(crate) use kernel::KernelError;

use super::Entry;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold::probe::Facts;
use pinfold::vfio::{Device, Options};
use pinfold::{Arena, Buffer, Domain, MappingPolicy, Source};
use pinfold_core::access::Bidirectional;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("map-4k", "map and unmap a buffer of 4 KiB: pin, map, unmap, flush, unpin"),
    ("map-2m", "the same of 2 MiB"),
    ("map-32m", "the same of 32 MiB"),
    ("revoke-64", "unmap one of 64 adjacent buffers of 4 KiB that were mapped before"),
    ("randread-4k-64", "4 KiB random reads per second, 64 in flight, beside the kernel's driver"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pages-4k", "memory on 4 KiB pages"),
    ("pages-2m", "memory on hugepages of 2 MiB, if there are any"),
    ("whole", "a buffer in an arena that is mapped as a whole"),
    ("one-by-one", "revoke-64: each buffer revoked by a call of its own"),
    ("together", "revoke-64: all revoked by one call"),
    ("fio", "fio (io_uring, O_DIRECT) on the kernel's driver"),
    ("fio-batched", "the same, submitting and reaping 32 at a time"),
    ("static", "pinfold io: mapped once"),
    ("static-polled", "the same, polled"),
    ("batch", "pinfold io --protect batch: revoked in batches, held until their flush"),
    ("strict", "pinfold io --protect strict: each revocation is waited for"),
];

/// Case, bytes per buffer, operations per run.
const SIZES: [(&str, usize, usize); 3] =
    [("map-4k", 4 << 10, 512), ("map-2m", 2 << 20, 128), ("map-32m", 32 << 20, 16)];
/// The size of an arena: the largest buffers of two subjects.
const ARENA_BYTES: u64 = 64 << 20;
const MANY: usize = 64;

/// Returns why this machine cannot measure the suite, if so.
pub(super) fn unable() -> Option<String> {
    open().err().map(|error| error.to_string())
}

/// Opens the first device bound to VFIO that can be opened.
fn open() -> Result<Device, BenchError> {
    let bound = Facts::here().vfio.bound;
    let mut failed = None;
    for device in &bound {
        match Device::open(&device.address, &Options::new()) {
            Ok(device) => return Ok(device),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.map_or(BenchError::NoDevice, BenchError::Device))
}

/// Measures the suite.
///
/// # Errors
/// [`BenchError::NoDevice`] where no device is bound to VFIO, [`BenchError::Device`] where none can
/// be opened, or the failure of a subject.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = mappings(harness)?;
    // Last, since it rebinds the device, and catches the signals.
    if !COUNTS_RMW && harness.wants(iops::CASE) {
        match iops::requirements() {
            Ok(requirements) => records.extend(iops::run(&requirements, harness)?),
            Err(why) => crate::report(&format!("vfio: {} is left out: {why}", iops::CASE)),
        }
    }
    Ok(records)
}

fn mappings(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let device = open()?;
    let domain = device.domain();
    let arena = |source| Arena::builder().size(ARENA_BYTES).source(source).build(domain);
    let plain = arena(Source::Plain)?;
    // Without reserved hugepages, their figures are left out.
    let huge = arena(Source::Hugetlb2M).ok();
    let mut records = Vec::new();
    for (case, bytes, full) in SIZES.into_iter().filter(|(case, ..)| harness.wants(case)) {
        records.extend(pairs(harness, (case, bytes, full), domain, &plain, huge.as_ref())?);
    }
    records.extend(harness.cases(&["revoke-64"], || revokes(harness, domain, &plain))?);
    Ok(records)
}

fn pairs(
    harness: &Harness<'_>,
    (case, bytes, full): (&'static str, usize, usize),
    domain: &Domain,
    plain: &Arena,
    huge: Option<&Arena>,
) -> Result<Vec<Record>, BenchError> {
    let operations = harness.scale(full);
    let mut subjects = Vec::new();
    for (name, arena) in [("pages-4k", Some(plain)), ("pages-2m", huge)] {
        let Some(arena) = arena else { continue };
        let mut buffer = Some(zeroed(arena, bytes)?);
        subjects.push(Subject::new(name, move |out: &mut Samples| {
            let (cost, result) =
                Cost::of(|| (0..operations).try_for_each(|_| pair(domain, &mut buffer)));
            result?;
            out.cost(case, cost, operations);
            Ok(())
        }));
    }
    let whole =
        Arena::builder().size(bytes as u64).mapping_policy(MappingPolicy::Whole).build(domain)?;
    let mut buffer = Some(zeroed(&whole, bytes)?);
    subjects.push(Subject::new("whole", move |out: &mut Samples| {
        // A pair takes less time than reading the clock.
        let operations = operations * 64;
        let (cost, result) =
            Cost::of(|| (0..operations).try_for_each(|_| pair(domain, &mut buffer)));
        result?;
        out.cost(case, cost, operations);
        Ok(())
    }));
    harness.interleave(subjects)
}

fn zeroed(arena: &Arena, bytes: usize) -> Result<Buffer, BenchError> {
    Ok(arena.alloc_zeroed(bytes)?)
}

/// Maps and unmaps the buffer.
fn pair(domain: &Domain, buffer: &mut Option<Buffer>) -> Result<(), BenchError> {
    let Some(payload) = buffer.take() else { return Ok(()) };
    let mapping = domain.map(payload, Bidirectional).map_err(|refused| {
        *buffer = refused.payload;
        refused.error
    })?;
    *buffer = Some(mapping.unmap()?);
    Ok(())
}

fn revokes(
    harness: &Harness<'_>,
    domain: &Domain,
    arena: &Arena,
) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(16);
    let subject = |name, together: bool| {
        let mut buffers: Vec<Buffer> = Vec::with_capacity(MANY);
        Subject::new(name, move |out: &mut Samples| {
            let mut total = Cost::default();
            for _ in 0..rounds {
                while buffers.len() < MANY {
                    buffers.push(zeroed(arena, 4096)?);
                }
                let mapped = buffers
                    .drain(..)
                    .map(|buffer| {
                        domain.map(buffer, Bidirectional).map_err(|refused| refused.error)
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                let mut revoked = Vec::with_capacity(MANY);
                let (cost, ()) = Cost::of(|| {
                    if together {
                        domain.revoke_many(mapped, &mut revoked);
                    } else {
                        revoked.extend(mapped.into_iter().map(|one| one.revoke()));
                    }
                });
                total = total + cost;
                for one in revoked {
                    buffers.push(one.wait().map_err(|refused| refused.error)?);
                }
            }
            out.cost("revoke-64", total, rounds * MANY);
            Ok(())
        })
    };
    harness.interleave(vec![subject("one-by-one", false), subject("together", true)])
}
