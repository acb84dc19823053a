//! A part of a disk, and the client that alone writes to it: what may be in each sector.

use pinfold_nbd::reply::ReplyHeader;
use pinfold_nbd::{Command, RequestHeader};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The bytes of a sector.
pub(crate) const SECTOR: u64 = BYTES as u64;
const BYTES: usize = 512;
/// The most sectors of a request: more than a piece of a write.
const MOST: usize = 1024;

/// Versions that a sector may have; 0 is a sector that was never written.
#[derive(Clone, Default)]
struct Sector {
    /// The last one before an answered flush, and the last one that was answered.
    flushed: u64,
    answered: u64,
    /// The writes that were answered between the two.
    between: Vec<u64>,
    /// The writes of requests without an answer, which may be executed until the server ends.
    unanswered: Vec<u64>,
    /// The writes of the server before, which the kernel may still have been executing when it was
    /// gone.
    late: Vec<u64>,
}

/// The sectors of one client.
pub(crate) struct Region {
    first: u64,
    sectors: Vec<Sector>,
    version: u64,
    random: u64,
}

/// Connects and chooses the default export.
pub(crate) fn connect(socket: &str) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0")?;
    stream.read_exact(&mut [0; 18 + 8 + 2])?;
    Ok(stream)
}

/// Returns the contents of a sector.
fn contents(sector: u64, version: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    if version > 0 {
        for (at, word) in (0u64..).zip(bytes.chunks_exact_mut(16)) {
            word[..8].copy_from_slice(&version.to_le_bytes());
            word[8..].copy_from_slice(&(sector * 64 + at).to_le_bytes());
        }
    }
    bytes
}

/// Returns the version of a sector, all of which must be that one.
fn version(sector: u64, bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(
        bytes == contents(sector, version),
        "sector {sector} is not version {version} as a whole"
    );
    version
}

