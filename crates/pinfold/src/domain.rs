//! Domains and mappings: what devices can reach, and when.
//!
//! A [`Domain`] is one I/O address space over one of the backends. A buffer moves into a
//! [`Mapping`](pinfold_core::domain::Mapping), which the device reaches, and comes back when no
//! device can reach it any more; [`pinfold_core::domain`] describes that life step by step.
//!
//! Handles own what they refer to, so a driver keeps all that it uses in one struct without a
//! lifetime, in any order, and moves it between threads:
//!
//! ```
//! use pinfold::{Arena, Buffer, Domain, DomainLocal, FromDevice, Mapping};
//!
//! struct Driver {
//!     domain: Domain,
//!     local: DomainLocal, // this thread's handle, with addresses of its own
//!     arena: Arena,
//!     receiving: Mapping<Buffer, FromDevice>,
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?; // a software IOMMU; or the domain of a `vfio::Device`
//! let device = domain.port().ok_or("only models have ports")?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let mut local = domain.local();
//!
//! // Mapped: the device reaches the buffer, and the program has no reference into it.
//! let receiving = local.map(arena.alloc(4096)?, FromDevice)?;
//! let mut driver = Driver { domain, local, arena, receiving };
//! let iova = driver.receiving.iova().start();
//! device.write(iova, b"a packet")?;
//!
//! // Strict: `unmap` revokes access and waits. After it no device reaches the buffer.
//! let mut buffer = driver.local.unmap(driver.receiving)?;
//! assert_eq!(&buffer.as_slice()?[..8], b"a packet");
//! assert!(device.write(iova, b"too late").is_err());
//!
//! // Revoke: access is revoked at once, and the buffer is returned by a later wait or poll.
//! let mapping = driver.local.map(buffer, FromDevice)?;
//! let revoked = driver.local.revoke(mapping);
//! let buffer = driver.local.wait(revoked)?;
//!
//! // Batch: many buffers are revoked with one flush.
//! let ring = driver.local.map_many([buffer, driver.arena.alloc(4096)?], FromDevice)?;
//! let mut revoked = Vec::new();
//! driver.local.revoke_many(ring, &mut revoked);
//! for one in revoked {
//!     driver.local.wait(one)?; // the first wait is the only long one
//! }
//! println!("{}", driver.domain.stats());
//! # Ok(()) }
//! ```
//!
//! # Deadlines
//!
//! A flush that does not complete is *late*, and its buffers are neither lost nor reused. The IOMMU
//! here hangs at its second batch of flushes; everything else continues.
//!
//! ```
//! use pinfold::soft::SoftConfig;
//! use pinfold::{Arena, Buffer, Domain, FromDevice, NotQuiesced, ToDevice, Unrevoked, WaitLimit};
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft_with(SoftConfig { hang_from: Some(2), ..SoftConfig::default() })?;
//! let device = domain.port().ok_or("only models have ports")?;
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let mut owner = domain.local();
//! let (mut quiesced, mut revoked) = (0, Vec::new());
//! for _ in 0..2 {
//!     let received = owner.map(arena.alloc(4096)?, FromDevice)?;
//!     let sent = owner.map(arena.alloc(4096)?, ToDevice)?;
//!     device.write(received.iova().start(), b"a packet")?;
//!     // One flush for both.
//!     owner.revoke_many([Unrevoked::from(received), sent.into()], &mut revoked);
//!     let limit = WaitLimit::within(Duration::from_millis(20));
//!     for outcome in owner.wait_many_for(std::mem::take(&mut revoked), limit) {
//!         match outcome {
//!             Ok(buffer) => {
//!                 let mut buffer: Buffer = buffer; // no device reaches it: it can be read
//!                 println!("{:?}", &buffer.as_slice()?[..8]);
//!                 quiesced += 1;
//!             }
//!             // Late: kept here to be waited for again. If it is dropped, the domain keeps it
//!             // until its flush completes.
//!             Err(NotQuiesced { revoked: Some(late), error }) => {
//!                 println!("{error}");
//!                 revoked.push(late);
//!             }
//!             // The unit has failed: a device may reach the buffer forever, so it is
//!             // quarantined, and counted.
//!             Err(NotQuiesced { revoked: None, error }) => return Err(error.into()),
//!         }
//!     }
//! }
//! assert_eq!((quiesced, revoked.len()), (2, 2));
//! drop(revoked); // does not wait again
//! assert_eq!(domain.stats().deferred, 2);
//! assert!(owner.map(arena.alloc(4096)?, FromDevice).is_ok());
//! # Ok(()) }
//! ```

use pinfold_core::mem::DmaMemory;
use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The life of a mapping on one thread, with the software IOMMU:
///
/// ```
/// use pinfold::{Arena, Domain, FromDevice, ToDevice, Unrevoked};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Domain::soft()?;
/// let arena = Arena::builder().size(4 << 20).build(&domain)?;
/// let mut local = domain.local(); // one per thread
///
/// let received = local.map(arena.alloc(4096)?, FromDevice)?; // the device may write it ...
/// let sent = local.map(arena.alloc(4096)?, ToDevice)?; // ... and read this one
/// let mut revoked = Vec::with_capacity(2);
/// local.revoke_many([Unrevoked::from(received), sent.into()], &mut revoked); // one flush for both
/// println!("the flush is done: {}", revoked[0].is_quiesced()); // never waits
/// for one in revoked {
///     let buffer = local.wait(one)?; // no device reaches it any more
///     let mapping = local.map(buffer, FromDevice)?;
///     local.unmap(mapping)?; // revokes and waits
/// }
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use pinfold_core::domain::DomainLocal;

