//! Blocks in memory, which is allocated when it is first written.

use crate::media::medium::{Media, MediaError, ReadSink, WriteSource, check};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

const CHUNK: u64 = 2 << 20;
const CHUNK_BYTES: usize = 2 << 20;
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

type Chunk = Mutex<Option<Box<[u8]>>>;

/// Memory in chunks of 2 MiB, each allocated when it is first written. Unwritten blocks read as
/// zeroes.
pub struct MemoryMedia {
    chunks: Box<[Chunk]>,
    bytes: u64,
}

impl fmt::Debug for MemoryMedia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryMedia").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl MemoryMedia {
    /// Creates a medium of `bytes` bytes without allocating them; the cost is 40 bytes per 2 MiB.
    pub fn new(bytes: u64) -> Self {
        let chunks = (0..bytes.div_ceil(CHUNK)).map(|_| Mutex::new(None)).collect();
        Self { chunks, bytes }
    }

    /// Returns the number of bytes allocated.
    pub fn allocated_bytes(&self) -> u64 {
        self.chunks.iter().filter(|chunk| lock(chunk).is_some()).count() as u64 * CHUNK
    }

    /// Calls `f` with each chunk of `at..at + len`, the offset in it, and the length.
    fn each<E>(
        &self,
        at: u64,
        len: u64,
        mut f: impl FnMut(&Chunk, usize, usize) -> Result<(), E>,
    ) -> Result<(), E>
    where
        E: From<MediaError>,
    {
        check(at, len, self.bytes)?;
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let from = at % CHUNK;
            let piece = left.min(CHUNK - from);
            // Inside by `check`; both numbers are at most 2 MiB.
            if let (Some(chunk), Ok(from), Ok(piece)) = (
                usize::try_from(at / CHUNK).ok().and_then(|i| self.chunks.get(i)),
                usize::try_from(from),
                usize::try_from(piece),
            ) {
                f(chunk, from, piece)?;
            }
            at += piece;
            left -= piece;
        }
        Ok(())
    }
}

/// Locks a chunk. After a panic it is partly written at worst, as by a torn write.
fn lock(chunk: &Chunk) -> MutexGuard<'_, Option<Box<[u8]>>> {
    chunk.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Media for MemoryMedia {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, at: u64, len: usize, sink: &mut ReadSink<'_>) -> Result<(), MediaError> {
        self.each(at, len as u64, |chunk, from, piece| {
            match lock(chunk).as_deref().and_then(|bytes| bytes.get(from..from + piece)) {
                Some(bytes) => Ok(sink(bytes)?),
                None => {
                    let mut left = piece;
                    while left > 0 {
                        let zeroes = ZEROES.get(..left).unwrap_or(&ZEROES);
                        sink(zeroes)?;
                        left -= zeroes.len();
                    }
                    Ok(())
                }
            }
        })
    }

    fn write(&self, at: u64, len: usize, source: &mut WriteSource<'_>) -> Result<(), MediaError> {
        self.each(at, len as u64, |chunk, from, piece| {
            let mut chunk = lock(chunk);
            let bytes = chunk.get_or_insert_with(|| vec![0; CHUNK_BYTES].into_boxed_slice());
            match bytes.get_mut(from..from + piece) {
                Some(bytes) => Ok(source(bytes)?),
                None => Ok(()),
            }
        })
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), MediaError> {
        self.each(at, len, |chunk, from, piece| {
            let mut chunk = lock(chunk);
            if piece == CHUNK_BYTES {
                *chunk = None;
            } else if let Some(bytes) =
                chunk.as_mut().and_then(|bytes| bytes.get_mut(from..from + piece))
            {
                bytes.fill(0);
            }
            Ok(())
        })
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_chunks_are_allocated_and_others_read_as_zeroes() {
        let media = MemoryMedia::new(5 << 20);
        assert_eq!(media.allocated_bytes(), 0);
        let at = CHUNK - 3;
        media
            .write(at, 6, &mut |to| {
                let _: () = to.fill(7);
                Ok(())
            })
            .unwrap();
        assert_eq!(media.allocated_bytes(), 2 * CHUNK);
        let mut seen = Vec::new();
        media
            .read(at - 1, 8, &mut |from| {
                let _: () = seen.extend_from_slice(from);
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, [0, 7, 7, 7, 7, 7, 7, 0]);
        media.discard(0, CHUNK).unwrap();
        assert_eq!(media.allocated_bytes(), CHUNK);
        media.discard(CHUNK, 1).unwrap();
        seen.clear();
        media
            .read(at, 6, &mut |from| {
                let _: () = seen.extend_from_slice(from);
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, [0, 0, 0, 0, 7, 7]);
        assert!(media.read(5 << 20, 1, &mut |_| Ok(())).is_err());
        assert!(media.discard(u64::MAX, 2).is_err());
    }
}
