//! The thread of one queue.

use super::capture::Stamped;
use super::counts::Counts;
use super::store::Store;
use crate::failure::Failure;
use crate::signal::Interrupt;
use pinfold::page_pool::Tag;
use pinfold_xdp::error::TransmitRefused;
use pinfold_xdp::{Options, Packet, Socket, SocketError, SocketReport, TransmitError, mirror};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The number of packets handled at a time.
const BATCH: u64 = 64;
/// The time that a thread waits for a packet before it checks whether to end.
const WAIT: Duration = Duration::from_millis(50);
/// The same while packets are being stored, whose pages are to return soon.
const WAIT_STORING: Duration = Duration::from_millis(1);
/// The interval at which the figures of the live line are renewed.
const PUBLISH: Duration = Duration::from_millis(200);

/// The state that the threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Raised to end all of them.
    pub(crate) stop: Interrupt,
    /// The number of packets that may still be received.
    left: Option<Left>,
}

/// Packets that may still be received.
#[derive(Debug)]
struct Left {
    /// The packets that no queue has claimed. Claims are returned where nothing was received, so
    /// that 0 is not the end.
    unclaimed: AtomicU64,
    unreceived: AtomicU64,
}

impl Shared {
    pub(crate) fn new(stop: Interrupt, count: Option<u64>) -> Self {
        let left =
            |count| Left { unclaimed: AtomicU64::new(count), unreceived: AtomicU64::new(count) };
        Self { stop, left: count.map(left) }
    }

    /// Claims up to `most` of the packets that may still be received.
    fn claim(&self, most: u64) -> u64 {
        let Some(left) = &self.left else { return most };
        let take = |left: u64| Some(left.saturating_sub(most));
        // Relaxed: only the number matters.
        let before =
            left.unclaimed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        before.min(most)
    }

    /// Of the packets that were claimed, some have been received.
    fn settle(&self, claimed: u64, received: u64) {
        if let Some(left) = &self.left {
            left.unclaimed.fetch_add(claimed.saturating_sub(received), Ordering::Relaxed);
            left.unreceived.fetch_sub(received, Ordering::Relaxed);
        }
    }

    /// Returns whether the last packet has been received.
    pub(crate) fn is_complete(&self) -> bool {
        self.left.as_ref().is_some_and(|left| left.unreceived.load(Ordering::Relaxed) == 0)
    }
}

/// The figures of a queue, at some time of its run.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) counts: Counts,
    pub(crate) report: SocketReport,
}

/// The treatment of a packet.
#[derive(Debug)]
pub(crate) enum Action<'t> {
    /// It is counted.
    Count,
    /// It is sent back.
    Reflect,
    /// It is passed to the thread that writes the file, which holds pages by this name.
    Capture(SyncSender<Stamped>, Tag),
    /// It is written to a target.
    Store(Store<'t>),
}

/// The thread of one queue: its socket, and its action.
#[derive(Debug)]
pub(crate) struct Worker<'s> {
    socket: Socket,
    action: Action<'s>,
    shared: &'s Shared,
    /// The newest figures.
    published: &'s Mutex<Option<Snapshot>>,
    /// The interface is gone or down: nothing can be sent.
    is_gone: bool,
    /// The number of replies queued for sending.
    queued: u64,
}

impl<'s> Worker<'s> {
    pub(crate) fn new(
        socket: Socket,
        action: Action<'s>,
        shared: &'s Shared,
        published: &'s Mutex<Option<Snapshot>>,
    ) -> Self {
        Self { socket, action, shared, published, is_gone: false, queued: 0 }
    }

    /// Receives until it is told to stop or something fails; returns the socket, which may still
    /// hold pages.
    pub(crate) fn run(mut self) -> (Socket, Result<(), Failure>) {
        let result = self.receive();
        // The others end, too.
        if result.is_err() {
            self.shared.stop.raise();
        }
        (self.socket, result)
    }

    /// Receives, and waits until all packets have been stored. Packets that were received are
    /// handled and counted, whatever fails.
    fn receive(&mut self) -> Result<(), Failure> {
        let mut counts = Counts::default();
        let ended = self.receive_all(&mut counts);
        let finished = match &mut self.action {
            Action::Store(store) => {
                store.finish(&mut self.socket, &mut counts).map_err(Failure::from)
            }
            Action::Reflect => {
                self.socket.drain();
                counts.not_reflected.not_sent +=
                    self.queued.saturating_sub(self.socket.traffic().sent);
                Ok(())
            }
            _ => Ok(()),
        };
        counts.reflected = self.socket.traffic().sent;
        let published = self.publish(&counts);
        ended.and(finished).and(published.map_err(Failure::from))
    }

    fn receive_all(&mut self, counts: &mut Counts) -> Result<(), Failure> {
        let mut packets = Vec::new();
        let told = self.receive_until_told(&mut packets, counts);
        match told {
            Ok(()) => self.receive_rest(&mut packets, counts),
            // Without its interface a socket still has what lies in its ring.
            Err(Failure::Socket(_)) => {
                self.is_gone = true;
                let rest = self.receive_rest(&mut packets, counts);
                told.and(rest)
            }
            Err(failure) => Err(failure),
        }
    }

