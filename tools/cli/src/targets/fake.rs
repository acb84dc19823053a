//! A target in a vector, for tests: it completes in random order, ends early, injects failures, and
//! checks its requests.

use super::target::{
    Completion, DataBuffer, IoDirection, Request, SubmitError, Target, TargetError, TargetInfo,
};
use crate::random::Random;
use crate::signal::Interrupt;

impl DataBuffer for Vec<u8> {
    fn read_at(&self, at: usize, to: &mut [u8]) -> Result<(), TargetError> {
        to.copy_from_slice(&self[at..at + to.len()]);
        Ok(())
    }
    fn write_at(&mut self, at: usize, from: &[u8]) -> Result<(), TargetError> {
        self[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }
    fn zero(&mut self, at: usize, len: usize) -> Result<(), TargetError> {
        self[at..at + len].fill(0);
        Ok(())
    }
}

/// An injected failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Completes with an error.
    Fail,
    /// Rejects the request at submission.
    Reject,
    /// Completes with an error and quarantines the buffer.
    Quarantine,
}

/// A target in memory.
#[derive(Debug)]
pub(crate) struct Fake<B = Vec<u8>> {
    pub(crate) data: Vec<u8>,
    pub(crate) info: TargetInfo,
    pub(crate) in_flight: Vec<Request<B>>,
    /// The number of the request at which a failure is injected.
    pub(crate) fault: Option<(usize, Fault)>,
    /// After this many requests the data is truncated to this length.
    pub(crate) shrink: Option<(usize, usize)>,
    pub(crate) requests: usize,
    /// The most requests that were in flight.
    pub(crate) peak: usize,
    /// Completions are held until the next poll.
    pub(crate) holds: bool,
    held: Vec<Completion<B>>,
    /// The most requests that were in flight or held.
    pub(crate) peak_held: usize,
    pub(crate) synced: bool,
    is_direct: bool,
    random: Random,
}

impl<B: DataBuffer> Fake<B> {
    pub(crate) fn new(data: Vec<u8>, block: usize) -> Self {
        let info = TargetInfo {
            name: "fake".into(),
            capacity: Some(data.len() as u64),
            block,
            alignment: block,
            max_depth: 1024,
            max_transfer: usize::MAX,
            no_trim: None,
            trim_zeroes: true,
        };
        Self {
            data,
            info,
            in_flight: Vec::new(),
            fault: None,
            shrink: None,
            requests: 0,
            peak: 0,
            holds: false,
            held: Vec::new(),
            peak_held: 0,
            synced: false,
            is_direct: false,
            random: Random::new(1),
        }
    }

    /// Behaves as a file that bypasses the page cache: it accepts only multiples of `alignment`
    /// bytes.
    pub(crate) fn direct(mut self, alignment: usize) -> Self {
        (self.info.block, self.info.alignment, self.is_direct) = (1, alignment, true);
        self
    }

    pub(crate) fn grows(mut self) -> Self {
        self.info.capacity = None;
        self
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.random.below(limit as u64)).unwrap()
    }

    fn execute(&mut self, Request { io, mut buffer }: Request<B>) -> Completion<B> {
        let at = usize::try_from(io.offset).unwrap();
        let len = match io.direction {
            IoDirection::Read => {
                let len = io.len.min(self.data.len().saturating_sub(at));
                buffer.write_at(0, self.data.get(at..at + len).unwrap_or_default()).unwrap();
                len
            }
            IoDirection::Write => {
                let padded = io.len.next_multiple_of(self.info.block);
                let end = at + padded;
                let mut bytes = vec![0; padded];
                buffer.read_at(0, &mut bytes).unwrap();
                assert!(bytes[io.len..].iter().all(|&byte| byte == 0), "old bytes leak");
                if self.data.len() < end {
                    assert_eq!(
                        self.info.capacity, None,
                        "past the end of a target that does not grow"
                    );
                    self.data.resize(end, 0xee);
                }
                self.data[at..end].copy_from_slice(&bytes);
                // The next user of the buffer must not mistake this for its own data.
                buffer.write_at(0, &vec![0xdd; padded]).unwrap();
                io.len
            }
            IoDirection::Flush => 0,
            IoDirection::Trim => {
                self.data[at..at + io.len].fill(0);
                io.len
            }
        };
        Completion { io, buffer: Some(buffer), result: Ok(len) }
    }
}

impl<B: DataBuffer> Target<B> for Fake<B> {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn submit(&mut self, mut request: Request<B>) -> Result<(), SubmitError<B>> {
        let io = &mut request.io;
        assert!(io.offset.is_multiple_of(self.info.block as u64));
        assert!(io.len > 0);
        if self.is_direct {
            assert!(io.offset.is_multiple_of(self.info.alignment as u64), "at {}", io.offset);
            assert!(io.len.is_multiple_of(self.info.alignment), "{} bytes", io.len);
        }
        io.set_queued();
        self.requests += 1;
        if let Some((at, len)) = self.shrink
            && self.requests > at
        {
            self.data.truncate(len);
        }
        if self.fault == Some((self.requests, Fault::Reject)) {
            return Err(SubmitError { buffer: Some(request.buffer), error: TargetError::Fake });
        }
        self.in_flight.push(request);
        self.peak = self.peak.max(self.in_flight.len());
        self.peak_held = self.peak_held.max(self.in_flight.len() + self.held.len());
        Ok(())
    }

    fn held(&self) -> usize {
        self.held.len()
    }

    fn poll(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        completed.append(&mut self.held);
        for _ in 0..self.below(self.in_flight.len() + 1) {
            let at = self.below(self.in_flight.len());
            let request = self.in_flight.swap_remove(at);
            let fault =
                self.fault.take_if(|(at, fault)| self.requests >= *at && *fault != Fault::Reject);
            let completion = match fault {
                Some((_, fault)) => Completion {
                    io: request.io,
                    buffer: Some(request.buffer).filter(|_| fault != Fault::Quarantine),
                    result: Err(TargetError::Fake),
                },
                None => self.execute(request),
            };
            if self.holds { self.held.push(completion) } else { completed.push(completion) }
        }
        Ok(())
    }

    fn wait(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        assert!(!self.in_flight.is_empty() || !self.held.is_empty(), "waits for nothing");
        self.poll(completed)
    }

    fn sync(&mut self, _: &Interrupt) -> Result<(), TargetError> {
        assert!(self.in_flight.is_empty(), "a flush before the writes have completed");
        self.synced = true;
        Ok(())
    }
}
