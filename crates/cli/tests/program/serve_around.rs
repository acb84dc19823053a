//! `pinfold serve` as scripts and systemd start it: `--run`, `--pidfile`, the short options, and
//! sockets that are passed.

use crate::common::{Ended, Folder, finish_with, pinfold, skipped};
use crate::serve::{Server, client};
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Command, Stdio};

/// Runs the program with arguments that contain blanks.
fn serve(args: &[&str]) -> Ended {
    pinfold(&[&["serve", "soft:1M"], args].concat())
}

#[test]
fn run_serves_while_its_command_runs_and_ends_with_its_code() {
    let folder = Folder::new();
    let command = format!(
        "echo $uri $nbd; test -S \"$unixsocket\" && printf x >{}; exit 7",
        folder.arg("seen")
    );
    let ended = serve(&["--run", &command]);
    assert_eq!(ended.code, Some(7), "{ended:?}");
    // Standard output is the command's alone; the report is on standard error.
    let (uri, nbd) = ended.out.trim().split_once(' ').unwrap();
    let socket = nbd.strip_prefix("nbd:unix:").unwrap();
    assert_eq!(uri, format!("nbd+unix:///?socket={socket}"));
    assert!(
        ended.err.contains("served soft:1M") && ended.err.contains("exit status: 7"),
        "{ended:?}"
    );
    assert!(!std::path::Path::new(socket).parent().unwrap().exists(), "removed with its folder");
    assert_eq!(folder.names(), ["seen"]);
    // With the address that the user names, by TCP too.
    let socket = folder.arg("socket");
    assert_eq!(serve(&["-r", "-U", &socket, "--run", "echo $unixsocket"]).ok().trim(), socket);
    let port: u16 =
        serve(&["--nbd", "127.0.0.1:0", "--run", "echo $port"]).ok().trim().parse().unwrap();
    assert_ne!(port, 0);
    assert_eq!(serve(&["--run", "kill -9 $$"]).code, Some(137));
    if let Some(size) = client("nbdinfo", &["--version"]) {
        size.ok();
        assert_eq!(serve(&["--run", "nbdinfo --size $uri"]).ok().trim(), "1048576");
    }
}

#[test]
fn a_signal_ends_the_command_of_run_too() {
    let folder = Folder::new();
    let started = folder.arg("started");
    let line = format!("echo >{started}; exec sleep 1000");
    let child = crate::common::start(&["serve", "soft:1M", "--run", &line]);
    while !folder.path("started").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = crate::common::finish(child);
    assert_eq!(ended.code, Some(143), "{ended:?}");
    assert!(ended.err.contains("served soft:1M"), "{ended:?}");
}

