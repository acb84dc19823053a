//! One run: generators, receivers, and their clocks.

use super::wire::{Wire, processors, run_on};
use crate::error::BenchError;
use crate::harness::{Samples, thread_time};
use crate::record::Metric;
use crate::suite::handle::spawn_second;
use pinfold_core::frame::Frame;
use pinfold_xdp::system::{Generator, Interface, RingSizes};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The number of packets handled at a time.
pub(super) const BATCH: usize = BATCH_ENTRIES as usize;
pub(super) const BATCH_ENTRIES: u32 = 64;
/// The number of pages of each socket, and the lengths of its rings: the defaults of `pinfold
/// receive`.
pub(super) const PAGES: u32 = 1 << 13;
pub(super) const RINGS: RingSizes =
    RingSizes { fill: 2048, completion: 2048, receive: 2048, transmit: 2048 };
/// The number of packets sent by one call of the generator.
const BURST: u32 = 8192;
/// The time limit of a run.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// The load of a run.
#[derive(Clone, Copy)]
pub(super) struct Load<'w> {
    pub(super) wire: &'w Wire,
    pub(super) bytes: usize,
    /// Whether the threads send as well, alternately.
    pub(super) turns: bool,
    /// The number of packets received by each thread.
    pub(super) packets: u64,
}

/// Returns the size of a socket's memory.
pub(super) fn memory_bytes() -> u64 {
    u64::from(PAGES) * Frame::BYTES
}

/// A subject's way of receiving.
pub(super) trait Receiver: Send {
    /// Receives up to [`BATCH`] packets, reads a word of each, returns their pages, and refills the
    /// fill ring.
    fn receive(&mut self) -> Result<u64, BenchError>;
    /// Makes the kernel poll the driver.
    fn poll(&mut self) -> Result<(), BenchError>;
    /// Returns how many packets the kernel has dropped at the socket.
    fn dropped(&self) -> Result<u64, BenchError>;
}

/// The time that a receiver took for its packets.
struct Took {
    wall: Duration,
    /// The thread's processor time, without the polls that found nothing.
    processor: Duration,
    /// Packets that the kernel dropped at the socket meanwhile.
    dropped: u64,
}

/// Executes a run: opens a receiver for each queue, sends more than they can receive, and records
/// rate, processor time and drops.
#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 packets a run")]
pub(super) fn measure_at_once<R: Receiver>(
    case: &'static str,
    load: Load<'_>,
    open: impl FnOnce(&Interface) -> Result<Vec<R>, BenchError>,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let threads = load.wire.queues;
    let receivers = open(&load.wire.far()?)?;
    let near = load.wire.near()?;
    let processors = processors()?;
    let stop = &AtomicBool::new(false);
    let took = std::thread::scope(|scope| {
        // The driver chooses the queue by the sender's processor, so generators are on the first
        // ones; receivers on the last.
        let generators = processors.iter().take(threads).map(|processor| {
            let near = &near;
            spawn_second(scope, move || {
                run_on(*processor).and_then(|()| generate(near, load.bytes, stop))
            })
        });
        let generators = generators.collect::<Result<Vec<_>, _>>();
        let started =
            receivers.into_iter().zip(processors.iter().rev()).map(|(mut receiver, processor)| {
                spawn_second(scope, move || {
                    run_on(*processor).and_then(|()| receive(&mut receiver, load.packets))
                })
            });
        let started = started.collect::<Result<Vec<_>, _>>();
        let joined = started.map(|threads| {
            threads
                .into_iter()
                .map(|one| one.join().unwrap_or(Err(BenchError::Thread)))
                .collect::<Vec<_>>()
        });
        stop.store(true, Ordering::Relaxed);
        for generator in generators? {
            generator.join().unwrap_or(Err(BenchError::Thread))?;
        }
        joined?.into_iter().collect::<Result<Vec<Took>, _>>()
    })?;
    let packets = load.packets as f64;
    let rate = took.iter().map(|one| packets / one.wall.as_secs_f64()).sum();
    let processor = took.iter().map(|one| one.processor.as_secs_f64()).sum::<f64>()
        / (packets * threads as f64);
    let dropped = took.iter().map(|one| one.dropped).sum::<u64>() as f64;
    out.figure(case, Metric::Rate, "packets/s", rate);
    out.figure(case, Metric::Time, "ns CPU/packet", processor * 1e9);
    out.figure(case, Metric::Count, "packets dropped", dropped);
    Ok(())
}

/// Receives the available packets.
#[inline(always)]
pub(super) fn drain(receiver: &mut impl Receiver) -> Result<u64, BenchError> {
    let mut got = 0;
    loop {
        match receiver.receive()? {
            0 => return Ok(got),
            received => got += received,
        }
    }
}

