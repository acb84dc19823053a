//! `pinfold serve` with TLS.

use crate::client::Client;
use crate::common::{Folder, assert_same, bytes, finish_with, pinfold, skipped, words};
use crate::serve::{Server, client};
use pinfold_nbd::{Command as Nbd, RequestHeader};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: usize = 16 << 20;

/// Creates an authority, and certificates that it signs for a server and a client, as in
/// docs/serve.md.
const SCRIPT: &str = r#"
set -e
cd "$1"
new() { openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "$@"; }
new -x509 -days 3650 -subj /CN=authority -keyout ca-key.pem -out ca-cert.pem
for who in server client; do
    new -subj "/CN=$who" -keyout $who-key.pem -out $who.csr
    printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=%sAuth\n' $who >$who.ext
    openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 3650 -extfile $who.ext -out $who-cert.pem
done
"#;

/// Returns a folder of certificates; `None` if they cannot be made.
pub(crate) fn certificates(folder: &Folder, name: &str) -> Option<String> {
    let path = folder.arg(name);
    std::fs::create_dir(&path).unwrap();
    if Command::new("openssl").arg("version").output().is_err() {
        skipped("no openssl: apt-get install openssl");
        return None;
    }
    let mut command = Command::new("bash");
    command.args(["-c", SCRIPT, "bash", &path]).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish_with(command).ok();
    Some(path)
}

/// Asks for TLS, and sends `more` behind that.
fn ask_for_tls(server: &Server, more: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(&[b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0", more].concat()).unwrap();
    stream
}

/// Performs the part of the handshake in plaintext.
fn start_tls(server: &Server) -> UnixStream {
    let mut stream = ask_for_tls(server, b"");
    let mut replies = [0; 18 + 20];
    stream.read_exact(&mut replies).unwrap();
    assert_eq!(replies[18 + 8..], [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0], "acknowledged");
    stream
}

/// Returns a client that trusts `authority` and has chosen the default export.
fn secure(
    server: &Server,
    certificates: &str,
) -> Client<StreamOwned<ClientConnection, UnixStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(format!("{certificates}/ca-cert.pem")).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let connection =
        ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let mut stream = StreamOwned::new(connection, start_tls(server));
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    let mut export = [0; 8 + 2];
    stream.read_exact(&mut export).unwrap();
    assert_eq!(export[..8], (SIZE as u64).to_be_bytes());
    Client(stream)
}

#[test]
fn clients_of_others_copy_inside_tls() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let source = folder.file("source", &bytes(SIZE));
    let tls = format!("--tls-certificates {pki} --tls-verify-peer --threads 2");
    for target in [folder.sparse("disk", SIZE as u64), format!("soft:{SIZE}")] {
        let server = Server::start(&folder, &target, &tls);
        assert!(server.uri.starts_with("nbds+unix:///?socket="), "{}", server.uri);
        let uri = format!("{}&tls-certificates={pki}&tls-hostname=localhost", server.uri);
        let Some(info) = client("nbdinfo", &[&uri]) else { return };
        assert!(info.ok().contains("newstyle-fixed with TLS, using structured"));
        client("nbdcopy", &[&source, &uri]).unwrap().ok();
        client("nbdcopy", &[&uri, &folder.arg("back")]).unwrap().ok();
        assert_same(&folder.path("source"), &folder.path("back"));
        let report = server.stop();
        assert_eq!(
            (&report["clients"]["errors"], &report["clients"]["dropped"]),
            (&0.into(), &0.into())
        );
    }
    let server = Server::start_at(&folder, "localhost:0", &format!("soft:{SIZE}"), &tls);
    let port = server.uri.trim_end_matches('/').rsplit(':').next().unwrap().to_owned();
    let object = format!("tls-creds-x509,id=tls,dir={pki},endpoint=client");
    let image = format!("driver=nbd,host=localhost,port={port},tls-creds=tls");
    let convert =
        ["convert", "--object", &object, "-n", "-f", "raw", "--target-image-opts", &source, &image];
    let Some(converted) = client("qemu-img", &convert) else { return };
    converted.ok();
    let source = format!("driver=raw,file.driver=file,file.filename={source}");
    let same = ["compare", "--object", &object, "--image-opts", &source, &image];
    assert!(client("qemu-img", &same).unwrap().ok().contains("identical"));
    server.stop();
}

