//! The requests of a disk (virtio 1.2 section 5.2.6), for any framing of their buffers.

use super::queue::{Bus, Piece, Unreachable};
use pinfold_core::addr::Iova;
use std::fmt;

/// Bytes of a sector.
pub const SECTOR: usize = 512;
const HEADER: usize = 16;
/// The most bytes that are copied at a time.
const CHUNK: usize = 64 << 10;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const ID: [u8; 20] = *b"pinfold-model-disk\0\0";

/// The storage of a disk.
pub trait Medium {
    /// Returns the size in sectors.
    fn sectors(&self) -> u64;
    /// Reads bytes from `at` on; `false` where that failed.
    fn read(&mut self, at: u64, to: &mut [u8]) -> bool;
    /// Stores bytes from `at` on; `false` where that failed.
    fn write(&mut self, at: u64, from: &[u8]) -> bool;
    /// Makes written data durable; `false` if that failed.
    fn flush(&mut self) -> bool;
}

impl Medium for Vec<u8> {
    fn sectors(&self) -> u64 {
        (self.len() / SECTOR) as u64
    }
    fn read(&mut self, at: u64, to: &mut [u8]) -> bool {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let from = at.checked_add(to.len()).and_then(|end| self.get(at..end));
        from.map(|from| to.copy_from_slice(from)).is_some()
    }
    fn write(&mut self, at: u64, from: &[u8]) -> bool {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let to = at.checked_add(from.len()).and_then(|end| self.get_mut(at..end));
        to.map(|to| to.copy_from_slice(from)).is_some()
    }
    fn flush(&mut self) -> bool {
        true
    }
}

/// The header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    kind: u32,
    sector: u64,
}

impl Header {
    /// Reads the header of a chain; `None` where it has fewer bytes.
    ///
    /// # Errors
    /// [`Unreachable`].
    pub fn read(bus: &impl Bus, chain: &[Piece]) -> Result<Option<Self>, Unreachable> {
        let mut bytes = [0; HEADER];
        let mut done = 0;
        for piece in chain.iter().filter(|piece| !piece.is_writable()) {
            let left = bytes.get_mut(done..).unwrap_or_default();
            let len = left.len().min(usize::try_from(piece.len).unwrap_or(usize::MAX));
            bus.read(piece.iova, left.get_mut(..len).unwrap_or_default())?;
            done += len;
        }
        let [a, b, c, d, _, _, _, _, sector @ ..] = bytes;
        let header =
            Self { kind: u32::from_le_bytes([a, b, c, d]), sector: u64::from_le_bytes(sector) };
        Ok((done == HEADER).then_some(header))
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            IN => write!(f, "read at sector {}", self.sector),
            OUT => write!(f, "write at sector {}", self.sector),
            FLUSH => f.write_str("flush"),
            GET_ID => f.write_str("get ID"),
            kind => write!(f, "request of type {kind}"),
        }
    }
}

/// The result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// As it should.
    Done,
    /// It exceeds the disk.
    OutOfRange,
    /// Its type is not supported.
    Unsupported,
    /// Its buffers do not fit the request.
    Malformed(&'static str),
    /// The device may not access its memory.
    Unreachable,
    /// The medium failed.
    Failed,
}

/// A part of a chain: bytes, without the borders of descriptors.
#[derive(Clone, Debug, Default)]
struct Bytes(Vec<(u64, usize)>);

impl Bytes {
    fn of(chain: &[Piece], writable: bool) -> Self {
        let pieces = chain.iter().filter(|piece| piece.is_writable() == writable);
        let range = |piece: &Piece| (piece.iova.raw(), usize::try_from(piece.len).unwrap_or(0));
        Self(pieces.map(range).filter(|(_, len)| *len > 0).collect())
    }

    fn len(&self) -> usize {
        self.0.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len))
    }

    /// Removes `left` bytes at the front.
    fn skip(&mut self, mut left: usize) {
        for (at, len) in &mut self.0 {
            let gone = left.min(*len);
            (*at, *len, left) = (at.wrapping_add(gone as u64), *len - gone, left - gone);
        }
    }

    /// Removes the last byte, and returns its address.
    fn pop(&mut self) -> Option<Iova> {
        let (at, len) = self.0.last_mut()?;
        *len = len.checked_sub(1)?;
        Some(Iova::new(at.wrapping_add(*len as u64)))
    }
}

