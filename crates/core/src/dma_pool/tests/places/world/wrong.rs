//! Frees that a pool has to refuse.

use super::*;

impl World {
    pub(super) fn wrong_frees(&self) {
        for _ in 0..4 {
            let block = match self.below(4) {
                0 => {
                    let stale = self.stale.borrow();
                    let Some(&block) = stale.get(self.below(stale.len().max(1))) else { continue };
                    // A call for many may have allocated it by now.
                    if self.filling.get() || self.live.borrow().contains(&block.iova().raw()) {
                        continue;
                    }
                    block
                }
                1 => {
                    let owned = self.owned.borrow();
                    let Some(block) = owned.get(self.below(owned.len().max(1))) else { continue };
                    block.as_raw()
                }
                2 => {
                    let pinned = self.pinned.borrow();
                    let Some(block) = pinned.get(self.below(pinned.len().max(1))) else { continue };
                    block.as_raw()
                }
                _ => {
                    let raws = self.raws.borrow();
                    let Some(&block) = raws.get(self.below(raws.len().max(1))) else { continue };
                    let by = [1, -1, 8, -8, 4, 1 << 23, -(1 << 23)][self.below(7)];
                    let (ptr, iova) = (moved(block, by).as_ptr(), block.iova());
                    let right = Iova::new(iova.raw().wrapping_add_signed(by as i64));
                    if self.filling.get() || self.live.borrow().contains(&right.raw()) {
                        continue;
                    }
                    RawBlock::from_parts(ptr, if self.below(2) == 0 { iova } else { right })
                }
            };
            let refused = match self.pick(&self.locals, 2) {
                Some(mut local) => {
                    let freed = local.free_raw(block);
                    self.locals.borrow_mut().push(local);
                    freed
                }
                None => self.pool.free_raw(block),
            };
            assert!(refused.is_err(), "{block:?}");
        }
    }
}
