//! PCI devices, for drivers in C: registers, configuration space, interrupts, reset.

use crate::claims::{self, Attached, Opened};
use crate::domain::{DOMAINS, pf_domain_t, text};
use crate::failure::{Failure, call, check_out, fail, store};
use crate::handed::Handed;
use crate::handle::Table;
use pinfold::vfio::{Bar, Device, Irq};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

/// A PCI device that the program drives.
pub struct pf_device_t {
    /// Dropped before the device.
    mapped: Mutex<Mapped>,
    device: Device,
    #[expect(dead_code, reason = "held")]
    opened: Opened,
}

/// The program's registers and interrupts of the device.
#[derive(Default)]
struct Mapped {
    bars: [Option<Bar>; BARS],
    /// Each with the program's descriptor of it.
    irqs: Vec<(Handed, Irq)>,
}

static DEVICES: Table<pf_device_t> = Table::new(13, "device");

const BARS: usize = 6;
/// Bytes of the configuration space of a PCI Express device.
const CONFIG: usize = 4096;

/// The registers of a device, mapped: for pf_read32() and the like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_bar {
    /// The address of the registers in this process.
    pub addr: *mut c_void,
    /// Bytes.
    pub len: u64,
}

/// Opens a PCI device for a driver of the program's own. It must be bound to vfio-pci (`pinfold
/// bind`). It reaches memory when pf_device_bus_master() has allowed it, and then only memory
/// mapped in the domain.
///
/// @domain: a domain of pf_domain_create(), in which it is opened; or one to which it is attached
/// (pf_domain_vfio(), pf_domain_attach()).
/// @bdf: the device's address, as "0000:01:00.0"; or another form of it.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: ENODEV, EACCES and errors of the kernel; EBUSY (it is open already, or
/// attached to another domain of the process); ENOTSUP (a software domain); EINVAL (`bdf`); EBADF; EFAULT; ENFILE. The message names the step
/// that is missing.
/// Thread: any. Allocates. Ends with pf_device_destroy(). Since 0.2.
///
/// # Safety
/// `bdf` is null or a C string; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_device_open(
    domain: *mut pf_domain_t,
    bdf: *const c_char,
    out: *mut *mut pf_device_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let state = std::sync::Arc::clone(&DOMAINS.get(domain)?.state);
        // SAFETY: as the caller promises.
        let bdf = claims::address(unsafe { text(bdf, "bdf") }?)?;
        // First: what the kernel says of one that is open depends on its interface; and from now on
        // it is not detached.
        let opened = Opened::new(bdf)?;
        let device = match state.device(bdf) {
            Some(device) => device,
            None => {
                Attached::check_none(bdf)?;
                state.open(bdf)?
            }
        };
        let handle = DEVICES.insert(pf_device_t { mapped: Mutex::default(), device, opened })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Ends a driver: the device no longer reaches memory, its interrupts are disabled and their
/// descriptors closed, and its registers are unmapped. Unless it is attached to its domain
/// otherwise, it is closed, and the kernel resets it.
///
/// @device: the device; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (another thread is in a call with it); EBADF.
/// Thread: any. No thread uses its registers any more. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_device_destroy(device: *mut pf_device_t) -> c_int {
    call(|| {
        if !device.is_null() {
            let removed = DEVICES.remove(device, |_| Ok(()))?;
            // A device that is gone has no bus mastering to disable.
            let _ = removed.device.set_bus_master(false);
        }
        Ok(0)
    })
}

/// Maps the registers of a device. pf_read32(), pf_write32() and the like access them.
///
/// @device: the device.
/// @index: the BAR, 0 to 5.
/// @bar: where address and length are stored; each call stores the same.
///
/// Return: 0, or -errno: ENXIO (the device has no such BAR); ENOTSUP (the kernel does not let all
/// of it be mapped: I/O ports); EFAULT; EBADF; errors of the kernel.
/// Thread: any. Takes a lock. Allocates the first time for each. Ownership: the registers stay
/// mapped until pf_device_destroy(). While the device does not decode its memory (bit 1 of the
/// command register), an access is a SIGBUS. Since 0.2.
///
/// # Safety
/// `bar` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_device_bar(
    device: *mut pf_device_t,
    index: c_uint,
    bar: *mut pf_bar,
) -> c_int {
    call(|| {
        check_out(bar, "bar")?;
        let device = DEVICES.get(device)?;
        let mut mapped = device.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = mapped.bars.get_mut(index as usize) else {
            return Err(fail!(ENXIO, "BAR {index}: a device has BARs 0 to 5"));
        };
        let found = match place.take() {
            Some(bar) => bar,
            None => {
                let index = u8::try_from(index).unwrap_or(u8::MAX);
                device.device.bar(index).map_err(|error| Failure::from(&error))?
            }
        };
        let len = found.len();
        let addr = usize::try_from(len).ok().and_then(|len| found.as_ptr(0, len));
        let Some(addr) = addr else {
            return Err(fail!(
                ENOTSUP,
                "the kernel does not let all {len} bytes of BAR {index} be mapped: it has I/O ports, or the kernel keeps \
                 the table of interrupts (before Linux 4.16)"
            ));
        };
        *place = Some(found);
        // SAFETY: as the caller promises.
        unsafe { store(bar, pf_bar { addr: addr.as_ptr().cast(), len }, "bar") }?;
        Ok(0)
    })
}

