//! A platform over a software IOMMU, with a source that counts what it has lent.

use dma_api::{DmaAddr, DmaConstraints};
use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{Domain, DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use pinfold_dma_api::Platform;
use pinfold_soft::{Pages, Port, SoftBus, SoftConfig, domain};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const ANYWHERE: DmaConstraints = DmaConstraints::new(u64::MAX);

/// Pages of the source. `claims` are what a payload says of itself.
pub(crate) struct Run {
    pages: Pages,
    claims: Claims,
    lent: Arc<AtomicUsize>,
}

/// Deviations of the source's memory.
#[derive(Clone, Copy, Default)]
pub(crate) struct Claims {
    /// Mapped for its lifetime.
    pub(crate) fixed: bool,
    /// Shares its pages.
    pub(crate) shared: bool,
    /// Has this many pages fewer than it was asked for.
    pub(crate) short: usize,
    /// The source has none.
    pub(crate) none: bool,
}

// SAFETY: `Pages` keeps the contract, whose memory is returned unchanged; a fixed address or
// another extent is claimed for pages that the platform then refuses.
unsafe impl Pinned for Run {
    fn memory(&self) -> DmaMemory<'_> {
        self.pages.memory()
    }

    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        self.claims.fixed.then_some(Iova::new(PAGE))
    }

    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        let len = self.pages.memory().len() as u64;
        (index == 0).then_some(if self.claims.shared { (8, len - 8) } else { (0, len) })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.lent.fetch_sub(1, Ordering::SeqCst);
    }
}

pub(crate) type Source = Box<dyn Fn(usize) -> Option<Run> + Send + Sync>;

pub(crate) struct Rig {
    pub(crate) domain: Domain,
    pub(crate) port: Port,
    pub(crate) platform: &'static Platform<Source, Run>,
    lent: Arc<AtomicUsize>,
}

impl Rig {
    pub(crate) fn new(config: SoftConfig) -> Self {
        Self::with(config, Claims::default())
    }

    pub(crate) fn with(config: SoftConfig, claims: Claims) -> Self {
        let (domain, bus) = domain(config).unwrap();
        Self::over(domain, bus, claims, Arc::new(AtomicUsize::new(0)))
    }

    /// Creates a platform of `domain` with the memory of `bus`; `lent` counts the runs of the
    /// source that have not been returned.
    pub(crate) fn over(
        domain: Domain,
        bus: SoftBus,
        claims: Claims,
        lent: Arc<AtomicUsize>,
    ) -> Self {
        let (from, count) = (bus.clone(), lent.clone());
        let source: Source = Box::new(move |bytes| {
            assert!(bytes.is_multiple_of(4096) && bytes > 0);
            let pages = from.alloc_pages(bytes / 4096 - claims.short).ok()?;
            // Old data of the program.
            pages.memory().fill(0, pages.memory().len(), 0xa5).unwrap();
            if claims.none {
                return None;
            }
            count.fetch_add(1, Ordering::SeqCst);
            Some(Run { pages, claims, lent: count.clone() })
        });
        let platform = Platform::leak(domain.clone(), source);
        Self { port: bus.port(), domain, platform, lent }
    }

    /// Returns how many runs the source has lent and not got back.
    pub(crate) fn lent(&self) -> usize {
        self.lent.load(Ordering::SeqCst)
    }

    /// Returns the pages that the table maps, with the access of the device.
    pub(crate) fn mapped(&self) -> BTreeMap<u64, Access> {
        let runs = self.domain.mapped().unwrap();
        let pages = |run: pinfold_core::table::MappedRun| {
            let (from, to) = (run.iova.start().raw(), run.iova.end().raw());
            (from..to).step_by(4096).map(move |page| (page, run.access))
        };
        runs.flat_map(pages).collect()
    }

    /// Asserts that no device reaches anything: by the table, and by access.
    pub(crate) fn nothing_is_reachable(&self, freed: &[DmaAddr]) {
        assert!(self.mapped().is_empty(), "{:?}", self.mapped());
        for at in freed {
            assert!(self.port.read(iova(*at), &mut [0]).is_err(), "{at}");
            assert!(self.port.write(iova(*at), &[0]).is_err(), "{at}");
        }
        assert_eq!(self.lent(), 0);
    }
}

pub(crate) fn iova(at: DmaAddr) -> Iova {
    Iova::new(at.as_u64())
}
