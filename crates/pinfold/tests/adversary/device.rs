//! A device that does DMA at random: to what is mapped, to what was mapped recently, to where it
//! landed before, to anywhere near. It judges every access by what it finds.

use super::world::{Kind, Live, PAGE, STEP, Tag, WORDS, World, is_older};
use pinfold::soft::{Fault, FaultKind, FaultReason, Port, Random, SoftBus};
use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use std::sync::atomic::Ordering;

const REMEMBERED: usize = 48;

/// An address at which the device has landed, and the generation that it read there (0: none).
#[derive(Clone, Copy)]
struct Landed {
    at: Iova,
    generation: u64,
}

pub(crate) struct Device<'w> {
    world: &'w World,
    iommu: &'w SoftBus,
    port: Port,
    random: Random,
    /// Pairs of addresses between which anything may be.
    regions: &'w [(u64, u64)],
    landed: Vec<Landed>,
    accesses: u64,
    lands: u64,
}

impl<'w> Device<'w> {
    pub(crate) fn new(
        world: &'w World,
        iommu: &'w SoftBus,
        regions: &'w [(u64, u64)],
        seed: u64,
    ) -> Self {
        let mut random = Random::new(seed);
        // One of two has a TLB of its own.
        let port = match seed >> 32 & 1 {
            0 => iommu.port_with_device_tlb(random.pick(&[16, 256, 4096])),
            _ => iommu.port(),
        };
        Self { world, iommu, port, random, regions, landed: Vec::new(), accesses: 0, lands: 0 }
    }

    pub(crate) fn run(mut self) {
        while !self.world.stop.load(Ordering::Relaxed) {
            for _ in 0..64 {
                self.step();
            }
            self.judge_records();
            // Time advances in the IOMMU also while no owner waits.
            self.iommu.advance();
        }
        self.world.counts.accesses.fetch_add(self.accesses, Ordering::Relaxed);
        self.world.counts.landed.fetch_add(self.lands, Ordering::Relaxed);
    }

    fn step(&mut self) {
        match self.random.below(8) {
            0..=2 => self.probe_live(),
            3..=5 => self.probe_landed(),
            6 => {
                let (base, pages) = self.world.recent(self.random.index(64));
                // Or behind it, where a window goes on: what is mapped there may be taken back
                // before anyone knows of it.
                let behind = if self.random.one_in(2) { pages * PAGE } else { 0 };
                self.probe_page(base + behind, pages);
            }
            _ => {
                let (start, end) = self.random.pick(self.regions);
                self.probe_page(start, (end - start) / PAGE);
            }
        }
    }

    fn probe_live(&mut self) {
        let Some(live) = self.world.live(self.random.index(self.world.slots())) else { return };
        let at = self.address(live.iova.raw(), live.pages);
        self.access(at, Some(live), 0);
    }

    /// Probes a page where an access once landed: its translation may be cached.
    fn probe_landed(&mut self) {
        if self.landed.is_empty() {
            return;
        }
        let Landed { at, generation } = self.random.pick(&self.landed);
        if self.random.one_in(4) {
            // Another page that is translated by the same table page.
            let near = (at.raw() & !(512 * PAGE - 1)) + self.random.below(512 * WORDS) * STEP;
            if self.regions.iter().any(|(start, end)| (*start..*end).contains(&near)) {
                return self.access(Iova::new(near), None, 0);
            }
        }
        self.access(at, None, generation);
    }

    fn probe_page(&mut self, base: u64, pages: u64) {
        let at = self.address(base, pages);
        self.access(at, None, 0);
    }

    fn address(&mut self, base: u64, pages: u64) -> Iova {
        Iova::new(base + self.random.below(pages) * PAGE + self.random.below(WORDS) * STEP)
    }

    fn access(&mut self, at: Iova, live: Option<Live>, floor: u64) {
        self.accesses += 1;
        let write = self.random.one_in(3);
        let done = if write {
            self.port.write_u64(at, Tag::device(at).word()).map(|()| None)
        } else {
            self.port.read_u64(at).map(|word| Some(Tag::of(word)))
        };
        // Only what was live before *and* after was live all the time.
        let live = live.filter(|live| self.world.is_live(live));
        match done {
            Ok(tag) => {
                self.lands += 1;
                self.judge_landed(at, live, tag, floor);
                let generation =
                    tag.filter(|tag| tag.kind == Kind::Mapping).map_or(floor, |tag| tag.generation);
                self.remember(Landed { at, generation });
            }
            Err(fault) => self.judge_fault(fault, live, write),
        }
    }

    fn remember(&mut self, landed: Landed) {
        if let Some(known) = self.landed.iter_mut().find(|known| known.at == landed.at) {
            known.generation = landed.generation;
        } else if self.landed.len() < REMEMBERED {
            self.landed.push(landed);
        } else if self.random.one_in(3) {
            let n = self.random.index(REMEMBERED);
            self.landed[n] = landed;
        }
    }

    fn judge_landed(&self, at: Iova, live: Option<Live>, read: Option<Tag>, floor: u64) {
        let need = if read.is_some() { Access::READ } else { Access::WRITE };
        let no_right = live.is_some_and(|live| !live.access.contains(need));
        let here = at.raw() / PAGE;
        let wrong = match (read, live) {
            _ if no_right => true,
            (None, _) => false,
            (Some(tag), Some(live)) => match tag.kind {
                Kind::Mapping => tag.number != here || tag.generation != live.generation,
                Kind::Device => tag.number != here,
                _ => true,
            },
            (Some(tag), None) => match tag.kind {
                Kind::Mapping => tag.number != here || is_older(tag.generation, floor),
                Kind::Device => tag.number != here,
                Kind::Leaving => false,
                _ => true,
            },
        };
        if wrong {
            self.world.catch(|| {
                format!("an access to {at} landed: found {read:?}, live {live:?}, floor {floor}")
            });
        }
    }

    /// Checks the faults that the unit has recorded of any device: permissions that are missing,
    /// and nothing else.
    fn judge_records(&self) {
        for record in self.iommu.take_faults().records {
            let denied = if record.is_read() { FaultReason::NoRead } else { FaultReason::NoWrite };
            if record.reason() != Some(denied) {
                self.world.catch(|| format!("recorded: {record}"));
            }
        }
    }

    fn judge_fault(&self, fault: Fault, live: Option<Live>, write: bool) {
        let need = if write { Access::WRITE } else { Access::READ };
        let right = match fault.kind {
            FaultKind::NotMapped => live.is_none(),
            FaultKind::NoRead | FaultKind::NoWrite => {
                live.is_none_or(|live| !live.access.contains(need))
            }
            _ => false,
        };
        if !right {
            self.world.catch(|| format!("{fault}, live {live:?}"));
        }
    }
}
