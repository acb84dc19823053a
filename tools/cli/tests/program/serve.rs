//! `pinfold serve`, used by clients that others have written, and by some that no one should have
//! written.

use crate::client::Client;
use crate::common::{
    Ended, Folder, Running, assert_same, bytes, finish, pinfold, skipped, start, wait_until, words,
};
use pinfold_nbd::reply::ReplyHeader;
use pinfold_nbd::{Command as Nbd, ErrorNumber, RequestHeader};
use rustix::fs::{Advice, fadvise};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Whole copies are for the optimised build.
const COPIED: usize = if cfg!(debug_assertions) { 32 << 20 } else { 256 << 20 };

/// A server at a Unix socket.
pub(crate) struct Server {
    child: Running,
    pub(crate) uri: String,
    pub(crate) socket: String,
    /// The line printed when clients could connect.
    pub(crate) listening: serde_json::Value,
}

impl Server {
    /// Serves `target` with `options`, and waits until clients can connect.
    pub(crate) fn start(folder: &Folder, target: &str, options: &str) -> Self {
        Self::start_at(folder, &format!("unix:{}", folder.arg("socket")), target, options)
    }

    /// Returns the same at another address.
    pub(crate) fn start_at(folder: &Folder, address: &str, target: &str, options: &str) -> Self {
        let line = words(&format!("serve {target} --nbd {address} --json {options}"));
        Self::started(start(&line), folder.arg("socket"))
    }

    /// Waits until clients of `child` can connect, whose socket, if it has one, is `socket`.
    pub(crate) fn started(child: impl Into<Running>, socket: String) -> Self {
        let mut child = child.into();
        // Byte by byte, because the rest is for `finish`.
        let mut line = Vec::new();
        let out = child.stdout.as_mut().unwrap();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            if out.read(&mut byte).unwrap() == 0 {
                panic!("{:#?}", finish(child));
            }
            line.push(byte[0]);
        }
        let listening: serde_json::Value = serde_json::from_slice(&line).unwrap();
        let uri = listening["listening"].as_str().unwrap().to_owned();
        Self { child, uri, socket, listening }
    }

    /// Stops it as an administrator does, and returns its report.
    pub(crate) fn stop(self) -> serde_json::Value {
        self.terminate();
        let report = finish(self.child).json();
        assert!(!std::path::Path::new(&self.socket).exists(), "the socket's file is removed");
        let data = &report["stack"]["memory"][0];
        assert_eq!(data["frames_in_use"], 0, "{data}");
        report
    }

    pub(crate) fn terminate(&self) {
        kill_process(self.id(), Signal::TERM).unwrap();
    }

    pub(crate) fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits for its end after a signal.
    pub(crate) fn wait(self) -> Ended {
        finish(self.child)
    }

    pub(crate) fn client(&self) -> Client {
        Client::greet(UnixStream::connect(&self.socket).unwrap()).0
    }
}

/// Runs a client; `None` if it is not installed.
pub(crate) fn client(name: &str, args: &[&str]) -> Option<Ended> {
    let mut command = Command::new(name);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    match command.spawn() {
        Ok(child) => Some(finish(child)),
        Err(_) => {
            skipped(&format!(
                "no {name}: apt-get install libnbd-bin python3-libnbd qemu-utils fio"
            ));
            None
        }
    }
}

#[test]
fn nbdcopy_copies_in_both_directions() {
    let folder = Folder::new();
    let source = folder.file("source", &bytes(COPIED));
    for (target, options) in [
        (folder.sparse("disk", COPIED as u64), ""),
        (folder.sparse("cached", COPIED as u64), "--cached --threads 3"),
        (format!("soft:{COPIED}"), "--threads 2"),
        (
            format!("soft:{}", folder.sparse("image", COPIED as u64)),
            "--protect strict --buffers 8M",
        ),
    ] {
        let server = Server::start(&folder, &target, options);
        let Some(copied) = client("nbdcopy", &[&source, &server.uri]) else { return };
        copied.ok();
        let back = folder.arg("back");
        client("nbdcopy", &[&server.uri, &back]).unwrap().ok();
        assert_same(&folder.path("source"), &folder.path("back"));
        let report = server.stop();
        assert_eq!(report["clients"]["errors"], 0, "{report}");
        assert_eq!(report["clients"]["received"], COPIED, "{report}");
        std::fs::remove_file(back).unwrap();
    }
    assert_same(&folder.path("source"), &folder.path("disk"));
}

