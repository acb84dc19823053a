//! Replies to requests: "Simple reply message", "Structured reply chunk message".
//!
//! ```
//! use pinfold_nbd::reply::{self, ReplyHeader};
//!
//! let header = reply::offset_data(7, 4096, 512); // the payload of 512 bytes follows
//! let (parsed, used) = ReplyHeader::parse(&header).unwrap().unwrap();
//! let kind = reply::chunk::OFFSET_DATA;
//! assert_eq!(parsed, ReplyHeader::Chunk { done: true, kind, cookie: 7, length: 8 + 512 });
//! assert_eq!(used, 20); // then the offset, in 8 bytes
//! ```

use crate::handshake::Fields;
use crate::protocol::{
    BASE_ALLOCATION_ID, ErrorNumber, ExtentFlags, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
};

/// The types of chunks: "Structured reply types".
pub mod chunk {
    /// `NBD_REPLY_TYPE_NONE`: success without a payload.
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`.
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`.
    pub const BLOCK_STATUS: u16 = 5;
    /// `NBD_REPLY_TYPE_ERROR`.
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// The bytes of a simple reply's header.
pub const SIMPLE_BYTES: usize = 16;
/// The bytes of a chunk's header.
pub const CHUNK_BYTES: usize = 20;
/// `NBD_REPLY_FLAG_DONE`: the chunk is the last one of its reply.
const DONE: u16 = 1;

/// Returns a simple reply; the data of a successful read follows it.
pub fn simple(error: Option<ErrorNumber>, cookie: u64) -> [u8; SIMPLE_BYTES] {
    let mut bytes = [0; SIMPLE_BYTES];
    let fields = SIMPLE_REPLY_MAGIC.to_be_bytes().into_iter();
    let fields =
        fields.chain(error.map_or(0, ErrorNumber::get).to_be_bytes()).chain(cookie.to_be_bytes());
    fill(&mut bytes, fields);
    bytes
}

/// Returns the last chunk of a successful reply without a payload.
pub fn none(cookie: u64) -> [u8; CHUNK_BYTES] {
    let mut bytes = [0; CHUNK_BYTES];
    fill(&mut bytes, header(chunk::NONE, cookie, 0));
    bytes
}

/// Returns the header of the only chunk of a read's reply; `length` bytes, more than 0 and less
/// than 4 GiB - 8, follow it.
pub fn offset_data(cookie: u64, offset: u64, length: u32) -> [u8; CHUNK_BYTES + 8] {
    let mut bytes = [0; CHUNK_BYTES + 8];
    let header = header(chunk::OFFSET_DATA, cookie, length.saturating_add(8));
    fill(&mut bytes, header.chain(offset.to_be_bytes()));
    bytes
}

/// Returns the header of a chunk with a part of a read's data, which others follow: at last
/// [`none`], or [`error`] for the read as a whole. `length` bytes as for [`offset_data`].
pub fn part_data(cookie: u64, offset: u64, length: u32) -> [u8; CHUNK_BYTES + 8] {
    let mut bytes = offset_data(cookie, offset, length);
    // The flags: not the last one.
    let [_, _, _, _, high, low, ..] = &mut bytes;
    (*high, *low) = (0, 0);
    bytes
}

/// Returns the last chunk of a reply that reports an error, without a message.
pub fn error(error: ErrorNumber, cookie: u64) -> [u8; CHUNK_BYTES + 6] {
    let mut bytes = [0; CHUNK_BYTES + 6];
    fill(&mut bytes, header(chunk::ERROR, cookie, 6).chain(error.get().to_be_bytes()));
    bytes
}

/// Returns the only chunk of a reply about `base:allocation`: the extents in order, of which there
/// is at least one.
pub fn block_status(cookie: u64, extents: &[(u32, ExtentFlags)]) -> Vec<u8> {
    let length = u32::try_from(4 + 8 * extents.len()).unwrap_or(u32::MAX);
    let mut bytes: Vec<u8> = header(chunk::BLOCK_STATUS, cookie, length).collect();
    bytes.extend(BASE_ALLOCATION_ID.to_be_bytes());
    for (length, flags) in extents {
        bytes.extend(length.to_be_bytes());
        bytes.extend(flags.bits().to_be_bytes());
    }
    bytes
}

fn header(kind: u16, cookie: u64, length: u32) -> impl Iterator<Item = u8> {
    let fields = STRUCTURED_REPLY_MAGIC.to_be_bytes().into_iter();
    let fields =
        fields.chain(DONE.to_be_bytes()).chain(kind.to_be_bytes()).chain(cookie.to_be_bytes());
    fields.chain(length.to_be_bytes())
}

fn fill(bytes: &mut [u8], fields: impl Iterator<Item = u8>) {
    for (byte, field) in bytes.iter_mut().zip(fields) {
        *byte = field;
    }
}

/// The header of a reply, as a client parses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyHeader {
    /// A simple reply.
    Simple {
        /// The error, if there is one.
        error: Option<ErrorNumber>,
        /// The request's cookie.
        cookie: u64,
    },
    /// A chunk of a structured reply.
    Chunk {
        /// Whether it is the last one of its reply.
        done: bool,
        /// One of [`chunk`].
        kind: u16,
        /// The request's cookie.
        cookie: u64,
        /// The number of bytes that follow.
        length: u32,
    },
}

impl ReplyHeader {
    /// Parses a header, and returns it with its length; `Ok(None)` if it is incomplete.
    ///
    /// # Errors
    /// The first four bytes, if they start no reply.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, u32> {
        let mut fields = Fields::new(bytes);
        match fields.u32() {
            Some(SIMPLE_REPLY_MAGIC) => {
                let mut simple = || {
                    let error = ErrorNumber::from_number(fields.u32()?);
                    Some((Self::Simple { error, cookie: fields.u64()? }, SIMPLE_BYTES))
                };
                Ok(simple())
            }
            Some(STRUCTURED_REPLY_MAGIC) => {
                let mut chunk = || {
                    let (done, kind) = (fields.u16()? & DONE != 0, fields.u16()?);
                    let (cookie, length) = (fields.u64()?, fields.u32()?);
                    Some((Self::Chunk { done, kind, cookie, length }, CHUNK_BYTES))
                };
                Ok(chunk())
            }
            Some(found) => Err(found),
            None => Ok(None),
        }
    }
}
