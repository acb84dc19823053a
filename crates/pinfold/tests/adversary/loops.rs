//! An owner that goes through a request loop: it begins requests of none, one or two payloads, of
//! its own memory or of memory that stays mapped, and says at random what has become of them; polls,
//! waits, gives the loop up, and checks every buffer that the loop returns.

use super::owner::{Owner, Shared, at};
use super::round::{Careless, Trouble};
use super::world::{self, Kind, Live, PAGE, Tag};
use pinfold::Buffer;
use pinfold::requests::{
    BeginError, End, Ended, Lent, Limits, Policy, Refusal, Requests, Token, TokenError,
};
use pinfold::soft::Random;
use pinfold_core::access::Access;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const DEPTH: usize = world::LIVE / 2;

/// The loop of an owner, and its requests.
pub(crate) struct Loop {
    requests: Requests<Buffer, 2>,
    policy: Policy,
    at_device: Vec<(Token, Vec<Live>)>,
    /// Their device has ended them; the loop has not returned them.
    ending: Vec<(Token, Vec<Live>)>,
    ended: Vec<Ended<Buffer, 2>>,
    /// The slots of payloads that were quarantined with a loop before this one: they stay mapped,
    /// and live.
    quarantined: Vec<usize>,
}

impl Loop {
    pub(crate) fn new(shared: Shared<'_, '_>, random: &mut Random) -> Self {
        let policies = [Policy::Strict, Policy::Revoke, Policy::Batch, Policy::Static];
        let policies = if shared.whole.is_some() { &policies[..] } else { &policies[..3] };
        let policy = random.pick(policies);
        let flushes = [5, 200, 3_600_000_000].map(Duration::from_micros);
        // If no flush ends, the wait does not take an hour.
        let flushes = if shared.trouble == Trouble::Hangs { &flushes[..2] } else { &flushes[..] };
        let limits = Limits { flush: random.pick(flushes), ..Limits::default() };
        Self {
            requests: Requests::new(shared.domain, policy, DEPTH, limits).unwrap(),
            policy,
            at_device: Vec::new(),
            ending: Vec::new(),
            ended: Vec::new(),
            quarantined: Vec::new(),
        }
    }

    pub(crate) fn uses(&self, slot: usize) -> bool {
        self.quarantined.contains(&slot)
            || self.at_device.iter().flat_map(|(_, lives)| lives).any(|live| live.slot == slot)
    }
}

impl Owner<'_, '_> {
    pub(crate) fn step_by_loop(&mut self) {
        match self.random.below(12) {
            0..=4 => self.begin(),
            5..=7 => self.complete(),
            8 => self.refuse(),
            9 => self.lose(),
            10 if self.random.one_in(8) => self.stop(),
            10 if self.random.one_in(32) && self.shared.trouble == Trouble::Drops => {
                self.drop_loop()
            }
            10 => {
                let limit = Duration::from_nanos(1 + self.random.below(100_000));
                self.by_loop.requests.wait(limit, &mut self.by_loop.ended);
            }
            _ => self.by_loop.requests.poll(&mut self.by_loop.ended),
        }
        self.returned();
    }

    /// Whether the round is one in which loops are dropped, and this owner keeps slots enough.
    fn may_drop(&self) -> bool {
        self.shared.trouble == Trouble::Drops && self.by_loop.quarantined.len() <= world::LIVE / 2
    }

    /// Ends everything: where flushes end, all that the loop has comes back.
    pub(crate) fn end_loop(&mut self) {
        if self.may_drop() {
            self.begin();
            self.drop_loop();
        }
        self.stop();
        while self.by_loop.requests.held() + self.by_loop.requests.late() > 0 {
            self.by_loop.requests.wait(Duration::from_millis(10), &mut self.by_loop.ended);
            self.returned();
            if self.shared.trouble == Trouble::Hangs {
                // Late requests stay with the domain.
                return self.drop_loop();
            }
        }
    }

