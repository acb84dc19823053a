//! `pinfold serve` and `copy` where system calls fail, or the process is stopped.

use crate::client::Client;
use crate::common::{Ended, Folder, assert_same, bytes, finish_with, skipped};
use crate::serve::Server;
use rustix::net::{RecvFlags, recv};
use rustix::process::{Signal, kill_process};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Executes the expressions that follow the address with libnbd's client, and prints the error of
/// each.
const CLIENT: &str = r#"
import errno, sys
try:
    import nbd
except ImportError:
    sys.exit(77)
h = nbd.NBD()
h.set_request_structured_replies(True)
h.connect_uri(sys.argv[1])
FUA, NO_HOLE = nbd.CMD_FLAG_FUA, nbd.CMD_FLAG_NO_HOLE
for expression in sys.argv[2:]:
    try:
        eval(expression)
        print("ok")
    except nbd.Error as error:
        print(errno.errorcode[error.errnum])
"#;

/// Returns the outcomes of `expressions`, in one word each; `None` if there is no such client.
fn outcomes(server: &Server, expressions: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", CLIENT, &server.uri]).args(expressions);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(child) = command.spawn() else {
        skipped("no /usr/bin/python3");
        return None;
    };
    let ended = crate::common::finish(child);
    if ended.code == Some(77) {
        skipped("no nbd module of python3: apt-get install python3-libnbd");
        return None;
    }
    Some(ended.ok().split_whitespace().map(str::to_owned).collect())
}

/// Returns a command that runs the program with errors injected into its system calls; `None` where
/// that cannot be done.
pub(crate) fn injected(inject: &str) -> Option<Command> {
    // The tracer is a grandchild (`-D`): the child that is waited for is the program.
    let trace = |inject: &str| {
        let mut command = Command::new("strace");
        command.args(["-D", "-f", "-qq", "-o", "/dev/null", "-e", inject]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    if !trace("inject=sync:error=EIO").arg("true").status().is_ok_and(|status| status.success()) {
        skipped("no strace, or no permission to use it");
        return None;
    }
    let mut command = trace(inject);
    command.args(["env", "--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_pinfold")]);
    Some(command)
}

fn serve_injected(folder: &Folder, target: &str, inject: &str) -> Option<Server> {
    let mut command = injected(inject)?;
    let socket = folder.arg("socket");
    command.args(["serve", target, "--json", "-U", &socket]);
    Some(Server::started(command.spawn().unwrap(), socket))
}

#[test]
fn no_space_and_no_permission_reach_the_client_as_such() {
    let folder = Folder::new();
    let file = folder.sparse("disk", 64 << 20);
    let all = [
        "h.pwrite(b'x' * 4096, 0, FUA)",
        "h.flush()",
        "h.trim(1 << 20, 0)",
        "h.zero(1 << 20, 0)",
        "h.zero(4096, 0, NO_HOLE)",
    ];
    for (inject, expected) in [
        ("inject=fdatasync:error=ENOSPC", ["ENOSPC", "ENOSPC", "ok", "ok", "ok"]),
        ("inject=fdatasync:error=EDQUOT", ["ENOSPC", "ENOSPC", "ok", "ok", "ok"]),
        ("inject=fdatasync:error=EROFS", ["EPERM", "EPERM", "ok", "ok", "ok"]),
        ("inject=fdatasync:error=EIO", ["EIO", "EIO", "ok", "ok", "ok"]),
        ("inject=fallocate:error=ENOSPC", ["ok", "ok", "ENOSPC", "ENOSPC", "ok"]),
        ("inject=fallocate:error=EPERM", ["ok", "ok", "EPERM", "EPERM", "ok"]),
        ("inject=fallocate:error=EOPNOTSUPP", ["ok", "ok", "ok", "ok", "ok"]),
    ] {
        let Some(server) = serve_injected(&folder, &file, inject) else { return };
        let Some(seen) = outcomes(&server, &all) else { return };
        assert_eq!(seen, expected, "{inject}");
        server.terminate();
        let ended = server.wait();
        // The last flush is one of those that fail.
        assert_eq!(ended.code, Some(i32::from(inject.contains("fdatasync"))), "{ended:#?}");
        assert!(!ended.err.contains("--rw trim"), "a guess: {ended:#?}");
    }
    // A model controller has a status of its own for that.
    let image = format!("soft:{}", folder.sparse("image", 1 << 20));
    let Some(server) = serve_injected(&folder, &image, "inject=fdatasync:error=ENOSPC") else {
        return;
    };
    assert_eq!(outcomes(&server, &["h.flush()"]).unwrap_or_default(), ["ENOSPC"]);
}

#[test]
fn a_kernel_without_memory_for_requests_delays_them() {
    let folder = Folder::new();
    let file = folder.sparse("disk", 64 << 20);
    let write = "h.pwrite(b'x' * (1 << 20), 0)";
    let all = [write, write, write, "h.pread(1 << 20, 0)", "h.flush()"];
    for (inject, warned) in [
        // With completions to take, and after them.
        ("inject=io_uring_enter:error=EBUSY:when=3", false),
        ("inject=io_uring_enter:error=EAGAIN:when=2+3", false),
        // For longer than a submission is retried.
        ("inject=io_uring_enter:error=EAGAIN:when=2..2500", true),
    ] {
        let Some(server) = serve_injected(&folder, &file, inject) else { return };
        let Some(seen) = outcomes(&server, &all) else { return };
        assert_eq!(seen, ["ok"; 5], "{inject}");
        server.terminate();
        let ended = server.wait();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        // Once, not at each attempt.
        let times = ended.err.matches("are submitted again").count();
        assert_eq!(times, usize::from(warned), "{inject}: {ended:#?}");
    }
}

#[test]
fn a_refused_write_is_logged_once_however_large() {
    let folder = Folder::new();
    let file = folder.sparse("disk", 64 << 20);
    for options in ["", "--cached"] {
        let socket = folder.arg("socket");
        // No file may grow, or be written at all.
        let line = format!("ulimit -f 0; exec \"$0\" serve {file} --json {options} -U {socket}");
        let mut command = Command::new("env");
        command.args([
            "--default-signal=HUP,INT,TERM",
            "sh",
            "-c",
            &line,
            env!("CARGO_BIN_EXE_pinfold"),
        ]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let server = Server::started(command.spawn().unwrap(), socket);
        let Some(seen) = outcomes(&server, &["h.pwrite(b'x' * (16 << 20), 0)", "h.pread(512, 0)"])
        else {
            return;
        };
        assert_eq!(seen, ["ENOSPC", "ok"], "{options}");
        server.terminate();
        let ended = server.wait();
        assert_eq!(ended.err.matches(" WARN ").count(), 1, "{ended:#?}");
        assert!(ended.err.contains("ulimit -f"), "{ended:#?}");
    }
}

/// As a debugger or a frozen cgroup does, for longer than a client may take for its handshake.
#[test]
fn a_pause_of_the_server_disconnects_no_client() {
    let folder = Folder::new();
    let server = Server::start(&folder, "soft:1M", "--threads 1");
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let stream = UnixStream::connect(&server.socket).unwrap();
            // The greeting, which the client takes later: its handshake has begun.
            recv(&stream, &mut [0; 1], RecvFlags::PEEK).unwrap();
            stream
        })
        .collect();
    kill_process(server.id(), Signal::STOP).unwrap();
    std::thread::scope(|scope| {
        for stream in clients {
            scope.spawn(|| assert_eq!(Client::greet(stream).0.read(0, 512), Ok(vec![0; 512])));
        }
        std::thread::sleep(Duration::from_secs(32));
        kill_process(server.id(), Signal::CONT).unwrap();
    });
    assert_eq!(server.stop()["clients"]["dropped"], 0);
}

