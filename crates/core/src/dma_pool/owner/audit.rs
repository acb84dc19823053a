//! What holds of an owner between its calls. For tests.

use super::super::row::Fill;
use super::super::row_ref::RowRef;
use super::super::stash::STASH;
use super::Owner;
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
            self.audit_listed(row, list);
        }
        if let Some(row) = current {
            assert!(row.is_owned_by(self.id) && !rows.contains(&row), "the current row is in a list");
            rows.push(row);
            loose.push((row, free));
        }
        loose.extend(self.stash.blocks().map(|block| (block.spot.row(), 1 << block.spot.bit())));
        assert!(self.stash.blocks().count() <= if self.watched { 0 } else { STASH });
        (rows, loose)
    }

    fn audit_listed(&self, row: RowRef, list: Fill) {
        let (blocks, free) = (row.blocks(), u64::from(row.avail().count_ones()));
        let fill_with = |free: u64| match free {
            0 => Fill::Spent,
            all if all == blocks => Fill::Whole,
            some if some * 8 >= blocks * u64::from(self.terms.sparse_eighths) => Fill::Sparse,
            _ => Fill::Open,
        };
        assert_eq!((fill_with(free), row.listed()), (list, list), "{:x}", row.avail());
        // The first number of free blocks with which it is in another list.
        let until = (free + 1..=blocks).find(|&more| fill_with(more) != list).map(|more| more - free);
        if list != Fill::Whole {
            assert_eq!(Some(u64::from(row.until_moved())), until, "{list:?} {:x}", row.avail());
        }
    }
}
