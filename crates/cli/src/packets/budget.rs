//! How much memory each queue gets by default: a share of one budget for all queues, and rings that
//! fit into it.

use pinfold_xdp::Options;

/// A queue's share is a multiple of this, or below it a power of two, as memory is allocated.
const STEP: u64 = 2 << 20;
/// The smallest ring; a queue has twice as many chunks at least, so that as many are with the
/// program as with the kernel.
const SMALLEST_RING: u64 = 64;

/// The memory of one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Budget {
    /// Bytes for packets.
    pub(crate) bytes: u64,
    /// Entries of each ring.
    pub(crate) ring: u32,
}

impl Budget {
    /// The most bytes that a queue gets by default.
    pub(crate) const MOST: u64 = 32 << 20;

    /// Returns what was requested for a queue, with rings of the usual size.
    pub(crate) fn explicit(bytes: u64) -> Self {
        Self { bytes, ring: Options::DEFAULT_RING }
    }

    /// Divides half of the `allowed` bytes among the queues, of which each gets 32 MiB at most, and
    /// at least two chunks for each entry of the smallest ring. Only that least may be more than is
    /// allowed.
    pub(crate) fn shared(queues: usize, chunk_bytes: u32, allowed: u64) -> Self {
        let chunk = u64::from(chunk_bytes);
        let share = allowed / 2 / (queues as u64).max(1);
        let bytes = share.clamp(2 * SMALLEST_RING * chunk, Self::MOST);
        let bytes = if bytes < STEP { 1 << bytes.ilog2() } else { bytes - bytes % STEP };
        let ring = 1 << (bytes / chunk / 2).max(SMALLEST_RING).ilog2();
        Self { bytes, ring: Options::DEFAULT_RING.min(ring) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn queues_of_any_number_fit_into_machines_of_any_size() {
        for chunk in [2048, 4096] {
            for queues in 1..=256usize {
                let mut before = Budget { bytes: 0, ring: 0 };
                for machine in (0..=12).map(|power| (256 * MIB) << power) {
                    // A 16th is left to other programs.
                    let allowed = machine - machine / 16;
                    let budget = Budget::shared(queues, chunk, allowed);
                    let case = format!(
                        "{queues} queues, chunks of {chunk}, {} MiB: {budget:?}",
                        machine / MIB
                    );
                    assert!(budget.bytes * queues as u64 <= allowed, "{case}");
                    assert!(
                        budget.bytes <= Budget::MOST && budget.bytes.is_multiple_of(4096),
                        "{case}"
                    );
                    let is_allocated =
                        budget.bytes.is_power_of_two() || budget.bytes.is_multiple_of(STEP);
                    assert!(is_allocated, "no more is allocated: {case}");
                    let ring = u64::from(budget.ring);
                    assert!(budget.ring.is_power_of_two() && (64..=2048).contains(&ring), "{case}");
                    assert!(2 * ring * u64::from(chunk) <= budget.bytes, "{case}");
                    assert!(budget.bytes >= before.bytes && budget.ring >= before.ring, "{case}");
                    before = budget;
                }
                assert_eq!(before, Budget::explicit(Budget::MOST), "a terabyte has room for all");
            }
        }
    }

    #[test]
    fn the_memory_of_common_machines_is_divided() {
        for (queues, allowed, bytes, ring) in [
            (1, 240 * MIB, 32 * MIB, 2048),
            (4, 240 * MIB, 30 * MIB, 2048),
            // A control group whose limit is not known.
            (8, 512 * MIB, 32 * MIB, 2048),
            (16, 512 * MIB, 16 * MIB, 2048),
            (64, 512 * MIB, 4 * MIB, 512),
            (64, 1920 * MIB, 14 * MIB, 1024),
            (64, 15 << 30, 32 * MIB, 2048),
            (256, 240 * MIB, MIB / 2, 64),
            // Too little, which the check of the memory refuses.
            (256, 64 * MIB, MIB / 2, 64),
            (0, 0, MIB / 2, 64),
        ] {
            assert_eq!(
                Budget::shared(queues, 4096, allowed),
                Budget { bytes, ring },
                "{queues}, {allowed}"
            );
        }
    }
}
