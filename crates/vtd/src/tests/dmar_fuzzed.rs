//! The body of the fuzz target `dmar`, which the tests run with random bytes as well: any bytes as a
//! table are refused, or everything in what they say is inside and whole pages.

#[cfg(test)]
use crate::dmar::Dmar;
#[cfg(not(test))]
use pinfold_vtd::dmar::Dmar;

#[cfg_attr(test, expect(unreachable_pub, reason = "the fuzz target's too"))]
/// Parses `input` as it is, and with its length and checksum put right.
pub fn check(input: &[u8]) -> bool {
    let mut right = input.to_vec();
    if let Some(length) = right.get_mut(4..8) {
        length.copy_from_slice(&u32::try_from(input.len()).unwrap_or(u32::MAX).to_le_bytes());
    }
    if let Some(signature) = right.get_mut(..4) {
        signature.copy_from_slice(b"DMAR");
    }
    if right.len() > 9 {
        right[9] = 0;
        right[9] = right.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    }
    let accepted = [input, &right].map(|table| Dmar::parse(table).is_ok_and(|dmar| inspect(&dmar)));
    accepted[1]
}

fn inspect(dmar: &Dmar) -> bool {
    assert!((32..=64).contains(&dmar.address_bits));
    let bridge =
        |_, device: u8, _| device.is_multiple_of(2).then_some((device, device.saturating_add(2)));
    for unit in &dmar.units {
        assert!(unit.registers.is_aligned(4096) && unit.registers.len() >= 4096);
        assert!(unit.scopes.iter().all(|scope| !scope.path.is_empty()));
    }
    for region in &dmar.reserved {
        assert!(region.range.is_aligned(4096));
    }
    for device in 0..4 {
        let unit = dmar.unit_of(0, (device, device, 0), bridge);
        assert!(unit.is_none_or(|unit| unit.segment == 0));
        let _ = dmar.reserved_for(0, (device, device, 0), bridge).count();
    }
    true
}