#[test]
fn nbdinfo_sees_what_was_configured() {
    let folder = Folder::new();
    let target = folder.sparse("disk", 1 << 20);
    std::fs::OpenOptions::new().write(true).open(&target).unwrap().write_all(&[1; 65_536]).unwrap();
    let server = Server::start(&folder, &target, "--read-only --name secret --description a_disk");
    let Some(info) = client("nbdinfo", &["--json", "--list", &server.uri]) else { return };
    let info = info.json();
    let export = &info["exports"][0];
    assert_eq!(export["export-name"], "secret");
    assert_eq!(export["description"], "a_disk");
    assert_eq!(
        (&export["export-size"], &export["is_read_only"]),
        (&(1 << 20).into(), &true.into())
    );
    assert_eq!((&export["can_multi_conn"], &export["can_flush"]), (&true.into(), &true.into()));
    assert_eq!(
        export["block_minimum"].as_u64().or(export["block_size_minimum"].as_u64()),
        Some(512)
    );
    let map = client("nbdinfo", &["--json", "--map", &server.uri]).unwrap().json();
    assert_eq!((&map[0]["length"], &map[0]["type"]), (&65_536.into(), &0.into()), "{map}");
    assert_eq!(map[1]["type"], 3, "{map}");
    let other = server.uri.replace("secret", "other");
    assert_ne!(client("nbdinfo", &["--size", &other]).unwrap().code, Some(0));
    let mut writer = server.client();
    writer.send(Nbd::TRIM, 1, 0, 512);
    assert_eq!(writer.reply(), (1, Some(ErrorNumber::NotPermitted)));
    server.stop();
}

