//! The mappings that remain when a trace ends.

use super::*;
use pinfold_core::table::MappedRun;

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
