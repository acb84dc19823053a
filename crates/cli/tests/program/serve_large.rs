//! `pinfold serve` and large requests of libnbd's default client: those that are refused, and those
//! for which there is little memory.

use crate::common::Folder;
use crate::serve::Server;
use crate::serve_images::nbdsh;
use crate::serve_tls::certificates;

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

/// Whatever the memory of a thread is: as on machines with 1, 16 and 64 processors.
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
