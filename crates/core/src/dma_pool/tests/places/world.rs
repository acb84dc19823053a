//! One thread's pool, and all that it holds of it, against a set of live blocks.

mod wrong;

use super::*;

/// What an iterator or the source panics with.
struct Planned;

std::thread_local! {
    /// What the sources of this thread call back.
    pub(super) static WORLD: Cell<Option<&'static World>> = const { Cell::new(None) };
}

type Local_ = Local<Patchy>;
pub(super) type Owned = Block<Patchy>;
type Pinned = LocalBlock<'static, Patchy>;
type CellOf = &'static LocalCell<Patchy>;

/// One thread's pool and all that it holds of it. Each field is borrowed for one line at a time: the source's calls come back here.
pub(super) struct World {
    pool: Shared<DmaPool<Patchy>>,
    cells: [CellOf; 2],
    locals: RefCell<Vec<Local_>>,
    random: RefCell<Random>,
    /// By address.
    live: RefCell<HashSet<u64>>,
    pinned: RefCell<Vec<Pinned>>,
    owned: RefCell<Vec<Owned>>,
    raws: RefCell<Vec<RawBlock>>,
    stale: RefCell<Vec<RawBlock>>,
    /// Whether a chunk is being acquired, or limits are set: no alloc may need a chunk.
    growing: Cell<bool>,
    /// The cell for which a chunk is acquired.
    asks: Cell<Option<usize>>,
    /// A call has allocated blocks that are not noted yet.
    filling: Cell<bool>,
    depth: Cell<usize>,
    may_panic: Cell<bool>,
    nested: Cell<usize>,
    reentrant: Cell<usize>,
}

impl World {
    fn below(&self, n: usize) -> usize {
        self.random.borrow_mut().below(n)
    }

    fn add(&self, block: RawBlock) {
        let at = block.iova().raw();
        assert!(self.live.borrow_mut().insert(at), "a block given out twice");
        let memory = self.pool.memory_of(block).unwrap();
        memory.copy_from_slice(0, &at.to_le_bytes()).unwrap();
        memory.copy_from_slice(memory.len() - 8, &at.to_le_bytes()).unwrap();
        let offset = usize::try_from(at - IOVA).unwrap();
        assert!(self.pool.source().has_taken(offset), "a block of a chunk that was released");
        assert!(self.pool.source().has_taken(offset + memory.len() - 1));
    }

