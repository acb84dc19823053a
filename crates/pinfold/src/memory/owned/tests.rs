//! Owned memory on this machine's kernel, behind the software IOMMU.

use super::*;
use crate::memory::arena::{Arena, BuildError};
use crate::memory::attachment::fake::{FakeDomain, REACHABLE};
use crate::memory::attachment::quarantined_here;
use crate::sys::region::Region;
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::PageSize;
use pinfold_core::domain::Payload;

/// Sets a flag when it is dropped.
struct Owner {
    _region: Region,
    freed: Arc<AtomicBool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.freed.store(true, Ordering::SeqCst);
    }
}

/// 2 MiB of which the kernel may make a hugepage, and 1 MiB of 4 KiB pages behind it.
fn mixed() -> (OwnedMemory, Arc<AtomicBool>) {
    let region = Region::anonymous(4 << 20, 2 << 20).unwrap();
    let _ = region.ask_for_hugepages();
    region.memory().fill(0, 1, 0).unwrap();
    let _ = region.ask_for_plain_pages();
    region.populate(3 << 20).unwrap();
    let freed = Arc::new(AtomicBool::new(false));
    let memory = NonNull::slice_from_raw_parts(region.base(), 3 << 20);
    // SAFETY: the region is the owner's, which unmaps it when it is dropped, and is not used
    // otherwise.
    let memory =
        unsafe { OwnedMemory::new(memory, Owner { _region: region, freed: Arc::clone(&freed) }) }
            .unwrap();
    (memory, freed)
}

fn soft() -> Domain {
    Domain::soft().unwrap()
}

#[test]
fn a_device_writes_and_reads_across_hugepages_and_small_pages() {
    for policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        let (domain, (memory, freed)) = (soft(), mixed());
        memory.map_into(&domain, policy).unwrap();
        let port = domain.port().unwrap();
        let piece = memory.take().unwrap();
        assert!(memory.take().is_none(), "the whole memory is taken once");
        let mapping = domain.map(piece, FromDevice).unwrap();
        assert_eq!(mapping.is_fixed(), policy == MappingPolicy::Whole);
        let iova = mapping.iova().start();
        let pattern: Vec<u8> = (0..3 << 20).map(|i| u8::try_from(i % 251).unwrap()).collect();
        port.write(iova, &pattern).unwrap();
        let piece = mapping.unmap().unwrap();
        let mapping = domain.map(piece, ToDevice).unwrap();
        let mut read = vec![0; 3 << 20];
        port.read(mapping.iova().start(), &mut read).unwrap();
        assert_eq!(read, pattern);
        let piece = mapping.unmap().unwrap();
        let stray = port.write(iova, b"stray");
        assert_eq!(stray.is_ok(), policy == MappingPolicy::Whole);
        drop((piece, memory));
        assert!(freed.load(Ordering::SeqCst));
        assert!(port.write(iova, b"stray").is_err());
        assert_eq!(domain.stats().static_mappings, 0);
    }
}

#[test]
fn memory_is_kept_while_a_device_may_reach_it() {
    let (domain, (memory, freed)) = (soft(), mixed());
    memory.map_into(&domain, MappingPolicy::PerUse).unwrap();
    let mapping = domain.map(memory.take().unwrap(), Bidirectional).unwrap();
    let Err(Reclaim::InUse { memory, users: 1 }) = memory.reclaim::<Owner>() else {
        panic!("it is mapped")
    };
    drop(memory);
    assert!(!freed.load(Ordering::SeqCst));
    domain.port().unwrap().write(mapping.iova().start(), b"still there").unwrap();
    drop(mapping);
    assert!(freed.load(Ordering::SeqCst));
}

#[test]
fn reclaimed_memory_is_the_original_and_unreachable_for_devices() {
    let mut bytes = vec![0u8; 64 << 10];
    bytes[5000] = 1;
    let addr = bytes.as_ptr().addr();
    let memory = OwnedMemory::from_vec(bytes).unwrap();
    let domain = soft();
    memory.map_into(&domain, MappingPolicy::Whole).unwrap();
    let piece = memory.take().unwrap();
    let start = piece.offset();
    assert!(start < 4096 && (addr + start).is_multiple_of(4096));
    let iova = Pinned::fixed_iova(&piece, pinfold_core::domain::Domain::id(&domain)).unwrap();
    domain.port().unwrap().write(iova, b"device").unwrap();
    drop(piece);
    let refused = memory.reclaim::<String>().unwrap_err();
    let text = refused.to_string();
    assert!(text.ends_with("call reclaim::<alloc::vec::Vec<u8>>()"), "{text}");
    let Reclaim::WrongOwner { memory, .. } = refused else { panic!("its owner is no String") };
    let bytes: Vec<u8> = memory.reclaim().unwrap();
    assert_eq!(
        (bytes.as_ptr().addr(), bytes.len(), &bytes[start..start + 6]),
        (addr, 64 << 10, &b"device"[..])
    );
    assert!(domain.port().unwrap().write(iova, b"late").is_err());
    assert_eq!(domain.stats().static_mappings, 0);
}

