//! Lists the public functions that nothing outside their own module uses: no other module of their
//! crate, no other crate, no example. The compiler finds the uses: each public function of a copy
//! of the sources is marked as deprecated, with a note that names its place, and the warnings of
//! one `cargo check` are read. A function that is only mentioned, or that shares its name with a
//! used one, has no user.
//!
//! Tests and documentation are no users, and neither is a re-export. A module is a file at the top
//! of a crate, with the folder of its name. `checks/layers/kept-api.txt` lists exceptions, a line
//! each: the function (or a beginning and `*`), then the reason for keeping it. What C calls
//! (`extern`) is not looked at. Exits 1 and prints what is neither used nor excepted, and
//! exceptions that are no longer needed.
//!
//! Usage: `unused_api COPY TARGET FEATURES`: the folders for the copy and for cargo.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

const MARK: &str = "pinfold-function ";

/// The crate's folder and the top module of a file: `("core", "domain")`. An example is a module.
fn module(path: &str) -> Option<(&str, String)> {
    let mut parts = path.split('/');
    let (root, krate, folder) = (parts.next()?, parts.next()?, parts.next()?);
    let top = parts.next()?.trim_end_matches(".rs");
    let top = if ["lib", "main"].contains(&top) { "lib" } else { top };
    match folder {
        "src" if ["crates", "tools"].contains(&root) => Some((krate, top.to_owned())),
        _ => Some((krate, format!("{folder} {top}"))),
    }
}

/// Returns the name of the function that the line defines, if that is public without a restriction.
fn public(line: &str) -> Option<&str> {
    let mut rest = line.trim_start().strip_prefix("pub ")?;
    while let Some(after) =
        ["const ", "unsafe ", "async "].iter().find_map(|w| rest.strip_prefix(w))
    {
        rest = after;
    }
    let name = rest.strip_prefix("fn ")?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|name| !name.is_empty())
}

/// Marks the functions of a file. Lines keep their numbers.
fn marked(path: &str, text: &str, functions: &mut BTreeMap<String, BTreeSet<String>>) -> String {
    let product = path.contains("/src/") && !path.contains("/tests/");
    let Some((krate, top)) = module(path).filter(|_| product) else {
        return text.to_owned();
    };
    let mut all = String::with_capacity(text.len() * 2);
    for (at, line) in text.split_inclusive('\n').enumerate() {
        if let Some(name) = public(line) {
            let place = format!("{path}:{}", at + 1);
            let indent = line.len() - line.trim_start().len();
            let attribute = format!("#[deprecated(note = \"{MARK}{place}\")] ");
            all.push_str(&line[..indent]);
            all.push_str(&attribute);
            all.push_str(&line[indent..]);
            functions.entry(format!("{krate}::{top}::{name}")).or_default().insert(place);
        } else {
            all.push_str(line);
        }
    }
    all
}

/// Copies the files that git tracks, in place of an earlier copy.
fn copy(to: &Path) -> std::io::Result<BTreeMap<String, BTreeSet<String>>> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--", "crates", "tools", "docs", "contrib", "README.md"])
        .output()?;
    let top = ["Cargo.toml", "Cargo.lock"].map(str::to_owned);
    let all = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut functions = BTreeMap::new();
    if to.exists() {
        std::fs::remove_dir_all(to)?;
    }
    for path in all.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).chain(top) {
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let bytes = match std::str::from_utf8(&bytes) {
            Ok(text) if path.ends_with(".rs") => marked(&path, text, &mut functions).into_bytes(),
            _ => bytes,
        };
        let copy = to.join(&path);
        if let Some(folder) = copy.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(copy, bytes)?;
    }
    Ok(functions)
}

/// Returns the places of functions that another module uses, from warnings of the form
/// `FILE:LINE:COLUMN: warning: use of deprecated ...: MARK PLACE`.
fn used(warnings: &str, line_of: impl Fn(&str, usize) -> String) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for warning in warnings.lines().filter(|line| line.contains("use of deprecated")) {
        let Some((_, place)) = warning.split_once(MARK) else { continue };
        let place = place.trim();
        let mut parts = warning.split(':');
        let (Some(user), Some(Ok(line))) = (parts.next(), parts.next().map(str::parse)) else {
            continue;
        };
        let defined = place.split(':').next().unwrap_or_default();
        let exported = line_of(user, line).trim_start().starts_with("pub use ");
        if !exported && module(user) != module(defined) {
            found.insert(place.to_owned());
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
        Some(beginning) => function.starts_with(beginning),
        None => entry == function,
    }
}

