//! A unit as the specification has it, and memory that it reads: what was written back, if it does
//! not snoop.

use crate::registers::*;
use crate::source::SourceId;
use crate::write_back::WriteBack;
use pinfold_core::addr::{Iova, PhysAddr, PhysRange};
use pinfold_core::domain::{
    BackendError, DomainId, Generation, Generations, PhysExtent, PhysTranslator, Pinned,
};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{TableMemory, TablePage, TablePages};
use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

/// Capabilities of QEMU 7.2.
pub(crate) const QEMU_CAP: u64 = 0xd2008c22260286;
pub(crate) const QEMU_ECAP: u64 = 0xf00f4a;
/// The same without caching mode, and with a walker that snoops and supports TLBs of devices.
pub(crate) const SNOOPING: u64 = QEMU_CAP & !(1 << 7);
pub(crate) const SNOOPING_EXTENDED: u64 = QEMU_ECAP | 1 | 1 << 2;

thread_local! {
    /// Memory as a unit finds it that does not snoop, by address.
    static WRITTEN_BACK: RefCell<BTreeMap<u64, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Writes back to what a unit finds that does not snoop.
#[derive(Debug)]
pub(crate) struct Lines;

impl WriteBack for Lines {
    const FOR_NON_COHERENT: bool = true;
    fn write_back(words: &[AtomicU64]) {
        WRITTEN_BACK.with_borrow_mut(|memory| {
            for word in words {
                memory.insert(std::ptr::from_ref(word).addr() as u64, word.load(Ordering::Relaxed));
            }
        });
    }
}

/// Pages from the heap, which the unit finds at their addresses.
pub(crate) struct Heap;

impl TableMemory for Heap {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        // Garbage: nothing may rely on zeros.
        let pages: Vec<_> = (0..pages).map(|_| TablePage::filled(u64::MAX)).collect();
        let pages: &'static [TablePage] = pages.leak();
        let phys = PhysAddr::new(pages.as_ptr().addr() as u64);
        MEMORY
            .lock()
            .unwrap()
            .extend(pages.iter().map(|page| (std::ptr::from_ref(page).addr() as u64, page)));
        // SAFETY: nothing but the tests walks the table; the pages are nobody else's.
        unsafe { TablePages::new(pages, phys) }.ok()
    }
    fn advice(&self) -> &'static str {
        "add memory"
    }
}

/// Every page that a unit may read.
static MEMORY: Mutex<BTreeMap<u64, &'static TablePage>> = Mutex::new(BTreeMap::new());

fn word(at: u64) -> Option<&'static AtomicU64> {
    let page = *MEMORY.lock().unwrap().get(&(at & !0xfff))?;
    page.entries().get((at & 0xfff) as usize / 8)
}

/// Payloads are at their addresses.
#[derive(Default)]
pub(crate) struct Identity(Generations);

impl PhysTranslator for Identity {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        self.0.advance();
        Ok(())
    }
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let phys = PhysRange::new(PhysAddr::new(memory.addr() as u64), memory.len() as u64);
        Ok(PhysExtent::new(memory.addr(), phys.unwrap()))
    }
    fn generation(&self) -> Generation {
        self.0.current()
    }
}

/// Whole pages from the heap.
pub(crate) struct Payload(pub(crate) NonNull<u8>, pub(crate) usize);

impl Payload {
    pub(crate) fn new(pages: usize) -> Self {
        let layout = Layout::from_size_align(pages * 4096, 4096).unwrap();
        // SAFETY: of at least one page.
        Self(NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap(), pages * 4096)
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        let layout = Layout::from_size_align(self.1, 4096).unwrap();
        // SAFETY: from `new`, with this layout.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), layout) };
    }
}

