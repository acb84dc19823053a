//! Domains: one I/O address space each, behind the software IOMMU or a device's.

use crate::claims::{self, Attached, Opened};
use crate::failure::{Failure, call, check_out, fail, store};
use crate::handle::Table;
use crate::options;
use crate::readers::{Reader, Reading, Shared};
use crate::region::{Region, Span};
use pinfold::pci::Bdf;
use pinfold::soft::SoftConfig;
use pinfold::vfio::{Device, IommuInterface, Options};
use pinfold::{Domain, Iova, IovaRange};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One I/O address space.
pub struct pf_domain_t {
    pub(crate) state: Arc<State>,
}

/// The state that the handles of a domain and of its objects share.
pub(crate) struct State {
    pub(crate) domain: Domain,
    /// The devices that are attached to it.
    devices: Mutex<Vec<Joined>>,
    /// The memory in it, by its first address.
    regions: Arc<Shared<Regions>>,
    /// For calls without an owner, whose threads share it.
    reader: Reader<Regions>,
    lost: Mutex<Lost>,
}

/// Requests that a program has given up, of all loops of a domain.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lost {
    /// Their loop exists.
    pub(crate) open: Requests,
    /// Their loop has ended.
    pub(crate) ended: Requests,
    /// The mappings of ended loops that the domain has quarantined.
    pub(crate) mappings: u64,
    pub(crate) mapped_bytes: u64,
}

/// The number of requests, and the bytes of the pages of their payloads.
#[derive(Clone, Copy, Default)]
pub(crate) struct Requests {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

/// A device that is attached to a domain. Closed before it is no longer the domain's.
pub(crate) struct Joined {
    device: Device,
    bdf: Bdf,
    #[expect(dead_code, reason = "held")]
    attached: Attached,
}

/// Memory by its first address. No two overlap.
pub(crate) type Regions = BTreeMap<usize, Arc<Region>>;

pub(crate) static DOMAINS: Table<pf_domain_t> = Table::new(1, "domain");

/// The memory of all domains, by its first address: more than one region at it for memory that is
/// registered with several domains, each time as the same bytes.
static ALL: Mutex<BTreeMap<usize, Vec<Arc<Region>>>> = Mutex::new(BTreeMap::new());

/// Locked while memory is added or taken out. Before the locks of domains.
fn all() -> MutexGuard<'static, BTreeMap<usize, Vec<Arc<Region>>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a use of `len` bytes at `addr` in each region that has any of them: none if they are in
/// no domain.
///
/// # Errors
/// `EINVAL`: they are not all in the regions, or not all allocated.
pub(crate) fn spans_of_all(addr: usize, len: usize) -> Result<Vec<Span>, Failure> {
    let all = all();
    let nearest = all.range(..addr.saturating_add(len)).next_back();
    let regions = nearest.map(|(_, regions)| &**regions).unwrap_or_default();
    let overlap = regions.iter().filter(|region| region.addr() + region.len() > addr);
    overlap.map(|region| Span::new(region, addr, len)).collect()
}

/// A thread's look-up of memory of a domain.
pub(crate) struct Lookup(Reader<Regions>);

impl Lookup {
    /// Begins look-ups, during which no memory is added or taken out.
    pub(crate) fn begin(&self) -> Lookups<'_> {
        Lookups(self.0.read())
    }
}

/// Look-ups of one call.
pub(crate) struct Lookups<'r>(Reading<'r, Regions>);

impl Lookups<'_> {
    /// Returns the memory at `addr` for a device's use, which is counted, so that the region is not
    /// taken out afterwards.
    ///
    /// # Errors
    /// `ENXIO`: it is not in this domain. `EINVAL`: it is not allocated.
    pub(crate) fn span(&self, addr: usize, len: usize) -> Result<Span, Failure> {
        let nearest = self.0.range(..=addr).next_back().map(|(_, region)| region);
        match nearest.filter(|region| addr - region.addr() < region.len()) {
            Some(region) => Span::new(region, addr, len),
            None => Err(fail!(
                ENXIO,
                "{len} bytes at {addr:#x} are in no memory of this domain: allocate them from an arena of it, or call \
                 pf_register for them"
            )),
        }
    }
}

impl State {
    pub(crate) fn new(domain: Domain, devices: Vec<Joined>) -> Arc<Self> {
        let regions = Shared::new(Regions::new());
        let reader = regions.reader();
        let devices = Mutex::new(devices);
        Arc::new(Self { domain, devices, regions, reader, lost: Mutex::default() })
    }

