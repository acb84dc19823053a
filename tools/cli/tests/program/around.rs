//! Help, completions, the man page, `doctor` and `pools`; the keys of `--json` and the pages that
//! describe them; streams that cannot be written, and threads that cannot be started.

use crate::common::{Ended, Folder, bytes, finish, finish_with, pinfold, skipped, start, words};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

#[test]
fn help_names_every_command_the_targets_and_the_exit_codes() {
    let help = pinfold(&["--help"]).ok();
    for part in [
        "copy",
        "io",
        "doctor",
        "pools",
        "replay",
        "completions",
        "man",
        "soft:SIZE",
        "130",
        "Examples:",
    ] {
        assert!(help.contains(part), "{part}");
    }
    for command in ["copy", "io", "doctor", "pools", "replay", "completions", "man"] {
        assert!(pinfold(&[command, "--help"]).ok().contains("Examples:"), "{command}");
    }
    assert!(pinfold(&["--version"]).ok().starts_with("pinfold 0"));
}

#[test]
fn completions_and_the_man_page_have_all_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = pinfold(&["completions", shell]).ok();
        assert!(script.contains("iodepth") && script.contains("rwmixread"), "{shell}");
    }
    let page = pinfold(&["man"]).ok();
    for part in [".TH", "pinfold", "iodepth", "rwmixread", "COMMAND DOCTOR", "EXIT CODES"] {
        assert!(page.to_uppercase().contains(&part.to_uppercase()), "{part}");
    }
}

#[test]
fn each_command_has_a_man_page_of_its_own() {
    let all = pinfold(&["man"]).ok();
    let see_also = all.split(".SH \"SEE ALSO\"").nth(1).unwrap();
    let names = see_also.lines().filter_map(|line| line.strip_prefix(".BR pinfold\\-"));
    let names: Vec<_> = names.map(|rest| rest.trim_end_matches(" (1)")).collect();
    assert!(names.contains(&"copy") && names.contains(&"serve") && names.len() > 8, "{names:?}");
    for name in &names {
        let page = pinfold(&["man", name]).ok();
        for part in
            [&format!(".TH pinfold-{name} 1 "), &format!("pinfold\\-{name} \\- "), "Examples:"]
        {
            assert!(page.contains(part), "{name}: {part}");
        }
        assert!(!page.contains("COMMAND "), "{name}");
    }
    let ended = pinfold(&["man", "cpoy"]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.err.contains("name one of bind, check, completions, copy"), "{ended:#?}");
}

#[test]
fn doctor_reports_what_is_supported_and_what_is_missing() {
    // A fix has figures of the machine, which may change between the two: other tests reserve
    // hugepages.
    let has_the_same_fixes = || {
        let text = pinfold(&["doctor"]).ok();
        let report = pinfold(&["doctor", "--json"]).json();
        let findings = report["findings"].as_array().unwrap();
        for what in [
            "kernel", "2 MiB", "1 GiB", "MEMLOCK", "IOMMU", "VFIO", "iommufd", "io_uring",
            "AF_XDP", "NUMA",
        ] {
            let named =
                |finding: &serde_json::Value| finding["what"].as_str().unwrap().contains(what);
            assert!(findings.iter().any(named), "{what}");
            assert!(text.contains(what), "{what}");
        }
        for finding in findings {
            assert!(["good", "limited", "missing"].contains(&finding["state"].as_str().unwrap()));
        }
        let mut fixes = findings.iter().filter_map(|finding| finding["fix"].as_str());
        fixes.all(|fix| text.contains(&format!("fix: {fix}")))
    };
    assert!((0..20).any(|_| has_the_same_fixes()), "the text has other fixes");
}

#[test]
fn pools_prints_the_kernels_report() {
    let out = pinfold(&["pools"]).ok();
    let mut lines = out.lines();
    assert_eq!(lines.next(), Some("poolinfo - 0.1"));
    let report = pinfold(&["pools", "--json"]).json();
    let pools = report["pools"].as_array().unwrap();
    assert!(!pools.is_empty());
    for pool in pools {
        let line = lines.next().unwrap();
        let name = pool["name"].as_str().unwrap();
        assert!(line.starts_with(name), "{line}");
        assert_eq!(line[name.len()..].split_whitespace().count(), 4, "{line}");
        assert!(
            pool["peak"].as_u64().unwrap() > 0
                && pool["blocks"].as_u64() >= pool["in_use"].as_u64()
        );
    }
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1 << 20));
    let line = format!("copy {source} {} --via soft:1M --pools", folder.arg("out"));
    assert!(pinfold(&words(&line)).ok().contains("\npoolinfo - 0.1\n"));
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let mut child = start(&["doctor"]);
    drop(child.stdout.take());
    let (empty, writer) = std::io::pipe().unwrap();
    drop(writer);
    child.stdout = Some(std::process::ChildStdout::from(std::os::fd::OwnedFd::from(empty)));
    let ended = finish(child);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
}

