//! The real devices of this process, by address: those attached to a domain, and those with a
//! driver. The kernel reports at most that such a device is busy; and a device that has a driver is
//! not taken from its domain.

use crate::failure::{Failure, fail};
use pinfold::pci::Bdf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The process's use of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// It is attached to a domain.
    Attached,
    /// It has a driver: a controller, or the program's own.
    Open,
}

static CLAIMS: Mutex<Vec<(Bdf, Claim)>> = Mutex::new(Vec::new());

fn claims() -> MutexGuard<'static, Vec<(Bdf, Claim)>> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the address of a device.
///
/// # Errors
/// `EINVAL`: it is none.
pub(crate) fn address(bdf: &str) -> Result<Bdf, Failure> {
    bdf.parse().map_err(|error| fail!(EINVAL, "{error}"))
}

/// A device that is attached to a domain: no other gets it.
pub(crate) struct Attached(Bdf);

impl Attached {
    /// # Errors
    /// `EBUSY`: it has a driver, or is attached.
    pub(crate) fn new(bdf: Bdf) -> Result<Self, Failure> {
        let mut claims = claims();
        if claims.contains(&(bdf, Claim::Open)) {
            return Err(open_already(bdf));
        }
        if claims.contains(&(bdf, Claim::Attached)) {
            return Err(attached_elsewhere(bdf));
        }
        claims.push((bdf, Claim::Attached));
        Ok(Self(bdf))
    }

    /// Refuses a device that is attached to a domain.
    ///
    /// # Errors
    /// `EBUSY`.
    pub(crate) fn check_none(bdf: Bdf) -> Result<(), Failure> {
        match claims().contains(&(bdf, Claim::Attached)) {
            true => Err(attached_elsewhere(bdf)),
            false => Ok(()),
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        claims().retain(|claim| *claim != (self.0, Claim::Attached));
    }
}

/// A device that has a driver: no other gets it.
pub(crate) struct Opened(Bdf);

impl Opened {
    /// # Errors
    /// `EBUSY`: it has one.
    pub(crate) fn new(bdf: Bdf) -> Result<Self, Failure> {
        let mut claims = claims();
        if claims.contains(&(bdf, Claim::Open)) {
            return Err(open_already(bdf));
        }
        claims.push((bdf, Claim::Open));
        Ok(Self(bdf))
    }

    /// Refuses a device that has a driver.
    ///
    /// # Errors
    /// `EBUSY`.
    pub(crate) fn check_none(bdf: Bdf) -> Result<(), Failure> {
        match claims().contains(&(bdf, Claim::Open)) {
            true => Err(open_already(bdf)),
            false => Ok(()),
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        claims().retain(|claim| *claim != (self.0, Claim::Open));
    }
}

#[cold]
fn open_already(bdf: Bdf) -> Failure {
    fail!(
        EBUSY,
        "{bdf} is open already: use that handle, or end it by pf_nvme_destroy or pf_device_destroy first"
    )
}

#[cold]
fn attached_elsewhere(bdf: Bdf) -> Failure {
    fail!(
        EBUSY,
        "{bdf} is attached to another domain of this process: use it there, or call pf_domain_detach first; a domain \
         that was given back keeps its devices until all that was created in it has ended"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses that no machine has: other tests run beside this one.
    #[test]
    fn a_device_is_in_one_domain_and_has_one_driver() {
        let [one, other] = ["fffe:1f:1f.1", "fffe:1f:1f.2"].map(|bdf| address(bdf).unwrap());
        let errno = |failure: Failure| failure.errno();
        let attached = Attached::new(one).unwrap();
        assert_eq!(Attached::new(one).err().map(errno), Some(libc::EBUSY));
        assert_eq!(Attached::check_none(one).err().map(errno), Some(libc::EBUSY));
        Opened::check_none(one).unwrap();
        Attached::check_none(other).unwrap();
        let opened = Opened::new(one).unwrap();
        assert_eq!(Opened::new(one).err().map(errno), Some(libc::EBUSY));
        assert_eq!(Opened::check_none(one).err().map(errno), Some(libc::EBUSY));
        // Each of the two without the other.
        drop(attached);
        Attached::check_none(one).unwrap();
        assert_eq!(Attached::new(one).err().map(errno), Some(libc::EBUSY));
        drop(opened);
        Opened::check_none(one).unwrap();
        drop((Attached::new(one).unwrap(), Opened::new(other).unwrap()));
        assert_eq!(address("nonsense").err().map(errno), Some(libc::EINVAL));
    }
}
