//! Lists the public functions that nothing outside their own module uses: no other module of their
//! crate, no other crate, no example. The compiler finds the uses: each public function of a copy
//! of the sources is marked as deprecated, with a note that names its place, and the warnings of
//! one `cargo check` are read. A function that is only mentioned, or that shares its name with a
//! used one, has no user.
//!
//! Tests and documentation are no users, and neither is a re-export. A module is a file at the top
//! of a crate, with the folder of its name. `checks/layers/kept-api.txt` lists exceptions, a line
//! each: the function, as `CRATE::FILE::TYPE::NAME` (`core::frame/zone::FrameZone::alloc`; without
//! the type where it has none), then the reason for keeping it. An entry is for one function: a
//! function of the same name in another file, or of another type, needs its own. What C calls
//! (`extern`) is not looked at. Exits 1 and prints what is neither used nor excepted, and exceptions
//! that match no unused function.
//!
//! Usage: `unused_api COPY TARGET FEATURES`: the folders for the copy and for cargo.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

const MARK: &str = "pinfold-function ";

/// The public functions, by the key of `kept-api.txt`, and the places of each.
type Functions = BTreeMap<String, BTreeSet<String>>;

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

/// Returns the type of an `impl` block from its header, up to the brace: `Zone` of
/// `impl<S: Into<u8>> frame::Zone<S> where S: Copy`.
fn type_of(header: &str) -> Option<&str> {
    let mut rest = header.trim_start();
    rest = rest.strip_prefix("unsafe ").unwrap_or(rest).strip_prefix("impl")?;
    if rest.starts_with('<') {
        let (mut depth, mut before) = (0, ' ');
        let end = rest.find(|c| {
            match c {
                '<' => depth += 1,
                '>' if before != '-' => depth -= 1,
                _ => {}
            }
            before = c;
            depth == 0
        })?;
        rest = &rest[end + 1..];
    }
    let rest = rest.split(" where ").next()?;
    let rest = rest.rsplit(" for ").next()?.trim_start_matches([' ', '&']);
    let path = rest.split(['<', ' ', '{']).next()?;
    path.rsplit("::").next().filter(|name| !name.is_empty())
}

/// Marks the functions of a file. Lines keep their numbers.
fn marked(path: &str, text: &str, functions: &mut Functions) -> String {
    let product = path.contains("/src/") && !path.contains("/tests/");
    let Some((krate, _)) = module(path).filter(|_| product) else {
        return text.to_owned();
    };
    let file = path.split_once("/src/").map_or(path, |(_, file)| file).trim_end_matches(".rs");
    let mut all = String::with_capacity(text.len() * 2);
    // The `impl` block around the line: its indentation and its header, which may have several lines.
    let mut block: Option<(usize, String)> = None;
    for (at, line) in text.split_inclusive('\n').enumerate() {
        let (indent, words) = (line.len() - line.trim_start().len(), line.trim());
        match &mut block {
            Some((_, header)) if !header.contains('{') => {
                header.extend([" ", words]);
            }
            Some((outer, _)) if indent == *outer && words == "}" => block = None,
            Some(_) => {}
            None => {
                let opens = ["impl ", "impl<", "unsafe impl"].iter().any(|w| words.starts_with(w));
                block = opens.then(|| (indent, words.to_owned()));
            }
        }
        // One of a line, `impl X {}`, has no functions to mark.
        block = block.filter(|(_, header)| !header.ends_with('}'));
        if let Some(name) = public(line) {
            let place = format!("{path}:{}", at + 1);
            let owner = block.as_ref().and_then(|(_, header)| type_of(header));
            let owner = owner.map_or(String::new(), |owner| format!("{owner}::"));
            let attribute = format!("#[deprecated(note = \"{MARK}{place}\")] ");
            all.push_str(&line[..indent]);
            all.push_str(&attribute);
            all.push_str(&line[indent..]);
            functions.entry(format!("{krate}::{file}::{owner}{name}")).or_default().insert(place);
        } else {
            all.push_str(line);
        }
    }
    all
}

