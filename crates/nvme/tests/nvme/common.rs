//! Memory, a bus and payloads for the tests: no IOMMU, and one that revokes on request.

use pinfold_core::access::Bidirectional;
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::DomainId;
use pinfold_core::frame::{Frame, FrameError, Order};
use pinfold_core::mem::DmaMemory;
use pinfold_nvme::driver::{
    Clock, CommandError, Config, Controller, InFlight, Outcome, Payload, Queue,
};
use pinfold_nvme_model::{
    Bus, BusAccess, BusFault, MemoryMedia, ModelConfig, ModelController, ModelRegisters, Namespace,
};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const BASE: u64 = 0x10_0000_0000;

/// Pinned memory that counts its frames in use; a device reaches what is acquired and nothing else.
pub(crate) struct Memory {
    words: Vec<std::cell::UnsafeCell<u64>>,
    first: usize,
    frames: Mutex<Vec<bool>>,
}

// SAFETY: the words are reached through `DmaMemory` only, which is atomic.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(frames: usize) -> Arc<Self> {
        let words: Vec<std::cell::UnsafeCell<u64>> =
            (0..(frames + 1) * 512).map(|_| 0.into()).collect();
        let first = (words.as_ptr().addr().wrapping_neg() & 4095) / 8;
        Arc::new(Self { words, first, frames: Mutex::new(vec![false; frames]) })
    }

    pub(crate) fn used(&self) -> usize {
        self.frames.lock().unwrap().iter().filter(|used| **used).count()
    }

    /// Returns the numbers of the frames in use, ascending.
    pub(crate) fn in_use(&self) -> Vec<usize> {
        let frames = self.frames.lock().unwrap();
        (0..).zip(frames.iter()).filter_map(|(number, used)| used.then_some(number)).collect()
    }

    pub(crate) fn whole(&self) -> DmaMemory<'_> {
        let len = self.frames.lock().unwrap().len() * 4096;
        let base = NonNull::from(&self.words[self.first..]).cast::<u8>();
        // SAFETY: the vector has `frames + 1` pages, is never changed, and is reached through
        // `DmaMemory` only.
        unsafe { DmaMemory::from_raw(base, len) }
    }

    pub(crate) fn alloc(&self, frames: usize, align: usize) -> Option<usize> {
        let mut used = self.frames.lock().unwrap();
        let count = used.len();
        let first = (0..count)
            .step_by(align)
            .find(|at| at + frames <= count && used[*at..at + frames].iter().all(|u| !u))?;
        used[first..first + frames].fill(true);
        Some(first)
    }

    pub(crate) fn free(&self, first: usize, frames: usize) {
        let mut used = self.frames.lock().unwrap();
        assert!(used[first..first + frames].iter().all(|u| *u), "freed twice");
        used[first..first + frames].fill(false);
    }

    fn reach(&self, iova: Iova, len: usize, kind: BusAccess) -> Result<usize, BusFault> {
        let fault = BusFault { iova, len, kind };
        let offset = iova.raw().checked_sub(BASE).ok_or(fault)? as usize;
        let used = self.frames.lock().unwrap();
        let frames = offset / 4096..(offset + len).div_ceil(4096);
        match used.get(frames) {
            Some(frames) if frames.iter().all(|used| *used) => Ok(offset),
            _ => Err(fault),
        }
    }
}

/// The memory as a chunk source and a bus: one type, so that both see the same frames.
#[derive(Clone)]
pub(crate) struct Arena(pub(crate) Arc<Memory>);

// SAFETY: `whole` and `BASE` do not change; `take` returns free runs, each to one caller.
unsafe impl ChunkSource for Arena {
    fn span(&self) -> NonNull<[u8]> {
        let whole = self.0.whole();
        NonNull::slice_from_raw_parts(whole.as_ptr(), whole.len())
    }
    fn iova(&self) -> Iova {
        Iova::new(BASE)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let frames = order.frames() as usize;
        let first =
            self.0.alloc(frames, frames).ok_or(FrameError::Exhausted { order, frames: 0 })?;
        Ok(Frame::new(first as u32).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        self.0.free(frame.index() as usize, order.frames() as usize);
    }
}

impl Bus for Arena {
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
        let at = self.0.reach(iova, to.len(), BusAccess::Read)?;
        self.0.whole().copy_to_slice(at, to).unwrap();
        Ok(())
    }
    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault> {
        let at = self.0.reach(iova, from.len(), BusAccess::Write)?;
        self.0.whole().copy_from_slice(at, from).unwrap();
        Ok(())
    }
    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault> {
        let at = self.0.reach(iova, 4, BusAccess::Write)?;
        self.0.whole().store_release_u32(at, value.to_le()).unwrap();
        Ok(())
    }
}