    /// Drops the loop with its requests. Payloads at the device, or lost, stay mapped for good; the
    /// domain drops the rest when its flush has completed.
    fn drop_loop(&mut self) {
        self.returned();
        let careless = self.shared.careless == Some(Careless::DropEnds);
        if careless {
            // Acts as a loop that revokes requests at the device.
            self.by_loop.requests.stopped();
        }
        self.world.untagged.store(true, Relaxed);
        let next = Loop::new(self.shared, &mut self.random);
        let Loop { requests, at_device, mut quarantined, .. } =
            std::mem::replace(&mut self.by_loop, next);
        drop(requests);
        let before = quarantined.len();
        let lives = at_device.into_iter().flat_map(|(_, lives)| lives);
        quarantined.extend(lives.map(|live| live.slot));
        let counts = &self.world.counts;
        counts.quarantined.fetch_add((quarantined.len() - before) as u64, Relaxed);
        self.by_loop.quarantined = quarantined;
    }

    /// Returns a buffer that stays mapped, if there is one.
    fn obtain_static(&mut self) -> Option<Buffer> {
        let pages = 1 + self.random.below(4);
        self.shared.whole?.alloc((pages * PAGE) as usize).ok()
    }

    /// Returns the payloads of a request, and the access of each.
    fn payloads(&mut self) -> Vec<(Buffer, Access)> {
        let is_static = self.by_loop.policy == Policy::Static;
        let mut payloads = Vec::new();
        for _ in 0..self.random.below(3) {
            let access = self.random.pick(&[Access::READ, Access::WRITE, Access::all()]);
            let stays = self.random.one_in(8) != is_static;
            if let Some(buffer) = if stays { self.obtain_static() } else { None } {
                payloads.push((buffer, access));
                continue;
            }
            let bytes = self.bytes();
            let Some(buffer) = self.obtain(bytes) else { break };
            // It is unchanged since its last owner tagged it.
            self.check_owned(&buffer);
            world::write_kind(buffer.memory(), Kind::Leaving);
            payloads.push((buffer, access));
        }
        payloads
    }

    fn begin(&mut self) {
        // Each buffer of a request is published in a slot of its own.
        let room = world::LIVE - self.by_loop.quarantined.len();
        if self.by_loop.at_device.len() >= DEPTH.min(room / 2) {
            return;
        }
        let mut payloads = self.payloads();
        let (asked, is_static) = (payloads.len(), self.by_loop.policy == Policy::Static);
        let stay: Vec<bool> = payloads.iter().map(|(buffer, _)| self.stays(buffer)).collect();
        let granted = |((_, access), stays): (&(Buffer, Access), &bool)| match stays {
            true => Access::all(),
            false => *access,
        };
        let granted: Vec<Access> = payloads.iter().zip(&stay).map(granted).collect();
        let all_stay = !stay.contains(&false);
        self.world.begin_or_end_call(self.number);
        let second = if asked == 2 { payloads.pop() } else { None };
        let requests = &mut self.by_loop.requests;
        let begun = match (payloads.pop(), second) {
            (Some(one), Some(two)) => requests.begin_lent([one, two]).map_err(split),
            (Some(one), None) => requests.begin_lent([one]).map_err(split),
            (None, _) => requests.begin_lent([]).map_err(split),
        };
        match begun {
            Ok(_) if is_static && !all_stay => {
                self.world.catch(|| "a static loop has mapped a buffer".into());
            }
            Ok(lent) => self.publish_request(lent, &granted),
            Err((returned, Refusal::Map { error, .. })) => self.refused(asked, returned, &error),
            Err((returned, Refusal::Depth { .. } | Refusal::Slots { .. })) => {
                self.unbegun(asked, returned);
            }
            Err((returned, Refusal::NotStatic { .. })) if is_static && !all_stay => {
                self.unbegun(asked, returned);
            }
            Err((_, refusal)) => self.world.catch(|| format!("a loop refused: {refusal}")),
        }
        self.world.begin_or_end_call(self.number);
    }

    /// Takes back all buffers of requests for which a loop had no room, or which it did not accept.
    fn unbegun(&mut self, asked: usize, returned: Vec<Buffer>) {
        if returned.len() < asked {
            self.world.catch(|| "a loop has kept a buffer that it refused".into());
        }
        returned.into_iter().for_each(|buffer| self.keep(buffer));
    }