/// Copies the files that git tracks, in place of an earlier copy.
fn copy(to: &Path) -> std::io::Result<Functions> {
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

/// Compares the functions that nothing uses with the exceptions in `text`, and returns what to
/// correct, a line each.
fn compare(functions: &Functions, used: &BTreeSet<String>, text: &str) -> Vec<String> {
    let unused: BTreeMap<_, Vec<_>> = functions
        .iter()
        .map(|(name, places)| (name.as_str(), places.difference(used).cloned().collect()))
        .filter(|(_, places): &(_, Vec<_>)| !places.is_empty())
        .collect();
    let (kept, wrong) = exceptions(text);
    let mut found: Vec<String> =
        wrong.iter().map(|line| format!("kept-api.txt: `{line}` gives no reason")).collect();
    for entry in kept.iter().filter(|entry| !unused.contains_key(entry.as_str())) {
        found.push(format!("kept-api.txt: {entry} is used, or gone: remove the line"));
    }
    for (function, places) in &unused {
        let at = places.join(", ");
        if !kept.contains(*function) {
            found.push(format!("{at}: {function} has no user outside its module"));
        } else if places.len() > 1 {
            found.push(format!("{at}: kept-api.txt: {function} is several functions"));
        }
    }
    found
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
    let text = std::fs::read_to_string("checks/layers/kept-api.txt").unwrap_or_default();
    let found = compare(&functions, &used, &text);
    if found.is_empty() {
        println!(
            "{} public functions: each has a user outside its module, except those of {} lines of kept-api.txt",
            functions.len(),
            exceptions(&text).0.len()
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
        assert!(functions["core::a/b::f"].contains("crates/core/src/a/b.rs:2"));
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
    fn a_function_is_named_by_its_file_and_type() {
        let text = "impl<S: Fn(u8) -> u8>\n    crate::Zone<S>\nwhere\n    S: Copy,\n{\n    pub fn f() {}\n}\n\
            impl Copy for Zone {}\npub fn f() {}\n    impl Run<'_> {\n        pub fn f() {}\n    }\n\
            impl From<u8> for Zone {\n    fn from() {}\n}\npub const fn g() {}\n";
        let mut functions = BTreeMap::new();
        marked("crates/core/src/a/b.rs", text, &mut functions);
        let names: Vec<_> = functions.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["core::a/b::Run::f", "core::a/b::Zone::f", "core::a/b::f", "core::a/b::g"]
        );
        assert!(functions.values().all(|places| places.len() == 1), "{functions:?}");
    }

    /// Two files of one module have a function `new` each, of a type each, and one is excused.
    fn two_of_a_name() -> Functions {
        let mut functions = BTreeMap::new();
        for (file, owner) in [("a/b", "One"), ("a/c", "Two"), ("a/b", "Three")] {
            let path = format!("crates/core/src/{file}.rs");
            let text = format!("impl {owner} {{\n    pub fn new() {{}}\n}}\n");
            marked(&path, &text, &mut functions);
        }
        functions
    }

    #[test]
    fn an_exception_is_for_one_function() {
        let text = "core::a/b::One::new for a reason\n";
        let found = compare(&two_of_a_name(), &BTreeSet::new(), text);
        assert_eq!(
            found,
            [
                "crates/core/src/a/b.rs:2: core::a/b::Three::new has no user outside its module",
                "crates/core/src/a/c.rs:2: core::a/c::Two::new has no user outside its module",
            ]
        );
        // Two that no key tells apart, as of two implementations of one type.
        let mut functions = BTreeMap::new();
        let text = "impl A<u8> {\n    pub fn f() {}\n}\nimpl A<u16> {\n    pub fn f() {}\n}\n";
        marked("crates/core/src/a.rs", text, &mut functions);
        let found = compare(&functions, &BTreeSet::new(), "core::a::A::f for a reason");
        assert!(found.len() == 1 && found[0].contains("several functions"), "{found:?}");
    }

    #[test]
    fn an_exception_that_matches_nothing_is_reported() {
        let used = BTreeSet::from(["b", "c"].map(|file| format!("crates/core/src/a/{file}.rs:2")));
        let found = |text: &str| compare(&two_of_a_name(), &used, text);
        assert!(found("").is_empty());
        for entry in ["core::a/b::One::new", "core::a/b::*", "core::a::new", "core::a/d::gone"] {
            let expected = format!("kept-api.txt: {entry} is used, or gone: remove the line");
            assert_eq!(found(&format!("{entry} for a reason")), [expected]);
        }
    }

    #[test]
    fn an_exception_needs_a_reason() {
        let (kept, wrong) = exceptions("# words\ncore::a::b for C programs\ncore::c::d\n");
        assert_eq!((kept.len(), wrong), (1, vec!["core::c::d"]));
    }
}
