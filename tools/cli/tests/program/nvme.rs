//! `nvme`, and real controllers as targets, as far as this can be tested without one.

use crate::common::{Ended, Folder, bytes, finish, pinfold, skipped, words};
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn a_controller_is_identified() {
    let report = pinfold(&["nvme", "soft:64M", "--json"]).json();
    assert_eq!(report["controller"]["model"], "Pinfold model controller");
    assert_eq!(report["controller"]["queues"], 16);
    let namespace = &report["namespaces"][0];
    assert_eq!((&namespace["nsid"], &namespace["bytes"]), (&1.into(), &(64u64 << 20).into()));
    assert_eq!((&namespace["block_bytes"], &namespace["usable"]), (&512.into(), &true.into()));
    assert_eq!(
        (&report["smart"]["temperature_kelvin"], &report["smart"]["critical_warning"]),
        (&300.into(), &0.into())
    );
    let text = pinfold(&["nvme", "soft:64M"]).ok();
    for part in [
        "controller soft:64M\n  model         Pinfold model controller, firmware",
        "version       NVMe 2.0.0",
        "transfers     1 MiB at most; 1 MiB are used",
        "queues        16 queues granted, of up to 1,024 entries",
        "  1                  64 MiB        131,072            512        131,072              0\n",
        "warnings      none",
        "temperature   300 K (27 °C)",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn a_namespace_that_becomes_ready_late_is_waited_for() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1 << 20));
    // It is not ready from its start, and the program may get no processor for as long.
    let run = |line: &str, is_retried: &dyn Fn(&Ended) -> bool| {
        ["2s", "20s"]
            .iter()
            .map(|time| {
                pinfold(&words(&line.replace("TARGET", &format!("soft:4M,not-ready={time}"))))
            })
            .find(is_retried)
            .expect("no request was sent again")
            .ok()
    };
    for line in [
        format!("copy {source} {} --via TARGET --force --json", folder.arg("out")),
        "io TARGET --rw randwrite --bs 16k --size 64k --json".to_owned(),
    ] {
        let device = |ended: &Ended| {
            let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
            report["stack"]["devices"][0].clone()
        };
        run(&line, &|ended| {
            let device = device(ended);
            let count = |key: &str| device[key].as_u64().unwrap();
            assert!(count("retries") < 1000, "{device}");
            assert_eq!(count("retry_wait_ns") > 0, count("retried_requests") > 0, "{device}");
            count("retried_requests") > 0
        });
    }
    run(&format!("copy {source} TARGET"), &|ended| ended.out.contains("1 request retried after "));
    let line = "io soft:4M,not-ready=1h --rw randread --bs 16k --size 64k --retry-limit 100ms";
    pinfold(&words(line)).failed(1, &["namespace not ready", "--retry-limit"]);
}

#[test]
fn a_controller_with_blocks_of_4_kib_is_used_by_every_command() {
    let report = pinfold(&["nvme", "soft:64M,block=4k", "--json"]).json();
    let namespace = &report["namespaces"][0];
    assert_eq!((&namespace["block_bytes"], &namespace["blocks"]), (&4096.into(), &16_384.into()));
    let verified = pinfold(&words(
        "io soft:8M,block=4k --rw randrw --bs 4k --verify --verify-requests 500 --json",
    ))
    .json();
    assert_eq!(verified["command"], "io", "{verified}");
    pinfold(&words("io soft:8M,block=4k --rw randread --bs 512")).failed(2, &["--bs 512", "4096"]);

    let folder = Folder::new();
    let server = crate::serve::Server::start(&folder, "soft:8M,block=4k", "");
    let nbdsh = |script: &str| {
        let mut command = std::process::Command::new("nbdsh");
        // Python's module belongs to the system's Python.
        command.args(["-u", &server.uri, "-c", script]).env("PATH", "/usr/bin:/bin").output()
    };
    let script = "
assert h.get_block_size(nbd.SIZE_MINIMUM) == 4096
data = bytes(range(256)) * 32
h.pwrite(data, 4096)
h.flush()
assert h.pread(8192, 4096) == data
h.zero(4096, 8192)
assert h.pread(16384, 0) == bytes(4096) + data[:4096] + bytes(8192)
h.set_strict_mode(0)
for offset, count in [(512, 4096), (0, 512)]:
    try:
        h.pread(count, offset)
    except nbd.Error as error:
        assert error.errno == 'EINVAL', error
    else:
        raise AssertionError('an unaligned request was answered')
";
    match nbdsh(script) {
        Err(_) => skipped("no nbdsh"),
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("No module named nbd") => {
            skipped("nbdsh without its Python module");
        }
        Ok(output) => assert!(output.status.success(), "{output:#?}"),
    }
    server.stop();
}

