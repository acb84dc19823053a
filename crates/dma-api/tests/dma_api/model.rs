//! Random calls against a model, on an IOMMU that delays flushes and keeps what it may; after each
//! call the device attacks everything that has been freed.

use crate::common::{Rig, iova};
use dma_api::{DmaAllocHandle, DmaCoherency, DmaConstraints, DmaDirection, DmaMapHandle, DmaOp};
use pinfold_core::access::Access;
use pinfold_soft::{Effect, SoftConfig};
use proptest::prelude::*;
use std::alloc::Layout;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Op {
    Alloc { size: usize, align: u32, constraints: Wanted },
    Map { size: usize, direction: DmaDirection, constraints: Wanted },
    End { which: usize },
    Prepare { which: usize, part: (usize, usize) },
    Complete { which: usize, part: (usize, usize) },
    Device { which: usize, part: (usize, usize), byte: u8 },
    Driver { which: usize, part: (usize, usize), byte: u8 },
}

/// Constraints, some of which cannot be satisfied.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    mask_bits: u32,
    align: usize,
    boundary: Option<usize>,
    max: Option<usize>,
}

impl Wanted {
    fn constraints(self) -> DmaConstraints {
        DmaConstraints {
            addr_mask: u64::MAX >> (64 - self.mask_bits),
            align: self.align,
            boundary: self.boundary,
            max_segment_size: self.max,
        }
    }

    /// Whether `size` bytes can satisfy them: with 2^25 addresses there is always room.
    fn possible(self, size: usize) -> bool {
        self.max.is_none_or(|max| size <= max)
            && self.boundary.is_none_or(|at| at.is_power_of_two() && size <= at)
            && self.align.max(1).is_power_of_two()
    }

    fn hold_for(self, at: u64, size: usize) -> bool {
        let (last, align) = (at + size as u64 - 1, self.align.max(1) as u64);
        let undivided = |boundary: usize| at / boundary as u64 == last / boundary as u64;
        last <= self.constraints().addr_mask
            && at.is_multiple_of(align)
            && self.boundary.is_none_or(undivided)
            && at != 0
    }
}

fn wanted() -> impl Strategy<Value = Wanted> {
    let mask_bits = prop_oneof![Just(25), Just(32), Just(64), 25u32..64];
    let align =
        prop_oneof![4 => Just(0usize), 4 => (0u32..15).prop_map(|bits| 1 << bits), 1 => Just(48)];
    let boundary = prop_oneof![
        4 => Just(None), 4 => (10u32..18).prop_map(|bits| Some(1 << bits)), 1 => Just(Some(12288))
    ];
    let max = prop_oneof![3 => Just(None), 1 => (1usize..20_000).prop_map(Some)];
    (mask_bits, align, boundary, max).prop_map(|(mask_bits, align, boundary, max)| Wanted {
        mask_bits,
        align,
        boundary,
        max,
    })
}

fn op() -> impl Strategy<Value = Op> {
    let size = || prop_oneof![1usize..10_000, Just(4096usize), Just(16384usize)];
    let part = || (0usize..12_000, 0usize..12_000);
    let direction = prop_oneof![
        Just(DmaDirection::ToDevice),
        Just(DmaDirection::FromDevice),
        Just(DmaDirection::Bidirectional)
    ];
    prop_oneof![
        2 => (size(), 0u32..16, wanted())
            .prop_map(|(size, align, constraints)| Op::Alloc { size, align, constraints }),
        3 => (size(), direction, wanted())
            .prop_map(|(size, direction, constraints)| Op::Map { size, direction, constraints }),
        3 => any::<usize>().prop_map(|which| Op::End { which }),
        2 => (any::<usize>(), part()).prop_map(|(which, part)| Op::Prepare { which, part }),
        2 => (any::<usize>(), part()).prop_map(|(which, part)| Op::Complete { which, part }),
        3 => (any::<usize>(), part(), any::<u8>())
            .prop_map(|(which, part, byte)| Op::Device { which, part, byte }),
        2 => (any::<usize>(), part(), any::<u8>())
            .prop_map(|(which, part, byte)| Op::Driver { which, part, byte }),
    ]
}

