//! Tables of the kinds that machines have, written by hand from the specification; and hostile ones.

use super::dmar_fuzzed;
use crate::dmar::{Dmar, DmarError, ScopeKind};
use proptest::prelude::*;

fn table(structures: &[&[u8]]) -> Vec<u8> {
    let mut table = b"DMAR\0\0\0\0\x01\0PINFLDDMARTEST\x01\0\0\0TEST\x01\0\0\0".to_vec();
    table.extend([38, 1]); // 39 bits, interrupt remapping
    table.extend([0; 10]);
    assert_eq!(table.len(), 48);
    structures.iter().for_each(|structure| table.extend_from_slice(structure));
    let length = table.len() as u32;
    table[4..8].copy_from_slice(&length.to_le_bytes());
    seal(&mut table);
    table
}

fn seal(table: &mut [u8]) {
    table[9] = 0;
    table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
}

fn structure(kind: u16, head: &[u8], scopes: &[&[u8]]) -> Vec<u8> {
    let scopes = scopes.concat();
    let length = (4 + head.len() + scopes.len()) as u16;
    [&kind.to_le_bytes()[..], &length.to_le_bytes(), head, &scopes].concat()
}

fn scope(kind: u8, enumeration: u8, bus: u8, path: &[u8]) -> Vec<u8> {
    [&[kind, 6 + path.len() as u8, 0, 0, enumeration, bus], path].concat()
}

fn unit(flags: u8, size: u8, segment: u16, base: u64, scopes: &[&[u8]]) -> Vec<u8> {
    let head = [&[flags, size][..], &segment.to_le_bytes(), &base.to_le_bytes()].concat();
    structure(0, &head, scopes)
}

fn region(base: u64, last: u64, scopes: &[&[u8]]) -> Vec<u8> {
    let head = [&[0, 0, 0, 0][..], &base.to_le_bytes(), &last.to_le_bytes()].concat();
    structure(1, &head, scopes)
}

/// As a client machine has it: a unit for graphics, one for the rest with an I/O APIC and a timer, a
/// region for graphics and one for a USB controller behind a bridge, ports with ATS, affinity,
/// a namespace device, and a structure of a type that does not exist yet.
fn client() -> Vec<u8> {
    let graphics = scope(1, 0, 0, &[2, 0]);
    let usb = scope(1, 0, 0, &[0x1c, 0, 3, 1]);
    table(&[
        &unit(0, 0, 0, 0xfed9_0000, &[&graphics]),
        &unit(1, 1, 0, 0xfed9_2000, &[&scope(3, 2, 0xf0, &[0x1f, 0]), &scope(4, 0, 0, &[0x1f, 0])]),
        &region(0x9d80_0000, 0x9fff_ffff, &[&graphics]),
        &region(0x8b00_0000, 0x8b00_ffff, &[&usb]),
        &structure(2, &[1, 0, 0, 0], &[]),
        &structure(2, &[0, 0, 0, 0], &[&scope(2, 0, 0, &[1, 0])]),
        &structure(3, &[[0; 12], [1; 12]].concat()[..16], &[]),
        &structure(4, b"\0\0\0\x05\\_SB.I2C0\0", &[]),
        &structure(77, &[1, 2, 3], &[]),
    ])
}

/// The secondary and the subordinate bus of the bridges of that machine.
fn bridges(bus: u8, device: u8, function: u8) -> Option<(u8, u8)> {
    match (bus, device, function) {
        (0, 0x1c, 0) => Some((4, 4)),
        (0, 1, 0) => Some((1, 3)),
        _ => None,
    }
}

#[test]
fn a_client_machine_is_understood() {
    let dmar = Dmar::parse(&client()).unwrap();
    assert_eq!((dmar.address_bits, dmar.interrupt_remapping), (39, true));
    let registers: Vec<_> = dmar
        .units
        .iter()
        .map(|unit| (unit.registers.start().raw(), unit.registers.len()))
        .collect();
    assert_eq!(registers, [(0xfed9_0000, 4096), (0xfed9_2000, 8192)]);
    assert_eq!(dmar.units[1].scopes[0].kind, ScopeKind::IoApic);
    assert_eq!(dmar.units[1].scopes[1].kind, ScopeKind::Hpet);
    assert_eq!(dmar.units[1].scopes[0].enumeration, 2);
    let unit_of = |device| dmar.unit_of(0, device, bridges).unwrap().registers.start().raw();
    assert_eq!(unit_of((0, 2, 0)), 0xfed9_0000);
    assert_eq!(unit_of((0, 2, 1)), 0xfed9_2000);
    assert_eq!(unit_of((4, 3, 1)), 0xfed9_2000);
    assert_eq!(dmar.unit_of(1, (0, 2, 0), bridges), None, "of another segment");
    let regions = |device| -> Vec<u64> {
        dmar.reserved_for(0, device, bridges).map(|region| region.range.start().raw()).collect()
    };
    assert_eq!(regions((4, 3, 1)), [0x8b00_0000], "behind its bridge");
    assert_eq!(regions((0, 3, 1)), [0_u64; 0]);
    assert_eq!(regions((0, 2, 0)), [0x9d80_0000]);
    assert!(dmar.ats[0].all && !dmar.ats[1].all);
    let port = &dmar.ats[1].scopes[0];
    for (device, named) in
        [((0, 1, 0), true), ((1, 0, 0), true), ((3, 7, 1), true), ((4, 0, 0), false)]
    {
        assert_eq!(port.names(device, bridges), named, "{device:?}");
    }
}

