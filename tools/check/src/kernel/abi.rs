//! Numbers of `linux/vfio.h` and `linux/iommufd.h`, and access to the structures behind a pointer of
//! the program.
//!
//! The library's VFIO backend has some of these numbers too. They are private to it: to share them
//! would make the kernel's ABI a part of its API. And a wrong number that both had would hide from
//! the tests in which its backend runs under check; these are compared with the kernel's header
//! apart.

use crate::process::Memory;

const fn vfio(n: u32) -> u32 {
    ((b';' as u32) << 8) | (100 + n)
}
const fn iommu(n: u32) -> u32 {
    ((b';' as u32) << 8) | (0x80 + n)
}

pub(crate) const GET_API_VERSION: u32 = vfio(0);
pub(crate) const CHECK_EXTENSION: u32 = vfio(1);
pub(crate) const SET_IOMMU: u32 = vfio(2);
pub(crate) const GROUP_GET_STATUS: u32 = vfio(3);
pub(crate) const GROUP_SET_CONTAINER: u32 = vfio(4);
pub(crate) const GROUP_UNSET_CONTAINER: u32 = vfio(5);
pub(crate) const GROUP_GET_DEVICE_FD: u32 = vfio(6);
pub(crate) const DEVICE_GET_INFO: u32 = vfio(7);
pub(crate) const DEVICE_GET_REGION_INFO: u32 = vfio(8);
pub(crate) const DEVICE_GET_IRQ_INFO: u32 = vfio(9);
pub(crate) const DEVICE_SET_IRQS: u32 = vfio(10);
pub(crate) const DEVICE_RESET: u32 = vfio(11);
/// Also `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO`.
pub(crate) const IOMMU_GET_INFO: u32 = vfio(12);
pub(crate) const IOMMU_MAP_DMA: u32 = vfio(13);
pub(crate) const IOMMU_UNMAP_DMA: u32 = vfio(14);
pub(crate) const DEVICE_BIND_IOMMUFD: u32 = vfio(18);
pub(crate) const DEVICE_ATTACH: u32 = vfio(19);
pub(crate) const DEVICE_DETACH: u32 = vfio(20);

pub(crate) const IOMMU_DESTROY: u32 = iommu(0);
pub(crate) const IOAS_ALLOC: u32 = iommu(1);
pub(crate) const IOAS_COPY: u32 = iommu(3);
pub(crate) const IOAS_IOVA_RANGES: u32 = iommu(4);
pub(crate) const IOAS_MAP: u32 = iommu(5);
pub(crate) const IOAS_UNMAP: u32 = iommu(6);
pub(crate) const IOAS_MAP_FILE: u32 = iommu(15);

/// The result of a call: a value, or an error number.
pub(crate) type Answer = Result<i64, i32>;

/// A structure of the program, as bytes.
#[derive(Clone, Debug)]
pub(crate) struct Struct(pub(crate) Vec<u8>);

impl Struct {
    /// Reads `len` bytes at a pointer.
    pub(crate) fn read(memory: &Memory, at: u64, len: usize) -> Result<Self, i32> {
        let mut bytes = vec![0; len];
        memory.read(at, &mut bytes).map_err(|_| libc::EFAULT)?;
        Ok(Self(bytes))
    }

    /// Reads a structure whose first field is its size, which is at least `len`.
    pub(crate) fn sized(memory: &Memory, at: u64, len: usize) -> Result<Self, i32> {
        let found = Self::read(memory, at, len)?;
        let size = usize::try_from(found.u32(0)).unwrap_or(usize::MAX);
        if size < len { Err(libc::EINVAL) } else { Ok(found) }
    }

