//! A driver with its stack, domain and model disk.

use pinfold::{Arena, Domain};
use pinfold_virtio::model::Disk;
use pinfold_virtio::{Installed, PinfoldHal, Place, Translated, install};
use virtio_drivers::device::blk::VirtIOBlk;

/// Declares a place for one test, so that tests run concurrently.
macro_rules! place {
    ($name:ident) => {
        struct $name;
        impl pinfold_virtio::Place for $name {
            const SLOT: &'static pinfold_virtio::Slot = {
                static SLOT: pinfold_virtio::Slot = pinfold_virtio::Slot::new();
                &SLOT
            };
        }
    };
}
pub(crate) use place;

pub(crate) type Driver<P> = VirtIOBlk<PinfoldHal<P>, Translated<Disk>>;

pub(crate) const DISK: usize = 1 << 20;

pub(crate) struct Rig<P: Place> {
    pub(crate) driver: Driver<P>,
    pub(crate) disk: Disk,
    pub(crate) stack: Installed<P>,
    pub(crate) domain: Domain,
}

impl<P: Place> Rig<P> {
    pub(crate) fn new(arena_bytes: u64) -> Self {
        let domain = Domain::soft().unwrap();
        let stack = install::<P>(&domain, Arena::builder().size(arena_bytes)).unwrap();
        let disk = Disk::new(domain.port().unwrap(), DISK);
        let driver = VirtIOBlk::new(Translated::new(disk.clone())).unwrap();
        Self { driver, disk, stack, domain }
    }

    /// Tears everything down; nothing may have leaked.
    pub(crate) fn finish(self) -> pinfold_virtio::Stats {
        let Self { driver, disk, stack, domain } = self;
        drop(driver);
        let arena = stack.arena().clone();
        let stats = stack.finish().unwrap();
        assert!(stats.is_clean(), "{stats}");
        assert_eq!(arena.stats().frames_in_use, 0);
        let leaked = pinfold::quarantined_bytes();
        drop((arena, disk));
        assert_eq!(pinfold::quarantined_bytes(), leaked);
        let after = domain.stats();
        assert_eq!(
            (after.live, after.quarantined, after.iova_extents),
            (0, 0, 2),
            "below and above 4 GiB"
        );
        stats
    }
}

/// Returns bytes that differ by position.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0_u8..251).cycle().map(|byte| byte ^ seed).take(len).collect()
}
