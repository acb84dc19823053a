//! QEMU's `edu`: a DMA engine with a buffer of 4 KiB ("EDU device" in QEMU's documentation).

use crate::machine::{At, Pci};
use pinfold_vtd::SourceId;

pub(crate) struct Edu(At);

impl Edu {
    pub(crate) const ADDRESS: SourceId = SourceId::new(0, 0x12, 0);
    const BUFFER: u64 = 0x40000;

    /// Enables it, if it is there.
    pub(crate) fn open() -> Option<Self> {
        let pci = Pci(Self::ADDRESS);
        (pci.read(0) == 0x11e8_1234).then(|| Self(pci.enable()))
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
    pub(crate) fn copy(&self, from: u64, to: u64, len: u64) {
        const TO_MEMORY: u64 = 2;
        self.dma(from, Self::BUFFER, len, 0);
        self.dma(Self::BUFFER, to, len, TO_MEMORY);
    }
}