// SAFETY: the memory is the value's own.
unsafe impl Send for Payload {}
// SAFETY: the memory is the value's own until its drop, and nothing refers into it.
unsafe impl Pinned for Payload {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: as for the trait.
        unsafe { DmaMemory::from_raw(self.0, self.1) }
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// R and W of an entry.
type Rights = u64;

pub(crate) struct State {
    pub(crate) cap: u64,
    pub(crate) ecap: u64,
    pub(crate) gsts: u32,
    pub(crate) fsts: u32,
    pub(crate) pmen: u32,
    pmen_reads: u32,
    /// Registers of interrupts that are masked.
    pub(crate) masked: BTreeSet<u32>,
    rtaddr: u64,
    /// The root table that was set last.
    root: u64,
    iqa: u64,
    iqh: u64,
    iqt: u64,
    records: Vec<[u64; 2]>,
    next_record: usize,
    /// Context entries, and the domain that each is cached as one of.
    contexts: BTreeMap<u16, (u16, [u64; 2])>,
    iotlb: BTreeMap<(u16, u64), (u64, Rights)>,
    /// Pages of level 1, by domain and the upper bits of the address.
    links: BTreeMap<(u16, u64), u64>,
    tlbs: BTreeMap<(u16, u64), (u64, Rights)>,
    /// Devices that have ATS enabled.
    pub(crate) ats: BTreeSet<u16>,
    /// The commands and descriptors carried out.
    pub(crate) log: Vec<String>,
    /// The queue is not worked on.
    pub(crate) holds: bool,
    /// Devices that do not answer.
    pub(crate) mute: BTreeSet<u16>,
    /// The number of reads of the fault status before fetched waits complete.
    pub(crate) delay: u32,
    /// Waits that have not completed: where they write, and what.
    late: Vec<(u64, u64)>,
    /// Whether nothing but a wait was carried out last.
    quiesced: bool,
    /// The next descriptor cannot be fetched.
    pub(crate) bad_fetch: bool,
    /// The number of descriptors fetched beyond one that times out.
    pub(crate) prefetched: usize,
    /// Commands are not carried out.
    pub(crate) deaf: bool,
    /// The action of another thread when the queue is found empty, and is then disabled.
    pub(crate) beside_no_queue: Option<Box<dyn FnOnce() + Send>>,
    /// Cleared errors alone do not have it go on: it fetches again when the tail is written.
    pub(crate) resumes_at_tail: bool,
    /// The queue stays where it is, whatever is cleared.
    pub(crate) stuck: bool,
    /// The time, where there is a clock: a millisecond passes whenever it is read.
    pub(crate) clock: Option<u64>,
    /// The tasks that look again after a pause.
    pub(crate) paused: Vec<Waker>,
}

/// The unit: the tests and the driver have a handle each.
#[derive(Clone)]
pub(crate) struct Double(Arc<(Mutex<State>, AtomicU32, AtomicU32)>);

impl Double {
    pub(crate) fn new(cap: u64, ecap: u64) -> Self {
        let records = vec![[0; 2]; Capabilities { cap, ecap }.fault_records() as usize];
        let state = State {
            cap,
            ecap,
            gsts: 0,
            fsts: 0,
            pmen: 1 << 31 | 1,
            pmen_reads: 0,
            masked: BTreeSet::new(),
            rtaddr: 0,
            root: 0,
            iqa: 0,
            iqh: 0,
            iqt: 0,
            records,
            next_record: 0,
            contexts: BTreeMap::new(),
            iotlb: BTreeMap::new(),
            links: BTreeMap::new(),
            tlbs: BTreeMap::new(),
            ats: BTreeSet::new(),
            log: Vec::new(),
            holds: false,
            mute: BTreeSet::new(),
            delay: 0,
            late: Vec::new(),
            quiesced: true,
            bad_fetch: false,
            prefetched: 0,
            deaf: false,
            beside_no_queue: None,
            resumes_at_tail: false,
            stuck: false,
            clock: None,
            paused: Vec::new(),
        };
        Self(Arc::new((Mutex::new(state), AtomicU32::new(0), AtomicU32::new(0))))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap()
    }

    /// Returns the number of writes of the tail, and of reads of any register.
    pub(crate) fn counts(&self) -> (u32, u32) {
        (self.0.1.load(Ordering::Relaxed), self.0.2.load(Ordering::Relaxed))
    }

    /// Works on the queue to its end, or to an error.
    pub(crate) fn run(&self) {
        self.state().work();
    }

