//! The cases, as a user runs them, and the page about them.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, where a failure may panic"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const CASES: [&str; 7] = [
    "stale-mapping",
    "entry-limit",
    "list-memory",
    "ring-border",
    "early-memory",
    "failed-map",
    "double-free",
];

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pinfold-failures")).args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/failures.md")
}

/// Returns the text with `#` for each number and a space for each run of white space, without what
/// depends on the machine: notes, and the kernel's own words.
fn without_numbers(text: &str) -> String {
    let lines = text.lines().filter(|line| {
        !["  note:", "  the kernel:"].iter().any(|varying| line.starts_with(varying))
    });
    let words = lines.flat_map(str::split_whitespace).map(|word| {
        let mut masked = String::new();
        let mut rest = word.chars().peekable();
        while let Some(at) = rest.next() {
            let hex = at == '0' && rest.next_if_eq(&'x').is_some();
            if !at.is_ascii_digit() {
                masked.push(at);
                continue;
            }
            while rest
                .next_if(|next| {
                    next.is_ascii_digit() || (hex && next.is_ascii_hexdigit()) || *next == ','
                })
                .is_some()
            {}
            masked.push('#');
        }
        masked
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the output block of a case.
fn block(page: &str, name: &str) -> String {
    let (_, after) = page
        .split_once(&format!("cargo run -p pinfold-failures -- {name}\n"))
        .unwrap_or_else(|| panic!("the page has no command for {name}"));
    let (_, block) = after.split_once("```text\n").unwrap();
    block.split_once("```").unwrap().0.to_owned()
}

#[test]
fn every_promise_holds_and_the_page_shows_it() {
    let page = std::fs::read_to_string(page()).unwrap();
    for name in CASES {
        let output = run(&[name]);
        let text = stdout(&output);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("\n  held ") && !text.contains("BROKEN"), "{text}");
        assert_eq!(
            without_numbers(&block(&page, name)),
            without_numbers(&text),
            "docs/failures.md differs: cargo run -p pinfold-failures -- --page docs/failures.md"
        );
    }
}

#[test]
fn the_list_has_all_cases_in_the_order_of_the_page() {
    let list = stdout(&run(&["--list"]));
    let names: Vec<_> = list.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, CASES);
    let page = std::fs::read_to_string(page()).unwrap();
    let at = |name: &str| page.find(&format!(" -- {name}\n")).unwrap();
    assert!(CASES.windows(2).all(|pair| at(pair[0]) < at(pair[1])));
}

#[test]
fn json_has_the_figures_and_the_promises() {
    let output = run(&["--json", "double-free"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&value["case"], &value["held"]), (&"double-free".into(), &true.into()));
    let lines = value["lines"].as_array().unwrap();
    let refused = lines.iter().filter(|line| line["figure"]["name"] == "  refused");
    assert!(refused.map(|line| line["figure"]["value"].as_u64().unwrap()).eq([2048, 2048, 4096]));
    assert!(lines.iter().any(|line| line["promise"]["held"] == true));
}

#[test]
fn a_page_is_updated_and_the_rest_of_it_kept() {
    let copy = tempfile::NamedTempFile::new().unwrap();
    let text = std::fs::read_to_string(page()).unwrap();
    std::fs::write(copy.path(), text.replace("blocks freed twice", "something else")).unwrap();
    let output = run(&["--page", copy.path().to_str().unwrap(), "double-free"]);
    assert!(output.status.success(), "{}", stdout(&output));
    let updated = std::fs::read_to_string(copy.path()).unwrap();
    assert_eq!(without_numbers(&updated), without_numbers(&text));
}

#[test]
fn without_locked_memory_a_note_has_the_limit_and_transfers_are_right() {
    // As root without the capability that lifts the limit; else the user has none.
    let root = ["--bounding-set=-ipc_lock", "prlimit"];
    let (program, first) = match rustix::process::geteuid().is_root() {
        true => ("setpriv", &root[..]),
        false => ("prlimit", &[][..]),
    };
    let mut command = Command::new(program);
    command.args(first).args(["--memlock=65536:65536", env!("CARGO_BIN_EXE_pinfold-failures")]);
    let output = command.arg("ring-border").output().unwrap();
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("RLIMIT_MEMLOCK, which is 65536 bytes"), "{text}");
    let registered = text.lines().find(|line| line.starts_with("  bytes registered")).unwrap();
    assert!(registered.ends_with(" 0"), "{text}");
}

#[test]
fn an_unknown_case_is_refused_with_the_next_step() {
    let output = run(&["no-such-case"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("`--list`"));
}