/// Serves a request, whose last writable byte is its status. Returns how it ended, and how many
/// bytes were written; nothing where even the status cannot be written. `short` bytes are left out
/// at the end of each buffer that is read into.
pub fn serve(
    bus: &impl Bus,
    medium: &mut impl Medium,
    chain: &[Piece],
    short: usize,
) -> (Outcome, u32) {
    let (mut data, mut answer) = (Bytes::of(chain, false), Bytes::of(chain, true));
    let Some(status) = answer.pop() else {
        return (Outcome::Malformed("a request has no byte for its status"), 0);
    };
    let (outcome, written) = match Header::read(bus, chain) {
        Err(Unreachable) => (Outcome::Unreachable, 0),
        Ok(None) => (Outcome::Malformed("a request has fewer bytes than its header"), 0),
        Ok(Some(header)) => {
            data.skip(HEADER);
            serve_data(bus, medium, header, &data, &answer, short)
        }
    };
    let code = match outcome {
        Outcome::Done => OK,
        Outcome::Unsupported => UNSUPPORTED,
        _ => IO_ERROR,
    };
    match bus.write(status, &[code]) {
        Ok(()) => (outcome, written.saturating_add(1)),
        // The failure cannot be reported.
        Err(Unreachable) => (Outcome::Unreachable, written),
    }
}

fn serve_data(
    bus: &impl Bus,
    medium: &mut impl Medium,
    header: Header,
    data: &Bytes,
    answer: &Bytes,
    short: usize,
) -> (Outcome, u32) {
    let bytes = match header.kind {
        IN => answer,
        OUT => data,
        FLUSH => return (if medium.flush() { Outcome::Done } else { Outcome::Failed }, 0),
        GET_ID => {
            let mut left = ID.as_slice();
            for (at, len) in &answer.0 {
                let (part, rest) = left.split_at(left.len().min(*len));
                if bus.write(Iova::new(*at), part).is_err() {
                    return (Outcome::Unreachable, 0);
                }
                left = rest;
            }
            return (Outcome::Done, u32::try_from(ID.len() - left.len()).unwrap_or(0));
        }
        _ => return (Outcome::Unsupported, 0),
    };
    let total = bytes.len();
    if total == 0 || !total.is_multiple_of(SECTOR) {
        return (Outcome::Malformed("the data of a request is no whole number of sectors"), 0);
    }
    let end = header.sector.checked_add((total / SECTOR) as u64);
    if end.is_none_or(|end| end > medium.sectors()) {
        return (Outcome::OutOfRange, 0);
    }
    let mut at = header.sector.saturating_mul(SECTOR as u64);
    let mut copy = vec![0; CHUNK.min(total)];
    for (iova, len) in &bytes.0 {
        let (mut iova, mut left) = (*iova, *len);
        while left > 0 {
            let part = left.min(copy.len());
            let Some(room) = copy.get_mut(..part) else { return (Outcome::Failed, 0) };
            let done = if header.kind == OUT {
                match bus.read(Iova::new(iova), room) {
                    Ok(()) => medium.write(at, room),
                    Err(Unreachable) => return (Outcome::Unreachable, 0),
                }
            } else {
                let done = medium.read(at, room);
                let sent = if part == left { part.saturating_sub(short) } else { part };
                let sent = room.get(..sent).unwrap_or_default();
                if bus.write(Iova::new(iova), sent).is_err() {
                    return (Outcome::Unreachable, 0);
                }
                done
            };
            if !done {
                return (Outcome::Failed, 0);
            }
            at = at.saturating_add(part as u64);
            (iova, left) = (iova.wrapping_add(part as u64), left - part);
        }
    }
    let written = if header.kind == IN { total } else { 0 };
    (Outcome::Done, u32::try_from(written).unwrap_or(u32::MAX))
}
