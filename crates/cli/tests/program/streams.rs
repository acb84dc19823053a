//! Standard output and standard error that cannot be written, and threads that cannot be started:
//! an exit code, no panic.

use crate::common::{Ended, Folder, finish_with, skipped, words};
use std::fs::OpenOptions;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

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
    let bench = "bench page-pool --quick --runs 1";
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
        "doctor",
        "doctor --json",
        "pools",
        "pools --json",
        "nvme soft:1M",
        "nvme soft:1M --json",
        "io soft:1M",
        "io soft:1M --json",
        &format!("{bench} --json"),
        bench,
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

#[test]
fn with_unwritable_standard_error_the_exit_code_is_right() {
    for (line, code) in [
        ("io no-such-file", 2),
        ("copy no-such-file out", 1),
        ("frobnicate", 2),
        ("", 2),
        ("-vv doctor", 0),
        ("-vv io soft:1M", 0),
        ("bench page-pool --quick --runs 1", 0),
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
        command.args(["--reuid=61234", "--clear-groups", "prlimit", &format!("--nproc={threads}")]);
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
    let bench = "bench page-pool --quick --runs 1 --json";
    limited_user(1, bench).failed(1, &["cannot start a second thread for the measurement"]);
    limited_user(4, &jobs).ok();
}