    fn receive_until_told(
        &mut self,
        packets: &mut Vec<Packet>,
        counts: &mut Counts,
    ) -> Result<(), Failure> {
        let mut next = Instant::now();
        while !self.shared.stop.is_raised() && !self.shared.is_complete() {
            if self.receive_some(packets, counts)? == 0 {
                self.socket.wait(self.pause())?;
            }
            let now = Instant::now();
            if now >= next {
                counts.reflected = self.socket.traffic().sent;
                self.publish(counts)?;
                next = now + PUBLISH;
            }
        }
        Ok(())
    }

    /// Receives what lies in the ring when the end is requested, which no counter of the kernel
    /// has. Not more than the ring holds: packets that arrive meanwhile must not keep the program
    /// from ending.
    fn receive_rest(
        &mut self,
        packets: &mut Vec<Packet>,
        counts: &mut Counts,
    ) -> Result<(), Failure> {
        let mut left = u64::from(self.socket.ring_sizes().receive);
        while left > 0 {
            let received = self.receive_some(packets, counts)?;
            if received == 0 {
                break;
            }
            left = left.saturating_sub(received);
        }
        Ok(())
    }

    /// Receives and handles up to a batch; returns how many packets there were.
    fn receive_some(
        &mut self,
        packets: &mut Vec<Packet>,
        counts: &mut Counts,
    ) -> Result<u64, Failure> {
        let claimed = self.shared.claim(self.room(counts)?);
        let received = self.socket.receive(packets, usize::try_from(claimed).unwrap_or(0)) as u64;
        self.shared.settle(claimed, received);
        self.handle(packets, counts)?;
        Ok(received)
    }

    /// Returns how many packets can be handled now. Where the target is slower than the network,
    /// waits for it: meanwhile packets stay in the receive ring, and what does not fit there is
    /// counted by the kernel.
    fn room(&mut self, counts: &mut Counts) -> Result<u64, Failure> {
        let Action::Store(store) = &mut self.action else { return Ok(BATCH) };
        store.collect(&mut self.socket, counts)?;
        // A wait may end without a completion; without room nothing would be received, as if the
        // ring were empty.
        while store.room() == 0 {
            store.wait(&mut self.socket, counts)?;
        }
        Ok(BATCH.min(store.room() as u64))
    }

    /// Returns how long to wait for a packet.
    fn pause(&self) -> Duration {
        match &self.action {
            Action::Store(store) if !store.is_idle() => WAIT_STORING,
            _ => WAIT,
        }
    }

    fn handle(&mut self, packets: &mut Vec<Packet>, counts: &mut Counts) -> Result<(), Failure> {
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let received = if matches!(self.action, Action::Capture(..) | Action::Store(_)) {
            now()
        } else {
            Duration::ZERO
        };
        let link = self.socket.interface().link_type();
        let (before, mut failed) = (self.queued, Ok(()));
        packets.iter().for_each(|packet| counts.add(packet, link));
        if matches!(self.action, Action::Count) {
            self.socket.recycle_all(packets);
        }
        for mut packet in packets.drain(..) {
            match &mut self.action {
                // All of them, above.
                Action::Count => {}
                Action::Reflect => {
                    let not = &mut counts.not_reflected;
                    if !mirror::reflect(&mut packet, link) {
                        not.no_reply += 1;
                        self.socket.recycle(packet);
                    } else if self.is_gone {
                        not.not_sent += 1;
                        self.socket.recycle(packet);
                    } else if let Err(TransmitError { packet, why }) = self.socket.transmit(packet)
                    {
                        match why {
                            TransmitRefused::NoQueue { .. } => not.no_transmit_queue += 1,
                            TransmitRefused::Full => not.ring_full += 1,
                            _ => not.not_sent += 1,
                        }
                        self.socket.recycle(packet);
                    } else {
                        self.queued += 1;
                    }
                }
                Action::Store(_) if failed.is_err() => {
                    counts.not_stored += 1;
                    self.socket.recycle(packet);
                }
                Action::Store(store) => {
                    failed = store.write(packet, received, &mut self.socket, counts)
                }
                Action::Capture(sender, holder) => {
                    packet.hold_for(*holder);
                    match sender.try_send((packet, received)) {
                        Ok(()) => counts.captured += 1,
                        Err(TrySendError::Full((packet, _))) => {
                            counts.not_captured += 1;
                            self.socket.recycle(packet);
                        }
                        // The file failed: its thread says why.
                        Err(TrySendError::Disconnected((packet, _))) => {
                            counts.not_captured += 1;
                            self.shared.stop.raise();
                            self.socket.recycle(packet);
                        }
                    }
                }
            }
        }
        failed?;
        if self.queued > before {
            self.socket.flush()?;
        }
        Ok(())
    }

