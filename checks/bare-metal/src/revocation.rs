//! Device access before attachment, while a page is mapped, after its revocation, and after the
//! device is detached. The device is QEMU's `edu`, a DMA engine with a buffer of 4 KiB ("EDU
//! device" in QEMU's documentation).

use crate::machine::{At, Pci, say};
use crate::memory::Pages;
use crate::unit::{map, open, refused};
use crate::{Result, check, words};
use pinfold_core::access::Bidirectional;
use pinfold_core::domain::{Mapping, Pinned};
use pinfold_core::mem::DmaMemory;
use pinfold_vtd::SourceId;
use pinfold_vtd::fault::Reason;

struct Edu(At);

impl Edu {
    const ADDRESS: SourceId = SourceId::new(0, 0x12, 0);
    const BUFFER: u64 = 0x40000;

    /// Enables it, if it is there.
    fn open() -> Option<Self> {
        let pci = Pci(Self::ADDRESS);
        (pci.read(0) == 0x11e8_1234).then(|| {
            pci.enable();
            Self(pci.bar(0))
        })
    }

    fn dma(&self, source: u64, destination: u64, len: u64, command: u64) {
        const START: u64 = 1;
        self.0.write(0x80, source);
        self.0.write(0x88, destination);
        self.0.write(0x90, len);
        self.0.write(0x98, command | START);
        while self.0.read::<u64>(0x98) & START != 0 {
            core::hint::spin_loop();
        }
    }

    /// Copies `len` bytes, fewer than 4096, through its buffer.
    fn copy(&self, from: u64, to: u64, len: u64) {
        const TO_MEMORY: u64 = 2;
        self.dma(from, Self::BUFFER, len, 0);
        self.dma(Self::BUFFER, to, len, TO_MEMORY);
    }
}

pub(crate) fn run(start_info: u64) -> Result<()> {
    let (unit, domain, attachments) = open(start_info, (0, 0x12, 0))?;
    let edu = Edu::open().ok_or("no device edu at 00:12.0")?;

    let (source, destination) = (map(&domain)?, map(&domain)?);
    let (from, to) = (source.iova().start().raw(), destination.iova().start().raw());
    check(from != source.memory().addr() as u64, "the addresses are the physical ones")?;
    fill(source.memory(), 1)?;
    edu.copy(from, to, BYTES as u64);
    check(!same(&destination, 1)?, "a device that is attached to nothing has copied")?;
    refused(&unit, None, |fault| fault.reason == Reason::NoRootEntry)?;

    unit.attach(Edu::ADDRESS, &attachments, None).map_err(words)?;
    for round in 2..5 {
        fill(source.memory(), round)?;
        edu.copy(from, to, BYTES as u64);
        check(same(&destination, round)?, "the device has not copied what is mapped")?;
    }
    check(unit.take_faults(&attachments).0.is_empty(), "an access to what is mapped was refused")?;
    say!("copied {BYTES} bytes from {from:#x} to {to:#x}");

    // Revoked, and used for something else at once.
    let secret = source.unmap().map_err(words)?;
    fill(secret.memory(), 9)?;
    edu.copy(from, to, BYTES as u64);
    check(!same(&destination, 9)?, "the device has read a page after its revocation")?;
    refused(&unit, Some(&attachments), |fault| {
        (fault.device, fault.write) == (Edu::ADDRESS, false)
            && (fault.page.raw(), fault.reason) == (from, Reason::NoRead)
    })?;

    let secret = domain.map(secret, Bidirectional).map_err(|refused| words(refused.error))?;
    unit.detach(Edu::ADDRESS, &attachments).map_err(words)?;
    edu.copy(secret.iova().start().raw(), to, BYTES as u64);
    check(!same(&destination, 9)?, "a device that is detached has copied")?;
    refused(&unit, None, |fault| fault.reason == Reason::NoContextEntry)
}

/// The number of bytes copied: a part of a page.
const BYTES: usize = 2048;

/// Byte `at` of pattern `number`.
fn byte(number: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add(number)
}

fn fill(memory: DmaMemory<'_>, number: u8) -> Result<()> {
    let bytes: [u8; BYTES] = core::array::from_fn(|at| byte(number, at));
    memory.copy_from_slice(0, &bytes).map_err(words)
}

fn same(mapping: &Mapping<Pages, Bidirectional>, number: u8) -> Result<bool> {
    let mut bytes = [0; BYTES];
    mapping.memory().copy_to_slice(0, &mut bytes).map_err(words)?;
    Ok((0..BYTES).all(|at| bytes[at] == byte(number, at)))
}
