//! Published failures of DMA in user space, and what happens here: each case does what led to the
//! failure, on the software IOMMU and with memory of this machine, and counts what happened.
//! `docs/failures.md` is the page about them; it shows what the cases print, numbers aside.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, where a failure may panic"
)]

mod cases;
mod pages;
mod report;

use cases::{CASES, Case};
use report::Report;
use std::path::Path;
use std::process::Command;

fn page() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/failures.md");
    std::fs::read_to_string(page).unwrap()
}

/// Returns the command that prints a case, as the page has it.
fn command(name: &str) -> String {
    format!("cargo test -p pinfold-nvme --test failures {name} -- --nocapture\n")
}

/// Runs a case: its promises hold, and the page shows what it prints.
#[track_caller]
fn check(name: &str) {
    let case: &Case = CASES.iter().find(|case| case.name == name).unwrap();
    let report: Report = case.report();
    let text = report.to_string();
    print!("{text}");
    assert!(report.held(), "{text}");
    let page = page();
    let Some((_, after)) = page.split_once(&command(name)) else {
        panic!("docs/failures.md has no command for {name}");
    };
    let (_, block) = after.split_once("```text\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    assert_eq!(
        without_numbers(block),
        without_numbers(&text),
        "docs/failures.md differs from what {name} prints:\n{text}"
    );
}

#[test]
fn stale_mapping() {
    check("stale_mapping");
}

#[test]
fn entry_limit() {
    check("entry_limit");
}

#[test]
fn list_memory() {
    check("list_memory");
}

#[test]
fn ring_border() {
    check("ring_border");
}

#[test]
fn early_memory() {
    check("early_memory");
}

#[test]
fn failed_map() {
    check("failed_map");
}

#[test]
fn double_free() {
    check("double_free");
}

#[test]
fn the_page_has_all_cases_in_their_order() {
    let page = page();
    let at = |case: &Case| page.find(&command(case.name)).unwrap();
    assert!(CASES.windows(2).all(|pair| at(&pair[0]) < at(&pair[1])));
    assert_eq!(page.matches("-- --nocapture\n").count(), CASES.len());
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
    command.args(first).arg("--memlock=65536:65536").arg(std::env::current_exe().unwrap());
    let output = command.args(["--exact", "ring_border", "--nocapture"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("RLIMIT_MEMLOCK, which is 65536 bytes"), "{text}");
    let registered = text.lines().find(|line| line.starts_with("  bytes registered")).unwrap();
    assert!(registered.ends_with(" 0"), "{text}");
    assert!(output.status.success(), "{text}");
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