    /// Returns a thread's own look-up, which takes no lock that other threads take.
    pub(crate) fn lookup(&self) -> Lookup {
        Lookup(self.regions.reader())
    }

    /// Like [`Lookups::span`].
    pub(crate) fn span(&self, addr: usize, len: usize) -> Result<Span, Failure> {
        Lookups(self.reader.read()).span(addr, len)
    }

    /// Returns the requests that have been given up.
    pub(crate) fn lost(&self) -> Lost {
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts requests that are given up, or have ended after all.
    pub(crate) fn count_lost(&self, change: impl FnOnce(&mut Lost)) {
        change(&mut self.lost.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Stops all look-ups but those of owners.
    #[cfg(test)]
    pub(crate) fn stop_shared(&self) -> impl Sized + '_ {
        self.reader.stop()
    }

    /// Returns whether memory in the domain overlaps with these bytes.
    pub(crate) fn has(&self, addr: usize, len: usize) -> bool {
        let regions = self.reader.read();
        // No two overlap, so the last one that begins before the end reaches furthest.
        let nearest = regions.range(..addr.saturating_add(len)).next_back();
        nearest.is_some_and(|(_, region)| region.addr() + region.len() > addr)
    }

    /// Adds memory that is in the domain, the first that it is in.
    pub(crate) fn add(&self, region: &Arc<Region>) {
        let mut all = all();
        all.entry(region.addr()).or_default().push(Arc::clone(region));
        self.add_again(region);
    }

    /// Adds memory of another domain.
    pub(crate) fn add_again(&self, region: &Arc<Region>) {
        self.regions.write(|regions| {
            regions.insert(region.addr(), Arc::clone(region));
        });
    }

    /// Removes memory from all its domains if `check` allows it, while no mapping or request of it
    /// can begin.
    ///
    /// # Errors
    /// Those of `check`: nothing has changed.
    pub(crate) fn take_out(
        domains: &[Arc<Self>],
        region: &Arc<Region>,
        check: &dyn Fn() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut all = all();
        let locked: Vec<_> = domains.iter().map(|state| &*state.regions).collect();
        // One thread at a time, as `all` is locked: so the order of the domains does not matter.
        Shared::write_all(&locked, |each| {
            check()?;
            for regions in each {
                regions.remove(&region.addr());
            }
            Ok::<(), Failure>(())
        })?;
        if let Some(regions) = all.get_mut(&region.addr()) {
            regions.retain(|other| !Arc::ptr_eq(other, region));
            if regions.is_empty() {
                all.remove(&region.addr());
            }
        }
        Ok(())
    }

    /// Opens a device in the domain.
    ///
    /// # Errors
    /// `ENOTSUP`: the devices of the domain are models. Those of opening it.
    pub(crate) fn open(&self, bdf: Bdf) -> Result<Device, Failure> {
        if self.domain.soft_bus().is_some() {
            return Err(fail!(
                ENOTSUP,
                "{bdf} cannot be opened in a software domain, whose devices are models: use a domain of pf_domain_create or \
                 pf_domain_vfio"
            ));
        }
        // The interface is the domain's.
        Device::open_in(&bdf.to_string(), &self.domain, &Options::new())
            .map_err(|error| Failure::from(&error))
    }

    /// Returns the device at `address`, if it is attached.
    pub(crate) fn device(&self, bdf: Bdf) -> Option<Device> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.iter().find(|joined| joined.bdf == bdf).map(|joined| joined.device.clone())
    }
}

/// Returns a C string.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn text<'t>(text: *const c_char, name: &str) -> Result<&'t str, Failure> {
    check_out(text, name)?;
    // SAFETY: not null, so it is a C string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| fail!(EINVAL, "`{name}` is not UTF-8"))
}