    fn publish_request(&mut self, lent: Lent<Buffer, 2>, accesses: &[Access]) {
        let mixed = accesses.len() == 2 && accesses[0] != accesses[1];
        let mut lives: Vec<Live> = Vec::new();
        for ((segment, memory), access) in lent.pieces().zip(accesses.iter().copied()) {
            let slots = self.first_slot..self.first_slot + world::LIVE;
            let taken =
                |slot: usize| self.by_loop.uses(slot) || lives.iter().any(|live| live.slot == slot);
            let slot = slots.into_iter().find(|slot| !taken(*slot)).unwrap();
            let (iova, pages) = (segment.iova, segment.len / PAGE);
            let generation = self.world.next_generation();
            world::write(memory.unwrap(), |page| Tag::mapped(at(iova, page), generation));
            let live = Live { slot, generation, iova, pages, access };
            self.world.publish(&live);
            self.world.counts.maps.fetch_add(1, Relaxed);
            let large = pages == 512 && iova.is_aligned(512 * PAGE);
            self.world.counts.large.fetch_add(u64::from(large), Relaxed);
            lives.push(live);
        }
        let counts = &self.world.counts;
        counts.without_payloads.fetch_add(u64::from(lives.is_empty()), Relaxed);
        counts.mixed.fetch_add(u64::from(mixed), Relaxed);
        let token = self.by_loop.requests.take_back(lent).unwrap();
        self.by_loop.at_device.push((token, lives));
    }

    /// Takes a request on which its device stops working.
    fn take_request(&mut self) -> Option<(Token, Vec<Live>)> {
        let count = self.by_loop.at_device.len() as u64;
        let which = (count > 0).then(|| self.random.index(count as usize))?;
        let (token, lives) = self.by_loop.at_device.swap_remove(which);
        lives.iter().for_each(|live| self.world.withdraw(live.slot));
        Some((token, lives))
    }

    fn complete(&mut self) {
        let Some((token, lives)) = self.take_request() else { return };
        self.by_loop.requests.completed(token).unwrap();
        self.by_loop.ending.push((token, lives));
    }

    fn refuse(&mut self) {
        let Some((token, lives)) = self.take_request() else { return };
        self.by_loop.ending.push((token, lives));
        let refused = self.by_loop.requests.refused(token);
        if let Err(TokenError::Lost { .. }) = refused {
            // It was submitted: it ends otherwise.
            self.by_loop.requests.completed(token).unwrap();
        } else {
            self.by_loop.ended.push(refused.unwrap());
        }
    }

    /// Loses a request, whose device goes on with it until that has completed after all, or the
    /// device is stopped.
    fn lose(&mut self) {
        if !self.random.one_in(4) {
            return;
        }
        let Some((token, lives)) = self.by_loop.at_device.pop() else { return };
        // Lost already, perhaps.
        let _ = self.by_loop.requests.lost(token);
        if self.shared.careless == Some(Careless::LostEnds) {
            // Acts as a loop that revokes lost requests.
            self.by_loop.requests.completed(token).unwrap();
            self.by_loop.ending.push((token, lives));
        } else {
            self.by_loop.at_device.push((token, lives));
        }
    }

    fn stop(&mut self) {
        for (token, lives) in std::mem::take(&mut self.by_loop.at_device) {
            lives.iter().for_each(|live| self.world.withdraw(live.slot));
            self.by_loop.ending.push((token, lives));
        }
        self.by_loop.requests.stopped();
    }

    /// Takes buffers that the loop has returned: from here on no device reaches them.
    fn returned(&mut self) {
        for Ended { token, payloads, end } in std::mem::take(&mut self.by_loop.ended) {
            let is_lost = match end {
                End::Quiesced => false,
                End::Late(_) => {
                    self.world.counts.late.fetch_add(1, Relaxed);
                    continue;
                }
                // Its unit has failed. What does not come back is quarantined.
                End::Lost(_) if self.shared.trouble == Trouble::Fails => true,
                End::Lost(error) => {
                    self.world.catch(|| format!("a request was lost: {error}"));
                    continue;
                }
            };
            let known = self.by_loop.ending.iter().position(|(ending, _)| *ending == token);
            let Some(known) = known else {
                self.world.catch(|| format!("{token} came back twice"));
                continue;
            };
            let (_, lives) = self.by_loop.ending.swap_remove(known);
            self.world.counts.lost.fetch_add(u64::from(is_lost), Relaxed);
            for (live, payload) in lives.iter().zip(payloads) {
                match payload {
                    Some(buffer) => self.quiesced(live, buffer),
                    None if is_lost => {}
                    None => self.world.catch(|| format!("{token} came back without {live:?}")),
                }
            }
        }
    }
}

fn split<const M: usize>(error: BeginError<Buffer, M>) -> (Vec<Buffer>, Refusal) {
    (error.payloads.into_iter().flatten().collect(), error.refusal)
}
