//! The leaves of mappings per use: as large as the pages and the addresses allow, counted by the
//! translations that a device needs.
#![expect(clippy::unwrap_used, reason = "test code outside of test functions")]

use pinfold::requests::{End, Limits, Policy, Requests};
use pinfold::soft::SoftConfig;
use pinfold::{Access, Arena, Bidirectional, Buffer, Domain, Iova};
use std::alloc::Layout;
use std::ptr::NonNull;

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
const ARENA: usize = 16 << 20;

/// Memory for a test, which is never freed, as it begins at a multiple of 2 MiB.
fn memory() -> NonNull<u8> {
    let layout = Layout::from_size_align(ARENA, 2 << 20).unwrap();
    // SAFETY: the layout is not empty.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap()
}

/// Returns how many translations a new device needs for all of `len` bytes.
fn translations(domain: &Domain, at: Iova, len: u64) -> u64 {
    let bus = domain.soft_bus().unwrap();
    let (before, port) = (bus.stats().misses, bus.port());
    for page in 0..len / PAGE {
        port.read(Iova::new(at.raw() + page * PAGE), &mut [0; 8]).unwrap();
    }
    drop(port);
    bus.stats().misses - before
}

/// Maps `buffer` in each way that there is, and returns how many translations it needs.
fn translations_of(domain: &Domain, mut buffer: Buffer) -> u64 {
    let len = buffer.memory().len() as u64;
    let mapping = domain.map(buffer, Bidirectional).unwrap();
    let count = translations(domain, mapping.iova().start(), len);
    buffer = mapping.unmap().unwrap();

    let mut owner = domain.local();
    let mapping = owner.map(buffer, Bidirectional).unwrap();
    assert_eq!(translations(domain, mapping.iova().start(), len), count);
    buffer = owner.unmap(mapping).unwrap();

    let mut requests = Requests::<_, 1>::new(domain, Policy::Strict, 1, Limits::default()).unwrap();
    let token = requests.begin([(buffer, Access::all())]).unwrap();
    let segment = requests.segments(token).unwrap().next().unwrap();
    assert_eq!((translations(domain, segment.iova, segment.len), segment.len), (count, len));
    assert_eq!(requests.refused(token).unwrap().end, End::Quiesced);
    count
}

fn domain_of_pages(page: Option<u64>) -> (Domain, Arena) {
    let config = SoftConfig { contiguous_bytes: page, ..SoftConfig::default() };
    let domain = Domain::soft_with(config).unwrap();
    // SAFETY: the memory is never freed, and used through the arena alone.
    let arena = unsafe { Arena::builder().caller(memory(), ARENA) }.build(&domain).unwrap();
    (domain, arena)
}

#[test]
fn whole_huge_pages_are_mapped_by_large_leaves_per_use() {
    // Hugepages, and memory that happens to be contiguous.
    for page in [Some(HUGE), None] {
        let (domain, arena) = domain_of_pages(page);
        // So that no address is aligned unless it is asked for.
        let _page = domain.map(arena.alloc(1).unwrap(), Bidirectional).unwrap();
        for (bytes, leaves) in [(HUGE, 1), (2 * HUGE, 2), (4 * HUGE, 4), (HUGE + PAGE, 2)] {
            let buffer = arena.alloc(usize::try_from(bytes).unwrap()).unwrap();
            assert!(buffer.memory().addr().is_multiple_of(2 << 20), "{bytes}");
            assert_eq!(translations_of(&domain, buffer), leaves, "{bytes} bytes of {page:?}");
        }
    }
}

#[test]
fn a_part_of_a_huge_page_is_mapped_by_small_leaves_per_use() {
    let (domain, arena) = domain_of_pages(Some(HUGE));
    // The one begins at a multiple of 2 MiB, the other does not.
    let first = arena.alloc(1 << 20).unwrap();
    let second = arena.alloc(1 << 20).unwrap();
    for part in [first, second] {
        assert_eq!(translations_of(&domain, part), 256);
    }
}

#[test]
fn scattered_pages_are_mapped_by_small_leaves() {
    let (domain, arena) = domain_of_pages(Some(64 << 10));
    let buffer = arena.alloc(2 << 20).unwrap();
    assert_eq!(translations_of(&domain, buffer), 512);
}
