//! Intel VT-d below [`pinfold_core::domain::Domain`]: one DMA remapping unit whose page tables are
//! Pinfold's, whose queue drains Pinfold's flushes, and whose faults come back as events.
//!
//! `no_std` and `alloc`. Registers come in as [`Registers`], memory for root, context and page
//! tables as [`TableMemory`](pinfold_core::table::TableMemory), physical addresses of payloads as
//! [`PhysTranslator`](pinfold_core::domain::PhysTranslator), and the write-back of stores for a
//! walker that does not snoop as [`WriteBack`]. Nothing else is required: no clock, no interrupt,
//! no thread. The repository's `checks/bare-metal` is a program without any kernel that provides
//! all of it.
//!
//! | module | contents |
//! | --- | --- |
//! | [`dmar`] | the ACPI table: units, device scopes, reserved regions |
//! | [`registers`] | offsets, bits, capabilities |
//! | [`mod@unit`] | a unit: enable and disable, domains, attach and detach, faults |
//! | `queue`, `descriptor` | queued invalidation |
//! | [`fault`] | fault records, in words |
//! | [`write_back`] | memory that the unit reads |
//!
//! # By the specification
//! "Intel Virtualization Technology for Directed I/O, Architecture Specification". Registers, bits
//! and descriptors name their section by its title, because the numbers change between revisions.
//! Legacy mode (`TTM` 0) with second-stage tables; no PASIDs, no first stage, no interrupt
//! remapping, one unit.
//!
//! # What a unit must have
//! Queued invalidation, read and write draining (assumption 2 of the promise: a flush ends the
//! accesses that used the entries that it drops), and no need for write-buffer flushing.
//! [`unit::Unit::new`] refuses other units, and a unit that is already enabled.
//!
//! # Limits
//! Quirks of single units are not handled: no write buffer is flushed in a unit that needs it and
//! does not report so (RWBF), and a device's TLB is flushed once, also in devices that are known to
//! need it twice. Requester aliases: see [`unit::Unit::attach`]. The bit SNP of leaves, which makes
//! accesses snoop the processor's caches although the device asks for none, is never set: such
//! accesses may read stale memory.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod descriptor;
pub mod dmar;
mod domain;
pub mod fault;
mod queue;
pub mod registers;
mod source;
#[cfg(test)]
mod tests;
pub mod unit;
pub mod write_back;

pub use domain::DomainQueue;
pub use registers::{Capabilities, Registers};
pub use source::SourceId;
pub use unit::{Unit, UnitError};
pub use write_back::{Coherent, SecondStage, WriteBack};
