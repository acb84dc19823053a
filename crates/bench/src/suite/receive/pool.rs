//! The product: a socket of `pinfold-xdp` on a page pool.

use super::measure::{BATCH, RINGS, Receiver, memory_bytes};
use crate::error::BenchError;
use crate::harness::{Samples, thread_time};
use crate::record::Metric;
use pinfold::page_pool::{Config, Page};
use pinfold::xdp::{Interface, Umem};
use pinfold::{Arena, PagePool};
use pinfold_xdp::socket::BusyPoll;
use pinfold_xdp::{Packet, Redirect, Socket};
use std::hint::black_box;
use std::time::Duration;

/// A socket, and the packets of a batch.
pub(super) struct Product {
    socket: Socket,
    packets: Vec<Packet>,
}

impl Product {
    /// Opens a socket for each queue.
    pub(super) fn open(far: &Interface, queues: usize) -> Result<Vec<Self>, BenchError> {
        let redirect = Redirect::attach(far)?;
        let options =
            Socket::options().memory(memory_bytes()).rings(RINGS).busy_poll(BusyPoll::default());
        let open = |queue| {
            let mut socket = options.queue(queue).open(far)?;
            socket.redirect(&redirect)?;
            Ok(Self { socket, packets: Vec::with_capacity(BATCH) })
        };
        (0..u32::try_from(queues).unwrap_or(u32::MAX)).map(open).collect()
    }
}

impl Receiver for Product {
    #[inline(always)]
    fn receive(&mut self) -> Result<u64, BenchError> {
        let count = self.socket.receive(&mut self.packets, BATCH);
        for packet in &self.packets {
            black_box(packet.memory().read_u64(0)?);
        }
        self.socket.recycle_all(&mut self.packets);
        Ok(count as u64)
    }

    fn poll(&mut self) -> Result<(), BenchError> {
        self.socket.wait(Duration::from_millis(1))?;
        Ok(())
    }

    fn dropped(&self) -> Result<u64, BenchError> {
        let kernel = self.socket.stats()?.kernel;
        Ok(kernel.dropped + kernel.receive_ring_full)
    }
}

/// Makes the calls of the pool that `rx-64` makes, in its pattern: 64 pages are allocated into a
/// full fill ring, and the 64 that have been there longest come back.
pub(super) fn calls(
    case: &'static str,
    rounds: usize,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let umem = Umem::new(Arena::builder().size(memory_bytes()).build_unmapped()?);
    let mut pool =
        PagePool::new(umem, "bench", Config { ring: RINGS.fill * 2, ..Config::default() })?;
    let holder = pool.tag("socket").unwrap_or_default();
    let mut ring: Vec<Option<Page<Umem>>> = (0..RINGS.fill).map(|_| None).collect();
    let mut full = pool.fill_for(&mut ring, holder);
    let began = thread_time();
    for batch in (0..ring.len() / BATCH).cycle().take(rounds) {
        let Some(batch) = ring.get_mut(batch * BATCH..(batch + 1) * BATCH) else { continue };
        batch.iter_mut().filter_map(Option::take).for_each(|page| pool.recycle(page));
        full = full.min(pool.fill_for(batch, holder));
    }
    let processor = thread_time().saturating_sub(began);
    if full < BATCH {
        return Err(BenchError::Short { asked: BATCH, got: full });
    }
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 pages")]
    let pages = (rounds * BATCH) as f64;
    out.figure(case, Metric::Time, "ns CPU/page", processor.as_secs_f64() * 1e9 / pages);
    Ok(())
}
