//! One round: a domain configured by a seed, with owners and devices in threads of their own.

use super::Wrong;
use super::device::Device;
use super::owner::{Mail, Owner, Shared, Through, at};
use super::world::{self, Kind, PAGE, Tag, World};
use pinfold::soft::{Effect, Random, SoftConfig, UnitQueue};
use pinfold::{Arena, Domain, MappingPolicy, Source};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::DomainStats;
use pinfold_core::invalidate::{
    Descriptor, InvalidationQueue, QueueError, Scope, Ticket, WaitLimit,
};
use pinfold_core::known_bad;
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const TRAP: usize = 2 << 20;
/// Bytes of the memory that stays mapped.
const WHOLE: u64 = 256 << 10;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// The fault of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Trouble {
    #[default]
    None,
    /// Owners drop their request loops, with requests outstanding.
    Drops,
    /// The unit fails: what it has not flushed by then never comes back.
    Fails,
    /// The unit hangs: as with one that fails, but nothing says so.
    Hangs,
}

/// A mistake that a request loop could make, made by its driver in its place: it ends a request that
/// the device still works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Careless {
    /// When the loop is dropped.
    DropEnds,
    /// When the request is lost.
    LostEnds,
}

/// The size of a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) owners: usize,
    pub(crate) devices: u64,
    pub(crate) arena_bytes: u64,
    pub(crate) length: Duration,
}

/// The outcome of a round.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) caught: Option<String>,
    pub(crate) accesses: u64,
    pub(crate) landed: u64,
    pub(crate) maps: u64,
    pub(crate) no_pages: u64,
    pub(crate) late: u64,
    pub(crate) large: u64,
    pub(crate) remote: u64,
    pub(crate) without_payloads: u64,
    pub(crate) mixed: u64,
    pub(crate) fixed: u64,
    pub(crate) lost: u64,
    pub(crate) quarantined: u64,
    pub(crate) trouble: Trouble,
    pub(crate) caching_mode: bool,
    pub(crate) through: Option<Through>,
    pub(crate) stats: DomainStats,
}

/// Where mappings may be: around multiples of 1 GiB, and of 512 GiB where the table has that many
/// levels. The regions are small, so that what is mapped spreads over several of them and goes away
/// from them again; some have room for an owner's window.
fn regions(random: &mut Random, levels: u8, owners: usize) -> Vec<(u64, u64)> {
    let mut borders: Vec<u64> = (5..9).map(|gib| gib * GIB).collect();
    if levels > 3 {
        // The first that is taken: it needs pages of its own at level 3.
        borders.extend([512 * GIB, 1024 * GIB]);
    }
    let around = |border: u64| {
        // Beyond three owners, more of them find room.
        let most = 3 + owners as u64 / 4;
        let (below, above) = (1 + random.below(most), 1 + random.below(most));
        (border - below * MIB - 64 * 1024, border + above * MIB + 128 * 1024)
    };
    borders.into_iter().map(around).collect()
}

fn config(random: &mut Random, seed: u64, through: Through, owners: usize) -> SoftConfig {
    let mut config = SoftConfig {
        seed,
        effect: random.pick(&[Effect::AtRandom, Effect::AtRandom, Effect::AtOnce, Effect::AtLast]),
        flush_cost: Duration::from_micros(1 + random.below(20)),
        late_by: Duration::from_micros(random.pick(&[10, 50, 500, 3000])),
        iotlb_entries: random.pick(&[16, 256, 4096]),
        ..SoftConfig::default()
    };
    // Some rounds give up before the flush has completed, and wait again.
    if seed % 4 == 1 {
        config.timeout = Duration::from_micros(random.pick(&[20, 200, 1000]));
    }
    // In a window with a table page of its own a map fails halfway only in caching mode, when its
    // flush is late: for long enough that a device finds it.
    if seed % 6 == 3 && through != Through::Domain {
        (config.timeout, config.late_by) = (Duration::from_micros(500), Duration::from_millis(4));
    }
    // And some units abort what is in flight.
    config.abort_one_in = seed.is_multiple_of(2).then(|| 2 + random.below(20));
    config.queue_entries = random.pick(&[4, 16, 256]);
    config.queue_depth = random.pick(&[1, 2, 4, 16]);
    // Derived from the seed, so that a dozen rounds cover all combinations.
    config.caching_mode = seed.is_multiple_of(3);
    config.contiguous_bytes =
        seed.is_multiple_of(2).then(|| random.pick(&[4 << 10, 4 << 10, 16 << 10]));
    config.units = random.pick(&[1, 2]);
    config.levels = 3 + random.below(3) as u8;
    // A mapping across a border needs two pages of each level and the root: there is little more.
    let mut table_pages = 2 * usize::from(config.levels) - 1 + random.index(4);
    if through != Through::Domain {
        // Some windows have a page of their own, others have to do without.
        table_pages += random.index(8) + owners / 4;
    }
    if through == Through::Requests {
        // And those of what stays mapped.
        table_pages += usize::from(config.levels) - 1;
    }
    config.table_bytes = table_pages * 4096;
    config
}

