//! Replies that wait to be sent.

use super::payload::Key;
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
        /// The number of its bytes.
        len: usize,
        /// The operation that reads its next part into the buffer.
        of: Option<Key>,
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
            Self::Payload { buffer, len, .. } => {
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
    /// The part of the first one that is sent.
    sent: usize,
    /// Parts that wait until the reply before them is complete.
    behind: Option<Vec<Part>>,
}

impl Outgoing {
    /// Appends a part.
    pub(crate) fn push(&mut self, part: Part) {
        match &mut self.behind {
            _ if part.len() == 0 => {}
            Some(behind) => behind.push(part),
            None => self.parts.push_back(part),
        }
    }

    /// Appends a part to the reply that the others wait for.
    pub(crate) fn push_first(&mut self, part: Part) {
        self.parts.push_back(part);
    }

    /// Holds further parts back until the present reply is complete, all of whose parts come by
    /// [`push_first`](Self::push_first).
    pub(crate) fn hold_back(&mut self) {
        self.behind.get_or_insert_default();
    }

    /// Records that the present reply is complete.
    pub(crate) fn release(&mut self) {
        self.parts.extend(self.behind.take().into_iter().flatten());
    }

    /// Returns how many parts wait.
    pub(crate) fn len(&self) -> usize {
        self.parts.len() + self.behind.as_ref().map_or(0, Vec::len)
    }

    /// Returns whether there is nothing to be sent now.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Sends as much as the socket takes in one call, and passes the buffers of sent data to
    /// `free`.
    /// Returns the number of bytes, or `None` if the socket is full.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn send(
        &mut self,
        stream: &mut Stream,
        mut free: impl FnMut(Buffer, usize, Option<Key>),
    ) -> io::Result<Option<usize>> {
        let mut slices = [IoSlice::new(&[]); PARTS];
        let mut skip = self.sent;
        let mut count = 0;
        for (slice, part) in slices.iter_mut().zip(&mut self.parts) {
            *slice = IoSlice::new(part.bytes().get(skip..).unwrap_or_default());
            skip = 0;
            count += 1;
        }
        let Some(sent) = stream.send(slices.get(..count).unwrap_or_default())? else {
            return Ok(None);
        };
        self.sent += sent;
        while let Some(part) = self.parts.pop_front_if(|part| part.len() <= self.sent) {
            self.sent -= part.len();
            if let Part::Payload { buffer, len, of } = part {
                free(buffer, len, of);
            }
        }
        Ok(Some(sent))
    }

    /// Discards everything, and passes the buffers to `free`.
    pub(crate) fn clear(&mut self, mut free: impl FnMut(Buffer)) {
        self.sent = 0;
        for part in self.parts.drain(..).chain(self.behind.take().into_iter().flatten()) {
            if let Part::Payload { buffer, .. } = part {
                free(buffer);
            }
        }
    }
}