    fn remove(&self, block: RawBlock) {
        let at = block.iova().raw();
        assert!(self.live.borrow_mut().remove(&at));
        let memory = self.pool.memory_of(block).unwrap();
        for place in [0, memory.len() - 8] {
            let mut bytes = [0; 8];
            memory.copy_to_slice(place, &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), at, "a block of two holders");
        }
        let mut stale = self.stale.borrow_mut();
        if stale.len() > 300 {
            stale.swap_remove(0);
        }
        stale.push(block);
    }

    fn pick<T>(&self, from: &RefCell<Vec<T>>, mode: usize) -> Option<T> {
        let mut from = from.borrow_mut();
        let at = match mode {
            0 => from.len().checked_sub(1)?,
            1 => 0,
            _ => self.random.borrow_mut().below(from.len().max(1)),
        };
        (at < from.len()).then(|| from.remove(at))
    }

    fn take_owned(&self, n: usize, mode: usize) -> Vec<Owned> {
        let taken: Vec<_> = (0..n).map_while(|_| self.pick(&self.owned, mode)).collect();
        taken.iter().for_each(|block| self.remove(block.as_raw()));
        taken
    }

    /// Allocs by a cell, also from inside the `acquire` for it.
    fn alloc_pinned(&self, which: usize) {
        let before = (self.growing.get(), self.asks.get());
        assert!(!before.0 || before.1 == Some(which));
        self.asks.set(Some(which));
        let block = self.cells[which].alloc();
        self.asks.set(before.1);
        match block {
            Ok(block) => {
                self.add(block.as_raw());
                self.pinned.borrow_mut().push(block);
            }
            Err(AllocError::Reentrant) => {
                assert!(before.0);
                self.reentrant.set(self.reentrant.get() + 1);
            }
            Err(error) => assert!(!before.0, "{error}"),
        }
    }

    /// A call that allocates nothing.
    fn free_something(&self) {
        let (n, mode, which) = (1 + self.below(30), self.below(3), self.below(2));
        let cell = self.cells[which];
        match self.below(15) {
            0 | 1 => {
                for _ in 0..n {
                    let Some(block) = self.pick(&self.pinned, mode) else { break };
                    self.remove(block.as_raw());
                    drop(block);
                }
            }
            2 => {
                if let Some(block) = self.pick(&self.pinned, mode) {
                    let block = block.into_block();
                    self.owned.borrow_mut().push(block);
                }
            }
            3 => {
                if let Some(block) = self.pick(&self.pinned, mode) {
                    let raw = block.into_raw();
                    self.raws.borrow_mut().push(raw);
                }
            }
            4 => self.take_owned(n, mode).into_iter().for_each(|block| cell.free(block)),
            5 => self.take_owned(n, mode).into_iter().for_each(drop),
            6 if self.depth.get() < 3 => {
                let taken = self.take_owned(n, mode);
                self.planned(|| cell.free_many(taken.into_iter().inspect(|_| self.between())));
            }
            7 if self.depth.get() < 3 => {
                let taken = self.take_owned(3 * n, mode);
                self.planned(|| self.pool.free_many(taken.into_iter().inspect(|_| self.between())));
            }
            8 => {
                for _ in 0..n {
                    let Some(raw) = self.pick(&self.raws, mode) else { break };
                    self.remove(raw);
                    assert_eq!(self.pool.free_raw(raw), Ok(()));
                }
            }
            9 => {
                let Some(mut local) = self.pick(&self.locals, 2) else { return };
                for _ in 0..n {
                    if let Some(raw) = self.pick(&self.raws, mode) {
                        self.remove(raw);
                        assert_eq!(local.free_raw(raw), Ok(()));
                    }
                    self.take_owned(1, mode).into_iter().for_each(|block| local.free(block));
                }
                self.locals.borrow_mut().push(local);
            }
            10 => self.wrong_frees(),
            11 => {
                // What one owner has moves to the depot.
                let local = self.pool.local();
                let old = self.pick(&self.locals, 2);
                self.locals.borrow_mut().push(local);
                drop(old);
            }
            12 if self.below(4) == 0 => {
                let may_panic = self.may_panic.replace(false);
                self.pool.shrink_shared();
                self.may_panic.set(may_panic);
            }
            13 => {
                let stats = self.pool.stats();
                assert_eq!(stats.in_use + stats.in_magazines + stats.in_rows + stats.in_depot, stats.blocks);
            }
            _ => {
                let raws: Vec<_> = (0..n).map_while(|_| self.pick(&self.raws, mode)).collect();
                raws.iter().for_each(|&raw| self.remove(raw));
                match self.pick(&self.locals, 2) {
                    Some(mut local) => {
                        assert_eq!(local.free_bulk(&raws), Ok(()));
                        self.locals.borrow_mut().push(local);
                    }
                    None => assert_eq!(self.pool.free_bulk(&raws), Ok(())),
                }
            }
        }
    }

    /// Between two blocks of an iterator.
    fn between(&self) {
        self.depth.set(self.depth.get() + 1);
        match self.below(12) {
            0 | 1 => self.free_something(),
            2 if !self.growing.get() => self.alloc_pinned(self.below(2)),
            3 if self.may_panic.get() && self.below(10) == 0 => {
                self.depth.set(self.depth.get() - 1);
                resume_unwind(Box::new(Planned))
            }
            _ => {}
        }
        self.depth.set(self.depth.get() - 1);
    }

    /// From inside the source.
    pub(super) fn inside(&self, acquires: bool) {
        if self.depth.get() > 3 || self.below(3) == 0 {
            return;
        }
        let growing = self.growing.replace(acquires || self.growing.get());
        self.depth.set(self.depth.get() + 1);
        self.nested.set(self.nested.get() + 1);
        for _ in 0..1 + self.below(4) {
            match self.asks.get() {
                Some(which) if self.below(3) == 0 && (acquires || growing) => self.alloc_pinned(which),
                _ if !self.growing.get() && self.below(2) == 0 => self.alloc_pinned(self.below(2)),
                _ => self.free_something(),
            }
        }
        self.depth.set(self.depth.get() - 1);
        self.growing.set(growing);
        if self.may_panic.get() && acquires && self.below(40) == 0 {
            // Dropped while the panic goes on.
            let _dropped = self.pick(&self.pinned, 2).inspect(|block| self.remove(block.as_raw()));
            resume_unwind(Box::new(Planned));
        }
    }

    fn planned(&self, call: impl FnOnce()) {
        let state = (self.depth.get(), self.growing.get(), self.asks.get());
        if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
            if !panic.is::<Planned>() {
                resume_unwind(panic);
            }
            self.depth.set(state.0);
            self.growing.set(state.1);
            self.asks.set(state.2);
        }
    }

    fn step(&self) {
        let may_panic = self.may_panic.get();
        self.planned(|| self.call());
        self.may_panic.set(may_panic);
        self.filling.set(false);
        let stats = self.pool.stats();
        assert_eq!(stats.in_use, self.live.borrow().len() as u64);
        assert_eq!(stats.in_use + stats.in_magazines + stats.in_rows + stats.in_depot, stats.blocks);
        assert_eq!((stats.late_double_frees, stats.damaged), (0, 0));
        assert!(stats.high_water >= stats.in_use);
    }

    fn call(&self) {
        let n = 1 + self.below([2, 20, 100, 300][self.below(4)]);
        match self.below(12) {
            0..3 => (0..n).for_each(|_| self.planned(|| self.alloc_pinned(self.below(2)))),
            3 => {
                // Each for itself, in turn.
                let which = self.below(2);
                for _ in 0..n {
                    self.planned(|| self.alloc_pinned(which));
                    if self.below(3) == 0 {
                        self.free_something();
                    }
                }
            }
            4 => {
                let Some(mut local) = self.pick(&self.locals, 2) else { return };
                self.planned(|| {
                    for _ in 0..n {
                        let Ok(block) = local.alloc() else { break };
                        self.add(block.as_raw());
                        self.owned.borrow_mut().push(block);
                    }
                });
                self.locals.borrow_mut().push(local);
            }
            5 => {
                let Some(mut local) = self.pick(&self.locals, 2) else { return };
                self.planned(|| {
                    let Ok(run) = local.alloc_run(NonZeroUsize::new(n).unwrap()) else { return };
                    run.iter().for_each(|raw| self.add(raw));
                    self.raws.borrow_mut().extend(run.iter());
                });
                self.locals.borrow_mut().push(local);
            }
            6 => self.planned(|| {
                let mut slots = vec![None; n];
                let may_panic = self.may_panic.replace(false);
                self.filling.set(true);
                match self.below(2) {
                    0 => _ = self.pool.fill(&mut slots),
                    _ => _ = self.pool.fill_all(&mut slots),
                }
                self.filling.set(false);
                self.may_panic.set(may_panic);
                slots.iter().flatten().for_each(|&raw| self.add(raw));
                self.raws.borrow_mut().extend(slots.into_iter().flatten());
            }),
            7 if self.below(3) == 0 => {
                let minimum = self.below(200) as u64;
                let maximum =
                    if self.below(2) == 0 { u64::MAX } else { minimum + 1 + self.below(4000) as u64 };
                let may_panic = self.may_panic.replace(false);
                self.growing.set(true);
                _ = self.pool.set_limits(Limits { minimum, maximum });
                self.growing.set(false);
                self.may_panic.set(may_panic);
            }
            7 | 8 => {
                for _ in 0..n / 4 {
                    self.free_something();
                }
            }
            9 => _ = self.pool.shrink_shared(),
            _ => {
                // Most are freed, so that chunks leave and others come.
                for vec in 0..2 {
                    while self.below(60) != 0 {
                        match vec {
                            0 => {
                                let Some(block) = self.pick(&self.pinned, 2) else { break };
                                self.remove(block.as_raw());
                            }
                            _ => {
                                let Some(raw) = self.pick(&self.raws, 2) else { break };
                                self.remove(raw);
                                self.pool.free_raw(raw).unwrap();
                            }
                        }
                    }
                }
                if self.below(2) == 0 {
                    self.pool.free_many(self.take_owned(2000, 0));
                    self.locals.borrow_mut().iter_mut().for_each(|local| *local = self.pool.local());
                    self.pool.shrink_shared();
                }
            }
        }
    }
}

