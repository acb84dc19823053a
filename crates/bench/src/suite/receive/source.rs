//! Where the bare rings get the pages for their fill ring from.

use super::measure::{BATCH, PAGES};
use crate::baseline::BaselineError;
use crate::baseline::buddy::{Buddy, Owner};
use crate::error::BenchError;
use pinfold_core::frame::{Frame, Local, Order, Zone};

/// An allocator of the pages of a UMEM, by their addresses in it.
pub(super) trait Source: Send {
    /// Allocates a page for each place.
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError>;
    /// Frees a page.
    fn free(&mut self, page: u64) -> Result<(), BenchError>;
}

/// `single`: one call per page.
pub(super) struct Single<'b>(Owner<'b>);

impl<'b> Single<'b> {
    pub(super) fn new(buddy: &'b Buddy) -> Self {
        Self(buddy.owner())
    }
}

impl Source for Single<'_> {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        places.iter_mut().try_for_each(|place| {
            *place = self.0.alloc_page()?;
            Ok(())
        })
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        self.0.free_page(page);
        Ok(())
    }
}

/// `list`: a list of pages by one call.
pub(super) struct List<'z>(Local<&'z Zone>);

impl<'z> List<'z> {
    pub(super) fn new(zone: &'z Zone) -> Self {
        Self(zone.local())
    }
}

impl Source for List<'_> {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        let mut got = 0;
        for (place, page) in places.iter_mut().zip(self.0.take_list(BATCH)) {
            *place = page.offset();
            got += 1;
        }
        if got == BATCH { Ok(()) } else { Err(BenchError::Short { asked: BATCH, got }) }
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        free(&mut self.0, page)
    }
}

/// `array`: an array of pages filled by one call.
pub(super) struct Array<'z>(Local<&'z Zone>);

impl<'z> Array<'z> {
    pub(super) fn new(zone: &'z Zone) -> Self {
        Self(zone.local())
    }
}

impl Source for Array<'_> {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        let mut pages = [None; BATCH];
        let got = self.0.fill(&mut pages);
        for (place, page) in places.iter_mut().zip(pages.into_iter().flatten()) {
            *place = page.offset();
        }
        if got == BATCH { Ok(()) } else { Err(BenchError::Short { asked: BATCH, got }) }
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        free(&mut self.0, page)
    }
}

#[inline(always)]
fn free(local: &mut Local<&Zone>, page: u64) -> Result<(), BenchError> {
    let frame = u32::try_from(page / Frame::BYTES).ok().and_then(Frame::new);
    Ok(local.free(frame.ok_or(BaselineError::Foreign(page))?, Order::PAGE)?)
}

/// `static-umem`: the addresses that were received last are entered again.
pub(super) struct Static(Vec<u64>);

impl Static {
    pub(super) fn new() -> Self {
        Self((0..u64::from(PAGES)).rev().map(|page| page * Frame::BYTES).collect())
    }
}

impl Source for Static {
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64; BATCH]) -> Result<(), BenchError> {
        let (asked, got) = (BATCH, self.0.len().min(BATCH));
        let rest = self.0.len() - got;
        let top = self.0.get(rest..).unwrap_or_default();
        places.iter_mut().zip(top).for_each(|(place, page)| *place = *page);
        self.0.truncate(rest);
        if got == asked { Ok(()) } else { Err(BenchError::Short { asked, got }) }
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        self.0.push(page);
        Ok(())
    }
}
