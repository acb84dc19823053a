//! The memory of payloads: an event loop's share of the arena, never exceeded.

use super::error::ServeError;
use crate::setup::stack;
use crate::units::ByteSize;
use pinfold::{ArenaLocal, ArenaMemory, Buffer};
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

/// The largest buffer. Longer payloads take several, so that a write starts at the target before
/// all of it has arrived.
pub(crate) const PIECE: usize = 256 << 10;
/// A frame: the smallest buffer.
pub(crate) const PAGE: usize = 4096;
/// The number of pages allocated in bulk.
const PAGES: usize = 64;

/// Returns how much memory the buffers for `bytes` bytes take.
pub(crate) fn rounded(bytes: usize) -> usize {
    match bytes % PIECE {
        0 => bytes,
        rest => bytes - rest + rest.next_multiple_of(PAGE).next_power_of_two(),
    }
}

/// The memory of one event loop's payloads.
///
/// Pages are kept in an array: a request empties slots, and one bulk call fills those that are
/// empty. Larger buffers come from the arena one by one.
pub(crate) struct Payloads {
    arena: ArenaMemory,
    local: ArenaLocal,
    pages: [Option<Buffer>; PAGES],
    /// The slots from here on are empty.
    full: usize,
    budget: usize,
    used: usize,
    /// Bytes that count as used for ever.
    lost: usize,
}

impl Payloads {
    /// Creates the share of an event loop: at most `budget` bytes of `arena` at any time.
    pub(crate) fn new(arena: &ArenaMemory, budget: usize) -> Self {
        let pages = [const { None }; PAGES];
        Self {
            arena: arena.clone(),
            local: arena.local(),
            pages,
            full: 0,
            budget,
            used: 0,
            lost: 0,
        }
    }

    /// Takes a buffer for `bytes` bytes, at most [`PIECE`], for a client that has `held` bytes
    /// already: a smaller one where its share is less or the arena is fragmented; `None` if memory
    /// must be returned first. The contents are undefined.
    pub(crate) fn take(&mut self, bytes: usize, held: usize) -> Option<Buffer> {
        let share = self.share(held);
        let mut wanted = rounded(bytes.clamp(1, PIECE));
        loop {
            let fits = wanted <= share;
            if let Some(buffer) = fits.then(|| self.allocate(wanted)).flatten() {
                self.used += buffer.len();
                return Some(buffer);
            }
            if wanted == PAGE {
                return None;
            }
            wanted /= 2;
        }
    }

    fn allocate(&mut self, bytes: usize) -> Option<Buffer> {
        if bytes > PAGE {
            return self.arena.alloc(bytes).ok();
        }
        if self.full == 0 {
            self.full = self.local.fill(&mut self.pages);
            // A partial fill fills the first empty slots: all were empty.
        }
        self.full = self.full.checked_sub(1)?;
        self.pages.get_mut(self.full)?.take()
    }

    /// Returns a buffer.
    pub(crate) fn put(&mut self, buffer: Buffer) {
        self.used = self.used.saturating_sub(buffer.len());
        match self.pages.get_mut(self.full) {
            Some(slot) if buffer.len() == PAGE => {
                *slot = Some(buffer);
                self.full += 1;
            }
            _ => self.local.free(buffer),
        }
    }

    /// Records that buffers of `bytes` bytes will not return: a controller may still reach them.
    pub(crate) fn lose(&mut self, bytes: usize) {
        self.lost += bytes;
    }

    /// Returns how many bytes a client that holds `held` may take now: so many that afterwards as
    /// much is free as it holds. Alone it gets nearly half of the budget, and the next one finds as
    /// much, however long the others keep theirs.
    ///
    /// One that holds nothing gets a page as long as there is any; an eighth of the budget is for
    /// that.
    pub(crate) fn share(&self, held: usize) -> usize {
        let free = self.budget.saturating_sub(self.used);
        let share = free.saturating_sub(self.budget / 8 / PAGE * PAGE).saturating_sub(held) / 2;
        if held == 0 { share.max(PAGE).min(free) } else { share }
    }

