//! A device with a TLB of its own: a virtio network device behind the unit, whose other side is a
//! process that keeps the translations that it was given (`vm/bare` says which), and sends every
//! packet back. Two mistakes are seen to leak: without flushes of its TLB, or with one before that of
//! the IOTLB, it sends what was written to a page after that was revoked. In the right order it does
//! not.

use crate::machine::{At, ecam, say};
use crate::unit::{Mistake, Unit, make, map, open};
use crate::virtio::{DEVICE, Net, packet};
use crate::{Result, check, words};
use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;
use pinfold_core::domain::{Domain, Pinned};
use pinfold_vtd::fault::Reason;
use pinfold_vtd::unit::Attachments;
use spin::Mutex;

/// The number of polls for an action of another process: minutes.
const LOOKS: u64 = 2_000_000_000;
const LOOKS_PER_PACKET: u64 = 100_000;

/// The IOMMU unit, the domain and the device.
struct Machine {
    unit: Arc<Unit>,
    domain: Domain,
    attachments: Attachments,
    net: Arc<Mutex<Net>>,
}

pub(crate) fn run(start_info: u64) -> Result<()> {
    let (unit, domain, attachments) = open(start_info, (1, 0, 0))?;
    check(unit.capabilities().device_tlbs(), "the unit supports no TLBs of devices")?;
    let ats = ecam(start_info, DEVICE.0).and_then(ats_capability).ok_or("the device has no ATS")?;
    // "Invalidate Queue Depth", bits 0 to 4 of the capability register.
    let depth = (ats.read::<u16>(4) & 0x1f) as u8;
    unit.attach(DEVICE.0, &attachments, Some(depth)).map_err(words)?;
    // E, bit 15 of the control register.
    ats.write(6, ats.read::<u16>(6) | 1 << 15);
    let net = Arc::new(Mutex::new(Net::start(&domain)?));
    let machine = Machine { unit, domain, attachments, net };

    machine.leaks(1, |_| Mistake::NoDeviceFlush)?;
    say!("without a flush of its TLB: a stale page is read");
    machine.leaks(2, |at| {
        let net = Arc::clone(&machine.net);
        Mistake::DeviceTlbFirst(Box::new(move || {
            let mut net = net.lock();
            // The outcome tells whether it was sent.
            let _ = net.send(at).and_then(|()| (0..LOOKS).try_for_each(|_| not_yet(net.is_sent())));
        }))
    })?;
    say!("with a flush of its TLB before that of the IOTLB: a stale page is read");
    machine.refuses(3)?;
    say!("in the right order: nothing is read");
    Ok(())
}

/// An error once it is true, which ends a loop.
fn not_yet(done: Result<bool>) -> Result<()> {
    check(!done?, "done")
}

/// The marker of a packet that the device may send, and of one that it must not: a page has it after
/// its revocation.
const MAPPED: u64 = 0x1111_0000;
const SECRET: u64 = 0x5ec2_0000;

impl Machine {
    /// The device sends a page that is mapped, which then is revoked with the mistake: it must be
    /// seen to send what is written there afterwards.
    fn leaks(&self, round: u64, mistake: impl FnOnce(u64) -> Mistake) -> Result<()> {
        let page = map(&self.domain)?;
        let at = page.iova().start().raw();
        packet(page.memory(), MAPPED + round)?;
        self.exchange(at, MAPPED + round)?;
        make(mistake(at));
        let revoked = page.unmap().map_err(words)?;
        make(Mistake::None);
        packet(revoked.memory(), SECRET + round)?;
        self.exchange(at, SECRET + round)?;
        // The next mapping there flushes what the mistake has left, when it is revoked.
        let next = map(&self.domain)?;
        check(next.iova().start().raw() == at, "another address: what is stale stays so")
    }

    /// The same without a mistake: the device asks the unit, which refuses.
    fn refuses(&self, round: u64) -> Result<()> {
        let page = map(&self.domain)?;
        let at = page.iova().start().raw();
        packet(page.memory(), MAPPED + round)?;
        self.exchange(at, MAPPED + round)?;
        check(
            self.unit.take_faults(&self.attachments).0.is_empty(),
            "an access to what is mapped was refused",
        )?;
        let revoked = page.unmap().map_err(words)?;
        packet(revoked.memory(), SECRET + round)?;
        self.net.lock().send(at)?;
        for _ in 0..LOOKS {
            let (faults, _) = self.unit.take_faults(&self.attachments);
            let received = self.net.lock().received()?;
            check(received != Some(SECRET + round), "a page was sent after its revocation")?;
            if let Some(fault) = faults.first() {
                say!("{fault}");
                let is_read = (fault.write, fault.reason) == (false, Reason::NoRead);
                let expected = is_read && (fault.device, fault.page.raw()) == (DEVICE.0, at);
                return check(expected, "not the fault that was expected");
            }
        }
        Err("the device does not access what it was told to".into())
    }

    /// Sends the packet at `at` until it comes back with `marker`: the other side drops a packet
    /// while it has no translation of its target, and an earlier one may come back late.
    fn exchange(&self, at: u64, marker: u64) -> Result<()> {
        let mut net = self.net.lock();
        for look in 0..LOOKS {
            if look % LOOKS_PER_PACKET == 0 && net.is_sent()? {
                net.send(at)?;
            }
            if net.received()? == Some(marker) {
                return Ok(());
            }
        }
        let (faults, _) = self.unit.take_faults(&self.attachments);
        Err(format!("no packet has come back with {marker:#x}; faults: {faults:?}"))
    }
}

/// Finds "Address Translation Services" among the extended capabilities of a function.
fn ats_capability(config: At) -> Option<At> {
    const ATS: u32 = 0x000f;
    let mut at = 0x100;
    while at >= 0x100 {
        let head: u32 = config.read(at);
        if head & 0xffff == ATS {
            return Some(At(config.0 + at));
        }
        at = u64::from(head >> 20);
    }
    None
}
