//! Whole traces: the sample, in every compression, and damaged ones.

use super::*;
use crate::policy::PolicyKind;
use pinfold_core::table::MappedRun;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

const SAMPLE: &str = include_str!("../samples/linux-6.12-nvme-ahci-e1000e.txt");

fn read(text: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
    Trace::read(text.as_ref(), &Limits::default(), &|_| true)
}

fn device<'t>(trace: &'t Trace, name: &str) -> &'t Device {
    trace.devices.iter().find(|device| device.name == name).unwrap()
}

/// Events as the kernel prints them, one microsecond apart.
fn text(events: &[&str]) -> String {
    let lines = events.iter().enumerate();
    lines.map(|(at, event)| format!("  task-7     [001] .....     1.{at:06}: {event}\n")).collect()
}

#[test]
fn the_sample_has_the_events_that_words_in_it_say() {
    let trace = read(SAMPLE).unwrap();
    // A second reader: an event is the word in front of its device, or of `IOMMU:`.
    let mut words: HashMap<(&str, &str), u64> = HashMap::new();
    for line in SAMPLE.lines() {
        let all: Vec<&str> = line.split_whitespace().collect();
        for pair in all.windows(2) {
            if pair[1] == "IOMMU:" || pair[1].starts_with("0000:") {
                *words.entry((pair[0], pair[1])).or_default() += 1;
            }
        }
    }
    let count = |event: &str, device: &str| words.get(&(event, device)).copied().unwrap_or(0);
    for name in ["0000:00:02.0", "0000:00:1f.2", "0000:00:03.0"] {
        let counts = device(&trace, name).counts;
        let maps = ["dma_map_page:", "dma_map_sg:", "dma_alloc:"].map(|event| count(event, name));
        let unmaps =
            ["dma_unmap_page:", "dma_unmap_sg:", "dma_free:"].map(|event| count(event, name));
        assert_eq!(counts.maps, maps.iter().sum::<u64>(), "{name}");
        assert_eq!(counts.unmaps + counts.unmaps_without_map, unmaps.iter().sum::<u64>(), "{name}");
        assert_eq!(counts.lists, count("dma_map_sg:", name), "{name}");
        assert_eq!(counts.never_unmapped, counts.maps - counts.unmaps, "{name}");
    }
    let summary = &trace.summary;
    let iommu = count("map:", "IOMMU:") + count("unmap:", "IOMMU:");
    assert_eq!(summary.iommu_events, iommu);
    // In file order the parts of the sample are separate: assigned and unassigned calls together
    // are everything.
    let assigned: u64 = trace
        .devices
        .iter()
        .map(|device| device.counts.iommu_maps + device.counts.iommu_unmaps)
        .sum();
    let unmaps_left_out: u64 =
        trace.devices.iter().map(|device| device.counts.unmaps_without_map).sum();
    assert_eq!(assigned + summary.iommu_unassigned, iommu);
    assert!(
        summary.iommu_unassigned <= unmaps_left_out + 2,
        "those of unmaps without a map, and cut ends: {summary:?}"
    );
    assert_eq!((summary.damaged, summary.losses, summary.other_events), (0, 0, 0));
    assert_eq!((summary.lines, summary.cpus), (SAMPLE.lines().count() as u64, 2));
}

/// The numbers of `grep -c`, for instance `grep -c 'dma_map_sg: 0000:00:1f.2'`.
#[test]
fn the_sample_has_the_counts_of_grep() {
    let trace = read(SAMPLE).unwrap();
    let maps = ["0000:00:02.0", "0000:00:1f.2", "0000:00:03.0"]
        .map(|name| device(&trace, name).counts.maps);
    assert_eq!(maps, MAPS_BY_GREP);
    let ahci = device(&trace, "0000:00:1f.2").counts;
    assert_eq!((ahci.lists, ahci.unmaps, ahci.never_unmapped), (10, 10, 6));
    assert_eq!(
        ahci.without_memory, 0,
        "the memory of its allocations is in the IOMMU's events before them"
    );
}

