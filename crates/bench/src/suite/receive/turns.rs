//! A run in which one thread sends and receives in turns: the program's own part of a packet.
//!
//! Sender and receiver on two processors wait for each other, and how long differs from run to run
//! by more than the subjects do. Here nothing runs at the same time, and no packet is dropped for
//! want of time. The driver passes the packets to the socket as they are sent, so its time is the
//! sender's, which is not measured. In each turn's time are one poll of the driver that finds
//! nothing more, and a reading of the clock: for all subjects the same few ns of a packet.

use super::measure::{LIMIT, Load, Receiver, drain, packet};
use super::processors::{processors, run_on};
use crate::error::BenchError;
use crate::harness::{Samples, thread_time};
use crate::record::Metric;
use crate::suite::handle::spawn_second;
use pinfold::xdp::{Generator, Interface};
use std::time::{Duration, Instant};

/// How many packets a turn of the sender is: fewer than the 256 that wait between the two ends.
const TURN: u32 = 192;

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
        generator.send(packet, TURN)?;
        let all = got + u64::from(TURN);
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
