//! I/O page tables: radix trees that an IOMMU walks, over pages that the caller donates, all at
//! once or on demand ([`TableMemory`]).
//!
//! # Concurrency
//! The owner of a range of I/O virtual addresses has exclusive rights to its entries; any number of
//! owners may map and clear *their* ranges at once. Leaves are plain release stores. Linking,
//! retiring and reclaiming table pages is done under one lock per table; an owner whose table pages
//! exist and stay in use never takes it.
//!
//! Two threads that map or clear the *same* addresses at once break the contract, with bounded
//! effect: of two clears of one range, each leaf is cleared and counted out by one, and the other
//! returns that it is not mapped; of two maps, one overwrites the other's leaves, and the table
//! page stays in use for good. No page that holds a leaf is ever retired, and no address that was
//! never mapped translates. `Domain` releases ranges by owned handles, so that its callers cannot
//! do either.
//!
//! # The life of a table page
//! All state is out of band. A page counts the entries that it holds; when there are none, the page
//! is *retired*: its link is replaced by an entry that is not present (and records the page), and
//! the page waits in a [`Retired`] for the flush after which no walker can hold it. Only then does
//! [`Table::reclaim`] free it. A map in between relinks it *at the same place*, where a stale walk
//! cache and the table agree again. A parent whose last child was reclaimed is retired as well and
//! added to the next `clear`: one level per flush.
//!
//! # Pinned pages
//! The owner of a window of 2 MiB can pin its page of level 1 ([`Table::pin`]). It then maps and
//! clears leaves there by plain stores ([`Table::map_pinned`], [`Table::clear_pinned`]): no walk,
//! no lock, no read-modify-write. The page stays linked and its leaves are not counted, so every
//! other map or clear there fails with [`TableError::Pinned`].
//!
//! # A map is all or nothing
//! All table pages are linked and all entries counted before the first leaf is written. A map that
//! fails has never given the device access, so it needs no flush.
//!
//! # What a walker reads
//! A page has 512 entries of 64 bits in native order (IOMMUs are little-endian). The entry for
//! `iova` at level *l* is number `(iova >> (3 + 9 l)) & 511`; the root is at the highest level,
//! leaves of 4 KiB are at level 1, of 2 MiB at level 2, of 1 GiB at level 3. The [`Format`] defines
//! the bits; for [`VtdSecondStage`] an entry with R = W = 0 is not present **whatever the other
//! bits are**: do not compare with 0.
//!
//! ```
//! use pinfold_core::access::Access;
//! use pinfold_core::addr::{Iova, IovaRange, PhysAddr};
//! use pinfold_core::table::{Retired, Table, TablePage, TablePages, VtdSecondStage};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pages: &'static [TablePage] = Box::leak((0..8).map(|_| TablePage::filled(0)).collect());
//! // SAFETY: the hardware finds the pages there, and nothing else uses them.
//! let pages = unsafe { TablePages::new(pages, PhysAddr::new(0x10_0000)) }?;
//! let table = Table::<VtdSecondStage>::new(pages, 3)?;
//!
//! let iova = IovaRange::new(Iova::new(0x4000_0000), 8192)?;
//! table.map(iova, PhysAddr::new(0x8000_0000), Access::READ)?;
//! // The mapped runs: 8 KiB by two leaves.
//! let runs: Vec<_> = table.mapped().collect();
//! assert_eq!((runs.len(), runs[0].iova, runs[0].phys), (1, iova, PhysAddr::new(0x8000_0000)));
//!
//! let mut retired = Retired::new();
//! table.clear(iova, &mut retired)?;
//! // ... flush `iova`, and links too in `table.retired_ranges(&retired)?`, then:
//! assert_eq!(table.reclaim(retired).ok(), Some(1));
//! println!("{}", table.stats());
//! # Ok(())
//! # }
//! ```

mod change;
mod directory;
mod dump;
mod entries;
mod error;
mod format;
#[cfg(all(test, loom))]
mod loom_model;
mod pages;
mod pin;
mod radix;
mod state;
mod store;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod tree;

pub use dump::{MappedRun, MappedRuns};
pub use error::TableError;
pub use format::{Entry, Format, VtdFirstStage, VtdSecondStage};
pub use pages::{MAX_CHUNKS, TableMemory, TablePage, TablePages};
pub use pin::PinnedLeaf;
pub use radix::{Retired, RetiredRanges, Table, TableStats};