fn run() -> Result<Vec<String>, String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [copied, target, features] = words.as_slice() else {
        return Err("usage: unused_api COPY TARGET FEATURES".into());
    };
    let copied = Path::new(copied);
    let functions = copy(copied).map_err(|error| format!("{}: {error}", copied.display()))?;
    let checked = Command::new("cargo")
        .args([
            "check",
            "--locked",
            "--workspace",
            "--lib",
            "--bins",
            "--examples",
            "--message-format=short",
        ])
        .args(["--features", features, "--target-dir", target])
        // Runs the compiler as it is. Cargo takes a workspace and its copy for the same, and this
        // distinguishes the results of their crates, while those of the dependencies are shared.
        .env("RUSTC_WORKSPACE_WRAPPER", "env")
        .current_dir(copied)
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    let warnings = String::from_utf8_lossy(&checked.stderr);
    if !checked.status.success() {
        return Err(format!("{warnings}the copy in {} does not compile", copied.display()));
    }
    let line_of = |path: &str, line: usize| {
        let text = std::fs::read_to_string(copied.join(path)).unwrap_or_default();
        text.lines().nth(line.saturating_sub(1)).unwrap_or_default().to_owned()
    };
    let used = used(&warnings, line_of);
    if used.is_empty() {
        return Err("no use was found: the warnings were not understood".into());
    }
    // Functions of one name in one module are told apart by their places.
    let mut unused = BTreeMap::new();
    for (name, places) in &functions {
        let without: Vec<_> =
            places.iter().filter(|place| !used.contains(*place)).cloned().collect();
        if !without.is_empty() {
            unused.insert(name.as_str(), without);
        }
    }
    let text = std::fs::read_to_string("checks/layers/kept-api.txt").unwrap_or_default();
    let (kept, wrong) = exceptions(&text);
    let mut found: Vec<String> =
        wrong.iter().map(|line| format!("kept-api.txt: `{line}` gives no reason")).collect();
    for entry in kept.iter().filter(|entry| !unused.keys().any(|function| covers(entry, function)))
    {
        found.push(format!("kept-api.txt: {entry} is used, or gone: remove the line"));
    }
    for (function, places) in
        unused.iter().filter(|(function, _)| !kept.iter().any(|entry| covers(entry, function)))
    {
        found.push(format!("{}: {function} has no user outside its module", places.join(", ")));
    }
    if found.is_empty() {
        println!(
            "{} public functions: each has a user outside its module, except those of {} lines of kept-api.txt",
            functions.len(),
            kept.len()
        );
    }
    Ok(found)
}

fn main() {
    let found = run().unwrap_or_else(|error| vec![error]);
    found.iter().for_each(|line| println!("{line}"));
    std::process::exit(i32::from(!found.is_empty()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unrestricted_functions_are_public() {
        assert_eq!(public("    pub const unsafe fn c<T>(x: T) {"), Some("c"));
        assert_eq!(public("pub fn a()"), Some("a"));
        for line in [
            "pub(crate) fn b() {}",
            "fn d() {}",
            "pub unsafe extern \"C\" fn pf_e()",
            "pub struct F;",
        ] {
            assert_eq!(public(line), None, "{line}");
        }
    }

    #[test]
    fn a_mark_names_the_place_and_moves_no_line() {
        let mut functions = BTreeMap::new();
        let text = marked("crates/core/src/a/b.rs", "// one\n    pub fn f() {}\n", &mut functions);
        assert_eq!(
            text,
            format!(
                "// one\n    #[deprecated(note = \"{MARK}crates/core/src/a/b.rs:2\")] pub fn f() {{}}\n"
            )
        );
        assert!(functions["core::a::f"].contains("crates/core/src/a/b.rs:2"));
        for path in ["crates/core/tests/a.rs", "crates/core/src/a/tests/b.rs", "docs/a.rs"] {
            assert_eq!(marked(path, "pub fn f() {}\n", &mut BTreeMap::new()), "pub fn f() {}\n");
        }
    }

    #[test]
    fn another_module_another_crate_and_an_example_are_users() {
        let line = |user: &str, mark: &str| {
            format!("{user}:1:2: warning: use of deprecated method `x`: {MARK}{mark}\n")
        };
        let one = "crates/core/src/a/b.rs:2";
        for (user, counts) in [
            ("crates/core/src/a.rs", false),
            ("crates/core/src/a/c.rs", false),
            ("crates/core/src/d.rs", true),
            ("crates/soft/src/a.rs", true),
            ("crates/core/examples/a.rs", true),
        ] {
            assert_eq!(
                used(&line(user, one), |_, _| "x.f();".into()).contains(one),
                counts,
                "{user}"
            );
        }
        let exported = used(&line("crates/core/src/lib.rs", one), |_, _| "pub use a::b::f;".into());
        assert!(exported.is_empty());
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
