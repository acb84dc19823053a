//! The page `docs/failures.md`: its output blocks are what the cases print.

use crate::report::Report;
use std::path::Path;
use std::{fs, io};

/// Replaces the output block of each case: the first block marked `text` after the line that has
/// the case's command.
pub(crate) fn update(path: &Path, reports: &[Report]) -> io::Result<()> {
    let mut page = fs::read_to_string(path)?;
    for report in reports {
        let name = report.case().name;
        let (start, end) = block(&page, name).ok_or_else(|| {
            io::Error::other(format!("no output block follows the command of the case {name}"))
        })?;
        page.replace_range(start..end, &report.to_string());
    }
    fs::write(path, page)
}

/// Returns where the output of a case begins and ends in the page.
fn block(page: &str, name: &str) -> Option<(usize, usize)> {
    let command = page.find(&format!("cargo run -p pinfold-failures -- {name}\n"))?;
    let start = command + page.get(command..)?.find("```text\n")? + "```text\n".len();
    Some((start, start + page.get(start..)?.find("```")?))
}