/// Creates a domain behind a software IOMMU: for tests, and for a program that has no hardware. The
/// devices in it are models: of a controller (pf_nvme_open() without `bdf`), or the program's own
/// (pf_port_open()). Their accesses are checked as by a real IOMMU.
///
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: ENOMEM; EFAULT (`out` is NULL); ENFILE (65,536 domains exist).
/// Thread: any. Allocates. Ends with pf_domain_destroy(). Since 0.2.
///
/// # Safety
/// `out` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_domain_soft(out: *mut *mut pf_domain_t) -> c_int {
    call(|| {
        check_out(out, "out")?;
        let domain = Domain::soft().map_err(|error| Failure::from(&error))?;
        let handle = DOMAINS.insert(pf_domain_t { state: State::new(domain, Vec::new()) })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Options of a domain behind the software IOMMU, for tests of what a program does when revocations
/// go wrong. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_domain_soft_opts {
    /// sizeof(struct pf_domain_soft_opts).
    pub struct_size: usize,
    /// The duration of a flush in nanoseconds; 0: 1 us.
    pub flush_ns: u64,
    /// The nanoseconds that a call waits for a flush before it is late (pf_unmap(), tickets); 0: 5
    /// s. A request loop has a limit of its own (pf_requests_opts.flush_ns).
    pub timeout_ns: u64,
    /// The first flush, counted from 1, that never completes, as those after it: a request is
    /// PF_END_LATE for good. 0: none.
    pub hang_from: u64,
    /// The first flush, counted from 1, that the IOMMU refuses for good: it has failed, and a request
    /// is PF_END_LOST. 0: none.
    pub fail_from: u64,
}

// SAFETY: a size and four words, without padding.
unsafe impl options::Options for pf_domain_soft_opts {
    const DEFAULT: Self =
        Self { struct_size: 0, flush_ns: 0, timeout_ns: 0, hang_from: 0, fail_from: 0 };
}

/// Returns the configuration that options ask for.
fn soft_config(opts: &pf_domain_soft_opts) -> SoftConfig {
    let given = |value: u64| (value > 0).then_some(value);
    let default = SoftConfig::default();
    SoftConfig {
        flush_cost: given(opts.flush_ns).map_or(default.flush_cost, Duration::from_nanos),
        timeout: given(opts.timeout_ns).map_or(default.timeout, Duration::from_nanos),
        hang_from: given(opts.hang_from),
        fail_from: given(opts.fail_from),
        ..default
    }
}

/// Creates a domain as pf_domain_soft() does, whose IOMMU is slow or goes wrong.
///
/// @opts: the options; NULL: the defaults.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: ENOMEM; EINVAL (`struct_size`); E2BIG (fields of a newer version); EFAULT
/// (`out` is NULL); ENFILE (65,536 domains exist).
/// Thread: any. Allocates. Ends with pf_domain_destroy(). Since 0.2.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says; `out` is null, or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_domain_soft_with(
    opts: *const pf_domain_soft_opts,
    out: *mut *mut pf_domain_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        // SAFETY: as the caller promises.
        let opts = unsafe { options::read(opts) }?;
        let domain =
            Domain::soft_with(soft_config(&opts)).map_err(|error| Failure::from(&error))?;
        let handle = DOMAINS.insert(pf_domain_t { state: State::new(domain, Vec::new()) })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Opens a PCI device through VFIO, and creates the domain that it is in.
///
/// @bdf: the device's address, as "0000:01:00.0". It must be bound to vfio-pci (`pinfold bind`).
/// @iommu: the kernel's interface: PF_IOMMU_*; 0: PF_IOMMU_BEST.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: ENODEV, EACCES, ENOTSUP and errors of the kernel; EBUSY (this process has
/// it already: in another domain, or by pf_device_open()); EINVAL (`bdf`, or an unknown `iommu`);
/// EFAULT. The message names the step that is missing.
/// Thread: any. Allocates. Ends with pf_domain_destroy(), after which the device is reset. Since
/// 0.2.
///
/// # Safety
/// `out` is null, or can be written; `bdf` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_domain_vfio(
    bdf: *const c_char,
    iommu: u32,
    out: *mut *mut pf_domain_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        // SAFETY: as the caller promises.
        let bdf = unsafe { text(bdf, "bdf") }?;
        let options = Options::new().interface(interface(iommu)?);
        let bdf = claims::address(bdf)?;
        let attached = Attached::new(bdf)?;
        let device =
            Device::open(&bdf.to_string(), &options).map_err(|error| Failure::from(&error))?;
        let state = State::new(device.domain().clone(), vec![Joined { device, bdf, attached }]);
        let handle = DOMAINS.insert(pf_domain_t { state })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// For pf_domain_vfio() and pf_domain_opts.iommu: iommufd where the kernel offers it for the
/// device, or for devices, else type 1.
pub const PF_IOMMU_BEST: u32 = 0;
/// For pf_domain_vfio() and pf_domain_opts.iommu: VFIO's type 1 interface.
pub const PF_IOMMU_TYPE1: u32 = 1;
/// For pf_domain_vfio() and pf_domain_opts.iommu: iommufd.
pub const PF_IOMMU_IOMMUFD: u32 = 2;

fn interface(iommu: u32) -> Result<IommuInterface, Failure> {
    match iommu {
        PF_IOMMU_BEST => Ok(IommuInterface::Best),
        PF_IOMMU_TYPE1 => Ok(IommuInterface::Type1),
        PF_IOMMU_IOMMUFD => Ok(IommuInterface::Iommufd),
        _ => Err(fail!(
            EINVAL,
            "iommu {iommu:#x}: pass PF_IOMMU_BEST, PF_IOMMU_TYPE1 or PF_IOMMU_IOMMUFD"
        )),
    }
}

/// Options of a domain for real devices. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_domain_opts {
    /// sizeof(struct pf_domain_opts).
    pub struct_size: usize,
    /// The kernel's interface: PF_IOMMU_*; 0: PF_IOMMU_BEST.
    pub iommu: u32,
    /// The number of an address space (IOAS) of the program's `iommufd`, in which the domain is
    /// then; 0: the domain makes one of its own.
    pub ioas: u32,
    /// With `ioas`: the first address that the domain may use there, a multiple of 4096.
    pub iova: u64,
    /// With `ioas`: how many bytes from `iova` on are the domain's alone, a multiple of 4096. 0:
    /// all addresses are, and nobody else maps there.
    pub iova_len: u64,
    /// With `ioas`: the descriptor of /dev/iommu that has it. It stays the program's.
    pub iommufd: c_int,
    /// 0.
    pub reserved: u32,
}

