//! `rpc-259`: the receive loop of an RPC server at a real socket, as in the published figures of
//! its refill.
//!
//! A client writes requests of 1 MiB into a Unix socket. For each, the server completes its array
//! of 259 pages: one for the header, 256 for the payload, one for the reply, and one that this
//! request does not need. It receives header and payload into them, passes the pages of the payload
//! on, and replies from the page of the reply. The other three stay in the array. Passed pages are
//! freed once [`PASSED`] more requests have arrived, as storage would. A word of each page is
//! compared with what was sent.

use crate::baseline::buddy::{Buddy, Offset};
use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject, thread_time};
use crate::record::{Metric, Record};
use crate::suite::frame::rpc::{PAGES, Slots, refill_at_once, refill_from_list, refill_singly};
use crate::suite::handle::spawn_second;
use crate::targets::REFILL;
use pinfold::{Arena, ArenaLocal, ArenaMemory, Buffer};
use pinfold_core::frame::{Frame, Local, Zone};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The bytes of a page.
const PAGE: usize = 4096;
/// The slot of the first page of the payload, behind that of the header, and how many pages it has.
const FIRST: usize = 1;
const PAYLOAD: usize = 256;
/// The slot of the reply.
const REPLY: usize = FIRST + PAYLOAD;
/// The bytes of a header and of a reply: those of a write in NBD.
const HEADER: usize = 28;
const REPLY_BYTES: usize = 16;
/// How many requests' pages are passed on before the oldest are freed.
const PASSED: usize = 4;
/// How many requests a client sends before it waits for the reply to the first of them.
const AHEAD: usize = 4;
/// The frames of each allocator: far more than are in use, as in a server that does other things as
/// well.
const FRAMES: u32 = 1 << 13;

/// How many requests a run has, at full size.
const REQUESTS: usize = 512;

/// The pages of a server: where they come from, and their memory.
trait Pages {
    type Page;
    /// Fills the empty slots.
    fn refill(&mut self, slots: &mut Slots<Self::Page>) -> Result<(), BenchError>;
    /// Frees pages.
    fn free(&mut self, pages: Vec<Option<Self::Page>>) -> Result<(), BenchError>;
    /// Calls `work` with the memory of the pages, in their order.
    fn with_memory<R>(
        &mut self,
        pages: &mut [Option<Self::Page>],
        work: impl FnOnce(&mut [&mut [u8]]) -> R,
    ) -> R;
}

/// Pages that are numbers, and the memory that they count.
struct Numbered<'m, A> {
    allocator: A,
    memory: Vec<&'m mut [u8]>,
}

impl<'m, A> Numbered<'m, A> {
    fn new(allocator: A, memory: &'m mut [u8]) -> Self {
        Self { allocator, memory: memory.chunks_exact_mut(PAGE).collect() }
    }

    /// Calls `work` with the memory of the pages at `offsets`, each of which is another one.
    #[inline(always)]
    fn with_memory<R>(
        &mut self,
        offsets: impl Iterator<Item = Offset> + Clone,
        work: impl FnOnce(&mut [&mut [u8]]) -> R,
    ) -> R {
        let index = |offset: Offset| usize::try_from(offset / Frame::BYTES).unwrap_or(usize::MAX);
        let take =
            |offset| self.memory.get_mut(index(offset)).map(std::mem::take).unwrap_or_default();
        let mut pages: Vec<&mut [u8]> = offsets.clone().map(take).collect();
        let result = work(&mut pages);
        for (offset, page) in offsets.zip(pages) {
            if let Some(place) = self.memory.get_mut(index(offset)) {
                *place = page;
            }
        }
        result
    }
}

/// How a zone's owner fills the slots.
type Fill = fn(&mut Slots<Frame>, &mut Local<&Zone>) -> Result<(), BenchError>;

impl Pages for Numbered<'_, crate::baseline::buddy::Owner<'_>> {
    type Page = Offset;

    #[inline(always)]
    fn refill(&mut self, slots: &mut Slots<Offset>) -> Result<(), BenchError> {
        refill_singly(slots, || Ok(self.allocator.alloc_page()?))
    }

    fn free(&mut self, pages: Vec<Option<Offset>>) -> Result<(), BenchError> {
        pages.into_iter().flatten().for_each(|page| self.allocator.free_page(page));
        Ok(())
    }

    fn with_memory<R>(
        &mut self,
        pages: &mut [Option<Offset>],
        work: impl FnOnce(&mut [&mut [u8]]) -> R,
    ) -> R {
        Numbered::with_memory(self, pages.iter().flatten().copied(), work)
    }
}

impl Pages for Numbered<'_, (Local<&Zone>, Fill)> {
    type Page = Frame;

    #[inline(always)]
    fn refill(&mut self, slots: &mut Slots<Frame>) -> Result<(), BenchError> {
        let (local, fill) = &mut self.allocator;
        fill(slots, local)
    }

    fn free(&mut self, mut pages: Vec<Option<Frame>>) -> Result<(), BenchError> {
        Ok(self.allocator.0.free_bulk(&mut pages).map(drop)?)
    }

    fn with_memory<R>(
        &mut self,
        pages: &mut [Option<Frame>],
        work: impl FnOnce(&mut [&mut [u8]]) -> R,
    ) -> R {
        Numbered::with_memory(self, pages.iter().flatten().map(|page| page.offset()), work)
    }
}