#[test]
fn clients_without_tls_or_certificate_are_refused() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let Some(strangers) = certificates(&folder, "strangers") else { return };
    let tls = format!("--tls-certificates {pki} --tls-verify-peer");
    let server = Server::start(&folder, &format!("soft:{SIZE}"), &tls);
    let plain = server.uri.replace("nbds", "nbd");
    let Some(refused) = client("nbdinfo", &[&plain]) else { return };
    assert!(
        refused.code == Some(1) && refused.err.contains("Operation not supported"),
        "{refused:#?}"
    );
    let with =
        |folder: &str| format!("{}&tls-certificates={folder}&tls-hostname=localhost", server.uri);
    // It trusts the server, and has a certificate of its own that the server does not know.
    std::fs::copy(format!("{pki}/ca-cert.pem"), format!("{strangers}/ca-cert.pem")).unwrap();
    assert_ne!(client("nbdinfo", &[&with(&strangers)]).unwrap().code, Some(0));
    for file in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(format!("{strangers}/{file}")).unwrap();
    }
    assert_ne!(client("nbdinfo", &[&with(&strangers)]).unwrap().code, Some(0));
    client("nbdinfo", &[&with(&pki)]).unwrap().ok();
    let report = server.stop();
    assert_eq!(report["clients"]["dropped"], 2, "{report}");
}

#[test]
fn replies_wait_for_a_client_that_does_not_take_them() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let disk = folder.file("disk", &bytes(SIZE));
    let server = Server::start(&folder, &disk, &format!("--tls-certificates {pki}"));
    let mut slow = secure(&server, &pki);
    // Far more than the socket and the encrypted records hold.
    for cookie in 0..16 {
        slow.send(Nbd::READ, cookie, cookie << 20, 1 << 20);
    }
    // Others are served meanwhile, and write what was read before.
    let mut other = secure(&server, &pki);
    let tail = other.read((SIZE - 4096) as u64, 4096).unwrap();
    let mut read = vec![0; SIZE];
    for _ in 0..16 {
        let (cookie, error) = slow.reply();
        assert_eq!(error, None);
        let start = usize::try_from(cookie << 20).unwrap();
        slow.0.read_exact(&mut read[start..start + (1 << 20)]).unwrap();
    }
    assert_eq!(read, bytes(SIZE));
    assert_eq!(tail, read[SIZE - 4096..]);
    slow.0.conn.send_close_notify();
    slow.0.flush().unwrap();
    assert_eq!(slow.0.read(&mut [0]).unwrap(), 0, "ends inside TLS as well");
    drop((slow, other));
    server.stop();
}

#[test]
fn bytes_that_are_not_tls_end_their_connection_alone() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let server =
        Server::start(&folder, &format!("soft:{SIZE}"), &format!("--tls-certificates {pki}"));
    let mut good = secure(&server, &pki);
    let silent = start_tls(&server);
    // Plaintext that a man in the middle could add: the option to choose an export, or the first
    // bytes of TLS.
    for more in [&b"IHAVEOPT\0\0\0\x01\0\0\0\0"[..], b"\x16\x03\x01"] {
        let mut replies = Vec::new();
        ask_for_tls(&server, more).read_to_end(&mut replies).unwrap();
        assert!(replies.len() <= 18 + 20, "closed without a reply to it");
    }
    // Once TLS has begun, its library refuses the rest with an alert.
    let mut stream = start_tls(&server);
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    let mut alert = Vec::new();
    stream.read_to_end(&mut alert).unwrap();
    assert_eq!(alert[..2], [21, 3], "an alert: {alert:?}");
    assert_eq!(good.read(0, 4096).unwrap(), [0; 4096]);
    server.terminate();
    assert_eq!(good.0.read(&mut [0]).unwrap(), 0, "told that nothing follows");
    drop(silent);
    let report = server.wait().json();
    assert_eq!(report["clients"]["dropped"], 3, "{report}");
}

