//! Where the pages of a table come from as it grows.

use super::pages::TablePages;

/// The source of a table's pages, beyond those that it was created with.
///
/// ```
/// use pinfold_core::addr::PhysAddr;
/// use pinfold_core::table::{Table, TableMemory, TablePage, TablePages, VtdSecondStage};
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// Pages from the heap, at made-up physical addresses one after the other.
/// struct Heap(AtomicU64);
///
/// impl TableMemory for Heap {
///     fn grow(&self, pages: u32) -> Option<TablePages> {
///         let phys = self.0.fetch_add(u64::from(pages) * 4096, Ordering::Relaxed);
///         let pages = (0..pages).map(|_| TablePage::filled(0)).collect();
///         TablePages::new(Vec::leak(pages), PhysAddr::new(phys)).ok()
///     }
///     fn advice(&self) -> &'static str {
///         "add memory to the machine"
///     }
/// }
///
/// let heap = Heap(AtomicU64::new(1 << 20));
/// let first = heap.grow(1).ok_or("no memory")?;
/// let table = Table::<VtdSecondStage>::new(first, 3)?.with_memory(Box::new(heap));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait TableMemory: Send + Sync {
    /// Returns more pages for the same table, or `None` if there are none.
    ///
    /// A table asks for as many `pages` as it has, so that it grows in
    /// [`MAX_CHUNKS`](super::MAX_CHUNKS) steps at most; fewer are accepted where there are no more.
    /// It is called with the table's lock held: it must not use the table.
    fn grow(&self, pages: u32) -> Option<TablePages>;

    /// Returns what the user can do when there are none: names the option that raises the limit.
    /// Part of [`TableError::NoPages`](super::TableError::NoPages).
    fn advice(&self) -> &'static str;
}
