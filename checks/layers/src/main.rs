//! Compares ARCHITECTURE.md's layer table with the code, and finds import cycles between the files
//! of each crate.
//!
//! The table is `| layer | path | contents | unsafe |`: a number (`3`, `3.2`), one or more paths of
//! crates or modules in backticks, words, and `yes` or `forbidden`. A file belongs to the row with
//! the longest path that leads to it, and may use its own row and lower layers. A crate's root only
//! declares and re-exports its modules, and is in no layer.
//!
//! A file may use items of the modules that contain it, which use it in turn: they are one module.
//! `--strict` counts that as a cycle too. The tests that ARCHITECTURE.md names must exist, the
//! modules of its reading order, and the functions of its walk. Exits 1 with one line for each contradiction.

mod imports;
mod named;

use imports::{Files, graph};
use pinfold_layers::source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

struct Row {
    layer: Vec<u32>,
    text: String,
    paths: Vec<String>,
    forbidden: bool,
    unsafe_files: usize,
}

fn rows(text: &str) -> Vec<Row> {
    let table = text.lines().skip_while(|line| !line.starts_with("| layer | path |"));
    let cells = table
        .skip(2)
        .map_while(|line| line.strip_prefix('|'))
        .map(|line| line.split('|').collect::<Vec<_>>());
    let row = |cells: Vec<&str>| {
        let paths = cells.get(1)?.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let text = cells[0].trim().to_owned();
        let layer = text.split('.').map(|part| part.parse().unwrap_or(u32::MAX)).collect();
        Some(Row {
            layer,
            text,
            paths,
            forbidden: cells.get(3)?.trim() == "forbidden",
            unsafe_files: 0,
        })
    };
    cells.filter_map(row).collect()
}

/// The row with the longest path that leads to `file`, a repository path without its extension.
fn row_of(rows: &[Row], file: &str) -> Option<usize> {
    let length = |path: &String| {
        let rest = file.strip_prefix(path.trim_end_matches(".rs"))?;
        (rest.is_empty() || rest.starts_with('/')).then_some(path.len())
    };
    let best = |row: &Row| row.paths.iter().filter_map(length).max();
    (0..rows.len()).filter(|n| best(&rows[*n]).is_some()).max_by_key(|n| best(&rows[*n]))
}

/// The files that each file uses, by module path.
type Graph = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

fn reached<'g>(graph: &'g Graph, from: &'g Vec<String>) -> BTreeSet<&'g Vec<String>> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(to) = next.pop().and_then(|file| graph.get(file)) {
        next.extend(to.iter().filter(|to| seen.insert(*to)));
    }
    seen
}

/// Returns the groups of files that use each other, directly or through others.
fn cycles(graph: &Graph) -> BTreeSet<Vec<&Vec<String>>> {
    let all: BTreeMap<_, _> = graph.keys().map(|file| (file, reached(graph, file))).collect();
    let group = |file: &Vec<String>| {
        all[file].iter().copied().filter(|to| all[to].contains(file)).collect()
    };
    graph.keys().filter(|file| all[file].contains(file)).map(group).collect()
}

fn without_parents(graph: &Graph) -> Graph {
    let outside = |file: &[String], to: &BTreeSet<Vec<String>>| {
        to.iter().filter(|to| !file.starts_with(to)).cloned().collect()
    };
    graph.iter().map(|(file, to)| (file.clone(), outside(file, to))).collect()
}

fn repository_path(root: &Path, file: &source::File) -> String {
    let path = file.path.strip_prefix(root).unwrap_or(&file.path);
    path.with_extension("").display().to_string()
}

/// The folders of the crates that others depend on, and of the programs.
const FOLDERS: [&str; 2] = ["crates", "tools"];

