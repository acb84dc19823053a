//! Binding memory to a NUMA node.

use super::errno::Errno;
use super::region::Region;

/// Words of the node mask, for the most nodes of Linux (`MAX_NUMNODES`, 1024).
const WORDS: usize = 1024 / libc::c_ulong::BITS as usize;

/// The number of node numbers.
pub(crate) const MAX_NODES: u32 = 1024;

/// `linux/mempolicy.h`: pages on other nodes are an error. Missing in libc.
const MPOL_MF_STRICT: libc::c_int = 1;

/// Binds the region's pages to `node`: a page fault fails rather than use another node's memory,
/// and pages that are already elsewhere are an error (`EIO`).
///
/// `mbind` with `MPOL_BIND` and `MPOL_MF_STRICT`: since Linux 2.6.7.
pub(crate) fn bind(region: &Region, node: u32) -> Result<(), Errno> {
    let mut mask: [libc::c_ulong; WORDS] = [0; WORDS];
    let word = usize::try_from(node / libc::c_ulong::BITS).unwrap_or(usize::MAX);
    let Some(bits) = mask.get_mut(word) else { return Err(Errno::new(libc::EINVAL)) };
    *bits = 1 << (node % libc::c_ulong::BITS);
    mbind(region, libc::MPOL_BIND, &mask, MPOL_MF_STRICT)
}

/// Undoes [`bind`]: the process's own policy applies again.
pub(crate) fn unbind(region: &Region) -> Result<(), Errno> {
    mbind(region, libc::MPOL_DEFAULT, &[0; WORDS], 0)
}

fn mbind(
    region: &Region,
    mode: libc::c_int,
    mask: &[libc::c_ulong; WORDS],
    flags: libc::c_int,
) -> Result<(), Errno> {
    // SAFETY: the range is mapped while `region` lives; `mask` has the `MAX_NODES` bits that the
    // call is given (it reads one less than it is given, hence the `+ 1`, and never past the
    // array); a policy changes no content.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            region.base().as_ptr(),
            region.len(),
            mode,
            mask.as_ptr(),
            libc::c_ulong::from(MAX_NODES) + 1,
            flags,
        )
    };
    if done == 0 { Ok(()) } else { Err(super::errno::last_errno()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_node_is_refused() {
        let region = Region::anonymous(4096, 4096).unwrap();
        assert!(bind(&region, 1000).is_err());
        assert!(bind(&region, u32::MAX).is_err());
    }
}