    /// An access of a device: the physical address that it reaches.
    pub(crate) fn access(&self, device: SourceId, iova: u64, write: bool) -> Option<u64> {
        self.state().access(device.0, iova, write)
    }
}

impl Registers for Double {
    fn wake_later(&self, waker: &Waker) {
        self.state().paused.push(waker.clone());
    }
    fn read32(&self, offset: u32) -> u32 {
        self.0.2.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        match offset {
            VER => 0x10,
            GSTS => state.gsts,
            FSTS => {
                state.delay = state.delay.saturating_sub(1);
                if state.delay == 0 {
                    state.complete();
                }
                state.status()
            }
            PMEN => {
                assert!(state.cap >> 5 & 3 != 0, "a register that the unit does not have");
                let read = state.pmen;
                // It ends a while after it was told to.
                if read >> 31 == 0 {
                    state.pmen_reads += 1;
                }
                if state.pmen_reads == 3 {
                    state.pmen = 0;
                }
                read
            }
            _ => panic!("read of {offset:#x}"),
        }
    }
    fn write32(&self, offset: u32, value: u32) {
        let mut state = self.state();
        match offset {
            GCMD => {
                let ends_queue = state.gsts & !value & 1 << 26 != 0;
                if let Some(beside) = state.beside_no_queue.take_if(|_| ends_queue) {
                    drop(state);
                    beside();
                    state = self.state();
                }
                state.command(value);
            }
            FSTS => {
                assert_eq!(value & !state.status(), 0, "only what is set is cleared");
                // Written as 1, cleared. PPF follows the records.
                state.fsts &= !(value & 0x7d);
                if !state.holds && !state.resumes_at_tail {
                    state.work();
                }
            }
            PMEN => state.pmen = state.pmen & 1 | value & 1 << 31,
            FECTL | IECTL => {
                assert_eq!(value, EVENT_MASKED);
                state.masked.insert(offset);
            }
            _ => {
                let records = Capabilities { cap: state.cap, ecap: 0 }.fault_offset();
                let number = (offset - records) / 16;
                assert_eq!((offset - records) % 16, 12, "the upper half of a record");
                assert_eq!(value, 1 << 31);
                assert!(state.records[number as usize][1] >> 63 != 0, "it holds a fault");
                state.records[number as usize] = [u64::MAX >> 1; 2];
            }
        }
    }
    fn read64(&self, offset: u32) -> u64 {
        self.0.2.fetch_add(1, Ordering::Relaxed);
        let state = self.state();
        match offset {
            CAP => state.cap,
            ECAP => state.ecap,
            IQH => state.iqh,
            IQT => state.iqt,
            _ => {
                let records = Capabilities { cap: state.cap, ecap: 0 }.fault_offset();
                let at = (offset - records) as usize;
                assert_eq!(at % 8, 0, "a half of a record");
                state.records[at / 16][at % 16 / 8]
            }
        }
    }
    fn write64(&self, offset: u32, value: u64) {
        let mut state = self.state();
        match offset {
            RTADDR => state.rtaddr = value,
            IQA => {
                assert_eq!(state.gsts & 1 << 26, 0, "the queue is placed before it is enabled");
                assert_eq!(value & 0xfff, 0, "256 descriptors of 128 bits");
                state.iqa = value;
            }
            IQT => {
                assert_eq!(value & !0x7fff0, 0, "reserved bits of the tail");
                self.0.1.fetch_add(1, Ordering::Relaxed);
                state.iqt = value;
                if !state.holds {
                    state.work();
                }
            }
            _ => panic!("write of {offset:#x}"),
        }
    }
    fn now_ns(&self) -> Option<u64> {
        let clock = &mut self.state().clock;
        *clock = clock.map(|now| now + 1_000_000);
        *clock
    }
}

impl State {
    fn coherent(&self) -> bool {
        self.ecap & 1 != 0
    }

    fn read(&self, at: u64) -> Option<u64> {
        if self.coherent() {
            return word(at).map(|word| word.load(Ordering::Acquire));
        }
        word(at)?;
        // Memory that was never written back is garbage.
        Some(WRITTEN_BACK.with_borrow(|memory| memory.get(&at).copied().unwrap_or(u64::MAX)))
    }

