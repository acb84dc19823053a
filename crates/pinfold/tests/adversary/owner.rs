//! An owner of buffers: maps, revokes and unmaps them at random, and checks every page when it owns
//! it again.

use super::loops::Loop;
use super::round::{Careless, Trouble};
use super::world::{self, Kind, LIVE, Live, PAGE, Tag, World};
use pinfold::soft::Random;
use pinfold::{Arena, Buffer};
use pinfold_core::access::{Access, Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::Iova;
use pinfold_core::domain::{
    BackendError, Domain, DomainLocal, MapError, MapManyError, Mapping, NotQuiesced, Pinned,
    Unrevoked,
};
use pinfold_core::invalidate::{WaitError, WaitLimit};
use pinfold_core::table::TableError;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state that the owners of a round share.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'w, 'd> {
    pub(crate) world: &'w World,
    pub(crate) mail: &'w Mail,
    pub(crate) domain: &'d Domain,
    pub(crate) arena: &'w Arena,
    /// Memory that stays mapped: payloads of request loops.
    pub(crate) whole: Option<&'w Arena>,
    pub(crate) through: Through,
    pub(crate) trouble: Trouble,
    pub(crate) careless: Option<Careless>,
}

pub(crate) struct Owner<'w, 'd> {
    pub(crate) shared: Shared<'w, 'd>,
    pub(crate) world: &'w World,
    handle: Handle,
    pub(crate) by_loop: Loop,
    pub(crate) number: usize,
    pub(crate) first_slot: usize,
    pub(crate) random: Random,
    mapped: Vec<(Live, Held)>,
    revoked: Vec<(Live, Revoked)>,
    /// Owned again, and checked at times: nothing may change.
    kept: Vec<Buffer>,
    /// Whether it maps more than it takes back at present.
    grows: bool,
    /// Whether it maps halves of windows above all, so that a window is soon used again.
    halves: bool,
}

const KEPT: usize = 6;
const REVOKED: usize = 12;

impl<'w, 'd> Owner<'w, 'd> {
    pub(crate) fn new(shared: Shared<'w, 'd>, number: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        Self {
            shared,
            world: shared.world,
            handle: shared.domain.local(),
            by_loop: Loop::new(shared, &mut random),
            number,
            first_slot: number * LIVE,
            halves: shared.through != Through::Domain && random.one_in(2),
            random,
            mapped: Vec::new(),
            revoked: Vec::new(),
            kept: Vec::new(),
            grows: true,
        }
    }

    pub(crate) fn run(mut self) {
        while !self.world.stop.load(Relaxed) {
            match self.shared.through {
                Through::Requests => self.step_by_loop(),
                _ => self.step(),
            }
        }
        self.end_loop();
        while let Some(held) = self.take() {
            self.unmap(held);
        }
        // Each owner empties the mail after it has sent its last, so nothing is left in it.
        while let Some(held) = self.shared.mail.take() {
            self.unmap(held);
        }
        while let Some((live, revoked)) =
            self.revoked.pop().or_else(|| self.shared.mail.take_revoked())
        {
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
            8 if !self.grows => self.revoke_many(),
            9 if self.revoked.len() > REVOKED / 3 && self.is_by_handle() => self.wait_all(),
            9 if self.revoked.len() > REVOKED / 2 => {
                let (live, revoked) =
                    self.revoked.swap_remove(self.random.index(self.revoked.len()));
                self.wait(live, revoked);
            }
            10 => self.exchange(),
            _ => {}
        }
        for (live, revoked) in std::mem::take(&mut self.revoked) {
            let polled = match self.is_by_handle() {
                true => self.handle.poll(revoked),
                false => revoked.poll(),
            };
            match polled {
                Ok(buffer) => self.quiesced(&live, buffer),
                Err(revoked) => self.revoked.push((live, revoked)),
            }
        }
        if let Some(buffer) = self.kept.get(self.random.index(KEPT)) {
            self.check_owned(buffer);
        }
    }

    fn is_by_handle(&mut self) -> bool {
        self.shared.through.is_by_handle(&mut self.random)
    }

    /// Takes mappings that other owners have passed on, passes some on, or drops the handle: its
    /// windows are then closed by the last of their mappings, wherever that ends.
    fn exchange(&mut self) {
        let mail = self.shared.mail;
        match self.random.below(8) {
            0 | 1 => mail.take().into_iter().for_each(|held| {
                self.world.counts.remote.fetch_add(1, Relaxed);
                self.revoke(held);
            }),
            2 | 3 => mail.take_revoked().into_iter().for_each(|one| {
                self.world.counts.remote.fetch_add(1, Relaxed);
                self.revoked.push(one);
            }),
            4 | 5 => {
                let refused = self.take().and_then(|held| mail.send(held));
                refused.into_iter().for_each(|held| self.revoke(held));
            }
            6 => {
                let refused = self.revoked.pop().and_then(|one| mail.send_revoked(one));
                self.revoked.extend(refused);
            }
            _ if self.random.one_in(4) => self.handle = self.shared.domain.local(),
            _ => {}
        }
    }

    pub(crate) fn bytes(&mut self) -> usize {
        let pages = match self.random.below(20) {
            0..=15 if self.halves => 256,
            0..=6 => 1,
            7..=10 => 1 + self.random.below(16),
            11..=13 => 16 + self.random.below(112),
            14..=16 => 128 + self.random.below(384),
            _ => 512,
        };
        (pages * PAGE) as usize
    }

    pub(crate) fn obtain(&mut self, bytes: usize) -> Option<Buffer> {
        if !self.kept.is_empty() && self.random.below(2) == 0 {
            return Some(self.kept.swap_remove(self.random.index(self.kept.len())));
        }
        let buffer = self.shared.arena.alloc(bytes).ok()?;
        if Self::changed(&buffer).is_some() {
            // Its last owner may not know yet that it was lost in a map that is refused.
            self.world.wait_for_calls();
        }
        if self.world.untagged.load(Relaxed) {
            world::write_kind(buffer.memory(), Kind::Owned);
        }
        Some(buffer)
    }

    fn free_slot(&self) -> Option<usize> {
        let used = |slot: &usize| self.mapped.iter().any(|(live, _)| live.slot == *slot);
        (self.first_slot..self.first_slot + LIVE).find(|slot| !used(slot))
    }

    fn map(&mut self) {
        if self.free_slot().is_none() || self.revoked.len() >= REVOKED {
            return;
        }
        let many = self.random.one_in(4) && self.is_by_handle();
        let buffers: Vec<Buffer> = match many {
            true => {
                (0..LIVE - self.mapped.len()).map_while(|_| self.obtain(PAGE as usize)).collect()
            }
            false => {
                let bytes = self.bytes();
                self.obtain(bytes).into_iter().collect()
            }
        };
        // They are unchanged since their last owner tagged them.
        buffers.iter().for_each(|buffer| self.check_owned(buffer));
        self.world.begin_or_end_call(self.number);
        match self.random.below(3) {
            0 => self.map_for(buffers, many, ToDevice, Held::Read),
            1 => self.map_for(buffers, many, FromDevice, Held::Write),
            _ => self.map_for(buffers, many, Bidirectional, Held::Both),
        }
        self.world.begin_or_end_call(self.number);
    }

    fn map_for<D: Direction>(
        &mut self,
        mut buffers: Vec<Buffer>,
        many: bool,
        direction: D,
        hold: impl Fn(Mapping<Buffer, D>) -> Held,
    ) {
        buffers.iter().for_each(|buffer| world::write_kind(buffer.memory(), Kind::Leaving));
        let asked = buffers.len();
        let mapped = if many {
            self.handle
                .map_many(buffers, direction)
                .map_err(|MapManyError { payloads, error, .. }| (payloads, error))
        } else {
            let Some(buffer) = buffers.pop() else { return };
            let mapped = match self.is_by_handle() {
                true => self.handle.map(buffer, direction),
                false => self.shared.domain.map(buffer, direction),
            };
            let refused = |MapError { payload, error }| (payload.into_iter().collect(), error);
            mapped.map(|mapping| vec![mapping]).map_err(refused)
        };
        match mapped {
            Ok(mappings) => mappings.into_iter().for_each(|mapping| self.publish(mapping, &hold)),
            Err((returned, error)) => self.refused(asked, returned, &error),
        }
    }

    fn publish<D: Direction>(
        &mut self,
        mapped: Mapping<Buffer, D>,
        hold: impl Fn(Mapping<Buffer, D>) -> Held,
    ) {
        let Some(slot) = self.free_slot() else { return };
        let (iova, pages) = (mapped.iova().start(), mapped.iova().len() / PAGE);
        let generation = self.world.next_generation();
        world::write(mapped.memory(), |page| Tag::mapped(at(iova, page), generation));
        let live = Live { slot, generation, iova, pages, access: D::ACCESS };
        self.world.publish(&live);
        self.world.counts.maps.fetch_add(1, Relaxed);
        let large = pages == 512 && iova.is_aligned(512 * PAGE);
        self.world.counts.large.fetch_add(u64::from(large), Relaxed);
        self.mapped.push((live, hold(mapped)));
    }

    pub(crate) fn refused(&mut self, asked: usize, returned: Vec<Buffer>, error: &BackendError) {
        match error {
            BackendError::Iova(_) => {}
            BackendError::Table(TableError::NoPages { .. }) => {
                self.world.counts.no_pages.fetch_add(1, Relaxed);
            }
            BackendError::MapNotFlushed { flush: WaitError::TimedOut { .. }, .. }
            | BackendError::RollbackIncomplete { flush: WaitError::TimedOut { .. }, .. } => {
                self.world.counts.late.fetch_add(1, Relaxed);
            }
            BackendError::MapNotFlushed { .. } | BackendError::RollbackIncomplete { .. }
                if self.shared.trouble == Trouble::Fails => {}
            error => self.world.catch(|| format!("an owner's map failed: {error}")),
        }
        // The domain drops what is missing when its late flush has completed.
        self.world.untagged.fetch_or(returned.len() < asked, Relaxed);
        // The part of the rest that was mapped was revoked and flushed: the owner has it again.
        returned.into_iter().for_each(|buffer| self.keep(buffer));
    }

    fn take(&mut self) -> Option<(Live, Held)> {
        if self.mapped.is_empty() {
            return None;
        }
        let (live, held) = self.mapped.swap_remove(self.random.index(self.mapped.len()));
        self.world.withdraw(live.slot);
        Some((live, held))
    }

    fn revoked(&mut self, held: Held) -> Revoked {
        let mapping = Unrevoked::from(held);
        match self.is_by_handle() {
            true => self.handle.revoke(mapping),
            false => mapping.revoke(),
        }
    }

    fn unmap(&mut self, (live, held): (Live, Held)) {
        let revoked = self.revoked(held);
        self.wait(live, revoked);
    }

    fn revoke(&mut self, (live, held): (Live, Held)) {
        let revoked = self.revoked(held);
        self.revoked.push((live, revoked));
    }

    fn revoke_many(&mut self) {
        let (lives, held): (Vec<_>, Vec<_>) = std::mem::take(&mut self.mapped).into_iter().unzip();
        lives.iter().for_each(|live: &Live| self.world.withdraw(live.slot));
        let mut revoked = Vec::new();
        match self.is_by_handle() {
            true => self.handle.revoke_many(held, &mut revoked),
            false => self.shared.domain.revoke_many(held, &mut revoked),
        }
        self.revoked.extend(lives.into_iter().zip(revoked));
    }

    fn wait(&mut self, live: Live, revoked: Revoked) {
        let limit = WaitLimit { time_ns: 1 + self.random.below(100_000), polls: u64::MAX };
        let outcome = match (self.is_by_handle(), self.random.one_in(4)) {
            (true, true) => self.handle.wait_for(revoked, limit),
            (true, false) => self.handle.wait(revoked),
            (false, true) => revoked.wait_for(limit),
            (false, false) => revoked.wait(),
        };
        self.waited(live, outcome);
    }

    /// Waits for all that is revoked, with one deadline.
    fn wait_all(&mut self) {
        let limit = WaitLimit { time_ns: 1 + self.random.below(100_000), polls: u64::MAX };
        let (lives, revoked): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.revoked).into_iter().unzip();
        let outcomes: Vec<_> = self.handle.wait_many_for(revoked, limit).collect();
        lives.into_iter().zip(outcomes).for_each(|(live, outcome)| self.waited(live, outcome));
    }

    fn waited(&mut self, live: Live, outcome: Result<Buffer, NotQuiesced<Buffer>>) {
        match outcome {
            Ok(buffer) => self.quiesced(&live, buffer),
            Err(NotQuiesced { revoked: Some(revoked), error }) if error.late_ticket().is_some() => {
                self.world.counts.late.fetch_add(1, Relaxed);
                self.revoked.push((live, revoked));
            }
            Err(error) => self.world.catch(|| format!("a wait failed: {error}")),
        }
    }

    /// The buffer is the owner's: from here on no device reaches it.
    pub(crate) fn quiesced(&mut self, live: &Live, buffer: Buffer) {
        let wrong = world::find(buffer.memory(), |page, found| {
            let here = at(live.iova, page);
            let written = live.access.contains(Access::WRITE) && found == Tag::device(here);
            written || found == Tag::mapped(here, live.generation)
        });
        if let Some(wrong) = wrong {
            self.world.catch(|| format!("{live:?} came back changed: (page, found) = {wrong:?}"));
        }
        self.keep(buffer);
    }

    /// Whether it is memory that stays mapped, which devices may write at any time.
    pub(crate) fn stays(&self, buffer: &Buffer) -> bool {
        buffer.fixed_iova(self.shared.domain.id()).is_some()
    }

    pub(crate) fn keep(&mut self, buffer: Buffer) {
        if self.stays(&buffer) {
            return;
        }
        world::write_kind(buffer.memory(), Kind::Owned);
        self.kept.push(buffer);
        if self.kept.len() > KEPT {
            // Back to the arena, for any owner to take.
            let buffer = self.kept.swap_remove(self.random.index(KEPT));
            self.check_owned(&buffer);
        }
    }

    /// Returns the first change in a buffer that its owner has tagged, or that is new.
    fn changed(buffer: &Buffer) -> Option<(u64, Tag)> {
        world::find_not(buffer.memory(), Kind::Owned).filter(|(_, found)| found.kind != Kind::Blank)
    }

    pub(crate) fn check_owned(&self, buffer: &Buffer) {
        if let Some(wrong) = Self::changed(buffer) {
            self.world
                .catch(|| format!("an owner's buffer was changed: (page, found) = {wrong:?}"));
        }
    }
}

