//! The tests that ARCHITECTURE.md names: each must exist.

use std::collections::BTreeSet;
use std::path::Path;

/// Returns the names in backticks that are made of five words or more, as those of tests are, and
/// of no function of the crates.
pub fn missing(text: &str, crates: &Path) -> Vec<String> {
    let mut functions = BTreeSet::new();
    collect(crates, &mut functions);
    // Blocks of code have three backticks: an odd part is still outside of a name.
    let names = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let is_name = |name: &&str| {
        name.split('_').count() >= 5
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    names.filter(is_name).filter(|name| !functions.contains(*name)).map(str::to_owned).collect()
}

fn collect(folder: &Path, functions: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, functions);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let after = text.lines().filter_map(|line| line.split_once("fn "));
            functions.extend(
                after.filter_map(|(_, rest)| rest.split(['(', '<']).next()).map(str::to_owned),
            );
        }
    }
}
