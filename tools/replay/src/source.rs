//! Reads a trace as lines, whatever it is compressed with, in bounded memory.

use super::error::TraceError;
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, BufReader, Read};

/// The longest line in bytes. The kernel prints events of less than 8 KiB.
pub const MAX_LINE: usize = 64 << 10;

/// The first bytes of a compressed file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// With any low four bits in the first byte: zstd's frames for applications.
const ZSTD_SKIPPED: [u8; 4] = [0x50, 0x2a, 0x4d, 0x18];
/// Formats that are refused, with the program that reads them.
const REFUSED: [(&[u8], &str, &str); 4] = [
    (b"\x17\x08\x44tracing", "trace-cmd's binary format", "trace-cmd report"),
    (b"PERFILE2", "perf's binary format", "perf script -i"),
    (b"\xfd7zXZ\0", "compressed by xz", "xz -dc"),
    (b"BZh", "compressed by bzip2", "bzip2 -dc"),
];

/// Opens a trace: plain, or compressed by gzip or zstd, as its first bytes say.
///
/// # Errors
/// [`TraceError::Read`], [`TraceError::Format`] for what is something else.
pub(super) fn open<'r>(input: impl Read + 'r) -> Result<Box<dyn BufRead + 'r>, TraceError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let mut first = [0; 16];
    let len = read_all(&mut input, &mut first).map_err(TraceError::Read)?;
    let first = first.get(..len).unwrap_or_default();
    if let Some((_, found, program)) = REFUSED.iter().find(|(magic, ..)| first.starts_with(magic)) {
        return Err(TraceError::Format { found, program });
    }
    let input = io::Cursor::new(first.to_vec()).chain(input);
    Ok(if first.starts_with(&GZIP) {
        Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(input)))
    } else if is_zstd(first) {
        Box::new(BufReader::with_capacity(1 << 16, Frames::new(input)))
    } else {
        Box::new(input)
    })
}

fn is_zstd(first: &[u8]) -> bool {
    let skipped = |first: &[u8]| match first {
        [low, rest @ ..] => low & 0xf0 == ZSTD_SKIPPED[0] && rest.starts_with(&ZSTD_SKIPPED[1..]),
        [] => false,
    };
    first.starts_with(&ZSTD) || skipped(first)
}

/// Fills `buf` as far as there is input, and returns how far.
fn read_all(input: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while let Some(rest) = buf.get_mut(len..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// All frames of zstd's format, one after the other: the decoder knows one.
struct Frames<R> {
    input: R,
    /// Keeps its buffers from frame to frame.
    decoder: FrameDecoder,
    inside: bool,
    /// Why the frame ended early: reported once what was decoded before has been read.
    broken: Option<io::Error>,
}

/// An empty last block, and a checksum for frames that have one.
const END: [u8; 7] = [1, 0, 0, 0, 0, 0, 0];

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while !buf.is_empty() {
            if !self.inside && !self.begin()? {
                return Ok(0);
            }
            while self.inside && self.decoder.can_collect() == 0 {
                if self.decoder.is_finished() {
                    self.end()?;
                } else {
                    self.decode()?;
                }
            }
            if self.inside {
                return self.decoder.read(buf);
            }
        }
        Ok(0)
    }
}

impl<R: BufRead> Frames<R> {
    fn new(input: R) -> Self {
        Self { input, decoder: FrameDecoder::new(), inside: false, broken: None }
    }

    /// Begins the next frame, or skips it if it is one for applications. Returns false at the end
    /// of the input.
    fn begin(&mut self) -> io::Result<bool> {
        if self.input.fill_buf()?.is_empty() {
            return Ok(false);
        }
        match self.decoder.init(&mut self.input) {
            Ok(()) => self.inside = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                io::copy(&mut (&mut self.input).take(length.into()), &mut io::sink())?;
            }
            Err(error) => return Err(invalid(error)),
        }
        Ok(true)
    }

    /// Decodes a block. The decoder keeps what later blocks may refer to, up to megabytes, until
    /// the frame ends: so a frame whose next block cannot be decoded is ended here, and what
    /// precedes that block is not lost.
    fn decode(&mut self) -> io::Result<()> {
        let one = || BlockDecodingStrategy::UptoBlocks(1);
        let Err(error) = self.decoder.decode_blocks(&mut self.input, one()) else { return Ok(()) };
        let error = if self.input.fill_buf()?.is_empty() {
            io::Error::new(io::ErrorKind::UnexpectedEof, "the compressed data is truncated")
        } else {
            invalid(error)
        };
        match self.decoder.decode_blocks(&END[..], one()) {
            Ok(_) => self.broken = Some(error),
            Err(_) => return Err(error),
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.inside = false;
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(expected), Some(found)) if expected != found => {
                Err(invalid("the checksum of a frame is wrong"))
            }
            _ => Ok(()),
        }
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The lines of a trace, one at a time.
pub(super) struct Lines<R> {
    input: R,
    line: Vec<u8>,
}

/// A line, without its end.
#[derive(Debug, PartialEq)]
pub(super) enum Piece<'l> {
    /// Bytes, since names of tasks are arbitrary.
    Line(&'l [u8]),
    /// More than [`MAX_LINE`] bytes, which were skipped.
    TooLong,
    /// There is no further line.
    End,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, line: Vec::with_capacity(256) }
    }

    /// Reads the next line.
    pub(super) fn next(&mut self) -> io::Result<Piece<'_>> {
        self.line.clear();
        let limit = MAX_LINE as u64 + 1;
        if (&mut self.input).take(limit).read_until(b'\n', &mut self.line)? == 0 {
            return Ok(Piece::End);
        }
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        } else if self.line.len() > MAX_LINE {
            self.input.skip_until(b'\n')?;
            return Ok(Piece::TooLong);
        }
        Ok(Piece::Line(&self.line))
    }
}
