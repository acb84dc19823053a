//! The rows.

use super::Side::{AtLeast, AtMost};
use super::{Figures, Side, Target};
use crate::record::Metric;

const fn row(
    what: &'static str,
    side: Side,
    (must, aim): (f64, Option<f64>),
    unit: &'static str,
    figure: fn(Figures<'_>) -> Option<f64>,
) -> Target {
    Target { what, side, must, aim, unit, figure }
}

/// Alloc and free of one block of the workload that began it: the medians of `subject`, added.
fn mpt3sas(figures: Figures<'_>, subject: &str) -> Option<f64> {
    let part = |case| figures.median("pool", case, subject);
    Some(part("mpt3sas-alloc")? + part("mpt3sas-free")?)
}

/// How many times as much two threads get done as one: a case's cost by one over that by two.
fn by_two(figures: Figures<'_>, suite: &str, one: &str, two: &str) -> Option<f64> {
    Some(figures.best(suite, one, "pinfold")? / figures.best(suite, two, "pinfold")?)
}

pub(super) const TARGETS: &[Target] = &[
    row("373,959 blocks, alloc + free: inblock takes", AtLeast, (8.0, Some(15.0)), "x", |f| {
        Some(mpt3sas(f, "inblock")? / mpt3sas(f, "pinfold")?)
    }),
    row("373,959 blocks, alloc + free of one", AtMost, (8.0, Some(4.0)), "ns", |f| {
        let best = |case| f.best("pool", case, "pinfold");
        Some(best("mpt3sas-alloc")? + best("mpt3sas-free")?)
    }),
    row("373,959 blocks, alloc: linear takes", AtLeast, (120.0, Some(250.0)), "x", |f| {
        f.times("pool", "mpt3sas-alloc", "linear")
    }),
    row("373,959 blocks, free: linear takes", AtLeast, (2_500.0, Some(5_000.0)), "x", |f| {
        f.times("pool", "mpt3sas-free", "linear")
    }),
    row("the safe Block takes, of the raw form", AtMost, (2.0, Some(1.3)), "x", |f| {
        Some(mpt3sas(f, "pinfold-block")? / mpt3sas(f, "pinfold")?)
    }),
    row("pair-64 takes, of inblock", AtMost, (0.25, Some(0.12)), "x", |f| {
        f.times("pool", "pair-64", "inblock").map(f64::recip)
    }),
    row("pair-4096 takes, of pair-16", AtMost, (1.2, Some(1.0)), "x", |f| {
        Some(f.median("pool", "pair-4096", "pinfold")? / f.median("pool", "pair-16", "pinfold")?)
    }),
    row("bulk-32, alloc + free of one block", AtMost, (3.0, Some(1.5)), "ns", |f| {
        f.best("pool", "bulk-32", "pinfold")
    }),
    row("checks on take, of checks off (pair-64)", AtMost, (1.3, Some(1.1)), "x", |f| {
        f.times("pool", "pair-64", "pinfold-unchecked").map(f64::recip)
    }),
    row("two threads on one pool get done, of one", AtLeast, (1.9, Some(2.0)), "x", |f| {
        by_two(f, "pool", "pair-64", "pair-64-2t")
    }),
    row("a 4 KiB frame out and back, Local", AtMost, (8.0, Some(4.0)), "ns", |f| {
        f.best("frame", "pair-4k", "pinfold")
    }),
    row("a 4 KiB frame out and back, shared", AtMost, (40.0, Some(25.0)), "ns", |f| {
        f.best("frame", "pair-4k", "pinfold-shared")
    }),
    row("fill-64, a frame", AtMost, (2.5, Some(1.2)), "ns", |f| f.best("frame", "fill-64", "pinfold")),
    row("fill-512, a frame", AtMost, (1.5, Some(0.7)), "ns", |f| f.best("frame", "fill-512", "pinfold")),
    row("259 pages of an RPC server: single takes, of array", AtLeast, (5.5, Some(10.0)), "x", |f| {
        Some(f.median("frame", "rpc-259", "single")? / f.median("frame", "rpc-259", "array")?)
    }),
    row("two threads on one zone get done, of one", AtLeast, (1.9, Some(2.0)), "x", |f| {
        by_two(f, "frame", "pair-4k", "pair-4k-2t")
    }),
    row("metadata of a 1 TiB zone, a frame", AtMost, (0.16, None), "bytes", |f| {
        f.other("frame", "zone-1t", "pinfold", Metric::Bytes)
    }),
    row("construction of a 1 TiB zone", AtMost, (100.0, Some(30.0)), "ms", |f| {
        f.best("frame", "zone-1t", "pinfold")
    }),
    row("page pool, local", AtMost, (8.0, Some(4.0)), "ns", |f| f.best("page-pool", "local", "pinfold")),
    row("page pool, ring", AtMost, (25.0, Some(12.0)), "ns", |f| f.best("page-pool", "ring", "pinfold")),
    row("register 1 GiB: pages-4k takes", AtLeast, (20.0, None), "x", |f| {
        f.times("buffer", "register-1g", "pages-4k")
    }),
    row("register 1 GiB: table of pages-4k is", AtLeast, (500.0, None), "x", |f| {
        let bytes = |subject| f.other("buffer", "register-1g", subject, Metric::Bytes);
        Some(bytes("pages-4k")? / bytes("pinfold")?)
    }),
    row("locate", AtMost, (5.0, None), "ns", |f| f.best("buffer", "locate", "pinfold")),
    row("8 MiB to segments", AtMost, (40.0, None), "ns", |f| f.best("buffer", "gather-8m", "pinfold")),
    row("8 MiB to segments: pages-4k takes", AtLeast, (60.0, None), "x", |f| {
        f.times("buffer", "gather-8m", "pages-4k")
    }),
    row("segments of 8 MiB on 2 MiB pages", AtMost, (4.0, Some(1.0)), "segments", |f| {
        f.other("buffer", "gather-8m", "pinfold", Metric::Segments)
    }),
    row("a read of 8 MiB submitted: 4 KiB pages take", AtLeast, (20.0, None), "x", |f| {
        f.times("buffer", "io-submit", "pages-4k")
    }),
];
