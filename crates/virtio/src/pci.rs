//! Virtio devices over PCI, through VFIO: [`PciTransport`] over a [`Device`].
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

use crate::hal::Translated;
use pinfold::vfio::{Bar, Device, DeviceError};
use std::cell::RefCell;
use std::ptr::NonNull;
use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction, PciError, PciRoot};
use virtio_drivers::transport::pci::{PciTransport, VirtioPciError};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};

/// The device's address on the bus that `virtio-drivers` sees, on which there is no other device.
const ONLY_DEVICE: DeviceFunction = DeviceFunction { bus: 0, device: 0, function: 0 };

/// A transport over PCI behind an IOMMU. Dropping it resets the device and then unmaps its
/// registers.
pub type Transport = Translated<PciTransport, Registers>;

/// The mapped registers of a transport. Opaque.
#[derive(Debug)]
pub struct Registers {
    /// Never read; keeps the mappings alive, into which the transport has pointers.
    _bars: Vec<Window>,
}

/// Why a transport cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// VFIO reported an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It is not a virtio device, or not one that `virtio-drivers` supports.
    #[error("cannot use the device as a virtio device: {0}")]
    Virtio(#[from] VirtioPciError),
    /// Its BARs violate the specification.
    #[error("cannot read the device's BARs: {0}")]
    Bars(#[from] PciError),
    /// The kernel does not map the registers.
    #[error(
        "cannot map {bytes} bytes of registers at {address:#x}: they are in no BAR that the kernel maps"
    )]
    NotMapped {
        /// The address according to the device's BARs.
        address: u64,
        /// The length in bytes.
        bytes: usize,
    },
}

/// Opens the transport of a virtio device, for a driver of `virtio-drivers`.
///
/// Resets the device if it supports that, and enables bus mastering: it can reach what its
/// [domain](Device::domain) maps.
///
/// # Errors
/// [`TransportError`]; bus mastering is disabled then.
pub fn open(device: &Device) -> Result<Transport, TransportError> {
    match device.reset() {
        // A transport starts with a reset of its own (status 0, virtio 1.2 section 3.1.1).
        Ok(()) | Err(DeviceError::NoReset(_)) => {}
        Err(error) => return Err(error.into()),
    }
    device.set_bus_master(true)?;
    let opened = transport(device);
    if opened.is_err()
        && let Err(error) = device.set_bus_master(false)
    {
        tracing::error!(%error, "cannot disable bus mastering of a device that failed to open");
    }
    opened
}

fn transport(device: &Device) -> Result<Transport, TransportError> {
    let mut root = PciRoot::new(Config(device.clone()));
    let mut bars = Vec::new();
    for (index, info) in (0..).zip(root.bars(ONLY_DEVICE)?) {
        let Some((start, size @ 1..)) = info.and_then(|info| info.memory_address_size()) else {
            continue;
        };
        bars.push(Window { start, size, bar: device.bar(index)? });
    }
    let opening = OPENING.replace(Some(Opening { bars, missing: None, placeholders: Vec::new() }));
    let made = PciTransport::new::<OpeningHal, _>(&mut root, ONLY_DEVICE);
    let Some(Opening { bars, missing, placeholders }) = OPENING.replace(opening) else {
        return Err(VirtioPciError::MissingCommonConfig.into()); // does not happen: it was set above
    };
    if let Some((address, bytes)) = missing {
        drop(made); // before its placeholders
        drop(placeholders);
        return Err(TransportError::NotMapped { address, bytes });
    }
    Ok(Translated::keeping(made?, Registers { _bars: bars }))
}

/// A mapped BAR, and its address according to the device.
#[derive(Debug)]
struct Window {
    start: u64,
    size: u64,
    bar: Bar,
}

/// The state that `OpeningHal`, whose functions have no receiver, needs while a transport is
/// created.
struct Opening {
    bars: Vec<Window>,
    /// Requested registers that are not mapped: address and length.
    missing: Option<(u64, usize)>,
    /// Placeholders that were returned instead: memory without a device.
    placeholders: Vec<Box<[u64]>>,
}

thread_local! {
    static OPENING: RefCell<Option<Opening>> = const { RefCell::new(None) };
}

impl Opening {
    fn find(&self, address: u64, bytes: usize) -> Option<NonNull<u8>> {
        let inside = |window: &&Window| {
            let end = address
                .checked_sub(window.start)
                .and_then(|offset| offset.checked_add(bytes as u64));
            end.is_some_and(|end| end <= window.size)
        };
        let window = self.bars.iter().find(inside)?;
        window.bar.as_ptr(address - window.start, bytes)
    }

    fn placeholder(&mut self, bytes: usize) -> NonNull<u8> {
        let mut placeholder = vec![u64::MAX; bytes.div_ceil(8)].into_boxed_slice();
        let at = NonNull::new(placeholder.as_mut_ptr().cast()).unwrap_or(NonNull::dangling());
        self.placeholders.push(placeholder);
        at
    }
}

/// Finds a transport's registers; `PciTransport` uses nothing else of its `Hal`.
struct OpeningHal;

// SAFETY: `mmio_phys_to_virt` returns the device's registers or a placeholder, to which there are
// no references, and which `Registers` and `Translated` keep mapped as long as the transport; only
// `open` creates transports with it. The other functions return no memory.
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
                opening.placeholder(size)
            })
        })
    }

    unsafe fn share(_buffer: NonNull<[u8]>, _direction: BufferDirection) -> PhysAddr {
        0
    }

    unsafe fn unshare(_paddr: PhysAddr, _buffer: NonNull<[u8]>, _direction: BufferDirection) {}
}

/// Configuration space. An absent device reads as all ones, as on a bus.
struct Config(Device);

impl ConfigurationAccess for Config {
    fn read_word(&self, device_function: DeviceFunction, register_offset: u8) -> u32 {
        if device_function != ONLY_DEVICE {
            return u32::MAX;
        }
        self.0.config_u32(register_offset.into()).unwrap_or(u32::MAX)
    }

    fn write_word(&mut self, device_function: DeviceFunction, register_offset: u8, data: u32) {
        if device_function != ONLY_DEVICE {
            return;
        }
        if let Err(error) = self.0.config_write(register_offset.into(), &data.to_le_bytes()) {
            tracing::error!(register_offset, %error, "cannot write configuration space");
        }
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self(self.0.clone())
    }
}
