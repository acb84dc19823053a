//! `pinfold serve` with the clients of others: qemu-img and nbdsh, block devices of other sectors
//! than usual, large requests.

use crate::common::{Ended, Folder, assert_same, bytes, pinfold, skipped, words};
use crate::serve::{Server, client};
use crate::serve_tls::certificates;
use std::process::Command;

const SIZE: usize = 16 << 20;

#[test]
fn qemu_img_converts_compares_and_maps() {
    let folder = Folder::new();
    // Half of the source is a hole, which qemu-img zeroes or leaves out.
    let mut contents = bytes(SIZE);
    contents[SIZE / 4..3 * SIZE / 4].fill(0);
    let source = folder.file("source", &contents);
    for target in ["soft:16M".to_owned(), folder.sparse("disk", SIZE as u64)] {
        let server = Server::start(&folder, &target, "--threads 2");
        let convert = ["convert", "-n", "-f", "raw", "-O", "raw", &source, &server.uri];
        let Some(done) = client("qemu-img", &convert) else { return };
        done.ok();
        let same = ["compare", "-f", "raw", "-F", "raw", &source, &server.uri];
        assert!(client("qemu-img", &same).unwrap().ok().contains("identical"), "{target}");
        let map =
            client("qemu-img", &["map", "-f", "raw", "--output=json", &server.uri]).unwrap().ok();
        let map: serde_json::Value = serde_json::from_str(&map).unwrap();
        let extents = map.as_array().unwrap();
        let length = |extent: &serde_json::Value| extent["length"].as_u64().unwrap();
        assert_eq!(extents.iter().map(length).sum::<u64>(), SIZE as u64, "{map}");
        let data = extents.iter().filter(|extent| extent["data"] == true).map(length).sum::<u64>();
        assert!(data >= SIZE as u64 / 2, "what was written is data: {map}");
        let report = server.stop();
        assert_eq!(report["clients"]["errors"], 0, "{report}");
    }
}

/// The findings of a client in Python: sizes, flags, the extents of a hole, errors by name, and
/// data through asynchronous commands.
const SCRIPT: &str = r#"
import errno
assert h.get_size() == 16 << 20
assert h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero() and h.can_multi_conn() and not h.is_read_only()
assert h.get_structured_replies_negotiated()
assert h.can_meta_context("base:allocation")
minimum, preferred, maximum = (h.get_block_size(kind) for kind in (nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED, nbd.SIZE_MAXIMUM))
assert minimum == 512 and preferred >= minimum and maximum >= 1 << 20

h.pwrite(b"\x11" * (1 << 20), 1 << 20, nbd.CMD_FLAG_FUA)
extents = []
def extent(context, offset, entries, error):
    extents.extend(zip(entries[::2], entries[1::2]))
h.block_status(16 << 20, 0, extent)
assert sum(length for length, _ in extents) == 16 << 20, extents

buffers = [nbd.Buffer(65536) for _ in range(64)]
pending = {h.aio_pread(buffer, (1 << 20) - 65536 + 32768 * at) for at, buffer in enumerate(buffers)}
while pending:
    pending -= {cookie for cookie in pending if h.aio_command_completed(cookie)}
    if pending:
        h.poll(-1)
for at, buffer in enumerate(buffers):
    start = (1 << 20) - 65536 + 32768 * at
    wanted = bytes(0x11 if 1 << 20 <= place < 2 << 20 else 0 for place in range(start, start + 65536, 4096))
    assert bytes(buffer.to_bytearray())[::4096] == wanted, at

h.trim(1 << 20, 1 << 20)
h.zero(1 << 20, 1 << 20)
assert not any(h.pread(1 << 20, 1 << 20))
h.set_strict_mode(0)
for call in (lambda: h.pread(512, 16 << 20), lambda: h.pread(100, 3), lambda: h.pwrite(bytes(512), (16 << 20) - 256)):
    try:
        call()
        raise SystemExit("a request beyond the end or between blocks was accepted")
    except nbd.Error as error:
        assert error.errnum in (errno.EINVAL, errno.ENOSPC), error
