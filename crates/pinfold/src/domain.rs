//! A domain of this process: the core's [`Domain`](pinfold_core::domain::Domain) over one of the
//! backends.
//!
//! A driver can own a domain with all that it uses, and move between threads: mappings of a
//! [`DomainLocal`](crate::DomainLocal) and blocks of a pool hold a share of what they belong to,
//! without a read-modify-write on the hot path.
//!
//! ```
//! use pinfold::core::dma_pool::{Block, Local};
//! use pinfold::{Arena, Buffer, DmaPool, Domain, DomainLocal, FromDevice, Mapping};
//!
//! struct Driver {
//!     domain: DomainLocal,
//!     pool: DmaPool,
//!     local: Local,
//!     descriptors: Block,
//!     ring: Vec<Mapping<Buffer, FromDevice>>,
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?; // or that of a `vfio::Device`
//! let arena = Arena::builder().size(4 << 20).build(&domain)?;
//! let pool = DmaPool::builder("descriptors").block(128).align(128).build(&arena)?;
//! let (mut owner, mut local) = (domain.local(), pool.local());
//! let descriptors = local.alloc_zeroed()?;
//! let mapping = owner.map(arena.alloc(4096)?, FromDevice)?;
//! descriptors.memory().write_u64(0, mapping.iova().start().raw())?;
//! let mut driver = Driver { domain: owner, pool, local, descriptors, ring: vec![mapping] };
//! drop((domain, arena)); // the driver keeps alive what it needs
//!
//! let thread = std::thread::spawn(move || {
//!     let mut revoked = Vec::new();
//!     driver.domain.revoke_many(driver.ring.drain(..), &mut revoked); // one flush
//!     let quiesced = revoked.into_iter().filter_map(|one| driver.domain.wait(one).ok()).count();
//!     driver.local.free(driver.descriptors);
//!     (quiesced, driver.pool.stats().to_string())
//! });
//! let (quiesced, report) = thread.join().map_err(|_| "panicked")?;
//! assert_eq!(quiesced, 1);
//! println!("{report}");
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
//!     owner.revoke_many([Unrevoked::from(received), sent.into()], &mut revoked); // one flush for both
//!     let limit = WaitLimit::within(Duration::from_millis(20));
//!     for outcome in owner.wait_many_for(std::mem::take(&mut revoked), limit) {
//!         match outcome {
//!             Ok(buffer) => {
//!                 let mut buffer: Buffer = buffer; // no device reaches it: it can be read
//!                 println!("{:?}", &buffer.as_slice()?[..8]);
//!                 quiesced += 1;
//!             }
//!             // Late: kept here to be waited for again. Dropped, it would stay with the domain until its flush completes.
//!             Err(NotQuiesced { revoked: Some(late), error }) => {
//!                 println!("{error}");
//!                 revoked.push(late);
//!             }
//!             // The unit has failed: a device may reach the buffer for good, so it is quarantined, and counted.
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

use pinfold_core::domain::Local;
use pinfold_core::share::Shared;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// One I/O address space, with the backend that keeps it. A handle: a clone is the same domain.
///
/// The operations that do not depend on the backend (`map`, `revoke_all`, `register_memory`,
/// `map_static`, `stats` ...) come through `Deref`: see [`pinfold_core::domain::Domain`].
///
/// [`Domain::soft`] creates one behind a software IOMMU,
/// [`vfio::Device::open`](crate::vfio::Device::open) one for a real device. The backend `soft`
/// needs no kernel support, `vfio` Linux 4.0, `iommufd` 6.6.
#[derive(Clone)]
pub struct Domain {
    core: Shared<pinfold_core::domain::Domain>,
    device_side: Arc<dyn DeviceSide>,
}

/// What the devices of a domain are attached to. Each backend implements it for a type of its own,
/// and finds it again with [`Domain::device_side`].
pub(crate) trait DeviceSide: Any + Send + Sync {}

#[cfg(test)]
impl DeviceSide for () {}

impl Domain {
    /// Combines a core domain with the device side of its backend.
    pub(crate) fn new(core: pinfold_core::domain::Domain, device_side: impl DeviceSide) -> Self {
        Self { core: Shared::new(core), device_side: Arc::new(device_side) }
    }

    /// Returns one thread's handle, with addresses and counters of its own. Its mappings own a
    /// share of the domain: they may outlive every other handle, move between threads, and be kept
    /// in one struct with it.
    ///
    /// `map` of the domain itself, and of the handle of a [`pinfold_core::domain::Domain`], return
    /// mappings that borrow it.
    pub fn local(&self) -> Local {
        self.core.local()
    }

    /// Returns the name of the backend: `soft`, or `vfio`, `iommufd` or `none` for that of a
    /// [device](crate::vfio::Device).
    pub fn name(&self) -> &'static str {
        self.core.backend_name()
    }

    /// Returns the device side, if it is a `T`.
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

    /// What a program keeps in one struct.
    struct Driver {
        domain: Domain,
        owner: Local,
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