    /// Returns how many bytes there are for all clients.
    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    /// Returns whether all memory is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.budget.saturating_sub(self.lost) < PAGE
    }

    /// Returns how many bytes are out.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used
    }
}

// The number of threads of a server, and its memory: both follow from one budget for the whole
// server.

/// The budget of a machine with enough memory.
const USUAL: u64 = 64 << 20;
/// The part of the available memory that it is at most, unless the user asks for more.
const PART: u64 = 8;
/// The memory of a thread: fewer threads than processors are started where the budget does not have
/// that for each.
const THREAD: u64 = 4 << 20;
/// The least memory of a thread.
const LEAST: u64 = 2 << 20;
/// The part of the lockable memory that a driver needs for its queues.
const QUEUES: u64 = 6 << 20;

/// The longest request on any machine, which is what a client assumes that is told nothing ("Block
/// size constraints"). One for which there is less memory is served in parts.
pub(crate) const MAX_PAYLOAD: u32 = 32 << 20;

/// The resources of the machine that a server may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// The number of threads that can run at the same time.
    pub(crate) processors: usize,
    /// The memory that is available to this process, bytes.
    pub(crate) memory: u64,
    /// The part of it that may be locked, for a device that reaches it through an IOMMU; `None`
    /// without a limit.
    pub(crate) lockable: Option<u64>,
}

impl Machine {
    /// Returns this machine.
    pub(crate) fn here() -> Self {
        let lifted = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
        let lockable = if lifted { None } else { getrlimit(Resource::Memlock).current };
        let processors = std::thread::available_parallelism().map_or(1, Into::into);
        Self { processors, memory: stack::allowed(), lockable }
    }
}

/// The options of the user, and the target.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Asked {
    /// `--buffers`.
    pub(crate) buffers: Option<ByteSize>,
    /// `--threads`.
    pub(crate) threads: Option<usize>,
    /// The most queues that the target has, if that is known.
    pub(crate) queues: Option<usize>,
    /// Whether a device of this machine has to reach the memory.
    pub(crate) locks: bool,
}

/// The threads of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// The number of threads.
    pub(crate) threads: usize,
    /// The payload memory of each, bytes.
    pub(crate) budget: usize,
}

impl Plan {
    /// Plans a server on `machine`.
    ///
    /// # Errors
    /// [`ServeError::Buffers`].
    pub(crate) fn new(asked: Asked, machine: Machine) -> Result<Self, ServeError> {
        let Asked { buffers, threads, queues, locks } = asked;
        let lockable =
            machine.lockable.filter(|_| locks).map_or(u64::MAX, |most| most.saturating_sub(QUEUES));
        let usual = USUAL.min(machine.memory / PART).min(lockable);
        let total = buffers.map_or_else(
            || usual.max(LEAST.saturating_mul(threads.unwrap_or(1) as u64)),
            |ByteSize(asked)| asked,
        );
        let fitting = usize::try_from(total / THREAD).unwrap_or(usize::MAX);
        let most = machine.processors.min(fitting).min(queues.unwrap_or(usize::MAX));
        let threads = threads.unwrap_or(most).max(1);
        let needed = LEAST.saturating_mul(threads as u64);
        let budget = usize::try_from(total / threads as u64).ok().filter(|_| total >= needed);
        let budget = budget.ok_or(ServeError::Buffers { asked: total, threads, needed })?;
        Ok(Self { threads, budget })
    }
}

// Places that are reused, with a generation that tells the present occupant from earlier ones.

/// The number of a place, and its generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// Returns the key as one word, for interfaces that carry one.
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Returns the key of a word from [`to_word`](Self::to_word).
    pub(crate) fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Self {
            index: u32::from_le_bytes([a, b, c, d]),
            generation: u32::from_le_bytes([e, f, g, h]),
        }
    }
}

/// Places for values. A key of a value that was removed finds nothing, even when its place has a
/// new occupant.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<(u32, Option<T>)>,
    vacant: Vec<u32>,
    /// Places that are not used again: one more value, and a key of the first would find it.
    retired: usize,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { places: Vec::new(), vacant: Vec::new(), retired: 0 }
    }
}