    fn command(&mut self, value: u32) {
        if self.deaf {
            return;
        }
        let lasting = 1 << 31 | 1 << 26 | 1 << 25 | 1 << 23;
        let changed = (value ^ self.gsts) & lasting | value & 0x4900_0000;
        assert_eq!(
            changed.count_ones(),
            1,
            "one command at a time: {value:#x} over {:#x}",
            self.gsts
        );
        self.gsts = self.gsts & !lasting | value & lasting;
        let on = value & changed != 0;
        self.log.push(match changed {
            0x8000_0000 if on => {
                assert!(self.gsts & 1 << 30 != 0, "translation without a root table");
                "enable".into()
            }
            0x8000_0000 => "disable".into(),
            0x4000_0000 => {
                assert_eq!(self.gsts & 1 << 31, 0, "the root table changes while it is used");
                assert_eq!(self.rtaddr & 0xfff, 0, "legacy mode");
                self.root = self.rtaddr;
                self.gsts |= 1 << 30;
                "root".into()
            }
            0x0400_0000 if on => {
                assert_eq!((self.iqt, self.iqa == 0), (0, false), "an empty queue");
                self.iqh = 0;
                "queue".into()
            }
            0x0400_0000 => {
                assert_eq!(self.iqh, self.iqt, "the queue is empty before it is disabled");
                assert!(self.quiesced && self.late.is_empty(), "and its last wait has completed");
                "no queue".into()
            }
            _ => panic!("a command that is not expected: {value:#x}"),
        });
    }

    /// Whether the queue stands still: IQE or ITE.
    fn stands_still(&self) -> bool {
        self.fsts & (1 << 4 | 1 << 6) != 0 || self.stuck
    }

    fn work(&mut self) {
        while self.gsts & 1 << 26 != 0 && self.iqh != self.iqt && !self.stands_still() {
            let at = self.iqa + self.iqh;
            let words = [self.read(at), self.read(at + 8)].map(Option::unwrap);
            self.quiesced = words[0] & 0xf == 5;
            if std::mem::take(&mut self.bad_fetch) || self.carry_out(words).is_none() {
                self.log.push("error".into());
                self.fsts |= 1 << 4;
                return;
            }
            self.iqh = (self.iqh + 16) % 4096;
            if self.fsts & 1 << 6 != 0 {
                // Waits that were fetched are aborted.
                for _ in 0..self.prefetched {
                    if self.iqh != self.iqt {
                        self.iqh = (self.iqh + 16) % 4096;
                    }
                }
            }
        }
    }

    /// Completes the waits that were fetched.
    fn complete(&mut self) {
        for (at, data) in self.late.drain(..) {
            let status = word(at).expect("a status word");
            let before = status.load(Ordering::Relaxed);
            status.store(before >> 32 << 32 | data, Ordering::Release);
        }
    }

