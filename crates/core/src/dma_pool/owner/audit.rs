//! What holds of an owner between its calls. For tests.

use super::super::current::lowest;
use super::super::row::Fill;
use super::super::row_ref::RowRef;
use super::super::stash::STASH;
use super::{Listed, Owner};
use alloc::vec::Vec;

/// Free blocks of a row that are not in its `avail`.
pub(in super::super) type Loose = (RowRef, u64);

impl Owner {
    /// Checks that each row is in one list, the one for its fill, and moves at the right time. Returns the rows, and the blocks
    /// in the current row's word and in the stash.
    pub(in super::super) fn audit(&self) -> (Vec<RowRef>, Vec<Loose>) {
        let (mut rows, mut loose) = (Vec::new(), Vec::new());
        let (current, free) = self.current.parts();
        let lists = [
            (&self.spent, Fill::Spent),
            (&self.open, Fill::Open),
            (&self.sparse, Fill::Sparse),
            (&self.whole, Fill::Whole),
        ];
        for (row, list) in
            lists.iter().flat_map(|(list, fill)| list.rows().into_iter().map(move |row| (row, *fill)))
        {
            assert!(
                row.is_owned_by(self.id) && !rows.contains(&row),
                "a row in two lists or of another owner"
            );
            rows.push(row);
            if current == Some(row) {
                let listed =
                    matches!((self.listed, list), (Listed::Spent, Fill::Spent) | (Listed::Open, Fill::Open));
                assert!(listed && row.until_moved() == 0, "{:?} in {list:?}", self.listed);
            } else {
                self.audit_listed(row, list);
            }
        }
        if let Some(row) = current {
            if !rows.contains(&row) {
                assert!(row.is_owned_by(self.id) && matches!(self.listed, Listed::Nowhere));
                rows.push(row);
            }
            loose.push((row, free));
        }
        loose.extend(self.stash.sites().map(|site| (site.row, 1 << site.bit)));
        assert!(self.stash.sites().count() <= if self.watched { 0 } else { STASH });
        (rows, loose)
    }

    fn audit_listed(&self, row: RowRef, list: Fill) {
        let eighths = self.terms.sparse_eighths;
        assert_eq!(row.fill(eighths), list, "{:x}", row.avail());
        // The first number of free blocks with which it is in another list.
        let free = row.avail().count_ones() as usize;
        let blocks = usize::try_from(row.blocks()).unwrap_or(usize::MAX);
        let moves = |&more: &usize| more == blocks || row.fill_of(lowest(more), eighths) != list;
        let until = (free + 1..=blocks).find(moves).map(|more| more - free);
        if list != Fill::Whole {
            assert_eq!(Some(row.until_moved() as usize), until, "{list:?} {:x}", row.avail());
        }
    }
}
