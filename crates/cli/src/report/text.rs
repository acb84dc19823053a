//! How the reports are laid out: one fact per line, the figures of a kind in columns.

use std::fmt::{self, Write};

/// The width of the first column.
const LABEL: usize = 14;

/// Appends a line with `label` in the first column.
pub(super) fn line(out: &mut String, label: &str, value: fmt::Arguments<'_>) {
    // Writing to a `String` does not fail, here and in the reports.
    let _ = writeln!(out, "  {label:<LABEL$}{value}");
}
