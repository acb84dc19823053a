//! Lines as kernels and tools print them, and lines that are none.

use super::*;
use proptest::prelude::*;

fn event(line: &str) -> Event<'_> {
    match Line::parse(line) {
        Line::Event(event) => event,
        other => panic!("{other:?}: {line}"),
    }
}

fn map(device: &str, access: Access, address: u64, size: u64, memory: u64) -> Action<'_> {
    Action::Map { device, allocated: false, access, address, size, memory: Recorded::At(memory) }
}

#[test]
fn the_same_event_of_every_tool_is_the_same() {
    let action = map("0000:00:03.0", Access::READ, 0xff88_4c0a, 54, 0x1_0bd2_0c0a);
    let fields = "0000:00:03.0 dir=TO_DEVICE dma_addr=ff884c0a size=54 phys_addr=10bd20c0a attrs=";
    for head in [
        // tracefs, with the flags of kernels since 5.17 and before 2.6.39, with record-tgid.
        "          iperf3-221     [000] b..1.    31.913312: dma_map_page: ",
        "          iperf3-221     [000]    31.913312: dma_map_page: ",
        "          iperf3-221     (    221) [000] b..1.    31.913312: dma_map_page: ",
        "          iperf3-221     (-------) [000] b..1.    31.913312: dma_map_page: ",
        // trace-cmd 2 and 3, with nanoseconds.
        "          iperf3-221   [000]    31.913312: dma_map_page:         ",
        "          iperf3-221   [000] b..1.    31.913312000: dma_map_page:         ",
        // perf script.
        "iperf3   221 [000]    31.913312:    dma:dma_map_page: ",
        // Names with everything in them.
        "          a-7 [1] b: c-221     [000] b..1.    31.913312: dma_map_page: ",
        "           <...>-221     [000] b..1.    31.913312: dma_map_page: ",
    ] {
        let line = format!("{head}{fields}");
        let found = event(&line);
        assert_eq!((found.time_ns, found.cpu, found.pid), (Some(31_913_312_000), 0, 221), "{line}");
        assert_eq!(found.action, action, "{line}");
    }
}

#[test]
fn events_of_all_kernels_are_known() {
    let head = "t-1 [2] ..... 0.5: ";
    let list = |text: &'static str| Fields(text).list("l").unwrap();
    let all = Access::all();
    let alloc = |memory| Action::Map {
        device: "d",
        allocated: true,
        access: all,
        address: 0x7000,
        size: 24,
        memory,
    };
    let unmap = |allocated| Action::Unmap { device: "d", allocated, address: 0x7000 };
    for (text, action) in [
        (
            "dma_map_phys: d dir=FROM_DEVICE dma_addr=7000 size=8 phys_addr=9000 attrs=MMIO|NO_WARN",
            map("d", Access::WRITE, 0x7000, 8, 0x9000),
        ),
        (
            "dma_map_resource: d dir=BIDIRECTIONAL dma_addr=7000 size=8 phys_addr=9000 attrs=",
            map("d", all, 0x7000, 8, 0x9000),
        ),
        // 6.12 before its stable releases recorded the physical address, and no direction.
        (
            "dma_alloc: d dma_addr=7000 size=24 phys_addr=9000 flags=GFP_KERNEL attrs=",
            alloc(Recorded::At(0x9000)),
        ),
        (
            "dma_alloc: d dir=BIDIRECTIONAL dma_addr=7000 size=24 virt_addr=00000000d40eed8d flags=GFP_KERNEL|__GFP_ZERO attrs=",
            alloc(Recorded::No),
        ),
        (
            "dma_alloc_pages: d dir=NONE dma_addr=7000 size=24 virt_addr=00000000d40eed8d flags= attrs=",
            alloc(Recorded::No),
        ),
        (
            "dma_alloc_sgt: d dir=BIDIRECTIONAL dma_addr=7000 size=24 phys_addrs={0x1000,0x3000} flags= attrs=",
            alloc(Recorded::Segments(list("l={0x1000,0x3000}"))),
        ),
        ("dma_unmap_page: d dir=FROM_DEVICE dma_addr=7000 size=8 attrs=", unmap(false)),
        ("dma_unmap_phys: d dir=FROM_DEVICE dma_addr=7000 size=8 attrs=", unmap(false)),
        ("dma_unmap_resource: d dir=FROM_DEVICE dma_addr=7000 size=8 attrs=", unmap(false)),
        ("dma_free: d dma_addr=7000 size=24 virt_addr=00000000d40eed8d attrs=", unmap(true)),
        (
            "dma_free_pages: d dir=NONE dma_addr=7000 size=24 virt_addr=00000000d40eed8d attrs=",
            unmap(true),
        ),
        ("dma_free_sgt: d dir=NONE dma_addr=7000 size=24 phys_addrs={0x1000,0x3000}", unmap(true)),
        (
            "dma_unmap_sg: d dir=NONE phys_addrs={0x1000,0x3000} attrs=",
            Action::UnmapList { device: "d", memory: list("l={0x1000,0x3000}") },
        ),
        (
            "dma_map_sg_err: d dir=NONE dma_addrs={0x1000} err=-12 attrs=",
            Action::Failed { device: "d" },
        ),
        (
            "dma_alloc_sgt_err: d dir=NONE dma_addr=0 size=24 virt_addr=0000000000000000 flags= attrs=",
            Action::Failed { device: "d" },
        ),
        (
            "dma_map_page: d dir=NONE dma_addr=ffffffffffffffff size=8 phys_addr=9000 attrs=",
            Action::Failed { device: "d" },
        ),
        (
            "dma_alloc: d dir=NONE dma_addr=0 size=8 virt_addr=(null) flags= attrs=",
            Action::Failed { device: "d" },
        ),
        (
            "map: IOMMU: iova=0x7000 - 0x9000 paddr=0x5000 size=8192",
            Action::IommuMap { iova: 0x7000, memory: 0x5000, size: 8192 },
        ),
        (
            "map: IOMMU: iova=0x7000 paddr=0x5000 size=8192",
            Action::IommuMap { iova: 0x7000, memory: 0x5000, size: 8192 },
        ),
        (
            "unmap: IOMMU: iova=0x7000 - 0x9000 size=8192 unmapped_size=4096",
            Action::IommuUnmap { iova: 0x7000, size: 8192, unmapped: 4096 },
        ),
        ("attach_device_to_domain: IOMMU: device=d", Action::Attach { device: "d" }),
        (
            "io_page_fault: IOMMU:e1000e d iova=0x0000000000007000 flags=0x0001",
            Action::Fault { device: "d" },
        ),
    ] {
        let line = format!("{head}{text}");
        assert_eq!(event(&line).action, action, "{text}");
    }
}

