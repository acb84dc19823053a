//! A backend that owns its table: a [`Table`](crate::table::Table) and an
//! [`Invalidator`](crate::invalidate::Invalidator).

mod backend;
#[cfg(all(test, loom))]
mod loom_model;
pub(super) mod phys;
mod reclaim;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
#[cfg(test)]
mod walker;

pub use backend::TableBackend;
pub use phys::{ExtentCache, PhysExtent, PhysTranslator};