/// `grep -cE 'dma_(map_page|map_sg|alloc): DEVICE'` for the three devices.
const MAPS_BY_GREP: [u64; 3] = [66, 16, 158];

#[test]
fn gzip_and_zstd_are_found_by_their_contents() {
    let plain = format!("{:?}", read(SAMPLE).unwrap());
    let (first, second) = SAMPLE.split_at(SAMPLE.len() / 2);
    let gzip = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |text: &str| {
        ruzstd::encoding::compress_to_vec(
            text.as_bytes(),
            ruzstd::encoding::CompressionLevel::Fastest,
        )
    };
    let skipped = [&[0x5e, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3][..], &zstd(SAMPLE)].concat();
    for compressed in [
        gzip(SAMPLE),
        [gzip(first), gzip(second)].concat(),
        zstd(SAMPLE),
        [zstd(first), zstd(second)].concat(),
        skipped,
    ] {
        assert_eq!(format!("{:?}", read(compressed).unwrap()), plain);
    }
    let cut = |whole: &[u8]| whole[..whole.len() / 2].to_vec();
    // zstd's decoder keeps what later blocks may refer to: with blocks of 128 KiB, all of the first
    // one.
    let long = SAMPLE.repeat(4);
    for compressed in
        [cut(&gzip(SAMPLE)), cut(&zstd(&long)), [zstd(first), cut(&zstd(&long))].concat()]
    {
        let half = read(compressed).unwrap();
        assert!(
            half.summary.ended_early.is_some() && half.summary.lines > 10,
            "{:?}",
            half.summary
        );
    }
    let mut damaged = zstd(&long);
    let at = damaged.len() / 2;
    damaged[at..at + 64].fill(0xff);
    let half = read(damaged).unwrap().summary;
    assert!(half.ended_early.is_some() && half.lines > 10, "{half:?}");
    let formats: [(&[u8], &str); 4] = [
        (b"\x17\x08\x44tracing6\0", "trace-cmd report"),
        (b"PERFILE2h\0", "perf script -i"),
        (b"BZh91AY", "bzip2"),
        (b"\xfd7zXZ\0\0", "xz"),
    ];
    for (magic, program) in formats {
        let error = read(magic).unwrap_err();
        assert!(
            matches!(error, TraceError::Format { .. }) && error.to_string().contains(program),
            "{error}"
        );
    }
}

/// A reader that returns one byte at a time, interrupted.
struct Slow<'t>(&'t [u8], bool);

impl Read for Slow<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.1 = !self.1;
        if self.1 { Err(io::ErrorKind::Interrupted.into()) } else { self.0.read(&mut buf[..1]) }
    }
}

#[test]
fn short_reads_make_no_difference() {
    let slow = Trace::read(Slow(SAMPLE.as_bytes(), false), &Limits::default(), &|_| true).unwrap();
    assert_eq!(format!("{slow:?}"), format!("{:?}", read(SAMPLE).unwrap()));
}

#[test]
fn damaged_lines_and_losses_have_their_numbers() {
    let long = "x".repeat(MAX_LINE + 1);
    let good = text(&["dma_map_page: d dir=NONE dma_addr=1000 size=8 phys_addr=2000 attrs="]);
    let bad = format!(
        "# tracer: nop\n{long}\nCPU:0 [LOST 3 EVENTS]\nnonsense\n{good}CPU:1 [LOST EVENTS]\n\u{fffd}\u{0}\n"
    );
    let trace = read(bad.as_bytes()).unwrap();
    let summary = trace.summary;
    use parse::Damage;
    assert_eq!(
        summary.first_damaged,
        [(2, Damage::TooLong), (4, Damage::NoEvent), (7, Damage::NoEvent)]
    );
    assert_eq!((summary.lines, summary.damaged), (7, 3));
    assert_eq!((summary.losses, summary.lost_events, summary.first_loss), (2, 3, 3));
    // A line as long as is allowed, without an end.
    let exact = format!("{good}{}", "x".repeat(MAX_LINE));
    assert_eq!(read(exact).unwrap().summary.first_damaged, [(2, Damage::NoEvent)]);
}

