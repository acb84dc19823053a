//! The tests, the modules and the steps of its walk that ARCHITECTURE.md names: each must exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Returns the names in backticks that are made of five words or more, as those of tests are, and
/// of no function in the folders.
pub fn missing(text: &str, folders: &[PathBuf]) -> Vec<String> {
    let mut functions = BTreeSet::new();
    folders.iter().for_each(|folder| collect(folder, &mut functions));
    // Blocks of code have three backticks: an odd part is still outside of a name.
    let names = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let is_name = |name: &&str| {
        name.split('_').count() >= 5
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    names.filter(is_name).filter(|name| !functions.contains(*name)).map(str::to_owned).collect()
}

/// Returns the names in backticks, of the table `| module | keeps | read |`, that are no module of
/// `core`, and no file of the modules in the first cell of their row.
pub fn missing_modules(text: &str, core: &Path) -> Vec<String> {
    let names = |cell: Option<&&str>| -> Vec<String> {
        cell.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    };
    let exists = |path: &str| core.join(path).with_extension("rs").exists();
    let table = text.lines().skip_while(|line| !line.starts_with("| module | keeps | read |"));
    let rows: Vec<_> = table.skip(2).map_while(|line| line.strip_prefix('|')).collect();
    let mut missing =
        if rows.is_empty() { vec!["table of modules".to_owned()] } else { Vec::new() };
    for row in rows {
        let cells: Vec<_> = row.split('|').collect();
        let (modules, files) = (names(cells.first()), names(cells.get(2)));
        let is_file = |file: &str| {
            modules.iter().any(|module| module == file || exists(&format!("{module}/{file}")))
        };
        missing.extend(files.into_iter().filter(|file| !is_file(file)));
        missing.extend(modules.into_iter().filter(|module| !exists(module)));
    }
    missing
}

/// Returns the functions in backticks, of the table `| step | function | what it does |`, that are
/// not in the file of `core` that their cell begins with; a cell without one has that of the row
/// above it.
pub fn missing_steps(text: &str, core: &Path) -> Vec<String> {
    let table = text.lines().skip_while(|line| !line.starts_with("| step | function |"));
    let rows: Vec<_> = table.skip(2).map_while(|line| line.strip_prefix('|')).collect();
    let mut missing = if rows.is_empty() { vec!["table of steps".to_owned()] } else { Vec::new() };
    let mut file = String::new();
    for row in rows {
        for name in row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2) {
            if name.contains('/') {
                file = name.to_owned();
                continue;
            }
            let code = std::fs::read_to_string(core.join(&file).with_extension("rs"));
            let function = name.rsplit("::").next().unwrap_or(name);
            let begins = [format!("fn {function}("), format!("fn {function}<")];
            if !code.is_ok_and(|code| begins.iter().any(|begin| code.contains(begin))) {
                missing.push(format!("{file}: {name}"));
            }
        }
    }
    missing
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
