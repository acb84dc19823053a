//! Clients' sockets, of either kind, with TLS on them or without, and received data.

use super::error::ServeError;
use rustix::net::sockopt::{set_socket_keepalive, set_socket_send_buffer_size};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

/// The buffer of a Unix socket, bytes; the kernel doubles it for its own needs, and limits it by
/// `net.core.wmem_max`.
const SEND_BUFFER: usize = 256 << 10;

/// A client's socket, which never blocks, and TLS on it where it has begun.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: Socket,
    tls: Option<Box<Tls>>,
}

impl Stream {
    /// Takes over a socket that was accepted.
    ///
    /// It gets a larger buffer, since a full Unix socket is writable again only when three quarters
    /// of it have been read: the client must have enough left to read until the server runs. TCP
    /// chooses its own.
    pub(crate) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        set_socket_send_buffer_size(&stream, SEND_BUFFER)?;
        Ok(Self { socket: Socket::Unix(stream), tls: None })
    }

    /// Takes over a socket that was accepted. Replies are sent in as few calls as possible, so
    /// nothing is gained from delaying small segments.
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A client whose machine is gone must not have its place for ever.
        set_socket_keepalive(&stream, true)?;
        Ok(Self { socket: Socket::Tcp(stream), tls: None })
    }

    /// Receives and sends inside TLS from now on. All earlier replies must be in the socket, and no
    /// later input taken out of it.
    pub(super) fn start_tls(&mut self, config: &Arc<ServerConfig>) -> io::Result<()> {
        self.tls = Some(Box::new(Tls::new(config)?));
        Ok(())
    }

    /// Receives what has arrived: `Ok(None)` if that is nothing, `Ok(Some(0))` at the end. Less
    /// than there is space for means that nothing more had arrived.
    pub(crate) fn receive(&mut self, to: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        match &mut self.tls {
            Some(tls) => tls.receive(&mut self.socket, to),
            None => would_block(|| self.socket.read_vectored(to)),
        }
    }

    /// Sends as much as fits: `Ok(None)` if that is nothing.
    pub(crate) fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        match &mut self.tls {
            Some(tls) => tls.send(&mut self.socket, from),
            None => would_block(|| self.socket.write_vectored(from)),
        }
    }

    /// Returns whether some of what was sent is still in here: the next [`send`](Self::send), of
    /// nothing if need be, goes on.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Returns whether [`receive`](Self::receive) may have more without another event.
    pub(super) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_more())
    }

    /// Returns what was received since the last call beyond what the client has got for it, bytes:
    /// TLS costs time for each record.
    pub(super) fn take_work(&mut self) -> usize {
        self.tls.as_mut().map_or(0, |tls| tls.take_work())
    }

    /// Prepares for the socket to be closed: tells a client with TLS, then receives and forgets
    /// what has arrived, at most 64 MiB. TCP resets a connection that is closed with input unread,
    /// and drops what is still being sent; a Unix socket delivers that, and then reports the same
    /// error in place of the end.
    pub(crate) fn end(&mut self, scratch: &mut [u8]) {
        if let Some(tls) = &mut self.tls {
            tls.end(&mut self.socket);
        }
        self.socket.refuse_input();
        let mut left = 64_usize << 20;
        while let Ok(Some(received)) = would_block(|| self.socket.read(scratch))
            && received > 0
            && left > 0
        {
            left = left.saturating_sub(received);
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

// A client's socket, of either kind.

/// A client's socket, of either kind.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    /// Lets the client's next sends fail, where that is possible without losing what it has not
    /// received.
    pub(super) fn refuse_input(&self) {
        if let Self::Unix(stream) = self
            && let Err(error) = stream.shutdown(Shutdown::Read)
        {
            tracing::debug!("shutdown: {error}");
        }
    }
}

impl Read for Socket {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(to),
            Self::Tcp(stream) => stream.read(to),
        }
    }

    fn read_vectored(&mut self, to: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read_vectored(to),
            Self::Tcp(stream) => stream.read_vectored(to),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(from),
            Self::Tcp(stream) => stream.write(from),
        }
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write_vectored(from),
            Self::Tcp(stream) => stream.write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// Calls until a signal does not interrupt it. `None` if it would block.
pub(super) fn would_block(
    mut call: impl FnMut() -> io::Result<usize>,
) -> io::Result<Option<usize>> {
    loop {
        return match call() {
            Ok(moved) => Ok(Some(moved)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
    }
}

// TLS of a connection, by the library rustls: what arrives is decrypted and copied into payload
// memory, replies are encrypted from it.

/// The bytes that one call receives: two records of the greatest length.
const RECORDS: usize = 33 << 10;
/// The most bytes that may arrive beyond a multiple of the client's own: far more than a handshake
/// has.
const MOST_OVERHEAD: usize = 1 << 20;
/// The multiple: a header of 28 bytes in a record of its own has less.
const OVERHEAD_EACH: usize = 4;
/// The number of times that one call takes records, of which the library takes 4 KiB at a time:
/// small ones take long.
const MOST_TAKEN: usize = 16;
/// The share of the budget that this costs.
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
    /// The error that the next call reports: the last one had bytes to return.
    failed: Option<io::Error>,
    /// The share of the budget that was spent on records.
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
    /// see [`has_more`](Self::has_more). Bytes that are not TLS are an error of the kind
    /// `InvalidData`.
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
                    // The end comes after the moved data.
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

    /// Returns the share of the budget that was spent on records since the last call.
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

// Bytes that were received and not used yet.

/// Bytes that were received and not used yet.
#[derive(Debug)]
pub(super) struct Input {
    bytes: Box<[u8]>,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Input {
    /// Creates space for `capacity` bytes.
    pub(super) fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Returns the received data.
    pub(super) fn unused(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    /// Counts bytes as used.
    pub(super) fn take(&mut self, used: usize) {
        self.start = (self.start + used).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Returns space for at most `limit` bytes. Everything received before must have been used.
    pub(super) fn space(&mut self, limit: usize) -> &mut [u8] {
        (self.start, self.end) = (0, 0);
        let limit = limit.min(self.bytes.len());
        self.bytes.get_mut(..limit).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Sends more than a client's socket takes, so that a part waits at this end, and closes with
    /// input unread.
    fn sent_bytes_arrive(mut client: impl Read + Write, mut stream: Stream) {
        client.write_all(&[1; 100_000]).unwrap();
        let (mut sent, piece) = (0, vec![2; 1 << 20]);
        while let Some(moved) = stream.send(&[IoSlice::new(&piece)]).unwrap() {
            sent += moved;
        }
        stream.end(&mut [0; 4096]);
        drop(stream);
        let mut arrived = Vec::new();
        client.read_to_end(&mut arrived).unwrap();
        assert_eq!(arrived.len(), sent);
    }

    #[test]
    fn sent_bytes_arrive_although_input_was_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sent_bytes_arrive(client, Stream::tcp(listener.accept().unwrap().0).unwrap());
        let (client, ours) = UnixStream::pair().unwrap();
        sent_bytes_arrive(client, Stream::unix(ours).unwrap());
    }
}