pub(crate) fn at(iova: Iova, page: u64) -> Iova {
    Iova::new(iova.raw() + page * PAGE)
}

pub(crate) type Handle = DomainLocal;
pub(crate) type Revoked = pinfold_core::domain::Revoked<Buffer>;

/// A mapping of any direction.
pub(crate) enum Held {
    Read(Mapping<Buffer, ToDevice>),
    Write(Mapping<Buffer, FromDevice>),
    Both(Mapping<Buffer, Bidirectional>),
}

impl From<Held> for Unrevoked<Buffer> {
    fn from(held: Held) -> Self {
        match held {
            Held::Read(mapping) => mapping.into(),
            Held::Write(mapping) => mapping.into(),
            Held::Both(mapping) => mapping.into(),
        }
    }
}

/// Through what owners map, revoke and wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Through {
    /// The domain, which any thread may use.
    Domain,
    /// A handle of each owner, with windows of its own.
    Handles,
    /// Either, at random.
    Both,
    /// A request loop of each owner.
    Requests,
}

impl Through {
    pub(crate) fn is_by_handle(self, random: &mut Random) -> bool {
        match self {
            Self::Domain => false,
            Self::Handles | Self::Requests => true,
            Self::Both => random.one_in(2),
        }
    }
}

/// Mappings that owners have passed on, for any owner to take: live ones that no device may rely
/// on any more, and revoked ones.
#[derive(Default)]
pub(crate) struct Mail {
    mapped: Mutex<Vec<(Live, Held)>>,
    revoked: Mutex<Vec<(Live, Revoked)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mail {
    /// The most of each kind that is handed on.
    const ROOM: usize = 8;

    /// Hands a mapping on, or returns it if there is no room.
    pub(crate) fn send(&self, mapping: (Live, Held)) -> Option<(Live, Held)> {
        let mut mapped = lock(&self.mapped);
        if mapped.len() == Self::ROOM {
            return Some(mapping);
        }
        mapped.push(mapping);
        None
    }

    /// Hands a revoked mapping on, or returns it if there is no room.
    pub(crate) fn send_revoked(&self, one: (Live, Revoked)) -> Option<(Live, Revoked)> {
        let mut revoked = lock(&self.revoked);
        if revoked.len() == Self::ROOM {
            return Some(one);
        }
        revoked.push(one);
        None
    }

    pub(crate) fn take(&self) -> Option<(Live, Held)> {
        lock(&self.mapped).pop()
    }

    pub(crate) fn take_revoked(&self) -> Option<(Live, Revoked)> {
        lock(&self.revoked).pop()
    }
}