// SAFETY: words and pairs of halves of words, without padding.
unsafe impl options::Options for pf_domain_opts {
    const DEFAULT: Self = Self {
        struct_size: 0,
        iommu: PF_IOMMU_BEST,
        ioas: 0,
        iova: 0,
        iova_len: 0,
        iommufd: 0,
        reserved: 0,
    };
}

/// Returns the domain that options ask for.
///
/// # Safety
/// As for `pf_domain_create`.
unsafe fn made(opts: &pf_domain_opts) -> Result<Domain, Failure> {
    let &pf_domain_opts { iommu, ioas, iova, iova_len, iommufd, reserved, .. } = opts;
    if reserved != 0 {
        return Err(fail!(EINVAL, "reserved {reserved:#x}: set it to 0"));
    }
    let options = Options::new().interface(interface(iommu)?);
    if ioas == 0 {
        if (iova, iova_len) != (0, 0) {
            return Err(fail!(
                EINVAL,
                "{iova_len} bytes at {iova:#x} without `ioas`: a domain's own address space is all its own"
            ));
        }
        return Domain::vfio(&options).map_err(|error| Failure::from(&error));
    }
    if iommu == PF_IOMMU_TYPE1 {
        return Err(fail!(EINVAL, "ioas {ioas} with PF_IOMMU_TYPE1: it is of an iommufd"));
    }
    let window = match iova_len {
        0 if iova == 0 => None,
        _ => {
            let whole = (iova | iova_len).is_multiple_of(4096);
            let window = IovaRange::new(Iova::new(iova), iova_len).ok().filter(|_| whole);
            Some(window.ok_or_else(|| {
                fail!(
                    EINVAL,
                    "{iova_len} bytes at {iova:#x}: pass at least one page, in multiples of 4096, that ends within 64 bits"
                )
            })?)
        }
    };
    if iommufd < 0 {
        return Err(fail!(EBADF, "iommufd {iommufd} is no descriptor"));
    }
    // SAFETY: not negative. The caller promises that it stays open during the call; one that is not
    // open is refused by the kernel.
    let fd = unsafe { BorrowedFd::borrow_raw(iommufd) };
    // SAFETY: as the caller promises.
    unsafe { Domain::import(fd, ioas, window, &options) }.map_err(|error| Failure::from(&error))
}

