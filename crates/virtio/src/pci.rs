//! A virtio device over PCI, as VFIO gives it to a program: [`PciTransport`] over a [`Device`].
//!
//! ```no_run
//! use pinfold::Arena;
//! use pinfold::vfio::{Device, Options};
//! use pinfold_virtio::{PinfoldHal, Process, install, pci};
//! use virtio_drivers::device::blk::VirtIOBlk;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open("0000:04:00.0", &Options::new())?;
//! let stack = install::<Process>(device.domain(), Arena::builder().size(8 << 20))?;
//! let mut driver = VirtIOBlk::<PinfoldHal, _>::new(pci::open(&device)?)?;
//! driver.read_blocks(0, &mut [0; 512])?;
//! # drop(driver);
//! # stack.finish()?;
//! # Ok(()) }
//! ```

use crate::translated::Translated;
use pinfold::vfio::{Bar, Device, DeviceError};
use std::cell::RefCell;
use std::ptr::NonNull;
use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction, PciError, PciRoot};
use virtio_drivers::transport::pci::{PciTransport, VirtioPciError};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};

/// The device's own place on the bus that `virtio-drivers` sees: it is alone there.
const ALONE: DeviceFunction = DeviceFunction { bus: 0, device: 0, function: 0 };

/// A transport over PCI behind an IOMMU. When it is dropped the device is reset, and its registers are unmapped after that.
pub type Transport = Translated<PciTransport, Registers>;

/// The registers that a transport uses, mapped as long as it is there. Opaque.
#[derive(Debug)]
pub struct Registers {
    /// Held, not read: the transport has pointers into them.
    _bars: Vec<Window>,
}

/// Why there is no transport.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// VFIO's device did not answer.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It is no virtio device, or one that `virtio-drivers` does not take.
    #[error("no virtio device that can be used: {0}")]
    Virtio(#[from] VirtioPciError),
    /// Its BARs are not what the specification allows.
    #[error("the device's BARs: {0}")]
    Bars(#[from] PciError),
    /// Registers that the kernel does not map.
    #[error("{bytes} bytes of registers at {address:#x} are in no BAR that could be mapped")]
    NotMapped {
        /// Where, as the device's BARs have it.
        address: u64,
        /// How many bytes.
        bytes: usize,
    },
}

/// The transport of a virtio device, for a driver of `virtio-drivers`.
///
/// The device is reset where it can be, and allowed to reach memory: what its [domain](Device::domain) has mapped.
///
/// # Errors
/// [`OpenError`]; the device is then kept from memory.
pub fn open(device: &Device) -> Result<Transport, OpenError> {
    match device.reset() {
        // A transport begins with a reset of its own (status 0, virtio 1.2 section 3.1.1).
        Ok(()) | Err(DeviceError::NoReset(_)) => {}
        Err(error) => return Err(error.into()),
    }
    device.set_bus_master(true)?;
    let opened = transport(device);
    if opened.is_err()
        && let Err(error) = device.set_bus_master(false)
    {
        tracing::error!(%error, "could not revoke the memory access of a device that failed to start");
    }
    opened
}

fn transport(device: &Device) -> Result<Transport, OpenError> {
    let mut root = PciRoot::new(Config(device.clone()));
    let mut bars = Vec::new();
    for (index, info) in (0..).zip(root.bars(ALONE)?) {
        let Some((start, size @ 1..)) = info.and_then(|info| info.memory_address_size()) else { continue };
        bars.push(Window { start, size, bar: device.bar(index)? });
    }
    let opening = OPENING.replace(Some(Opening { bars, missing: None, blanks: Vec::new() }));
    let made = PciTransport::new::<OpeningHal, _>(&mut root, ALONE);
    let Some(Opening { bars, missing, blanks }) = OPENING.replace(opening) else {
        return Err(VirtioPciError::MissingCommonConfig.into()); // not so: it was put there above
    };
    if let Some((address, bytes)) = missing {
        drop(made); // while its blanks are there
        drop(blanks);
        return Err(OpenError::NotMapped { address, bytes });
    }
    Ok(Translated::keeping(made?, Registers { _bars: bars }))
}

/// A mapped BAR, and where it is by the device's own account.
#[derive(Debug)]
struct Window {
    start: u64,
    size: u64,
    bar: Bar,
}

/// What `OpeningHal`, which has no receiver either, needs while a transport is made.
struct Opening {
    bars: Vec<Window>,
    /// The requested BAR, which is not mapped.
    missing: Option<(u64, usize)>,
    /// What was given instead: memory without a device behind it.
    blanks: Vec<Box<[u64]>>,
}

thread_local! {
    static OPENING: RefCell<Option<Opening>> = const { RefCell::new(None) };
}

impl Opening {
    fn find(&self, address: u64, bytes: usize) -> Option<NonNull<u8>> {
        let inside = |window: &&Window| {
            let end = address.checked_sub(window.start).and_then(|offset| offset.checked_add(bytes as u64));
            end.is_some_and(|end| end <= window.size)
        };
        let window = self.bars.iter().find(inside)?;
        window.bar.as_ptr(address - window.start, bytes)
    }

    fn blank(&mut self, bytes: usize) -> NonNull<u8> {
        let mut blank = vec![u64::MAX; bytes.div_ceil(8)].into_boxed_slice();
        let at = NonNull::new(blank.as_mut_ptr().cast()).unwrap_or(NonNull::dangling());
        self.blanks.push(blank);
        at
    }
}

/// Finds a transport's registers, and nothing else: `PciTransport` asks its `Hal` for no more.
struct OpeningHal;

// SAFETY: what `mmio_phys_to_virt` returns is mapped as long as the transport (`Registers`, `Translated`), which is why no
// transport but that of `open` is made with it; it is the device's registers, or a blank, and of these there are no references.
// The rest gives nothing.
unsafe impl Hal for OpeningHal {
    fn dma_alloc(_pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        (0, NonNull::dangling())
    }

    unsafe fn dma_dealloc(_paddr: PhysAddr, _vaddr: NonNull<u8>, _pages: usize) -> i32 {
        -1
    }

    unsafe fn mmio_phys_to_virt(paddr: PhysAddr, size: usize) -> NonNull<u8> {
        OPENING.with_borrow_mut(|opening| {
            let Some(opening) = opening else { return NonNull::dangling() };
            opening.find(paddr, size).unwrap_or_else(|| {
                opening.missing.get_or_insert((paddr, size));
                opening.blank(size)
            })
        })
    }

    unsafe fn share(_buffer: NonNull<[u8]>, _direction: BufferDirection) -> PhysAddr {
        0
    }

    unsafe fn unshare(_paddr: PhysAddr, _buffer: NonNull<[u8]>, _direction: BufferDirection) {}
}

/// Configuration space. Without a device all bits are ones, as on a bus.
struct Config(Device);

impl ConfigurationAccess for Config {
    fn read_word(&self, device_function: DeviceFunction, register_offset: u8) -> u32 {
        if device_function != ALONE {
            return u32::MAX;
        }
        self.0.config_u32(register_offset.into()).unwrap_or(u32::MAX)
    }

    fn write_word(&mut self, device_function: DeviceFunction, register_offset: u8, data: u32) {
        if device_function != ALONE {
            return;
        }
        if let Err(error) = self.0.config_write(register_offset.into(), &data.to_le_bytes()) {
            tracing::error!(register_offset, %error, "configuration space was not written");
        }
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self(self.0.clone())
    }
}