fn main() {
    let strict = std::env::args().any(|arg| arg == "--strict");
    let root = Path::new(".");
    let text = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap_or_default();
    let mut rows = rows(&text);
    let mut wrong = Vec::new();
    if rows.is_empty() {
        wrong.push("ARCHITECTURE.md: no table `| layer | path | contents | unsafe |`".into());
    }
    let mut crates: BTreeMap<String, Files> = BTreeMap::new();
    for folder in FOLDERS {
        for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            crates.insert(name, source::read(&entry.path().join("src")));
        }
    }
    for row in &rows {
        for path in row
            .paths
            .iter()
            .filter(|path| !root.join(path).exists() && !root.join(format!("{path}.rs")).exists())
        {
            wrong.push(format!("ARCHITECTURE.md: layer {}: there is no {path}", row.text));
        }
    }
    for (name, files) in &crates {
        let graph = graph(files);
        check_files(root, files, &graph, &mut rows, &mut wrong);
        check_dependencies(root, name, &rows, &mut wrong);
        for group in cycles(&if strict { graph.clone() } else { without_parents(&graph) }) {
            wrong.push(format!("{name}: import cycle:"));
            for file in &group {
                let to: Vec<_> = graph[*file]
                    .iter()
                    .filter(|to| group.contains(to))
                    .map(|to| to.join("::"))
                    .collect();
                wrong.push(format!("    {} -> {}", file.join("::"), to.join(", ")));
            }
        }
    }
    for row in rows.iter().filter(|row| !row.forbidden && row.unsafe_files == 0) {
        wrong.push(format!(
            "ARCHITECTURE.md: layer {} ({}) has no unsafe code",
            row.text,
            row.paths.join(", ")
        ));
    }
    let missing = named::missing(&text, &FOLDERS.map(|folder| root.join(folder)));
    wrong.extend(missing.iter().map(|name| format!("ARCHITECTURE.md: there is no test {name}")));
    let core = root.join("crates/core/src");
    let missing = [named::missing_modules(&text, &core), named::missing_steps(&text, &core)].concat();
    wrong.extend(missing.iter().map(|name| format!("ARCHITECTURE.md: there is nothing called {name}")));
    wrong.iter().for_each(|line| eprintln!("{line}"));
    if !wrong.is_empty() {
        std::process::exit(1);
    }
    let files: usize = crates.values().map(Files::len).sum();
    println!("{} layers, {files} files: as ARCHITECTURE.md says, and no import cycle", rows.len());
}

fn check_files(
    root: &Path,
    files: &Files,
    graph: &Graph,
    rows: &mut [Row],
    wrong: &mut Vec<String>,
) {
    for (module, file) in files.iter().filter(|(module, _)| !module.is_empty()) {
        let path = repository_path(root, file);
        let Some(own) = row_of(rows, &path) else {
            wrong.push(format!("{path}.rs: in no layer of ARCHITECTURE.md"));
            continue;
        };
        if file.tokens.iter().any(|token| token == "unsafe") {
            rows[own].unsafe_files += 1;
            if rows[own].forbidden {
                wrong.push(format!(
                    "{path}.rs: unsafe code in layer {}, which forbids it",
                    rows[own].text
                ));
            }
        }
        for to in graph[module].iter().filter(|to| !to.is_empty()) {
            let Some(other) = row_of(rows, &repository_path(root, &files[to])) else { continue };
            if other != own && rows[other].layer >= rows[own].layer {
                let (from, to) =
                    (&rows[own].text, format!("{} of layer {}", to.join("::"), rows[other].text));
                wrong.push(format!("{path}.rs: in layer {from}, uses {to}"));
            }
        }
    }
}

/// A crate depends on crates whose layers are all below its own lowest one, and none of those that
/// others depend on on one of the tools.
fn check_dependencies(root: &Path, name: &str, rows: &[Row], wrong: &mut Vec<String>) {
    let layers = |name: &str| -> Vec<&Row> {
        let inside = |path: &String| path == name || path.starts_with(&format!("{name}/"));
        rows.iter().filter(|row| row.paths.iter().any(inside)).collect()
    };
    let manifest =
        std::fs::read_to_string(root.join(name).join("Cargo.toml")).unwrap_or_default();
    let section = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
    for line in section.take_while(|line| !line.starts_with('[')) {
        let Some(to) = line
            .strip_prefix("pinfold")
            .map(|rest| rest.split(['.', ' ', '=']).next().unwrap_or_default())
        else {
            continue;
        };
        let to = if to.is_empty() { "pinfold" } else { to.trim_start_matches('-') };
        let paths = FOLDERS.map(|folder| format!("{folder}/{to}"));
        let Some(to) = paths.iter().find(|path| root.join(path).exists()) else { continue };
        let own = layers(name).iter().map(|row| &row.layer).min();
        let highest = layers(to).iter().map(|row| &row.layer).max();
        if own <= highest {
            wrong.push(format!("{name}/Cargo.toml: depends on {to}, which is not below it"));
        }
        if name.starts_with("crates/") && to.starts_with("tools/") {
            wrong.push(format!("{name}/Cargo.toml: depends on {to}, which no library may"));
        }
    }
}
