//! TLS of a connection, by the library rustls: what arrives is decrypted and copied into payload
//! memory, replies are encrypted from it.

use super::error::ServeError;
use super::input::Input;
use super::socket::{Socket, would_block};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// The bytes that one call receives: two records of the greatest length.
const RECORDS: usize = 33 << 10;
/// How many bytes may arrive beyond a multiple of the client's own: far more than a handshake has.
const MOST_OVERHEAD: usize = 1 << 20;
/// That multiple: a header of 28 bytes in a record of its own has less.
const OVERHEAD_EACH: usize = 4;
/// How often one call takes records, of which the library takes 4 KiB at a time: small ones take
/// long.
const MOST_TAKEN: usize = 16;
/// What that costs of a turn.
const TAKEN: usize = 16 << 10;

/// Reads the certificate and the key of a server, `server-cert.pem` and `server-key.pem` in
/// `folder`, as other NBD servers name them. With `verify`, clients must have a certificate that
/// `ca-cert.pem` has signed.
///
/// # Errors
/// A file cannot be read, holds something else, or does not belong to the others; the path and the
/// reason.
pub(crate) fn configure(folder: &Path, verify: bool) -> Result<Arc<ServerConfig>, ServeError> {
    let path = |name: &str| folder.join(name);
    let invalid = |name: &str, reason: &dyn std::fmt::Display| ServeError::Certificates {
        path: path(name),
        reason: reason.to_string(),
    };
    let certificates = |name: &str| -> Result<Vec<CertificateDer<'static>>, pem::Error> {
        let all: Vec<_> = CertificateDer::pem_file_iter(path(name))?.collect::<Result<_, _>>()?;
        if all.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(all) }
    };
    let (name, key_name, ca_name) = ("server-cert.pem", "server-key.pem", "ca-cert.pem");
    let chain = certificates(name).map_err(|error| invalid(name, &error))?;
    let key =
        PrivateKeyDer::from_pem_file(path(key_name)).map_err(|error| invalid(key_name, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        // 1.2 ends after 2^24 records, and the library then drops what it is given.
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| invalid(name, &error))?;
    let builder = if verify {
        let mut roots = RootCertStore::empty();
        for root in certificates(ca_name).map_err(|error| invalid(ca_name, &error))? {
            roots.add(root).map_err(|error| invalid(ca_name, &error))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        builder
            .with_client_cert_verifier(verifier.build().map_err(|error| invalid(ca_name, &error))?)
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| invalid(name, &error))?;
    // NBD clients do not resume sessions.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// TLS of one connection.
#[derive(Debug)]
pub(super) struct Tls {
    connection: ServerConnection,
    /// Records that have arrived.
    records: Input,
    /// Bytes that have arrived beyond a multiple of the client's own.
    overhead: usize,
    /// More may be here, or is the end, than the last call has returned.
    more: bool,
    /// What the next call reports: the last one had something to return.
    failed: Option<io::Error>,
    /// What was spent on records, as a turn counts it.
    work: usize,
}

impl Tls {
    /// Waits for the client's part of the TLS handshake.
    pub(super) fn new(config: &Arc<ServerConfig>) -> io::Result<Self> {
        let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
        let records = Input::new(RECORDS);
        Ok(Self { connection, records, overhead: 0, more: false, failed: None, work: 0 })
    }

    /// Like [`Stream::receive`](super::stream::Stream::receive), but may return less than there is:
    /// see [`has_more`](Self::has_more). What is no TLS is an error of the kind `InvalidData`.
    pub(super) fn receive(
        &mut self,
        socket: &mut Socket,
        to: &mut [IoSliceMut<'_>],
    ) -> io::Result<Option<usize>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.more = false;
        let (mut moved, mut taken) = (0, 0);
        for slice in to {
            let mut rest = &mut **slice;
            while !rest.is_empty() {
                match self.connection.reader().read(rest) {
                    // The end comes after what was moved.
                    Ok(0) => return Ok(self.interrupted(moved)),
                    Ok(read) => {
                        moved += read;
                        self.overhead =
                            self.overhead.saturating_sub(read.saturating_mul(OVERHEAD_EACH));
                        rest = rest.get_mut(read..).unwrap_or_default();
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        if taken == MOST_TAKEN {
                            self.more = true;
                            return Ok((moved > 0).then_some(moved));
                        }
                        taken += 1;
                        match self.take_records(socket) {
                            Ok(true) => {}
                            Ok(false) => return Ok((moved > 0).then_some(moved)),
                            Err(error) if moved > 0 => {
                                self.failed = Some(error);
                                return Ok(self.interrupted(moved));
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    // Closed without TLS's own end. NBD has one, too, and an unfinished request is
                    // given up in any case.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        return Ok(self.interrupted(moved));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Some(moved))
    }

    /// Returns the result of a call behind which something else than data follows.
    fn interrupted(&mut self, moved: usize) -> Option<usize> {
        self.more = moved > 0;
        Some(moved)
    }

    /// Returns whether the last [`receive`](Self::receive) has left something that no event
    /// announces.
    pub(super) fn has_more(&self) -> bool {
        self.more
    }

    /// Returns what was spent on records since the last call, as a turn counts it.
    pub(super) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// Receives and decrypts records, and answers those of the handshake. Returns `false` if
    /// nothing has arrived.
    fn take_records(&mut self, socket: &mut Socket) -> io::Result<bool> {
        let Self { connection, records, .. } = self;
        if records.unused().is_empty() {
            match would_block(|| socket.read(records.space(RECORDS)))? {
                Some(received) => records.end = received,
                None => return Ok(false),
            }
        }
        // Nothing, at the end of the stream, tells the library so.
        let used = connection.read_tls(&mut records.unused())?;
        records.take(used);
        self.overhead += used;
        self.work += TAKEN;
        let processed = self.connection.process_new_packets();
        // An error is told to the client, as far as its socket has room. One of the socket is for
        // the next to send: what was received before it counts.
        if let Err(error) = self.flush(socket) {
            tracing::debug!("TLS: {error}");
        }
        processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if self.overhead > MOST_OVERHEAD {
            let error = format!("{} bytes of TLS records with next to no contents", self.overhead);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(true)
    }

    /// Like [`Stream::send`](super::stream::Stream::send); what is encrypted may wait in here, see
    /// [`has_unsent`](Self::has_unsent).
    pub(super) fn send(
        &mut self,
        socket: &mut Socket,
        from: &[IoSlice<'_>],
    ) -> io::Result<Option<usize>> {
        if !self.flush(socket)? {
            return Ok(None);
        }
        let encrypted = self.connection.writer().write_vectored(from)?;
        self.flush(socket)?;
        Ok(Some(encrypted))
    }

    /// Returns whether records wait to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Tells the client that nothing more follows, as far as its socket has room.
    pub(super) fn end(&mut self, socket: &mut Socket) {
        self.connection.send_close_notify();
        if let Err(error) = self.flush(socket) {
            tracing::debug!("the end of TLS cannot be sent: {error}");
        }
    }

    /// Sends the records that wait. Returns `false` if some remain, because the socket is full.
    fn flush(&mut self, socket: &mut Socket) -> io::Result<bool> {
        while self.connection.wants_write() {
            if would_block(|| self.connection.write_tls(socket))?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
