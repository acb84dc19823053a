//! An owner that goes through a request loop: it begins requests of one buffer or two, and says at
//! random what has become of them; polls, waits, and checks every buffer that the loop returns.

use super::owner::{Owner, at};
use super::world::{self, Kind, Live, PAGE, Tag};
use pinfold::Buffer;
use pinfold::requests::{BeginError, End, Ended, Lent, Limits, Policy, Refusal, Requests, Token};
use pinfold::soft::Random;
use pinfold_core::access::Access;
use pinfold_core::domain::Domain;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const DEPTH: usize = world::LIVE / 2;

/// The loop of an owner, and its requests.
pub(crate) struct Loop {
    requests: Requests<Buffer, 2>,
    at_device: Vec<(Token, Vec<Live>)>,
    /// Their device has ended them; the loop has not returned them.
    ending: Vec<(Token, Vec<Live>)>,
    ended: Vec<Ended<Buffer, 2>>,
}

impl Loop {
    pub(crate) fn new(domain: &Domain, random: &mut Random) -> Self {
        let policy = random.pick(&[Policy::Strict, Policy::Revoke, Policy::Batch]);
        let flush = random.pick(&[
            Duration::from_micros(5),
            Duration::from_micros(200),
            Duration::from_secs(3600),
        ]);
        let limits = Limits { flush, ..Limits::default() };
        Self {
            requests: Requests::new(domain, policy, DEPTH, limits).unwrap(),
            at_device: Vec::new(),
            ending: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub(crate) fn uses(&self, slot: usize) -> bool {
        self.at_device.iter().flat_map(|(_, lives)| lives).any(|live| live.slot == slot)
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
            10 => {
                let limit = Duration::from_nanos(1 + self.random.below(100_000));
                self.by_loop.requests.wait(limit, &mut self.by_loop.ended);
            }
            _ => self.by_loop.requests.poll(&mut self.by_loop.ended),
        }
        self.returned();
    }

    /// Ends everything.
    pub(crate) fn end_loop(&mut self) {
        self.stop();
        while self.by_loop.requests.held() + self.by_loop.requests.late() > 0 {
            self.by_loop.requests.wait(Duration::from_millis(10), &mut self.by_loop.ended);
            self.returned();
        }
    }

    fn begin(&mut self) {
        // Each buffer of a request is published in a slot of its own.
        if self.by_loop.at_device.len() >= DEPTH {
            return;
        }
        let access = self.random.pick(&[Access::READ, Access::WRITE, Access::all()]);
        let mut parts = Vec::new();
        for _ in 0..1 + self.random.below(2) {
            let bytes = self.bytes();
            let Some(buffer) = self.obtain(bytes) else { break };
            // It is unchanged since its last owner tagged it.
            self.check_owned(&buffer);
            world::write_kind(buffer.memory(), Kind::Leaving);
            parts.push((buffer, access));
        }
        let asked = parts.len();
        self.world.begin_or_end_call(self.number);
        let begun = match (parts.pop(), parts.pop()) {
            (Some(one), Some(two)) => self.by_loop.requests.begin_lent([one, two]).map_err(split),
            (Some(one), None) => self.by_loop.requests.begin_lent([one]).map_err(split),
            _ => {
                self.world.begin_or_end_call(self.number);
                return;
            }
        };
        match begun {
            Ok(lent) => self.publish_request(lent, access),
            Err((returned, Refusal::Map { error, .. })) => self.refused(asked, returned, &error),
            Err((returned, Refusal::Depth { .. } | Refusal::Slots { .. })) => {
                if returned.len() < asked {
                    self.world.catch(|| "a full loop has kept a buffer".into());
                }
                returned.into_iter().for_each(|buffer| self.keep(buffer));
            }
            Err((_, refusal)) => self.world.catch(|| format!("a loop refused: {refusal}")),
        }
        self.world.begin_or_end_call(self.number);
    }

    fn publish_request(&mut self, lent: Lent<Buffer, 2>, access: Access) {
        let mut lives: Vec<Live> = Vec::new();
        for (segment, memory) in lent.pieces() {
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
        let token = self.by_loop.requests.take_back(lent).unwrap();
        self.by_loop.at_device.push((token, lives));
    }

    /// Takes a request whose device stops to work on it.
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
        let ended = self.by_loop.requests.refused(token).unwrap();
        self.by_loop.ended.push(ended);
    }

    /// Loses a request, whose device goes on with it, until the device is stopped.
    fn lose(&mut self) {
        if self.random.one_in(4)
            && let Some((token, _)) = self.by_loop.at_device.last()
        {
            // Lost already, perhaps.
            let _ = self.by_loop.requests.lost(*token);
        }
    }

    fn stop(&mut self) {
        for (token, lives) in std::mem::take(&mut self.by_loop.at_device) {
            lives.iter().for_each(|live| self.world.withdraw(live.slot));
            self.by_loop.ending.push((token, lives));
        }
        self.by_loop.requests.stopped();
    }

    /// Takes what the loop has returned: from here on no device reaches it.
    fn returned(&mut self) {
        for Ended { token, payloads, end } in std::mem::take(&mut self.by_loop.ended) {
            match end {
                End::Quiesced => {}
                End::Late(_) => {
                    self.world.counts.late.fetch_add(1, Relaxed);
                    continue;
                }
                End::Lost(error) => {
                    self.world.catch(|| format!("a request was lost: {error}"));
                    continue;
                }
            }
            let known = self.by_loop.ending.iter().position(|(ending, _)| *ending == token);
            let Some(known) = known else {
                self.world.catch(|| format!("{token} came back twice"));
                continue;
            };
            let (_, lives) = self.by_loop.ending.swap_remove(known);
            let buffers = payloads.into_iter().flatten();
            lives.iter().zip(buffers).for_each(|(live, buffer)| self.quiesced(live, buffer));
        }
    }
}

fn split<const M: usize>(error: BeginError<Buffer, M>) -> (Vec<Buffer>, Refusal) {
    (error.payloads.into_iter().flatten().collect(), error.refusal)
}