#[test]
fn qemu_io_finds_its_patterns() {
    let folder = Folder::new();
    for (target, options) in
        [("soft:16M".to_owned(), ""), (folder.sparse("disk", 16 << 20), "--threads 1")]
    {
        let server = Server::start(&folder, &target, options);
        let commands = [
            "write -P 0xaa 0 16M",
            "write -P 0xbb -f 4096 1536",
            "read -P 0xaa 0 4096",
            "read -P 0xbb 4096 1536",
            "read -P 0xaa 5632 1M",
            "write -z -u 1M 3M",
            "write -z 5M 1M",
            "read -P 0 1M 3M",
            "read -P 0 5M 1M",
            "read -P 0xaa 4M 1M",
            "discard 8M 1M",
            "flush",
            "aio_write -P 0xcc 10M 2M",
            "aio_flush",
            "read -P 0xcc 10M 2M",
        ];
        let mut args = vec!["-f", "raw"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(&server.uri);
        let Some(done) = client("qemu-io", &args) else { return };
        let out = done.ok();
        assert!(!out.contains("failed") && !out.contains("error"), "{out}");
        let report = server.stop();
        assert_eq!(report["clients"]["errors"], 0, "{report}");
    }
}

#[test]
fn fio_verifies_what_it_has_written() {
    let folder = Folder::new();
    let server = Server::start(&folder, "soft:16M", "--threads 2");
    let uri = format!("--uri={}", server.uri);
    let line = "--name=verify --ioengine=nbd --rw=randwrite --bsrange=4k-128k --size=16M --iodepth=32 --verify=crc32c \
        --verify_fatal=1 --verify_state_save=0 --output=/dev/null";
    let mut args: Vec<_> = line.split_whitespace().collect();
    args.push(&uri);
    let Some(done) = client("fio", &args) else { return };
    if done.err.contains("engine") && done.err.contains("nbd") {
        return skipped("fio has no nbd engine");
    }
    done.ok();
    assert_eq!(server.stop()["clients"]["errors"], 0);
}

#[test]
fn a_thousand_clients_are_served_and_one_more_is_refused() {
    let folder = Folder::new();
    let server = Server::start(&folder, "soft:1M", "--connections 1000 --buffers 4M --threads 2");
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < 2048) {
        return skipped("fewer than 2048 descriptors");
    }
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let mut clients: Vec<_> = (0..1000).map(|_| server.client()).collect();
    for client in &mut clients {
        client.send(Nbd::READ, 9, 0, 4096);
    }
    for client in &mut clients {
        assert_eq!(client.reply(), (9, None));
        client.0.read_exact(&mut [0; 4096]).unwrap();
    }
    let mut refused = UnixStream::connect(&server.socket).unwrap();
    assert_eq!(refused.read(&mut [0; 18]).unwrap_or(0), 0);
    drop(clients);
    let began = Instant::now();
    // Their places are free again, once the server has seen them leave.
    loop {
        let mut again = UnixStream::connect(&server.socket).unwrap();
        if again.read_exact(&mut [0; 18]).is_ok() {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    let report = server.stop();
    assert!(
        report["clients"]["connections"].as_u64() >= Some(1001)
            && report["refused"].as_u64() >= Some(1)
    );
}

#[test]
fn clients_that_misbehave_harm_no_other() {
    let folder = Folder::new();
    let server = Server::start(&folder, "soft:8M", "--threads 1 --buffers 2M");
    // It requests far more than fits into its socket and the server's memory, and reads nothing.
    let mut deaf = server.client();
    deaf.0.set_nonblocking(true).unwrap();
    let request = RequestHeader { command: Nbd::READ, length: 1 << 20, ..RequestHeader::default() }
        .to_bytes();
    let filled = (0..1_000_000).any(|_| deaf.0.write_all(&request).is_err());
    assert!(filled, "the server stops reading");
    // Errors alone must not fill the memory either.
    let mut wrong = server.client();
    wrong.0.set_nonblocking(true).unwrap();
    let invalid = RequestHeader { command: Nbd(99), ..RequestHeader::default() }.to_bytes();
    let filled = (0..1_000_000).any(|_| wrong.0.write_all(&invalid).is_err());
    assert!(filled, "the server stops reading");
    // A payload that never ends, and input that is no request.
    let mut slow = server.client();
    slow.send(Nbd::WRITE, 1, 0, 1 << 20);
    slow.0.write_all(&[7; 1000]).unwrap();
    let mut noise = server.client();
    noise.0.write_all(&[7; 28]).unwrap();
    assert_eq!(noise.0.read(&mut [0]).unwrap_or(0), 0, "disconnected");

    let mut client = server.client();
    assert_eq!(client.read(4096, 4096), Ok(vec![0; 4096]));
    drop(slow);
    assert_eq!(
        client.read(0, 4096),
        Ok(vec![0; 4096]),
        "no part of the payload has arrived in full"
    );
    let report = server.stop();
    // On a slow machine also those that hold memory for too long.
    assert!(report["clients"]["dropped"].as_u64().unwrap() >= 1, "{report}");
}

#[test]
fn a_file_that_shrinks_fails_reads_without_data() {
    let folder = Folder::new();
    let path = folder.file("disk", &[0x5a; 1 << 20]);
    let server = Server::start(&folder, &path, "");
    let mut client = server.client();
    assert_eq!(client.read(1 << 19, 8192), Ok(vec![0x5a; 8192]));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    // The error is followed by the next reply at once: the buffer, which holds the data of the read
    // before, is not sent.
    client.send(Nbd::READ, 1, 1 << 19, 8192);
    assert_eq!(client.reply(), (1, Some(ErrorNumber::Io)));
    assert_eq!(client.read(0, 4096), Ok(vec![0x5a; 4096]));
    assert_eq!(server.stop()["clients"]["errors"], 1);
}

/// One processor, one thread, and pages that are not in the cache: what completes while the server
/// sleeps has to wake it. Its sleep of 100 ms is for signals: without a wake-up each read takes as
/// long.
#[test]
fn a_server_with_one_processor_is_woken_by_each_completion() {
    const SLEEP: Duration = Duration::from_millis(100);
    let mut one = CpuSet::new();
    one.set(
        (0..CpuSet::MAX_CPU).find(|cpu| sched_getaffinity(None).unwrap().is_set(*cpu)).unwrap(),
    );
    // This thread's, which the server inherits; each test has its own.
    sched_setaffinity(None, &one).unwrap();
    let folder = Folder::new();
    let path = folder.file("disk", &[0x5a; 4 << 20]);
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    for options in ["--threads 1", "--threads 1 --cached", "--buffers 2M --cached"] {
        let server = Server::start(&folder, &path, options);
        let mut client = server.client();
        // Others that use the processor or the disk make reads longer, but not in each round.
        wait_until("the server is woken by three of four completions", || {
            let is_woken = |number: u64| {
                fadvise(&file, 0, None, Advice::DontNeed).unwrap();
                let start = Instant::now();
                assert_eq!(client.read(number * 40_960, 4096), Ok(vec![0x5a; 4096]), "{options}");
                start.elapsed() < SLEEP
            };
            (0..100).map(is_woken).filter(|is_woken| *is_woken).count() >= 75
        });
        server.stop();
    }
}

#[test]
fn requests_in_flight_are_answered_before_the_end() {
    let folder = Folder::new();
    for target in ["soft:8M".to_owned(), folder.file("disk", &bytes(8 << 20))] {
        let server = Server::start(&folder, &target, "");
        let mut client = server.client();
        for cookie in 0..64 {
            client.send(Nbd::READ, cookie, cookie * 65_536, 65_536);
        }
        let first = client.reply();
        assert_eq!(first.1, None);
        server.terminate();
        let mut rest = Vec::new();
        client.0.read_to_end(&mut rest).unwrap();
        // The rest of the first reply and whole ones after it; requests still in the server's
        // socket have none.
        let rest = rest.get(65_536..).unwrap();
        assert!(rest.len().is_multiple_of(16 + 65_536), "{} bytes", rest.len());
        for reply in rest.chunks(16 + 65_536) {
            let (header, _) = ReplyHeader::parse(reply).unwrap().unwrap();
            assert!(matches!(header, ReplyHeader::Simple { error: None, .. }), "{header:?}");
        }
        let ended = server.wait();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
}

#[test]
fn a_killed_client_and_a_killed_server_leave_nothing_behind() {
    let folder = Folder::new();
    let source = folder.file("source", &bytes(32 << 20));
    let server = Server::start(&folder, "soft:32M", "");
    let copy = Command::new("nbdcopy").args([&source, &server.uri]).stdin(Stdio::null()).spawn();
    match copy {
        Ok(mut copy) => {
            std::thread::sleep(Duration::from_millis(30));
            copy.kill().unwrap();
            copy.wait().unwrap();
        }
        Err(_) => skipped("no nbdcopy: apt-get install libnbd-bin"),
    }
    assert!(server.client().read(0, 4096).is_ok());
    // A live server keeps its socket, a dead one's is replaced.
    let second = pinfold(&words(&format!("serve soft:1M --nbd unix:{}", server.socket)));
    second.failed(1, &["listens there already"]);
    let socket = server.socket.clone();
    drop(server);
    assert!(std::path::Path::new(&socket).exists());
    let server = Server::start(&folder, "soft:1M", "");
    assert_eq!(server.client().read(0, 512), Ok(vec![0; 512]));
    server.stop();
}

#[test]
fn a_port_serves_as_well() {
    let mut child = start(&words("serve soft:1M --nbd 127.0.0.1:0 --json"));
    let mut line = Vec::new();
    let out = child.stdout.as_mut().unwrap();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        out.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let listening: serde_json::Value = serde_json::from_slice(&line).unwrap();
    if let Some(size) = client("nbdinfo", &["--size", listening["listening"].as_str().unwrap()]) {
        assert_eq!(size.ok().trim(), "1048576");
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(finish(child).json()["command"], "serve");
}

/// The lock excludes servers, commands that write or replace a file, and QEMU's programs, which use
/// the same locks; under any name of the file.
#[test]
fn an_image_that_is_served_is_locked() {
    let folder = Folder::new();
    let path = folder.file("disk", &[0x5a; 1 << 20]);
    let source = folder.file("source", &[1; 4096]);
    let serve = |target: &str, options: &str| {
        let socket = folder.arg("second");
        finish(start(&words(&format!("serve {target} -U {socket} --run true {options}"))))
    };
    let link = folder.arg("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let hard = folder.arg("hard");
    std::fs::hard_link(&path, &hard).unwrap();
    let copy = || finish(start(&["copy", &source, &path, "--force", "-q"]));
    let write = |line: &str| pinfold(&words(&line.replace("SOURCE", &source)));
    let io = "--rw write --size 4k --bs 4k --force";
    for (target, options) in
        [(path.clone(), ""), (format!("soft:{path}"), ""), (path.clone(), "-r")]
    {
        let server = Server::start(&folder, &target, options);
        serve(&path, "").failed(1, &["is in use", "end that first"]);
        serve(&format!("soft:{path}"), "").failed(1, &["is in use"]);
        copy().failed(1, &["is in use"]);
        let name = if options == "-r" { &link } else { &hard };
        write(&format!("io {name} {io}")).failed(1, &["is in use"]);
        let copied = folder.arg("copied");
        if options == "-r" {
            write(&format!("io soft:{path} {io}")).failed(1, &["is in use"]);
            write(&format!("copy SOURCE {copied} --via soft:{path} --force -q"))
                .failed(1, &["is in use"]);
            write(&format!("check --nvme soft:{path} -- true")).failed(125, &["is in use"]);
        }
        let kept = std::fs::read(&hard).unwrap();
        assert!(kept.len() == 1 << 20 && kept.iter().all(|&byte| byte == 0x5a), "{target}");
        // As `cp` does.
        write(&format!("copy {path} {copied} -q --force")).ok();
        let refused_by = |program: &str, args: &[&str]| {
            if let Some(refused) = client(program, args) {
                assert!(refused.code == Some(1) && refused.err.contains("lock"), "{refused:#?}");
            }
        };
        refused_by("qemu-io", &["-f", "raw", "-c", "write 0 512", &path]);
        if options == "-r" {
            serve(&path, "-r").ok();
        } else {
            serve(&path, "-r").failed(1, &["is in use"]);
            refused_by("qemu-img", &["convert", "-O", "raw", &path, &folder.arg("copy")]);
        }
        server.stop();
    }
    serve(&path, "").ok();
    write(&format!("io {path} {io}")).ok();
    copy().ok();
}

/// qemu-io lets others write what it writes, and loses what it writes to a file without a name.
#[test]
fn a_file_that_qemu_io_writes_is_left() {
    let folder = Folder::new();
    let path = folder.file("disk", &[0x5a; 1 << 20]);
    let source = folder.file("source", &[1; 4096]);
    let mut qemu = Command::new("qemu-io");
    qemu.args(["-f", "raw", &path]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut qemu) = qemu.spawn() else {
        return skipped("no qemu-io: apt-get install qemu-utils");
    };
    // Its answer says that it has the image.
    let mut commands = qemu.stdin.take().unwrap();
    commands.write_all(b"length\n").unwrap();
    let mut answer = [0; 8];
    qemu.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
    let copy = || pinfold(&["copy", &source, &path, "--force", "-q"]);
    copy().failed(1, &["is in use", "QEMU"]);
    pinfold(&words(&format!("io {path} --rw write --size 4k --bs 4k --force")))
        .failed(1, &["is in use"]);
    drop(commands);
    qemu.wait().unwrap();
    copy().ok();
}

/// Its clients go on with what was there at the start; who connects, and the report, say so.
#[test]
fn a_file_that_others_change_is_reported() {
    let folder = Folder::new();
    for change in ["truncate", "rename", "none"] {
        let path = folder.file("disk", &[0x5a; 1 << 20]);
        let server = Server::start(&folder, &path, "");
        assert_eq!(server.client().read(0, 512), Ok(vec![0x5a; 512]));
        match change {
            "truncate" => {
                drop(std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 21))
            }
            "rename" => std::fs::rename(folder.file("other", &[1; 512]), &path).unwrap(),
            _ => {}
        }
        assert_eq!(server.client().read(0, 512), Ok(vec![0x5a; 512]));
        server.terminate();
        let ended = server.wait();
        let notes = ["2097152 bytes now and had 1048576", "another file now"];
        for (note, is_said) in notes.into_iter().zip([change == "truncate", change == "rename"]) {
            assert_eq!(ended.err.matches(note).count(), usize::from(is_said), "{ended:#?}");
            assert_eq!(ended.out.contains(note), is_said, "{ended:#?}");
        }
    }
}

#[test]
fn impossible_servers_are_refused() {
    let folder = Folder::new();
    let socket = folder.arg("socket");
    for (line, code, part) in [
        (format!("serve soft:1M --nbd {socket}"), 2, "unix:PATH"),
        (
            format!("serve soft:1M --nbd unix:{socket} --protect static"),
            2,
            "batch, revoke or strict",
        ),
        (format!("serve soft:1M --nbd unix:{socket} --cached"), 2, "page cache"),
        (format!("serve soft:1M --nbd unix:{socket} --buffers 1M --threads 2"), 2, "4194304"),
        (format!("serve soft:1M --nbd unix:{socket} --connections 0"), 2, "connections"),
        (format!("serve soft:1M --nbd unix:{socket} --iodepth 0"), 2, "iodepth"),
        (format!("serve {} --nbd unix:{socket}", folder.arg("missing")), 1, "check the path"),
        (format!("serve soft:1M --nbd unix:{}/no/folder", folder.arg("x")), 1, "--nbd"),
    ] {
        pinfold(&words(&line)).failed(code, &[part]);
    }
    assert_eq!(folder.names(), Vec::<String>::new());
}
