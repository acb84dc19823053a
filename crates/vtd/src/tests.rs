//! Tests against a unit that follows the specification (`double`): it caches all it may, drops only
//! what it is told to, and refuses descriptors with reserved bits.

#![expect(clippy::cast_possible_truncation, reason = "tests")]

mod allocations;
mod descriptors;
mod dmar;
#[path = "tests/dmar_fuzzed.rs"]
mod dmar_fuzzed;
mod double;
mod queue;
mod unit;