#[test]
fn certificates_that_do_not_fit_are_named() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let Some(other) = certificates(&folder, "other") else { return };
    let serve = |pki: &str, more: &str| {
        let socket = folder.arg("socket");
        pinfold(&words(&format!(
            "serve soft:16M --nbd unix:{socket} --tls-certificates {pki} {more}"
        )))
    };
    let absent = folder.arg("absent");
    serve(&absent, "").failed(1, &["absent/server-cert.pem", "docs/serve.md"]);
    std::fs::copy(format!("{other}/server-key.pem"), format!("{pki}/server-key.pem")).unwrap();
    serve(&pki, "").failed(1, &["server-cert.pem"]);
    folder.file("pki/server-key.pem", b"not a key");
    serve(&pki, "").failed(1, &["server-key.pem", "no items found"]);
    std::fs::remove_file(format!("{other}/ca-cert.pem")).unwrap();
    serve(&other, "--tls-verify-peer").failed(1, &["ca-cert.pem"]);
    let line = "serve soft:16M --nbd unix:x --tls-verify-peer";
    pinfold(&words(line)).failed(2, &["--tls-certificates"]);
}

#[test]
fn requests_before_the_end_of_tls_are_answered_and_written() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let disk = folder.file("disk", &bytes(SIZE));
    let server = Server::start(&folder, &disk, &format!("--tls-certificates {pki} --cached"));
    // All in one piece: a request, and the end of TLS.
    let mut client = secure(&server, &pki);
    let read = RequestHeader { command: Nbd::READ, cookie: 1, length: 512, ..Default::default() };
    client.0.conn.writer().write_all(&read.to_bytes()).unwrap();
    client.0.conn.send_close_notify();
    let mut records = Vec::new();
    client.0.conn.write_tls(&mut records).unwrap();
    while client.0.conn.wants_write() {
        client.0.conn.write_tls(&mut records).unwrap();
    }
    client.0.sock.write_all(&records).unwrap();
    let mut answer = Vec::new();
    client.0.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), 16 + 512, "answered, and then ended");

    // Replies that the client does not take before it has disconnected.
    let mut client = secure(&server, &pki);
    for cookie in 0..4 {
        client.send(Nbd::READ, cookie, cookie << 20, 1 << 20);
    }
    client.send(Nbd::DISCONNECT, 0, 0, 0);
    answer.clear();
    client.0.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), 4 * (16 + (1 << 20)), "to the last encrypted byte");

    // A client that leaves behind its last write, with a reply that it has not taken.
    let mut other = secure(&server, &pki);
    for round in 1..=6 {
        let mut client = secure(&server, &pki);
        // Small, or so large that nothing behind it is received before the client leaves.
        let length = if round % 2 == 0 { 4096 } else { 4 << 20 };
        client.send(Nbd::READ, 1, 0, length);
        if length > 4096 {
            assert_eq!(client.reply(), (1, None));
        }
        client.send(Nbd::WRITE, 2, 8192, 512);
        client.0.write_all(&[round; 512]).unwrap();
        drop(client);
        let end = Instant::now() + Duration::from_secs(60);
        while other.read(8192, 512).unwrap() != [round; 512] {
            assert!(Instant::now() < end, "write {round} was lost");
        }
    }
    drop(other);
    assert_eq!(server.stop()["clients"]["dropped"], 0);
}

/// A payload of one byte for each record, of which each costs as much as one of 16 KiB.
#[test]
fn records_with_next_to_no_contents_end_their_connection() {
    let folder = Folder::new();
    let Some(pki) = certificates(&folder, "pki") else { return };
    let server =
        Server::start(&folder, &format!("soft:{SIZE}"), &format!("--tls-certificates {pki}"));
    let (mut wasteful, mut other) = (secure(&server, &pki), secure(&server, &pki));
    wasteful.send(Nbd::WRITE, 1, 0, 1 << 20);
    let mut sent = 0;
    while sent < 200_000 && wasteful.0.write(&[1]).is_ok() {
        sent += 1;
        if sent % 10_000 == 0 {
            assert_eq!(other.read(1 << 20, 512).unwrap(), [0; 512]);
        }
    }
    assert!((40_000..200_000).contains(&sent), "{sent}");
    drop((wasteful, other));
    assert_eq!(server.stop()["clients"]["dropped"], 1);
}