impl Region {
    /// Returns `count` regions of `sectors` sectors.
    pub(crate) fn all(count: u64, sectors: u64) -> Vec<Self> {
        let region = |number| Self {
            first: number * sectors,
            sectors: vec![Sector::default(); usize::try_from(sectors).unwrap()],
            version: 0,
            random: 0x9e37_79b9_7f4a_7c15 + number,
        };
        (0..count).map(region).collect()
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Reads all sectors after the server has ended, however it did, and was started again:
    /// everything flushed is there.
    pub(crate) fn verify_after_end(&mut self, stream: &mut UnixStream) {
        let len = self.sectors.len();
        for at in (0..len).step_by(MOST) {
            let count = (len - at).min(MOST);
            let bytes = read(stream, self.first + at as u64, count as u64).unwrap();
            for (index, bytes) in (at..).zip(bytes.chunks_exact(BYTES)) {
                let (number, sector) = (self.first + index as u64, &mut self.sectors[index]);
                let found = version(number, bytes);
                let is_possible = found == sector.flushed
                    || found == sector.answered
                    || sector.between.contains(&found)
                    || sector.unanswered.contains(&found)
                    || sector.late.contains(&found);
                assert!(
                    is_possible,
                    "sector {number} has version {found}, flushed was {}",
                    sector.flushed
                );
                let late = std::mem::take(&mut sector.unanswered);
                *sector = Sector { flushed: found, answered: found, late, ..Sector::default() };
            }
        }
    }

    /// Writes and reads until `stop` is set, or until the server is gone, which it may be if
    /// `may_end`. Returns the number of answers.
    pub(crate) fn work(&mut self, socket: &str, stop: &AtomicBool, may_end: bool) -> u64 {
        let mut answers = 0;
        while !stop.load(Ordering::SeqCst) {
            let worked = connect(socket)
                .and_then(|mut stream| self.requests(&mut stream, stop, &mut answers));
            if let Err(error) = worked {
                assert!(may_end, "{error}");
                // The server ends; it is not started again meanwhile.
                return answers;
            }
        }
        answers
    }

    /// Works over one connection, and leaves it sooner or later, mostly in the middle of a request.
    fn requests(
        &mut self,
        stream: &mut UnixStream,
        stop: &AtomicBool,
        answers: &mut u64,
    ) -> io::Result<()> {
        while !stop.load(Ordering::SeqCst) {
            let at = self.below(self.sectors.len() as u64);
            let count = 1 + self.below((MOST as u64).min(self.sectors.len() as u64 - at));
            match self.below(64) {
                0 => return self.leave_write(stream, at, count),
                1 => return send(stream, Command::READ, self.first + at, count),
                2..10 => {
                    send(stream, Command::FLUSH, 0, 0)?;
                    answer(stream)?;
                    for sector in &mut self.sectors {
                        sector.flushed = sector.answered;
                        sector.between.clear();
                    }
                }
                10..36 => self.write(stream, at, count)?,
                _ => self.read(stream, at, count)?,
            }
            *answers += 1;
        }
        Ok(())
    }

    /// Records that sectors are being written, and returns their contents.
    fn begin_write(&mut self, at: u64, count: u64) -> Vec<u8> {
        self.version += 1;
        let (first, version) = (self.first, self.version);
        for sector in self.range(at, count) {
            sector.unanswered.push(version);
        }
        (at..at + count).flat_map(|sector| contents(first + sector, version)).collect()
    }

    fn range(&mut self, at: u64, count: u64) -> &mut [Sector] {
        let at = usize::try_from(at).unwrap();
        &mut self.sectors[at..at + usize::try_from(count).unwrap()]
    }

    fn write(&mut self, stream: &mut UnixStream, at: u64, count: u64) -> io::Result<()> {
        let bytes = self.begin_write(at, count);
        send(stream, Command::WRITE, self.first + at, count)?;
        stream.write_all(&bytes)?;
        answer(stream)?;
        let version = self.version;
        for sector in self.range(at, count) {
            sector.unanswered.retain(|other| *other != version);
            let before = std::mem::replace(&mut sector.answered, version);
            sector.between.push(before);
        }
        Ok(())
    }

    /// Sends a part of a write.
    fn leave_write(&mut self, stream: &mut UnixStream, at: u64, count: u64) -> io::Result<()> {
        let bytes = self.begin_write(at, count);
        send(stream, Command::WRITE, self.first + at, count)?;
        let part = usize::try_from(self.below(bytes.len() as u64)).unwrap();
        stream.write_all(&bytes[..part])
    }

    /// Reads, and looks for what was answered last.
    fn read(&mut self, stream: &mut UnixStream, at: u64, count: u64) -> io::Result<()> {
        let first = self.first + at;
        let bytes = read(stream, first, count)?;
        for ((number, bytes), sector) in
            (first..).zip(bytes.chunks_exact(BYTES)).zip(self.range(at, count))
        {
            let (found, expected) = (version(number, bytes), sector.answered);
            let others = sector.unanswered.iter().chain(&sector.late);
            let is_possible = found == expected || others.into_iter().any(|other| *other == found);
            assert!(is_possible, "sector {number} has version {found} instead of {expected}");
        }
        Ok(())
    }
}

fn send(stream: &mut UnixStream, command: Command, sector: u64, count: u64) -> io::Result<()> {
    let (offset, length) = (sector * SECTOR, u32::try_from(count * SECTOR).unwrap());
    let header = RequestHeader { command, cookie: 7, offset, length, ..RequestHeader::default() };
    stream.write_all(&header.to_bytes())
}

/// Receives the header of a reply, which must be a success.
fn answer(stream: &mut UnixStream) -> io::Result<()> {
    let mut header = [0; 16];
    stream.read_exact(&mut header)?;
    match ReplyHeader::parse(&header).unwrap().unwrap().0 {
        ReplyHeader::Simple { error: None, cookie: 7 } => Ok(()),
        // A server that ends may refuse a write whose payload has not arrived.
        header => Err(io::Error::other(format!("{header:?}"))),
    }
}

fn read(stream: &mut UnixStream, sector: u64, count: u64) -> io::Result<Vec<u8>> {
    send(stream, Command::READ, sector, count)?;
    answer(stream)?;
    let mut bytes = vec![0xee; usize::try_from(count * SECTOR).unwrap()];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