/// Returns a broadcast of this size, of the type for local experiments.
pub(super) fn packet(bytes: usize) -> Vec<u8> {
    let header = [[0xff; 6], [2, 0, 0, 0, 0, 1]].concat().into_iter().chain([0x88, 0xb5]);
    header.chain(std::iter::repeat(0x5a)).take(bytes).collect()
}

/// Sends until the stop flag is set.
fn generate(near: &Interface, bytes: usize, stop: &AtomicBool) -> Result<(), BenchError> {
    let generator = Generator::through(near)?;
    let packet = packet(bytes);
    while !stop.load(Ordering::Relaxed) {
        generator.send(&packet, BURST)?;
    }
    Ok(())
}

/// Receives a part of the packets without counting, and then all of them.
fn receive(receiver: &mut impl Receiver, packets: u64) -> Result<Took, BenchError> {
    until(receiver, packets / 8 + 4096)?;
    let before = receiver.dropped()?;
    let took = until(receiver, packets)?;
    Ok(Took { dropped: receiver.dropped()?.saturating_sub(before), ..took })
}

#[inline(always)]
fn until(receiver: &mut impl Receiver, packets: u64) -> Result<Took, BenchError> {
    let (began, mut processor, mut got) = (Instant::now(), Duration::ZERO, 0);
    while got < packets {
        let (before, start) = (got, thread_time());
        receiver.poll()?;
        got += drain(receiver)?;
        // A poll that finds nothing waits for the sender, and is not the cost of a packet.
        if got > before {
            processor += thread_time().saturating_sub(start);
        } else if began.elapsed() > LIMIT {
            return Err(BenchError::Silent { asked: packets, got, seconds: LIMIT.as_secs() });
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 packets")]
    let share = packets as f64 / got as f64;
    // The last batch may be more than was asked for.
    Ok(Took {
        wall: began.elapsed().mul_f64(share),
        processor: processor.mul_f64(share),
        dropped: 0,
    })
}

// A run in which one thread sends and receives alternately: the program's own part of a packet.
//
// Sender and receiver on two processors wait for each other, and how long differs from run to run
// by more than the subjects do. Here nothing runs at the same time, and no packet is dropped for
// want of time. The driver passes the packets to the socket as they are sent, so its time is the
// sender's, which is not measured. The time of each burst includes one poll of the driver that
// finds nothing more, and a reading of the clock: for all subjects the same few ns of a packet.

/// The number of packets that the sender of such a run sends at a time: fewer than the 256 that
/// wait between the two ends.
const ALTERNATE: u32 = 192;

/// Opens a receiver for each queue and records the processor time of receiving.
#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 packets a run")]
pub(super) fn measure_turns<R: Receiver>(
    case: &'static str,
    load: Load<'_>,
    open: impl FnOnce(&Interface) -> Result<Vec<R>, BenchError>,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let receivers = open(&load.wire.far()?)?;
    let near = &load.wire.near()?;
    let last = processors()?.pop().unwrap_or(0);
    let took = std::thread::scope(|scope| {
        let threads = receivers.into_iter().map(|mut receiver| {
            spawn_second(scope, move || {
                run_on(last)?;
                let generator = Generator::through(near)?.prepared_on(near)?;
                let packet = packet(load.bytes);
                turns(&mut receiver, &generator, &packet, load.packets / 8)?;
                turns(&mut receiver, &generator, &packet, load.packets)
            })
        });
        let threads = threads.collect::<Result<Vec<_>, _>>()?;
        threads
            .into_iter()
            .map(|one| one.join().unwrap_or(Err(BenchError::Thread)))
            .sum::<Result<f64, _>>()
    })?;
    out.figure(case, Metric::Time, "ns CPU/packet", took * 1e9 / load.wire.queues as f64);
    Ok(())
}

/// Returns the processor time in seconds of receiving one packet.
#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 packets a run")]
#[inline(always)]
fn turns(
    receiver: &mut impl Receiver,
    generator: &Generator,
    packet: &[u8],
    packets: u64,
) -> Result<f64, BenchError> {
    let (began, mut processor, mut got) = (Instant::now(), Duration::ZERO, 0);
    while got < packets {
        generator.send(packet, ALTERNATE)?;
        let all = got + u64::from(ALTERNATE);
        while got < all {
            let (before, start) = (got, thread_time());
            receiver.poll()?;
            got += drain(receiver)?;
            if got == before {
                break;
            }
            processor += thread_time().saturating_sub(start);
        }
        if got < all && began.elapsed() > LIMIT {
            return Err(BenchError::Silent { asked: packets, got, seconds: LIMIT.as_secs() });
        }
    }
    Ok(processor.as_secs_f64() / got as f64)
}
