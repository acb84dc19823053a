//! All kinds of calls by several owners in random order, against a set of live blocks, with iterators that use the pool.

use super::*;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

type Source = Arc<Heap>;
type Owned = Block<Source>;

/// What an iterator panics with.
struct Planned;

struct World {
    pool: Shared<DmaPool<Source>>,
    cell: Option<LocalCell<Source>>,
    locals: Vec<Local<Source>>,
    model: Model,
}

struct Model {
    size: u64,
    random: RefCell<Random>,
    /// Every live block, by its address, and whether it is raw.
    live: RefCell<BTreeMap<u64, bool>>,
    raws: RefCell<Vec<RawBlock>>,
    owned: RefCell<Vec<Owned>>,
    stale: RefCell<Vec<RawBlock>>,
    refused: Cell<usize>,
    peak: Cell<u64>,
}

impl Model {
    fn below(&self, n: usize) -> usize {
        self.random.borrow_mut().below(n)
    }

    /// Notes a block that was allocated.
    fn add(&self, pool: &DmaPool<Source>, block: RawBlock, raw: bool) {
        let at = block.iova().raw();
        let mut live = self.live.borrow_mut();
        let below = live.range(..at + self.size).next_back();
        assert!(below.is_none_or(|(&other, _)| other + self.size <= at), "a block given out twice");
        live.insert(at, raw);
        self.peak.set(self.peak.get().max(live.len() as u64));
        drop(live);
        let memory = pool.memory_of(block).unwrap();
        memory.copy_from_slice(0, &at.to_le_bytes()).unwrap();
        memory.copy_from_slice(memory.len() - 8, &at.to_le_bytes()).unwrap();
        if raw {
            self.raws.borrow_mut().push(block);
        }
    }

    /// Notes a block that is about to be freed.
    fn remove(&self, pool: &DmaPool<Source>, block: RawBlock) {
        let at = block.iova().raw();
        assert!(self.live.borrow_mut().remove(&at).is_some());
        let memory = pool.memory_of(block).unwrap();
        for place in [0, memory.len() - 8] {
            let mut bytes = [0; 8];
            memory.copy_to_slice(place, &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), at, "a block was written to by another's holder");
        }
        self.stale.borrow_mut().push(block);
    }

    fn take_owned(&self, pool: &DmaPool<Source>, most: usize, mode: usize) -> Vec<Owned> {
        let mut owned = self.owned.borrow_mut();
        if owned.is_empty() {
            return vec![];
        }
        let n = most.min(owned.len());
        let taken: Vec<_> = match mode {
            0 => owned.drain(..n).collect(),
            1 => {
                let at = owned.len() - n;
                owned.drain(at..).rev().collect()
            }
            _ => {
                let mut taken = vec![];
                for _ in 0..n {
                    let at = self.random.borrow_mut().below(owned.len());
                    taken.push(owned.swap_remove(at));
                }
                taken
            }
        };
        drop(owned);
        taken.iter().for_each(|block| self.remove(pool, block.as_raw()));
        taken
    }

    fn take_raws(&self, pool: &DmaPool<Source>, most: usize, mode: usize) -> Vec<RawBlock> {
        let mut raws = self.raws.borrow_mut();
        if mode == 0 {
            raws.sort_unstable_by_key(|block| block.iova());
        }
        let n = most.min(raws.len());
        let from = if raws.len() > n { self.random.borrow_mut().below(raws.len() - n) } else { 0 };
        let mut taken: Vec<_> = raws.drain(from..from + n).collect();
        if mode == 1 {
            taken.reverse();
        }
        drop(raws);
        taken.iter().for_each(|&block| self.remove(pool, block));
        taken
    }

    /// One of: a freed block that is not live, an owned one, a crooked address.
    fn wrong(&self) -> Option<RawBlock> {
        let (stale, live) = (self.stale.borrow(), self.live.borrow());
        let block = match self.below(3) {
            0 => *stale.get(self.below(stale.len().max(1)))?,
            1 => {
                let owned = self.owned.borrow();
                owned.get(self.below(owned.len().max(1)))?.as_raw()
            }
            _ => {
                let raws = self.raws.borrow();
                moved(*raws.get(self.below(raws.len().max(1)))?, [1, 8, -16, 1 << 22][self.below(4)])
            }
        };
        (live.get(&block.iova().raw()) != Some(&true)).then_some(block)
    }
}

