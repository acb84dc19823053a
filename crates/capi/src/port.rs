//! Ports: a device model in C behind the software IOMMU, which checks each of its accesses.

use crate::domain::{DOMAINS, pf_domain_t};
use crate::failure::{Failure, call, check_out, fail, store};
use crate::handle::Table;
use crate::options::{Options, fill};
use pinfold::Iova;
use pinfold::soft::{Fault, FaultKind, Port};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, PoisonError};

/// A device model's connection to memory.
pub struct pf_port_t {
    port: Port,
    faults: Mutex<Faults>,
}

/// The faults of one port.
#[derive(Default)]
struct Faults {
    count: u64,
    last: Option<Fault>,
}

static PORTS: Table<pf_port_t> = Table::new(11, "port");

/// Bytes of a page, beyond which an access is another one for the IOMMU.
const PAGE: usize = 4096;

/// In pf_fault.kind: nothing is mapped at the address.
pub const PF_FAULT_NOT_MAPPED: u32 = 1;
/// In pf_fault.kind: the mapping does not allow the device to read.
pub const PF_FAULT_NO_READ: u32 = 2;
/// In pf_fault.kind: the mapping does not allow the device to write.
pub const PF_FAULT_NO_WRITE: u32 = 3;
/// In pf_fault.kind: there is no translation for another reason: an address that is too large, or a
/// damaged table.
pub const PF_FAULT_OTHER: u32 = 4;

/// The faults of a port. Set `struct_size` to its sizeof.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_fault {
    /// sizeof(struct pf_fault).
    pub struct_size: usize,
    /// The number of accesses of the port that have faulted. If it is 0, so are the other fields.
    pub count: u64,
    /// The first address that the last faulting access did not reach.
    pub iova: u64,
    /// The reason for it: PF_FAULT_*.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: a size, two words and two halves of a word, without padding.
unsafe impl Options for pf_fault {
    const DEFAULT: Self = Self { struct_size: 0, count: 0, iova: 0, kind: 0, reserved: 0 };
}

fn kind(kind: FaultKind) -> u32 {
    match kind {
        FaultKind::NotMapped => PF_FAULT_NOT_MAPPED,
        FaultKind::NoRead => PF_FAULT_NO_READ,
        FaultKind::NoWrite => PF_FAULT_NO_WRITE,
        _ => PF_FAULT_OTHER,
    }
}

/// Connects a device model to a domain of pf_domain_soft(): accesses through the port are a
/// device's, and the software IOMMU checks them. Each port is a device of its own, with a cache of
/// translations, so that a model and a test of its revocations may each have one.
///
/// @domain: the domain.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: ENOTSUP (the domain's devices are real); EBADF; EFAULT; ENFILE.
/// Thread: any. Allocates. Ends with pf_port_destroy(). Since 0.2.
///
/// # Safety
/// `out` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_port_open(domain: *mut pf_domain_t, out: *mut *mut pf_port_t) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let Some(port) = DOMAINS.get(domain)?.state.domain.port() else {
            return Err(fail!(
                ENOTSUP,
                "the devices of this domain are real, and take no model: create one with pf_domain_soft"
            ));
        };
        let handle = PORTS.insert(pf_port_t { port, faults: Mutex::default() })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Disconnects a device model.
///
/// @port: the port; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (another thread is in a call with it); EBADF.
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_port_destroy(port: *mut pf_port_t) -> c_int {
    call(|| {
        if !port.is_null() {
            drop(PORTS.remove(port, |_| Ok(()))?);
        }
        Ok(0)
    })
}

/// Reads memory as a device does. 4 or 8 bytes at a multiple of that are read at once; what follows
/// in this thread comes after the read.
///
/// @port: the port.
/// @iova: the device's address of the memory.
/// @buf: where the bytes are stored; it may be memory of the domain itself.
/// @len: how many; 0 does nothing.
///
/// Return: 0, or -errno: EFAULT (the device may not read there: pf_port_fault() has the address and
/// the reason, and the bytes of the pages before are stored; or `buf` is NULL, which counts no
/// fault); EBADF.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `buf` is null, or can be written for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_port_read(
    port: *mut pf_port_t,
    iova: u64,
    buf: *mut c_void,
    len: usize,
) -> c_int {
    call(|| {
        let port = PORTS.get(port)?;
        if len > 0 {
            check_out(buf, "buf")?;
        }
        let mut bytes = [0; PAGE];
        for (done, count) in pieces(iova, len) {
            let Some(bytes) = bytes.get_mut(..count) else { break };
            // No wrap: the addresses before are mapped, and so below the last.
            let at = Iova::new(iova.wrapping_add(done as u64));
            port.read(at, bytes).map_err(|fault| port.faulted(fault, ("read", iova, len)))?;
            let to = buf.cast::<u8>().wrapping_add(done);
            // SAFETY: `count` bytes from `done` on are within the caller's `len`, and `bytes` is
            // this call's.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count) };
        }
        // Stores made before the bytes that were read are visible from here on.
        fence(Ordering::Acquire);
        Ok(0)
    })
}