// The keys that `--json` prints are those that the pages describe.

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
/// column of its tables. Counters are named on their own page.
#[track_caller]
pub(crate) fn assert_documented(page: &str, keys: &Keys) {
    let read = |page: &str| {
        std::fs::read_to_string(format!("{}/../../docs/{page}", env!("CARGO_MANIFEST_DIR")))
            .unwrap()
    };
    let text = read(page);
    let (_, section) = text.split_once("# The keys of `--json`\n").unwrap();
    let section = section.split("\n#").next().unwrap();
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with('|')).collect();
    // In the head of a table, the command is named.
    let bodies = rows.iter().filter(|row| !row.starts_with("| key"));
    let mut named: Keys = bodies.clone().flat_map(|row| quoted(row)).collect();
    if section.contains("](counters.md#") {
        named.extend(quoted(&read("counters.md")));
    }
    let described: Keys = bodies.flat_map(|row| quoted(row.split('|').nth(1).unwrap())).collect();
    assert_eq!(keys.difference(&named).collect::<Vec<_>>(), Vec::<&String>::new(), "not in {page}");
    assert_eq!(
        described.difference(keys).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not printed"
    );
}

/// Like [`assert_documented`], of a report.
#[track_caller]
pub(crate) fn assert_report_documented(page: &str, report: &Value) {
    assert_documented(page, &printed(&report.to_string()));
}

#[test]
fn the_keys_of_io_and_copy_are_documented() {
    let folder = Folder::new();
    let (source, copy) = (folder.file("data", &bytes(1 << 20)), folder.arg("copy"));
    let lines: String = [
        "io soft:1M --rw=randrw --fsync=64 --runtime=1100ms --time-based --iodepth=2 --json"
            .to_owned(),
        "io soft:1M --rw=trim --json".to_owned(),
        "io soft:1M --rw=randrw --verify --numjobs=2 --json".to_owned(),
        format!("copy {source} {copy} --via soft:1M --verify --json"),
    ]
    .iter()
    .map(|line| pinfold(&words(line)).ok())
    .collect();
    assert_documented("io-json.md", &printed(&lines));
}

#[test]
fn the_keys_of_replay_and_doctor_are_documented() {
    let sample =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../replay/samples/linux-6.12-nvme-ahci-e1000e.txt");
    let lines = pinfold(&["replay", sample, "--mapped", "--json", "--policy", "lazy,batch"]).ok();
    assert_documented("replay.md", &printed(&lines));
    assert_documented("troubleshooting.md", &printed(&pinfold(&["doctor", "--json"]).ok()));
}

// Standard output and standard error that cannot be written, and threads that cannot be started:
// an exit code, no panic.

fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

fn with_streams(line: &str, out: Stdio, err: Stdio) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.args(words(line)).stdin(Stdio::null()).stdout(out).stderr(err);
    finish_with(command)
}

#[test]
fn unwritable_standard_output_fails_every_command() {
    let folder = Folder::new();
    let (source, out) = (folder.file("in", b"x"), folder.arg("out"));
    for line in [
        "--help",
        "-h",
        "--version",
        "help",
        "help copy",
        "copy --help",
        "io -h",
        "bind --help",
        "completions bash",
        "man",
        "man copy",
        "doctor",
        "doctor --json",
        "pools",
        "pools --json",
        "nvme soft:1M",
        "nvme soft:1M --json",
        "io soft:1M",
        "io soft:1M --json",
        &format!("copy {source} {out}"),
        &format!("copy {source} {out} --force --json"),
    ] {
        let ended = with_streams(line, full(), Stdio::piped());
        assert_eq!(ended.code, Some(1), "{line}: {ended:#?}");
        assert!(
            ended.err.contains("standard output could not be written: No space left"),
            "{line}: {ended:#?}"
        );
    }
    // A closed pipe is not a failure.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(with_streams("--help", writer.into(), Stdio::piped()).code, Some(0));
}

/// Runs the program where a file may have no byte, and the signal that tells so would end it.
fn without_file_size(args: &[&str], out: Stdio, err: Stdio) -> Ended {
    let mut command = Command::new("prlimit");
    command.args(["--fsize=0", "env", "--default-signal=XFSZ", env!("CARGO_BIN_EXE_pinfold")]);
    command.args(args).stdin(Stdio::null()).stdout(out).stderr(err);
    finish_with(command)
}

