//! A pool over a static buffer, and a driver that owns it. Needs `core` and `alloc` only.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{
    AllocError, Block, ChunkSource, CreateError, DmaPool, PoolLocal, SourceError,
};
use pinfold_core::frame::{Frame, FrameError, Order, Zone};

/// 2 MiB, the smallest zone, aligned to a page.
const BYTES: usize = 2 << 20;

#[repr(C, align(4096))]
struct Buffer(UnsafeCell<[u8; BYTES]>);

// SAFETY: only pools access it, through the one `StaticSource`, and pools access memory by atomics
// only.
unsafe impl Sync for Buffer {}

static BUFFER: Buffer = Buffer(UnsafeCell::new([0; BYTES]));
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Where the platform has mapped the buffer for the device. Without an IOMMU: its physical address.
const BUFFER_IOVA: Iova = Iova::new(0x8000_0000);

/// The static buffer as a source of chunks. There is one.
pub(crate) struct StaticSource {
    zone: Zone,
}

impl StaticSource {
    /// Returns the source on the first call, `None` on all others.
    ///
    /// # Errors
    /// [`FrameError`] if the zone does not accept the buffer's size.
    pub(crate) fn take() -> Result<Option<Self>, FrameError> {
        let zone = Zone::new(u32::try_from(BYTES / 4096).unwrap_or(0))?;
        Ok((!TAKEN.swap(true, Ordering::Relaxed)).then_some(Self { zone }))
    }
}

// SAFETY: the buffer is one allocation, is static and belongs to this source alone; the zone has as
// many frames as the buffer, aligns each run to its size, and allocates none twice before `release`
// frees it.
unsafe impl ChunkSource for StaticSource {
    fn span(&self) -> NonNull<[u8]> {
        let start = NonNull::from(&BUFFER.0).cast::<u8>();
        NonNull::slice_from_raw_parts(start, BYTES)
    }
    fn iova(&self) -> Iova {
        BUFFER_IOVA
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        Ok(self.zone.alloc(order)?)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // Never refused: the caller returns what `acquire` gave.
        let _ = self.zone.free(frame, order);
    }
}

/// A driver with descriptors in flight, in one struct without a lifetime.
pub(crate) struct Driver {
    local: PoolLocal,
    in_flight: VecDeque<Block>,
}

impl Driver {
    /// Creates the driver's pool: descriptors of 64 bytes, one per cache line.
    ///
    /// # Errors
    /// [`CreateError`].
    pub(crate) fn new(source: StaticSource) -> Result<Self, CreateError> {
        let pool = DmaPool::builder("descriptors").block(64).align(64).build(&Arc::new(source))?;
        Ok(Self { local: pool.local(), in_flight: VecDeque::new() })
    }

    /// Writes a descriptor and returns what the device's doorbell is given.
    ///
    /// # Errors
    /// [`AllocError`] if the buffer is full.
    pub(crate) fn submit(&mut self, payload: Iova, len: u64) -> Result<Iova, AllocError> {
        let descriptor = self.local.alloc_zeroed()?;
        let memory = descriptor.memory();
        // A descriptor has 64 bytes, so neither write is outside.
        let _ = memory.write_u64(0, payload.raw()).and_then(|()| memory.write_u64(8, len));
        let iova = descriptor.iova();
        self.in_flight.push_back(descriptor);
        Ok(iova)
    }

    /// Frees the oldest descriptor, which the device has completed; `false` if none is in flight.
    pub(crate) fn complete(&mut self) -> bool {
        let descriptor = self.in_flight.pop_front();
        descriptor.map(|descriptor| self.local.free(descriptor)).is_some()
    }
}