#[test]
fn without_an_event_the_advice_is_to_record_some() {
    for empty in [
        &b""[..],
        &ruzstd::encoding::compress_to_vec(&b""[..], ruzstd::encoding::CompressionLevel::Fastest),
    ] {
        let error = read(empty).unwrap_err();
        assert!(
            matches!(error, TraceError::Empty) && error.to_string().contains("--how"),
            "{error}"
        );
    }
    for nothing in ["# tracer: nop\n", "\0\u{1}\u{2}", "IOMMU\nIOMMU\n"] {
        let error = read(nothing).unwrap_err();
        assert!(matches!(error, TraceError::NoEvents { .. }), "{error}");
        assert!(error.to_string().contains("pinfold replay --how"), "{error}");
    }
    let iommu = text(&["map: IOMMU: iova=0x7000 - 0x8000 paddr=0x5000 size=4096"]);
    assert!(matches!(
        read(iommu),
        Err(TraceError::NoEvents { lines: 1, iommu: 1, damaged: 0, .. })
    ));
}

#[test]
fn every_kind_of_mapping_is_counted_and_ends() {
    let trace = read(text(&[
        "attach_device_to_domain: IOMMU: device=d",
        "map: IOMMU: iova=0x7000 - 0x8000 paddr=0x5000 size=4096",
        "dma_alloc: d dir=NONE dma_addr=7000 size=24 virt_addr=1 flags= attrs=",
        "dma_alloc: d dir=NONE dma_addr=9000 size=24 virt_addr=1 flags= attrs=",
        "dma_map_page: d dir=TO_DEVICE dma_addr=7000 size=8 phys_addr=9000 attrs=",
        "dma_map_page: d dir=TO_DEVICE dma_addr=7000 size=8193 phys_addr=9000 attrs=",
        "dma_map_sg: d dir=NONE dma_addrs={0x20000} sizes={0x3001} phys_addrs={0x1000,0x9000} attrs=",
        "dma_unmap_page: d dir=TO_DEVICE dma_addr=7000 size=8 attrs=",
        "dma_free: d dir=NONE dma_addr=7000 size=24 virt_addr=1 attrs=",
        "unmap: IOMMU: iova=0x7000 - 0x8000 size=4096 unmapped_size=2097152",
        "dma_unmap_sg: d dir=NONE phys_addrs={0x1000,0x9000} attrs=",
        "dma_unmap_sg: d dir=NONE phys_addrs={0x1000,0x9000} attrs=",
        "dma_map_sg_err: d dir=NONE dma_addrs={0x1000} err=-12 attrs=",
        "io_page_fault: IOMMU:e1000e d iova=0x7000 flags=0x0001",
    ]))
    .unwrap();
    let device = device(&trace, "d");
    let expected = Counts {
        maps: 5,
        lists: 1,
        truncated: 0,
        split_evenly: 1,
        without_memory: 1,
        overlapping: 1,
        unmaps: 3,
        unmaps_without_map: 1,
        never_unmapped: 2,
        failed: 1,
        peak_mappings: 5,
        peak_bytes: (1 + 1 + 1 + 3 + 4) * 4096,
        pages_unmapped: 1 + 1 + 4,
        faults: 1,
        attached: 1,
        iommu_maps: 1,
        iommu_unmaps: 1,
        iommu_unmapped_pages: 1,
        strict_flush_pages: 1,
        iommu_unmaps_partial: 1,
    };
    assert_eq!(device.counts, expected);
    assert_eq!(device.peak_at, 5, "after the fifth map");
    let memory: Vec<&[Run]> =
        device.mappings.iter().map(|mapping| device.memory_of(mapping)).collect();
    assert_eq!(memory[0], [Run { start: 0x5000, len: 4096 }], "as the IOMMU's event says");
    assert_eq!(memory[3], [Run { start: 0x9000, len: 0x3000 }]);
    // 12,289 bytes in two segments: 6,144 and 6,145.
    assert_eq!(memory[4], [Run { start: 0x1000, len: 0x2000 }, Run { start: 0x9000, len: 0x2000 }]);
    assert_eq!(trace.summary.duration_ns, Some(13_000));
}