/// Creates a domain for real devices before there is one in it: pf_device_open() and
/// pf_domain_attach() add devices, which all reach the same memory at the same addresses. Memory
/// may be mapped before: the first device finds it. With type 1 it is pinned only then, and where
/// that fails the device is not added.
///
/// Or imports an address space of the program's own (`ioas`), with devices in it or without. What
/// is mapped through the domain is unmapped when the object that it belongs to ends; the address
/// space, its devices and what else is mapped there stay, and the descriptor stays open. Until then
/// the program does not copy such mappings to another address space (IOMMU_IOAS_COPY): they could
/// not be revoked there. If another process has the iommufd too, end the objects before the process
/// ends.
///
/// @opts: the options; NULL: the defaults.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EACCES, ENOENT (also: no such `ioas`), ENOTSUP and what the kernel
/// returns; ENOTTY (`iommufd` is none); EBADF (it is not open); EINVAL (an unknown `iommu`;
/// addresses that are not whole pages, not usable, or without `ioas`; `reserved`, `struct_size`);
/// E2BIG (fields of a newer version); EFAULT; ENFILE. The message names the step that is missing.
/// Thread: any. Allocates. Ends with pf_domain_destroy(). Since 0.2.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says; its `iommufd` stays open
/// during the call, and what the domain maps is not copied to another address space; `out` is null,
/// or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_domain_create(
    opts: *const pf_domain_opts,
    out: *mut *mut pf_domain_t,
) -> c_int {
    call(|| {
        check_out(out, "out")?;
        // SAFETY: as the caller promises.
        let opts = unsafe { options::read(opts) }?;
        // SAFETY: as the caller promises.
        let domain = unsafe { made(&opts) }?;
        let handle = DOMAINS.insert(pf_domain_t { state: State::new(domain, Vec::new()) })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Attaches a device to a domain of pf_domain_vfio() or pf_domain_create(): all of its devices
/// reach the same memory at the same addresses.
///
/// @domain: the domain.
/// @bdf: the device's address.
///
/// Return: 0, or -errno: as pf_domain_vfio(); EEXIST (it is attached to this domain); ENOTSUP (a
/// software domain).
/// Thread: any. Allocates. Since 0.2.
///
/// # Safety
/// `bdf` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_domain_attach(domain: *mut pf_domain_t, bdf: *const c_char) -> c_int {
    call(|| {
        let domain = DOMAINS.get(domain)?;
        // SAFETY: as the caller promises.
        let bdf = claims::address(unsafe { text(bdf, "bdf") }?)?;
        let mut devices = domain.state.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if devices.iter().any(|joined| joined.bdf == bdf) {
            return Err(fail!(EEXIST, "{bdf} is attached to this domain already"));
        }
        let attached = Attached::new(bdf)?;
        let device = domain.state.open(bdf)?;
        devices.push(Joined { device, bdf, attached });
        Ok(0)
    })
}

/// Detaches a device from its domain: it is reset, and reaches nothing any more. Its driver ends
/// first. With type 1 its group is closed with its last device in the domain, so that other programs
/// can open it; the last group of a domain only when nothing is mapped there any more.
///
/// @domain: the domain.
/// @bdf: the device's address.
///
/// Return: 0, or -errno: ENODEV (it is not attached); EBUSY (pf_device_open() or pf_nvme_open() has
/// it, and nothing has changed: end that first); EBADF; EINVAL; EFAULT.
/// Thread: any. Since 0.2.
///
/// # Safety
/// `bdf` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_domain_detach(domain: *mut pf_domain_t, bdf: *const c_char) -> c_int {
    call(|| {
        let domain = DOMAINS.get(domain)?;
        // SAFETY: as the caller promises.
        let bdf = claims::address(unsafe { text(bdf, "bdf") }?)?;
        let mut devices = domain.state.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = devices.iter().position(|joined| joined.bdf == bdf) else {
            return Err(fail!(ENODEV, "{bdf} is not attached to this domain"));
        };
        // A driver of the process keeps the device, and with it the device's access to memory.
        Opened::check_none(bdf)?;
        drop(devices.remove(at));
        Ok(0)
    })
}

/// Destroys a domain's handle. Objects created in the domain keep it: owners, arenas,
/// registrations, controllers.
///
/// @domain: the domain; NULL does nothing.
///
/// Return: 0, or -errno: EBADF; EBUSY (another thread is in a call with it).
/// Thread: any. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_domain_destroy(domain: *mut pf_domain_t) -> c_int {
    call(|| {
        if !domain.is_null() {
            drop(DOMAINS.remove(domain, |_| Ok(()))?);
        }
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn the_options_of_a_software_domain_are_its_configuration() {
        let default = SoftConfig::default();
        let config = soft_config(&pf_domain_soft_opts::DEFAULT);
        assert_eq!((config.flush_cost, config.timeout), (default.flush_cost, default.timeout));
        assert_eq!((config.hang_from, config.fail_from), (None, None));
        let opts = pf_domain_soft_opts {
            struct_size: size_of::<pf_domain_soft_opts>(),
            flush_ns: 1,
            timeout_ns: 2,
            hang_from: 3,
            fail_from: 4,
        };
        let config = soft_config(&opts);
        assert_eq!((config.flush_cost.as_nanos(), config.timeout.as_nanos()), (1, 2));
        assert_eq!((config.hang_from, config.fail_from), (Some(3), Some(4)));
    }
}
