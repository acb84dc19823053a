//! Memory with a file descriptor, for sharing with another process.

use super::errno::Errno;
use pinfold_core::addr::PageSize;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;

/// Creates a memory file of `len` bytes (a multiple of `page`), sealed against changes of its
/// length: if the other process could shorten it, the next access here would be a `SIGBUS`.
///
/// `memfd_create` since Linux 3.17, hugepages in it since 4.14, sealing those since 4.16.
pub(crate) fn create(len: u64, page: PageSize) -> Result<OwnedFd, Errno> {
    let size = match page {
        PageSize::Size4K => MemfdFlags::empty(),
        PageSize::Size2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        PageSize::Size1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | size;
    let fd = rustix::fs::memfd_create("pinfold", flags)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::region::Region;
    use std::os::fd::AsFd;

    #[test]
    fn a_memory_file_has_a_sealed_length_and_shared_pages() {
        let fd = create(8192, PageSize::Size4K).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 4096).is_err());
        let (one, two) =
            (Region::shared(fd.as_fd(), 8192).unwrap(), Region::shared(fd.as_fd(), 8192).unwrap());
        one.memory().write_u64(4096, 0x1234).unwrap();
        assert_eq!(two.memory().read_u64(4096).unwrap(), 0x1234);
    }
}
