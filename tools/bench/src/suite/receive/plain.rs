//! The rings of a socket, used bare: addresses go in and come out, and nothing records who owns
//! them.
#![expect(unsafe_code, reason = "a socket whose memory nothing but the baseline uses")]

use super::measure::{BATCH, BATCH_ENTRIES, PAGES, RINGS, Receiver, memory_bytes};
use crate::baseline::BaselineError;
use crate::baseline::buddy::{Buddy, Owner};
use crate::error::BenchError;
use pinfold::Arena;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::frame::{Frame, Order, Zone, ZoneLocal};
use pinfold_core::mem::DmaMemory;
use pinfold_xdp::socket::BusyPoll;
use pinfold_xdp::system::{
    Attached, Interface, Program, RawSocket, RingMemories, RingMemory, Umem,
};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A socket and the indices of the two rings that receiving uses.
pub(super) struct Plain<S> {
    socket: RawSocket,
    rings: RingMemories,
    source: S,
    filled: u32,
    taken: u32,
    /// The producer's index of the receive ring when it was last read.
    produced: u32,
    /// The number of empty entries in the fill ring.
    empty: u32,
    /// Detached after the last socket.
    _program: Arc<Program>,
}

impl<S: Source> Plain<S> {
    /// Opens a socket for each queue, with these sources of pages.
    pub(super) fn open(far: &Interface, sources: Vec<S>) -> Result<Vec<Self>, BenchError> {
        let queues = u32::try_from(sources.len()).unwrap_or(u32::MAX);
        let program = Arc::new(Program::attach(far, queues, Attached::Native)?);
        let open = |(queue, source)| Self::on_queue(far, queue, source, &program);
        (0..queues).zip(sources).map(open).collect()
    }