#[test]
fn memory_without_a_whole_page_is_returned() {
    let refused = OwnedMemory::from_vec(vec![7; 4000]).unwrap_err();
    assert_eq!((refused.len, refused.owner.len()), (4000, 4000));
}

#[test]
fn scattered_pieces_are_one_payload_with_the_extents_of_each() {
    let (domain, (memory, _)) = (soft(), mixed());
    memory.map_into(&domain, MappingPolicy::PerUse).unwrap();
    let mut first = memory.take().unwrap();
    let mut rest = first.split_off(8192).unwrap();
    let mut last = rest.split_off((2 << 20) - 8192).unwrap();
    drop(last.split_off(16384).unwrap());
    first.set_extent(512, 1024).unwrap();
    // The last first: the pieces are not adjacent, and on pages of different sizes.
    let pieces = OwnedPieces::new(vec![last, first]).unwrap();
    let mapping = domain.map(pieces, FromDevice).unwrap();
    let segments: Vec<_> = (0..).map_while(|i| Payload::segment(&mapping, i)).collect();
    let start = mapping.iova().start().raw();
    let offsets: Vec<_> = segments.iter().map(|s| (s.iova.raw() - start, s.len)).collect();
    assert_eq!(offsets, [(0, 16384), (16384 + 512, 1024)]);
    let port = domain.port().unwrap();
    for (segment, byte) in segments.iter().zip([3, 9]) {
        port.write(segment.iova, &vec![byte; usize::try_from(segment.len).unwrap()]).unwrap();
    }
    let mut pieces = mapping.unmap().unwrap().into_pieces();
    let (first, last) = (pieces.pop().unwrap(), pieces.pop().unwrap());
    let mut bytes = vec![0; 16384];
    last.memory().copy_to_slice(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 3));
    let mut bytes = vec![0; 8192];
    first.memory().copy_to_slice(0, &mut bytes).unwrap();
    assert!(bytes.iter().enumerate().all(|(i, &byte)| (byte == 9) == (512..1536).contains(&i)));
}

#[test]
fn impossible_cuts_change_nothing() {
    let memory = OwnedMemory::from_vec(vec![0; 64 << 10]).unwrap();
    let mut piece = memory.take().unwrap();
    let len = piece.len();
    for at in [0, 1, 4095, len, len + 4096] {
        let refused = piece.split_off(at).err();
        assert_eq!(refused, Some(CutError::Split { at, len }));
    }
    for (offset, bytes) in [(0, 0), (len, 1), (usize::MAX, 1), (1, len)] {
        let refused = CutError::Extent { offset, len: bytes, first: 0, bytes: len };
        assert_eq!(piece.set_extent(offset, bytes), Err(refused));
    }
    assert_eq!((piece.len(), piece.extent(0)), (len, Some((0, len as u64))));
}

#[test]
fn memory_of_another_domain_is_refused_until_mapped_into_this() {
    let ((memory, _), here, other) = (mixed(), soft(), soft());
    memory.map_into(&other, MappingPolicy::PerUse).unwrap();
    let refused = here.map(memory.take().unwrap(), Bidirectional).unwrap_err();
    assert!(refused.to_string().contains("call map_into"), "{refused}");
    memory.map_into(&here, MappingPolicy::PerUse).unwrap();
    let mapping = here.map(refused.payload.unwrap(), Bidirectional).unwrap();
    here.port().unwrap().write(mapping.iova().start(), b"reached").unwrap();
}

#[test]
fn memory_of_no_domain_is_refused_and_the_piece_is_returned() {
    let (memory, _) = mixed();
    let refused = soft().map(memory.take().unwrap(), Bidirectional).unwrap_err();
    assert!(matches!(refused.error, BackendError::NotRegistered { .. }));
    assert!(refused.to_string().contains("call map_into"), "{refused}");
    assert_eq!(refused.payload.unwrap().len(), 3 << 20);
}

