//! Signals: a run whose file system does not respond ends, and ignored signals stay ignored.

use crate::common::{Ended, Folder, Running, bytes, finish, skipped, start, wait_until, words};
use crate::serve::Server;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// A FUSE file system that never responds: each access sleeps until SIGKILL. Unmounted when this is
/// dropped.
struct Hung {
    server: Child,
    mount: String,
}

impl Hung {
    fn mount(folder: &Folder) -> Option<Self> {
        let mount = folder.arg("hung");
        std::fs::create_dir(&mount).unwrap();
        let script = "exec 3<>/dev/fuse && \
            mount -i -t fuse -o fd=3,rootmode=40000,user_id=0,group_id=0 hung \"$0\" && echo up && exec sleep 1000";
        let mut server = Command::new("sh");
        server
            .args(["-c", script, &mount])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut server = server.spawn().unwrap();
        let mut up = [0; 3];
        let hung = server.stdout.take().unwrap().read_exact(&mut up);
        let hung = hung.map(|()| Self { server, mount });
        hung.map_err(|_| skipped("only root can mount a file system that hangs")).ok()
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
        Command::new("umount").arg("-l").arg(&self.mount).status().unwrap();
    }
}

/// Waits until the program, and not the one that starts it, has blocked a signal, which its own
/// thread then waits for.
fn wait_until_blocked(child: &Child, signal: Signal) {
    let exe = format!("/proc/{}/exe", child.id());
    wait_until("the signal is blocked", || {
        std::fs::read_link(&exe).is_ok_and(|exe| exe.ends_with("pinfold"))
            && has(child, "SigBlk:", signal)
    });
}

/// Returns whether `signal` is in a set of the process's status.
fn has(child: &Child, set: &str, signal: Signal) -> bool {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix(set));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    set >> (signal.as_raw() - 1) & 1 == 1
}

/// Sends the first signal, waits until the program has taken it, and then sends `again` after each
/// `gap` until it ends: how soon it looks at its clock on a busy machine is not known, and what comes
/// before the gap is over counts as the first one.
fn signal_twice(child: &mut Child, first: Signal, again: Signal, gap: Duration) {
    signal(child, first);
    wait_until("the signal is taken", || !has(child, "ShdPnd:", first));
    wait_until("it ends", || {
        std::thread::sleep(gap);
        signal(child, again);
        child.try_wait().unwrap().is_some()
    });
}

/// Starts `line` and waits until it hangs: a thread of it sleeps uninterruptibly, and has not been
/// woken for half a second.
fn start_hanging(line: &str) -> Running {
    let child = start(&words(line));
    wait_until_blocked(&child, Signal::TERM);
    let tasks = format!("/proc/{}/task", child.id());
    let sleeping = || {
        let tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
        let mut all =
            tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        let status = all.find(|status| status.lines().any(|line| line.starts_with("State:\tD")))?;
        let is_same =
            |line: &&str| line.starts_with("Pid:") || line.contains("voluntary_ctxt_switches:");
        Some(status.lines().filter(is_same).map(str::to_owned).collect::<Vec<_>>())
    };
    let (mut last, mut since) = (None, Instant::now());
    wait_until("the run hangs", || {
        let now = sleeping();
        if now.is_none() || now != last {
            (last, since) = (now, Instant::now());
        }
        last.is_some() && since.elapsed() >= Duration::from_millis(500)
    });
    child
}

#[test]
fn the_second_signal_ends_a_hanging_run_at_once() {
    let folder = Folder::new();
    let Some(hung) = Hung::mount(&folder) else { return };
    let source = folder.file("in", b"x");
    for line in [
        format!("io {}/data --size 1M", hung.mount),
        format!("copy {}/data {}", hung.mount, folder.arg("out")),
        format!("copy {source} {}/out", hung.mount),
        format!("copy {source} {} --via file:{}/via", folder.arg("out"), hung.mount),
    ] {
        let mut child = start_hanging(&line);
        signal_twice(&mut child, Signal::TERM, Signal::INT, Duration::from_millis(1200));
        finish(child)
            .failed(130, &["interrupted again", ".pinfold-*.part", "its socket", "pinfold-*)"]);
    }
    assert_eq!(folder.names(), ["hung", "in"]);
}

