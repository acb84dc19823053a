//! Lists the public functions that nothing outside their own module uses: no other module of their
//! crate, no other crate, no example.
//!
//! Functions are found by name, so one that shares its name with a used one is not listed: the list
//! has no false entry, but is not complete. Tests and documentation are no users. A module is a
//! file at the top of a crate, with the folder of its name. `checks/layers/kept-api.txt` lists
//! exceptions, a line each: the function (or a module and `*`), then the reason for keeping it.
//! Arguments restrict the list to some crates. Exits 1 and prints what is neither used nor
//! excepted, and exceptions that are no longer needed.

use pinfold_layers::source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The tokens of one module, and who owns it.
struct Module {
    krate: String,
    name: String,
    tokens: Vec<String>,
}

fn modules(krate: &Path) -> Vec<Module> {
    let name = krate.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut tokens = BTreeMap::<String, Vec<String>>::new();
    for (module, file) in source::read(&krate.join("src")) {
        // `lib` for the root, which has functions of its own in a program.
        let top = module.first().cloned().unwrap_or_else(|| "lib".into());
        tokens.entry(top).or_default().extend(file.tokens);
    }
    for (module, file) in source::read(&krate.join("examples")) {
        let example = format!("example {}", module.join("::"));
        tokens.entry(example).or_default().extend(file.tokens);
    }
    let module = |(module, tokens)| Module { krate: name.clone(), name: module, tokens };
    tokens.into_iter().map(module).collect()
}

/// Returns the names of the functions that are `pub` without a restriction.
fn public(tokens: &[String]) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for (at, _) in tokens.iter().enumerate().filter(|(_, token)| *token == "pub") {
        let mut rest = tokens[at + 1..].iter().map(String::as_str);
        let first = rest.by_ref().find(|token| !["const", "unsafe", "async"].contains(token));
        if let (Some("fn"), Some(name)) = (first, rest.next()) {
            found.insert(name);
        }
    }
    found
}

/// Returns the names that are called, named by a path, or imported.
fn used(tokens: &[String]) -> BTreeSet<&str> {
    let (mut found, mut importing) = (BTreeSet::new(), false);
    for (at, token) in tokens.iter().enumerate() {
        let before = at.checked_sub(1).map_or("", |before| tokens[before].as_str());
        let after = tokens.get(at + 1).map_or("", String::as_str);
        importing = token == "use" || importing && token != ";";
        let called = after == "(" && before != "fn";
        if called || importing || before == "::" || before == "." && after == "::" {
            found.insert(token.as_str());
        }
    }
    found
}

/// Returns the exceptions, and the lines that give no reason.
fn exceptions(text: &str) -> (BTreeSet<String>, Vec<&str>) {
    let (mut kept, mut wrong) = (BTreeSet::new(), Vec::new());
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.split_once(' ').filter(|(_, reason)| !reason.trim().is_empty()) {
            Some((function, _)) => drop(kept.insert(function.to_owned())),
            None => wrong.push(line),
        }
    }
    (kept, wrong)
}

/// Returns whether an exception is the one for a function.
fn covers(entry: &str, function: &str) -> bool {
    match entry.strip_suffix('*') {
        Some(module) => function.starts_with(module),
        None => entry == function,
    }
}

fn main() {
    let mut crates: Vec<PathBuf> = ["crates", "tools"]
        .into_iter()
        .flat_map(std::fs::read_dir)
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    crates.sort();
    let modules: Vec<Module> = crates.iter().flat_map(|krate| modules(krate)).collect();
    let used: Vec<_> = modules.iter().map(|module| used(&module.tokens)).collect();
    let mut unused = BTreeSet::new();
    for (at, module) in modules.iter().enumerate().filter(|(_, m)| !m.name.contains(' ')) {
        let outside = |name: &str| {
            used.iter().enumerate().any(|(other, names)| other != at && names.contains(name))
        };
        let names = public(&module.tokens).into_iter().filter(|name| !outside(name));
        unused.extend(names.map(|name| format!("{}::{}::{name}", module.krate, module.name)));
    }
    // The crates that are named on the command line, else all.
    let named: Vec<String> = std::env::args().skip(1).collect();
    let asked = |function: &&String| {
        let krate = function.split("::").next().unwrap_or_default();
        named.is_empty() || named.iter().any(|name| name == krate)
    };
    let text = std::fs::read_to_string("checks/layers/kept-api.txt").unwrap_or_default();
    let (kept, wrong) = exceptions(&text);
    let needed = |entry: &&String| unused.iter().any(|function| covers(entry, function));
    let mut found: Vec<String> =
        wrong.iter().map(|line| format!("kept-api.txt: `{line}` gives no reason")).collect();
    for entry in kept.iter().filter(|entry| !needed(entry)) {
        found.push(format!("kept-api.txt: {entry} is used, or gone: remove the line"));
    }
    let listed = |function: &&String| kept.iter().any(|entry| covers(entry, function));
    for function in unused.iter().filter(asked).filter(|function| !listed(function)) {
        found.push(format!("{function} has no user outside its module"));
    }
    found.iter().for_each(|line| println!("{line}"));
    if !found.is_empty() {
        std::process::exit(1);
    }
    println!(
        "no public function without a user outside its module, except {} kept ones",
        kept.len()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn only_unrestricted_functions_are_public() {
        let tokens =
            tokens("pub fn a ( ) pub ( crate ) fn b ( ) pub const unsafe fn c ( ) fn d ( )");
        assert_eq!(public(&tokens), BTreeSet::from(["a", "c"]));
    }

    #[test]
    fn a_definition_and_a_field_are_no_use() {
        let tokens =
            tokens("fn a ( ) { x . b ; y . c ( ) ; T :: d ; z . e :: < T > ( ) } use f :: g ;");
        let used = used(&tokens);
        for name in ["c", "d", "e", "g"] {
            assert!(used.contains(name), "{name}");
        }
        assert!(!used.contains("a") && !used.contains("b"));
    }

    #[test]
    fn an_exception_covers_a_function_or_a_module() {
        assert!(covers("core::a::b", "core::a::b") && covers("core::a::*", "core::a::b"));
        assert!(!covers("core::a::b", "core::a::bc") && !covers("core::a::*", "core::ab::c"));
    }

    #[test]
    fn an_exception_needs_a_reason() {
        let (kept, wrong) = exceptions("# words\ncore::a::b for C programs\ncore::c::d\n");
        assert_eq!((kept.len(), wrong), (1, vec!["core::c::d"]));
    }
}