/// The kernel would end the program by SIGXFSZ, which is no error that it could report.
#[test]
fn an_output_beyond_the_limit_of_file_sizes_is_an_error_of_every_command() {
    let folder = Folder::new();
    let file = || -> Stdio { std::fs::File::create(folder.path("out")).unwrap().into() };
    let source = folder.file("in", b"x");
    let sample =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../replay/samples/linux-6.12-nvme-ahci-e1000e.txt");
    for line in [
        "--help",
        "--version",
        "completions bash",
        "man",
        "doctor",
        "doctor --json",
        "pools",
        "nvme soft:1M",
        "io soft:1M --json",
        "serve soft:1M --nbd 127.0.0.1:0",
        &format!("copy {source} soft:1M"),
        &format!("replay {sample} --policy batch --json"),
    ] {
        let args: Vec<_> = line.split(' ').collect();
        let ended = without_file_size(&args, file(), Stdio::piped());
        assert_eq!(ended.code, Some(1), "{line}: {ended:#?}");
        assert!(
            ended.err.contains("standard output could not be written: File too large"),
            "{ended:#?}"
        );
        assert!(ended.err.contains("ulimit -f"), "{line}: {ended:#?}");
    }
    for (line, code) in [("doctor", 0), ("--unknown", 2), ("-vv io soft:1M", 0)] {
        let args: Vec<_> = line.split(' ').collect();
        let ended = without_file_size(&args, Stdio::piped(), file());
        assert_eq!(ended.code, Some(code), "{line}: {ended:#?}");
    }
}

/// Files beside the streams: the error says what to do, and what was measured is not lost.
#[test]
fn a_report_beyond_the_limit_of_file_sizes_goes_elsewhere() {
    let folder = Folder::new();
    let sample =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../replay/samples/linux-6.12-nvme-ahci-e1000e.txt");
    let svg = folder.arg("svg");
    let line = ["replay", sample, "--policy", "batch", "--svg", &svg];
    let ended = without_file_size(&line, Stdio::piped(), Stdio::piped());
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(
        ended.err.contains(".svg could not be written") && ended.err.contains("ulimit -f"),
        "{ended:#?}"
    );

    let pidfile = folder.arg("pid");
    let line = ["serve", "soft:1M", "--pidfile", &pidfile, "--run", "true"];
    let ended = without_file_size(&line, Stdio::piped(), Stdio::piped());
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(ended.err.contains("pid") && ended.err.contains("ulimit -f"), "{ended:#?}");
    let left: Vec<_> = folder.names().into_iter().filter(|name| name != "svg").collect();
    assert_eq!(left, [""; 0]);

    // The registers of its devices are files, too.
    let line = ["check", "--nvme", "soft:1M", "--", "true"];
    let ended = without_file_size(&line, Stdio::piped(), Stdio::piped());
    assert_eq!(ended.code, Some(125), "{ended:#?}");
}

/// A run under `check` may have been long.
#[test]
fn a_report_of_check_that_cannot_be_written_is_printed() {
    let ended = pinfold(&words("check --nvme soft:1M --json --report /dev/full -- true"));
    if ended.err.contains("a user namespace") {
        return skipped("check starts no program here");
    }
    assert_eq!(ended.code, Some(125), "{ended:#?}");
    assert!(ended.err.starts_with("{\"findings\":"), "{ended:#?}");
    for part in ["cannot write the report to /dev/full: No space left", ": free some space there"] {
        assert!(ended.err.contains(part), "{part}: {ended:#?}");
    }
}

#[test]
fn with_unwritable_standard_error_the_exit_code_is_right() {
    for (line, code) in [
        ("io no-such-file", 2),
        ("copy no-such-file out", 1),
        ("frobnicate", 2),
        ("", 2),
        ("-vv doctor", 0),
        ("-vv io soft:1M", 0),
        ("bind ffff:ff:1f.7", 1),
    ] {
        let ended = with_streams(line, Stdio::piped(), full());
        assert_eq!(ended.code, Some(code), "{line}: {ended:#?}");
    }
}

#[test]
fn a_thread_that_cannot_be_started_is_reported() {
    let folder = Folder::new();
    let file = folder.file("data", &[7; 65_536]);
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    // A user of its own, whose threads are counted alone; root has no limit.
    let limited_user = |threads: u32, line: &str| {
        let mut command = Command::new("setpriv");
        let user = format!("--reuid={}", 20_000 + std::process::id() % 40_000);
        command.args([&user, "--clear-groups", "prlimit", &format!("--nproc={threads}")]);
        command.arg(env!("CARGO_BIN_EXE_pinfold")).args(words(line));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish_with(command)
    };
    if !rustix::process::geteuid().is_root()
        || limited_user(100, &format!("io {file}")).code != Some(0)
    {
        skipped("only root can run the program as a user with a limit of threads of its own");
        return;
    }
    let jobs = format!("io {file} --numjobs 3");
    limited_user(1, &jobs)
        .failed(1, &["handlers for signals", "no thread", "Resource temporarily unavailable"]);
    // Jobs that do not end before the last of them is started.
    let long = format!("{jobs} --time-based --runtime 60");
    limited_user(2, &long).failed(1, &["no thread for job 1 of 3", "--numjobs", "ulimit -u"]);
    limited_user(3, &long).failed(1, &["no thread for job 2 of 3"]);
    limited_user(2, "io soft:1M").failed(1, &["cannot start the thread of the model controller"]);
    limited_user(4, &jobs).ok();
}