/// As timeout(1) does: one to the program, one to its group.
#[test]
fn two_signals_at_once_are_one() {
    let folder = Folder::new();
    for gap in [0, 5, 100, 0, 0] {
        wait_until("two signals within 700 ms", || {
            let server = Server::start(&folder, "soft:1M", "");
            let first = Instant::now();
            kill_process(server.id(), Signal::TERM).unwrap();
            std::thread::sleep(Duration::from_millis(gap));
            kill_process(server.id(), Signal::TERM).unwrap();
            // A second later they are two, where this thread gets no processor meanwhile.
            let are_two = first.elapsed() > Duration::from_millis(700);
            let ended = server.wait();
            if !are_two {
                let report = ended.json();
                assert_eq!(report["command"], "serve", "{report}");
            }
            !are_two
        });
    }
}

#[test]
fn one_signal_ends_a_hanging_run_after_the_grace_period() {
    let folder = Folder::new();
    let Some(hung) = Hung::mount(&folder) else { return };
    let children = [Signal::INT, Signal::TERM, Signal::HUP, Signal::XCPU].map(|number| {
        let child = start_hanging(&format!("io {}/data --size 1M", hung.mount));
        signal(&child, number);
        child
    });
    // The kernel sends it each second.
    std::thread::sleep(Duration::from_millis(1500));
    signal(&children[3], Signal::XCPU);
    for child in children {
        finish(child).failed(130, &["interrupted", "not completed after 10 s"]);
    }
}

/// The end does not wait for requests to a device that is not ready, the last flush included: their
/// retries would last an hour.
#[test]
fn one_signal_ends_a_run_whose_device_is_not_ready() {
    let folder = Folder::new();
    let device = "not-ready=1h --retry-limit 1h";
    let server = Server::start(&folder, &format!("soft:16M,{device}"), "");
    server.terminate();
    assert_eq!(server.wait().json()["command"], "serve");
    let source = folder.file("in", &bytes(1 << 20));
    let file_target = format!("copy {source} soft:{},{device} --json", folder.arg("out"));
    for (line, number) in [
        (format!("io soft:16M,{device} --rw write --json"), Signal::TERM),
        (file_target.clone(), Signal::TERM),
        // `ulimit -t`.
        (file_target, Signal::XCPU),
        // Nothing but the flush is left.
        (
            format!(
                "copy {} soft:{},{device} --json",
                folder.file("empty", b""),
                folder.arg("out")
            ),
            Signal::TERM,
        ),
    ] {
        let child = start(&words(&line));
        wait_until_blocked(&child, Signal::TERM);
        // Until it waits for the device; a signal that comes before has the same end.
        std::thread::sleep(Duration::from_millis(500));
        signal(&child, number);
        let ended = finish(child);
        assert!(ended.out.contains("interrupted"), "{line}: {ended:#?}");
        ended.failed(130, &["pinfold: interrupted"]);
    }
    assert_eq!(folder.names(), ["empty", "in"]);
}

#[test]
fn ignored_signals_stay_ignored() {
    for (word, number) in [("HUP", Signal::HUP), ("INT", Signal::INT), ("TERM", Signal::TERM)] {
        let line = "io soft:1M --rw randread --rate 8M --runtime 1500ms --time-based --json";
        // The run of the tests may itself have inherited that some are ignored.
        let mut command = Command::new("env");
        command.args([
            "--default-signal=HUP,INT,TERM",
            "sh",
            "-c",
            &format!("trap '' {word}; exec \"$0\" {line}"),
            env!("CARGO_BIN_EXE_pinfold"),
        ]);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // One that is not ignored.
        wait_until_blocked(&child, if number == Signal::TERM { Signal::INT } else { Signal::TERM });
        signal(&child, number);
        assert!(finish(child).json()["seconds"].as_f64().unwrap() >= 1.5, "{word}");
    }
}

