//! Signals: a run whose file system does not respond ends, and ignored signals stay ignored.

use crate::common::{Folder, finish, skipped, start, words};
use crate::serve::Server;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// A FUSE file system that never responds: each access sleeps until SIGKILL. Unmounted when this is dropped.
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
        server.args(["-c", script, &mount]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
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

/// Waits until the program, and not the one that starts it, has blocked a signal, which its own thread then waits for.
fn wait_until_blocked(child: &Child, signal: Signal) {
    let proc = format!("/proc/{}", child.id());
    let blocked = || {
        let status = std::fs::read_to_string(format!("{proc}/status")).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        mask >> (signal.as_raw() - 1) & 1 == 1
    };
    let end = Instant::now() + Duration::from_secs(60);
    while !(std::fs::read_link(format!("{proc}/exe")).is_ok_and(|exe| exe.ends_with("pinfold")) && blocked())
    {
        assert!(Instant::now() < end, "{signal:?} is not blocked");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts `line` and waits until it hangs.
fn start_hanging(line: &str) -> Child {
    let child = start(&words(line));
    wait_until_blocked(&child, Signal::TERM);
    std::thread::sleep(Duration::from_millis(500));
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
        let child = start_hanging(&line);
        signal(&child, Signal::TERM);
        std::thread::sleep(Duration::from_millis(1200));
        signal(&child, Signal::INT);
        finish(child).failed(130, &["interrupted again"]);
    }
    assert_eq!(folder.names(), ["hung", "in"]);
}

/// As timeout(1) does: one to the program, one to its group.
#[test]
fn two_signals_at_once_are_one() {
    let folder = Folder::new();
    for gap in [0, 5, 100] {
        let server = Server::start(&folder, "soft:1M", "");
        for _ in 0..2 {
            kill_process(server.id(), Signal::TERM).unwrap();
            std::thread::sleep(Duration::from_millis(gap));
        }
        let report = server.wait().json();
        assert_eq!(report["command"], "serve", "{report}");
    }
}

#[test]
fn one_signal_ends_a_hanging_run_after_the_grace_period() {
    let folder = Folder::new();
    let Some(hung) = Hung::mount(&folder) else { return };
    let children: Vec<_> = [Signal::INT, Signal::TERM, Signal::HUP]
        .map(|number| {
            let child = start_hanging(&format!("io {}/data --size 1M", hung.mount));
            signal(&child, number);
            child
        })
        .into();
    for child in children {
        finish(child).failed(130, &["interrupted", "not completed after 10 s"]);
    }
}

#[test]
fn ignored_signals_stay_ignored() {
    for (word, number) in [("HUP", Signal::HUP), ("INT", Signal::INT), ("TERM", Signal::TERM)] {
        let line = "io soft:1M --rw randread --runtime 1500ms --time-based --json";
        // The run of the tests may itself have inherited that some are ignored.
        let mut command = Command::new("env");
        command.args([
            "--default-signal=HUP,INT,TERM",
            "sh",
            "-c",
            &format!("trap '' {word}; exec \"$0\" {line}"),
            env!("CARGO_BIN_EXE_pinfold"),
        ]);
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // One that is not ignored.
        wait_until_blocked(&child, if number == Signal::TERM { Signal::INT } else { Signal::TERM });
        signal(&child, number);
        assert!(finish(child).json()["seconds"].as_f64().unwrap() >= 1.5, "{word}");
    }
}