/// Reads configuration space. 1, 2 or 4 bytes at a multiple of that are one access.
///
/// @device: the device.
/// @offset: where.
/// @buf: where the bytes are stored.
/// @len: how many.
///
/// Return: 0, or -errno: EINVAL (beyond the end); EFAULT; EBADF; errors of the kernel.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `buf` is null or can be written for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_device_config_read(
    device: *mut pf_device_t,
    offset: u64,
    buf: *mut c_void,
    len: usize,
) -> c_int {
    call(|| {
        let device = DEVICES.get(device)?;
        let mut bytes = [0; CONFIG];
        let part = config_part(&mut bytes, buf, (offset, len))?;
        device.device.config_read(offset, part).map_err(|error| Failure::from(&error))?;
        // SAFETY: `len` bytes, as the caller promises; `bytes` is this call's, and as long.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), buf.cast(), len) };
        Ok(0)
    })
}

/// Writes configuration space, as pf_device_config_read() reads it. The kernel filters what would
/// endanger other devices.
///
/// @device: the device.
/// @offset: where.
/// @buf: the bytes.
/// @len: how many.
///
/// Return: as pf_device_config_read().
/// Thread: any. Since 0.2.
///
/// # Safety
/// `buf` is null or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_device_config_write(
    device: *mut pf_device_t,
    offset: u64,
    buf: *const c_void,
    len: usize,
) -> c_int {
    call(|| {
        let device = DEVICES.get(device)?;
        let mut bytes = [0; CONFIG];
        let part = config_part(&mut bytes, buf, (offset, len))?;
        // SAFETY: `len` bytes, as the caller promises; `bytes` is this call's, and as long.
        unsafe { std::ptr::copy_nonoverlapping(buf.cast(), part.as_mut_ptr(), len) };
        device.device.config_write(offset, part).map_err(|error| Failure::from(&error))?;
        Ok(0)
    })
}

/// Returns room for a part of configuration space.
fn config_part<T>(
    bytes: &mut [u8; CONFIG],
    buf: *const T,
    (offset, len): (u64, usize),
) -> Result<&mut [u8], Failure> {
    if len > 0 {
        check_out(buf, "buf")?;
    }
    bytes.get_mut(..len).ok_or_else(|| {
        fail!(
            EINVAL,
            "{len} bytes at {offset:#x} of configuration space, which has at most {CONFIG}"
        )
    })
}

/// Enables the first `n` interrupts of a device (MSI-X, or MSI if it has none), each with an
/// eventfd: readable when it was raised. A read() of 8 bytes returns how often, and resets it; it
/// does not block. All that are used are enabled by one call.
///
/// @device: the device.
/// @n: how many; 0 disables all, and closes their descriptors.
/// @fds: where the `n` descriptors are stored, the first that of interrupt 0.
///
/// Return: how many interrupts the device has; or -errno: EINVAL (it has fewer than `n`); EBUSY
/// (some are enabled: disable them first); EFAULT; EBADF; errors of the kernel. Nothing has
/// changed then.
/// Thread: any. Takes a lock. Allocates the first time. Ownership: the descriptors are the
/// device's: read them, and do not close them. Each is two of the process's. Since 0.2.
///
/// # Safety
/// `fds` is null or can be written for `n` descriptors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_device_irqs(
    device: *mut pf_device_t,
    n: c_uint,
    fds: *mut c_int,
) -> c_int {
    call(|| {
        if n > 0 {
            check_out(fds, "fds")?;
        }
        let device = DEVICES.get(device)?;
        let mut mapped = device.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let has = device.device.max_interrupts().map_err(|error| Failure::from(&error))?;
        if n == 0 {
            mapped.irqs.clear();
        } else {
            let irqs = device.device.interrupts(n).map_err(|error| Failure::from(&error))?;
            let handed = irqs.into_iter().map(|irq| Ok((Handed::new(irq.as_fd())?, irq)));
            let irqs = handed.collect::<std::io::Result<Vec<_>>>().map_err(|error| {
                let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
                Failure::new(errno, format!("cannot duplicate the eventfds of {n} interrupts: {error}; raise RLIMIT_NOFILE"))
            })?;
            for (index, (handed, _)) in irqs.iter().enumerate() {
                // SAFETY: one of the `n` descriptors, as the caller promises.
                unsafe { fds.wrapping_add(index).write_unaligned(handed.fd()) };
            }
            mapped.irqs = irqs;
        }
        Ok(c_int::try_from(has).unwrap_or(c_int::MAX))
    })
}

/// Lets a device access memory, or no longer. Its registers are decoded from the first time on.
///
/// @device: the device.
/// @on: 1 or 0.
///
/// Return: 0, or -errno: EINVAL (`on`); EBADF; errors of the kernel.
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_device_bus_master(device: *mut pf_device_t, on: c_uint) -> c_int {
    call(|| {
        let device = DEVICES.get(device)?;
        if on > 1 {
            return Err(fail!(EINVAL, "on {on}: pass 1 or 0"));
        }
        device.device.set_bus_master(on == 1).map_err(|error| Failure::from(&error))?;
        Ok(0)
    })
}

/// Resets a device: it has lost its state, and accesses no memory until it is set up again. A loop
/// of requests learns this by pf_requests_stopped(). The kernel's setup is as before: bus mastering
/// is on if it was, the registers stay mapped, and the interrupts enabled, with the same
/// descriptors.
///
/// @device: the device.
///
/// Return: 0, or -errno: ENOTSUP (it cannot be reset alone); EBADF; errors of the kernel.
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_device_reset(device: *mut pf_device_t) -> c_int {
    call(|| {
        let device = DEVICES.get(device)?;
        device.device.reset().map_err(|error| Failure::from(&error))?;
        Ok(0)
    })
}
