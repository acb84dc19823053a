//! Pinned leaf pages: windows of 2 MiB whose owner maps and clears without walking or counting.

use super::entries;
use super::error::TableError;
use super::format::{Format, span};
use super::pages::{PageIndex, TablePage};
use super::radix::{Retired, Table};
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use crate::mem::prefetch;
use core::sync::atomic::AtomicU64;

/// A table page of level 1 that stays linked until it is unpinned: the leaves of one window of 2
/// MiB.
///
/// Its owner maps and clears 4 KiB leaves in the window by plain stores ([`Table::map_pinned`],
/// [`Table::clear_pinned`]); every other map or clear of an address in it fails with
/// [`TableError::Pinned`]. Dropping it leaves the page pinned for good: nothing is unmapped, and
/// nothing else is ever mapped there.
#[derive(Debug)]
#[must_use = "the page stays pinned until `Table::unpin`"]
pub struct PinnedLeaf {
    /// Its entries, so that no access walks the table.
    memory: &'static TablePage,
    pub(super) page: PageIndex,
    window: Iova,
    /// The number and the root of the table that it belongs to.
    table: u64,
    root: PhysAddr,
}

impl PinnedLeaf {
    /// Returns the window: 2 MiB, aligned.
    pub(super) fn window(&self) -> IovaRange {
        // Inside the table, so not clamped.
        IovaRange::clamped(self.window, WINDOW_BYTES)
    }

    /// Prefetches the entry of `iova`, which is cleared soon. Does nothing if that is not in the
    /// window.
    #[inline(always)]
    pub(crate) fn prefetch(&self, iova: Iova) {
        let at = usize::try_from(iova.raw().wrapping_sub(self.window.raw()) / span(1));
        if let Some(entry) = at.ok().and_then(|at| self.memory.entries().get(at)) {
            prefetch(entry);
        }
    }
}

/// The bytes that a table page of level 1 translates.
const WINDOW_BYTES: u64 = PageSize::Size2M.bytes();

impl<F: Format> Table<F> {
    /// Links and pins the table page of level 1 that translates the 2 MiB from `window` on, which
    /// the caller owns as a whole: until [`unpin`](Self::unpin) the page is neither retired nor
    /// reclaimed, even if it is empty. O(levels); takes the lock.
    ///
    /// # Errors
    /// [`TableError::NoWindow`], [`TableError::Outside`]; [`TableError::AlreadyMapped`] if
    /// something is mapped in the window, [`TableError::Pinned`] if it is pinned already;
    /// [`TableError::NoPages`]. Table pages linked on the way are retired
    /// ([`collect_retired`](Self::collect_retired)).
    pub fn pin(&self, window: Iova) -> Result<PinnedLeaf, TableError> {
        let no_window = TableError::NoWindow { at: window };
        let range = IovaRange::new(window, WINDOW_BYTES).map_err(|_| no_window)?;
        if !window.is_aligned(WINDOW_BYTES) {
            return Err(no_window);
        }
        self.check(range, PhysAddr::new(0))?;
        let page = self.0.pin(window.raw())?;
        let memory = self.0.store.page(page).memory();
        Ok(PinnedLeaf { memory, page, window, table: self.0.number, root: self.root() })
    }

    /// Maps `iova`, inside the window of `leaf`, to the memory from `phys`, with leaves of 4 KiB.
    /// O(leaves): one check and one release store each; no walk, no lock, no read-modify-write.
    ///
    /// The caller owns `iova`; owners of other parts of the window may map and clear theirs at the
    /// same time. No flush is needed, as for [`map`](Self::map).
    ///
    /// # Errors
    /// [`TableError::OtherTable`], [`TableError::OutsideWindow`], [`TableError::Misaligned`],
    /// [`TableError::NoAccess`], [`TableError::PhysOutside`], [`TableError::AlreadyMapped`].
    /// Nothing has changed.
    #[inline]
    pub fn map_pinned(
        &self,
        leaf: &PinnedLeaf,
        iova: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), TableError> {
        let run = self.pinned_run(leaf, iova, phys)?;
        self.check_memory(iova, phys, access)?;
        let empty = entries::leading_zeros(run);
        if empty < run.len() {
            return Err(TableError::AlreadyMapped { at: entry_at(iova, empty) });
        }
        self.0.store.note_pinned(leaf.page);
        entries::write(run, F::leaf(phys, access, 1), span(1));
        F::write_back(run);
        Ok(())
    }

