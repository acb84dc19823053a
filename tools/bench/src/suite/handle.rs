//! The operations of the suites on every allocator: allocate and free objects, one at a time or in
//! bulk.
//!
//! The timed loops are generic, so each subject's calls are inlined into a loop of its own. The
//! address that a device would be given is passed through `black_box`, which keeps the object from
//! the optimiser at the cost of one store.
#![expect(unsafe_code, reason = "the memory of a raw block is reached through its pointer")]

use crate::baseline::block::Block as BaselineBlock;
use crate::baseline::mimalloc::MiBlock;
use crate::baseline::{BaselineError, Blocks};
use crate::error::BenchError;
use crate::harness::{Cost, Counts, Samples};
use pinfold_core::dma_pool::{Block, PoolLocal, RawBlock};
use pinfold_core::frame::{self, Frame, Order};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Instant;

/// The number of warm-up pairs of each subject, in every run.
pub(super) const WARM_UP: usize = 4096;

type Outcome = Result<(), BenchError>;

/// An object that an allocator allocates.
pub(super) trait Object {
    /// Returns the address that a device would be given.
    fn address(&self) -> u64;
}

/// An offset is its own address.
impl Object for u64 {
    #[inline(always)]
    fn address(&self) -> u64 {
        *self
    }
}

impl Object for Block {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

impl Object for RawBlock {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

impl Object for BaselineBlock<'_> {
    #[inline(always)]
    fn address(&self) -> u64 {
        BaselineBlock::address(self)
    }
}

impl<const N: usize> Object for MiBlock<N> {
    #[inline(always)]
    fn address(&self) -> u64 {
        MiBlock::address(self)
    }
}

impl Object for Frame {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.offset()
    }
}

/// One owner's access to an allocator. `alloc` also writes one word of the object where it is
/// memory: an allocator that keeps its state elsewhere would otherwise leave the cache miss on the
/// object to its user and look faster than it is.
pub(super) trait Handle {
    /// The objects that it allocates.
    type Object: Object;
    /// Allocates an object and writes one word of it.
    fn alloc(&mut self) -> Result<Self::Object, BenchError>;
    /// Frees an object.
    fn free(&mut self, object: Self::Object) -> Outcome;
    /// Allocates `count` objects: one by one, or by one call if there is one.
    #[inline(always)]
    fn alloc_many(&mut self, count: usize, to: &mut Vec<Self::Object>) -> Outcome {
        (0..count).try_for_each(|_| self.alloc().map(|object| to.push(object)))
    }
    /// Frees objects: one by one, or by one call if there is one.
    #[inline(always)]
    fn free_many(&mut self, objects: &mut Vec<Self::Object>) -> Outcome {
        objects.drain(..).try_for_each(|object| self.free(object))
    }
}

/// A pool's `PoolLocal`, whose blocks are freed through it.
pub(super) struct OwnedBlocks {
    local: PoolLocal,
    slots: Vec<Option<Block>>,
}

/// A pool's `PoolLocal`, whose raw blocks are freed by their addresses: each free claims its block.
pub(super) struct RawBlocks {
    local: PoolLocal,
    slots: Vec<Option<RawBlock>>,
    freed: Vec<RawBlock>,
}

impl OwnedBlocks {
    pub(super) fn new(local: PoolLocal) -> Self {
        Self { local, slots: Vec::new() }
    }
}

impl RawBlocks {
    pub(super) fn new(local: PoolLocal) -> Self {
        Self { local, slots: Vec::new(), freed: Vec::new() }
    }

    /// Writes one word of a block that was allocated just now.
    #[inline(always)]
    fn write(block: RawBlock) {
        // SAFETY: the block has at least 16 bytes and was allocated just now by a handle of this
        // file, which alone has its address; no pool here is dropped before its blocks are freed.
        unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.address()) };
    }
}

impl Handle for OwnedBlocks {
    type Object = Block;
    #[inline(always)]
    fn alloc(&mut self) -> Result<Block, BenchError> {
        let block = self.local.alloc()?;
        block.memory().write_u64(0, block.address())?;
        Ok(block)
    }
    #[inline(always)]
    fn free(&mut self, block: Block) -> Outcome {
        self.local.free(block);
        Ok(())
    }
    #[inline(always)]
    fn alloc_many(&mut self, count: usize, to: &mut Vec<Block>) -> Outcome {
        self.slots.resize_with(count, || None);
        let got = self.local.fill_blocks(&mut self.slots);
        if got != count {
            return Err(BenchError::Short { asked: count, got });
        }
        for block in self.slots.drain(..).flatten() {
            block.memory().write_u64(0, block.address())?;
            to.push(block);
        }
        Ok(())
    }
    #[inline(always)]
    fn free_many(&mut self, blocks: &mut Vec<Block>) -> Outcome {
        self.local.free_many(blocks.drain(..));
        Ok(())
    }
}

