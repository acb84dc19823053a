//! The page pool's ways to allocate and free, as handles.

use super::setup::Pool;
use crate::suite::handle::{Object, handle};
use pinfold::Arena;
use pinfold_core::page_pool::{Page, RawPage, Remote};

impl Object for Page<&Arena> {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

impl Object for RawPage {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// Pages, recycled by the consumer.
pub(super) struct Recycled<'a>(pub(super) Pool<'a>);

handle!(
    ['a] Recycled<'a>, Page<&'a Arena>,
    |pool| pool.0.alloc()?, |pool, page| pool.0.recycle(page),
    write |_pool, page| page.memory().write_u64(0, page.address())?
);

/// The same, without the consumer's counters.
pub(super) struct Uncounted<'a>(pub(super) Pool<'a>);

handle!(
    ['a] Uncounted<'a>, Page<&'a Arena>,
    |pool| pool.0.alloc()?, |pool, page| pool.0.recycle_uncounted(page)
);

/// Pages, dropped as any thread may.
pub(super) struct Dropped<'a>(pub(super) Pool<'a>);

handle!(
    ['a] Dropped<'a>, Page<&'a Arena>,
    |pool| pool.0.alloc()?, |_pool, page| drop(page),
    write |_pool, page| page.memory().write_u64(0, page.address())?
);

/// Raw pages, freed by the consumer.
pub(super) struct RawPages<'a>(pub(super) Pool<'a>);

/// Raw pages, freed through a [`Remote`].
pub(super) struct RemoteRawPages<'a>(pub(super) Pool<'a>, pub(super) Remote<&'a Arena>);

handle!(
    ['a] RawPages<'a>, RawPage,
    |pool| pool.0.alloc_raw()?, |pool, page| pool.0.free_raw(page)?,
    write |pool, page| pool.0.memory(page)?.write_u64(0, page.address())?
);
handle!(
    ['a] RemoteRawPages<'a>, RawPage,
    |pool| pool.0.alloc_raw()?, |pool, page| pool.1.free_raw(page)?,
    write |pool, page| pool.0.memory(page)?.write_u64(0, page.address())?
);
