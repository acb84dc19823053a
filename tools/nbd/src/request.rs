//! Requests: the header on the wire, a request that has been checked, and headers and payload
//! lengths from a stream that arrives in pieces.

use crate::protocol::{CommandFlags, REQUEST_MAGIC};

/// A request that cannot be skipped: close the connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A request without its magic number: what follows cannot be told from requests.
    #[error("a request starts with {found:#x} instead of {:#x}", crate::protocol::REQUEST_MAGIC)]
    Magic {
        /// The value found.
        found: u32,
    },
    /// A payload that is too long even to discard.
    #[error("a request announces a payload of {length} bytes; at most {limit} are received")]
    TooLong {
        /// Its length.
        length: u32,
        /// The limit.
        limit: u32,
    },
}

/// A command as it is on the wire, known or not: "Request types".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Command(pub u16);

impl Command {
    /// `NBD_CMD_READ`.
    pub const READ: Self = Self(0);
    /// `NBD_CMD_WRITE`.
    pub const WRITE: Self = Self(1);
    /// `NBD_CMD_DISC`.
    pub const DISCONNECT: Self = Self(2);
    /// `NBD_CMD_FLUSH`.
    pub const FLUSH: Self = Self(3);
    /// `NBD_CMD_TRIM`.
    pub const TRIM: Self = Self(4);
    /// `NBD_CMD_WRITE_ZEROES`.
    pub const WRITE_ZEROES: Self = Self(6);
    /// `NBD_CMD_BLOCK_STATUS`.
    pub const BLOCK_STATUS: Self = Self(7);
}

/// The header of a request: "Request message".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestHeader {
    /// The command flags.
    pub flags: CommandFlags,
    /// The command.
    pub command: Command,
    /// The identifier by which the reply refers to the request.
    pub cookie: u64,
    /// The first byte of the export.
    pub offset: u64,
    /// The number of bytes.
    pub length: u32,
}

impl RequestHeader {
    /// The number of bytes on the wire.
    pub const BYTES: usize = 28;

    /// Parses a header.
    ///
    /// # Errors
    /// [`RequestError::Magic`].
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, RequestError> {
        let [m0, m1, m2, m3, f0, f1, t0, t1, rest @ ..] = *bytes;
        let [c0, c1, c2, c3, c4, c5, c6, c7, rest @ ..] = rest;
        let [o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3] = rest;
        let found = u32::from_be_bytes([m0, m1, m2, m3]);
        if found != REQUEST_MAGIC {
            return Err(RequestError::Magic { found });
        }
        Ok(Self {
            flags: CommandFlags::from_bits_retain(u16::from_be_bytes([f0, f1])),
            command: Command(u16::from_be_bytes([t0, t1])),
            cookie: u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            offset: u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }

    /// Returns the header as it is on the wire, for clients.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let fields = REQUEST_MAGIC.to_be_bytes().into_iter();
        let fields =
            fields.chain(self.flags.bits().to_be_bytes()).chain(self.command.0.to_be_bytes());
        let fields = fields.chain(self.cookie.to_be_bytes()).chain(self.offset.to_be_bytes());
        for (byte, field) in bytes.iter_mut().zip(fields.chain(self.length.to_be_bytes())) {
            *byte = field;
        }
        bytes
    }

    /// Returns how many bytes of payload follow the header.
    pub fn payload(&self) -> u32 {
        if self.command == Command::WRITE { self.length } else { 0 }
    }
}

/// The operation of a checked request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Reads.
    Read,
    /// Writes the payload that follows.
    Write,
    /// Ends the connection after the replies to earlier requests; it has no reply.
    Disconnect,
    /// Makes completed writes durable.
    Flush,
    /// Discards a range.
    Trim,
    /// Zeroes a range.
    WriteZeroes {
        /// Whether it may become a hole.
        may_trim: bool,
    },
    /// Reports which parts of a range are allocated.
    BlockStatus {
        /// Whether one extent is requested.
        one: bool,
    },
}

/// A request that [`Export::check`](crate::Export::check) has accepted: its range is inside the
/// export, and empty at 0 for an operation that has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The operation.
    pub operation: Operation,
    /// Whether its effect is durable before the reply.
    pub fua: bool,
    /// Whether the data of a read has to be in one chunk (`NBD_CMD_FLAG_DF`).
    pub whole: bool,
    /// The identifier by which the reply refers to the request.
    pub cookie: u64,
    /// The first byte, a multiple of the minimum block size.
    pub offset: u64,
    /// The number of bytes, likewise; 0 is possible.
    pub length: u32,
}

/// Assembles the headers of requests, from the start of one. Between two headers,
/// [`payload`](Self::payload) bytes belong to the program, which takes them from the stream itself,
/// into memory of its choice, and reports them with [`take_payload`](Self::take_payload).
///
/// ```
/// use pinfold_nbd::{Command, RequestHeader, RequestReader};
///
/// # fn main() -> Result<(), pinfold_nbd::RequestError> {
/// let header = RequestHeader { command: Command::WRITE, length: 512, ..RequestHeader::default() };
/// let bytes = header.to_bytes();
/// let mut reader = RequestReader::default();
/// assert_eq!(reader.read(&bytes[..10])?, (10, None));
/// assert_eq!(reader.read(&bytes[10..])?, (18, Some(header)));
/// assert_eq!(reader.payload(), 512);
/// reader.take_payload(512);
/// assert_eq!(reader.missing(), 28);
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct RequestReader {
    header: [u8; RequestHeader::BYTES],
    filled: usize,
    payload: u32,
}

impl RequestReader {
    /// The longest payload that a client may send: twice the longest that it may expect to be
    /// accepted ("Block size constraints"), so that a request which is somewhat too long is refused
    /// and not its client.
    pub const MAX_PAYLOAD: u32 = 64 << 20;

    /// Consumes bytes of `input` up to the end of a header; returns how many, and the header if it
    /// is complete. Consumes none while a [`payload`](Self::payload) is due. O(1).
    ///
    /// # Errors
    /// [`RequestError`]; the stream cannot be continued.
    pub fn read(&mut self, input: &[u8]) -> Result<(usize, Option<RequestHeader>), RequestError> {
        if self.payload > 0 {
            return Ok((0, None));
        }
        let space = self.header.get_mut(self.filled..).unwrap_or_default();
        let taken = space.len().min(input.len());
        for (to, from) in space.iter_mut().zip(input) {
            *to = *from;
        }
        self.filled += taken;
        if self.filled < RequestHeader::BYTES {
            return Ok((taken, None));
        }
        self.filled = 0;
        let header = RequestHeader::parse(&self.header)?;
        let (length, limit) = (header.payload(), Self::MAX_PAYLOAD);
        if length > limit {
            return Err(RequestError::TooLong { length, limit });
        }
        self.payload = length;
        Ok((taken, Some(header)))
    }

    /// Returns how many bytes of payload are due before the next header.
    pub fn payload(&self) -> u32 {
        self.payload
    }

    /// Counts bytes of payload that the program has taken from the stream, at most those that are
    /// due.
    pub fn take_payload(&mut self, bytes: u32) {
        self.payload = self.payload.saturating_sub(bytes);
    }

    /// Returns how many bytes complete the header: receiving no more keeps payloads out of the
    /// program's buffer for headers.
    pub fn missing(&self) -> usize {
        RequestHeader::BYTES - self.filled
    }
}
