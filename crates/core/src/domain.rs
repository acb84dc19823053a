//! A domain: one I/O address space, and the life of a mapping in it.
//!
//! ```text
//! map(buffer, direction) -> Mapping --revoke--> Revoked --wait / poll / await--> the buffer again
//!                              \------------------unmap-----------------------/
//! ```
//!
//! 1. **[map](Domain::map)**: the buffer moves into a [`Mapping`]; the device can reach it at
//!    [`Mapping::iova`], and the program holds no reference into it.
//! 2. **[unmap](Mapping::unmap)** revokes access and waits (*strict*): when it returns, no device
//!    can reach the buffer. Or **[revoke](Mapping::revoke)** returns at once, with one flush for
//!    each buffer, or **[revoke_many](Domain::revoke_many)** with one flush for many (*batch*). A
//!    [`Revoked`] holds the buffer and its I/O virtual addresses; neither can be reused or read
//!    until its ticket has completed.
//! 3. **[wait](Revoked::wait)**, [poll](Revoked::poll) or `await` return the buffer.
//!
//! Memory that stays mapped for its lifetime (*static*: an arena mapped as a whole, the chunks of a
//! pool) is mapped by its owner with [`Domain::map_static`] or [`Domain::map_at`].
//!
//! Handles own what they refer to: a mapping keeps its domain, so a driver stores domain, owner's
//! handles and mappings in one struct, in any order, and moves it between threads. [`Domain`] may
//! be used from any thread. A thread that maps often has a handle of its own ([`DomainLocal`]),
//! with addresses and counters that it shares with no other.
//!
//! A flush past its deadline is *late*, not failed: [`Revoked::wait`] then returns the `Revoked`,
//! to be waited for again. If that is dropped, the domain holds the buffer until the flush
//! completes ([`DomainStats::deferred`], [`Domain::release_late`]). Only if it never can (the unit
//! has failed, or access could not be revoked) the buffer and its addresses are *quarantined*:
//! never reused, and counted ([`DomainStats::quarantined`]).
//!
//! The same on a software IOMMU, as a whole program, is in the documentation of `pinfold::domain`;
//! this crate has no backend of its own.
//!
//! ```
//! # use pinfold_core::access::Access;
//! # use pinfold_core::addr::{Iova, IovaRange};
//! # use pinfold_core::domain::{Backend, BackendError, DomainId, Pinned, Properties, Revocation, Wait, WindowToken};
//! # use pinfold_core::invalidate::Ticket;
//! # use pinfold_core::iova::IovaSpace;
//! # use pinfold_core::mem::DmaMemory;
//! # use std::task::Poll;
//! # struct Toy;
//! # impl Backend for Toy {
//! #     fn properties(&self) -> Properties { Properties::new("toy") }
//! #     unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> { Ok(()) }
//! #     fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> { Ok(()) }
//! #     fn map(&self, _: IovaRange, _: DmaMemory, _: Access, _: Option<&WindowToken>) -> Result<(), BackendError> { Ok(()) }
//! #     fn revoke<'w>(&self, _: Revocation<'w>, _: &mut dyn Iterator<Item = Revocation<'w>>) -> Result<Ticket, BackendError> { Ok(Ticket::COMPLETED) }
//! #     fn wait(&self, _: Ticket, _: Wait<'_>) -> Poll<Result<(), BackendError>> { Poll::Ready(Ok(())) }
//! # }
//! # #[repr(align(4096))]
//! # struct Page([u8; 4096]);
//! # struct Buffer(std::ptr::NonNull<Page>);
//! # impl Buffer { fn new() -> Self { Self(std::ptr::NonNull::from(Box::leak(Box::new(Page([0; 4096]))))) } }
//! # unsafe impl Send for Buffer {}
//! # unsafe impl Pinned for Buffer {
//! #     fn memory(&self) -> DmaMemory<'_> { unsafe { DmaMemory::from_raw(self.0.cast(), 4096) } }
//! #     fn fixed_iova(&self, _: DomainId) -> Option<Iova> { None }
//! # }
//! use pinfold_core::access::FromDevice;
//! use pinfold_core::domain::{Domain, DomainLocal, Mapping};
//!
//! struct Driver {
//!     local: DomainLocal, // one per thread
//!     ring: Vec<Mapping<Buffer, FromDevice>>,
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let domain = Domain::new(std::sync::Arc::new(Toy), IovaSpace::new(39)?);
//! let mut local = domain.local();
//! let mapping = local.map(Buffer::new(), FromDevice)?;
//! let mut driver = Driver { local, ring: vec![mapping] };
//! drop(domain); // the driver keeps it
//! for mapping in driver.ring.drain(..) {
//!     let buffer = driver.local.unmap(mapping)?; // no device reaches it any more
//!     # let _ = buffer;
//! }
//! # Ok(())
//! # }
//! ```

mod backend;
mod error;
mod late;
mod local;
#[cfg(all(test, loom))]
mod loom_model;
mod mapping;
mod owner;
mod revoked;
mod space;
mod static_map;
mod stats;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod watch;
mod window;

pub use backend::{
    Backend, Generation, Generations, PhysExtent, PhysTranslator, Properties, Revocation,
    TableBackend, Until, Wait, WindowToken,
};
pub use error::BackendError;
pub use late::{deferred_bytes, quarantined_bytes};
#[cfg(feature = "bench-internals")]
pub use local::BareAddresses;
pub use local::DomainLocal;
pub use mapping::{MapError, MapManyError, Mapping};
pub use revoked::{NotQuiesced, QuiescedFuture, Revoked, Unrevoked};
pub use space::{Domain, DomainId, Payload, Pinned};
pub use static_map::{Reservation, StaticMapping, UnmapStaticError};
pub use stats::{BackendStats, DomainStats};
