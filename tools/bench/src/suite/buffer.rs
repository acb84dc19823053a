//! The suite `buffer`: registered buffers that keep their hugepages whole, beside a segment for
//! every 4 KiB page.

mod gather;
mod own;
mod submit;

use self::own::Memory;
use super::Entry;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness};
use crate::record::Record;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("register-1g", "register and unregister 1 GiB: pin, describe, unpin; bytes of the table"),
    ("gather-8m", "cut 8 MiB of it into what a device accepts; how many segments that is"),
    ("gather-8m-prp", "the same as PRP lists, pages of 4 KiB, list pages allocated and freed"),
    ("io-submit", "submit one O_DIRECT read of 8 MiB, 64 in flight, without the read itself"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "pages kept as large as they are; io-submit: registered hugepages"),
    ("pages-4k", "a segment for every 4 KiB page; io-submit: registered 4 KiB pages"),
    ("unregistered", "io-submit: the hugepages, not registered"),
    ("pages-4k-unreg.", "io-submit: the 4 KiB pages, not registered"),
];

/// Measures the suite.
///
/// # Errors
/// Where the memory or the scratch file is unavailable, or a subject fails. Memory that may not be
/// pinned is no error: its cases are skipped.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        // A buffer is described by one thread, in memory of its own.
        return Ok(Vec::new());
    }
    let of_own = [gather::REGISTER, gather::CASES[0], gather::CASES[1]];
    let mut records = harness.cases(&of_own, || own_memory(harness))?;
    records.extend(harness.cases(&["io-submit"], || submit::run(harness))?);
    Ok(records)
}

/// Measures the cases of the program's own memory, or records why they are skipped.
fn own_memory(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let own = match Memory::prepare()? {
        Memory::Ready(own) => own,
        Memory::Unable(why) => {
            let cases = std::iter::once(gather::REGISTER).chain(gather::CASES);
            return Ok(cases.map(|case| harness.skipped(case, &why)).collect());
        }
    };
    let mut records = gather::registered(harness, &own)?;
    records.extend(gather::gathered(harness, &own)?);
    records.iter_mut().for_each(|record| record.note = Some(own.note.clone()));
    Ok(records)
}