/// Writes memory as a device does. 4 or 8 bytes at a multiple of that are written at once; a thread
/// that sees the write sees the earlier stores of this thread.
///
/// @port: the port.
/// @iova: the device's address of the memory.
/// @buf: the bytes.
/// @len: how many; 0 does nothing.
///
/// Return: 0, or -errno: EFAULT (the device may not write there: pf_port_fault() has the address
/// and the reason, and the pages before are written; or `buf` is NULL, which counts no fault);
/// EBADF.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `buf` is null, or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_port_write(
    port: *mut pf_port_t,
    iova: u64,
    buf: *const c_void,
    len: usize,
) -> c_int {
    call(|| {
        let port = PORTS.get(port)?;
        if len > 0 {
            check_out(buf, "buf")?;
        }
        fence(Ordering::Release);
        let mut bytes = [0; PAGE];
        for (done, count) in pieces(iova, len) {
            let Some(bytes) = bytes.get_mut(..count) else { break };
            let from = buf.cast::<u8>().wrapping_add(done);
            // SAFETY: `count` bytes from `done` on are within the caller's `len`, and `bytes` is
            // this call's.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), count) };
            // No wrap: as for a read.
            let at = Iova::new(iova.wrapping_add(done as u64));
            port.write(at, bytes).map_err(|fault| port.faulted(fault, ("write", iova, len)))?;
        }
        Ok(0)
    })
}

/// Tells which accesses of a port have faulted.
///
/// @port: the port.
/// @fault: where the number of faults and the last one are stored; its `struct_size` is set before.
///
/// Return: 0, or -errno: EINVAL (`struct_size`); EFAULT; EBADF.
/// Thread: any. Takes a lock. Since 0.2.
///
/// # Safety
/// `fault` is null, or can be written for as many bytes as its first field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_port_fault(port: *mut pf_port_t, fault: *mut pf_fault) -> c_int {
    call(|| {
        let port = PORTS.get(port)?;
        let value = {
            let faults = port.faults.lock().unwrap_or_else(PoisonError::into_inner);
            let last = faults.last;
            pf_fault {
                count: faults.count,
                iova: last.map_or(0, |last| last.iova.raw()),
                kind: last.map_or(0, |last| kind(last.kind)),
                ..pf_fault::DEFAULT
            }
        };
        // SAFETY: as the caller promises.
        unsafe { fill(fault, &value, "fault") }?;
        Ok(0)
    })
}

/// Yields offset and length of the part of an access in each page.
fn pieces(iova: u64, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let before = usize::try_from(iova.wrapping_add(done as u64) % PAGE as u64).unwrap_or(0);
        let count = (len - done).min(PAGE - before);
        let piece = (done, count);
        done += count;
        (count > 0).then_some(piece)
    })
}

impl pf_port_t {
    /// Reads bytes of one page.
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), Fault> {
        match to {
            [_, _, _, _] if iova.is_aligned(4) => {
                to.copy_from_slice(&self.port.read_u32_acquire(iova)?.to_ne_bytes());
            }
            [_, _, _, _, _, _, _, _] if iova.is_aligned(8) => {
                to.copy_from_slice(&self.port.read_u64(iova)?.to_ne_bytes());
            }
            _ => self.port.read(iova, to)?,
        }
        Ok(())
    }

    /// Writes bytes of one page.
    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), Fault> {
        match *from {
            [a, b, c, d] if iova.is_aligned(4) => {
                self.port.write_u32_release(iova, u32::from_ne_bytes([a, b, c, d]))
            }
            [a, b, c, d, e, f, g, h] if iova.is_aligned(8) => {
                self.port.write_u64(iova, u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
            }
            _ => self.port.write(iova, from),
        }
    }

    /// Counts a fault, and returns it as the call's.
    #[cold]
    fn faulted(&self, fault: Fault, (verb, iova, len): (&str, u64, usize)) -> Failure {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.count = faults.count.saturating_add(1);
        faults.last = Some(fault);
        fail!(
            EFAULT,
            "a device's {verb} of {len} bytes at {iova:#x} faulted at {:#x}: {}; map the memory for this direction before, \
             and revoke it after",
            fault.iova.raw(),
            fault.kind
        )
    }
}