/// Returns the trouble of a round, by its seed. Memory that is quarantined is never freed, so long
/// runs have it in their first rounds only.
fn trouble(seed: u64, through: Through, wrong: Option<Wrong>) -> Trouble {
    let early = seed < super::first_seed().saturating_add(200);
    match (through, wrong, seed / 7 % 5) {
        (Through::Requests, Some(Wrong::Loop(Careless::DropEnds)), _) => Trouble::Drops,
        (Through::Requests, None, 0) if early => Trouble::Drops,
        (Through::Requests, None, 1) if early => Trouble::Fails,
        (Through::Requests, None, 2) if early => Trouble::Hangs,
        _ => Trouble::None,
    }
}

/// Keeps everything out of the domain but `regions`: what lies below them is the arena's.
fn fence(domain: &Domain, regions: &[(u64, u64)], bits: u32) {
    let (mut from, end) = (4 * GIB, 1 << bits);
    let reserve_range = |from: u64, to: u64| {
        if from < to {
            domain.reserve_range(IovaRange::new(Iova::new(from), to - from).unwrap()).unwrap();
        }
    };
    for &(start, stop) in regions {
        reserve_range(from, start);
        from = stop;
    }
    reserve_range(from, end);
}

/// Returns the handles that the owners of a round map through: by the seed, and not in step with
/// the rest of the configuration.
fn through(seed: u64) -> Through {
    match seed % 7 {
        0 => Through::Both,
        1 | 3 => Through::Domain,
        2 | 5 => Through::Requests,
        _ => Through::Handles,
    }
}

