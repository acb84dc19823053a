//! A domain: one I/O address space, and the life of a mapping in it.
//! (Skeleton: the face is fixed, the inside is being written.)
//!
//! ```text
//! map(buffer, direction) -> Mapped --revoke()--> Revoked(ticket) --wait()/poll()--> the buffer again
//! ```
#![allow(unused_variables, dead_code, clippy::todo, missing_debug_implementations)]

use crate::access::{Access, Direction};
use crate::addr::{Iova, IovaRange, Segment};
use crate::invalidate::Ticket;
use crate::mem::DmaMemory;
use core::marker::PhantomData;

/// Memory that can be mapped: pinned, and owned by the value.
///
/// # Safety
/// Implementers owe: `memory()` and `fixed_iova()` never change; the memory stays where it is, valid and given to
/// nobody else, until the value is dropped (leaking the value keeps it for ever); while the value is not borrowed, no
/// reference into the memory exists.
pub unsafe trait Pinned: Send + 'static {
    /// The memory. Start and length are multiples of 4096.
    fn memory(&self) -> DmaMemory;
    /// Where the memory is mapped already for as long as it lives (an arena that is exposed whole), if it is.
    fn fixed_iova(&self) -> Option<Iova>;
}

/// Why a backend refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {}

/// What keeps a domain's table: a short list of operations, a file each.
pub trait Backend: Send + Sync {
    /// `soft`, `vfio`, `none` ...
    fn name(&self) -> &'static str;
    /// The memory will be mapped from until [`expel`](Self::expel).
    ///
    /// # Safety
    /// The caller keeps it valid until `expel` has returned.
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError>;
    /// The memory goes away: when this returns, no device reaches it through this backend, whatever is mapped.
    fn expel(&self, memory: DmaMemory);
    /// Gives the device `access` to `memory` at `iova`; on failure nothing has changed.
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError>;
    /// Takes access back and asks for one flush of it all. The device can reach it until the ticket is done.
    fn revoke(&self, ranges: &[IovaRange]) -> Result<Ticket, BackendError>;
    /// Whether the flush is over.
    fn is_done(&self, ticket: Ticket) -> bool;
    /// Waits until it is, or until the backend gives the device up.
    fn wait(&self, ticket: Ticket) -> Result<(), BackendError>;
}

/// One I/O address space.
pub struct Domain(());

impl Domain {
    /// Gives the device access to `payload`, which moves into the mapping.
    pub fn map<P: Pinned, D: Direction>(
        &self,
        payload: P,
        direction: D,
    ) -> Result<Mapped<'_, P, D>, Refused<P>> {
        todo!()
    }
    /// Takes many mappings back with one flush.
    pub fn revoke_all<'d, P: Pinned, D: Direction>(
        &'d self,
        mappings: impl IntoIterator<Item = Mapped<'d, P, D>>,
        revoked: &mut alloc::vec::Vec<Revoked<'d, P>>,
    ) {
        todo!()
    }
}

/// A refusal gives the payload back.
pub struct Refused<P> {
    /// What was to be mapped.
    pub payload: P,
    /// Why it was not.
    pub error: BackendError,
}

/// A buffer in a domain: the device may reach it; nobody else does.
pub struct Mapped<'d, P: Pinned, D: Direction> {
    domain: &'d Domain,
    payload: P,
    iova: IovaRange,
    direction: PhantomData<D>,
}

impl<'d, P: Pinned, D: Direction> Mapped<'d, P, D> {
    /// Where the device finds it: one contiguous range.
    pub fn iova(&self) -> IovaRange {
        self.iova
    }
    /// The same as a segment.
    pub fn segment(&self) -> Segment {
        todo!()
    }
    /// Takes access back at once; the buffer is held until the ticket is done.
    pub fn revoke(self) -> Revoked<'d, P> {
        todo!()
    }
    /// Takes access back and waits: when this returns, no device reaches the buffer.
    pub fn unmap(self) -> Result<P, BackendError> {
        todo!()
    }
}

/// A buffer whose access has been taken back, but which a device may still reach until the ticket is done.
pub struct Revoked<'d, P: Pinned> {
    domain: &'d Domain,
    payload: P,
    iova: IovaRange,
    ticket: Ticket,
}

impl<P: Pinned> Revoked<'_, P> {
    /// The point in the sequence at which it is quiesced.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }
    /// The buffer, if the ticket is done; else itself.
    pub fn poll(self) -> Result<P, Self> {
        todo!()
    }
    /// Waits, and gives the buffer.
    pub fn wait(self) -> Result<P, BackendError> {
        todo!()
    }
}