/// Runs `line`, disturbs it once it has begun, and returns what it printed when `is_enough` says
/// that it had done something by then: how long that takes is not known.
fn disturbed(line: &str, disturb: impl Fn(&Child), is_enough: impl Fn(&Ended) -> bool) -> Ended {
    for wait in [100, 500, 2500, 12_500, 62_500] {
        let child = start(&words(line));
        wait_until_blocked(&child, Signal::TERM);
        std::thread::sleep(Duration::from_millis(wait));
        disturb(&child);
        let ended = finish(child);
        if is_enough(&ended) {
            return ended;
        }
    }
    panic!("{line}: nothing was done in a minute");
}

fn requests(report: &serde_json::Value) -> u64 {
    ["read", "write"].iter().filter_map(|direction| report[direction]["requests"].as_u64()).sum()
}

#[test]
fn an_interrupted_run_reports_what_it_did() {
    let folder = Folder::new();
    let long = "--runtime=600 --time-based";
    let verified = "io soft:1M --rw=randrw --verify --runtime=600 --verify-requests 1000000000";
    let interrupt = |child: &Child| signal(child, Signal::INT);
    for line in [
        format!("io soft:1M --rw=randread {long} --numjobs=2"),
        format!("io {} --size=1M --rw=randrw --iodepth=4 {long}", folder.arg("scratch")),
        verified.to_owned(),
        format!("io {} --size=1M --rate=1 --rw=read", folder.arg("scratch")),
    ] {
        let done = |ended: &Ended| {
            serde_json::from_str(&ended.out).is_ok_and(|report| requests(&report) > 0)
        };
        let ended = disturbed(&format!("{line} --json"), interrupt, done);
        assert_eq!((ended.code, &*ended.err), (Some(130), "pinfold: interrupted\n"), "{line}");
        let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
        assert_eq!(report["ended_early"], "interrupted", "{line}");
        assert!(report["seconds"].as_f64().unwrap() > 0.0, "{line}");
    }
    let text = disturbed(verified, interrupt, |ended| ended.out.contains("IOPS=")).out;
    assert!(
        text.contains("   ended early: interrupted") && !text.contains("all correct"),
        "{text}"
    );
    assert!(folder.names().is_empty());
}

#[test]
fn a_failed_run_reports_what_it_did_and_why_it_ended() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    let set_len =
        |len| std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(len).unwrap();
    let cut = |_: &Child| set_len(4096);
    for jobs in ["", "--numjobs=2"] {
        let line =
            format!("io {file} --rw=read --size=1M --runtime=600 --time-based {jobs} --json");
        let report = |ended: &Ended| serde_json::from_str::<serde_json::Value>(&ended.out);
        let ended = disturbed(&line, cut, |ended| {
            // For the next attempt, and the next line.
            set_len(1 << 20);
            report(ended).is_ok_and(|report| requests(&report) > 0)
        });
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(ended.err.contains("cut short") && ended.err.lines().count() == 1, "{ended:#?}");
        // The requested length, not one that the file never had; and nothing is copied.
        assert!(
            !ended.err.contains("at the start") && !ended.err.contains("copy it"),
            "{ended:#?}"
        );
        assert!(ended.err.contains(", within the request of 4096 bytes at "), "{ended:#?}");
        let report = report(&ended).unwrap();
        assert!(report["ended_early"].as_str().unwrap().contains("cut short"), "{report}");
    }
}

/// A person who presses it twice does not wait a second in between.
#[test]
fn a_second_interrupt_ends_a_hanging_run_at_once() {
    let folder = Folder::new();
    let Some(hung) = Hung::mount(&folder) else { return };
    let mut child = start_hanging(&format!("io {}/data --size 1M", hung.mount));
    signal_twice(&mut child, Signal::INT, Signal::INT, Duration::from_millis(600));
    finish(child).failed(130, &["interrupted again"]);
}