#[test]
fn a_scatter_list_of_two_kernels() {
    let lists = "dma_addrs={0xfff30000,0xfff31000} sizes={0x4,0x4000} phys_addrs={0x12fabf000,0x10bcf0000} attrs=";
    for extra in ["", "nents=2/2 ents=2/2 ", "nents=128/300 ents=2/2 [TRUNCATED] "] {
        let line = format!(
            "scsi_eh_2-179 [001] d..1. 13.793170: dma_map_sg: 0000:00:1f.2 dir=FROM_DEVICE {extra}{lists}"
        );
        let Action::MapList { device, access, addresses, sizes, memory, truncated } =
            event(&line).action
        else {
            panic!("{line}");
        };
        assert_eq!((device, access), ("0000:00:1f.2", Access::WRITE));
        let numbers = [addresses, sizes, memory].map(|list| list.iter().collect::<Vec<_>>());
        assert_eq!(
            numbers,
            [vec![0xfff3_0000, 0xfff3_1000], vec![4, 0x4000], vec![0x1_2fab_f000, 0x1_0bcf_0000]]
        );
        assert_eq!(truncated, extra.contains("TRUNCATED"));
    }
}

#[test]
fn lines_without_an_event_are_told_apart() {
    for header in
        ["", "  ", "# tracer: nop", "##### CPU 1 buffer started ####", "cpus=2", "CPU 1 is empty"]
    {
        assert_eq!(Line::parse(header), Line::Header, "{header}");
    }
    for (line, events) in [
        ("CPU:1 [LOST 20 EVENTS]", Some(20)),
        ("CPU:0 [LOST EVENTS]", None),
        ("CPU:3 [17 EVENTS DROPPED]", Some(17)),
        ("CPU:3 [EVENTS DROPPED]", None),
    ] {
        assert_eq!(Line::parse(line), Line::Lost { events }, "{line}");
    }
    for other in [
        "t-1 [0] ..... 0.5: dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=7000 size=8",
        "t-1 [0] ..... 0.5: map: page=3",
        "t-1 [0] ..... 0.5: sched_switch: prev_comm=a prev_pid=1",
        "t-1 [0] ..... 0.5: bprint: f: any words",
    ] {
        assert_eq!(Line::parse(other), Line::Other, "{other}");
    }
}

