//! The fuzz target for traces, as a property: parts of the sample put together in any order, with
//! any bytes between.

mod fuzzed;

use proptest::prelude::*;

const SAMPLE: &str = include_str!("../../samples/linux-6.12-nvme-ahci-e1000e.txt");

proptest! {
    #[test]
    fn parts_of_the_sample_with_bytes_between(
        head in any::<u8>(),
        parts in proptest::collection::vec((any::<prop::sample::Index>(), 0..400usize, ".{0,9}"), 1..30),
    ) {
        let mut text = vec![head];
        for (start, len, between) in parts {
            let start = start.index(SAMPLE.len());
            text.extend_from_slice(&SAMPLE.as_bytes()[start..SAMPLE.len().min(start + len)]);
            text.extend_from_slice(between.as_bytes());
        }
        fuzzed::check(&text);
    }

    #[test]
    fn any_bytes(text in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzzed::check(&text);
    }
}
