//! Replies that wait to be sent.

use super::stream::Stream;
use pinfold::Buffer;
use std::collections::VecDeque;
use std::io::{self, IoSlice};

/// The most parts of one system call.
const PARTS: usize = 64;

/// A part of a reply.
pub(crate) enum Part {
    /// A header, or a reply without a payload.
    Bytes(Vec<u8>),
    /// A header of fixed length.
    Header([u8; 28], usize),
    /// A payload: the first `len` bytes of a buffer that the target has filled.
    Payload {
        /// The buffer.
        buffer: Buffer,
        /// How many of its bytes.
        len: usize,
    },
}

impl Part {
    /// Returns a header of at most 28 bytes.
    pub(crate) fn header(bytes: &[u8]) -> Self {
        let mut header = [0; 28];
        let len = bytes.len().min(header.len());
        header.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        Self::Header(header, len)
    }

    fn bytes(&mut self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Header(bytes, len) => bytes.get(..*len).unwrap_or_default(),
            // The arena is mapped per use, so the slice is available.
            Self::Payload { buffer, len } => {
                buffer.as_slice().ok().and_then(|bytes| bytes.get(..*len)).unwrap_or_default()
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Header(_, len) | Self::Payload { len, .. } => *len,
        }
    }
}

/// Replies in the order in which they are sent.
#[derive(Default)]
pub(crate) struct Outgoing {
    parts: VecDeque<Part>,
    /// How much of the first one is sent.
    sent: usize,
}

impl Outgoing {
    /// Appends a part.
    pub(crate) fn push(&mut self, part: Part) {
        if part.len() > 0 {
            self.parts.push_back(part);
        }
    }

    /// Returns how many parts wait.
    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    /// Returns whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Sends what the socket takes in one call, and passes the buffers of what is sent to `free`. Returns the number of bytes, or
    /// `None` if the socket is full.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn send(
        &mut self,
        stream: &mut Stream,
        mut free: impl FnMut(Buffer, usize),
    ) -> io::Result<Option<usize>> {
        let mut slices = [IoSlice::new(&[]); PARTS];
        let mut skip = self.sent;
        let mut count = 0;
        for (slice, part) in slices.iter_mut().zip(&mut self.parts) {
            *slice = IoSlice::new(part.bytes().get(skip..).unwrap_or_default());
            skip = 0;
            count += 1;
        }
        let Some(sent) = stream.send(slices.get(..count).unwrap_or_default())? else { return Ok(None) };
        self.sent += sent;
        while let Some(part) = self.parts.pop_front_if(|part| part.len() <= self.sent) {
            self.sent -= part.len();
            if let Part::Payload { buffer, len } = part {
                free(buffer, len);
            }
        }
        Ok(Some(sent))
    }

    /// Discards everything, and passes the buffers to `free`.
    pub(crate) fn clear(&mut self, mut free: impl FnMut(Buffer)) {
        self.sent = 0;
        for part in self.parts.drain(..) {
            if let Part::Payload { buffer, .. } = part {
                free(buffer);
            }
        }
    }
}