    /// Carries out a descriptor; `None` if it is wrong.
    fn carry_out(&mut self, [low, high]: [u64; 2]) -> Option<()> {
        let (did, sid) = ((low >> 16) as u16, (low >> 32) as u16);
        let granularity = low >> 4 & 3;
        let only = |allowed: u64, word: u64| (word & !allowed == 0).then_some(());
        match low & 0xf {
            1 => {
                only(0x0003_ffff_ffff_003f, low)?;
                only(0, high)?;
                match granularity {
                    1 => self.contexts.clear(),
                    // The entry of another domain is kept: "software programs the identifier that
                    // the entry was cached with".
                    3 => self.contexts.retain(|device, entry| (*device, entry.0) != (sid, did)),
                    _ => return None,
                }
                self.log.push(format!("context {granularity}"));
            }
            2 => {
                only(0xffff_00ff, low)?;
                assert_eq!(low & 0xc0, 0xc0, "reads and writes are drained");
                let (order, leaf_only) = (high & 0x3f, high >> 6 & 1 != 0);
                let first = high >> 12;
                match granularity {
                    1 => {
                        only(0, high)?;
                        self.iotlb.clear();
                        self.links.clear();
                    }
                    2 => {
                        only(0, high)?;
                        self.iotlb.retain(|(domain, _), _| *domain != did);
                        self.links.retain(|(domain, _), _| *domain != did);
                    }
                    3 => {
                        only(!0xf80, high)?;
                        if order > self.cap >> 48 & 0x3f || first & ((1 << order) - 1) != 0 {
                            return None;
                        }
                        let covers = |page: u64| page >> order == first >> order;
                        self.iotlb.retain(|(domain, page), _| *domain != did || !covers(*page));
                        let overlaps = |window: u64| {
                            window << 9 >> order == first >> order || first >> 9 == window
                        };
                        self.links.retain(|(domain, at), _| {
                            leaf_only || *domain != did || !overlaps(*at)
                        });
                    }
                    _ => return None,
                }
                self.log.push(format!("iotlb {granularity}"));
            }
            3 => {
                only(0xfff0_ffff_001f_f00f, low)?;
                only(!0xffe, high)?;
                // PFSID: the device itself, where the unit limits flushes by it.
                let function = low >> 12 & 0xf | low >> 52 << 4;
                let throttled = Capabilities { cap: 0, ecap: self.ecap }.throttles_by_function();
                if function != if throttled { u64::from(sid) } else { 0 } {
                    return None;
                }
                // A device without ATS need not answer.
                if self.mute.contains(&sid) || !self.ats.contains(&sid) {
                    self.log.push("no answer".into());
                    self.fsts |= 1 << 6;
                    return Some(());
                }
                let mut order = 0;
                if high & 1 != 0 {
                    order = (!(high >> 12)).trailing_zeros() + 1;
                }
                let covers = |page: u64| order > 51 || page >> order == high >> 12 >> order;
                self.tlbs.retain(|(device, page), _| *device != sid || !covers(*page));
                self.log.push("tlb".into());
            }
            5 => {
                only(0xffff_ffff_0000_00ff, low)?;
                only(!3, high)?;
                if low & 1 << 5 == 0 {
                    // SW and IF both 0: some implementations refuse it.
                    return None;
                }
                assert_eq!(high & 7, 0, "the low half of a word");
                self.late.push((high, low >> 32));
                if self.delay == 0 {
                    self.complete();
                }
                self.log.push(if low & 1 << 6 == 0 { "wait" } else { "fence" }.into());
            }
            _ => return None,
        }
        Some(())
    }

    fn status(&self) -> u32 {
        let held = |record: &[u64; 2]| record[1] >> 63 != 0;
        let count = self.records.len();
        let oldest =
            (0..count).map(|n| (self.next_record + n) % count).find(|n| held(&self.records[*n]));
        self.fsts | oldest.map_or(0, |first| 1 << 1 | (first as u32) << 8)
    }

    fn fault(&mut self, sid: u16, iova: u64, write: bool, reason: u64) {
        let record = &mut self.records[self.next_record];
        if record[1] >> 63 != 0 {
            self.fsts |= 1;
            return;
        }
        *record =
            [iova & !0xfff, 1 << 63 | u64::from(!write) << 62 | reason << 32 | u64::from(sid)];
        self.next_record = (self.next_record + 1) % self.records.len();
    }

    /// A read that was refused, before anything is enabled.
    pub(crate) fn record_fault(&mut self, sid: u16, iova: u64) {
        self.fault(sid, iova, false, 6);
    }