/// Plays one round with what is `wrong`, through what is asked for, or what the seed says.
pub(crate) fn play(seed: u64, wrong: Option<Wrong>, asked: Option<Through>, size: Size) -> Outcome {
    let mut random = Random::new(seed);
    let through = asked.unwrap_or_else(|| through(seed));
    let trouble = trouble(seed, through, wrong);
    let mut config = config(&mut random, seed, through, size.owners);
    match trouble {
        Trouble::None | Trouble::Drops => {}
        Trouble::Fails => config.fail_from = Some(1 + random.below(6)),
        Trouble::Hangs => {
            config.hang_from = Some(1 + random.below(6));
            config.timeout = Duration::from_micros(200);
        }
    }
    let (levels, caching_mode) = (config.levels, config.caching_mode);
    let regions = regions(&mut random, levels, size.owners);
    let what = format!("seed {seed}, {through:?}, {trouble:?}, {config:?}");
    let (mistake, fault, careless) = match wrong {
        None => (None, None, None),
        Some(Wrong::Stack(mistake)) => (Some(mistake), None, None),
        Some(Wrong::Queue(fault)) => (None, Some(fault), None),
        Some(Wrong::Loop(careless)) => (None, None, Some(careless)),
    };
    let over = |unit, queue| Faulty::new(queue, unit, fault);
    // SAFETY: buffers are read and written through their atomics only (`tag`).
    let domain = unsafe { Domain::soft_over(config, over) }.unwrap();
    fence(&domain, &regions, 12 + 9 * u32::from(levels));
    let arena =
        Arena::builder().size(size.arena_bytes).source(Source::Plain).build(&domain).unwrap();
    // In caching mode even this map has a flush, which may be late.
    let has_whole = through == Through::Requests && !caching_mode;
    let whole = has_whole.then(|| whole(&domain));
    // Too large for the regions, so it has its range below 4 GiB; the rest of that is closed.
    fence_below(&domain, [Some(&arena), whole.as_ref()]);
    let trap = arena.alloc(TRAP).unwrap();
    world::write_kind(trap.memory(), Kind::Trap);
    let trap_at = trap.memory().addr() as u64;
    let (world, mail) = (World::new(size.owners), Mail::default());
    let shared = Shared {
        world: &world,
        mail: &mail,
        domain: &domain,
        arena: &arena,
        whole: whole.as_ref(),
        through,
        trouble,
        careless,
    };
    let iommu = domain.soft_bus().unwrap();
    std::thread::scope(|scope| {
        for number in 0..size.devices {
            let device = Device::new(&world, iommu, &regions, seed ^ (number + 1) << 32);
            scope.spawn(move || device.run());
        }
        let owners: Vec<_> = (0..size.owners)
            .map(|number| {
                let owner = Owner::new(shared, number, seed ^ (number as u64 + 1) << 40);
                scope.spawn(move || {
                    known_bad::make(mistake);
                    known_bad::poison_free_table_pages(Some(trap_at));
                    owner.run();
                })
            })
            .collect();
        let start = Instant::now();
        while start.elapsed() < size.length && !world.stop.load(Relaxed) {
            std::thread::sleep(Duration::from_millis(2));
        }
        world.stop.store(true, Relaxed);
        owners.into_iter().for_each(|owner| {
            if owner.join().is_err() {
                world.catch(|| "an owner panicked".into());
            }
        });
    });
    if let Some(wrong) = world::find_not(trap.memory(), Kind::Trap) {
        world.catch(|| format!("a device wrote into the trap: (page, found) = {wrong:?}"));
    }
    // Late flushes complete soon, now that nothing else is submitted.
    let soon = Instant::now() + Duration::from_secs(10);
    while domain.release_late() > 0 && Instant::now() < soon && trouble != Trouble::Hangs {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Memory without an owner is quarantined, or waits for a late flush, and is counted.
    let stats = domain.stats();
    let in_use = |arena: &Arena| arena.stats().frames_in_use * PAGE;
    let missing = in_use(&arena) + whole.as_ref().map_or(0, in_use) - TRAP as u64;
    if missing != stats.quarantined_bytes + stats.deferred_bytes {
        world.catch(|| format!("{missing} bytes are missing: {stats:?}"));
    }
    let count = |count: &std::sync::atomic::AtomicU64| count.load(Relaxed);
    let counts = &world.counts;
    Outcome {
        caught: world.caught().map(|caught| format!("{caught}; {what}")),
        accesses: count(&counts.accesses),
        landed: count(&counts.landed),
        maps: count(&counts.maps),
        no_pages: count(&counts.no_pages),
        late: count(&counts.late),
        large: count(&counts.large),
        remote: count(&counts.remote),
        without_payloads: count(&counts.without_payloads),
        mixed: count(&counts.mixed),
        fixed: stats.maps_fixed,
        lost: count(&counts.lost),
        quarantined: count(&counts.quarantined),
        trouble,
        caching_mode,
        through: Some(through),
        stats,
    }
}

/// Returns memory that stays mapped, tagged: devices reach it from now on.
fn whole(domain: &Domain) -> Arena {
    let whole = Arena::builder().size(WHOLE).source(Source::Plain);
    let whole = whole.mapping_policy(MappingPolicy::Whole).build(domain).unwrap();
    let all = whole.alloc(WHOLE as usize).unwrap();
    world::write(all.memory(), |page| Tag::mapped(at(whole.iova(), page), 0));
    whole
}

/// Keeps everything below 4 GiB out of the domain but the ranges of `arenas`.
fn fence_below(domain: &Domain, arenas: [Option<&Arena>; 2]) {
    let range = |arena: &Arena| (arena.iova().raw(), arena.iova().raw() + arena.len() as u64);
    let mut ranges: Vec<_> = arenas.into_iter().flatten().map(range).collect();
    ranges.sort_unstable();
    let mut from = 0;
    for (start, end) in ranges.into_iter().chain([(4 * GIB, 4 * GIB)]) {
        let start = start.min(4 * GIB);
        if from < start {
            let range = IovaRange::new(Iova::new(from), start - from).unwrap();
            domain.reserve_range(range).unwrap();
        }
        from = end;
    }
}

/// A mistake that a queue makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// A batch is submitted without its flushes.
    NoFlush,
    /// The flushes of table pages drop leaves alone.
    LeafFlushForTablePage,
    /// In caching mode, a map does not flush the entries that were cached as absent.
    MapNotFlushed,
    /// A wait that reaches its deadline reports that the flush has completed.
    TimeoutIsCompletion,
    /// The TLBs of devices are flushed before the IOTLB that they are filled from.
    DeviceTlbFirst,
    /// The waits that a unit has aborted are submitted again without their flushes.
    AbortIsCompletion,
    /// Of several units, only the first is given the flushes; the others are given the waits.
    FirstUnitOnly,
}

