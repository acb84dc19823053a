//! A target in a vector, for tests: it completes in a scrambled order, ends early, fails where it is told to, and
//! checks what is asked of it.

use super::{Bytes, Done, Info, IoDirection, Request, SubmitError, Target, TargetError};

impl Bytes for Vec<u8> {
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

/// What a fake does at a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Completes with an error.
    Fail,
    /// Refuses it at the door.
    Refuse,
    /// Completes with an error and keeps the buffer.
    Quarantine,
}

/// A target in memory.
#[derive(Debug)]
pub(crate) struct Fake<B = Vec<u8>> {
    pub(crate) data: Vec<u8>,
    pub(crate) info: Info,
    pub(crate) in_flight: Vec<Request<B>>,
    /// The request number at which something goes wrong, and what.
    pub(crate) fault: Option<(usize, Fault)>,
    /// After so many requests the data ends here.
    pub(crate) shrink: Option<(usize, usize)>,
    pub(crate) requests: usize,
    pub(crate) at_most: usize,
    pub(crate) synced: bool,
    is_direct: bool,
    random: u64,
}

impl<B: Bytes> Fake<B> {
    pub(crate) fn new(data: Vec<u8>, block: usize) -> Self {
        let info = Info {
            name: "fake".into(),
            capacity: Some(data.len() as u64),
            block,
            unit: block,
            max_depth: 1024,
            max_transfer: usize::MAX,
        };
        Self {
            data,
            info,
            in_flight: Vec::new(),
            fault: None,
            shrink: None,
            requests: 0,
            at_most: 0,
            synced: false,
            is_direct: false,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Of a file that was opened past the page cache for multiples of `unit` bytes: it takes no others.
    pub(crate) fn direct(mut self, unit: usize) -> Self {
        (self.info.block, self.info.unit, self.is_direct) = (1, unit, true);
        self
    }

    pub(crate) fn grows(mut self) -> Self {
        self.info.capacity = None;
        self
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    fn carry_out(&mut self, mut request: Request<B>) -> Done<B> {
        let at = usize::try_from(request.offset).unwrap();
        let len = match request.way {
            IoDirection::Read => {
                let len = request.len.min(self.data.len().saturating_sub(at));
                let from = self.data.get(at..at + len).unwrap_or_default();
                request.buffer.write_at(0, from).unwrap();
                len
            }
            IoDirection::Write => {
                let padded = request.len.next_multiple_of(self.info.block);
                let end = at + padded;
                let mut bytes = vec![0; padded];
                request.buffer.read_at(0, &mut bytes).unwrap();
                assert!(bytes[request.len..].iter().all(|&byte| byte == 0), "old bytes leak");
                if self.data.len() < end {
                    assert_eq!(self.info.capacity, None, "past the end of a target that does not grow");
                    self.data.resize(end, 0xee);
                }
                self.data[at..end].copy_from_slice(&bytes);
                // What a device leaves behind: the next user must not take it for its own.
                request.buffer.write_at(0, &vec![0xdd; padded]).unwrap();
                request.len
            }
        };
        Done { slot: request.slot, buffer: Some(request.buffer), result: Ok(len) }
    }
}

impl<B: Bytes> Target<B> for Fake<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>> {
        assert!(request.offset.is_multiple_of(self.info.block as u64));
        assert!(request.len > 0);
        if self.is_direct {
            assert!(request.offset.is_multiple_of(self.info.unit as u64), "at {}", request.offset);
            assert!(request.len.is_multiple_of(self.info.unit), "{} bytes", request.len);
        }
        assert!(self.in_flight.iter().all(|other| other.slot != request.slot), "a slot used twice");
        self.requests += 1;
        if let Some((at, len)) = self.shrink
            && self.requests > at
        {
            self.data.truncate(len);
        }
        if self.fault == Some((self.requests, Fault::Refuse)) {
            return Err(SubmitError { buffer: Some(request.buffer), error: TargetError::Fake });
        }
        self.in_flight.push(request);
        self.at_most = self.at_most.max(self.in_flight.len());
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        for _ in 0..self.random(self.in_flight.len() + 1) {
            let at = self.random(self.in_flight.len());
            let request = self.in_flight.swap_remove(at);
            let fault = self.fault.filter(|(at, _)| self.requests >= *at);
            done.push(match fault {
                Some((_, Fault::Fail)) => {
                    self.fault = None;
                    Done { slot: request.slot, buffer: Some(request.buffer), result: Err(TargetError::Fake) }
                }
                Some((_, Fault::Quarantine)) => {
                    self.fault = None;
                    Done { slot: request.slot, buffer: None, result: Err(TargetError::Fake) }
                }
                _ => self.carry_out(request),
            });
        }
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        assert!(!self.in_flight.is_empty(), "waits for nothing");
        self.poll(done)
    }

    fn sync(&mut self) -> Result<(), TargetError> {
        assert!(self.in_flight.is_empty(), "a flush before the writes are over");
        self.synced = true;
        Ok(())
    }
}
