//! The program `pinfold-bench`: its records, and what it refuses.
#![expect(clippy::unwrap_used, reason = "helpers of tests, where a failure may panic")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pinfold-bench")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

/// Copies a program, or a script, that is run afterwards. By another process: a thread of this one
/// may start a child while the copy is open for writing, and until that child executes its own
/// program, which closes the descriptor, the kernel refuses to execute the copy (ETXTBSY).
fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

/// Returns the records of a short run, each checked for the documented form.
fn records(selected: &[&str]) -> Vec<serde_json::Value> {
    let ended = bench(&[selected, &["--quick", "--json", "--runs", "1"]].concat());
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let records: Vec<serde_json::Value> =
        text(&ended.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for record in &records {
        let mut members: BTreeSet<&str> =
            record.as_object().unwrap().keys().map(String::as_str).collect();
        assert!(!members.remove("modelled") || record["modelled"] == true, "{record}");
        assert!(!members.remove("note") || record["note"].is_string(), "{record}");
        let expected =
            ["suite", "case", "subject", "metric", "unit", "median", "min", "max", "runs"];
        assert_eq!(members, BTreeSet::from(expected), "{record}");
        let metrics = ["time", "rate", "bytes", "count", "segments"];
        assert!(metrics.contains(&record["metric"].as_str().unwrap()), "{record}");
        assert!(record["median"].is_f64() || record["runs"] == 0, "{record}");
    }
    records
}

fn cases<'r>(records: &'r [serde_json::Value], suite: &str) -> BTreeSet<&'r str> {
    let of = records.iter().filter(|record| record["suite"] == suite);
    of.map(|record| record["case"].as_str().unwrap()).collect()
}

/// The tests of the suites run each of them whole.
#[test]
fn short_runs_print_records_and_what_is_modelled() {
    let records = records(&["frame", "buffer/gather-8m", "iommu/rr-1"]);
    for suite in ["frame", "buffer", "iommu"] {
        assert!(!cases(&records, suite).is_empty(), "{suite}");
    }
    let modelled = records.iter().filter(|record| record["modelled"] == true);
    assert_eq!(modelled.filter(|record| record["suite"] != "iommu").count(), 0);
    assert!(records.iter().any(|record| record["modelled"] == true));
}

#[test]
fn a_case_is_measured_alone_and_a_repeated_one_once() {
    let records = records(&["page-pool/rx-512", "page-pool/rx-512", "frame/runs-2m"]);
    assert_eq!(cases(&records, "page-pool"), BTreeSet::from(["rx-512"]));
    assert_eq!(cases(&records, "frame"), BTreeSet::from(["runs-2m"]));
    let subjects: Vec<_> = records.iter().map(|r| r["subject"].as_str().unwrap()).collect();
    assert_eq!(subjects, ["pinfold", "single", "pinfold", "single", "array"]);
}

#[test]
fn a_table_names_the_processor_and_has_no_verdict() {
    let ended = bench(&["frame/runs-2m", "--quick", "--runs", "1"]);
    let out = text(&ended.stdout);
    assert!(out.lines().next().unwrap().contains(" processors, Linux "), "{out}");
    assert!(out.contains("frame: ") && out.contains("runs-2m"), "{out}");
    assert!(!out.to_lowercase().contains("target") && !out.contains("FALLS"), "{out}");
}

#[test]
fn servers_are_measured_or_the_packages_are_named() {
    let bare = Command::new(env!("CARGO_BIN_EXE_pinfold-bench"))
        .args(["serve", "--json"])
        .env("PATH", "")
        .output()
        .unwrap();
    let why = text(&bare.stderr);
    assert_eq!(bare.status.code(), Some(1), "{why}");
    assert!(why.contains("sudo apt-get install fio libnbd-bin nbdkit qemu-utils"), "{why}");
}

/// A stand-in for `pinfold`, with the figure that a model of it has.
#[test]
fn the_program_is_measured_under_each_protection() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let stand_in = folder.path().join("pinfold");
    let script = "#!/bin/sh\n[ \"$1\" = io ] && { echo a note; echo '{\"read\":{\"iops\":7}}'; exit; }\ncp \"$2\" \"$3\"\n";
    let become_script = |script: &str| {
        let text = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(text.path(), script).unwrap();
        std::fs::set_permissions(text.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        copy_program(text.path(), &stand_in);
    };
    become_script(script);
    let program = folder.path().join("pinfold-bench");
    copy_program(Path::new(env!("CARGO_BIN_EXE_pinfold-bench")), &program);
    let ended = Command::new(&program).args(["protect", "--quick", "--json"]).output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let records: Vec<serde_json::Value> =
        text(&ended.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Three at each of five depths, four at the largest, two with four jobs, four copies.
    assert_eq!(records.len(), 25, "{records:#?}");
    for record in &records {
        let is_copy = record["case"] == "copy";
        assert_eq!((record["modelled"] == true, is_copy || record["median"] == 7.0), (true, true));
    }
    // A copy that differs is no figure.
    become_script("#!/bin/sh\necho other >\"$3\"\n");
    let ended = Command::new(&program).args(["protect/copy", "--quick"]).output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    assert!(text(&ended.stderr).contains("the copy differs"), "{}", text(&ended.stderr));
    let mut left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["pinfold", "pinfold-bench"]);
}

#[test]
fn impossible_requests_are_refused() {
    for (args, word) in
        [(&["pools"][..], "pool, frame"), (&["pool/pair"], "pair-64"), (&["--runs", "0"], "--runs")]
    {
        let ended = bench(args);
        assert_eq!(ended.status.code(), Some(2), "{args:?}");
        assert!(text(&ended.stderr).contains(word), "{}", text(&ended.stderr));
    }
}

#[test]
fn help_has_examples_and_the_listing_all_suites() {
    let help = bench(&["--help"]);
    let help = text(&help.stdout);
    assert!(help.contains("Examples:") && help.contains("\"median\":2.1"), "{help}");
    let list = bench(&["--list"]);
    let list = text(&list.stdout);
    for word in ["pool:", "iommu:", "serve:", "protect:", "io:", "testpmd:", "vfio:", "replace-10m"]
    {
        assert!(list.contains(word), "{word}: {list}");
    }
}

#[test]
fn unwritable_output_is_a_failure_and_a_closed_pipe_is_not() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut list = Command::new(env!("CARGO_BIN_EXE_pinfold-bench"));
    assert_eq!(list.arg("--list").stdout(full).status().unwrap().code(), Some(1));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut list = Command::new(env!("CARGO_BIN_EXE_pinfold-bench"));
    assert_eq!(list.arg("--list").stdout(writer).status().unwrap().code(), Some(0));
    // A file that may have no byte: the signal that tells so ends nothing.
    let file = tempfile::tempfile().unwrap();
    let mut list = Command::new("prlimit");
    list.args(["--fsize=0", "env", "--default-signal=XFSZ"]);
    list.args([env!("CARGO_BIN_EXE_pinfold-bench"), "--list"]).stdout(file);
    let ended = list.stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(text(&ended.stderr).contains("standard output could not be written: File too large"));
}
