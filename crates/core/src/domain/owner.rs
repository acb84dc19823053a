//! Mappings that own a share of their domain.

use super::error::BackendError;
use super::mapping::{MapError, Mapping, NotQuiesced, Revoked};
use super::payload::Pinned;
use super::space::Domain;
use crate::access::Direction;
use crate::invalidate::WaitLimit;
use crate::share::{Hold, Shared, Stock};
use core::ops::Deref;

/// One thread's handle to a shared domain: its mappings own a share of the domain instead of borrowing it.
///
/// The handle takes shares from a stock of its own, so mapping and unmapping through it cost no read-modify-write more
/// than through a borrow. A mapping, a [`Revoked`] or its future that is consumed elsewhere (dropped, or
/// [`unmap`](Mapping::unmap)ped by itself) costs one when it returns its share.
///
/// Everything else that a [`Domain`] offers is available through `Deref`.
#[derive(Debug)]
pub struct DomainOwner(Stock<Domain>);

impl Shared<Domain> {
    /// Returns a handle for one thread. One read-modify-write.
    pub fn owner(&self) -> DomainOwner {
        DomainOwner(self.stock())
    }
}

impl DomainOwner {
    /// Maps `payload` for the device, as [`Domain::map`] does.
    ///
    /// # Errors
    /// As there.
    pub fn map<P: Pinned, D: Direction>(
        &mut self,
        payload: P,
        direction: D,
    ) -> Result<Mapping<P, D>, MapError<P>> {
        let (payload, iova, fixed) = self.0.map_payload(payload, direction)?;
        Ok(Mapping::new(self.0.issue(), payload, iova, fixed))
    }

    /// Revokes access and waits, as [`Mapping::unmap`] does.
    ///
    /// # Errors
    /// As there.
    pub fn unmap<P: Pinned, D: Direction>(&mut self, mapping: Mapping<P, D>) -> Result<P, BackendError> {
        Ok(self.wait(mapping.revoke())?)
    }

    /// Returns the buffer if its ticket has completed, as [`Revoked::poll`] does.
    ///
    /// # Errors
    /// As there.
    pub fn poll<P: Pinned>(&mut self, revoked: Revoked<P>) -> Result<P, Revoked<P>> {
        revoked.poll_held().map(|held| self.take_back(held))
    }

    /// Waits for the buffer, as [`Revoked::wait`] does.
    ///
    /// # Errors
    /// As there.
    pub fn wait<P: Pinned>(&mut self, revoked: Revoked<P>) -> Result<P, NotQuiesced<P>> {
        revoked.wait_held(None).map(|held| self.take_back(held))
    }

    /// Waits for at most `limit`, as [`Revoked::wait_for`] does.
    ///
    /// # Errors
    /// As there.
    pub fn wait_for<P: Pinned>(
        &mut self,
        revoked: Revoked<P>,
        limit: WaitLimit,
    ) -> Result<P, NotQuiesced<P>> {
        revoked.wait_held(Some(limit)).map(|held| self.take_back(held))
    }

    fn take_back<P>(&mut self, (payload, share): (P, Shared<Domain>)) -> P {
        self.0.take_back(share);
        payload
    }
}

impl Deref for DomainOwner {
    type Target = Domain;

    fn deref(&self) -> &Domain {
        &self.0
    }
}