/// One I/O address space, with the backend that keeps it. A handle: a clone is the same domain.
///
/// A buffer is [mapped](pinfold_core::domain::Domain::map), so that the device reaches it, and
/// [unmapped](pinfold_core::domain::Mapping::unmap), after which no device does:
///
/// ```
/// use pinfold::{Arena, Domain, FromDevice};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Domain::soft()?;
/// let arena = Arena::builder().size(4 << 20).build(&domain)?;
/// let mapping = domain.map(arena.alloc(4096)?, FromDevice)?;
/// let iova = mapping.iova(); // what the device is told
/// let buffer = mapping.unmap()?;
/// assert_eq!(buffer.len() as u64, iova.len());
/// # Ok(()) }
/// ```
///
/// The operations that do not depend on the backend (`map`, `revoke_many`, `local`, `map_static`,
/// `stats` ...) come through `Deref`: see [`pinfold_core::domain::Domain`].
///
/// [`Domain::soft`] creates one behind a software IOMMU,
/// [`vfio::Device::open`](crate::vfio::Device::open) one for a real device. The backend `soft`
/// needs no kernel support, `vfio` Linux 4.0, `iommufd` 6.6. The feature `vtd` adds one for a device
/// whose IOMMU the program takes from the kernel.
#[derive(Clone)]
pub struct Domain {
    core: pinfold_core::domain::Domain,
    device_side: Arc<dyn DeviceSide>,
}

/// The side of a domain that its devices are attached to. Each backend implements it for a type of
/// its own, and finds it again with [`Domain::device_side`].
pub(crate) trait DeviceSide: Any + Send + Sync {
    /// Like [`IommuContext::lend_file`](crate::backend::context::IommuContext::lend_file), where
    /// the kernel keeps the table.
    fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        let _ = (memory, file);
    }
}

#[cfg(test)]
impl DeviceSide for () {}

impl Domain {
    /// Combines a core domain with the device side of its backend.
    pub(crate) fn new(core: pinfold_core::domain::Domain, device_side: impl DeviceSide) -> Self {
        Self { core, device_side: Arc::new(device_side) }
    }

    /// Returns the device side, if it is a `T`.
    /// As [`DeviceSide::lend_file`].
    pub(crate) fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        self.device_side.lend_file(memory, file);
    }

    pub(crate) fn device_side<T: DeviceSide>(&self) -> Option<&T> {
        let side: &dyn Any = &*self.device_side;
        side.downcast_ref()
    }
}

impl std::ops::Deref for Domain {
    type Target = pinfold_core::domain::Domain;
    fn deref(&self) -> &Self::Target {
        &self.core
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Domain").field(&self.core).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Buffer};
    use pinfold_core::access::FromDevice;
    use pinfold_core::domain::Mapping;

    /// The state that a program keeps in one struct.
    struct Driver {
        domain: Domain,
        owner: DomainLocal,
        ring: Vec<Mapping<Buffer, FromDevice>>,
        arena: Arena,
    }

    fn driver() -> Driver {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(2 << 20).build(&domain).unwrap();
        let mut owner = domain.local();
        let ring =
            (0..4).map(|_| owner.map(arena.alloc(4096).unwrap(), FromDevice).unwrap()).collect();
        Driver { domain, owner, ring, arena }
    }

    #[test]
    fn a_refused_map_of_a_foreign_buffer_names_the_next_step() {
        let (here, there) = (Domain::soft().unwrap(), Domain::soft().unwrap());
        let memory = Arena::builder().size(2 << 20).build_unmapped().unwrap();
        for arena in [None, Some(memory.map_into(&there).unwrap())] {
            let refused = here.map(memory.alloc(4096).unwrap(), FromDevice).unwrap_err();
            assert!(refused.to_string().contains("call map_into"), "{refused}");
            drop(arena);
        }
        let arena = memory.map_into(&here).unwrap();
        drop(here.map(arena.alloc(4096).unwrap(), FromDevice).unwrap().unmap().unwrap());
    }

    #[test]
    fn the_last_mapping_or_handle_frees_the_domain() {
        for last in 0..4 {
            let driver = driver();
            let port = driver.domain.port().unwrap();
            let iova = driver.ring[0].iova().start();
            port.write(iova, b"while mapped").unwrap();
            std::thread::spawn(move || {
                let Driver { domain, owner, ring, arena } = driver;
                let mut parts: Vec<Box<dyn std::any::Any>> =
                    vec![Box::new(ring), Box::new(domain), Box::new(owner), Box::new(arena)];
                let kept = parts.swap_remove(last);
                drop(parts);
                assert_eq!(kept.is::<Vec<Mapping<Buffer, FromDevice>>>(), last == 0);
                drop(kept);
            })
            .join()
            .unwrap();
            port.write(iova, b"afterwards").unwrap_err();
        }
        let Driver { domain, ring, .. } = driver();
        let port = domain.port().unwrap();
        drop(domain);
        for mapping in ring {
            port.write(mapping.iova().start(), b"device").unwrap();
            let iova = mapping.iova().start();
            assert_eq!(&mapping.unmap().unwrap().as_slice().unwrap()[..6], b"device");
            port.write(iova, b"afterwards").unwrap_err();
        }
    }
}