/// Kernels that record 128 segments of a map record all of its unmap.
#[test]
fn a_truncated_list_is_unmapped_by_the_whole_one() {
    let list = |count: u64, step: u64| {
        let numbers: Vec<String> = (1..=count).map(|at| format!("{:#x}", at * step)).collect();
        format!("{{{}}}", numbers.join(","))
    };
    let sizes = format!("{{{}}}", vec!["0x1000"; 128].join(","));
    let (recorded, whole) = (list(128, 0x2000), list(300, 0x2000));
    let map = format!(
        "dma_map_sg: d dir=NONE nents=128/300 ents=128/300 [TRUNCATED] dma_addrs={} sizes={sizes} phys_addrs={recorded} attrs=",
        list(128, 0x1000)
    );
    let unmap = format!("dma_unmap_sg: d dir=NONE phys_addrs={whole} attrs=");
    let counts = read(text(&[&map, &unmap, &unmap])).unwrap().devices[0].counts;
    assert_eq!((counts.truncated, counts.unmaps, counts.unmaps_without_map), (1, 1, 1));
    assert_eq!(counts.peak_bytes, 128 * 4096);
}

#[test]
fn the_limit_ends_the_reading() {
    let mut seen = 0;
    let trace =
        Trace::read(SAMPLE.as_bytes(), &Limits { operations: 10, ..Limits::default() }, &|_| true)
            .unwrap();
    for device in &trace.devices {
        seen += device.operations();
    }
    assert!(trace.summary.limited && seen == 10, "{seen}");
    assert!(!read(SAMPLE).unwrap().summary.limited);
}

/// Live mappings count while they live, and lists with their segments.
#[test]
fn memory_beyond_the_limit_is_refused_with_the_line() {
    let map = |at: u64| {
        format!("dma_map_page: d dir=NONE dma_addr={at:x}000 size=9 phys_addr={at:x}000 attrs=")
    };
    let unmap = |at: u64| format!("dma_unmap_page: d dir=NONE dma_addr={at:x}000 size=9 attrs=");
    let pairs: Vec<_> = (0..200u64).flat_map(|_| [map(1), unmap(1)]).collect();
    let live: Vec<_> = (1..=200u64).map(map).collect();
    let segments = |of: &str| format!("{{{}}}", vec![of; 300].join(","));
    let list = format!(
        "dma_map_sg: d dir=NONE dma_addrs={} sizes={} phys_addrs={} attrs=",
        segments("0x1000"),
        segments("4096"),
        segments("0x5000")
    );
    let lists = [list.clone(), list];
    let read = |events: &[String], bytes| {
        let events: Vec<_> = events.iter().map(String::as_str).collect();
        Trace::read(text(&events).as_bytes(), &Limits { bytes, ..Limits::default() }, &|_| true)
    };
    for (events, bytes, at) in
        [(&pairs[..], 81_000, None), (&live, 100_000, Some(132)), (&lists, 50_000, Some(1))]
    {
        match (read(events, bytes), at) {
            (Ok(_), None) => {}
            (Err(TraceError::Memory { line, operations, live, limit }), Some(at)) => {
                assert_eq!((line, operations, live, limit), (at, at, at, bytes));
            }
            (other, _) => panic!("{other:?}"),
        }
        read(events, 200_000).unwrap();
    }
    let error = read(&live, 2 << 20).err().or(read(&live, 99_000).err()).unwrap().to_string();
    assert!(error.contains("--limit 130") && error.contains("--memory"), "{error}");
}