/// The queue of a unit, with a mistake or none.
pub(crate) struct Faulty {
    queue: UnitQueue,
    unit: usize,
    fault: Option<Fault>,
    /// Whether the unit was restarted and has not been given the flush that replaces the aborted
    /// ones.
    restarted: AtomicBool,
    /// The waits in flight, and when they were submitted.
    waits: Mutex<VecDeque<(Ticket, u64)>>,
}

impl Faulty {
    pub(crate) fn new(queue: UnitQueue, unit: usize, fault: Option<Fault>) -> Self {
        Self { queue, unit, fault, restarted: AtomicBool::new(false), waits: Mutex::default() }
    }

    /// Returns the descriptors that it submits instead of those that it is told to.
    fn instead(&self, descriptors: &[Descriptor]) -> Option<Vec<Descriptor>> {
        match self.fault? {
            Fault::NoFlush => Some(Vec::new()),
            Fault::FirstUnitOnly => (self.unit > 0).then(Vec::new),
            Fault::AbortIsCompletion => self.restarted.load(Relaxed).then(Vec::new),
            Fault::LeafFlushForTablePage => Some(
                descriptors
                    .iter()
                    .map(|descriptor| match *descriptor {
                        Descriptor::Iotlb { scope: scope @ Scope::Block(_), .. } => {
                            Descriptor::Iotlb { scope, leaf_only: true }
                        }
                        other => other,
                    })
                    .collect(),
            ),
            Fault::DeviceTlbFirst => {
                let fence = descriptors.iter().position(|one| *one == Descriptor::Fence)?;
                let (iotlb, tlbs) = (&descriptors[..fence], &descriptors[fence + 1..]);
                Some([tlbs, &[Descriptor::Fence], iotlb].concat())
            }
            Fault::MapNotFlushed | Fault::TimeoutIsCompletion => None,
        }
    }
}

impl InvalidationQueue for Faulty {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let instead = self.instead(descriptors);
        self.queue.submit(instead.as_deref().unwrap_or(descriptors), wait)?;
        self.restarted.store(false, Relaxed);
        if self.fault == Some(Fault::TimeoutIsCompletion)
            && let (Some(ticket), Some(now)) = (wait, self.now_ns())
        {
            let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
            let completed = self.queue.completed();
            waits.retain(|(ticket, _)| *ticket > completed);
            // Submitted again, it keeps its deadline.
            if waits.back().is_none_or(|(last, _)| *last < ticket) {
                waits.push_back((ticket, now));
            }
        }
        Ok(())
    }

    fn completed(&self) -> Ticket {
        let completed = self.queue.completed();
        if self.fault != Some(Fault::TimeoutIsCompletion) {
            return completed;
        }
        let now = self.now_ns().unwrap_or(0);
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let late = |(_, since): &&(Ticket, u64)| now.saturating_sub(*since) >= self.limit().time_ns;
        waits.iter().take_while(late).last().map_or(completed, |(late, _)| completed.max(*late))
    }

    fn restart(&self) {
        self.restarted.store(true, Relaxed);
        self.queue.restart();
    }

    fn caches_not_present(&self) -> bool {
        self.queue.caches_not_present() && self.fault != Some(Fault::MapNotFlushed)
    }

    fn accepts(&self) -> usize {
        self.queue.accepts()
    }
    fn now_ns(&self) -> Option<u64> {
        self.queue.now_ns()
    }
    fn limit(&self) -> WaitLimit {
        self.queue.limit()
    }
    fn queue_depth(&self) -> u64 {
        self.queue.queue_depth()
    }
    fn has_device_tlbs(&self) -> bool {
        self.queue.has_device_tlbs()
    }
    fn has_aborted(&self) -> bool {
        self.queue.has_aborted()
    }
    fn has_failed(&self) -> bool {
        self.queue.has_failed()
    }
}
