//! Where `pinfold serve` listens, and the address that it prints: other programs use it as it is.

use crate::common::{Ended, Folder, finish, skipped};
use crate::serve::{Server, client};
use crate::serve_faults::injected;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Starts the program in `folder`.
fn start_in<S: AsRef<OsStr>>(folder: &Path, args: &[S]) -> Server {
    let mut command = Command::new("env");
    command
        .args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_pinfold"), "serve"])
        .args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).current_dir(folder);
    Server::started(command.spawn().unwrap(), String::new())
}

/// Has the clients of libnbd and QEMU use an address.
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
        let taken = std::net::TcpListener::bind(taken).unwrap().local_addr().unwrap();
        let _taken = std::net::TcpListener::bind(taken).unwrap();
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