/// Starts the program with its first fdatasync failing, as that of a disk that has lost written
/// data does; the second succeeds.
fn with_a_failed_sync(line: &str) -> Option<std::process::Child> {
    let mut command = std::process::Command::new("strace");
    // With -D, the child is the program.
    command.args(["-D", "-f", "-o", "/dev/null", "-e", "trace=fdatasync"]);
    command
        .args(["-e", "inject=fdatasync:error=EIO:when=1", env!("CARGO_BIN_EXE_pinfold")])
        .args(words(line));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Tracing may be forbidden, in a container for example.
    let probe =
        std::process::Command::new("strace").args(["-D", "-f", "-o", "/dev/null", "true"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        skipped("no strace, or it may not trace");
        return None;
    }
    Some(command.spawn().unwrap())
}

#[test]
fn a_flush_that_lost_data_is_never_reported_as_done() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1 << 20));
    let image = folder.sparse("disk.img", 1 << 20);
    for line in [
        format!("copy {source} soft:{}", folder.arg("copy.img")),
        format!("copy {source} {}", folder.arg("copy")),
        format!("io soft:{image} --rw write --size 32k --fsync 2 --force"),
    ] {
        let Some(child) = with_a_failed_sync(&line) else { return };
        let ended = finish(child);
        assert_eq!(ended.code, Some(1), "{line}: {ended:#?}");
    }
    assert_eq!(folder.names(), ["disk.img", "in"]);

    let socket = folder.arg("socket");
    let line = format!("serve soft:{image} --nbd unix:{socket}");
    let Some(mut server) = with_a_failed_sync(&line) else { return };
    let until = Instant::now() + Duration::from_secs(60);
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < until && server.try_wait().unwrap().is_none(), "no server");
        std::thread::sleep(Duration::from_millis(10));
    }
    let script = "
h.pwrite(b'x' * 4096, 0)
for attempt in range(3):
    try:
        h.flush()
    except nbd.Error:
        continue
    raise AssertionError('flush %d is reported as done' % attempt)
h.shutdown()
";
    let done = crate::serve_clients::nbdsh(Some(&format!("nbd+unix:///?socket={socket}")), script);
    server.kill().unwrap();
    server.wait().unwrap();
    if let Some(done) = done {
        done.ok();
    }
}

#[test]
fn an_image_is_not_changed() {
    let folder = Folder::new();
    let file = folder.file("disk.img", &bytes(65_536));
    let report = pinfold(&["nvme", &format!("soft:{file}"), "--json"]).json();
    assert_eq!(report["namespaces"][0]["blocks"], 128);
    assert!(std::fs::read(&file).unwrap() == bytes(65_536));
    pinfold(&["nvme", &file]).failed(1, &["is not a controller", "vfio:BDF"]);
}

#[test]
fn a_missing_real_controller_is_reported() {
    for line in
        ["nvme ffff:ff:1f.7", "nvme vfio:ffff:ff:1f.7", "io vfio:ffff:ff:1f.7 --rw randread"]
    {
        pinfold(&words(line)).failed(1, &["ffff:ff:1f.7", "lspci"]);
    }
    let folder = Folder::new();
    let file = folder.file("a", b"a");
    pinfold(&["copy", "vfio:ffff:ff:1f.7", &folder.arg("b")]).failed(1, &["ffff:ff:1f.7"]);
    assert_eq!(folder.names(), ["a"]);
    // Device files of the kernel's driver: what to do, not only that they are no controllers.
    pinfold(&["nvme", "/dev/nvme97"]).failed(1, &["/dev/nvme97", "vfio-pci", "lspci -d ::0108"]);
    pinfold(&["nvme", "/dev/null"]).failed(1, &["/dev/null is not a controller"]);
    for text in ["vfio:1", "vfio:01:00.0/0", "vfio:"] {
        pinfold(&["io", text]).failed(2, &[text]);
    }
    // Without --force, a controller that would be overwritten is not even opened.
    pinfold(&["copy", &file, "vfio:ffff:ff:1f.7"]).failed(1, &["holds data", "--force"]);
    pinfold(&["copy", &file, &folder.arg("b"), "--via", "vfio:ffff:ff:1f.7/2"])
        .failed(1, &["--force"]);
    pinfold(&words("io vfio:ffff:ff:1f.7 --rw randwrite")).failed(1, &["--force"]);
    pinfold(&words("io vfio:ffff:ff:1f.7 --rw randrw --verify")).failed(1, &["--force"]);
    assert_eq!(folder.names(), ["a"]);
}

#[test]
fn a_part_of_a_source_is_copied() {
    let folder = Folder::new();
    let file = folder.file("a", &bytes(100_000));
    let size = |size: &str, to: &str| {
        pinfold(&["copy", &file, &folder.arg(to), "--size", size, "--verify"])
    };
    for (len, to) in [(0, "b"), (1, "c"), (4096, "d"), (99_999, "e"), (100_000, "f")] {
        size(&len.to_string(), to).ok();
        assert!(std::fs::read(folder.path(to)).unwrap() == bytes(100_000)[..len]);
    }
    size("100001", "g").failed(2, &["--size 100001", "only 100000"]);
    assert!(!folder.path("g").exists());
}
