//! The SHA-256 of what a target holds, read with many requests in flight and hashed in order.

use super::pump::Plan;
use super::worker::{EngineError, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::target::{Completion, DataBuffer, IoDirection, Target, TargetError};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hash([u8; 32]);

impl From<Sha256> for Hash {
    fn from(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl serde::Serialize for Hash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The number of bytes copied out of a buffer at a time: they stay in the processor's cache while
/// they are hashed.
const CHUNK: usize = 64 << 10;

/// Returns the SHA-256 of the first `plan.total` bytes of `target`. The buffers are in `buffers`
/// again when this returns, except those that had to be quarantined.
pub(crate) fn digest<B: DataBuffer>(
    target: &mut dyn Target<B>,
    plan: Plan,
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Hash, EngineError> {
    let mut reader = Reader {
        worker: Worker::new(target, buffers.len()),
        idle: std::mem::take(buffers),
        early: BTreeMap::new(),
        plan,
    };
    let result = reader.hash(progress, interrupt);
    reader.worker.drain(buffers);
    buffers.extend(reader.early.into_values().filter_map(|read| read.buffer));
    buffers.append(&mut reader.idle);
    result
}

struct Reader<'t, B> {
    worker: Worker<'t, B>,
    idle: Vec<B>,
    /// Completed reads by offset, until those before them have been hashed.
    early: BTreeMap<u64, Completion<B>>,
    plan: Plan,
}

impl<B: DataBuffer> Reader<'_, B> {
    fn hash(&mut self, progress: &Progress, interrupt: &Interrupt) -> Result<Hash, EngineError> {
        let Plan { total, block } = self.plan;
        let mut hasher = Sha256::new();
        let mut chunk = vec![0; CHUNK];
        let (mut requested, mut hashed) = (0, 0);
        while hashed < total {
            if interrupt.is_raised() {
                return Err(EngineError::Interrupted);
            }
            while requested < total {
                let Some(buffer) = self.idle.pop() else { break };
                let len = usize::try_from(total - requested).unwrap_or(usize::MAX).min(block);
                self.worker.submit(IoDirection::Read, requested, len, buffer).map_err(
                    |rejected| {
                        self.idle.extend(rejected.buffer);
                        EngineError::from(rejected.error)
                    },
                )?;
                requested += len as u64;
            }
            if self.worker.in_flight() == 0 && !self.early.contains_key(&hashed) {
                return Err(EngineError::NoBuffers);
            }
            let early = &mut self.early;
            self.worker.collect(true, |read| drop(early.insert(read.io.offset, read)))?;
            while let Some(Completion { io, buffer, result }) = self.early.remove(&hashed) {
                let got = result.map_err(EngineError::from);
                let Some(buffer) = buffer else {
                    return Err(got.err().unwrap_or(EngineError::NoBuffers));
                };
                let updated = got.and_then(|got| {
                    if got < io.len {
                        let (name, at) = (self.worker.info().name.clone(), io.offset + got as u64);
                        return Err(EngineError::SourceEnded { name, at, expected: total });
                    }
                    Ok(update(&mut hasher, &buffer, io.len, &mut chunk)?)
                });
                self.idle.push(buffer);
                updated?;
                hashed += io.len as u64;
                progress.add(io.len as u64);
            }
        }
        Ok(hasher.into())
    }
}

fn update<B: DataBuffer>(
    hasher: &mut Sha256,
    buffer: &B,
    len: usize,
    chunk: &mut [u8],
) -> Result<(), TargetError> {
    let mut at = 0;
    while at < len {
        let part_len = chunk.len().min(len - at);
        let part = chunk.get_mut(..part_len).unwrap_or_default();
        buffer.read_at(at, part)?;
        hasher.update(&*part);
        at += part_len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::fake::{Fake, Fault};

    fn of(
        target: &mut Fake,
        total: u64,
        block: usize,
        buffers: &mut Vec<Vec<u8>>,
    ) -> Result<Hash, EngineError> {
        digest(target, Plan { total, block }, buffers, &Progress::hidden(), &Interrupt::default())
    }

    #[test]
    fn the_bytes_are_hashed_in_order() {
        for len in [0usize, 1, 512, 4097, 300_001] {
            let data: Vec<u8> = (0u8..=250).cycle().take(len).collect();
            let expected = Hash(Sha256::digest(&data).into());
            for (block, depth) in [(512, 5), (4096, 1), (131_072, 8)] {
                let mut buffers = vec![vec![0; block]; depth];
                let got =
                    of(&mut Fake::new(data.clone(), 1), len as u64, block, &mut buffers).unwrap();
                assert_eq!(got, expected);
                assert_eq!(buffers.len(), depth);
            }
        }
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let hash = of(&mut Fake::new(vec![], 1), 0, 512, &mut Vec::new()).unwrap();
        assert_eq!(hash.to_string(), empty);
    }

    #[test]
    fn a_failure_returns_the_buffers() {
        for fault in [Fault::Fail, Fault::Reject, Fault::Quarantine] {
            for at in [1, 4, 20] {
                let mut target = Fake::new(vec![1; 20 * 512], 512);
                target.fault = Some((at, fault));
                let mut buffers = vec![vec![0; 512]; 4];
                let error = of(&mut target, 20 * 512, 512, &mut buffers).unwrap_err();
                assert!(matches!(error, EngineError::Target(_)), "{fault:?} {at}: {error:?}");
                assert_eq!(
                    buffers.len(),
                    4 - usize::from(fault == Fault::Quarantine),
                    "{fault:?} {at}"
                );
            }
        }
        let mut target = Fake::new(vec![1; 1000], 1);
        target.shrink = Some((1, 700));
        let error = of(&mut target, 1000, 512, &mut vec![vec![0; 512]; 1]).unwrap_err();
        assert!(matches!(error, EngineError::SourceEnded { at: 700, .. }), "{error:?}");
    }
}
