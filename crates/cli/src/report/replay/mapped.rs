//! The mappings that remain at the end of a trace.

use super::Row;
use crate::units::{ByteSize, counted};
use pinfold_core::access::Access;
use pinfold_core::table::MappedRun;
use serde::Serialize;
use std::fmt::Write;

/// Adjacent leaves of a table.
#[derive(Debug, Serialize)]
pub(super) struct MappedLine {
    iova: u64,
    bytes: u64,
    /// In the memory of the replay, not that of the trace.
    phys: u64,
    page_bytes: u64,
    access: &'static str,
}

impl From<&MappedRun> for MappedLine {
    fn from(run: &MappedRun) -> Self {
        Self {
            iova: run.iova.start().raw(),
            bytes: run.iova.len(),
            phys: run.phys.raw(),
            page_bytes: run.page_size.bytes(),
            access: words(run.access),
        }
    }
}

fn words(access: Access) -> &'static str {
    match (access.contains(Access::READ), access.contains(Access::WRITE)) {
        (true, true) => "read-write",
        (true, false) => "read",
        (false, true) => "write",
        (false, false) => "none",
    }
}

/// Appends what each policy's table maps at the end, if that is listed.
pub(super) fn append(out: &mut String, rows: &[Row<'_>]) {
    for Row { policy, mapped, .. } in rows {
        let Some(runs) = mapped else { continue };
        let bytes = runs.iter().map(|run| run.bytes).sum();
        // Writing to a `String` does not fail, here and below.
        let _ = writeln!(
            out,
            "  still mapped by {policy}: {} in {}",
            ByteSize(bytes),
            counted(runs.len() as u64, "run")
        );
        if runs.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "  {:>18}{:>12}{:>20}{:>10}  access",
            "iova", "bytes", "physical", "page"
        );
        for run in runs {
            let _ = writeln!(
                out,
                "  {:>#18x}{:>12}{:>#20x}{:>10}  {}",
                run.iova,
                ByteSize(run.bytes),
                run.phys,
                ByteSize(run.page_bytes),
                run.access
            );
        }
    }
}