impl Pages for ArenaLocal {
    type Page = Buffer;

    #[inline(always)]
    fn refill(&mut self, slots: &mut Slots<Buffer>) -> Result<(), BenchError> {
        refill_at_once(slots, |slots| self.fill(slots))
    }

    fn free(&mut self, mut pages: Vec<Option<Buffer>>) -> Result<(), BenchError> {
        self.free_all(&mut pages);
        Ok(())
    }

    fn with_memory<R>(
        &mut self,
        pages: &mut [Option<Buffer>],
        work: impl FnOnce(&mut [&mut [u8]]) -> R,
    ) -> R {
        // No device reaches this memory, so the slices are available.
        let slices = pages.iter_mut().flatten().map(|page| page.as_mut_slice().unwrap_or_default());
        work(&mut slices.collect::<Vec<_>>())
    }
}

/// Measures the case.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let requests = harness.scale(REQUESTS);
    let arena = || -> Result<ArenaMemory, BenchError> {
        Ok(Arena::builder().size(u64::from(FRAMES) * Frame::BYTES).build_unmapped()?)
    };
    // The same memory for all whose pages are numbers: only one of them runs at a time.
    let numbered = arena()?;
    let mut whole = numbered.alloc(FRAMES as usize * PAGE)?;
    whole.zero();
    let memory = RefCell::new(whole);
    let (zone, buddy, buffers) = (Zone::new(FRAMES)?, Buddy::new(FRAMES), arena()?);
    let (zone, buddy, memory) = (&zone, &buddy, &memory);
    let of_zone = |name, fill: Fill| {
        Subject::new(name, move |out: &mut Samples| {
            let mut memory = memory.borrow_mut();
            let slice = memory.as_mut_slice().unwrap_or_default();
            measure(out, requests, Numbered::new((zone.local(), fill), slice))
        })
    };
    harness.interleave(vec![
        Subject::new("single", move |out: &mut Samples| {
            let mut memory = memory.borrow_mut();
            measure(
                out,
                requests,
                Numbered::new(buddy.owner(), memory.as_mut_slice().unwrap_or_default()),
            )
        }),
        of_zone("list", |slots, local| {
            refill_from_list(slots, local);
            Ok(())
        }),
        of_zone("array", |slots, local| refill_at_once(slots, |slots| local.fill(slots))),
        Subject::new("pinfold-arena", move |out: &mut Samples| {
            measure(out, requests, buffers.local())
        }),
    ])
}

/// What a server took for its requests.
#[derive(Default)]
struct Took {
    wall: Duration,
    processor: Duration,
    refills: Duration,
    /// How many pages were allocated in them.
    pages: usize,
}

/// Makes a run: a client on another thread, the server on this one. What the first requests cost
/// does not count.
#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 pages a run")]
fn measure<P: Pages>(out: &mut Samples, requests: usize, pages: P) -> Result<(), BenchError> {
    let warm_up = requests / 8 + 2 * PASSED;
    let (ours, theirs) = UnixStream::pair().map_err(BenchError::Stream)?;
    let took = std::thread::scope(|scope| {
        let client = spawn_second(scope, move || client(theirs, warm_up + requests))?;
        let mut server =
            Server { pages, stream: ours, slots: [const { None }; PAGES], passed: VecDeque::new() };
        let took = server.serve(warm_up).and_then(|_| server.serve(requests)).and_then(|took| {
            server.close()?;
            Ok(took)
        });
        // A client that still waits ends with its socket.
        drop(server);
        let sent = client.join().unwrap_or(Err(BenchError::Thread));
        took.and_then(|took| sent.map(|()| took))
    })?;
    let each = 1.0 / requests as f64;
    let nanoseconds = took.refills.as_secs_f64() * 1e9;
    out.figure("rpc-259", Metric::Rate, "MiB/s", requests as f64 / took.wall.as_secs_f64());
    out.figure(
        "rpc-259",
        Metric::Time,
        "us CPU/request",
        took.processor.as_secs_f64() * 1e6 * each,
    );
    out.figure("rpc-259", Metric::Time, REFILL, nanoseconds / took.pages as f64);
    Ok(())
}

/// Sends requests. The first word of each page is its number in the payload.
fn client(mut stream: UnixStream, requests: usize) -> Result<(), BenchError> {
    let mut payload = vec![0x5a; PAYLOAD * PAGE];
    for (number, page) in payload.chunks_exact_mut(PAGE).enumerate() {
        page.iter_mut().zip(number.to_le_bytes()).for_each(|(to, from)| *to = from);
    }
    let (header, mut reply) = ([0; HEADER], [0; REPLY_BYTES]);
    for request in 0..requests + AHEAD {
        if request < requests {
            let mut parts = [IoSlice::new(&header), IoSlice::new(&payload)];
            let mut parts = &mut parts[..];
            while !parts.is_empty() {
                let sent = stream.write_vectored(parts).map_err(BenchError::Stream)?;
                IoSlice::advance_slices(&mut parts, sent);
            }
        }
        if request >= AHEAD {
            stream.read_exact(&mut reply).map_err(BenchError::Stream)?;
        }
    }
    Ok(())
}