    /// Publishes the figures. If the kernel has no counters any more, those that it had last stay.
    fn publish(&self, counts: &Counts) -> Result<(), SocketError> {
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.socket.stats(), published.as_mut()) {
            (Ok(report), _) => *published = Some(Snapshot { counts: counts.clone(), report }),
            (Err(_), Some(last)) => last.counts = counts.clone(),
            (Err(error), None) => return Err(error),
        }
        Ok(())
    }
}

// How much memory each queue gets by default: a share of one budget for all queues, and rings that
// fit into it.

/// A queue's share is a multiple of this, or below it a power of two, as memory is allocated.
const STEP: u64 = 2 << 20;
/// The smallest ring; a queue has twice as many chunks at least, so that as many are with the
/// program as with the kernel.
const SMALLEST_RING: u64 = 64;

/// The memory of one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Budget {
    /// Bytes for packets.
    pub(crate) bytes: u64,
    /// Entries of each ring.
    pub(crate) ring: u32,
}

impl Budget {
    /// The most bytes that a queue gets by default.
    pub(crate) const MOST: u64 = 32 << 20;

    /// Returns the requested memory of a queue, with rings of the usual size.
    pub(crate) fn explicit(bytes: u64) -> Self {
        Self { bytes, ring: Options::DEFAULT_RING }
    }

    /// Divides half of the `allowed` bytes among the queues, of which each gets 32 MiB at most, and
    /// at least two chunks for each entry of the smallest ring. Only that least may be more than is
    /// allowed.
    pub(crate) fn shared(queues: usize, chunk_bytes: u32, allowed: u64) -> Self {
        let chunk = u64::from(chunk_bytes);
        let share = allowed / 2 / (queues as u64).max(1);
        let bytes = share.clamp(2 * SMALLEST_RING * chunk, Self::MOST);
        let bytes = if bytes < STEP { 1 << bytes.ilog2() } else { bytes - bytes % STEP };
        let ring = 1 << (bytes / chunk / 2).max(SMALLEST_RING).ilog2();
        Self { bytes, ring: Options::DEFAULT_RING.min(ring) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_are_claimed_are_not_received_yet() {
        let shared = Shared::new(Interrupt::default(), Some(10));
        assert_eq!((shared.claim(64), shared.claim(64)), (10, 0));
        assert!(!shared.is_complete(), "a queue that finds no packet returns its claim");
        shared.settle(10, 4);
        assert_eq!((shared.claim(64), shared.is_complete()), (6, false));
        shared.settle(6, 6);
        assert_eq!((shared.claim(64), shared.is_complete()), (0, true));
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn queues_of_any_number_fit_into_machines_of_any_size() {
        for chunk in [2048, 4096] {
            for queues in 1..=256usize {
                let mut before = Budget { bytes: 0, ring: 0 };
                for machine in (0..=12).map(|power| (256 * MIB) << power) {
                    // A 16th is left to other programs.
                    let allowed = machine - machine / 16;
                    let budget = Budget::shared(queues, chunk, allowed);
                    let case = format!(
                        "{queues} queues, chunks of {chunk}, {} MiB: {budget:?}",
                        machine / MIB
                    );
                    assert!(budget.bytes * queues as u64 <= allowed, "{case}");
                    assert!(
                        budget.bytes <= Budget::MOST && budget.bytes.is_multiple_of(4096),
                        "{case}"
                    );
                    let is_allocated =
                        budget.bytes.is_power_of_two() || budget.bytes.is_multiple_of(STEP);
                    assert!(is_allocated, "no more is allocated: {case}");
                    let ring = u64::from(budget.ring);
                    assert!(budget.ring.is_power_of_two() && (64..=2048).contains(&ring), "{case}");
                    assert!(2 * ring * u64::from(chunk) <= budget.bytes, "{case}");
                    assert!(budget.bytes >= before.bytes && budget.ring >= before.ring, "{case}");
                    before = budget;
                }
                assert_eq!(before, Budget::explicit(Budget::MOST), "a terabyte has room for all");
            }
        }
    }

    #[test]
    fn the_memory_of_common_machines_is_divided() {
        for (queues, allowed, bytes, ring) in [
            (1, 240 * MIB, 32 * MIB, 2048),
            (4, 240 * MIB, 30 * MIB, 2048),
            // A control group whose limit is not known.
            (8, 512 * MIB, 32 * MIB, 2048),
            (16, 512 * MIB, 16 * MIB, 2048),
            (64, 512 * MIB, 4 * MIB, 512),
            (64, 1920 * MIB, 14 * MIB, 1024),
            (64, 15 << 30, 32 * MIB, 2048),
            (256, 240 * MIB, MIB / 2, 64),
            // Too little, which the check of the memory refuses.
            (256, 64 * MIB, MIB / 2, 64),
            (0, 0, MIB / 2, 64),
        ] {
            assert_eq!(
                Budget::shared(queues, 4096, allowed),
                Budget { bytes, ring },
                "{queues}, {allowed}"
            );
        }
    }
}
