//! The uses between files of a crate: `use` declarations and paths, resolved through re-exports to
//! the file that defines the item.

use pinfold_layers::source::File;
use std::collections::{BTreeMap, BTreeSet};

pub type Files = BTreeMap<Vec<String>, File>;

/// A path in a `use`: its segments, the name it gets (`*` for a glob), and whether it is a
/// re-export that the file itself does not use.
struct Import {
    path: Vec<String>,
    name: String,
    passed_on: bool,
}

/// Returns the files that each file uses, itself excepted. Not counted are re-exports that a file
/// does not use itself.
pub fn graph(files: &Files) -> BTreeMap<Vec<String>, BTreeSet<Vec<String>>> {
    let imports: BTreeMap<_, _> =
        files.iter().map(|(module, file)| (module, imports(&file.tokens))).collect();
    let resolve = |from: &[String], path: &[String]| resolve(files, &imports, from, path, 0);
    let mut graph = BTreeMap::new();
    for (module, file) in files {
        let used = imports[module]
            .iter()
            .filter(|import| !import.passed_on)
            .map(|import| import.path.clone());
        let used = used.chain(paths(&file.tokens));
        let mut to: BTreeSet<_> = used.filter_map(|path| resolve(module, &path)).collect();
        to.remove(module);
        graph.insert(module.clone(), to);
    }
    graph
}

fn resolve(
    files: &Files,
    imports: &BTreeMap<&Vec<String>, Vec<Import>>,
    from: &[String],
    path: &[String],
    depth: u32,
) -> Option<Vec<String>> {
    let (mut at, mut rest, mut rooted) = (from.to_vec(), path, false);
    while let Some((first, more)) = rest.split_first() {
        match first.as_str() {
            "crate" => at.clear(),
            "super" if rooted && at.is_empty() => return None,
            "super" => drop(at.pop()),
            "self" => {}
            name => {
                let child: Vec<_> = at.iter().cloned().chain([name.to_owned()]).collect();
                if files.contains_key(&child) {
                    (at, rest, rooted) = (child, more, true);
                    continue;
                }
                // A name that is no module here: an item, a re-export, or (first of all) another
                // crate.
                let known = imports.get(&at).map(Vec::as_slice).unwrap_or_default();
                let globs = known.iter().filter(|import| import.name == "*");
                let defined = files.get(&at).is_some_and(|file| defines(&file.tokens, name));
                let named = known.iter().find(|import| import.name == name && import.path != path);
                if let (Some(import), false, true, true) = (named, defined, rooted, depth < 8) {
                    return resolve(files, imports, &at, &import.path, depth + 1).or(Some(at));
                }
                for glob in globs.filter(|_| rooted && !defined && depth < 8) {
                    let mut path = glob.path.clone();
                    path.push(name.to_owned());
                    let found = resolve(files, imports, &at, &path, depth + 1);
                    if let Some(found) = found.filter(|to| defines(&files[to].tokens, name)) {
                        return Some(found);
                    }
                }
                return rooted.then_some(at);
            }
        }
        (rest, rooted) = (more, true);
    }
    rooted.then_some(at)
}

fn defines(tokens: &[String], name: &str) -> bool {
    const ITEMS: [&str; 9] =
        ["struct", "enum", "fn", "trait", "type", "const", "static", "union", "macro_rules"];
    let item = |pair: &[String]| ITEMS.contains(&pair[0].as_str()) && pair[1] == name;
    tokens.windows(2).any(item) || tokens.windows(3).any(|t| t[0] == "macro_rules" && t[2] == name)
}

fn imports(tokens: &[String]) -> Vec<Import> {
    let mut all = Vec::new();
    for (at, _) in tokens.iter().enumerate().filter(|(_, token)| *token == "use") {
        let item = at == 0 || [";", "}", "{", "]", ")", "pub"].contains(&tokens[at - 1].as_str());
        if item && tokens.get(at + 1).is_some_and(|next| next != "<") {
            let first = all.len();
            tree(tokens, at + 1, &[], &mut all);
            let public = at > 0 && ["pub", ")"].contains(&tokens[at - 1].as_str());
            for import in all.iter_mut().skip(first).filter(|_| public) {
                let uses = tokens.iter().filter(|token| **token == import.name).count();
                import.passed_on = import.name == "*" || uses == 1;
            }
        }
    }
    all
}

/// Reads one use tree from `at`, below `prefix`; returns where it ends.
fn tree(tokens: &[String], mut at: usize, prefix: &[String], all: &mut Vec<Import>) -> usize {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(at) {
        match token.as_str() {
            "::" => at += 1,
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at = tree(tokens, at, &path, all);
                    at += usize::from(tokens.get(at).is_some_and(|token| token == ","));
                }
                return at + 1;
            }
            "*" => {
                all.push(Import { path, name: "*".into(), passed_on: false });
                return at + 1;
            }
            "as" => {
                let name = tokens.get(at + 1).cloned().unwrap_or_default();
                all.push(Import { path, name, passed_on: false });
                return at + 2;
            }
            ";" | "," | "}" => break,
            "self" if path.len() > prefix.len() || !prefix.is_empty() => at += 1,
            name => {
                path.push(name.to_owned());
                at += 1;
            }
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    all.push(Import { path, name, passed_on: false });
    at
}

/// Returns the paths outside of `use` declarations.
fn paths(tokens: &[String]) -> Vec<Vec<String>> {
    let (mut all, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let starts = tokens.get(at + 1).is_some_and(|next| next == "::")
            && (at == 0 || tokens[at - 1] != "::" && tokens[at - 1] != "use");
        if !starts {
            at += 1;
            continue;
        }
        let mut path = vec![tokens[at].clone()];
        while tokens.get(at + 1).is_some_and(|t| t == "::")
            && tokens.get(at + 2).is_some_and(|t| is_name(t))
        {
            path.push(tokens[at + 2].clone());
            at += 2;
        }
        at += 1;
        all.push(path);
    }
    all
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}