impl Handle for RawBlocks {
    type Object = RawBlock;
    #[inline(always)]
    fn alloc(&mut self) -> Result<RawBlock, BenchError> {
        let block = self.local.alloc_raw()?;
        Self::write(block);
        Ok(block)
    }
    #[inline(always)]
    fn free(&mut self, block: RawBlock) -> Outcome {
        Ok(self.local.free_raw(block)?)
    }
    #[inline(always)]
    fn alloc_many(&mut self, count: usize, to: &mut Vec<RawBlock>) -> Outcome {
        self.slots.resize(count, None);
        let got = self.local.fill(&mut self.slots);
        if got != count {
            return Err(BenchError::Short { asked: count, got });
        }
        for block in self.slots.drain(..).flatten() {
            Self::write(block);
            to.push(block);
        }
        Ok(())
    }
    #[inline(always)]
    fn free_many(&mut self, blocks: &mut Vec<RawBlock>) -> Outcome {
        std::mem::swap(&mut self.freed, blocks);
        let freed = self.local.free_bulk(&self.freed);
        self.freed.clear();
        std::mem::swap(&mut self.freed, blocks);
        Ok(freed?)
    }
}

/// The blocks of a baseline.
pub(super) struct Baseline<B>(pub(super) B);

impl<'m, B: Blocks<Block = BaselineBlock<'m>>> Handle for Baseline<B> {
    type Object = BaselineBlock<'m>;
    #[inline(always)]
    fn alloc(&mut self) -> Result<BaselineBlock<'m>, BenchError> {
        let mut block = self.0.alloc()?;
        block.write(block.address());
        Ok(block)
    }
    #[inline(always)]
    fn free(&mut self, block: BaselineBlock<'m>) -> Outcome {
        Ok(self.0.free(block)?)
    }
}

/// The page frames of a baseline, as offsets.
pub(super) struct BaselineFrames<B>(pub(super) B);

impl<B: Blocks<Block = u64>> Handle for BaselineFrames<B> {
    type Object = u64;
    #[inline(always)]
    fn alloc(&mut self) -> Result<u64, BenchError> {
        self.0.alloc().map_err(|error: BaselineError| error.into())
    }
    #[inline(always)]
    fn free(&mut self, frame: u64) -> Outcome {
        Ok(self.0.free(frame)?)
    }
}

/// mimalloc, from this thread.
pub(super) struct MiMalloc<const N: usize>;

impl<const N: usize> Handle for MiMalloc<N> {
    type Object = MiBlock<N>;
    #[inline(always)]
    fn alloc(&mut self) -> Result<MiBlock<N>, BenchError> {
        let mut block = MiBlock::alloc()?;
        block.write(block.address());
        Ok(block)
    }
    #[inline(always)]
    fn free(&mut self, block: MiBlock<N>) -> Outcome {
        drop(block);
        Ok(())
    }
}

/// The frames of a zone, from its `ZoneLocal`.
pub(super) struct Frames(pub(super) frame::ZoneLocal);

impl Handle for Frames {
    type Object = Frame;
    #[inline(always)]
    fn alloc(&mut self) -> Result<Frame, BenchError> {
        Ok(self.0.alloc(Order::PAGE)?)
    }
    #[inline(always)]
    fn free(&mut self, frame: Frame) -> Outcome {
        Ok(self.0.free(frame, Order::PAGE)?)
    }
}

/// A generator of the same pseudo-random numbers in every run (xorshift, Marsaglia 2003).
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// Returns a number below `limit`, which is not 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 32) % limit.max(1) as u64).unwrap_or(0)
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Starts a second thread.
///
/// # Errors
/// [`BenchError::NoThread`] where `Scope::spawn` would panic: a limit of the user or of a control
/// group.
pub(super) fn spawn_second<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, BenchError> {
    Builder::new().spawn_scoped(scope, work).map_err(BenchError::NoThread)
}

/// Returns empty slots whose memory has been touched, so the loops do not pay for it.
pub(super) fn slots<T>(count: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(count).collect()
}

/// Allocates and frees one object, `times` times.
#[inline(always)]
fn pairs<H: Handle>(handle: &mut H, times: usize) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..times {
            let object = handle.alloc()?;
            black_box(object.address());
            handle.free(object)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Returns a run that allocates and frees one object, `times` times.
pub(super) fn pairs_run<'s, H: Handle>(
    case: &'static str,
    times: usize,
    handle: impl Fn() -> H + 's,
) -> impl FnMut(&mut Samples) -> Outcome + 's {
    move |out| {
        let mut handle = handle();
        pairs(&mut handle, WARM_UP)?;
        out.cost(case, pairs(&mut handle, times)?, times);
        Ok(())
    }
}