/// An object of the driver, and the model of its bytes.
struct Live {
    handle: Handle,
    access: Access,
    /// The driver's buffer, if it was mapped. Boxed: it stays where it is.
    buffer: Option<Box<[u8]>>,
    /// The expected bytes of the buffer, and of what the device reaches.
    bytes: Vec<u8>,
    device: Vec<u8>,
}

enum Handle {
    Alloc(DmaAllocHandle),
    Map(DmaMapHandle, DmaDirection),
}

impl Live {
    fn at(&self) -> u64 {
        match &self.handle {
            Handle::Alloc(alloc) => alloc.dma_addr().as_u64(),
            Handle::Map(map, _) => map.dma_addr().as_u64(),
        }
    }

    /// Returns the part inside, from any two numbers.
    fn part(&self, (from, len): (usize, usize)) -> std::ops::Range<usize> {
        let from = from % self.device.len();
        from..from + len.min(self.device.len() - from)
    }
}

#[derive(Default)]
struct Model {
    live: Vec<Live>,
    /// Pages that were reachable once.
    seen: BTreeSet<u64>,
}

impl Model {
    fn pages(&self) -> BTreeMap<u64, Access> {
        let pages = |live: &Live| {
            let (at, access, len) = (live.at(), live.access, live.device.len() as u64);
            (at..at + len).step_by(4096).map(move |page| (page, access))
        };
        self.live.iter().flat_map(pages).collect()
    }

    fn apply(&mut self, rig: &Rig, op: &Op) {
        let count = self.live.len();
        match *op {
            Op::Alloc { size, align, constraints } => {
                let layout = Layout::from_size_align(size, 1 << align).unwrap();
                // SAFETY: freed by `end`, once, and not used afterwards.
                let made =
                    unsafe { rig.platform.alloc_contiguous(constraints.constraints(), layout) };
                assert_eq!(made.is_some(), constraints.possible(size), "{op:?}");
                let Some(alloc) = made else { return };
                let both = alloc.as_ptr().addr().get() as u64 | alloc.dma_addr().as_u64();
                assert!(both.is_multiple_of(1 << align));
                assert!(constraints.hold_for(alloc.dma_addr().as_u64(), size), "{op:?} {alloc:?}");
                let (handle, access) = (Handle::Alloc(alloc), Access::all());
                let device = vec![0; size];
                self.live.push(Live { handle, access, buffer: None, bytes: vec![], device });
            }
            Op::Map { size, direction, constraints } => {
                let bytes: Vec<u8> = (1u8..=250).cycle().take(size).collect();
                let mut buffer = bytes.clone().into_boxed_slice();
                let (at, len) =
                    (NonNull::new(buffer.as_mut_ptr()).unwrap(), NonZeroUsize::new(size));
                let constraints_ = constraints.constraints();
                // SAFETY: the buffer lives until `end` has unmapped it.
                let made = unsafe {
                    rig.platform.map_streaming(constraints_, at, len.unwrap(), direction)
                };
                assert_eq!(made.is_ok(), constraints.possible(size), "{op:?}: {made:?}");
                let Ok(map) = made else { return };
                assert!(constraints.hold_for(map.dma_addr().as_u64(), size), "{op:?} {map:?}");
                let access = match direction {
                    DmaDirection::ToDevice => Access::READ,
                    DmaDirection::FromDevice => Access::WRITE,
                    DmaDirection::Bidirectional => Access::all(),
                };
                let (handle, device) = (Handle::Map(map, direction), bytes.clone());
                self.live.push(Live { handle, access, buffer: Some(buffer), bytes, device });
            }
            Op::End { which } if count > 0 => {
                let live = self.live.swap_remove(which % count);
                end(rig, live);
            }
            Op::Prepare { which, part } if count > 0 => {
                let live = &mut self.live[which % count];
                let part = live.part(part);
                if let Handle::Map(map, direction) = &live.handle {
                    let (at, len) = (part.start, part.len());
                    let coherency = DmaCoherency::Coherent;
                    rig.platform.sync_map_for_device(map, at, len, *direction, coherency);
                    live.device[part.clone()].copy_from_slice(&live.bytes[part]);
                }
            }
            Op::Complete { which, part } if count > 0 => {
                let live = &mut self.live[which % count];
                let part = live.part(part);
                if let Handle::Map(map, direction) = &live.handle {
                    let (at, len) = (part.start, part.len());
                    let coherency = DmaCoherency::Coherent;
                    rig.platform.sync_map_for_cpu(map, at, len, *direction, coherency);
                    if live.access.contains(Access::WRITE) {
                        live.bytes[part.clone()].copy_from_slice(&live.device[part]);
                    }
                }
            }
            Op::Device { which, part, byte } if count > 0 => {
                let live = &mut self.live[which % count];
                let part = live.part(part);
                let at = iova(live.at().into()).checked_add(part.start as u64).unwrap();
                let wrote = rig.port.write(at, &vec![byte; part.len()]).is_ok();
                if wrote {
                    live.device[part.clone()].fill(byte);
                }
                assert!(part.is_empty() || wrote == live.access.contains(Access::WRITE));
            }
            Op::Driver { which, part, byte } if count > 0 => {
                let live = &mut self.live[which % count];
                let part = live.part(part);
                if let Some(buffer) = &mut live.buffer {
                    buffer[part.clone()].fill(byte);
                    live.bytes[part].fill(byte);
                }
            }
            _ => {}
        }
    }