#[test]
fn damaged_lines_are_told_why() {
    let head = "t-1 [0] ..... 0.5: ";
    for (text, damage) in [
        ("dma_map_page: d dir=TO_DEVICE dma_addr=7000 size=8 phys_addr=90", Damage::MissingField),
        ("dma_map_page: d dir=TO_DEVICE dma_addr=7000 si", Damage::MissingField),
        ("dma_map_page:", Damage::MissingField),
        ("dma_map_page: d dir=SIDEWAYS dma_addr=7000 size=8 phys_addr=90 attrs=", Damage::BadField),
        (
            "dma_map_page: d dir=TO_DEVICE dma_addr=7000 size=0 phys_addr=90 attrs=",
            Damage::BadRange,
        ),
        (
            "dma_map_page: d dir=TO_DEVICE dma_addr=7000 size=4294967297 phys_addr=90 attrs=",
            Damage::BadRange,
        ),
        (
            "dma_map_page: d dir=TO_DEVICE dma_addr=fffffffffffffff0 size=32 phys_addr=90 attrs=",
            Damage::BadRange,
        ),
        ("dma_map_page: [FAILED TO PARSE] phys_addr=0x90 dma_addr=0x7000", Damage::NotDecoded),
        (
            "dma_map_sg: d dir=NONE dma_addrs={0x1,0x2} sizes={0x1} phys_addrs={0x1,0x2} attrs=",
            Damage::BadList,
        ),
        ("dma_map_sg: d dir=NONE dma_addrs={} sizes={} phys_addrs={} attrs=", Damage::BadList),
        (
            "dma_map_sg: d dir=NONE dma_addrs={0x1,0x2} sizes={0x1,0x1} phys_addrs={0x1} attrs=",
            Damage::BadList,
        ),
        ("dma_unmap_sg: d dir=NONE phys_addrs={0x1,0x", Damage::MissingField),
        ("map: IOMMU: iova=0x7000 - 0x9000 paddr=0x5000 size=81", Damage::BadRange),
        ("map: IOMMU: iova=0xfffffffffffff000 paddr=0x5000 size=8192", Damage::BadRange),
        ("unmap: IOMMU: iova=0x7000 - 0x9000 size=8192", Damage::MissingField),
        ("io_page_fault: IOMMU:e1000e iova=0x7000 flags=0x0001", Damage::MissingField),
    ] {
        assert_eq!(Line::parse(&format!("{head}{text}")), Line::Damaged(damage), "{text}");
    }
    for text in [
        "garbage",
        "t-1 [0] ..... 0.5",
        "t-1 [0] ..... x: map: IOMMU:",
        "[0] 0.5: dma_free: d",
        "t-1 [x] . 0.5: a: b",
    ] {
        assert_eq!(Line::parse(text), Line::Damaged(Damage::NoEvent), "{text}");
    }
}

#[test]
fn clocks_that_do_not_count_seconds_give_no_time() {
    let line = "t-1 [0] ..... 123456: dma_unmap_page: d dir=NONE dma_addr=7000 size=8 attrs=";
    assert_eq!(event(line).time_ns, None);
    assert_eq!(time("0.000000001:"), Some(Some(1)));
    assert_eq!(time("18446744073.709551615:"), Some(Some(u64::MAX)));
    for bad in ["18446744073.709551616:", "1.:", "1.0000000001:", "1.+5:", "1.5", "x:", ":"] {
        assert_eq!(time(bad), None, "{bad}");
    }
}

/// Returns a random event, as the kernel prints it.
fn line_of(head: &Head, action: &Action<'_>) -> String {
    let Head { task, pid, cpu, flags, seconds, micros } = head;
    let text = match *action {
        Action::Map { device, access, address, size, memory: Recorded::At(memory), .. } => format!(
            "dma_map_page: {device} dir={} dma_addr={address:x} size={size} phys_addr={memory:x} attrs=",
            direction(access)
        ),
        Action::Unmap { device, address, .. } => {
            format!("dma_unmap_page: {device} dir=TO_DEVICE dma_addr={address:x} size=4096 attrs=")
        }
        Action::IommuMap { iova, memory, size } => {
            format!(
                "map: IOMMU: iova=0x{iova:016x} - 0x{:016x} paddr=0x{memory:016x} size={size}",
                iova + size
            )
        }
        Action::IommuUnmap { iova, size, unmapped } => {
            format!(
                "unmap: IOMMU: iova=0x{iova:016x} - 0x{:016x} size={size} unmapped_size={unmapped}",
                iova + size
            )
        }
        ref other => panic!("{other:?}"),
    };
    format!("{task:>16}-{pid:<7} [{cpu:03}] {flags} {seconds:5}.{micros:06}: {text}")
}

