//! `pinfold serve`, used by qemu-img and nbdsh.

use crate::common::{Ended, Folder, bytes, skipped};
use crate::serve::{Server, client};

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

/// What a client in Python finds: sizes, flags, the extents of a hole, errors by name, and data
/// through asynchronous commands.
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