    /// Clears `iova`, inside the window of `leaf`, all of which must be mapped. O(leaves): one
    /// check and one release store each; no walk, no lock, no read-modify-write.
    ///
    /// It may run on another thread than [`map_pinned`](Self::map_pinned) for other parts of the
    /// window at the same time. The device can reach the memory until a flush of the leaves of
    /// `iova`, requested next, has completed. No table page is retired. Two clears of one range at
    /// once break the contract; both may then succeed.
    ///
    /// # Errors
    /// [`TableError::OtherTable`], [`TableError::OutsideWindow`], [`TableError::Misaligned`],
    /// [`TableError::NotMapped`]. Nothing has changed.
    #[inline]
    pub fn clear_pinned(&self, leaf: &PinnedLeaf, iova: IovaRange) -> Result<(), TableError> {
        let run = self.pinned_run(leaf, iova, PhysAddr::new(0))?;
        let mapped = entries::leading(run, |raw| F::is_leaf(raw, 1));
        if mapped < run.len() {
            return Err(TableError::NotMapped { at: entry_at(iova, mapped) });
        }
        self.0.store.note_pinned(leaf.page);
        entries::clear(run);
        F::write_back(run);
        Ok(())
    }

    /// Removes the pin. The page holds nothing, so it is retired and added to `retired`. O(512);
    /// takes the lock.
    ///
    /// # Errors
    /// [`TableError::AlreadyMapped`] at the first address of the window that is still mapped;
    /// [`TableError::OtherTable`] if the pin or `retired` belongs to another table. The pin is
    /// returned, and nothing has changed.
    pub fn unpin(
        &self,
        leaf: PinnedLeaf,
        retired: &mut Retired,
    ) -> Result<(), (TableError, PinnedLeaf)> {
        let window = leaf.window();
        let checked = self.pinned_run(&leaf, window, PhysAddr::new(0)).and_then(|run| {
            self.adopt(retired)?;
            let empty = entries::leading_zeros(run);
            if empty < run.len() {
                return Err(TableError::AlreadyMapped { at: entry_at(window, empty) });
            }
            Ok(())
        });
        if let Err(error) = checked {
            return Err((error, leaf));
        }
        self.0.unpin(leaf.page, &mut retired.list);
        Ok(())
    }

    /// Returns the entries of `iova` in a pinned page.
    #[inline(always)]
    fn pinned_run(
        &self,
        leaf: &PinnedLeaf,
        iova: IovaRange,
        phys: PhysAddr,
    ) -> Result<&'static [AtomicU64], TableError> {
        if leaf.table != self.0.number {
            return Err(TableError::OtherTable { owner: leaf.root, this: self.root() });
        }
        let outside = || TableError::OutsideWindow { range: iova, window: leaf.window() };
        if !iova.is_aligned(span(1)) || !phys.is_aligned(span(1)) {
            let inside = leaf.window().covers(&iova);
            return Err(if inside { TableError::Misaligned { iova, phys } } else { outside() });
        }
        // Below the window it wraps, and is no place in the page.
        let first = iova.start().raw().wrapping_sub(leaf.window.raw()) / span(1);
        let (first, len) = usize::try_from(first)
            .ok()
            .zip(usize::try_from(iova.len() / span(1)).ok())
            .ok_or_else(outside)?;
        let rest = leaf.memory.entries().get(first..).unwrap_or_default();
        rest.get(..len).ok_or_else(outside)
    }
}

/// Returns the address of entry `number` of a range of 4 KiB leaves.
fn entry_at(range: IovaRange, number: usize) -> Iova {
    Iova::new(range.start().raw() + number as u64 * span(1))
}