    /// Reads a structure of iommufd: at least `least` bytes, and zeroes behind what is known.
    pub(crate) fn extensible(
        memory: &Memory,
        at: u64,
        least: usize,
        known: usize,
    ) -> Result<Self, i32> {
        let size = usize::try_from(Self::read(memory, at, 4)?.u32(0)).unwrap_or(usize::MAX);
        if size < least {
            return Err(libc::EINVAL);
        }
        // The kernel takes no more than a page.
        if size > 4096 {
            return Err(libc::E2BIG);
        }
        let mut found = Self::read(memory, at, size)?;
        if found.0.get(known..).is_some_and(|rest| rest.iter().any(|byte| *byte != 0)) {
            return Err(libc::E2BIG);
        }
        found.0.resize(known, 0);
        Ok(found)
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        let word = self.0.get(at..).and_then(|rest| rest.first_chunk::<4>());
        word.map_or(0, |word| u32::from_ne_bytes(*word))
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        let word = self.0.get(at..).and_then(|rest| rest.first_chunk::<8>());
        word.map_or(0, |word| u64::from_ne_bytes(*word))
    }

    pub(crate) fn set_u32(&mut self, at: usize, value: u32) {
        self.set(at, &value.to_ne_bytes());
    }

    pub(crate) fn set_u64(&mut self, at: usize, value: u64) {
        self.set(at, &value.to_ne_bytes());
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(to) = self.0.get_mut(at..at.saturating_add(bytes.len())) {
            to.copy_from_slice(bytes);
        }
    }

    /// Writes it back to the program.
    pub(crate) fn write(&self, memory: &Memory, at: u64) -> Answer {
        memory.write(at, &self.0).map(|()| 0).map_err(|_| libc::EFAULT)
    }
}

/// A chain of capabilities behind an INFO structure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Capabilities {
    bytes: Vec<u8>,
    /// Where the last header is.
    last: Option<usize>,
}

impl Capabilities {
    /// Appends a capability behind a structure of `base` bytes.
    pub(crate) fn add(&mut self, base: usize, id: u16, version: u16, body: &[u8]) {
        // Each begins at a multiple of 8, as the kernel's do.
        let at = self.bytes.len().next_multiple_of(8);
        self.bytes.resize(at, 0);
        let offset = u32::try_from(base + at).unwrap_or(0).to_ne_bytes();
        if let Some(to) = self.last.and_then(|last| self.bytes.get_mut(last + 4..last + 8)) {
            to.copy_from_slice(&offset);
        }
        self.last = Some(at);
        self.bytes.extend(id.to_ne_bytes());
        self.bytes.extend(version.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(body);
    }

    /// Appends the chain to a structure of `base` bytes whose field at `offset_field` leads to it,
    /// if the program has room; otherwise tells how much is needed, by `argsz`.
    pub(crate) fn finish(
        &self,
        info: &mut Struct,
        base: usize,
        offset_field: usize,
        memory: &Memory,
        at: u64,
    ) -> Result<(), i32> {
        let whole = u32::try_from(base + self.bytes.len()).unwrap_or(u32::MAX);
        if info.u32(0) < whole {
            info.set_u32(0, whole);
            info.set_u32(offset_field, 0);
            return Ok(());
        }
        memory.write(at.wrapping_add(base as u64), &self.bytes).map_err(|_| libc::EFAULT)?;
        info.set_u32(offset_field, u32::try_from(base).unwrap_or(0));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vfio_bindings::bindings::vfio as theirs;

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
        let base = (u32::from(theirs::VFIO_TYPE) << 8) | theirs::VFIO_BASE;
        let calls = [
            GET_API_VERSION,
            CHECK_EXTENSION,
            SET_IOMMU,
            GROUP_GET_STATUS,
            GROUP_SET_CONTAINER,
            GROUP_UNSET_CONTAINER,
            GROUP_GET_DEVICE_FD,
            DEVICE_GET_INFO,
            DEVICE_GET_REGION_INFO,
            DEVICE_GET_IRQ_INFO,
            DEVICE_SET_IRQS,
            DEVICE_RESET,
            IOMMU_GET_INFO,
            IOMMU_MAP_DMA,
            IOMMU_UNMAP_DMA,
        ];
        assert!((0..).zip(calls).all(|(n, call)| call == base + n));
        let later = [DEVICE_BIND_IOMMUFD, DEVICE_ATTACH, DEVICE_DETACH];
        assert!((18..).zip(later).all(|(n, call)| call == base + n));
    }
}