#[test]
fn a_note_is_printed_at_the_start_also_with_run() {
    let folder = Folder::new();
    let file = folder.file("data", &crate::common::bytes(8192));
    let ended = pinfold(&["serve", &file, "--offset", "100", "--run", "true"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let (start, end) = ended.err.split_once("served ").unwrap();
    for part in [start, end] {
        assert!(part.contains("give --offset and --length as multiples of "), "{ended:?}");
    }
}

#[test]
fn help_lists_the_exit_codes_of_serve() {
    let help = pinfold(&["serve", "--help"]).ok();
    assert!(
        help.contains("130  ended by a second signal") && !help.contains("130  stopped by"),
        "{help}"
    );
}

#[test]
fn the_pid_file_is_there_while_clients_can_connect() {
    let folder = Folder::new();
    // Of a server that was killed.
    let pidfile = folder.file("pid", b"4194304\n");
    let server = Server::start(&folder, "soft:1M", &format!("--pidfile {pidfile}"));
    assert_eq!(std::fs::read_to_string(&pidfile).unwrap(), format!("{}\n", server.id()));
    server.stop();
    assert_eq!(folder.names(), Vec::<String>::new());
    let missing = format!("{}/no/pid", folder.arg("x"));
    let ended = serve(&["-U", &folder.arg("socket"), "-P", &missing]);
    ended.failed(1, &["--pidfile", "folder"]);
    assert_eq!(folder.names(), Vec::<String>::new(), "no socket is left");
}

#[test]
fn a_pid_file_replaces_no_file_with_other_contents() {
    let folder = Folder::new();
    let socket = folder.arg("socket");
    let image = folder.file("image", b"12\n");
    folder.file("notes", b"12 of them\n");
    folder.file("long", &[b'1'; 40]);
    folder.file("bytes", &[0xff; 8]);
    std::os::unix::fs::symlink("notes", folder.path("link")).unwrap();
    std::os::unix::fs::symlink("nothing", folder.path("dangling")).unwrap();
    std::fs::hard_link(&image, folder.path("other name")).unwrap();
    for (name, part) in [
        ("image", "it is the target"),
        ("other name", "it is the target"),
        ("notes", "something other than the number"),
        ("long", "something other than the number"),
        ("bytes", "something other than the number"),
        ("link", "symbolic link"),
        ("dangling", "symbolic link"),
        ("socket", "not a regular file"),
    ] {
        let path = folder.arg(name);
        // Without the check the server would serve, until its command ends.
        let ended =
            pinfold(&["serve", &image, "--cached", "-U", &socket, "-P", &path, "--run", "true"]);
        ended.failed(1, &["--pidfile", &path, part]);
    }
    for (name, contents) in
        [("image", &b"12\n"[..]), ("notes", b"12 of them\n"), ("bytes", &[0xff; 8])]
    {
        assert_eq!(std::fs::read(folder.path(name)).unwrap(), contents, "{name}");
    }
    assert_eq!(
        folder.names(),
        ["bytes", "dangling", "image", "link", "long", "notes", "other name"]
    );
}

#[test]
fn a_pid_file_that_is_no_longer_the_servers_is_left() {
    let folder = Folder::new();
    let pidfile = folder.arg("pid");
    for (line, contents) in [
        (format!("echo 7 >{pidfile}"), "7\n"),
        // The same number, in another file.
        (format!("cp {pidfile} {pidfile}2; mv {pidfile}2 {pidfile}; echo >>{pidfile}"), ""),
    ] {
        serve(&["-P", &pidfile, "--run", &line]).ok();
        let left = std::fs::read_to_string(&pidfile).unwrap();
        assert!(
            if contents.is_empty() { left.ends_with("\n\n") } else { left == contents },
            "{left:?}"
        );
    }
}

#[test]
fn an_address_is_needed_and_its_path_fits_into_a_socket() {
    serve(&[]).failed(2, &["--nbd", "-U", "--run"]);
    let long = format!("/tmp/{}", "x".repeat(200));
    serve(&["-U", &long]).failed(2, &["205 bytes", "98 more than the 107"]);
    serve(&["--nbd", &format!("unix:{long}")]).failed(2, &["98 more"]);
}

#[test]
fn a_server_of_few_requests_reports_no_time_for_each() {
    let ended = serve(&["--run", "true"]);
    assert!(ended.err.contains("requests      0, 0 failed"), "{ended:?}");
    assert!(!ended.err.contains("a request"), "{ended:?}");
    let ended = serve(&["--json", "--run", "true"]);
    let report: serde_json::Value = serde_json::from_str(ended.err.trim()).unwrap();
    assert!(report["cpu"].get("ns_per_request").is_none(), "{report}");
}

/// Passes a socket as systemd does, and becomes the program: kind, then its arguments.
const ACTIVATE: &str = r#"
import os, socket, sys
kind, path, program = sys.argv[1:4]
if kind == "unix":
    s = socket.socket(socket.AF_UNIX)
    s.bind(path)
elif kind == "udp":
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
else:
    s = socket.socket(socket.AF_INET)
    s.bind(("127.0.0.1", 0))
if kind not in ("udp", "deaf"):
    s.listen()
if s.fileno() == 3:
    os.set_inheritable(3, True)
else:
    os.dup2(s.fileno(), 3)
os.environ["LISTEN_FDS"] = kind[4:] if kind.startswith("fds=") else "1"
if kind != "meant for none":
    os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(program, [program, *sys.argv[4:]])
"#;

fn activated(folder: &Folder, kind: &str, options: &[&str]) -> Option<Ended> {
    let mut command = Command::new("/usr/bin/python3");
    let socket = folder.arg(kind);
    let program = env!("CARGO_BIN_EXE_pinfold");
    command.args(["-c", ACTIVATE, kind, &socket, program, "serve", "soft:1M"]).args(options);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if Command::new("/usr/bin/python3").arg("--version").output().is_err() {
        skipped("no /usr/bin/python3, which passes the socket");
        return None;
    }
    Some(finish_with(command))
}

#[test]
fn a_socket_that_systemd_passes_is_served() {
    let folder = Folder::new();
    for kind in ["unix", "tcp"] {
        let script = "echo $uri; test -z \"$LISTEN_FDS\" && nbdinfo --size $uri";
        let Some(ended) = activated(&folder, kind, &["--run", script]) else { return };
        if client("nbdinfo", &["--version"]).is_some() {
            let out = ended.ok();
            let (uri, size) = out.trim().split_once('\n').unwrap();
            assert_eq!(size, "1048576");
            assert!(kind == "tcp" || uri.ends_with(&folder.arg("unix")), "{uri}");
        }
    }
    assert_eq!(folder.names(), ["unix"], "its file is systemd's");
    for (kind, options, code, part) in [
        ("tcp", &["--nbd", "127.0.0.1:0"][..], 2, "leave the option out"),
        ("tcp", &["-U", "-"], 2, "-U"),
        ("udp", &[], 1, "fd 3"),
        ("deaf", &[], 1, "does not listen"),
        ("fds=2", &[], 1, "2 descriptors"),
        // More than there can be, for which no memory is taken.
        ("fds=999999999999", &[], 1, "999999999999 descriptors"),
        ("fds=-1", &[], 1, "LISTEN_FDS=\"-1\""),
        ("fds=0", &[], 2, "where clients connect is missing"),
        ("meant for none", &[], 2, "where clients connect is missing"),
    ] {
        activated(&folder, kind, options).unwrap().failed(code, &[part]);
    }
}
