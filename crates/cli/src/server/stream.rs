//! A client's socket.

use super::socket::{Socket, would_block};
use super::tls::Tls;
use rustix::net::sockopt::{set_socket_keepalive, set_socket_send_buffer_size};
use rustls::ServerConfig;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Sends more than a client's socket takes, so that a part waits at this end, and closes with
    /// input unread.
    fn what_was_sent_arrives(mut client: impl Read + Write, mut stream: Stream) {
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
    fn what_was_sent_arrives_although_input_was_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        what_was_sent_arrives(client, Stream::tcp(listener.accept().unwrap().0).unwrap());
        let (client, ours) = UnixStream::pair().unwrap();
        what_was_sent_arrives(client, Stream::unix(ours).unwrap());
    }
}