    fn on_queue(
        far: &Interface,
        queue: u32,
        source: S,
        program: &Arc<Program>,
    ) -> Result<Self, BenchError> {
        let umem = Umem::new(Arena::builder().size(memory_bytes()).build_unmapped()?);
        // SAFETY: every address comes from `source`, whose pages lie in the UMEM. Nothing else
        // allocates from this arena, and no reference into it is ever made.
        let (socket, rings) = unsafe { RawSocket::open(umem, 4096, RINGS) }?;
        let busy = BusyPoll::default();
        socket.prefer_busy_poll(busy.time, busy.budget)?;
        // The kernel releases a queue that was closed a moment ago in deferred work: milliseconds
        // later, or seconds on a busy machine.
        let limit = Instant::now() + Duration::from_secs(5);
        while let Err(error) = socket.bind(far, queue, None, true) {
            if Instant::now() > limit {
                return Err(error.into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        program.redirect(queue, &socket)?;
        let mut opened = Self {
            socket,
            rings,
            source,
            filled: 0,
            taken: 0,
            produced: 0,
            empty: RINGS.fill,
            _program: Arc::clone(program),
        };
        opened.refill()?;
        Ok(opened)
    }

    #[inline(always)]
    fn refill(&mut self) -> Result<(), BenchError> {
        let ring = &self.rings.fill;
        let before = self.filled;
        while self.empty >= BATCH_ENTRIES {
            let mut pages = [0; BATCH];
            self.source.fill(&mut pages)?;
            for page in pages {
                set(ring, self.filled % RINGS.fill, page);
                self.filled = self.filled.wrapping_add(1);
            }
            self.empty -= BATCH_ENTRIES;
        }
        if self.filled != before {
            ring.producer().store(self.filled, Ordering::Release);
        }
        Ok(())
    }
}

#[inline(always)]
fn set(ring: &RingMemory, at: u32, word: u64) {
    if let Some(place) = ring.words().get(at as usize) {
        place.store(word, Ordering::Relaxed);
    }
}

impl<S: Source> Receiver for Plain<S> {
    #[inline(always)]
    fn receive(&mut self) -> Result<u64, BenchError> {
        let ring = &self.rings.receive;
        if self.produced.wrapping_sub(self.taken) < BATCH_ENTRIES {
            self.produced = ring.producer().load(Ordering::Acquire);
        }
        let count = self.produced.wrapping_sub(self.taken).min(BATCH_ENTRIES);
        for _ in 0..count {
            let at = (self.taken % RINGS.receive) as usize * 2;
            let address = ring.words().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
            black_box(
                memory(&self.socket).read_u64(usize::try_from(address).unwrap_or(usize::MAX))?,
            );
            self.source.free(address & !(Frame::BYTES - 1))?;
            self.taken = self.taken.wrapping_add(1);
        }
        if count > 0 {
            ring.consumer().store(self.taken, Ordering::Release);
            self.empty += count;
            self.refill()?;
        }
        Ok(u64::from(count))
    }

    fn poll(&mut self) -> Result<(), BenchError> {
        let began = Instant::now();
        while began.elapsed() < BusyPoll::default().time {
            self.socket.kick_receive()?;
            if self.rings.receive.producer().load(Ordering::Acquire) != self.taken {
                return Ok(());
            }
        }
        self.socket.wait(false, Duration::from_millis(1))?;
        Ok(())
    }

    fn dropped(&self) -> Result<u64, BenchError> {
        let kernel = self.socket.stats()?;
        Ok(kernel.dropped + kernel.receive_ring_full)
    }
}

#[inline(always)]
fn memory(socket: &RawSocket) -> DmaMemory<'_> {
    let span = socket.umem().span();
    // SAFETY: the span of the socket's UMEM, which lives as long as the socket, and which nothing
    // has a reference into.
    unsafe { DmaMemory::from_raw(span.cast(), span.len()) }
}

// Where the bare rings get the pages for their fill ring from.

/// An allocator of the pages of a UMEM, by their addresses in it.
pub(super) trait Source: Send {
    /// Allocates a page for each place.
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError>;
    /// Frees a page.
    fn free(&mut self, page: u64) -> Result<(), BenchError>;
}

/// `single`: one call per page.
pub(super) struct Single<'b>(Owner<'b>);

impl<'b> Single<'b> {
    pub(super) fn new(buddy: &'b Buddy) -> Self {
        Self(buddy.owner())
    }
}

impl Source for Single<'_> {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        places.iter_mut().try_for_each(|place| {
            *place = self.0.alloc_page()?;
            Ok(())
        })
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        self.0.free_page(page);
        Ok(())
    }
}

/// `array`: an array of pages filled by one call.
pub(super) struct Array(ZoneLocal);

impl<'z> Array {
    pub(super) fn new(zone: &'z Zone) -> Self {
        Self(zone.local())
    }
}

impl Source for Array {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        let mut pages = [None; BATCH];
        let got = self.0.fill(&mut pages);
        for (place, page) in places.iter_mut().zip(pages.into_iter().flatten()) {
            *place = page.offset();
        }
        if got == BATCH { Ok(()) } else { Err(BenchError::Short { asked: BATCH, got }) }
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        free(&mut self.0, page)
    }
}

#[inline(always)]
fn free(local: &mut ZoneLocal, page: u64) -> Result<(), BenchError> {
    let frame = u32::try_from(page / Frame::BYTES).ok().and_then(Frame::new);
    Ok(local.free(frame.ok_or(BaselineError::Foreign(page))?, Order::PAGE)?)
}

/// `static-umem`: the addresses that were received last are entered again.
pub(super) struct Static(Vec<u64>);

impl Static {
    pub(super) fn new() -> Self {
        Self((0..u64::from(PAGES)).rev().map(|page| page * Frame::BYTES).collect())
    }
}

impl Source for Static {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        let (asked, got) = (BATCH, self.0.len().min(BATCH));
        let rest = self.0.len() - got;
        let top = self.0.get(rest..).unwrap_or_default();
        places.iter_mut().zip(top).for_each(|(place, page)| *place = *page);
        self.0.truncate(rest);
        if got == asked { Ok(()) } else { Err(BenchError::Short { asked, got }) }
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        self.0.push(page);
        Ok(())
    }
}
