//! The suite `buffer`: registered buffers that keep their hugepages whole, beside a segment for
//! every 4 KiB page.

mod copy;
mod gather;
mod locate;
mod own;
mod register;
mod setup;
mod submit;

use self::own::Memory;
use super::Entry;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness};
use crate::record::Record;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    (
        "register-1g",
        "register and unregister 1 GiB of the program's memory: pin, describe, unpin; bytes of the table",
    ),
    (
        "register-1g-model",
        "describe 1 GiB on 2 MiB pages, none adjacent, without memory or pinning; bytes of the table",
    ),
    ("locate, locate-1", "find the segment of a random offset, among 10^5 segments and in one"),
    (
        "gather-8m",
        "cut 8 MiB of that memory, registered, into what a device accepts; how many segments that is",
    ),
    (
        "gather-8m-prp",
        "the same as PRP lists for a controller page of 4 KiB, list pages allocated and freed",
    ),
    ("copy-64, -512, -4k, -64k, -1m, -8m", "copy that many bytes into a DMA buffer and out of it"),
    (
        "io-submit, io-submit-1",
        "submit one O_DIRECT read of 8 MiB with 64 in flight, or 1, without the read itself",
    ),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    (
        "pinfold",
        "pages kept as large as they are; io-submit: registered hugepages; copy: DmaMemory",
    ),
    (
        "pages-4k",
        "the same memory, a segment for every 4 KiB page of it; io-submit: registered 4 KiB pages",
    ),
    ("memcpy", "the same memory as a slice, copied by the standard library"),
    ("walk", "a list of segments, searched from its start"),
    ("unregistered, pages-4k-unregistered", "that memory, not registered"),
];

/// Measures the suite.
///
/// # Errors
/// Where the memory or the scratch file is unavailable, or a subject fails. Memory that may not be
/// pinned is no error: its cases are skipped.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        // A buffer is described by one thread, in memory of its own.
        return Ok(Vec::new());
    }
    let mut records = own_memory(harness)?;
    records.extend(register::model(harness)?);
    records.extend(locate::run(harness)?);
    records.extend(copy::run(harness)?);
    records.extend(submit::run(harness)?);
    Ok(records)
}

/// Measures the cases of the program's own memory, or records why they are skipped.
fn own_memory(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let own = match Memory::prepare()? {
        Memory::Ready(own) => own,
        Memory::Unable(why) => {
            let cases = std::iter::once(register::CASE).chain(gather::CASES);
            return Ok(cases.map(|case| harness.skipped(case, &why)).collect());
        }
    };
    let mut records = register::run(harness, &own)?;
    records.extend(gather::run(harness, &own)?);
    records.iter_mut().for_each(|record| record.note = Some(own.note.clone()));
    Ok(records)
}