impl<T> Slab<T> {
    /// Inserts a value. O(1) amortised.
    pub(crate) fn insert(&mut self, value: T) -> Key {
        self.insert_with(|_| value)
    }

    /// Inserts a value that knows its key. O(1) amortised.
    pub(crate) fn insert_with(&mut self, create: impl FnOnce(Key) -> T) -> Key {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
        });
        let place = self.places.get_mut(index as usize);
        let key = Key { index, generation: place.as_ref().map_or(0, |place| place.0) };
        if let Some(place) = place {
            place.1 = Some(create(key));
        }
        key
    }

    /// Returns the value of a key.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, value) = self.places.get_mut(key.index as usize)?;
        value.as_mut().filter(|_| *generation == key.generation)
    }

    /// Removes the value of a key.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, value) = self.places.get_mut(key.index as usize)?;
        let value = value.take_if(|_| *generation == key.generation)?;
        match generation.checked_add(1) {
            Some(next) => {
                *generation = next;
                self.vacant.push(key.index);
            }
            None => self.retired += 1,
        }
        Some(value)
    }

    /// Returns how many values there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.vacant.len() - self.retired
    }

    /// Returns the keys of all values. O(places).
    pub(crate) fn keys(&self) -> Vec<Key> {
        let occupied = self.places.iter().zip(0u32..).filter(|((_, value), _)| value.is_some());
        occupied.map(|((generation, _), index)| Key { index, generation: *generation }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::{Arena, Source};

    #[test]
    fn the_budget_is_never_exceeded_and_comes_back() {
        let arena = Arena::builder().size(16 << 20).source(Source::Plain).build_unmapped().unwrap();
        let mut payloads = Payloads::new(&arena, 4 << 20);
        let mut out = Vec::new();
        for bytes in [1, 4096, 4097, 100_000, PIECE, PIECE + 1, 1 << 30] {
            let buffer = payloads.take(bytes, 0).unwrap();
            assert_eq!(buffer.len(), bytes.min(PIECE).next_power_of_two().max(PAGE));
            out.push(buffer);
        }
        // Clients that hold nothing take the rest of the budget in smaller buffers, and then
        // nothing.
        while let Some(buffer) = payloads.take(PIECE, 0) {
            out.push(buffer);
        }
        assert_eq!((payloads.used(), out.iter().map(Buffer::len).sum()), (4 << 20, 4 << 20));
        assert!(payloads.take(1, 0).is_none());
        out.drain(..).for_each(|buffer| payloads.put(buffer));
        assert_eq!(payloads.used(), 0);
        for _ in 0..3 {
            out.extend((0..1024).map(|_| payloads.take(PAGE, 0).unwrap()));
            assert!(payloads.take(1, 0).is_none());
            out.drain(..).for_each(|buffer| payloads.put(buffer));
        }
        drop(payloads);
        assert_eq!(arena.stats().frames_in_use, 0);
    }

    /// Some memory is left for the next client, however many keep theirs.
    #[test]
    fn the_next_client_finds_memory_however_many_there_are() {
        let arena = Arena::builder().size(16 << 20).source(Source::Plain).build_unmapped().unwrap();
        let mut payloads = Payloads::new(&arena, 8 << 20);
        let mut out = Vec::new();
        for clients in 1..200 {
            let mut held = vec![0; clients];
            // Each takes all that it can, one after the other.
            while {
                let before = out.len();
                for held in &mut held {
                    if let Some(buffer) = payloads.take(PIECE, *held) {
                        *held += buffer.len();
                        out.push(buffer);
                    }
                }
                out.len() > before
            } {}
            let next = payloads.take(PIECE, 0).unwrap();
            assert!(clients > 4 || next.len() >= 128 << 10, "{clients}: {next:?}");
            out.push(next);
            out.drain(..).for_each(|buffer| payloads.put(buffer));
        }
    }

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn plan(
        asked: Asked,
        processors: usize,
        memory: u64,
        lockable: Option<u64>,
    ) -> Result<(usize, u64), u64> {
        match Plan::new(asked, Machine { processors, memory, lockable }) {
            Ok(Plan { threads, budget }) => Ok((threads, budget as u64)),
            Err(ServeError::Buffers { needed, .. }) => Err(needed),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn the_defaults_hold_on_every_machine() {
        let (usual, device) = (Asked::default(), Asked { locks: true, ..Asked::default() });
        for (processors, threads) in [(1, 1), (2, 2), (8, 8), (16, 16), (64, 16), (256, 16)] {
            let each = 64 * MIB / threads as u64;
            assert_eq!(plan(usual, processors, 8 * GIB, Some(8 * MIB)), Ok((threads, each)));
            assert_eq!(plan(usual, processors, 512 * MIB, Some(8 * MIB)), Ok((threads, each)));
            assert_eq!(plan(device, processors, 8 * GIB, None), Ok((threads, each)));
            // 2 MiB of the 8 that may be locked, less than a thread usually has.
            assert_eq!(plan(device, processors, 8 * GIB, Some(8 * MIB)), Ok((1, 2 * MIB)));
            let queues = Some(3);
            let (threads, each) =
                plan(Asked { queues, ..usual }, processors, 8 * GIB, None).unwrap();
            assert_eq!((threads, each), (processors.min(3), 64 * MIB / threads as u64));
        }
        for processors in [1, 2, 8, 16, 64, 256] {
            for memory in [0, MIB, 32 * MIB, 100 * MIB, 512 * MIB, GIB, u64::MAX] {
                for lockable in [None, Some(0), Some(64 << 10), Some(8 * MIB), Some(u64::MAX)] {
                    for asked in [usual, device] {
                        let (threads, each) = plan(asked, processors, memory, lockable).unwrap();
                        assert!((1..=processors).contains(&threads) && each >= LEAST);
                        let total = threads as u64 * each;
                        assert!(
                            total <= USUAL && (total <= memory / PART || total == LEAST),
                            "{total}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn requested_sizes_are_used_or_refused() {
        let asked = |buffers: Option<u64>, threads| Asked {
            buffers: buffers.map(ByteSize),
            threads,
            ..Asked::default()
        };
        for processors in [1, 2, 64, 256] {
            let plan = |buffers, threads| {
                plan(asked(buffers, threads), processors, 512 * MIB, Some(8 * MIB))
            };
            assert_eq!(plan(None, Some(2)), Ok((2, 32 * MIB)));
            assert_eq!(plan(None, Some(256)), Ok((256, 2 * MIB)));
            assert_eq!(plan(Some(2 * MIB), None), Ok((1, 2 * MIB)));
            assert_eq!(
                plan(Some(8 * MIB), None),
                Ok((processors.min(2), 8 * MIB / processors.min(2) as u64))
            );
            assert_eq!(plan(Some(2 * MIB - 1), None), Err(2 * MIB));
            assert_eq!(plan(Some(4 * MIB - 1), Some(2)), Err(4 * MIB));
            assert_eq!(plan(Some(4 * MIB), Some(2)), Ok((2, 2 * MIB)));
        }
    }

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.remove(a), slab.remove(a), slab.len()), (Some('a'), None, 1));
        let c = slab.insert('c');
        assert_eq!((c.index, slab.get_mut(a)), (a.index, None));
        assert_eq!(slab.get_mut(c), Some(&mut 'c'));
        assert_eq!(slab.keys(), [c, b]);
        assert_eq!(Key::from_word(c.to_word()), c);
    }

    #[test]
    fn a_place_of_which_all_keys_were_given_is_retired() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        slab.places[0].0 = u32::MAX;
        let last = Key { generation: u32::MAX, ..first };
        assert_eq!((slab.remove(last), slab.remove(last), slab.len()), (Some('a'), None, 0));
        let next = slab.insert('b');
        assert_eq!((next, slab.len()), (Key { index: 1, generation: 0 }, 1));
        assert!(slab.get_mut(first).is_none() && slab.get_mut(last).is_none());
        assert_eq!(
            (slab.keys(), slab.remove(next), slab.insert('c').index),
            (vec![next], Some('b'), 1)
        );
    }
}
