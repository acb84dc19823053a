//! `pinfold serve` as scripts and systemd start it: `--run`, `--pidfile`, the short options, and
//! sockets that are passed.

use crate::common::{Ended, Folder, finish, finish_with, pinfold, skipped};
use crate::serve::{Server, client};
use crate::serve_faults::injected;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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
    // The file of a server that was killed.
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

// Where `pinfold serve` listens, and the address that it prints: other programs use it as it is.

/// Starts the program in `folder`.
fn start_in<S: AsRef<OsStr>>(folder: &Path, args: &[S]) -> Server {
    let mut command = Command::new("env");
    command
        .args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_pinfold"), "serve"])
        .args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).current_dir(folder);
    Server::started(command.spawn().unwrap(), String::new())
}

/// Makes the clients of libnbd and QEMU use an address.
fn all_clients_use(uri: &str) {
    if let Some(size) = client("nbdinfo", &["--size", uri]) {
        assert_eq!(size.ok().trim(), "1048576", "{uri}");
        client("nbdcopy", &[uri, "null:"]).unwrap().ok();
    }
    if let Some(info) = client("qemu-img", &["info", uri]) {
        assert!(info.ok().contains("virtual size: 1 MiB"), "{uri}");
    }
}

#[test]
fn the_printed_address_is_a_uri_that_clients_use_as_it_is() {
    let folder = Folder::new();
    for (name, encoded) in
        [("a b#c?d&e%41;é", "a%20b%23c%3Fd%26e%2541%3B%C3%A9"), ("+=:@", "%2B%3D%3A%40")]
    {
        let address = format!("unix:{}", folder.arg(name));
        let args = ["soft:1M", "--json", "--name=x/y z?%41é", "--nbd", &address];
        let server = start_in(&folder.path(""), &args);
        assert!(
            server.uri.starts_with("nbd+unix:///x/y%20z%3F%2541%C3%A9?socket=/"),
            "{}",
            server.uri
        );
        assert!(server.uri.ends_with(&format!("/{encoded}")), "{}", server.uri);
        all_clients_use(&server.uri);
    }
    // A path need not be UTF-8.
    let server = start_in(
        &folder.path(""),
        &[
            OsString::from("soft:1M"),
            "--json".into(),
            "--nbd".into(),
            OsString::from_vec(b"unix:a\xff".to_vec()),
        ],
    );
    assert!(server.uri.ends_with("/a%FF"), "{}", server.uri);
    if let Some(size) = client("nbdinfo", &["--size", &server.uri]) {
        size.ok();
    }
}

#[test]
fn the_address_of_a_relative_path_is_absolute() {
    let folder = Folder::new();
    let server = start_in(&folder.path(""), &["soft:1M", "--json", "-U", "socket"]);
    assert_eq!(server.uri, format!("nbd+unix:///?socket={}", folder.arg("socket")));
    all_clients_use(&server.uri);
}

#[test]
fn localhost_is_served_at_all_of_its_addresses() {
    let folder = Folder::new();
    let hosts = folder.file("hosts", b"127.0.0.1 localhost\n::1 localhost\n");
    // A namespace of its own, in which the file of the hosts is another one.
    let line = format!(
        "mount --bind {hosts} /etc/hosts && ip -6 address show dev lo | grep -q ::1 && exec \"$@\""
    );
    let run = |args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", &line, "sh"]).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn()
    };
    if !run(&["true"]).is_ok_and(|child| finish(child).code == Some(0)) {
        return skipped("no mount namespace, or no IPv6");
    }
    let program = ["env", "--default-signal=TERM", env!("CARGO_BIN_EXE_pinfold")];
    let start = |address: &str| {
        let args = [&program[..], &["serve", "soft:1M", "--json", "--nbd", address]].concat();
        run(&args).unwrap()
    };
    let server = Server::started(start("localhost:0"), String::new());
    let addresses = server.listening["addresses"].as_array().unwrap();
    assert_eq!(
        (addresses.len(), &addresses[0]),
        (2, &server.listening["listening"]),
        "{addresses:?}"
    );
    let port = server.uri.trim_end_matches('/').rsplit_once(':').unwrap().1;
    for host in ["127.0.0.1", "[::1]"] {
        let uri = format!("nbd://{host}:{port}/");
        assert!(addresses.contains(&uri.clone().into()), "{addresses:?}");
        all_clients_use(&uri);
    }
    drop(server);
    // In use at either address.
    for taken in ["127.0.0.1:0", "[::1]:0"] {
        let listener = std::net::TcpListener::bind(taken).unwrap();
        let taken = listener.local_addr().unwrap();
        let ended: Ended = finish(start(&format!("localhost:{}", taken.port())));
        ended.failed(1, &[&taken.to_string(), "already"]);
    }
}

/// Each is delayed where it removes the file of a dead server: without a lock, the second removes
/// the file of the first.
#[test]
fn two_servers_over_the_file_of_a_dead_one_are_one() {
    let folder = Folder::new();
    let socket = folder.arg("socket");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let mut children = Vec::new();
    for delay in [200_000, 600_000] {
        let Some(mut command) = injected(&format!("inject=unlink,unlinkat:delay_enter={delay}"))
        else {
            return;
        };
        children.push(command.args(["serve", "soft:1M", "--json", "-U", &socket]).spawn().unwrap());
    }
    // The one that is refused ends by itself.
    let until = Instant::now() + Duration::from_secs(60);
    let ended = loop {
        if let Some(ended) =
            children.iter_mut().position(|child| child.try_wait().unwrap().is_some())
        {
            break ended;
        }
        if Instant::now() > until {
            children.iter_mut().for_each(|child| child.kill().unwrap());
            panic!("both serve");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    finish(children.remove(ended)).failed(1, &["listens there already"]);
    let server = Server::started(children.remove(0), socket);
    assert!(server.client().read(0, 4096).is_ok());
    server.stop();
}