#[test]
fn a_server_has_units_in_several_segments_and_none_includes_all() {
    let below = scope(2, 0, 0x40, &[0, 0]);
    let bytes = table(&[
        &unit(0, 0, 0, 0xd37f_c000, &[&below]),
        &unit(1, 0, 0, 0xd37f_d000, &[]),
        &unit(0, 0, 1, 0xe37f_c000, &[&scope(1, 0, 0x40, &[0, 0])]),
    ]);
    let dmar = Dmar::parse(&bytes).unwrap();
    let at = |segment, bus| dmar.unit_of(segment, (bus, 0, 0), |_, _, _| Some((0x41, 0x4f)));
    assert_eq!(at(0, 0x45).unwrap().registers.start().raw(), 0xd37f_c000);
    assert_eq!(at(0, 0x50).unwrap().registers.start().raw(), 0xd37f_d000);
    assert_eq!(at(1, 0x40).unwrap().registers.start().raw(), 0xe37f_c000);
    assert_eq!(at(1, 0x41), None);
}

#[test]
fn what_follows_the_table_is_not_read() {
    let mut bytes = client();
    bytes.extend([0xff; 100]);
    assert!(Dmar::parse(&bytes).is_ok());
}

#[test]
fn a_cut_table_is_refused_at_every_length() {
    let whole = client();
    for length in 0..whole.len() {
        assert!(Dmar::parse(&whole[..length]).is_err(), "{length} bytes");
        if length >= 48 {
            // Shorter by its own account: only where a structure ends.
            let mut cut = whole[..length].to_vec();
            cut[4..8].copy_from_slice(&(length as u32).to_le_bytes());
            seal(&mut cut);
            let mut ends = 48;
            while ends < length {
                ends += usize::from(u16::from_le_bytes([whole[ends + 2], whole[ends + 3]]));
            }
            assert_eq!(Dmar::parse(&cut).is_ok(), ends == length, "{length} bytes");
        }
    }
}

#[test]
fn wrong_tables_are_refused_by_name() {
    let refused = |bytes: &[u8]| Dmar::parse(bytes).unwrap_err();
    let mut other = client();
    other[0] = b'X';
    assert_eq!(refused(&other), DmarError::Signature { found: *b"XMAR" });
    let mut sum = client();
    sum[50] ^= 4;
    assert!(matches!(refused(&sum), DmarError::Checksum { .. }));
    for (width, wrong) in [(30, true), (31, false), (63, false), (64, true)] {
        let mut bytes = client();
        bytes[36] = width;
        seal(&mut bytes);
        assert_eq!(
            Dmar::parse(&bytes) == Err(DmarError::Width { bits: u32::from(width) + 1 }),
            wrong
        );
    }
    // A structure of length 0 would be read for ever.
    let endless = [0, 0, 0, 0];
    assert!(matches!(refused(&table(&[&endless])), DmarError::Length { length: 0, least: 16, .. }));
    assert!(matches!(
        refused(&table(&[&[77, 0, 3, 0]])),
        DmarError::Length { length: 3, least: 4, .. }
    ));
    assert!(matches!(refused(&table(&[&[77, 0, 3]])), DmarError::Length { .. }));
    let mut short = unit(0, 0, 0, 0xfed9_0000, &[]);
    short[2] = 15;
    assert!(matches!(refused(&table(&[&short])), DmarError::Length { length: 15, .. }));
    for (base, last) in [(0x1800, 0x2fff), (0x1000, 0x2ffe), (0x3000, 0x2fff), (0, u64::MAX)] {
        let error = refused(&table(&[&region(base, last, &[])]));
        assert_eq!(error, DmarError::Address { at: 48, base, last });
    }
    assert!(matches!(refused(&table(&[&unit(0, 0, 0, !0xfff, &[])])), DmarError::Address { .. }));
    assert!(matches!(refused(&table(&[&unit(0, 0, 0, 0x800, &[])])), DmarError::Address { .. }));
    for path in [&[][..], &[1], &[1, 0, 2]] {
        let error = refused(&table(&[&unit(0, 0, 0, 0x1000, &[&scope(1, 0, 0, path)])]));
        assert_eq!(error, DmarError::Path { at: 64, bytes: path.len() });
    }
    let mut long = scope(1, 0, 0, &[1, 0]);
    for length in [0, 5, 9, 255] {
        long[1] = length;
        let error = refused(&table(&[&unit(0, 0, 0, 0x1000, &[&long])]));
        assert!(
            matches!(error, DmarError::Length { at: 64, least: 6, most: 8, .. }),
            "{length}: {error}"
        );
    }
    assert!(matches!(
        refused(&table(&[&unit(0, 0, 0, 0x1000, &[&[1]])])),
        DmarError::Length { .. }
    ));
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_make_sense(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        dmar_fuzzed::check(&bytes);
    }

    /// A real table with a few bytes changed gets further.
    #[test]
    fn changed_tables_are_refused_or_make_sense(
        changes in prop::collection::vec((0_usize..400, any::<u8>()), 1..5),
    ) {
        let mut bytes = client();
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        dmar_fuzzed::check(&bytes);
    }
}

#[test]
fn the_body_of_the_fuzz_target_accepts_a_real_table() {
    assert!(dmar_fuzzed::check(&client()));
}
