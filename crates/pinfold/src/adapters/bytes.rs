//! [`Bytes`] from DMA memory, without a copy.
//!
//! ```
//! use pinfold::adapters::bytes::freeze;
//! use pinfold::{Arena, Domain, FromDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(1 << 20).build(&domain)?;
//! let mapping = domain.map(arena.alloc(4096)?, FromDevice)?;
//! # let device = domain.port().ok_or("no port")?;
//! # device.write(mapping.iova().start(), b"from the device")?;
//! let bytes = freeze(mapping.unmap()?)?; // no device reaches it any more
//! assert_eq!(&bytes.slice(..4)[..], b"from");
//! # Ok(()) }
//! ```

use crate::Buffer;
use crate::arena::NotExclusive;
use ::bytes::Bytes;
use std::fmt;
use std::ptr::NonNull;

/// A buffer that could not become [`Bytes`], and why.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotFrozen {
    /// The buffer.
    pub buffer: Buffer,
    /// The reason.
    #[source]
    pub error: NotExclusive,
}

impl fmt::Debug for NotFrozen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotFrozen").field("error", &self.error).finish_non_exhaustive()
    }
}

/// Converts the buffer into [`Bytes`], read-only and shareable, without a copy.
///
/// A buffer leaves its mapping when no device can reach it, so the bytes no longer change. The
/// memory is freed when the last clone and slice of the `Bytes` is dropped. `bytes.slice(..n)`
/// takes a part. O(1).
///
/// # Errors
/// [`NotFrozen`] if a device, or another process through the arena's memfd, could write the bytes
/// at any time.
///
/// ```
/// # use pinfold::{Arena, Domain, adapters::bytes::freeze};
/// # use pinfold_core::access::FromDevice;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Domain::soft()?;
/// let arena = Arena::builder().size(1 << 20).build(&domain)?;
/// let mapped = domain.map(arena.alloc(4096)?, FromDevice)?;
/// # domain.port().ok_or("no device")?.write(mapped.iova().start(), b"a message")?;
/// let message = freeze(mapped.unmap()?)?.slice(..9); // nothing was copied
/// assert_eq!(message, "a message");
/// # Ok(()) }
/// ```
pub fn freeze(mut buffer: Buffer) -> Result<Bytes, NotFrozen> {
    match buffer.as_slice().map(NonNull::from) {
        Ok(bytes) => Ok(Bytes::from_owner(Frozen { bytes, _buffer: buffer })),
        Err(error) => Err(NotFrozen { buffer, error }),
    }
}

/// A buffer that is accessible only through this value, and only for reading.
struct Frozen {
    bytes: NonNull<[u8]>,
    _buffer: Buffer,
}

// SAFETY: the pointer is to the buffer's memory, which may be read from any thread; the rest is the
// buffer, which is `Send` itself.
unsafe impl Send for Frozen {}

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `Buffer::as_slice` gave it, so no device and no other process can write it while
        // the buffer is not mapped; the buffer is owned by `self`, which never lends it, and keeps
        // its memory where it is.
        unsafe { self.bytes.as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Domain, MappingPolicy, Source};
    use pinfold_core::access::{FromDevice, ToDevice};

    fn arena(domain: &Domain, mapping_policy: MappingPolicy, source: Source) -> Arena {
        Arena::builder()
            .size(1 << 20)
            .mapping_policy(mapping_policy)
            .source(source)
            .build(domain)
            .unwrap()
    }

    #[test]
    fn frozen_bytes_stay_in_place_and_late_device_writes_fault() {
        let domain = Domain::soft().unwrap();
        let device = domain.port().unwrap();
        let arena = arena(&domain, MappingPolicy::PerUse, Source::Plain);
        let mapped = domain.map(arena.alloc(8192).unwrap(), FromDevice).unwrap();
        let iova = mapped.iova().start();
        device.write(iova, &[7; 8192]).unwrap();
        let buffer = mapped.unmap().unwrap();
        let addr = buffer.memory().addr();
        let bytes = freeze(buffer).unwrap();
        assert_eq!((bytes.as_ptr().addr(), bytes.len()), (addr, 8192), "not a copy");
        device.write(iova, &[9; 8192]).unwrap_err();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn the_memory_is_freed_with_the_last_slice_from_any_thread() {
        let domain = Domain::soft().unwrap();
        let arena = arena(&domain, MappingPolicy::PerUse, Source::Plain);
        let bytes = freeze(arena.alloc_zeroed(4096).unwrap()).unwrap();
        let part = bytes.slice(100..200);
        drop(bytes);
        assert_eq!(arena.stats().frames_in_use, 1);
        std::thread::spawn(move || assert!(part.iter().all(|byte| *byte == 0))).join().unwrap();
        assert_eq!(arena.stats().frames_in_use, 0);
    }

    #[test]
    fn bytes_keep_the_arena() {
        let domain = Domain::soft().unwrap();
        let mut buffer = arena(&domain, MappingPolicy::PerUse, Source::Plain).alloc(4096).unwrap();
        buffer.as_mut_slice().unwrap().fill(3);
        let bytes = freeze(buffer).unwrap();
        drop(domain);
        assert!(bytes.iter().all(|byte| *byte == 3));
    }

    #[test]
    fn memory_that_others_may_write_is_returned() {
        let domain = Domain::soft().unwrap();
        for (mapping_policy, source) in
            [(MappingPolicy::Whole, Source::Plain), (MappingPolicy::PerUse, Source::Memfd)]
        {
            let arena = arena(&domain, mapping_policy, source);
            let buffer = arena.alloc(4096).unwrap();
            let refused = freeze(buffer).unwrap_err();
            refused.buffer.memory().write_u8(0, 1).unwrap();
            // The returned buffer is complete, and can still be mapped.
            domain.map(refused.buffer, ToDevice).unwrap().unmap().unwrap();
            assert_eq!(arena.stats().frames_in_use, 0);
        }
    }
}