    fn context(&mut self, sid: u16) -> Result<[u64; 2], u64> {
        if let Some((_, entry)) = self.contexts.get(&sid) {
            return if entry[0] & 1 == 0 { Err(2) } else { Ok(*entry) };
        }
        let read = |state: &Self, at| state.read(at).ok_or(8_u64);
        let root = read(self, self.root + u64::from(sid >> 8) * 16)?;
        if read(self, self.root + u64::from(sid >> 8) * 16 + 8)? != 0 || root & 0xffe != 0 {
            return Err(10);
        }
        let caching_mode = self.cap >> 7 & 1 != 0;
        if root & 1 == 0 {
            if caching_mode {
                self.contexts.insert(sid, (0, [0; 2]));
            }
            return Err(1);
        }
        let at = (root & !0xfff) + u64::from(sid & 0xff) * 16;
        let entry = [read(self, at)?, read(self, at + 8)?];
        if entry[0] & 1 == 0 {
            if caching_mode {
                self.contexts.insert(sid, (0, entry));
            }
            return Err(2);
        }
        let levels = entry[1] & 7;
        if entry[0] & 0xff0 != 0 || entry[1] & !0x00ff_ff07 != 0 {
            return Err(11);
        }
        let supported = Capabilities { cap: self.cap, ecap: 0 }.has_levels(levels as u8 + 2);
        // TT: 1 needs support for TLBs of devices.
        let most = u64::from(Capabilities { cap: 0, ecap: self.ecap }.device_tlbs());
        if !supported || entry[0] >> 2 & 3 > most {
            return Err(3);
        }
        self.contexts.insert(sid, ((entry[1] >> 8) as u16, entry));
        Ok(entry)
    }

    fn access(&mut self, sid: u16, iova: u64, write: bool) -> Option<u64> {
        if self.gsts & 1 << 31 == 0 {
            return Some(iova);
        }
        let wanted = if write { 2 } else { 1 };
        if let Some((phys, rights)) = self.tlbs.get(&(sid, iova >> 12))
            && rights & wanted != 0
        {
            return Some(phys | iova & 0xfff);
        }
        match self.translate(sid, iova, wanted) {
            Ok((phys, rights)) => {
                if self.ats.contains(&sid) {
                    self.tlbs.insert((sid, iova >> 12), (phys, rights));
                }
                Some(phys | iova & 0xfff)
            }
            Err(reason) => {
                self.fault(sid, iova, write, reason);
                None
            }
        }
    }

    fn translate(&mut self, sid: u16, iova: u64, wanted: Rights) -> Result<(u64, Rights), u64> {
        let context = self.context(sid)?;
        if self.ats.contains(&sid) && context[0] >> 2 & 3 != 1 {
            return Err(13);
        }
        let did = (context[1] >> 8) as u16;
        let levels = (context[1] & 7) as u32 + 2;
        let refused = if wanted == 2 { 5 } else { 6 };
        if iova >> (12 + 9 * levels) != 0 || iova >> ((self.cap >> 16 & 0x3f) + 1) != 0 {
            return Err(4);
        }
        let (phys, rights) = match self.iotlb.get(&(did, iova >> 12)) {
            Some(found) => *found,
            None => {
                let found = self.walk(did, context[0] & !0xfff, levels, iova)?;
                let Some(found) = found else { return Err(refused) };
                self.iotlb.insert((did, iova >> 12), found);
                found
            }
        };
        if rights & wanted == 0 { Err(refused) } else { Ok((phys, rights)) }
    }

    /// Walks from the page of level 1 that is cached, or from the root.
    fn walk(
        &mut self,
        did: u16,
        root: u64,
        levels: u32,
        iova: u64,
    ) -> Result<Option<(u64, Rights)>, u64> {
        let (mut table, mut level, mut rights) = match self.links.get(&(did, iova >> 21)) {
            Some(table) => (*table, 1, 3),
            None => (root, levels, 3),
        };
        loop {
            let slot = iova >> (3 + 9 * level) & 0x1ff;
            let entry = self.read(table + slot * 8).ok_or(7_u64)?;
            rights &= entry;
            if entry & 3 == 0 {
                return Ok(None);
            }
            if level == 1 || entry & 1 << 7 != 0 {
                if level == 1 && entry & 1 << 7 != 0 || level > 3 {
                    return Err(12);
                }
                let below = ((1_u64 << (3 + 9 * level)) - 1) & !0xfff;
                return Ok(Some((entry & ((1 << 52) - 1) & !0xfff | iova & below, rights)));
            }
            table = entry & ((1 << 52) - 1) & !0xfff;
            level -= 1;
            if level == 1 {
                self.links.insert((did, iova >> 21), table);
            }
        }
    }
}
