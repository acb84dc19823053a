//! An owner of buffers: maps, revokes and unmaps them at random, and checks every page when it owns it again.

use super::tag::{self, Kind, PAGE, Tag};
use super::world::{LIVE, Live, World};
use pinfold::soft::Random;
use pinfold::{Arena, Buffer, Domain};
use pinfold_core::access::{Access, Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{BackendError, MapError, Mapping, NotQuiesced, Revoked};
use pinfold_core::invalidate::WaitError;
use pinfold_core::table::TableError;
use std::sync::atomic::Ordering::Relaxed;

enum Held<'d> {
    Read(Mapping<Buffer, ToDevice, &'d pinfold_core::domain::Domain>),
    Write(Mapping<Buffer, FromDevice, &'d pinfold_core::domain::Domain>),
    Both(Mapping<Buffer, Bidirectional, &'d pinfold_core::domain::Domain>),
}

pub(crate) struct Owner<'d> {
    world: &'d World,
    domain: &'d Domain,
    arena: &'d Arena,
    first_slot: usize,
    random: Random,
    mapped: Vec<(Live, Held<'d>)>,
    revoked: Vec<(Live, Revoked<Buffer, &'d pinfold_core::domain::Domain>)>,
    /// Owned again, and checked at times: nothing may change.
    kept: Vec<Buffer>,
    /// Whether it maps more than it takes back at present.
    grows: bool,
}

const KEPT: usize = 6;
const REVOKED: usize = 12;

impl<'d> Owner<'d> {
    pub(crate) fn new(
        world: &'d World,
        domain: &'d Domain,
        arena: &'d Arena,
        number: usize,
        seed: u64,
    ) -> Self {
        Self {
            world,
            domain,
            arena,
            first_slot: number * LIVE,
            random: Random::new(seed),
            mapped: Vec::new(),
            revoked: Vec::new(),
            kept: Vec::new(),
            grows: true,
        }
    }

    pub(crate) fn run(mut self) {
        while !self.world.stop.load(Relaxed) {
            self.step();
        }
        while let Some(held) = self.take() {
            self.unmap(held);
        }
        while let Some((live, revoked)) = self.revoked.pop() {
            self.wait(live, revoked);
        }
        self.kept.iter().for_each(|buffer| self.check_owned(buffer));
    }

    fn step(&mut self) {
        if self.random.one_in(24) {
            self.grows = !self.grows;
        }
        match self.random.below(12) {
            0..=4 if self.grows => self.map(),
            0 => self.map(),
            1 | 2 => self.take().into_iter().for_each(|held| self.unmap(held)),
            3..=7 => self.take().into_iter().for_each(|held| self.revoke(held)),
            8 if !self.grows => self.revoke_all(),
            9 if self.revoked.len() > REVOKED / 2 => {
                let (live, revoked) = self.revoked.swap_remove(self.random.index(self.revoked.len()));
                self.wait(live, revoked);
            }
            _ => {}
        }
        for (live, revoked) in std::mem::take(&mut self.revoked) {
            match revoked.poll() {
                Ok(buffer) => self.quiesced(&live, buffer),
                Err(revoked) => self.revoked.push((live, revoked)),
            }
        }
        if let Some(buffer) = self.kept.get(self.random.index(KEPT)) {
            self.check_owned(buffer);
        }
    }

    fn bytes(&mut self) -> usize {
        let pages = match self.random.below(20) {
            0..=6 => 1,
            7..=10 => 1 + self.random.below(16),
            11..=13 => 16 + self.random.below(112),
            14..=16 => 128 + self.random.below(384),
            _ => 512,
        };
        (pages * PAGE) as usize
    }

    fn obtain(&mut self) -> Option<Buffer> {
        if !self.kept.is_empty() && self.random.below(2) == 0 {
            return Some(self.kept.swap_remove(self.random.index(self.kept.len())));
        }
        let buffer = self.arena.alloc(self.bytes()).ok()?;
        if self.world.untagged.load(Relaxed) {
            tag::write_kind(buffer.memory(), Kind::Owned);
        }
        Some(buffer)
    }

    fn map(&mut self) {
        let used = |slot: &usize| self.mapped.iter().any(|(live, _)| live.slot == *slot);
        let Some(slot) = (self.first_slot..self.first_slot + LIVE).find(|slot| !used(slot)) else { return };
        if self.revoked.len() >= REVOKED {
            return;
        }
        let Some(buffer) = self.obtain() else { return };
        // It is unchanged since its last owner tagged it.
        self.check_owned(&buffer);
        match self.random.below(3) {
            0 => self.map_for(slot, buffer, ToDevice, Held::Read),
            1 => self.map_for(slot, buffer, FromDevice, Held::Write),
            _ => self.map_for(slot, buffer, Bidirectional, Held::Both),
        }
    }

    fn map_for<D: Direction>(
        &mut self,
        slot: usize,
        buffer: Buffer,
        direction: D,
        hold: impl FnOnce(Mapping<Buffer, D, &'d pinfold_core::domain::Domain>) -> Held<'d>,
    ) {
        tag::write_kind(buffer.memory(), Kind::Leaving);
        match self.domain.map(buffer, direction) {
            Ok(mapped) => {
                let (iova, pages) = (mapped.iova().start(), mapped.iova().len() / PAGE);
                let generation = self.world.next_generation();
                tag::write(mapped.memory(), |page| Tag::mapped(at(iova, page), generation));
                let live = Live { slot, generation, iova, pages, access: D::ACCESS };
                self.world.publish(&live);
                self.world.counts.maps.fetch_add(1, Relaxed);
                let large = pages == 512 && iova.is_aligned(512 * PAGE);
                self.world.counts.large.fetch_add(u64::from(large), Relaxed);
                self.mapped.push((live, hold(mapped)));
            }
            Err(refused) => self.refused(refused),
        }
    }

    fn refused(&mut self, refused: MapError<Buffer>) {
        match &refused.error {
            BackendError::Iova(_) => {}
            BackendError::Table(TableError::NoPages { .. }) => {
                self.world.counts.no_pages.fetch_add(1, Relaxed);
            }
            BackendError::MapNotFlushed { flush: WaitError::TimedOut { .. }, .. }
            | BackendError::RollbackIncomplete { flush: WaitError::TimedOut { .. }, .. } => {
                self.world.counts.late.fetch_add(1, Relaxed);
            }
            error => self.world.catch(|| format!("an owner's map failed: {error}")),
        }
        match refused.payload {
            // What was mapped of it was taken back and flushed: it is the owner's again.
            Some(buffer) => self.keep(buffer),
            // The domain drops it when the late flush has completed.
            None => self.world.untagged.store(true, Relaxed),
        }
    }

    fn take(&mut self) -> Option<(Live, Held<'d>)> {
        if self.mapped.is_empty() {
            return None;
        }
        let (live, held) = self.mapped.swap_remove(self.random.index(self.mapped.len()));
        self.world.withdraw(live.slot);
        Some((live, held))
    }

    fn unmap(&mut self, (live, held): (Live, Held<'d>)) {
        let revoked = match held {
            Held::Read(mapped) => mapped.revoke(),
            Held::Write(mapped) => mapped.revoke(),
            Held::Both(mapped) => mapped.revoke(),
        };
        self.wait(live, revoked);
    }

    fn revoke(&mut self, (live, held): (Live, Held<'d>)) {
        self.revoked.push((
            live,
            match held {
                Held::Read(mapped) => mapped.revoke(),
                Held::Write(mapped) => mapped.revoke(),
                Held::Both(mapped) => mapped.revoke(),
            },
        ));
    }

    fn revoke_all(&mut self) {
        let (mut lives, mut reads) = (Vec::new(), Vec::new());
        for (live, held) in std::mem::take(&mut self.mapped) {
            match held {
                Held::Read(mapped) => {
                    self.world.withdraw(live.slot);
                    lives.push(live);
                    reads.push(mapped);
                }
                held => self.mapped.push((live, held)),
            }
        }
        let mut revoked = Vec::new();
        self.domain.revoke_all(reads, &mut revoked);
        self.revoked.extend(lives.into_iter().zip(revoked));
    }

    fn wait(&mut self, live: Live, revoked: Revoked<Buffer, &'d pinfold_core::domain::Domain>) {
        match revoked.wait() {
            Ok(buffer) => self.quiesced(&live, buffer),
            Err(NotQuiesced { revoked: Some(revoked), error }) if error.late_ticket().is_some() => {
                self.world.counts.late.fetch_add(1, Relaxed);
                self.revoked.push((live, revoked));
            }
            Err(error) => self.world.catch(|| format!("a wait failed: {error}")),
        }
    }

    /// The buffer is the owner's: from here on no device reaches it.
    fn quiesced(&mut self, live: &Live, buffer: Buffer) {
        let wrong = tag::find(buffer.memory(), |page, found| {
            let here = at(live.iova, page);
            let written = live.access.contains(Access::WRITE) && found == Tag::device(here);
            written || found == Tag::mapped(here, live.generation)
        });
        if let Some(wrong) = wrong {
            self.world.catch(|| format!("{live:?} came back changed: (page, found) = {wrong:?}"));
        }
        self.keep(buffer);
    }

    fn keep(&mut self, buffer: Buffer) {
        tag::write_kind(buffer.memory(), Kind::Owned);
        self.kept.push(buffer);
        if self.kept.len() > KEPT {
            // Back to the arena, for any owner to take.
            let buffer = self.kept.swap_remove(self.random.index(KEPT));
            self.check_owned(&buffer);
        }
    }

    fn check_owned(&self, buffer: &Buffer) {
        let fresh = |found: Tag| found.kind == Kind::Blank;
        let memory = buffer.memory();
        if let Some(wrong) = tag::find_not(memory, Kind::Owned).filter(|(_, found)| !fresh(*found)) {
            self.world.catch(|| format!("an owner's buffer was changed: (page, found) = {wrong:?}"));
        }
    }
}

fn at(iova: Iova, page: u64) -> Iova {
    Iova::new(iova.raw() + page * PAGE)
}
