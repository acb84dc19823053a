//! The keys that `--json` prints are those that the pages describe.

use crate::common::{Folder, bytes, pinfold, words};
use serde_json::Value;
use std::collections::BTreeSet;

type Keys = BTreeSet<String>;

/// Adds the names of all keys, except those that are names of something else.
fn collect(value: &Value, keys: &mut Keys) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                keys.insert(key.clone());
                if !["protocols", "holders"].contains(&key.as_str()) {
                    collect(value, keys);
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| collect(value, keys)),
        _ => {}
    }
}

/// Returns the keys of all lines.
fn printed(lines: &str) -> Keys {
    let mut keys = Keys::new();
    lines.lines().for_each(|line| collect(&serde_json::from_str(line).unwrap(), &mut keys));
    keys
}

/// Returns what is between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned)
}

/// Asserts that the section of `page` names all of `keys`, and describes no others in the first
/// column of its tables.
#[track_caller]
pub(crate) fn assert_documented(page: &str, keys: &Keys) {
    let text = std::fs::read_to_string(format!("{}/../../docs/{page}", env!("CARGO_MANIFEST_DIR")))
        .unwrap();
    let (_, section) = text.split_once("# The keys of `--json`\n").unwrap();
    let section = section.split("\n#").next().unwrap();
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with('|')).collect();
    // Of a head, the command is named.
    let bodies = rows.iter().filter(|row| !row.starts_with("| key"));
    let named: Keys = bodies.clone().flat_map(|row| quoted(row)).collect();
    let described: Keys = bodies.flat_map(|row| quoted(row.split('|').nth(1).unwrap())).collect();
    assert_eq!(keys.difference(&named).collect::<Vec<_>>(), Vec::<&String>::new(), "not in {page}");
    assert_eq!(
        described.difference(keys).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not printed"
    );
}

/// As [`assert_documented`], of a report.
#[track_caller]
pub(crate) fn assert_report_documented(page: &str, report: &Value) {
    assert_documented(page, &printed(&report.to_string()));
}

#[test]
fn the_keys_of_io_and_copy_are_documented() {
    let folder = Folder::new();
    let (source, copy) = (folder.file("data", &bytes(1 << 20)), folder.arg("copy"));
    let lines: String = [
        "io soft:1M --rw=randrw --runtime=1100ms --time_based --iodepth=2 --json".to_owned(),
        "io soft:1M --rw=trim --json".to_owned(),
        "io soft:1M --rw=randrw --verify --numjobs=2 --json".to_owned(),
        format!("copy {source} {copy} --via soft:1M --verify --json"),
    ]
    .iter()
    .map(|line| pinfold(&words(line)).ok())
    .collect();
    assert_documented("io.md", &printed(&lines));
}

#[test]
fn the_keys_of_replay_and_doctor_are_documented() {
    let sample =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/samples/linux-6.12-nvme-ahci-e1000e.txt");
    let lines =
        pinfold(&["replay", sample, "--mapped", "--json", "--policy", "magazines,pinfold-batch"])
            .ok();
    assert_documented("replay.md", &printed(&lines));
    assert_documented("troubleshooting.md", &printed(&pinfold(&["doctor", "--json"]).ok()));
}