#[test]
fn a_caller_can_stop_the_reading_and_the_replay() {
    let lines = "x\n".repeat(1 << 15);
    let limits = Limits::default();
    let stopped = Trace::read([SAMPLE, &lines].concat().as_bytes(), &limits, &|_| false);
    assert!(matches!(stopped, Err(TraceError::Stopped)));
    let events: Vec<_> = (0..5000u64)
        .map(|at| {
            format!("dma_map_page: d dir=NONE dma_addr={at:x}000 size=9 phys_addr={at:x}000 attrs=")
        })
        .collect();
    let trace = read(text(&events.iter().map(String::as_str).collect::<Vec<_>>())).unwrap();
    let places = Places::new(&trace).unwrap();
    let config = pinfold::soft::SoftConfig::default();
    let stopped =
        replay(&trace.devices[0], PolicyKind::None, &places, &config, Timing::Fast, &|_| false);
    assert!(matches!(stopped, Err(ReplayError::Stopped)));
}

#[test]
fn progress_counts_the_runs_and_pages_of_an_operation() {
    let list = |at: u64| {
        let of = |text: &dyn Fn(u64) -> String| (0..1500).map(text).collect::<Vec<_>>().join(",");
        // Every second page, so that no two are one run.
        let pages = of(&|segment| format!("0x{:x}000", (at * 1500 + segment) * 2));
        let sizes = of(&|_| "4096".into());
        format!(
            "dma_map_sg: d dir=NONE dma_addrs={{{pages}}} sizes={{{sizes}}} phys_addrs={{{pages}}} attrs="
        )
    };
    let large = |at: u64| {
        format!("dma_map_page: d dir=NONE dma_addr={at:x}0000000 size=268435456 phys_addr=0 attrs=")
    };
    for (events, least) in
        [((0..8).map(list).collect::<Vec<_>>(), 2), ((1..=16).map(large).collect(), 3)]
    {
        let trace = read(text(&events.iter().map(String::as_str).collect::<Vec<_>>())).unwrap();
        let (places, config) = (Places::new(&trace).unwrap(), pinfold::soft::SoftConfig::default());
        let calls = AtomicUsize::new(0);
        let keep_going = |_| calls.fetch_add(1, Ordering::Relaxed) < 1;
        let device = &trace.devices[0];
        let run = |keep_going: &(dyn Fn(usize) -> bool + Sync)| {
            replay(device, PolicyKind::None, &places, &config, Timing::Fast, keep_going)
        };
        assert!(matches!(run(&keep_going), Err(ReplayError::Stopped)));
        assert_eq!(calls.load(Ordering::Relaxed), 2, "it stops at once");
        calls.store(0, Ordering::Relaxed);
        run(&|_| calls.fetch_add(1, Ordering::Relaxed) < usize::MAX).unwrap();
        assert!(calls.load(Ordering::Relaxed) >= least);
    }
}

#[test]
fn a_strict_flush_is_the_aligned_block_around_the_range() {
    let trace = read(text(&[
        "dma_map_page: d dir=NONE dma_addr=1ff000 size=8192 phys_addr=9000 attrs=",
        "unmap: IOMMU: iova=0x1ff000 - 0x201000 size=8192 unmapped_size=8192",
        "dma_unmap_page: d dir=NONE dma_addr=1ff000 size=8192 attrs=",
    ]))
    .unwrap();
    let counts = trace.devices[0].counts;
    assert_eq!((counts.iommu_unmapped_pages, counts.strict_flush_pages), (2, 1024), "across 2 MiB");
}

/// Replays the sample through every policy, device by device, and has each outcome checked; the
/// text names device and policy.
fn for_each_outcome(check: impl Fn(&Device, PolicyKind, Outcome, &str)) {
    let trace = read(SAMPLE).unwrap();
    let places = Places::new(&trace).unwrap();
    let config = pinfold::soft::SoftConfig::default();
    for device in &trace.devices {
        for kind in PolicyKind::ALL {
            let outcome = replay(device, kind, &places, &config, Timing::Fast, &|_| true).unwrap();
            check(device, kind, outcome, &format!("{}, {}", device.name, kind.name()));
        }
    }
}

