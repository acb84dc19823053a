//! Headers and payload lengths from a stream that arrives in pieces.

use crate::error::RequestError;
use crate::request::RequestHeader;

/// Assembles the headers of requests. Between two headers, [`payload`](Self::payload) bytes belong
/// to the program, which takes them from the stream itself, into memory of its choice, and reports
/// them with [`take_payload`](Self::take_payload).
///
/// ```
/// use pinfold_nbd::{Command, RequestHeader, RequestReader};
///
/// # fn main() -> Result<(), pinfold_nbd::RequestError> {
/// let header = RequestHeader { command: Command::WRITE, length: 512, ..RequestHeader::default() };
/// let bytes = header.to_bytes();
/// let mut reader = RequestReader::new();
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

    /// Creates a reader at the start of a header.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes of `input` up to the end of a header; returns how many, and the header if it is
    /// complete. Takes none while a [`payload`](Self::payload) is due. O(1).
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

    /// Returns whether the stream may end here: between two requests.
    pub fn is_between_requests(&self) -> bool {
        self.filled == 0 && self.payload == 0
    }
}