/// A handle, a piece and a mapping outlive each other; the pin ends with the last of them.
#[test]
fn a_pin_lasts_as_long_as_the_memory() {
    let (memory, freed) = mixed();
    let Ok(folios) = memory.folios().cloned() else {
        return eprintln!("SKIPPED: frames are hidden here, or no ring pins");
    };
    assert!(memory.0.folios.get().is_some_and(PinnedFolios::is_pinned_here));
    assert_eq!(memory.folios(), Ok(&folios), "looked up once");
    assert_eq!(folios.len(), 3 << 20);
    let piece = memory.take().unwrap();
    drop(memory);
    assert!(!freed.load(Ordering::SeqCst));
    drop(piece);
    assert!(freed.load(Ordering::SeqCst));
    let (memory, freed) = mixed();
    memory.folios().unwrap();
    drop(memory.reclaim::<Owner>().unwrap());
    assert!(freed.load(Ordering::SeqCst));
}

/// The kernel charges a pin of its own beside that of a mapping.
#[test]
fn what_a_domain_pins_whole_is_not_pinned_again() {
    let whole = |policy, fake| {
        let (memory, _) = mixed();
        memory.attach(Box::new(fake), policy).unwrap();
        memory.folios().is_ok().then(|| memory.0.folios.get().unwrap().is_pinned_here())
    };
    let Some(pinned) = whole(MappingPolicy::Whole, FakeDomain::working().pinning()) else {
        return eprintln!("SKIPPED: frames are hidden here");
    };
    assert!(!pinned);
    let pinned = whole(MappingPolicy::PerUse, FakeDomain::working().pinning());
    assert_eq!(pinned, Some(true), "only what is mapped for its lifetime stays pinned");
    assert_eq!(whole(MappingPolicy::Whole, FakeDomain::working()), Some(true));
}

/// Memory that begins within a hugepage is found at its address by payloads all the same.
#[test]
fn memory_that_begins_within_a_hugepage_is_mapped_whole() {
    let domain = soft();
    let region = Region::anonymous(8 << 20, 2 << 20).unwrap();
    let _ = region.ask_for_hugepages();
    region.memory().fill(0, 8 << 20, 0).unwrap();
    let after = region.memory().part(4096, (8 << 20) - 4096).unwrap();
    let after = NonNull::slice_from_raw_parts(after.as_ptr(), after.len());
    // SAFETY: as in `mixed`.
    let memory = unsafe { OwnedMemory::new(after, region) }.unwrap();
    let is_huge = memory.survey().unwrap().pages(PageSize::Size2M) == 4;
    memory.map_into(&domain, MappingPolicy::Whole).unwrap();
    let mapping = domain.map(memory.take().unwrap(), FromDevice).unwrap();
    assert!(mapping.is_fixed());
    assert!(!is_huge || mapping.iova().start().raw() % (2 << 20) == 4096, "{}", mapping.iova());
    domain.port().unwrap().write(mapping.iova().start(), b"the first page").unwrap();
    let piece = mapping.unmap().unwrap();
    assert_eq!(piece.memory().read_u8(0), Ok(b't'));
    assert_eq!(domain.stats().static_mappings, 1);
    drop((piece, memory));
    assert_eq!(domain.stats().static_mappings, 0);
}

#[test]
fn pieces_cut_twice_do_not_overlap_and_have_own_addresses() {
    let (domain, (memory, _)) = (soft(), mixed());
    memory.map_into(&domain, MappingPolicy::Whole).unwrap();
    let mut first = memory.take().unwrap();
    let mut second = first.split_off(4096).unwrap();
    let third = second.split_off(8192).unwrap();
    assert_eq!([first.offset(), second.offset(), third.offset()], [0, 4096, 12288]);
    first.set_extent(512, 1024).unwrap();
    let pieces = OwnedPieces::new(vec![first, second]).unwrap();
    let mapping = domain.map(pieces, FromDevice).unwrap();
    assert!(!mapping.is_fixed());
    let start = mapping.iova().start().raw();
    let segments: Vec<_> = mapping.segments().map(|s| (s.iova.raw() - start, s.len)).collect();
    assert_eq!((mapping.iova().len(), segments), (12288, vec![(512, 1024), (4096, 8192)]));
    assert_eq!(third.len(), (3 << 20) - 12288);
}

