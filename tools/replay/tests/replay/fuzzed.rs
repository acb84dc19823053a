//! Reads any bytes as a trace. The body of the fuzz target `trace`, and of a property.

use pinfold_replay::{Limits, Trace};

/// The first byte chooses what precedes the rest: nothing, the head of an event, or magic numbers
/// of compressed files.
const HEADS: [&[u8]; 8] = [
    b"",
    b"t-1 [0] ..... 0.5: ",
    b"t-1 [0] ..... 0.5: dma_map_sg: d dir=NONE dma_addrs={",
    b"t-1 [0] ..... 0.5: dma_map_page: d dir=NONE dma_addr=",
    b"t-1 [0] ..... 0.5: map: IOMMU: iova=0x",
    b"t-1 [0] ..... 0.5: dma_alloc_sgt: d dir=NONE dma_addr=1000 size=99 phys_addrs={",
    b"\x1f\x8b\x08",
    b"\x28\xb5\x2f\xfd",
];

/// Panics if a count contradicts another.
pub(crate) fn check(input: &[u8]) {
    let Some((first, rest)) = input.split_first() else { return };
    let head = HEADS[usize::from(*first) % HEADS.len()];
    let text = [head, rest].concat();
    let limits = Limits { operations: 1000, ..Limits::default() };
    let Ok(trace) = Trace::read(text.as_slice(), &limits, &|_| true) else { return };
    for device in &trace.devices {
        let counts = &device.counts;
        assert_eq!(device.operations() as u64, counts.maps + counts.unmaps);
        assert_eq!(counts.never_unmapped, counts.maps - counts.unmaps);
        assert!(
            counts.peak_mappings <= counts.maps
                && counts.peak_bytes > 0
                && counts.lists <= counts.maps
        );
        let footprint = device.footprint();
        assert!(footprint.extents_at_peak > 0 && footprint.pages * 4096 <= footprint.span_bytes);
        assert!(footprint.table_pages_at_peak <= footprint.table_pages_ever);
    }
    let summary = &trace.summary;
    assert!(
        summary.damaged + summary.dma_events + summary.iommu_events + summary.other_events
            <= summary.lines
    );
}
