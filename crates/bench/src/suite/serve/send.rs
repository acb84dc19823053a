//! `send-1m`: what a zero-copy send would gain a server that sends 1 MiB from memory that a device
//! has written.
//!
//! A TCP connection over the loopback device, which any client on this machine has; a thread reads
//! what arrives. `send-zc` is `IORING_OP_SEND_ZC`, whose notification says whether the kernel has
//! copied after all: it does wherever what is sent could be held by a receiver on the same machine.
#![expect(unsafe_code, reason = "entries of io_uring that refer to memory")]

use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject, thread_time};
use crate::record::{Metric, Record};
use crate::suite::handle::spawn_second;
use io_uring::{IoUring, cqueue, opcode, types::Fd};
use std::io::{Error, ErrorKind, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Instant;

const CASE: &str = "send-1m";
const MIB: u32 = 1 << 20;
/// How many MiB a run sends, at full size.
const SENDS: usize = 2048;
/// How many buffers are used in turn: a zero-copy send needs its own until the receiver has what is
/// in it.
const BUFFERS: usize = 8;
/// `MSG_WAITALL`: one completion when all of it is sent. The same on every architecture that Linux
/// has.
const WAIT_ALL: i32 = 0x100;
/// `IORING_SEND_ZC_REPORT_USAGE`, `IORING_NOTIF_USAGE_ZC_COPIED`.
const REPORT_USAGE: u16 = 1 << 3;
const COPIED: u32 = 1 << 31;

/// Measures the case.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let sends = harness.scale(SENDS);
    let of = |zero_copy| move |out: &mut Samples| measure(zero_copy, sends, out);
    match harness
        .interleave(vec![Subject::new("send", of(false)), Subject::new("send-zc", of(true))])
    {
        // Linux before 6.0.
        Err(BenchError::Stream(error)) if error.kind() == ErrorKind::InvalidInput => {
            Ok(vec![Record {
                subject: "send-zc",
                ..harness.skipped(CASE, "the kernel has no zero-copy send")
            }])
        }
        result => result,
    }
}

#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 MiB")]
fn measure(zero_copy: bool, sends: usize, out: &mut Samples) -> Result<(), BenchError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(BenchError::Stream)?;
    let address = listener.local_addr().map_err(BenchError::Stream)?;
    let stream = TcpStream::connect(address).map_err(BenchError::Stream)?;
    let (mut far, _) = listener.accept().map_err(BenchError::Stream)?;
    std::thread::scope(|scope| {
        let reader = spawn_second(scope, move || {
            let mut buffer = vec![0; MIB as usize];
            while far.read(&mut buffer).map_err(BenchError::Stream)? > 0 {}
            Ok(())
        })?;
        let (began, before) = (Instant::now(), thread_time());
        let copied = Sender::new(stream, zero_copy).and_then(|sender| sender.send_all(sends));
        let (elapsed, processor) = (began.elapsed(), thread_time().saturating_sub(before));
        // The sender's end of the connection is closed by now, or the reader would not end.
        reader.join().unwrap_or(Err(BenchError::Thread))?;
        let copied = copied.map_err(BenchError::Stream)?;
        out.figure(CASE, Metric::Rate, "MiB/s", sends as f64 / elapsed.as_secs_f64());
        out.figure(CASE, Metric::Time, "us CPU/MiB", processor.as_secs_f64() * 1e6 / sends as f64);
        out.figure(CASE, Metric::Count, "% copied", 100.0 * copied as f64 / sends as f64);
        Ok(())
    })
}

struct Sender {
    stream: TcpStream,
    zero_copy: bool,
    /// How many sends are complete, how many no longer need their buffer, and how many of those the
    /// kernel has copied.
    sent: usize,
    released: usize,
    copied: usize,
    /// Dropped before the buffers that its entries refer to.
    ring: IoUring,
    buffers: Vec<Vec<u8>>,
}

impl Sender {
    fn new(stream: TcpStream, zero_copy: bool) -> Result<Self, Error> {
        // Two completions for each buffer fit.
        let ring = IoUring::new(16)?;
        let buffers = (0..BUFFERS).map(|_| vec![0x5a; MIB as usize]).collect();
        Ok(Self { stream, zero_copy, sent: 0, released: 0, copied: 0, ring, buffers })
    }

    /// Sends that many MiB one after another; returns how many of them the kernel has copied.
    fn send_all(mut self, sends: usize) -> Result<usize, Error> {
        let sent = (0..sends).try_for_each(|number| {
            while number - self.released >= BUFFERS {
                self.complete()?;
            }
            self.enter(number)?;
            while self.sent <= number {
                self.complete()?;
            }
            Ok(())
        });
        let all = if sent.is_ok() { sends } else { self.sent };
        // The buffers are in use until then.
        while self.released < all {
            self.complete()?;
        }
        sent.map(|()| self.copied)
    }

    fn enter(&mut self, number: usize) -> Result<(), Error> {
        let Some(buffer) = self.buffers.get(number % BUFFERS) else { return Ok(()) };
        let (fd, start) = (Fd(self.stream.as_raw_fd()), buffer.as_ptr());
        let entry = match self.zero_copy {
            true => {
                opcode::SendZc::new(fd, start, MIB).flags(WAIT_ALL).zc_flags(REPORT_USAGE).build()
            }
            false => opcode::Send::new(fd, start, MIB).flags(WAIT_ALL).build(),
        };
        // SAFETY: the buffer is neither written nor freed before the send is complete and, without
        // a copy, the notification has arrived: `send_all` waits for both. The stream is open as
        // long.
        unsafe { self.ring.submission().push(&entry) }.map_err(Error::other)?;
        self.ring.submit().map(drop)
    }

    /// Waits for a completion, and takes all that there are.
    fn complete(&mut self) -> Result<(), Error> {
        self.ring.submit_and_wait(1)?;
        for entry in self.ring.completion() {
            if cqueue::notif(entry.flags()) {
                self.released += 1;
                self.copied += usize::from(entry.result().cast_unsigned() & COPIED != 0);
                continue;
            }
            self.sent += 1;
            // Without a notification the buffer is free with the completion, and was copied.
            let more = cqueue::more(entry.flags());
            self.released += usize::from(!more);
            self.copied += usize::from(!more);
            match entry.result() {
                whole if whole.cast_unsigned() == MIB => {}
                code if code < 0 => return Err(Error::from_raw_os_error(-code)),
                _ => return Err(ErrorKind::WriteZero.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Options;

    #[test]
    fn a_send_is_counted_as_copied_or_not() {
        let records =
            run(&Harness::new("serve", Options { runs: 1, quick: true }, &|_| ())).unwrap();
        let copied = |subject| {
            let of = |record: &&Record| record.subject == subject && record.unit == "% copied";
            records.iter().find(of).map(|record| record.median)
        };
        match copied("send-zc") {
            // Whether the loopback device copies is the kernel's decision.
            Some(share) => {
                assert!((0.0..=100.0).contains(&share));
                assert_eq!(copied("send"), Some(100.0));
            }
            None => eprintln!("SKIPPED: the kernel has no zero-copy send"),
        }
        for record in &records {
            eprintln!("{} {} {}", record.subject, record.median, record.unit);
        }
    }
}
