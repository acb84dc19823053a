//! The suite `receive`: a real socket, and where the pages of its fill ring come from.
//!
//! Two connected virtual interfaces in a network namespace of their own. The kernel sends copies of
//! one packet through one end ([`Generator`](pinfold_xdp::system::Generator)); at the other end the
//! driver's XDP program passes them to an `AF_XDP` socket, whose thread polls the driver itself. So
//! all of reception (the driver, the program, the copy into the page, the program's own part) is
//! time of the receiving thread, as on one processor of a server. Polls that find nothing do not
//! count: on a machine that has no processor to spare for the sender, packets per second are what
//! it sends.
//!
//! `pinfold` is the product with all its checks; the others are the rings used bare, with nothing
//! but their allocator.

mod measure;
mod plain;
mod product;
mod wire;

use super::Entry;
use crate::baseline::buddy::Buddy;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::Record;
use measure::{Load, PAGES, Receiver, measure_at_once, measure_turns};
use pinfold_core::frame::Zone;
use pinfold_xdp::system::Interface;
use plain::{Array, Plain, Single, Static};
use product::Product;
use wire::Wire;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("rx-64", "receive a packet of 64 bytes, read a word of it, return its page: one thread"),
    ("rx-1500", "the same with packets of 1,500 bytes"),
    ("rx-64-2t", "rx-64 with two queues, sockets and threads; all packets of both"),
    ("turns-64", "rx-64 by one thread that sends 192, then receives them: without the driver"),
    ("turns-1500", "the same with packets of 1,500 bytes"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "pinfold-xdp: packets that own their pages, and a page pool"),
    ("single", "bare rings; the page allocator of a kernel, one call per page"),
    ("array", "bare rings; a ZoneLocal: fill, 64 pages at a time"),
    ("static-umem", "bare rings; the addresses received are entered again, as in xdpsock"),
];

/// Case, bytes of a packet without the checksum of Ethernet, threads, whether they send as well,
/// packets of a run for each.
const SIZES: [(&str, usize, usize, bool, usize); 5] = [
    ("rx-64", 60, 1, false, 1 << 18),
    ("rx-1500", 1514, 1, false, 1 << 17),
    ("rx-64-2t", 60, 2, false, 1 << 17),
    ("turns-64", 60, 1, true, 1 << 19),
    ("turns-1500", 1514, 1, true, 1 << 18),
];

/// Measures the suite; without root or virtual interfaces its cases are skipped.
///
/// # Errors
/// The failure of a subject.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let mut records = Vec::new();
    for (case, bytes, threads, turns, full) in SIZES {
        if !harness.wants(case) {
            continue;
        }
        let wire = match Wire::new(threads) {
            Ok(wire) => wire,
            Err(BenchError::NoNetwork(why)) => {
                records.push(harness.skipped(case, &why));
                continue;
            }
            Err(error) => return Err(error),
        };
        let load = Load { wire: &wire, bytes, turns, packets: harness.scale(full) as u64 };
        records.extend(harness.interleave(subjects(case, load))?);
    }
    Ok(records)
}

fn measure<R: Receiver>(
    case: &'static str,
    load: Load<'_>,
    open: impl FnOnce(&Interface) -> Result<Vec<R>, BenchError>,
    out: &mut Samples,
) -> Result<(), BenchError> {
    if load.turns {
        measure_turns(case, load, open, out)
    } else {
        measure_at_once(case, load, open, out)
    }
}

fn subjects<'w>(case: &'static str, load: Load<'w>) -> Vec<Subject<'w, BenchError>> {
    let queues = load.wire.queues;
    let zones = move || (0..queues).map(|_| Zone::new(PAGES)).collect::<Result<Vec<_>, _>>();
    vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            measure(case, load, |far| Product::open(far, queues), out)
        }),
        Subject::new("single", move |out: &mut Samples| {
            let buddies: Vec<_> = (0..queues).map(|_| Buddy::new(PAGES)).collect();
            measure(
                case,
                load,
                |far| Plain::open(far, buddies.iter().map(Single::new).collect()),
                out,
            )
        }),
        Subject::new("array", move |out: &mut Samples| {
            let zones = zones()?;
            measure(case, load, |far| Plain::open(far, zones.iter().map(Array::new).collect()), out)
        }),
        Subject::new("static-umem", move |out: &mut Samples| {
            let sources = (0..queues).map(|_| Static::new()).collect();
            measure(case, load, |far| Plain::open(far, sources), out)
        }),
    ]
}