impl World {
    fn new(heap: &Source, size: usize, seed: u64, watched: bool, maximum: Option<u64>) -> Self {
        let make = if watched { DmaPool::with_debug } else { DmaPool::new };
        let pool = Shared::new(make(Arc::clone(heap), "mixed", size, 0, 0).unwrap());
        if let Some(blocks) = maximum {
            pool.set_limits(Limits { minimum: blocks, maximum: blocks }).unwrap();
        }
        let locals = (0..3).map(|_| pool.local()).collect();
        let cell = Some(pool.local().into_cell());
        let model = Model {
            size: pool.block_size() as u64,
            random: RefCell::new(Random::new(seed)),
            live: RefCell::default(),
            raws: RefCell::default(),
            owned: RefCell::default(),
            stale: RefCell::default(),
            refused: Cell::new(0),
            peak: Cell::new(0),
        };
        Self { pool, cell, locals, model }
    }

    /// What an iterator does between two blocks.
    fn nested(&self, depth: usize) {
        let (model, cell) = (&self.model, self.cell.as_ref().unwrap());
        match model.below(24) {
            0 => self.note_owned(self.pool.alloc()),
            1 => self.note_owned(cell.alloc().map(LocalBlock::into_block)),
            2 => {
                let taken = model.take_owned(&self.pool, 1, 2);
                taken.into_iter().for_each(|block| cell.free(block));
            }
            3 => drop(model.take_owned(&self.pool, 1, 2)),
            4 => {
                if let Some(wrong) = model.wrong() {
                    assert!(self.pool.free_raw(wrong).is_err());
                }
            }
            5 => {
                // Blocks that drop in the middle of the call, some out of order.
                let mut blocks: Vec<_> = (0..model.below(40)).map_while(|_| cell.alloc().ok()).collect();
                let distinct: HashSet<_> = blocks.iter().map(LocalBlock::as_raw).collect();
                assert_eq!(distinct.len(), blocks.len());
                assert!(distinct.iter().all(|b| !model.live.borrow().contains_key(&b.iova().raw())));
                if !blocks.is_empty() {
                    let at = model.below(blocks.len());
                    blocks.swap_remove(at);
                }
            }
            6 => {
                for block in model.take_raws(&self.pool, 1, 2) {
                    self.pool.free_raw(block).unwrap();
                }
            }
            7 if depth < 3 => {
                let taken = model.take_owned(&self.pool, 20, 2);
                cell.free_many(taken.into_iter().inspect(|_| self.nested(depth + 1)));
            }
            8 if depth < 3 => {
                let taken = model.take_owned(&self.pool, 70, 0);
                self.pool.free_many(taken.into_iter().inspect(|_| self.nested(depth + 1)));
            }
            9 => _ = self.pool.stats(),
            10 if model.below(8) == 0 => _ = self.pool.shrink_shared(),
            11 if model.below(20) == 0 => resume_unwind(Box::new(Planned)),
            12 => drop(self.pool.local()),
            _ => {}
        }
    }

    fn note_owned(&self, block: Result<Owned, AllocError>) {
        if let Ok(block) = block {
            self.model.add(&self.pool, block.as_raw(), false);
            self.model.owned.borrow_mut().push(block);
        } else {
            self.model.refused.set(self.model.refused.get() + 1);
        }
    }

