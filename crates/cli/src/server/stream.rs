//! A client's socket.

use rustix::net::sockopt::{set_socket_keepalive, set_socket_send_buffer_size};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// The buffer of a Unix socket, bytes; the kernel doubles it for its own needs, and limits it by `net.core.wmem_max`.
const SEND_BUFFER: usize = 256 << 10;

/// A client's socket, which never blocks.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Takes over a socket that was accepted.
    ///
    /// It gets a larger buffer, since a full Unix socket is writable again only when three quarters of it have been read: the client
    /// must have enough left to read until the server runs. TCP chooses its own.
    pub(crate) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        set_socket_send_buffer_size(&stream, SEND_BUFFER)?;
        Ok(Self::Unix(stream))
    }

    /// Takes over a socket that was accepted. Replies are sent in as few calls as possible, so nothing is gained from delaying
    /// small segments.
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A client whose machine is gone must not have its place for ever.
        set_socket_keepalive(&stream, true)?;
        Ok(Self::Tcp(stream))
    }

    /// Receives what has arrived: `Ok(None)` if that is nothing, `Ok(Some(0))` at the end.
    pub(crate) fn receive(&mut self, to: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        would_block(|| match self {
            Self::Unix(stream) => stream.read_vectored(to),
            Self::Tcp(stream) => stream.read_vectored(to),
        })
    }

    /// Sends as much as fits: `Ok(None)` if that is nothing.
    pub(crate) fn send(&mut self, from: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        would_block(|| match self {
            Self::Unix(stream) => stream.write_vectored(from),
            Self::Tcp(stream) => stream.write_vectored(from),
        })
    }

    /// Receives and forgets what has arrived, at most 64 MiB, before the socket is closed: TCP resets a connection that is closed
    /// with input unread, and drops what is still being sent. A Unix socket has delivered that already.
    pub(crate) fn discard(&mut self, scratch: &mut [u8]) {
        if matches!(self, Self::Unix(_)) {
            return;
        }
        let mut left = 64_usize << 20;
        while let Ok(Some(received)) = self.receive(&mut [IoSliceMut::new(scratch)])
            && received > 0
            && left > 0
        {
            left = left.saturating_sub(received);
        }
    }
}

fn would_block(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        return match call() {
            Ok(moved) => Ok(Some(moved)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn what_was_sent_arrives_although_input_was_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut stream = Stream::tcp(listener.accept().unwrap().0).unwrap();
        client.write_all(&[1; 100_000]).unwrap();
        // More than the client's socket takes, so that a part waits at this end.
        let (mut sent, piece) = (0, vec![2; 1 << 20]);
        while let Some(moved) = stream.send(&[IoSlice::new(&piece)]).unwrap() {
            sent += moved;
        }
        stream.discard(&mut [0; 4096]);
        drop(stream);
        let mut arrived = Vec::new();
        client.read_to_end(&mut arrived).unwrap();
        assert_eq!(arrived.len(), sent);
    }
}
