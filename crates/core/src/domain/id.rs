//! The identity of a domain.

use crate::sync::unique_number;

/// Identifies a domain; unique within the process, and never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DomainId(u64);

impl DomainId {
    pub(super) fn next() -> Self {
        Self(unique_number())
    }
}