#[test]
fn every_policy_replays_the_sample_and_keeps_what_it_promises() {
    for_each_outcome(|device, kind, outcome, who| {
        let Counts { maps, unmaps, .. } = device.counts;
        assert_eq!((outcome.maps.count, outcome.unmaps.count), (maps, unmaps), "{who}");
        let mapped: u64 = device.memory.iter().map(|run| run.pages()).sum();
        assert!(
            outcome.footprint.pages <= mapped && outcome.footprint.extents_at_peak > 0,
            "{who}"
        );
        assert!(
            outcome.footprint.table_pages_at_peak <= outcome.footprint.table_pages_ever,
            "{who}"
        );
        let stats = outcome.stats;
        match kind {
            PolicyKind::None => assert_eq!((stats.invalidations, stats.waits), (0, 0), "{who}"),
            PolicyKind::LinuxStrict | PolicyKind::Strict => {
                assert!(stats.waits >= unmaps, "{who}: {stats}");
            }
            _ => assert_eq!(stats.waits > 0, unmaps > 0, "{who}: {stats}"),
        }
        if kind.is_strict() {
            assert_eq!((stats.reachable_ns, stats.held_bytes_peak), (0, 0), "{who}: {stats}");
        } else if stats.reused_while_reachable && unmaps > 0 {
            assert!(stats.reachable_ns > 0, "{who}: {stats}");
        }
    });
}

#[test]
fn original_timing_takes_as_long_as_the_trace() {
    let lines = [
        " t-1 [0] ..... 1.000000: dma_map_page: a dir=NONE dma_addr=1000 size=8 phys_addr=9000 attrs=\n",
        " t-1 [0] ..... 1.010000: dma_map_page: b dir=NONE dma_addr=1000 size=8 phys_addr=9000 attrs=\n",
        " t-1 [0] ..... 1.030000: dma_unmap_page: a dir=NONE dma_addr=1000 size=8 attrs=\n",
    ];
    let config = pinfold::soft::SoftConfig::default();
    let run = |text: &str| {
        let trace = read(text).unwrap();
        let places = Places::new(&trace).unwrap();
        replay_all(&trace, PolicyKind::Lazy, &places, &config, Timing::Original, &|_| true)
    };
    let began = std::time::Instant::now();
    let outcomes = run(&lines.concat()).unwrap();
    assert!(began.elapsed() >= std::time::Duration::from_millis(30), "{:?}", began.elapsed());
    assert_eq!(outcomes.iter().map(|outcome| outcome.maps.count).collect::<Vec<_>>(), [1, 1]);
    let timeless = run(&lines.concat().replace("1.0", ""));
    assert!(matches!(timeless, Err(ReplayError::NoTimes)), "{timeless:?}");
}

#[test]
fn a_table_too_small_is_an_error_that_names_the_operation() {
    let trace = read(SAMPLE).unwrap();
    let places = Places::new(&trace).unwrap();
    let config = pinfold::soft::SoftConfig { table_bytes: 4096, ..Default::default() };
    for kind in [PolicyKind::Lazy, PolicyKind::Strict] {
        let error =
            replay(&trace.devices[0], kind, &places, &config, Timing::Fast, &|_| true).unwrap_err();
        assert_eq!(error.table_full().map(|(policy, ..)| policy), Some(kind.name()), "{error}");
    }
    let error =
        replay(&trace.devices[0], PolicyKind::Lazy, &places, &config, Timing::Fast, &|_| true)
            .unwrap_err();
    let words = error.to_string();
    assert!(
        words.contains("lazy") && words.contains("operation 1 of") && words.contains("table pages"),
        "{words}"
    );
}