/// The server, and its pages.
struct Server<P: Pages> {
    pages: P,
    stream: UnixStream,
    slots: Slots<P::Page>,
    passed: VecDeque<Vec<Option<P::Page>>>,
}

impl<P: Pages> Server<P> {
    /// Serves requests.
    fn serve(&mut self, requests: usize) -> Result<Took, BenchError> {
        let mut took = Took::default();
        let (began, processor) = (Instant::now(), thread_time());
        for _ in 0..requests {
            took.pages += self.slots.iter().filter(|slot| slot.is_none()).count();
            let start = Instant::now();
            self.pages.refill(&mut self.slots)?;
            took.refills += start.elapsed();
            self.receive()?;
            self.reply()?;
            if self.passed.len() > PASSED {
                self.passed.pop_front().map_or(Ok(()), |oldest| self.pages.free(oldest))?;
            }
        }
        Ok(Took {
            wall: began.elapsed(),
            processor: thread_time().saturating_sub(processor),
            ..took
        })
    }

    /// Receives a request, and passes its payload on.
    fn receive(&mut self) -> Result<(), BenchError> {
        let received = self.slots.get_mut(..REPLY).unwrap_or_default();
        let stream = &mut self.stream;
        self.pages.with_memory(received, |memory| receive_into(stream, memory))?;
        let payload = self.slots.get_mut(FIRST..REPLY).unwrap_or_default();
        self.passed.push_back(payload.iter_mut().map(Option::take).collect());
        Ok(())
    }

    /// Replies that the request has succeeded.
    fn reply(&mut self) -> Result<(), BenchError> {
        let page = self.slots.get_mut(REPLY..=REPLY).unwrap_or_default();
        let stream = &mut self.stream;
        self.pages.with_memory(page, |memory| {
            let reply =
                memory.first_mut().and_then(|page| page.get_mut(..REPLY_BYTES)).unwrap_or_default();
            reply.fill(0);
            stream.write_all(reply).map_err(BenchError::Stream)
        })
    }

    /// Frees all pages.
    fn close(&mut self) -> Result<(), BenchError> {
        self.passed.push_back(self.slots.iter_mut().map(Option::take).collect());
        self.passed.drain(..).try_for_each(|pages| self.pages.free(pages))
    }
}

/// Receives a header into the first page and a payload into the others, and looks at the first word
/// of each of these.
fn receive_into(stream: &mut UnixStream, memory: &mut [&mut [u8]]) -> Result<(), BenchError> {
    let mut parts = [const { None }; REPLY];
    let lengths = std::iter::once(HEADER).chain([PAGE; PAYLOAD]);
    for ((part, page), len) in parts.iter_mut().zip(memory.iter_mut()).zip(lengths) {
        *part = page.get_mut(..len).map(IoSliceMut::new);
    }
    let mut parts: Vec<_> = parts.into_iter().flatten().collect();
    let mut rest = &mut parts[..];
    while !rest.is_empty() {
        match stream.read_vectored(rest).map_err(BenchError::Stream)? {
            0 => return Err(BenchError::Stream(std::io::ErrorKind::UnexpectedEof.into())),
            received => IoSliceMut::advance_slices(&mut rest, received),
        }
    }
    for (number, page) in memory.iter().skip(FIRST).enumerate() {
        if page.first_chunk() != Some(&number.to_le_bytes()) {
            return Err(BenchError::WrongPage { page: number });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Options;

    #[test]
    fn every_subject_receives_all_pages_and_returns_them() {
        let records =
            run(&Harness::new("serve", Options { runs: 1, quick: true }, &|_| ())).unwrap();
        for unit in ["MiB/s", "us CPU/request", REFILL] {
            let of: Vec<_> = records.iter().filter(|record| record.unit == unit).collect();
            let subjects: Vec<_> = of.iter().map(|record| record.subject).collect();
            assert_eq!(subjects, ["single", "list", "array", "pinfold-arena"]);
            assert!(of.iter().all(|record| record.median > 0.0), "{of:?}");
        }
    }

    #[test]
    fn a_page_in_the_place_of_another_is_noticed() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        // Each page has the number of the first one.
        let sending = std::thread::spawn(move || theirs.write_all(&[0; HEADER + PAYLOAD * PAGE]));
        let mut pages = vec![[0; PAGE]; REPLY];
        let mut memory: Vec<&mut [u8]> = pages.iter_mut().map(|page| &mut page[..]).collect();
        let error = receive_into(&mut ours, &mut memory).unwrap_err();
        assert!(matches!(error, BenchError::WrongPage { page: 1 }), "{error}");
        sending.join().unwrap().unwrap();
    }
}
