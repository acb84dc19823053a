//! Command identifiers.

/// How a queue makes command identifiers: the slot of the command in the low bits, and above it as
/// many bits of the slot's use count as fit. FFFFh is not used: it means "no command" in the error
/// log (Base 3.3.3.1).
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandIds {
    slot_bits: u32,
}

impl CommandIds {
    const RESERVED: u16 = 0xffff;

    /// Creates the scheme for `slots` slots: at least 1, and at most 65,535, as a ring of 65,536
    /// entries has.
    pub(super) fn new(slots: usize) -> Self {
        Self { slot_bits: (usize::BITS - (slots - 1).leading_zeros()).min(16) }
    }

    /// Returns the slot that an identifier names; it may be out of range.
    pub(super) fn slot(self, cid: u16) -> u16 {
        let [a, b, ..] = (u32::from(cid) & ((1 << self.slot_bits) - 1)).to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    pub(super) fn encode(self, uses: u16, slot: u16) -> u16 {
        // The upper bits of the use count are cut off, on both sides of each comparison.
        let [a, b, ..] = (u32::from(uses) << self.slot_bits | u32::from(slot)).to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    /// Returns the use count of the next command in `slot`.
    pub(super) fn next(self, uses: u16, slot: u16) -> u16 {
        let next = uses.wrapping_add(1);
        if self.encode(next, slot) == Self::RESERVED { next.wrapping_add(1) } else { next }
    }
}

/// Returns the identifier after `cid` for a queue that numbers its commands in order.
pub(super) fn next_sequential(cid: u16) -> u16 {
    if cid >= CommandIds::RESERVED - 1 { 0 } else { cid + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_identifier_is_ffff_for_any_number_of_slots() {
        for slots in [1, 2, 63, 64, 65, 1023, 1024, 4096, 32_768, 32_769, 65_535] {
            let ids = CommandIds::new(slots);
            let last = u16::try_from(slots - 1).unwrap();
            for slot in [0, 1.min(last), last / 2, last] {
                let mut uses = 0;
                for _ in 0..70_000 {
                    let before = ids.encode(uses, slot);
                    uses = ids.next(uses, slot);
                    let cid = ids.encode(uses, slot);
                    assert_ne!(cid, 0xffff, "{slots} slots");
                    assert_eq!(ids.slot(cid), slot);
                    // With 15 or 16 bits for the slot, none are left for the use count of the last
                    // slot.
                    assert!(cid != before || slots >= 32_768);
                }
            }
        }
        let mut cid = 0;
        for _ in 0..70_000 {
            cid = next_sequential(cid);
            assert_ne!(cid, 0xffff);
        }
    }
}