/// Returns a run of pairs on two threads at once, each with a handle of its own. The time is from
/// the first start to the last end.
pub(super) fn pairs_2t_run<'s, H: Handle>(
    case: &'static str,
    times_each: usize,
    handle: impl Fn() -> H + Sync + 's,
) -> impl FnMut(&mut Samples) -> Outcome + 's {
    move |out| {
        // The threads spin here instead of sleeping: waking up may take longer than a run.
        let ready = AtomicUsize::new(0);
        let work = || -> Result<(Instant, Instant, Counts), BenchError> {
            let mut handle = handle();
            let warm_up = pairs(&mut handle, WARM_UP);
            // Both threads must pass the barrier, even if the warm-up of one failed.
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < 2 {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            let cost = warm_up.and_then(|_| pairs(&mut handle, times_each))?;
            Ok((start, Instant::now(), cost.counts))
        };
        let (first, second) = std::thread::scope(|scope| {
            let second = spawn_second(scope, work)?;
            Ok::<_, BenchError>((work(), second.join().unwrap_or(Err(BenchError::Thread))))
        })?;
        let ((start_a, end_a, counts_a), (start_b, end_b, counts_b)) = (first?, second?);
        let elapsed = end_a.max(end_b).duration_since(start_a.min(start_b));
        let cost = Cost { ns: elapsed.as_secs_f64() * 1e9, counts: counts_a + counts_b };
        out.cost(case, cost, 2 * times_each);
        Ok(())
    }
}

/// Allocates an object for each slot.
#[inline(always)]
pub(super) fn alloc_all<H: Handle>(
    handle: &mut H,
    held: &mut [Option<H::Object>],
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for slot in held {
            *slot = Some(handle.alloc()?);
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Frees all objects, in the order of the slots.
#[inline(always)]
pub(super) fn free_all<H: Handle>(
    handle: &mut H,
    held: &mut [Option<H::Object>],
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        held.iter_mut().filter_map(Option::take).try_for_each(|object| handle.free(object))
    });
    result.map(|()| cost)
}

/// Returns a run that allocates `count` objects and frees them at random, `rounds` times; the order
/// is the same for every subject.
pub(super) fn random_run<'s, H: Handle>(
    case: &'static str,
    count: usize,
    rounds: usize,
    handle: impl Fn() -> H + 's,
) -> impl FnMut(&mut Samples) -> Outcome + 's {
    move |out| {
        let (mut handle, mut held) = (handle(), slots(count));
        let mut order: Vec<usize> = (0..count).collect();
        Rng::new().shuffle(&mut order);
        let mut round = || {
            for slot in &mut held {
                *slot = Some(handle.alloc()?);
            }
            for &at in &order {
                if let Some(object) = held.get_mut(at).and_then(Option::take) {
                    black_box(object.address());
                    handle.free(object)?;
                }
            }
            Ok(())
        };
        round()?;
        let (cost, result) = Cost::of(|| (0..rounds).try_for_each(|_| round()));
        out.cost(case, cost, rounds * count);
        result
    }
}

/// The object that is replaced.
#[derive(Clone, Copy)]
pub(super) enum Replaced {
    /// The one that was allocated first.
    Oldest,
    /// One at random.
    Any,
}

/// Returns a run that, with `live` objects allocated, frees one and allocates another, `times`
/// times.
pub(super) fn replace_run<'s, H: Handle>(
    case: &'static str,
    (live, times): (usize, usize),
    replaced: Replaced,
    handle: impl Fn() -> Result<H, BenchError> + 's,
) -> impl FnMut(&mut Samples) -> Outcome + 's {
    move |out| {
        let (mut handle, mut held) = (handle()?, slots(live));
        let mut random = Rng::new();
        let order: Vec<usize> = match replaced {
            Replaced::Oldest => (0..live).cycle().take(times).collect(),
            Replaced::Any => (0..times).map(|_| random.below(live)).collect(),
        };
        alloc_all(&mut handle, &mut held)?;
        let mut replace = |order: &[usize]| -> Outcome {
            for &at in order {
                if let Some(slot) = held.get_mut(at) {
                    slot.take().map_or(Ok(()), |object| handle.free(object))?;
                    let object = handle.alloc()?;
                    black_box(object.address());
                    *slot = Some(object);
                }
            }
            Ok(())
        };
        replace(order.get(..WARM_UP).unwrap_or(&order))?;
        let (cost, result) = Cost::of(|| replace(&order));
        out.cost(case, cost, order.len());
        result?;
        free_all(&mut handle, &mut held).map(drop)
    }
}

/// Returns a run that, `rounds` times, allocates `each` objects by one call and frees them by one
/// call, or one by one where the allocator has no such call.
pub(super) fn bulk_run<'s, H: Handle>(
    case: &'static str,
    each: usize,
    rounds: usize,
    handle: impl Fn() -> H + 's,
) -> impl FnMut(&mut Samples) -> Outcome + 's {
    move |out| {
        let (mut handle, mut held) = (handle(), Vec::with_capacity(each));
        let mut work = |rounds| {
            (0..rounds).try_for_each(|_| {
                handle.alloc_many(each, &mut held)?;
                handle.free_many(black_box(&mut held))
            })
        };
        work(WARM_UP.div_ceil(each))?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}
