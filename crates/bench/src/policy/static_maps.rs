//! The mappings that drivers make when they start and keep.

use std::iter::{once, repeat_n};

/// The sizes in pages of `count` mappings that four drivers make at boot, in order: two network
/// cards whose queues have a descriptor ring and a buffer for each descriptor, a storage controller
/// with queue pairs, and one with a command table for each of its commands. Each has an area of an
/// odd size too, for its firmware.
///
/// The study of 2015 counted tens of thousands of such mappings for the drivers of two network
/// cards alone.
pub(crate) fn static_maps(count: usize) -> impl Iterator<Item = u64> {
    let card = |firmware: u64, queues: usize, descriptors: usize, ring: u64, buffer: u64| {
        let queue = move |_| once(ring).chain(repeat_n(buffer, descriptors));
        once(firmware).chain((0..queues).flat_map(queue))
    };
    let cards = card(13, 16, 1024, 4, 1).chain(card(5, 8, 2048, 8, 2));
    let queue_pairs = once(3).chain(repeat_n(16, 64)).chain(repeat_n(4, 64));
    let command_tables = once(21).chain(repeat_n(8, 512));
    cards.chain(queue_pairs).chain(command_tables).chain(std::iter::repeat(1)).take(count)
}
