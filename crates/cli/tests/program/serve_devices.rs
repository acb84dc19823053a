//! `pinfold serve`, `io` and `copy` with block devices of other sectors than usual.

use crate::common::{Folder, assert_same, bytes, pinfold, skipped, words};
use crate::serve::{Server, client};
use crate::serve_images::nbdsh;
use std::process::Command;

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

const SCRIPT: &str = r#"
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
    let Some(done) = nbdsh(Some(&server.uri), SCRIPT) else { return };
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
