//! Requests: the header on the wire, and a request that has been checked.

use crate::error::RequestError;
use crate::protocol::{CommandFlags, REQUEST_MAGIC};

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
    /// What the reply refers to the request by.
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

/// What a checked request does.
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
    /// What the reply refers to the request by.
    pub cookie: u64,
    /// The first byte, a multiple of the minimum block size.
    pub offset: u64,
    /// The number of bytes, likewise; 0 is possible.
    pub length: u32,
}