    fn planned(call: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
            assert!(panic.is::<Planned>(), "{:?}", panic.downcast_ref::<String>());
        }
    }

    fn step(&mut self) {
        let who = self.model.below(5);
        let n = 1 + self.model.below([3, 20, 70, 200][self.model.below(4)]);
        let mode = self.model.below(3);
        match self.model.below(16) {
            0..3 => {
                for _ in 0..n {
                    let block = match (who, self.locals.get_mut(who)) {
                        (_, Some(local)) => local.alloc(),
                        (3, _) => self.cell.as_ref().unwrap().alloc().map(LocalBlock::into_block),
                        _ => self.pool.alloc(),
                    };
                    self.note_owned(block);
                }
            }
            3 => {
                for _ in 0..n {
                    let block = match self.locals.get_mut(who) {
                        Some(local) => local.alloc_raw(),
                        None => self.pool.alloc_raw(),
                    };
                    block.into_iter().for_each(|block| self.model.add(&self.pool, block, true));
                }
            }
            4 => {
                let mut slots = vec![None; n];
                match self.locals.get_mut(who) {
                    Some(local) => _ = local.fill(&mut slots),
                    None => _ = self.pool.fill_all(&mut slots),
                }
                slots.into_iter().flatten().for_each(|block| self.model.add(&self.pool, block, true));
            }
            5 => {
                let at = who % 3;
                let local = &mut self.locals[at];
                let Ok(run) = local.alloc_run(NonZeroUsize::new(n).unwrap()) else { return };
                run.iter().for_each(|block| self.model.add(&self.pool, block, true));
                if mode == 0 {
                    let other = &mut self.locals[(at + 1) % 3];
                    run.iter().for_each(|block| self.model.remove(&self.pool, block));
                    self.model.raws.borrow_mut().retain(|block| !run.iter().any(|other| other == *block));
                    other.free_run(run).unwrap();
                    assert_eq!(other.free_run(run).unwrap_err().freed, 0);
                }
            }
            6 => {
                for block in self.model.take_owned(&self.pool, n, mode) {
                    match (who, self.locals.get_mut(who)) {
                        (_, Some(local)) => local.free(block),
                        (3, _) => self.cell.as_ref().unwrap().free(block),
                        _ => drop(block),
                    }
                }
            }
            7 => {
                for block in self.model.take_raws(&self.pool, n, mode) {
                    match self.locals.get_mut(who) {
                        Some(local) => local.free_raw(block).unwrap(),
                        None => self.pool.free_raw(block).unwrap(),
                    }
                }
            }
            8..11 => {
                let taken = self.model.take_owned(&self.pool, n, mode);
                // The owner is not in use while the iterator runs: it may use the cell and the pool.
                let mut local = (who < 3).then(|| self.locals.swap_remove(who));
                let world = &*self;
                let blocks = taken.into_iter().inspect(|_| world.nested(0));
                Self::planned(|| match (who, &mut local) {
                    (_, Some(local)) => local.free_many(blocks),
                    (3, _) => world.cell.as_ref().unwrap().free_many(blocks),
                    _ => world.pool.free_many(blocks),
                });
                self.locals.extend(local);
            }
            11..13 => {
                let mut taken = self.model.take_raws(&self.pool, n, mode);
                let wrong =
                    self.model.wrong().filter(|wrong| who.is_multiple_of(2) && !taken.contains(wrong));
                let at = wrong.map(|wrong| {
                    let at = self.model.below(taken.len() + 1);
                    taken.insert(at, wrong);
                    at
                });
                let slots = self.model.below(2) == 0;
                let mut local = self.locals.get_mut(who);
                let mut free = |blocks: &[RawBlock]| {
                    let mut all: Vec<_> = blocks.iter().copied().map(Some).collect();
                    match (&mut local, slots) {
                        (Some(local), true) => local.free_slots(&mut all),
                        (Some(local), false) => local.free_bulk(blocks),
                        (None, true) => self.pool.free_slots(&mut all),
                        (None, false) => self.pool.free_bulk(blocks),
                    }
                };
                match at {
                    Some(at) => {
                        assert_eq!(free(&taken).unwrap_err().freed, at);
                        free(&taken[at + 1..]).unwrap();
                    }
                    None => free(&taken).unwrap(),
                }
            }
            13 => {
                for _ in 0..3 {
                    let Some(wrong) = self.model.wrong() else { continue };
                    match self.locals.get_mut(who) {
                        Some(local) => assert!(local.free_raw(wrong).is_err()),
                        None => assert!(self.pool.free_raw(wrong).is_err()),
                    }
                }
            }
            14 => match who {
                0..3 if mode == 0 => self.locals[who] = self.pool.local(),
                3 if mode == 0 => {
                    let local = self.cell.take().unwrap().into_local();
                    self.cell = Some(if n.is_multiple_of(2) { self.pool.local() } else { local }.into_cell());
                }
                _ => _ = self.pool.shrink_shared(),
            },
            _ => {
                // An owned block turns into a raw one.
                let block = self.model.owned.borrow_mut().pop();
                if let Some(block) = block {
                    let raw = block.into_raw();
                    self.model.live.borrow_mut().insert(raw.iova().raw(), true);
                    self.model.raws.borrow_mut().push(raw);
                }
            }
        }
    }

    fn check(&mut self) {
        let live = self.model.live.borrow().len() as u64;
        let stats = self.pool.stats();
        assert_eq!(stats.in_use, live);
        assert_eq!(stats.in_use + stats.in_magazines + stats.in_rows + stats.in_depot, stats.blocks);
        assert_eq!((stats.late_double_frees, stats.damaged), (0, 0));
        assert!(stats.high_water >= live);
        let owners = self.locals.len() as u64 + 2;
        let chunk = (2 << 20) / stats.block_bytes;
        assert!(stats.blocks <= 2 * self.model.peak.get() + 10_336 * owners + chunk);
        let local = self.cell.take().unwrap().into_local();
        self.locals.push(local);
        super::model::audit(&self.pool, &self.locals);
        self.cell = self.locals.pop().map(Local::into_cell);
        let mut stale = self.model.stale.borrow_mut();
        let keep = stale.len().saturating_sub(200);
        stale.drain(..keep);
        drop(stale);
        // So that the pool does not fill up for ever.
        if live > 5_000 || self.model.refused.take() > 200 {
            let owned = self.model.take_owned(&self.pool, 4_000, 2);
            self.pool.free_many(owned);
            let raws = self.model.take_raws(&self.pool, 4_000, 2);
            self.pool.free_bulk(&raws).unwrap();
        }
    }

    fn end(self) {
        let Self { pool, cell, locals, model } = self;
        drop((cell, locals));
        let mut local = pool.local();
        local.free_many(model.owned.take());
        local.free_bulk(&model.raws.take()).unwrap();
        drop(local);
        let mut pool = pool.try_into_inner().unwrap();
        pool.set_limits(Limits::default()).unwrap();
        let stats = pool.stats();
        assert_eq!((stats.in_use, pool.depot.reported_in_use(), stats.late_double_frees), (0, 0, 0));
        let mut seen = 0;
        pool.for_each_block(|_, _| seen += 1);
        assert_eq!(seen, stats.blocks);
        assert_eq!(pool.shrink(), stats.bytes, "blocks were lost");
        pool.destroy().unwrap();
    }
}

#[test]
fn owners_agree_with_a_set_of_live_blocks_in_calls_of_all_kinds() {
    let seconds = std::env::var("MIXED_SECONDS").ok().and_then(|text| text.parse().ok());
    let started = std::time::Instant::now();
    let mut rounds = 0;
    for seed in 1.. {
        let rounds_left = match seconds {
            Some(seconds) => started.elapsed().as_secs() < seconds,
            None => seed <= if cfg!(miri) { 1 } else { 12 },
        };
        if !rounds_left {
            break;
        }
        for (size, watched) in
            [(64, false), (96, false), (100, false), (4096, false), (12_288, false), (64, true)]
        {
            let maximum = [None, Some(300), Some(1_500)][usize::try_from(seed % 3).unwrap()];
            let heap = Arc::new(Heap::new(32 << 20));
            let mut world = World::new(&heap, size, seed * 7919 + size as u64, watched, maximum);
            for step in 0..if watched { 100 } else { 400 } {
                world.step();
                if step % 20 == 19 {
                    world.check();
                }
            }
            world.end();
            assert_eq!(heap.frames_taken(), 0);
            rounds += 1;
        }
    }
    println!("{rounds} worlds");
}
