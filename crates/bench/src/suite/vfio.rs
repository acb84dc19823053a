//! The suite `vfio`: what a mapping costs where the kernel keeps the table, and what an arena that is mapped whole saves.
//!
//! It needs a device that is bound to VFIO (`pinfold bind`) and that this user may open; the device is not made to do
//! anything. An operation (`ns/op`) is
//!
//! | cases | an operation |
//! | --- | --- |
//! | `map-4k` ... `map-32m` | a buffer of that size given to the device and taken back: pinned, mapped, unmapped, flushed, unpinned |
//! | `revoke-64` | one of 64 buffers of 4 KiB, side by side, taken back; they were mapped before the clock runs |
//!
//! | subject | what it is |
//! | --- | --- |
//! | `pages-4k` | a map and an unmap, memory on pages of 4 KiB |
//! | `pages-2m` | the same on hugepages of 2 MiB, where there are any |
//! | `whole` | the same with a buffer of an arena that is mapped whole |
//! | `one-by-one`, `together` | each by a call of its own, or all by `revoke_all` |
//!
//! `map-32m` is an arena's worth: what it costs once to have no cost afterwards.
//!
//! What `pinfold bench vfio` prints behind it, requests a second beside the kernel's driver, is the program's: it drives
//! the device with what `pinfold io` has.

use super::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold::probe::Facts;
use pinfold::vfio::{Device, Options};
use pinfold::{Arena, Buffer, Domain, MappingPolicy, Source};
use pinfold_core::access::Bidirectional;

/// Case, bytes of a buffer, operations of a run.
const SIZES: [(&str, usize, usize); 5] = [
    ("map-4k", 4 << 10, 512),
    ("map-64k", 64 << 10, 512),
    ("map-2m", 2 << 20, 128),
    ("map-8m", 8 << 20, 32),
    ("map-32m", 32 << 20, 16),
];
/// Of an arena: room for the largest buffers of two subjects.
const ROOM: u64 = 64 << 20;
const MANY: usize = 64;

/// Why it can not be measured here, if it can not.
pub fn unable() -> Option<String> {
    open().err().map(|error| error.to_string())
}

/// The first device that is bound to VFIO and can be opened.
fn open() -> Result<Device, BenchError> {
    let bound = Facts::here().vfio.bound;
    let mut refused = None;
    for device in &bound {
        match Device::open(&device.address, &Options::new()) {
            Ok(device) => return Ok(device),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.map_or(BenchError::NoDevice, BenchError::Device))
}

/// Measures the suite.
///
/// # Errors
/// [`BenchError::NoDevice`] where none is bound to VFIO, [`BenchError::Device`] where none can be opened; where a
/// subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let device = open()?;
    let domain = device.domain();
    let arena = |source| Arena::builder().size(ROOM).source(source).build(domain);
    let plain = arena(Source::Plain)?;
    // Without reserved hugepages the figures for them are left out.
    let huge = arena(Source::Hugetlb2M).ok();
    let mut records = Vec::new();
    for (case, bytes, full) in SIZES {
        records.extend(pairs(harness, (case, bytes, full), domain, &plain, huge.as_ref())?);
    }
    records.extend(revokes(harness, domain, &plain)?);
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
        let mut buffer = Some(touched(arena, bytes)?);
        subjects.push(Subject::new(name, move |out: &mut Samples| {
            let (cost, result) = Cost::of(|| (0..operations).try_for_each(|_| pair(domain, &mut buffer)));
            result?;
            out.cost(case, cost, operations);
            Ok(())
        }));
    }
    let whole = Arena::builder().size(bytes as u64).mapping_policy(MappingPolicy::Whole).build(domain)?;
    let mut buffer = Some(touched(&whole, bytes)?);
    subjects.push(Subject::new("whole", move |out: &mut Samples| {
        let operations = operations * 64;
        let (cost, result) = Cost::of(|| (0..operations).try_for_each(|_| pair(domain, &mut buffer)));
        result?;
        out.cost(case, cost, operations);
        Ok(())
    }));
    harness.interleave(subjects)
}

fn touched(arena: &Arena, bytes: usize) -> Result<Buffer, BenchError> {
    Ok(arena.alloc_zeroed(bytes)?)
}

/// To the device and back.
fn pair(domain: &Domain, buffer: &mut Option<Buffer>) -> Result<(), BenchError> {
    let Some(mine) = buffer.take() else { return Ok(()) };
    let mapped = domain.map(mine, Bidirectional).map_err(|refused| {
        *buffer = refused.payload;
        refused.error
    })?;
    *buffer = Some(mapped.unmap()?);
    Ok(())
}

fn revokes(harness: &Harness<'_>, domain: &Domain, arena: &Arena) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(16);
    let subject = |name, together: bool| {
        let mut buffers: Vec<Buffer> = Vec::with_capacity(MANY);
        Subject::new(name, move |out: &mut Samples| {
            let mut total = Cost::default();
            for _ in 0..rounds {
                while buffers.len() < MANY {
                    buffers.push(touched(arena, 4096)?);
                }
                let mapped = buffers
                    .drain(..)
                    .map(|buffer| domain.map(buffer, Bidirectional).map_err(|refused| refused.error))
                    .collect::<Result<Vec<_>, _>>()?;
                let mut revoked = Vec::with_capacity(MANY);
                let (cost, ()) = Cost::of(|| {
                    if together {
                        domain.revoke_all(mapped, &mut revoked);
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
