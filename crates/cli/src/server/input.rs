//! Bytes that were received and not used yet.

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

    /// Returns what was received.
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