/// A flush that hangs, or a map that fails halfway: the memory is never freed.
#[test]
fn memory_whose_unmap_fails_is_quarantined() {
    use crate::soft::SoftConfig;
    use std::time::Duration;
    let hanging = || {
        let config = SoftConfig {
            hang_from: Some(1),
            timeout: Duration::from_millis(2),
            ..SoftConfig::default()
        };
        let (domain, (memory, freed)) = (Domain::soft_with(config).unwrap(), mixed());
        memory.map_into(&domain, MappingPolicy::Whole).unwrap();
        (memory, freed)
    };
    let fails = || {
        let (memory, freed) = mixed();
        assert_eq!(
            memory.attach(
                Box::new(FakeDomain::failing("map_static", REACHABLE)),
                MappingPolicy::Whole
            ),
            Err(REACHABLE)
        );
        (memory, freed)
    };
    let makers: [&dyn Fn() -> (OwnedMemory, Arc<AtomicBool>); 2] = [&hanging, &fails];
    for make in makers {
        let before = quarantined_here();
        let (memory, freed) = make();
        assert!(matches!(memory.reclaim::<Owner>(), Err(Reclaim::Quarantined)));
        assert!(!freed.load(Ordering::SeqCst));
        let (memory, freed) = make();
        drop(memory);
        assert!(!freed.load(Ordering::SeqCst));
        assert_eq!(quarantined_here() - before, 2 * (3 << 20));
    }
}

/// Slots of 512 bytes in pages, as a slab has them.
#[repr(align(4096))]
struct Slots([u8; 16384]);

fn sharing(bytes: Range<usize>) -> Result<OwnedMemory, OwnedMemoryError<()>> {
    let slots = Box::leak(Box::new(Slots([7; 16384])));
    // SAFETY: the pages are leaked, and not used otherwise.
    unsafe { OwnedMemory::sharing_pages(NonNull::from(&mut slots.0 as &mut [u8]), bytes, ()) }
}

#[test]
fn pages_that_are_shared_transfer_their_own_bytes_only() {
    let domain = soft();
    // On one page; across three; whole pages.
    let cases = [
        (512..1024, vec![(512, 512)]),
        (4000..12289, vec![(4000, 8289)]),
        (4096..8192, vec![(0, 4096)]),
    ];
    for (bytes, extents) in cases {
        let memory = sharing(bytes.clone()).unwrap();
        memory.map_into(&domain, MappingPolicy::PerUse).unwrap();
        let piece = memory.take().unwrap();
        let first = bytes.start - piece.offset();
        assert_eq!((piece.offset() % 4096, piece.len() % 4096), (0, 0));
        let mapping = domain.map(piece, FromDevice).unwrap();
        let start = mapping.iova().start().raw();
        let segments: Vec<_> = mapping.segments().map(|s| (s.iova.raw() - start, s.len)).collect();
        assert_eq!(segments, extents);
        assert_eq!(first as u64, extents[0].0);
        drop(mapping);
        drop(memory);
    }
}

#[test]
fn parts_of_shared_pages_keep_to_the_bytes_that_are_not_shared() {
    let memory = sharing(512..9000).unwrap();
    let mut first = memory.take().unwrap();
    let mut rest = first.split_off(4096).unwrap();
    let mut last = rest.split_off(4096).unwrap();
    let extents = [&first, &rest, &last].map(|piece| piece.extent(0).unwrap());
    assert_eq!(extents, [(512, 3584), (0, 4096), (0, 808)]);
    let refused = first.set_extent(511, 10).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "cannot transfer 10 bytes at 511 of a piece: it has 3584 bytes to transfer, from 512 on, and at least one is needed"
    );
    let split = CutError::Split { at: 100, len: 8192 }.to_string();
    assert!(
        split.ends_with("at 100: a multiple of 4096 above 0 and below 8192 is needed"),
        "{split}"
    );
    assert!(last.set_extent(800, 9).is_err());
    last.set_extent(800, 8).unwrap();
    assert_eq!(last.extent(0), Some((800, 8)));
}

#[test]
fn bytes_that_are_not_in_whole_pages_are_refused() {
    for bytes in [5..5, 0..16385, 16384..16390] {
        let refused = sharing(bytes.clone()).unwrap_err();
        assert_eq!((refused.len, refused.bytes), (16384, bytes));
    }
    let slots = Box::leak(Box::new(Slots([7; 16384])));
    // SAFETY: as in `sharing`.
    let refused =
        unsafe { OwnedMemory::sharing_pages(NonNull::from(&mut slots.0[1..4097]), 0..1, ()) };
    assert!(refused.is_err());
}

#[test]
fn a_page_that_is_shared_is_registered_with_a_domain_once() {
    let pages = NonNull::from(&mut Box::leak(Box::new(Slots([7; 16384]))).0 as &mut [u8]);
    // SAFETY: the pages are leaked, and not used otherwise.
    let slot = |bytes| unsafe { OwnedMemory::sharing_pages(pages, bytes, ()) }.unwrap();
    let (first, beside, elsewhere) = (slot(0..512), slot(512..1024), slot(4096..4608));
    let domain = soft();
    first.map_into(&domain, MappingPolicy::PerUse).unwrap();
    let refused = beside.map_into(&domain, MappingPolicy::PerUse).unwrap_err();
    assert!(refused.to_string().contains("registered already"), "{refused}");
    elsewhere.map_into(&domain, MappingPolicy::PerUse).unwrap();
    beside.map_into(&soft(), MappingPolicy::PerUse).unwrap();
}