/// Each of the mappings of one address is found at once, however many there are.
#[test]
fn many_mappings_of_one_address_are_unmapped_in_order() {
    const COUNT: usize = 200_000;
    let map = "dma_map_page: d dir=NONE dma_addr=1000 size=1 phys_addr=1000 attrs=";
    let unmap = "dma_unmap_page: d dir=NONE dma_addr=1000 size=1 attrs=";
    let mut events = vec![map; COUNT];
    events.extend(vec![unmap; COUNT]);
    // With this many, moving all those behind each one would take minutes.
    let device = read(text(&events)).unwrap().devices.remove(0);
    assert_eq!((device.counts.unmaps, device.counts.never_unmapped), (COUNT as u64, 0));
    assert!(device.operations[COUNT..].iter().zip(0..).all(|(unmap, at)| unmap.mapping == at));
}

/// A list from one end of the addresses to the other contains calls of any size; their sums do not
/// wrap.
#[test]
fn sums_of_huge_calls_do_not_wrap() {
    const CALLS: usize = 256;
    let map = "dma_map_sg: d dir=NONE dma_addrs={0,ffffffffffff000} sizes={1000,1000} phys_addrs={1000,2000} attrs=";
    let call = "unmap: IOMMU: iova=0x0 size=1152921504606846976 unmapped_size=1152921504606846976";
    let unmap = "dma_unmap_sg: d dir=NONE phys_addrs={1000,2000} attrs=";
    let mut events = vec![map];
    events.extend(vec![call; CALLS]);
    events.push(unmap);
    let events: Vec<&str> = core::iter::repeat_n(events, 300).flatten().collect();
    let counts = read(text(&events)).unwrap().devices[0].counts;
    assert_eq!(counts.iommu_unmaps, 300 * CALLS as u64);
    assert_eq!((counts.iommu_unmapped_pages, counts.strict_flush_pages), (u64::MAX, u64::MAX));
}

/// A name that a terminal would obey, or that is no name, is damage.
#[test]
fn names_of_devices_can_be_printed() {
    let map = |name: &str| {
        format!("dma_map_page: {name} dir=NONE dma_addr=1000 size=1 phys_addr=1000 attrs=")
    };
    let long = "d".repeat(129);
    let names = ["d", "\u{1b}[31md", "d\0", "d\u{202e}", &long, &long[1..]].map(map);
    let attached = "attach_device_to_domain: IOMMU: device=\u{1b}[2J".to_owned();
    let all: Vec<&str> = names.iter().chain([&attached]).map(String::as_str).collect();
    let trace = read(text(&all)).unwrap();
    assert_eq!(trace.devices.len(), 2);
    let lines: Vec<u64> = trace.summary.first_damaged.iter().map(|(line, _)| *line).collect();
    assert_eq!((trace.summary.damaged, lines), (5, vec![2, 3, 4, 5, 7]));
}

/// Returns the addresses of what a table maps, as runs that do not abut.
fn extents(mapped: &[MappedRun]) -> Vec<Run> {
    let mut extents: Vec<Run> = Vec::new();
    for iova in mapped.iter().map(|run| run.iova) {
        match extents.last_mut().filter(|last| last.end() == iova.start().raw()) {
            Some(last) => last.len += iova.len(),
            None => extents.push(Run { start: iova.start().raw(), len: iova.len() }),
        }
    }
    extents
}

#[test]
fn a_table_maps_in_the_end_what_the_trace_never_unmaps() {
    for_each_outcome(|device, kind, outcome, who| {
        assert_eq!(
            outcome.mapped.is_some(),
            matches!(kind, PolicyKind::Strict | PolicyKind::Revoke | PolicyKind::Batch),
            "{who}"
        );
        let Some(mapped) = &outcome.mapped else { return };
        let left = trace::live_after(&device.operations, usize::MAX, &outcome.addresses);
        assert_eq!(extents(mapped), left, "{who}");
        assert_eq!(left.is_empty(), device.counts.never_unmapped == 0, "{who}");
    });
}
