//! The SHA-256 of what a target holds, read as it is copied: many requests at a time, looked at in their order.

use super::error::PumpError;
use crate::lane::{Landed, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::{Bytes, IoDirection, Request, Target};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hash([u8; 32]);

impl From<Sha256> for Hash {
    /// Of all that went in.
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

/// How much is copied out of a buffer at a time: it stays in the cache while it is hashed.
const PIECE: usize = 64 << 10;

/// The SHA-256 of the first `total` bytes of `target`, read in pieces of `block` bytes. The buffers are in `buffers`
/// again when this returns, except those that had to be quarantined.
pub(crate) fn digest<B: Bytes>(
    target: &mut dyn Target<B>,
    (total, block): (u64, usize),
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Hash, PumpError> {
    let mut lane = Worker::new(target, buffers.len());
    let mut idle: Vec<_> = buffers.drain(..).enumerate().collect();
    let mut early = BTreeMap::new();
    let result = read_in_order(&mut lane, (total, block), &mut idle, &mut early, progress, interrupt);
    lane.drain(buffers);
    buffers.extend(early.into_values().filter_map(|landed: Landed<B>| landed.buffer));
    buffers.extend(idle.into_iter().map(|(_, buffer)| buffer));
    result
}

fn read_in_order<B: Bytes>(
    lane: &mut Worker<'_, B>,
    (total, block): (u64, usize),
    idle: &mut Vec<(usize, B)>,
    early: &mut BTreeMap<u64, Landed<B>>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Hash, PumpError> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; PIECE];
    let (mut asked, mut hashed) = (0, 0);
    while hashed < total {
        if interrupt.asked() {
            return Err(PumpError::Interrupted);
        }
        while asked < total {
            let Some((slot, buffer)) = idle.pop() else { break };
            let len = usize::try_from(total - asked).unwrap_or(usize::MAX).min(block);
            let request = Request { way: IoDirection::Read, offset: asked, len, slot, buffer };
            lane.submit(request).map_err(|refused| {
                idle.extend(refused.buffer.map(|buffer| (slot, buffer)));
                PumpError::from(refused.error)
            })?;
            asked += len as u64;
        }
        if lane.in_flight() == 0 && !early.contains_key(&hashed) {
            return Err(PumpError::NoBuffers);
        }
        lane.collect(true, |landed| {
            early.insert(landed.offset, landed);
        })?;
        while let Some(landed) = early.remove(&hashed) {
            let Landed { slot, offset, len, buffer, result, .. } = landed;
            let got = result.map_err(PumpError::from);
            let Some(buffer) = buffer else { return Err(got.err().unwrap_or(PumpError::NoBuffers)) };
            let taken = got.and_then(|got| {
                if got < len {
                    let (name, at) = (lane.name().to_owned(), offset + got as u64);
                    return Err(PumpError::SourceEnded { name, at, expected: total });
                }
                Ok(hash_buffer(&mut hasher, &buffer, len, &mut piece)?)
            });
            idle.push((slot, buffer));
            taken?;
            hashed += len as u64;
            progress.add(len as u64);
        }
    }
    Ok(hasher.into())
}

fn hash_buffer<B: Bytes>(
    hasher: &mut Sha256,
    buffer: &B,
    len: usize,
    piece: &mut [u8],
) -> Result<(), crate::targets::TargetError> {
    let mut at = 0;
    while at < len {
        let take = piece.len().min(len - at);
        let part = piece.get_mut(..take).unwrap_or_default();
        buffer.read_at(at, part)?;
        hasher.update(&*part);
        at += take;
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
    ) -> Result<Hash, PumpError> {
        digest(target, (total, block), buffers, &Progress::hidden(), &Interrupt::default())
    }

    #[test]
    fn it_is_the_hash_of_the_bytes_in_their_order() {
        for len in [0usize, 1, 512, 4097, 300_001] {
            let data: Vec<u8> = (0u8..=250).cycle().take(len).collect();
            let expected = Hash(Sha256::digest(&data).into());
            for (block, depth) in [(512, 5), (4096, 1), (131_072, 8)] {
                let mut buffers = vec![vec![0; block]; depth];
                let got = of(&mut Fake::new(data.clone(), 1), len as u64, block, &mut buffers).unwrap();
                assert_eq!(got, expected);
                assert_eq!(buffers.len(), depth);
            }
        }
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let hash = of(&mut Fake::new(vec![], 1), 0, 512, &mut Vec::new()).unwrap();
        assert_eq!(hash.to_string(), empty);
    }

    #[test]
    fn failures_end_it_and_give_the_buffers_back() {
        for fault in [Fault::Fail, Fault::Refuse, Fault::Quarantine] {
            for at in [1, 4, 20] {
                let mut target = Fake::new(vec![1; 20 * 512], 512);
                target.fault = Some((at, fault));
                let mut buffers = vec![vec![0; 512]; 4];
                let error = of(&mut target, 20 * 512, 512, &mut buffers).unwrap_err();
                assert!(matches!(error, PumpError::Target(_)), "{fault:?} {at}: {error:?}");
                assert_eq!(buffers.len(), 4 - usize::from(fault == Fault::Quarantine), "{fault:?} {at}");
            }
        }
        let mut target = Fake::new(vec![1; 1000], 1);
        target.shrink = Some((1, 700));
        let error = of(&mut target, 1000, 512, &mut vec![vec![0; 512]; 1]).unwrap_err();
        assert!(matches!(error, PumpError::SourceEnded { at: 700, .. }), "{error:?}");
    }
}
