//! The product: a socket of `pinfold-xdp` on a page pool.

use super::measure::{BATCH, RINGS, Receiver, memory_bytes};
use crate::error::BenchError;
use pinfold_xdp::socket::BusyPoll;
use pinfold_xdp::system::Interface;
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
