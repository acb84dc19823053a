//! A model network card behind ports.

use crate::{Effect, Nic, NicEvent, Pages, SoftBus, SoftConfig, domain};
use pinfold_core::access::{Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainLocal, Mapping};
use std::time::Duration;

const ENTRIES: u32 = 4;
/// The transmit ring is in the second half of the page.
const TRANSMIT: u64 = 2048;

/// The driver's side: its rings in one page, which stays mapped.
struct Driver<'d> {
    bus: &'d SoftBus,
    domain: DomainLocal,
    rings: Mapping<Pages, Bidirectional>,
}

impl<'d> Driver<'d> {
    fn new(domain: &'d Domain, bus: &'d SoftBus) -> (Self, Nic) {
        let rings = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
        let at = rings.iova().start();
        let card = Nic::new(bus.port())
            .receive_ring(at, ENTRIES)
            .transmit_ring(at.checked_add(TRANSMIT).unwrap(), ENTRIES);
        (Self { bus, domain: domain.local(), rings }, card)
    }

    fn map<D: Direction>(&mut self, direction: D) -> Mapping<Pages, D> {
        let pages = self.bus.alloc_pages(1).unwrap();
        self.domain.map(pages, direction).unwrap()
    }

    fn offset(ring: u64, entry: u32) -> usize {
        usize::try_from(ring + u64::from(entry) * Nic::DESCRIPTOR_BYTES).unwrap()
    }

    /// Passes descriptor `entry` of the ring to the card.
    fn post(&self, ring: u64, entry: u32, buffer: Iova, len: u32) {
        let (memory, at) = (self.rings.memory(), Self::offset(ring, entry));
        memory.write_u64(at, buffer.raw().to_le()).unwrap();
        memory.write_u32(at + 8, len.to_le()).unwrap();
        memory.store_release_u32(at + 12, Nic::OWNED.to_le()).unwrap();
    }

    /// Returns the length and the flags of a descriptor.
    fn done(&self, ring: u64, entry: u32) -> (u32, u32) {
        let (memory, at) = (self.rings.memory(), Self::offset(ring, entry));
        let flags = u32::from_le(memory.load_acquire_u32(at + 12).unwrap());
        (u32::from_le(memory.read_u32(at + 8).unwrap()), flags)
    }
}

#[test]
fn frames_go_around_the_rings_in_order() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let (mut driver, mut card) = Driver::new(&domain, &bus);
    let (receive, transmit) = (driver.map(FromDevice), driver.map(ToDevice));
    for round in 0..3 * ENTRIES {
        let entry = round % ENTRIES;
        assert_eq!(card.receive(b"no buffer").unwrap(), NicEvent::NoDescriptor);
        driver.post(0, entry, receive.iova().start(), 4096);
        let frame = [u8::try_from(round).unwrap(); 60];
        assert_eq!(card.receive(&frame).unwrap(), NicEvent::Moved(60));
        assert_eq!(driver.done(0, entry), (60, 0));
        let mut found = [0; 60];
        receive.memory().copy_to_slice(0, &mut found).unwrap();
        assert_eq!(found, frame);
        transmit.memory().copy_from_slice(0, &frame).unwrap();
        driver.post(TRANSMIT, entry, transmit.iova().start(), 60);
        assert_eq!((card.transmit().unwrap(), card.sent()), (NicEvent::Moved(60), &frame[..]));
        assert_eq!((card.transmit().unwrap(), card.sent()), (NicEvent::NoDescriptor, &[][..]));
    }
}

#[test]
fn an_unreachable_buffer_is_a_descriptor_with_a_fault() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let (mut driver, mut card) = Driver::new(&domain, &bus);
    let read_only = driver.map(ToDevice);
    let start = read_only.iova().start();
    driver.post(0, 0, start, 4096);
    driver.post(0, 1, Iova::new(u64::MAX - 3), 4096);
    driver.post(0, 2, start, 3);
    (0..3).for_each(|_| assert_eq!(card.receive(b"frame").unwrap(), NicEvent::Faulted));
    driver.post(TRANSMIT, 0, start, u32::MAX);
    driver.post(TRANSMIT, 1, start, 4097);
    (0..2).for_each(|_| assert_eq!(card.transmit().unwrap(), NicEvent::Faulted));
    for (ring, entry) in [(0, 0), (0, 1), (0, 2), (TRANSMIT, 0), (TRANSMIT, 1)] {
        assert_eq!(driver.done(ring, entry), (0, Nic::FAULTED), "{ring}, {entry}");
    }
    // The write without permission, the address that wraps, and the page behind the buffer: the
    // rest the card refuses itself.
    assert_eq!(bus.take_faults().records.len(), 3);
    // Without its ring the card cannot say anything.
    drop(driver.rings);
    assert!(card.receive(b"frame").is_err() && card.transmit().is_err());
}

/// Drivers on threads of their own, with flushes that are late: what the card moves is what was
/// mapped for it, and once a buffer has been returned, its descriptor leads nowhere.
#[test]
fn stress_cards_beside_drivers_that_revoke() {
    let (late_by, effect) = (Duration::from_micros(200), Effect::AtRandom);
    let (domain, bus) =
        domain(SoftConfig { late_by, effect, queue_depth: 4, ..SoftConfig::default() }).unwrap();
    std::thread::scope(|scope| {
        for number in 0..4u8 {
            let (domain, bus) = (&domain, &bus);
            scope.spawn(move || {
                let (mut driver, mut card) = Driver::new(domain, bus);
                for round in 0..200u32 {
                    let entry = round % ENTRIES;
                    let frame = [number ^ u8::try_from(round % 251).unwrap(); 64];
                    let (receive, transmit) = (driver.map(FromDevice), driver.map(ToDevice));
                    transmit.memory().copy_from_slice(0, &frame).unwrap();
                    let stale = receive.iova().start();
                    driver.post(TRANSMIT, entry, transmit.iova().start(), 64);
                    driver.post(0, entry, stale, 4096);
                    assert_eq!(card.transmit().unwrap(), NicEvent::Moved(64));
                    let sent = card.sent().to_vec();
                    assert_eq!(card.receive(&sent).unwrap(), NicEvent::Moved(64));
                    let transmit = driver.domain.revoke(transmit);
                    let receive = driver.domain.unmap::<Pages>(receive).unwrap();
                    let mut found = [0; 64];
                    receive.memory().copy_to_slice(0, &mut found).unwrap();
                    assert_eq!(found, frame);
                    // The device keeps the address. Nothing else is mapped there yet: this driver's
                    // window goes on behind it.
                    assert!(is_blocked(&mut driver, &mut card, entry, stale));
                    receive.memory().copy_to_slice(0, &mut found).unwrap();
                    assert_eq!(found, frame, "a device wrote after the buffer was returned");
                    driver.domain.wait(transmit).unwrap();
                }
            });
        }
    });
    assert_eq!(
        (domain.stats().live, domain.stats().windows, domain.stats().quarantined),
        (0, 0, 0)
    );
}

/// Posts the stale address again, and returns whether the card faults on it. The rings go on by a
/// full round.
fn is_blocked(driver: &mut Driver<'_>, card: &mut Nic, entry: u32, stale: Iova) -> bool {
    let mut blocked = true;
    for further in 1..=ENTRIES {
        let entry = (entry + further) % ENTRIES;
        driver.post(0, entry, stale, 4096);
        blocked &= card.receive(&[0xff; 64]).unwrap() == NicEvent::Faulted;
    }
    blocked
}
