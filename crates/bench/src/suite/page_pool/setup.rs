//! The page pool that the suite measures.

use crate::error::BenchError;
use pinfold::Arena;
use pinfold_core::page_pool::{Config, PagePool};

/// How many frames the baselines have.
pub(super) const FRAMES: u32 = 1 << 14;

pub(super) type Pool<'a> = PagePool<&'a Arena>;

pub(super) fn pool(arena: &Arena, ring: u32) -> Result<Pool<'_>, BenchError> {
    Ok(PagePool::new(arena, "bench", Config { ring, ..Config::default() })?)
}