/// A buffer of the arena; the device reaches it until it is dropped.
pub(crate) struct Buffer {
    arena: Arena,
    first: usize,
    frames: usize,
    /// Where the payload begins in the first frame.
    pub(crate) skip: usize,
    /// Divided into segments of this many frames.
    pub(crate) cut: usize,
}

impl Buffer {
    pub(crate) fn new(arena: &Arena, bytes: usize) -> Self {
        let frames = bytes.div_ceil(4096).max(1);
        let first = arena.0.alloc(frames, 1).expect("the test's arena is too small");
        Self { arena: arena.clone(), first, frames, skip: 0, cut: usize::MAX }
    }

    pub(crate) fn filled(arena: &Arena, bytes: &[u8]) -> Self {
        let buffer = Self::new(arena, bytes.len());
        buffer.memory().copy_from_slice(0, bytes).unwrap();
        buffer
    }

    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        self.arena
            .0
            .whole()
            .part(self.first * 4096 + self.skip, self.frames * 4096 - self.skip)
            .unwrap()
    }

    pub(crate) fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory().copy_to_slice(0, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn iova(&self) -> Iova {
        Iova::new(BASE + (self.first * 4096 + self.skip) as u64)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.0.free(self.first, self.frames);
    }
}

// SAFETY: the frames are the arena's and stay where they are until the buffer is dropped; the model
// reaches nothing else.
unsafe impl Payload<Bidirectional> for Buffer {
    fn domain(&self) -> Option<DomainId> {
        None
    }
    fn segment(&self, index: usize) -> Option<Segment> {
        let whole = self.frames * 4096 - self.skip;
        let piece = self.cut.saturating_mul(4096);
        let start =
            if index == 0 { 0 } else { index.checked_mul(piece)?.checked_sub(self.skip)? };
        let end = (index + 1).saturating_mul(piece).saturating_sub(self.skip).min(whole);
        (start < whole).then(|| Segment {
            iova: self.iova().checked_add(start as u64).unwrap(),
            len: (end - start) as u64,
        })
    }
}

/// A clock that the test advances.
#[derive(Clone, Default)]
pub(crate) struct TestClock(pub(crate) Arc<AtomicU64>);

impl TestClock {
    pub(crate) fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

pub(crate) type TestQueue = Queue<ModelRegisters, Arena>;
pub(crate) type TestController = Controller<ModelRegisters, Arena>;

/// A model, a driver on it, and their memory.
pub(crate) struct Bench {
    pub(crate) controller: TestController,
    pub(crate) model: ModelController,
    pub(crate) arena: Arena,
}

pub(crate) fn namespaces(bytes: u64) -> Vec<Namespace> {
    [512, 4096]
        .map(|size| Namespace::new(Arc::new(MemoryMedia::new(bytes).unwrap()), size).unwrap())
        .to_vec()
}

pub(crate) fn bench(frames: usize, model: ModelConfig, config: Config) -> Bench {
    let arena = Arena(Memory::new(frames));
    let model = ModelController::spawn(arena.clone(), model).unwrap();
    let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
    Bench { controller, model, arena }
}

/// Bytes that depend on `seed` and their position.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len.div_ceil(8))
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .take(len)
        .collect()
}

/// Waits for one request.
pub(crate) fn one<P>(
    queue: &mut TestQueue,
    in_flight: InFlight<P>,
) -> (P, Result<(), CommandError>) {
    let completion = queue.wait().unwrap().unwrap();
    match in_flight.finish(completion) {
        Outcome::Completed { payload, result } => (payload, result),
        Outcome::TimedOut(_) => panic!("timed out"),
        Outcome::Foreign(..) => panic!("another request's completion"),
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({})", self.iova())
    }
}
