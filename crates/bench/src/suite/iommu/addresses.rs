//! The allocators of I/O virtual addresses as subjects.

use super::payload::{Nothing, Untranslated};
use crate::error::BenchError;
use crate::policy::{Magazines, Tree};
use pinfold_core::access::FromDevice;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{BareAddresses, Domain, Local, Mapping, NotQuiesced};
use pinfold_core::iova::IovaSpace;
use pinfold_core::share;

const PAGE: u64 = 4096;
const BITS: u32 = 48;

/// Allocates ranges of pages for one thread.
pub(super) trait Addresses: Sized {
    /// A range in use.
    type Range;
    /// Creates one whose addresses are all free.
    fn new() -> Result<Self, BenchError>;
    /// Allocates `pages` pages.
    fn alloc(&mut self, pages: u64) -> Result<Self::Range, BenchError>;
    /// Allocates `pages` pages below 4 GiB; `None` if there are none.
    fn alloc_low(&mut self, pages: u64) -> Result<Option<Self::Range>, BenchError>;
    /// Returns where a range begins: what a device would be given.
    fn start(range: &Self::Range) -> u64;
    /// Frees a range.
    fn free(&mut self, range: Self::Range) -> Result<(), BenchError>;
    /// Returns how many entries describe what is in use.
    fn entries(&self) -> usize;
    /// Returns how many bytes describe the addresses, if the allocator knows.
    fn metadata_bytes(&self) -> Option<usize> {
        None
    }
}

/// The address space itself, shared by all threads.
pub(super) struct Shared(IovaSpace);

impl Addresses for Shared {
    type Range = IovaRange;

    fn new() -> Result<Self, BenchError> {
        Ok(Self(IovaSpace::new(BITS)?))
    }

    #[inline(always)]
    fn alloc(&mut self, pages: u64) -> Result<IovaRange, BenchError> {
        Ok(self.0.alloc(pages * PAGE, PAGE, None)?)
    }

    #[inline(always)]
    fn alloc_low(&mut self, pages: u64) -> Result<Option<IovaRange>, BenchError> {
        Ok(self.0.alloc(pages * PAGE, PAGE, Some(Iova::new(u32::MAX.into()))).ok())
    }

    #[inline(always)]
    fn start(range: &IovaRange) -> u64 {
        range.start().raw()
    }

    #[inline(always)]
    fn free(&mut self, range: IovaRange) -> Result<(), BenchError> {
        Ok(self.0.free(range)?)
    }

    fn entries(&self) -> usize {
        self.0.stats().allocated
    }

    fn metadata_bytes(&self) -> Option<usize> {
        Some(self.0.metadata_bytes())
    }
}

fn owner() -> Result<Local, BenchError> {
    let domain = share::Shared::new(Domain::new(Box::new(Untranslated), IovaSpace::new(BITS)?));
    Ok(domain.local())
}

/// An owner of a domain: its addresses alone.
pub(super) struct Owner(Local);

impl Addresses for Owner {
    type Range = BareAddresses;

    fn new() -> Result<Self, BenchError> {
        Ok(Self(owner()?))
    }

    #[inline(always)]
    fn alloc(&mut self, pages: u64) -> Result<BareAddresses, BenchError> {
        Ok(self.0.alloc_addresses(pages * PAGE)?)
    }

    fn alloc_low(&mut self, _: u64) -> Result<Option<BareAddresses>, BenchError> {
        Ok(None) // an owner has no limit of its own
    }

    #[inline(always)]
    fn start(range: &BareAddresses) -> u64 {
        range.range().start().raw()
    }

    #[inline(always)]
    fn free(&mut self, range: BareAddresses) -> Result<(), BenchError> {
        self.0.free_addresses(range);
        Ok(())
    }

    fn entries(&self) -> usize {
        let stats = self.0.stats();
        usize::try_from(stats.iova_extents + stats.windows).unwrap_or(usize::MAX)
    }
}

/// The same with everything that a mapping is, over a backend without a table.
pub(super) struct Mapped(Local);

impl Addresses for Mapped {
    type Range = Mapping<Nothing, FromDevice>;

    fn new() -> Result<Self, BenchError> {
        Ok(Self(owner()?))
    }

    #[inline(always)]
    fn alloc(&mut self, pages: u64) -> Result<Self::Range, BenchError> {
        Ok(self.0.map(Nothing::new(pages)?, FromDevice).map_err(|failed| failed.error)?)
    }

    fn alloc_low(&mut self, _: u64) -> Result<Option<Self::Range>, BenchError> {
        Ok(None) // an owner has no limit of its own
    }

    #[inline(always)]
    fn start(range: &Self::Range) -> u64 {
        range.iova().start().raw()
    }

    #[inline(always)]
    fn free(&mut self, range: Self::Range) -> Result<(), BenchError> {
        let revoked = self.0.revoke(range);
        self.0.wait(revoked).map_err(|NotQuiesced { error, .. }| error)?;
        Ok(())
    }

    fn entries(&self) -> usize {
        usize::try_from(self.0.stats().iova_extents).unwrap_or(usize::MAX)
    }
}

macro_rules! tree {
    ($(#[$doc:meta] $name:ident, $merges:literal;)*) => {$(
        #[$doc]
        pub(super) struct $name(crate::baseline::lock::KernelLock<Tree>);

        impl Addresses for $name {
            type Range = (u64, u64);

            fn new() -> Result<Self, BenchError> {
                Ok(Self(crate::baseline::lock::KernelLock::new(Tree::new($merges))))
            }

            #[inline(always)]
            fn alloc(&mut self, pages: u64) -> Result<(u64, u64), BenchError> {
                Ok((self.0.lock().alloc(pages).ok_or(BenchError::Addresses)?, pages))
            }

            #[inline(always)]
            fn alloc_low(&mut self, pages: u64) -> Result<Option<(u64, u64)>, BenchError> {
                Ok(self.0.lock().alloc_low(pages).map(|first| (first, pages)))
            }

            #[inline(always)]
            fn start((first, _): &(u64, u64)) -> u64 {
                *first
            }

            #[inline(always)]
            fn free(&mut self, (first, pages): (u64, u64)) -> Result<(), BenchError> {
                self.0.lock().free(first, pages).then_some(()).ok_or(BenchError::Addresses)
            }

            fn entries(&self) -> usize {
                self.0.lock().entries()
            }
        }
    )*};
}
tree! {
    /// The tree with an entry per allocation.
    Tree2015, false;
    /// The tree whose entries merge.
    TreeMerged, true;
}

/// The per-CPU caches.
pub(super) struct Cached(Magazines);

impl Addresses for Cached {
    type Range = (u64, u64);

    fn new() -> Result<Self, BenchError> {
        Ok(Self(Magazines::new()))
    }

    #[inline(always)]
    fn alloc(&mut self, pages: u64) -> Result<(u64, u64), BenchError> {
        Ok((self.0.alloc(pages).ok_or(BenchError::Addresses)?, pages))
    }

    fn alloc_low(&mut self, pages: u64) -> Result<Option<(u64, u64)>, BenchError> {
        self.alloc(pages).map(Some) // below 4 GiB first, as the tree
    }

    #[inline(always)]
    fn start((first, _): &(u64, u64)) -> u64 {
        *first
    }

    #[inline(always)]
    fn free(&mut self, (first, pages): (u64, u64)) -> Result<(), BenchError> {
        self.0.free(first, pages).then_some(()).ok_or(BenchError::Addresses)
    }

    fn entries(&self) -> usize {
        self.0.entries()
    }
}