fn direction(access: Access) -> &'static str {
    match (access.contains(Access::READ), access.contains(Access::WRITE)) {
        (true, false) => "TO_DEVICE",
        (false, true) => "FROM_DEVICE",
        _ => "BIDIRECTIONAL",
    }
}

#[derive(Debug)]
struct Head {
    task: String,
    pid: u32,
    cpu: u32,
    flags: String,
    seconds: u64,
    micros: u64,
}

fn heads() -> impl Strategy<Value = Head> {
    let flags = "[dDbB.][nNpP.][hHsS.][0-9.]([0-9.])?";
    ("[ -~]{1,15}", any::<u32>(), 0..4096u32, flags, 0..10_000_000u64, 0..1_000_000u64).prop_map(
        |(task, pid, cpu, flags, seconds, micros)| Head { task, pid, cpu, flags, seconds, micros },
    )
}

fn actions() -> impl Strategy<Value = Action<'static>> {
    let access = prop_oneof![Just(Access::READ), Just(Access::WRITE), Just(Access::all())];
    let address = 0..1u64 << 52;
    let size = 1..=MAX_BYTES;
    prop_oneof![
        (access, address.clone(), size.clone(), address.clone())
            .prop_map(|(access, at, size, memory)| map("0000:00:02.0", access, at, size, memory)),
        address.clone().prop_map(|address| Action::Unmap {
            device: "serial8250.0",
            allocated: false,
            address
        }),
        (address.clone(), address.clone(), size.clone())
            .prop_map(|(iova, memory, size)| Action::IommuMap { iova, memory, size }),
        (address, size.clone(), size).prop_map(|(iova, size, unmapped)| Action::IommuUnmap {
            iova,
            size,
            unmapped
        }),
    ]
}

proptest! {
    #[test]
    fn formatted_events_are_parsed_back(head in heads(), action in actions()) {
        // A name that ends like a whole head would be one.
        prop_assume!(!head.task.contains(['[', '#']) && !head.task.starts_with("CPU"));
        let line = line_of(&head, &action);
        let time_ns = Some(head.seconds * 1_000_000_000 + head.micros * 1000);
        let expected = Event { time_ns, cpu: head.cpu, pid: head.pid, action };
        prop_assert_eq!(Line::parse(&line), Line::Event(expected), "{}", line);
    }

    #[test]
    fn a_line_that_is_cut_is_no_other_event(head in heads(), action in actions(), cut in any::<prop::sample::Index>()) {
        prop_assume!(!head.task.contains(['[', '#']) && !head.task.starts_with("CPU"));
        let line = line_of(&head, &action);
        let part = &line[..cut.index(line.len())];
        if let Line::Event(event) = Line::parse(part) {
            // Only the last number of an unmap can be cut without a trace, and the empty value
            // behind `attrs=`.
            match (event.action, action) {
                (Action::IommuUnmap { iova, size, .. }, Action::IommuUnmap { iova: i, size: s, .. }) => {
                    prop_assert_eq!((iova, size), (i, s));
                }
                (found, expected) => prop_assert_eq!(found, expected),
            }
        }
    }

    #[test]
    fn any_text_is_accepted(text in "\\PC{0,200}", event in "(dma_[a-z_]{0,12}|map|unmap|io_page_fault)") {
        let _ = Line::parse(&text);
        let _ = Line::parse(&format!("t-1 [0] ..... 0.5: {event}: {text}"));
        let _ = Line::parse(&format!("t-1 [0] ..... 0.5: {event}: IOMMU:{text}"));
    }
}

/// Lines as long as any, of what a header could begin with: each was looked through once for each
/// of its brackets.
#[test]
fn long_lines_of_brackets_take_no_longer_than_others() {
    for part in ["[0]", "[", "[0] ", "a-1 [0]", "[0] 1.5: ", "a-1 [000] ..... 1.5: x "] {
        let line = part.repeat((64 << 10) / part.len());
        for _ in 0..200 {
            assert_eq!(Line::parse(&line), Line::Damaged(Damage::NoEvent), "{part}");
        }
    }
    // A header at the start has fields of any length.
    let list = vec!["0x1000"; 5000].join(",");
    let sizes = vec!["4096"; 5000].join(",");
    let line = format!(
        "t-1 [0] ..... 1.5: dma_map_sg: d dir=NONE dma_addrs={{{list}}} sizes={{{sizes}}} phys_addrs={{{list}}} attrs="
    );
    let Line::Event(Event { action: Action::MapList { addresses, .. }, .. }) = Line::parse(&line)
    else {
        panic!("a scatter list");
    };
    assert_eq!(addresses.count(), 5000);
}