    fn check(&mut self, rig: &Rig) {
        let pages = self.pages();
        assert_eq!(rig.mapped(), pages, "what the table maps");
        assert_eq!(rig.lent(), self.live.len(), "what the source has lent");
        self.seen.extend(pages.keys());
        for page in self.seen.iter().filter(|page| !pages.contains_key(page)) {
            let page = iova((*page).into());
            assert!(rig.port.read(page, &mut [0; 8]).is_err(), "read after the free: {page:?}");
            assert!(rig.port.write(page, &[0xbd; 8]).is_err(), "written after the free: {page:?}");
        }
        for live in &self.live {
            if let Some(buffer) = &live.buffer {
                assert!(**buffer == *live.bytes, "the driver's bytes");
            }
            let mut seen = vec![0; live.device.len()];
            let read = rig.port.read(iova(live.at().into()), &mut seen).is_ok();
            assert_eq!(read, live.access.contains(Access::READ));
            assert!(!read || seen == live.device, "the device's bytes");
        }
    }
}

fn end(rig: &Rig, live: Live) {
    match live.handle {
        // SAFETY: allocated once, and taken out of the model.
        Handle::Alloc(alloc) => unsafe { rig.platform.dealloc_contiguous(alloc) },
        // SAFETY: as above.
        Handle::Map(map, _) => unsafe { rig.platform.unmap_streaming(map) },
    }
    if let Some(buffer) = live.buffer {
        assert!(*buffer == *live.bytes, "the driver's bytes after the unmap");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 512, ..ProptestConfig::default() })]

    #[test]
    fn calls_are_those_of_the_model(ops in prop::collection::vec(op(), 1..60), seed in any::<u64>()) {
        let rig = Rig::new(SoftConfig {
            seed,
            effect: Effect::AtLast,
            late_by: Duration::from_micros(20),
            abort_one_in: Some(16),
            contiguous_bytes: Some(8192),
            iotlb_entries: 1 << 16,
            ..SoftConfig::default()
        });
        let mut model = Model::default();
        for op in &ops {
            model.apply(&rig, op);
            model.check(&rig);
        }
        for live in std::mem::take(&mut model.live) {
            end(&rig, live);
        }
        model.check(&rig);
        let stats = rig.platform.stats();
        prop_assert!(stats.is_clean(), "{stats}");
    }
}