/// Whole pages that are leaked.
fn leaked() -> NonNull<[u8]> {
    NonNull::from(&mut Box::leak(Box::new(Slots([7; 16384]))).0 as &mut [u8])
}

fn part(pages: NonNull<[u8]>, range: Range<usize>) -> NonNull<[u8]> {
    // SAFETY: inside the pages.
    let start = unsafe { pages.cast::<u8>().add(range.start) };
    NonNull::slice_from_raw_parts(start, range.len())
}

#[test]
fn bytes_have_one_owner_whichever_domain_asks() {
    let pages = leaked();
    // SAFETY: leaked, and what is accepted is used by one value.
    let new = |range| unsafe { OwnedMemory::new(part(pages, range), 5) };
    let arena = |range| {
        let part: NonNull<[u8]> = part(pages, range);
        // SAFETY: as above, and arenas beside them.
        unsafe { Arena::builder().caller(part.cast(), part.len()) }.build(&soft())
    };
    let own = new(4096..12288).unwrap();
    own.map_into(&soft(), MappingPolicy::Whole).unwrap();
    for range in [4096..12288, 0..8192, 8192..16384, 0..16384, 8192..12288] {
        let refused = new(range.clone()).unwrap_err();
        let expected = (pages.addr().get() + 4096, 8192, ClaimedFor::Owned);
        let in_use = refused.in_use.unwrap();
        assert_eq!((in_use.other, in_use.other_len, in_use.by), expected);
        assert_eq!(refused.owner, 5, "its owner is returned");
        assert!(refused.to_string().contains("already"), "{refused}");
        assert!(matches!(arena(range), Err(BuildError::InUse(_))));
    }
    // Pieces keep it.
    let piece = own.take().unwrap();
    drop(own);
    assert!(new(4096..8192).is_err());
    let beside = [new(0..4096).unwrap(), new(12288..16384).unwrap()];
    drop((piece, beside));
    let first = arena(0..8192).unwrap();
    assert_eq!(new(4096..8192).unwrap_err().in_use.unwrap().by, ClaimedFor::Arena);
    // SAFETY: as above; the bytes are of the arena, so it is refused.
    let shared = unsafe { OwnedMemory::sharing_pages(pages, 5000..5001, ()) };
    assert!(shared.is_err());
    let buffer = first.alloc(4096).unwrap();
    drop(first);
    assert!(new(4096..8192).is_err());
    drop(buffer);
    let last = new(0..16384).unwrap();
    assert_eq!(last.reclaim::<i32>().unwrap(), 5);
    assert!(new(0..16384).is_ok());
}

#[test]
fn joint_memory_is_taken_again_as_the_same_bytes_only() {
    let pages = leaked();
    // SAFETY: leaked, and not used otherwise.
    let joint = |range| unsafe { OwnedMemory::joint(part(pages, range), ()) };
    let (one, two) = (joint(0..8192).unwrap(), joint(0..8192).unwrap());
    for range in [0..4096, 4096..8192, 4096..12288, 0..12288] {
        assert_eq!(joint(range).unwrap_err().in_use.unwrap().by, ClaimedFor::Registration);
    }
    assert!(joint(8192..12288).is_ok());
    assert!(joint(1..4097).unwrap_err().in_use.is_none());
    assert!(joint(0..0).unwrap_err().in_use.is_none());
    one.reclaim::<()>().unwrap();
    assert!(joint(0..4096).is_err());
    drop(two);
    assert!(joint(0..4096).is_ok());
}

#[test]
fn quarantined_memory_stays_claimed() {
    let pages = leaked();
    for reclaim in [false, true] {
        let range = if reclaim { 0..4096 } else { 4096..8192 };
        // SAFETY: leaked, and not used otherwise.
        let new = || unsafe { OwnedMemory::new(part(pages, range.clone()), ()) };
        let memory = new().unwrap();
        let domain = FakeDomain::failing("unmap", REACHABLE);
        memory.attach(Box::new(domain), MappingPolicy::Whole).unwrap();
        if reclaim {
            assert!(matches!(memory.reclaim::<()>(), Err(Reclaim::Quarantined)));
        } else {
            drop(memory);
        }
        assert!(new().is_err());
    }
}