h.flush()
h.shutdown()
"#;

#[test]
fn nbdsh_finds_what_the_protocol_promises() {
    let folder = Folder::new();
    for target in ["soft:16M".to_owned(), folder.sparse("disk", SIZE as u64)] {
        let server = Server::start(&folder, &target, "--threads 2");
        let Some(done) = nbdsh(Some(&server.uri), SCRIPT) else { return };
        done.ok();
        server.stop();
    }
}

/// Runs a script as nbdsh does, connected to `uri` if there is one, but by the system's
/// interpreter, which has the module; `None` if there is none.
pub(crate) fn nbdsh(uri: Option<&str>, script: &str) -> Option<Ended> {
    let python = "/usr/bin/python3";
    if client(python, &["-c", "import nbd"]).is_none_or(|ended| ended.code != Some(0)) {
        skipped("no nbdsh: apt-get install python3-libnbd");
        return None;
    }
    let connected = uri.map_or(vec![], |uri| vec!["--base-allocation", "-u", uri]);
    client(python, &[&["-m", "nbd"], &*connected, &["-c", script]].concat())
}

// `pinfold serve`, `io` and `copy` with block devices of other sectors than usual.

/// A loop device, which is detached when this is dropped.
struct Loop(String);

impl Loop {
    /// Attaches `file` with sectors of `sector` bytes; `None` without the privileges.
    fn attach(file: &str, sector: &str) -> Option<Self> {
        let args = ["--find", "--show", "--direct-io=on", "--sector-size", sector, file];
        match Command::new("losetup").args(args).output() {
            Ok(done) if done.status.success() => {
                Some(Self(String::from_utf8(done.stdout).unwrap().trim().to_owned()))
            }
            other => {
                skipped(&format!(
                    "no loop device with sectors of {sector} bytes, which needs root: {other:?}"
                ));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        Command::new("losetup").args(["--detach", &self.0]).status().unwrap();
    }
}

const SECTORS_SCRIPT: &str = r#"
import errno
assert [h.get_block_size(kind) for kind in (nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED)] == [4096, 4096]
h.pwrite(b"\x55" * 12288, 4096)
assert h.pread(4096, 8192) == b"\x55" * 4096
h.set_strict_mode(0)
for call in (lambda: h.pread(512, 4096), lambda: h.pwrite(bytes(512), 512), lambda: h.zero(4096, 512)):
    try:
        call()
        raise SystemExit("a part of a sector was accepted")
    except nbd.Error as error:
        assert error.errnum == errno.EINVAL, error
h.flush()
h.shutdown()
"#;

#[test]
fn a_device_with_sectors_of_4096_bytes_is_exported_so() {
    let folder = Folder::new();
    let Some(device) = Loop::attach(&folder.sparse("disk", 64 << 20), "4096") else { return };
    let server = Server::start(&folder, &device.0, "");
    assert_eq!(
        (&server.listening["block_minimum"], &server.listening["notes"]),
        (&4096.into(), &[0; 0][..].into())
    );
    let Some(done) = nbdsh(Some(&server.uri), SECTORS_SCRIPT) else { return };
    done.ok();
    let source = folder.file("source", &bytes(32 << 20));
    client("nbdcopy", &[&source, &server.uri]).unwrap().ok();
    let report = server.stop();
    assert_eq!(report["notes"], serde_json::json!([]), "O_DIRECT");
    // Between sectors: through the page cache, and that is said at once.
    let server = Server::start(&folder, &device.0, "--offset 512 --length 1M");
    assert_eq!(server.listening["block_minimum"], 512);
    assert!(
        server.listening["notes"].to_string().contains("multiples of 4096"),
        "{}",
        server.listening
    );
    client("nbdcopy", &[&server.uri, &folder.arg("back")]).unwrap().ok();
    server.stop();
    std::fs::write(folder.path("wanted"), &bytes(32 << 20)[512..512 + (1 << 20)]).unwrap();
    assert_same(&folder.path("back"), &folder.path("wanted"));
}

#[test]
fn io_and_copy_keep_o_direct_on_sectors_of_4096_bytes() {
    let folder = Folder::new();
    let Some(device) = Loop::attach(&folder.file("disk", &bytes(16 << 20)), "4096") else { return };
    let report = pinfold(&words(&format!("io {} --size 4M --json", device.0))).json();
    assert!(!report.to_string().contains("O_DIRECT"), "{report}");
    let report = pinfold(&words(&format!("io {} --size 4M --bs 512 --json", device.0))).json();
    assert!(report.to_string().contains("multiples of 4096"), "{report}");
    let copy = pinfold(&words(&format!("copy {} {} --json", device.0, folder.arg("copy")))).json();
    assert!(!copy.to_string().contains("O_DIRECT"), "{copy}");
    assert_same(&folder.path("disk"), &folder.path("copy"));
}

#[test]
fn a_part_of_a_target_is_served_alone() {
    let folder = Folder::new();
    let contents = bytes(8 << 20);
    let disk = folder.file("disk", &contents);
    for target in [disk.clone(), format!("soft:{disk}")] {
        let server = Server::start(&folder, &target, "--offset 1M --length 4M");
        let Some(size) = client("nbdinfo", &["--size", &server.uri]) else { return };
        assert_eq!(size.ok().trim(), "4194304");
        client("nbdcopy", &[&server.uri, &folder.arg("back")]).unwrap().ok();
        assert!(std::fs::read(folder.path("back")).unwrap() == contents[1 << 20..5 << 20]);
        let script = "h.pwrite(b'\\x77' * 65536, 0)\nh.zero(65536, (4 << 20) - 65536)\nh.trim(65536, 65536)\nh.shutdown()";
        if let Some(done) = nbdsh(Some(&server.uri), script) {
            done.ok();
            server.stop();
            let after = std::fs::read(&disk).unwrap();
            assert!(after[1 << 20..(1 << 20) + 65536].iter().all(|byte| *byte == 0x77));
            assert!(after[(5 << 20) - 65536..5 << 20].iter().all(|byte| *byte == 0));
            assert!(
                after[..1 << 20] == contents[..1 << 20] && after[5 << 20..] == contents[5 << 20..]
            );
            std::fs::write(&disk, &contents).unwrap();
        }
    }
    let refused = |options: &str, parts: &[&str]| {
        let socket = folder.arg("socket");
        pinfold(&words(&format!("serve soft:{disk} --nbd unix:{socket} {options}")))
            .failed(2, parts);
    };
    refused("--offset 9M", &["--offset 9437184", "8388608"]);
    refused("--offset 1M --length 8M", &["--length 8388608", "7340032", "--offset 1048576"]);
    refused("--length 0", &["--length 0"]);
    refused("--offset 100", &["--offset 100", "blocks of 512"]);
    refused("--length 1000", &["--length 1000", "blocks of 512"]);
}

// `pinfold serve` and large requests of libnbd's default client: those that are refused, and those
// for which there is little memory.

/// Writes that are refused, each between two reads that are not, at 8 to 32 MiB; `WHERE` and `WHY`
/// come before it.
const REFUSED: &str = r#"
h.set_strict_mode(0)
for mib in (8, 16, 32):
    buffers = [nbd.Buffer(65536), nbd.Buffer.from_bytearray(bytearray(mib << 20)), nbd.Buffer(65536)]
    pending = {
        h.aio_pread(buffers[0], 0): None,
        h.aio_pwrite(buffers[1], WHERE): WHY,
        h.aio_pread(buffers[2], 65536): None,
    }
    while pending:
        for cookie, expected in list(pending.items()):
            try:
                if h.aio_command_completed(cookie):
                    assert expected is None, (mib, "was accepted")
                    del pending[cookie]
            except nbd.Error as error:
                assert error.errnum == expected, (mib, error)
                del pending[cookie]
        if pending:
            h.poll(-1)
    assert h.aio_is_ready(), h.connection_state()
assert len(h.pread(65536, 0)) == 65536
h.shutdown()
"#;

#[test]
fn a_refused_write_of_32_mib_leaves_the_connection() {
    let folder = Folder::new();
    let disk = folder.sparse("disk", 64 << 20);
    let pki = certificates(&folder, "pki");
    let tls = pki.as_ref().map(|pki| format!("--tls-certificates {pki}"));
    for (options, place, why) in
        [("", "64 << 20", "errno.ENOSPC"), ("--read-only", "0", "errno.EPERM")]
    {
        for tls in [Some(String::new()), tls.clone()].into_iter().flatten() {
            let server = Server::start(&folder, &disk, &format!("{options} {tls}"));
            let uri = match &pki {
                Some(pki) if !tls.is_empty() => {
                    format!("{}&tls-certificates={pki}&tls-hostname=localhost", server.uri)
                }
                _ => server.uri.clone(),
            };
            let script = format!("import errno\nWHERE, WHY = {place}, {why}\n{REFUSED}");
            // The client's keys are files, which an address may not name by default.
            let connects = format!(
                "h = nbd.NBD()\nh.set_uri_allow_local_file(True)\nh.connect_uri({uri:?})\n"
            );
            let Some(done) = nbdsh(None, &format!("{connects}{script}")) else { return };
            done.ok();
            let report = server.stop();
            assert_eq!(
                (&report["clients"]["errors"], &report["clients"]["dropped"]),
                (&3.into(), &0.into())
            );
        }
    }
}

/// The client does not ask for the largest request, and does not split its own.
const LARGE: &str = r#"
h.set_strict_mode(0)
size = 32 << 20
assert h.get_block_size(nbd.SIZE_MAXIMUM) >= size
data = bytearray(((at >> 12) * 37 + 11) % 256 for at in range(0, size, 4096) for _ in range(8)) * 512
h.pwrite(data, 16 << 20)
pending = [nbd.Buffer(size) for _ in range(3)]
cookies = {h.aio_pread(buffer, 16 << 20) for buffer in pending}
while cookies:
    cookies -= {cookie for cookie in cookies if h.aio_command_completed(cookie)}
    if cookies:
        h.poll(-1)
assert all(buffer.to_bytearray() == data for buffer in pending)
assert h.pread(size, 16 << 20, nbd.CMD_FLAG_DF) == data
h.zero(size, 16 << 20)
assert not any(h.pread(size, 16 << 20))
h.flush()
h.shutdown()
"#;

/// For the thread memory of machines with 1, 16 and 64 processors.
#[test]
fn a_request_of_32_mib_is_served_on_every_machine() {
    let folder = Folder::new();
    for target in [folder.sparse("disk", 64 << 20), "soft:64M".to_owned()] {
        for options in ["", "--threads 1 --buffers 2M", "--threads 16", "--threads 64"] {
            let server = Server::start(&folder, &target, options);
            let Some(done) = nbdsh(Some(&server.uri), LARGE) else { return };
            done.ok();
            // A client with simple replies, for whom all parts follow one header.
            let simple = "h.set_request_structured_replies(False)\nh.connect_uri(URI)\n";
            let script = format!("URI = {:?}\nh = nbd.NBD()\n{simple}", server.uri);
            let script = format!("{script}{}", LARGE.replace(", nbd.CMD_FLAG_DF", ""));
            nbdsh(None, &script).unwrap().ok();
            let report = server.stop();
            assert_eq!(report["clients"]["errors"], 0, "{report}");
        }
    }
}
