//! Runs of bus addresses.

use pinfold_core::addr::Iova;
use pinfold_nvme::spec::Status;
use std::ops::Deref;

/// A run of bus addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) iova: Iova,
    pub(crate) len: usize,
}

/// The runs of a command's data, in order; adjacent pieces are one run.
#[derive(Debug, Default)]
pub(crate) struct Runs(Vec<Run>);

impl Runs {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn push(&mut self, at: u64, len: usize) -> Result<(), Status> {
        if at.checked_add(len as u64).is_none() {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        match self.0.last_mut() {
            Some(last) if last.iova.raw() + last.len as u64 == at => last.len += len,
            _ => self.0.push(Run { iova: Iova::new(at), len }),
        }
        Ok(())
    }
}

impl Deref for Runs {
    type Target = [Run];

    fn deref(&self) -> &[Run] {
        &self.0
    }
}