fn run(seed: usize, steps: usize) -> (usize, usize) {
    let shapes = [(64, 0), (96, 512), (16, 0), (4096, 0), (3000, 8192), (100, 0), (65_536, 0), (2 << 20, 0)];
    let (size, boundary) = shapes[seed % shapes.len()];
    let watched = seed % 5 == 4 && size < 5000;
    let bytes = [2 << 20, (4 << 20) + 4096, 12 << 20][seed / 8 % 3];
    let make = if watched { DmaPool::with_debug } else { DmaPool::new };
    let mut pool = make(Patchy::new(bytes, seed as u64 * 31 + 7), "places", size, 0, boundary).unwrap();
    if seed.is_multiple_of(2) {
        pool = pool.with_prefetch();
    }
    let pool = Shared::new(pool);
    let owned = [(); 2].map(|()| Box::into_raw(Box::new(pool.local().into_cell())));
    // SAFETY: freed below, after the last block.
    let cells = owned.map(|cell| unsafe { &*cell });
    let world = Box::into_raw(Box::new(World {
        locals: RefCell::new(vec![pool.local(), pool.local()]),
        pool,
        cells,
        random: RefCell::new(Random::new(seed as u64)),
        live: RefCell::default(),
        pinned: RefCell::default(),
        owned: RefCell::default(),
        raws: RefCell::default(),
        stale: RefCell::default(),
        growing: Cell::new(false),
        asks: Cell::new(None),
        filling: Cell::new(false),
        depth: Cell::new(0),
        may_panic: Cell::new(seed.is_multiple_of(3)),
        nested: Cell::new(0),
        reentrant: Cell::new(0),
    }));
    {
        // SAFETY: freed below, after the last use.
        let world: &'static World = unsafe { &*world };
        WORLD.set(Some(world));
        (0..steps).for_each(|_| world.step());
        WORLD.set(None);
    }
    // SAFETY: from `Box::into_raw`, and nothing refers to it any more.
    let World { pool, locals, pinned, owned: blocks, raws, nested, reentrant, .. } =
        *unsafe { Box::from_raw(world) };
    drop((pinned, blocks, locals));
    // SAFETY: from `Box::into_raw`, and no block borrows it any more.
    owned.into_iter().for_each(|cell| drop(unsafe { Box::from_raw(cell) }));
    pool.free_bulk(&raws.take()).unwrap();
    let mut pool = pool.try_into_inner().unwrap();
    pool.set_limits(Limits::default()).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_use, pool.depot.reported_in_use(), stats.late_double_frees), (0, 0, 0));
    assert_eq!(pool.shrink(), stats.bytes, "blocks were lost");
    assert_eq!(pool.source().heap.frames_taken(), 0);
    (nested.get(), reentrant.get())
}

#[test]
fn a_pool_agrees_with_its_live_blocks_whatever_its_source_does() {
    let worlds = std::env::var("PLACES_WORLDS").ok().and_then(|text| text.parse().ok());
    let from = std::env::var("PLACES_FROM").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (mut nested, mut reentrant) = (0, 0);
    for seed in from..from + worlds.unwrap_or(if cfg!(miri) { 2 } else { 100 }) {
        let (more, errors) = catch_unwind(|| run(seed, 120)).unwrap_or_else(|panic| {
            WORLD.set(None);
            println!("seed {seed}");
            resume_unwind(panic)
        });
        (nested, reentrant) = (nested + more, reentrant + errors);
    }
    assert!(nested > 100 && reentrant > 0 || worlds.is_some() || cfg!(miri));
}
