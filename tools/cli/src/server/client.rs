//! A client for tests, with simple replies; the tests of the built program include this file as
//! well.

use pinfold_nbd::reply::ReplyHeader;
use pinfold_nbd::{Command, ErrorNumber, RequestHeader};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A client that has chosen the default export.
pub(crate) struct Client<S = UnixStream>(pub(crate) S);

impl Client<UnixStream> {
    /// Negotiates over a new connection. Returns the client and the size of the export.
    pub(crate) fn greet(stream: UnixStream) -> (Self, u64) {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self::negotiate(stream)
    }
}

impl<S: Read + Write> Client<S> {
    /// Negotiates over a new connection. Returns the client and the size of the export.
    pub(crate) fn negotiate(mut stream: S) -> (Self, u64) {
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        let (mut greeting, mut size, mut flags) = ([0; 18], [0; 8], [0; 2]);
        stream.read_exact(&mut greeting).unwrap();
        stream.read_exact(&mut size).unwrap();
        stream.read_exact(&mut flags).unwrap();
        (Self(stream), u64::from_be_bytes(size))
    }

    /// Sends the header of a request.
    pub(crate) fn send(&mut self, command: Command, cookie: u64, offset: u64, length: u32) {
        let header = RequestHeader { command, cookie, offset, length, ..RequestHeader::default() };
        self.0.write_all(&header.to_bytes()).unwrap();
    }

    /// Returns the next reply: its cookie and its error.
    pub(crate) fn reply(&mut self) -> (u64, Option<ErrorNumber>) {
        let mut header = [0; 16];
        self.0.read_exact(&mut header).unwrap();
        match ReplyHeader::parse(&header).unwrap().unwrap().0 {
            ReplyHeader::Simple { error, cookie } => (cookie, error),
            chunk => panic!("{chunk:?}"),
        }
    }

    /// Reads, and returns the bytes or the error, which has none.
    pub(crate) fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, ErrorNumber> {
        self.send(Command::READ, 9, offset, length);
        match self.reply() {
            (9, None) => {
                let mut bytes = vec![0xee; length as usize];
                self.0.read_exact(&mut bytes).unwrap();
                Ok(bytes)
            }
            (9, Some(error)) => Err(error),
            other => panic!("{other:?}"),
        }
    }
}