#[test]
fn a_call_that_a_signal_interrupts_is_repeated() {
    let folder = Folder::new();
    let source = folder.file("source", &bytes(1 << 20));
    for call in
        ["fallocate", "ftruncate", "fchmod", "fsync", "fdatasync", "renameat,renameat2", "lseek"]
    {
        for via in ["", "--via file:"] {
            let Some(mut command) = injected(&format!("inject={call}:error=EINTR:when=1")) else {
                return;
            };
            command.args(["copy", &source, &folder.arg("copy")]);
            if !via.is_empty() {
                command.arg(format!("--via=file:{}", folder.arg("via")));
            }
            let ended: Ended = finish_with(command);
            assert_eq!(ended.code, Some(0), "{call} {via}: {ended:#?}");
            assert_same(&folder.path("source"), &folder.path("copy"));
            std::fs::remove_file(folder.path("copy")).unwrap();
            let _ = std::fs::remove_file(folder.path("via"));
        }
    }
    let Some(server) =
        serve_injected(&folder, &source, "inject=fallocate,fdatasync:error=EINTR:when=1")
    else {
        return;
    };
    let all = [
        "h.trim(4096, 0)",
        "h.zero(4096, 4096)",
        "h.flush()",
        "h.pwrite(b'x' * 512, 0, FUA)",
        "h.flush()",
    ];
    if let Some(seen) = outcomes(&server, &all) {
        assert_eq!(seen, ["ok"; 5]);
    }
    assert_eq!(server.stop()["clients"]["unflushed"], 0);
}
