//! A unit: its required capabilities, the order in which it is enabled and disabled, its domains,
//! and the devices attached to them.

use crate::descriptor::{self, TlbDevice};
use crate::domain::{DomainQueue, DomainState, MAX_TLBS};
use crate::fault::Fault;
use crate::queue::{Aborts, HardwarePage, Queue, REGISTER_POLLS, Sender};
use crate::registers::{
    Capabilities, EVENT_MASKED, FECTL, FSTS, FaultStatus, GCMD, GSTS, Global, IECTL, IQH, IQT,
    PMEN, PROTECTED_ENABLE, PROTECTED_STATUS, RTADDR, Registers,
};
use crate::source::SourceId;
use crate::write_back::{SecondStage, WriteBack};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use pinfold_core::addr::{Iova, IovaRange, PageSize, PhysAddr};
use pinfold_core::domain::{Domain, PhysTranslator, TableBackend};
use pinfold_core::invalidate::{QueueError, Scope, Ticket, WaitLimit};
use pinfold_core::iova::{IovaError, IovaSpace};
use pinfold_core::table::{Table, TableError, TableMemory};
use spin::Mutex;

/// Why a unit cannot be used, or did not carry out a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// It lacks something.
    #[error("the unit cannot be used: {what} (CAP {cap:#x}, ECAP {ecap:#x})")]
    Unsupported {
        /// The missing capability.
        what: &'static str,
        /// Its capability register.
        cap: u64,
        /// Its extended capability register.
        ecap: u64,
    },
    /// Someone else uses it.
    #[error(
        "the unit is in use (global status {status:#x}): boot with intel_iommu=off intremap=off, so that the kernel leaves it"
    )]
    InUse {
        /// Its status register.
        status: u32,
    },
    /// A register did not change as a command asks.
    #[error("the unit did not carry out a command: {what} (global status {status:#x})")]
    Command {
        /// The command.
        what: &'static str,
        /// Its status register.
        status: u32,
    },
    /// A flush was not carried out.
    #[error(
        "the unit did not carry out a flush of {what}: devices may still use what it had cached"
    )]
    NotFlushed {
        /// The object of the flush.
        what: &'static str,
    },
    /// It is not enabled.
    #[error("cannot {what}: the unit is not enabled: call enable first")]
    NotEnabled {
        /// The attempted operation.
        what: &'static str,
    },
    /// There is no memory for tables.
    #[error("no page is left for the unit's tables: {advice}")]
    NoPages {
        /// The next step for the user.
        advice: &'static str,
    },
    /// All domain identifiers have been given out.
    #[error(
        "the unit has created all {limit} domains that it can: an identifier is not used again, even when its domain has ended"
    )]
    NoDomains {
        /// The number of domains that it can create.
        limit: u32,
    },
    /// The device is attached, or its detach could not be flushed.
    #[error("device {device} is attached to domain {domain} already: detach it first")]
    Attached {
        /// The device.
        device: SourceId,
        /// Its domain.
        domain: u16,
    },
    /// The domain has as many devices with TLBs as one flush of all can name.
    #[error(
        "device {device} cannot be attached with its TLB: the domain has {limit} such devices, and the queue has no room to flush more"
    )]
    TooManyTlbs {
        /// The device.
        device: SourceId,
        /// How many a domain can have.
        limit: usize,
    },
    /// The device is not attached to the domain.
    #[error("device {device} is not attached to this domain")]
    NotAttached {
        /// The device.
        device: SourceId,
    },
    /// The table was refused.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The address space was refused.
    #[error(transparent)]
    Iova(#[from] IovaError),
}

/// The backend of a domain of a unit.
type UnitBackend<R, W, T> = TableBackend<SecondStage<W>, DomainQueue<R, W, T>>;

/// A domain that was created on a unit: attaches devices to it, and has their faults.
pub struct Attachments {
    state: Arc<DomainState>,
    root: PhysAddr,
    levels: u8,
    faults: Arc<PendingFaults>,
}

/// Faults that were read from the unit, and that their owner has not taken; and whether some of the
/// owner's may be missing.
type PendingFaults = Mutex<(Vec<Fault>, bool)>;

/// The number of faults kept for an owner that does not take them: as many as the largest unit has
/// records. Later ones are counted as left out, so that one domain's device takes no memory without
/// limit, and nothing from the faults of other domains.
const PENDING_FAULTS: usize = 256;

impl Attachments {
    /// Returns the domain's identifier (DID), which [`UnitError::Attached`] names.
    pub fn id(&self) -> u16 {
        self.state.id
    }
}

impl fmt::Debug for Attachments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachments").field("domain", &self.state.id).finish_non_exhaustive()
    }
}

/// One DMA remapping unit.
///
/// Dropping it leaves it enabled: devices then still reach mapped memory, and nothing else.
/// [`disable`](Self::disable) requires that no device is active.
pub struct Unit<R, W> {
    queue: Arc<Queue<R, W>>,
    capabilities: Capabilities,
    /// Serializes commands ("Global Command Register"). Devices are attached and detached between
    /// them: each needs the queue to the end.
    commands: Mutex<()>,
    tables: Mutex<Tables>,
    /// Status words: word 0 for the unit, word 1 for waits without a reader, then the domains'.
    status: HardwarePage,
    faults: Mutex<SortedFaults>,
    /// Flushes that the unit itself has requested.
    flushes: Mutex<u32>,
    aborts: Aborts,
    phys_bits: u32,
}

struct Tables {
    memory: Box<dyn TableMemory>,
    root: HardwarePage,
    /// Context tables, by bus.
    contexts: BTreeMap<u8, HardwarePage>,
    domains: u16,
}

/// The faults of each domain, by its identifier less [`FIRST_DOMAIN`], while its [`Attachments`]
/// exist, and those of devices that are attached to none of these.
#[derive(Default)]
struct SortedFaults {
    domains: Vec<Weak<PendingFaults>>,
    stray: PendingFaults,
}

impl SortedFaults {
    /// Adds a fault of a device that is attached to the domain `id`, if to any.
    fn add(&self, fault: Fault, id: Option<u16>) {
        let number = id.and_then(|id| id.checked_sub(FIRST_DOMAIN));
        let of_domain = number.and_then(|number| self.domains.get(usize::from(number))?.upgrade());
        let mut pending = of_domain.as_deref().unwrap_or(&self.stray).lock();
        if pending.0.len() < PENDING_FAULTS {
            pending.0.push(fault);
        } else {
            pending.1 = true;
        }
    }

    /// Tells every owner that the unit had no record for a fault, which may have been its own.
    fn add_lost(&self) {
        let domains: Vec<_> = self.domains.iter().filter_map(Weak::upgrade).collect();
        let all = domains.iter().map(Arc::as_ref).chain([&self.stray]);
        all.for_each(|pending| pending.lock().1 = true);
    }
}

impl Tables {
    fn page<W: WriteBack>(memory: &dyn TableMemory) -> Result<HardwarePage, UnitError> {
        let no_pages = UnitError::NoPages { advice: memory.advice() };
        let pages = memory.grow(1).ok_or(no_pages)?;
        let page =
            HardwarePage { page: pages.pages().first().ok_or(no_pages)?, phys: pages.phys() };
        page.zero::<W>();
        Ok(page)
    }
}

/// Status words that are not a domain's. Identifier 0 is not used for a domain either: with caching
/// mode it tags entries that are not present.
const UNIT_STATUS: usize = 0;
const UNSEEN_STATUS: usize = 1;
/// The first identifier of a domain; below are the words above.
const FIRST_DOMAIN: u16 = 2;
/// The last one has the last status word.
const LAST_DOMAIN: u16 = 511;
/// The number of polls for a flush that the unit itself waits for.
const FLUSH_POLLS: u32 = if cfg!(test) { 10_000 } else { 100_000_000 };
/// The number of submissions of a flush of the unit's own that is aborted.
const FLUSH_ATTEMPTS: u32 = 4;

/// Commands that both ways to disable a unit give.
const DISABLE: &str = "to disable translation";
const EMPTY_QUEUE: &str = "to empty the queue";

/// P of root and context entries, bit 0: present ("Root Entry", "Context Entry").
const PRESENT: u64 = 1;
/// TT of a context entry, bits 2 and 3: 1 lets a device translate addresses by itself.
const WITH_DEVICE_TLB: u64 = 1 << 2;

impl<R: Registers, W: WriteBack> Unit<R, W> {
    /// Takes a unit that is not in use, and prepares its tables. Nothing is enabled yet. Root and
    /// context tables, the queue and the status words come from `memory`; physical addresses of the
    /// machine have `phys_bits` bits ([`Dmar::address_bits`](crate::dmar::Dmar)).
    ///
    /// # Errors
    /// [`UnitError::InUse`], [`UnitError::Unsupported`], [`UnitError::NoPages`]: no register has
    /// been written.
    pub fn new(
        registers: R,
        memory: Box<dyn TableMemory>,
        phys_bits: u32,
    ) -> Result<Arc<Self>, UnitError> {
        refuse_in_use(&registers)?;
        let capabilities = Capabilities::read(&registers);
        let checks = [
            (capabilities.queued_invalidation(), "it has no queued invalidation (ECAP, QI)"),
            (capabilities.drains(), "its flushes do not wait for accesses (CAP, DRD and DWD)"),
            (
                !capabilities.needs_write_buffer_flush(),
                "its write buffer has to be flushed (CAP, RWBF)",
            ),
            (capabilities.levels().is_some(), "it has no tables of 3 to 5 levels (CAP, SAGAW)"),
            (
                capabilities.coherent() || W::FOR_NON_COHERENT,
                "it does not look into the processor's caches (ECAP, C), and stores are not written back",
            ),
        ];
        if let Some((_, what)) = checks.into_iter().find(|(holds, _)| !holds) {
            let Capabilities { cap, ecap } = capabilities;
            return Err(UnitError::Unsupported { what, cap, ecap });
        }
        let page = || Tables::page::<W>(memory.as_ref());
        let (root, ring, status) = (page()?, page()?, page()?);
        let unseen = PhysAddr::new(status.phys.raw() + UNSEEN_STATUS as u64 * 8);
        let queue = Queue::new(registers, ring, unseen);
        Ok(Arc::new(Self {
            capabilities,
            commands: Mutex::new(()),
            aborts: Aborts::new(&queue),
            queue: Arc::new(queue),
            status,
            faults: Mutex::default(),
            flushes: Mutex::new(0),
            tables: Mutex::new(Tables {
                memory,
                root,
                contexts: BTreeMap::new(),
                domains: FIRST_DOMAIN,
            }),
            phys_bits,
        }))
    }

    /// Returns its registers.
    pub(crate) fn registers(&self) -> &R {
        &self.queue.registers
    }

    /// Returns its capabilities.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Enables the unit: from here on a device reaches the mappings of its domain, and a device
    /// that is attached to no domain reaches nothing.
    ///
    /// In this order: faults and errors that an earlier owner has left are cleared, since they would be
    /// taken for this one's; the root table ("Root Table Address Register"); the queue; a flush of all
    /// context entries and then of all translations, which the unit may have cached by an older
    /// table; translation; and the end of the regions that were protected instead.
    ///
    /// A flush that a domain requests before, or after a [`disable`](Self::disable), is submitted
    /// by the first poll or wait after this call, and completes then.
    ///
    /// # Errors
    /// [`UnitError::InUse`] if it is enabled already, by this program or another: no register has
    /// been written. [`UnitError::Command`], [`UnitError::NotFlushed`]: features enabled before the
    /// step that failed stay enabled.
    pub fn enable(&self) -> Result<(), UnitError> {
        let _one = self.commands.lock();
        refuse_in_use(self.registers())?;
        // Polled, not interrupted.
        self.registers().write32(FECTL, EVENT_MASKED);
        self.registers().write32(IECTL, EVENT_MASKED);
        self.forget_faults();
        let root = self.tables.lock().root.phys;
        // TTM, bits 10 and 11, is 0: legacy mode.
        self.registers().write64(RTADDR, root.raw());
        command(self.registers(), Global::ROOT_TABLE, true, "to take the root table")?;
        self.queue.place();
        command(self.registers(), Global::QUEUE, true, "to enable the queue")?;
        self.queue.set_open(true);
        self.flush(&[descriptor::all_contexts()], "all context entries")?;
        self.flush(&[descriptor::all_translations()], "all translations")?;
        // From here on the unit may cache what a domain clears.
        self.queue.set_caches(true);
        command(self.registers(), Global::TRANSLATION, true, "to enable translation")?;
        if self.capabilities.has_protected_regions() {
            let value = self.registers().read32(PMEN);
            self.registers().write32(PMEN, value & !PROTECTED_ENABLE);
            let protects = || self.registers().read32(PMEN) & PROTECTED_STATUS != 0;
            poll(self.registers(), "to end the protection of regions", protects, false)?;
        }
        Ok(())
    }

    /// Disables translation, and then the queue, once it is empty and a wait of the unit's own was the
    /// last to complete: before that, flushes that were fetched may still be carried out ("Queued
    /// Invalidation Interface").
    ///
    /// # Errors
    /// [`UnitError::Command`]: what comes after the step that failed is still enabled.
    ///
    /// # Safety
    /// From here on devices reach all memory. None of them may be active.
    pub unsafe fn disable(&self) -> Result<(), UnitError> {
        let _one = self.commands.lock();
        let was_open = self.queue.is_open();
        // First: nothing is submitted behind the descriptors that the queue still executes.
        self.queue.set_open(false);
        let disabled = self.end_translation(was_open).and_then(|()| {
            // The next `enable` clears the records.
            self.read_faults();
            // SAFETY: the caller's promise is the one required.
            unsafe { disable(self.registers()) }
        });
        // On error the queue is still enabled, because it is disabled last.
        self.queue.set_open(disabled.is_err() && was_open);
        disabled
    }

    /// Disables translation, and then waits for the queue, if that is enabled.
    fn end_translation(&self, queue: bool) -> Result<(), UnitError> {
        command(self.registers(), Global::TRANSLATION, false, DISABLE)?;
        self.queue.set_caches(false);
        if queue && self.flush(&[], "the queue").is_err() {
            let status = self.registers().read32(GSTS);
            return Err(UnitError::Command { what: EMPTY_QUEUE, status });
        }
        Ok(())
    }

    fn refuse_not_enabled(&self, what: &'static str) -> Result<(), UnitError> {
        if self.queue.is_open() { Ok(()) } else { Err(UnitError::NotEnabled { what }) }
    }

    /// Submits descriptors and waits until they have been carried out.
    fn flush(
        &self,
        descriptors: &[descriptor::Words],
        what: &'static str,
    ) -> Result<(), UnitError> {
        let mut number = self.flushes.lock();
        'attempts: for _ in 0..FLUSH_ATTEMPTS {
            *number = number.wrapping_add(1);
            let at = PhysAddr::new(self.status.phys.raw() + UNIT_STATUS as u64 * 8);
            let wait = descriptor::wait(at, *number, false);
            let fill = |put: &mut dyn FnMut(descriptor::Words)| {
                descriptors.iter().chain([&wait]).for_each(|words| put(*words));
            };
            let count = descriptors.len() + 1;
            let mut polls = 0;
            while let Err(error) = self.queue.submit(count, &self.aborts, Sender::Unit, fill) {
                polls += 1;
                if error == QueueError::Failed || polls == FLUSH_POLLS {
                    return Err(UnitError::NotFlushed { what });
                }
                self.queue.recover();
            }
            for polls in 0..FLUSH_POLLS {
                if self.status.word(UNIT_STATUS).load(Ordering::Acquire) == u64::from(*number) {
                    return Ok(());
                }
                if polls % 256 == 255 {
                    self.queue.recover();
                }
                if self.queue.has_aborted(&self.aborts) {
                    continue 'attempts;
                }
                if self.queue.has_failed() {
                    break;
                }
                core::hint::spin_loop();
            }
            break;
        }
        Err(UnitError::NotFlushed { what })
    }

    /// Creates a domain with a table of its own. Its memory is translated by `translator`, its table
    /// grows by `memory`, and its flushes are waited for within `limit`.
    ///
    /// Not part of its addresses is 0xfee0_0000 to 0xfeef_ffff: writes there are interrupts, and not
    /// translated ("Interrupt Address Range").
    ///
    /// In the life of a unit it succeeds as often as there are identifiers, 510 times at most
    /// ([`Capabilities::domains`] less 2): the identifier of a domain that has ended is not used again,
    /// and the pages of its table stay taken. Who needs a domain now and then keeps it.
    ///
    /// # Errors
    /// [`UnitError::NoDomains`], [`UnitError::NoPages`], [`UnitError::Table`], [`UnitError::Iova`].
    pub fn create_domain<T: PhysTranslator + 'static>(
        self: &Arc<Self>,
        translator: T,
        memory: Box<dyn TableMemory>,
        limit: WaitLimit,
    ) -> Result<(Domain, Attachments), UnitError>
    where
        R: 'static,
    {
        let (backend, attachments) = self.create_backend(translator, memory, limit, Ticket(0))?;
        let bits = backend.bits().min(self.capabilities.address_bits());
        let domain = Domain::new(Arc::new(backend), IovaSpace::new(bits)?);
        if let Ok(interrupts) = IovaRange::new(Iova::new(0xfee0_0000), 1 << 20) {
            // Refused only where something is in use, and nothing is.
            let _ = domain.reserve_range(interrupts);
        }
        Ok((domain, attachments))
    }

    /// Creates the backend of a domain.
    pub(crate) fn create_backend<T: PhysTranslator>(
        self: &Arc<Self>,
        translator: T,
        memory: Box<dyn TableMemory>,
        limit: WaitLimit,
        first: Ticket,
    ) -> Result<(UnitBackend<R, W, T>, Attachments), UnitError> {
        let capabilities = self.capabilities;
        let levels = capabilities.levels().unwrap_or(3);
        let pages = memory.grow(1).ok_or(UnitError::NoPages { advice: memory.advice() })?;
        let largest = match capabilities.has_large_leaves() {
            (true, true) => PageSize::Size1G,
            (true, false) => PageSize::Size2M,
            (false, _) => PageSize::Size4K,
        };
        let table = Table::<SecondStage<W>>::new(pages, levels)?
            .with_max_leaf(largest)
            .with_phys_bits(self.phys_bits)?
            .with_memory(memory);
        let faults = Arc::new(PendingFaults::default());
        let id = {
            // Both locked, so that the faults are in the order of the identifiers.
            let mut sorted = self.faults.lock();
            let mut tables = self.tables.lock();
            let end = capabilities.domains().min(u32::from(LAST_DOMAIN) + 1);
            let id = tables.domains;
            if u32::from(id) >= end {
                return Err(UnitError::NoDomains { limit: end - u32::from(FIRST_DOMAIN) });
            }
            tables.domains += 1;
            sorted.domains.push(Arc::downgrade(&faults));
            id
        };
        let state = Arc::new(DomainState::new(id, &self.status));
        let root = table.root();
        let queue =
            DomainQueue::new(Arc::clone(&self.queue), Arc::clone(&state), translator, limit, first);
        let backend = TableBackend::new("vtd", queue, table);
        Ok((backend, Attachments { state, root, levels, faults }))
    }

    /// Attaches a device: it reaches the domain's mappings. With `tlb`, the number of flushes that
    /// the device can queue (ATS, "Invalidate Queue Depth"; 0 means 32), it may translate addresses
    /// by itself; it is a physical function. The caller enables ATS in it afterwards, with a smallest
    /// translation unit (STU) of 0, 4 KiB, and then it has cached nothing yet. Until then it may leave
    /// flushes of the domain unanswered, which the unit reports after its time-out, and which are
    /// submitted again.
    ///
    /// A device with `tlb` is trusted: the unit does not check requests that the device marks as
    /// translated ("Context Entry", TT 1). A device that lies reaches all memory, and one that keeps
    /// translations which it was told to drop reaches unmapped memory.
    ///
    /// `device` is the requester identifier that accesses carry. A bridge from PCI Express to PCI
    /// sends those of the devices behind it as device 0 of its secondary bus, and a device with
    /// phantom functions uses their identifiers too. Neither is supported: such accesses are
    /// refused and recorded, unless another device is attached by that identifier. The unit does not
    /// know the buses: an owner of the machine that does refuses the device (`pinfold::vtd`).
    ///
    /// # Errors
    /// [`UnitError::NotEnabled`], [`UnitError::Attached`], [`UnitError::NoPages`],
    /// [`UnitError::Unsupported`] (a TLB that the unit does not support),
    /// [`UnitError::TooManyTlbs`]: nothing has changed. [`UnitError::NotFlushed`]: it is attached,
    /// and may not yet reach mapped memory.
    pub fn attach(
        &self,
        device: SourceId,
        domain: &Attachments,
        tlb: Option<u8>,
    ) -> Result<(), UnitError> {
        if tlb.is_some() && !self.capabilities.device_tlbs() {
            let Capabilities { cap, ecap } = self.capabilities;
            let what = "it does not support TLBs of devices (ECAP, DT)";
            return Err(UnitError::Unsupported { what, cap, ecap });
        }
        let _one = self.commands.lock();
        self.refuse_not_enabled("attach a device")?;
        // Of the time before: no domain's.
        self.read_faults();
        let did = domain.state.id;
        {
            let mut tables = self.tables.lock();
            let [low, high] = self.context(&mut tables, device)?;
            // Also of an entry that `detach` has cleared and could not flush: the unit may still
            // have it cached, as one of that domain, which no flush below names.
            if domain_in(high) != 0 {
                return Err(UnitError::Attached { device, domain: domain_in(high) });
            }
            if let Some(queue_depth) = tlb
                && !domain.state.add_tlb(TlbDevice { device, queue_depth })
            {
                return Err(UnitError::TooManyTlbs { device, limit: MAX_TLBS });
            }
            // AW, bits 0 to 2: 1 stands for 3 levels, 2 for 4, 3 for 5; DID, bits 8 to 23.
            let width = u64::from(domain.levels - 2);
            high.store(width | u64::from(did) << 8, Ordering::Relaxed);
            W::write_back(core::slice::from_ref(high));
            let kind = if tlb.is_some() { WITH_DEVICE_TLB } else { 0 };
            // The present bit last: the unit may read the entry at any time.
            low.store(domain.root.raw() | kind | PRESENT, Ordering::Release);
            W::write_back(core::slice::from_ref(low));
        }
        // With caching mode the unit may have cached that nothing is there, and without it no entry
        // that is not present: one flush serves both. The table's entries likewise.
        self.flush_context(device, descriptor::NOT_PRESENT, did)
    }

    /// Detaches a device: when this returns, it reaches nothing. The caller ends ATS in the device
    /// afterwards: without it, a device need not answer the flush of its TLB.
    ///
    /// # Errors
    /// [`UnitError::NotEnabled`], [`UnitError::NotAttached`]: nothing has changed.
    /// [`UnitError::NotFlushed`]: the device may still reach the domain's mappings, and later ones;
    /// it counts as attached until a later call has flushed.
    pub fn detach(&self, device: SourceId, domain: &Attachments) -> Result<(), UnitError> {
        let _one = self.commands.lock();
        self.refuse_not_enabled("detach a device")?;
        let did = domain.state.id;
        let [low, high] = self.context(&mut self.tables.lock(), device)?;
        if domain_in(high) != did {
            return Err(UnitError::NotAttached { device });
        }
        low.store(0, Ordering::Release);
        W::write_back(core::slice::from_ref(low));
        // Each behind a wait, since each is filled from the one before ("Invalidation of Translation
        // Caches").
        self.flush_context(device, did, did)?;
        if let Some(tlb) = domain.state.tlb_of(device) {
            let throttled = self.capabilities.throttles_by_function();
            let flush = descriptor::device_tlb(tlb, throttled, Scope::Domain);
            self.flush(&[flush], "a device's TLB")?;
        }
        // Only now: until here the domain's flushes name it too, and after an error the call is
        // repeated. The unit reads nothing of an entry that is not present.
        domain.state.remove_tlb(device);
        // While the device's faults are the domain's.
        self.read_faults();
        high.store(0, Ordering::Relaxed);
        W::write_back(core::slice::from_ref(high));
        Ok(())
    }

    /// Flushes the context entry of a device, which is cached as one of domain `cached`, and then
    /// the cached entries of the domain `did`.
    fn flush_context(&self, device: SourceId, cached: u16, did: u16) -> Result<(), UnitError> {
        self.flush(&[descriptor::context(cached, device)], "a context entry")?;
        let translations = descriptor::translations(did, Scope::Domain, false);
        self.flush(&[translations], "a domain's translations")
    }

    /// The context entry of a device: the low and the high word. Entry `n` of the root table has 16
    /// bytes and is that of bus `n`; entry `m` of a context table is that of device and function `m`.
    fn context(
        &self,
        tables: &mut Tables,
        device: SourceId,
    ) -> Result<[&'static core::sync::atomic::AtomicU64; 2], UnitError> {
        let bus = device.bus();
        let page = match tables.contexts.get(&bus) {
            Some(page) => *page,
            None => {
                let page = Tables::page::<W>(tables.memory.as_ref())?;
                // CTP, bits 12 to 63. The high word is reserved.
                let entry = tables.root.word(usize::from(bus) * 2);
                entry.store(page.phys.raw() | PRESENT, Ordering::Release);
                W::write_back(core::slice::from_ref(entry));
                tables.contexts.insert(bus, page);
                page
            }
        };
        let first = usize::from(device.device_and_function()) * 2;
        Ok([page.word(first), page.word(first + 1)])
    }

    /// Returns the identifier of the domain that a device is attached to, also while its detach is
    /// not flushed.
    pub(crate) fn domain_of(&self, device: SourceId) -> Option<u16> {
        let tables = self.tables.lock();
        let page = tables.contexts.get(&device.bus())?;
        let high = page.word(usize::from(device.device_and_function()) * 2 + 1);
        Some(domain_in(high)).filter(|id| *id != 0)
    }

    /// Returns the accesses of the devices of `domain` that were refused since its last call, the
    /// oldest first, and whether some may be missing: a fault for which the unit had no record free
    /// may have been any domain's, and an owner that takes none has its first 256 kept.
    ///
    /// The records of all domains are read, and each is kept for its owner. A fault belongs to the
    /// domain that its device was attached to when it was read; records are also read before a device
    /// is attached, and when its detach has been flushed.
    pub fn take_faults(&self, domain: &Attachments) -> (Vec<Fault>, bool) {
        let _one = self.commands.lock();
        self.read_faults();
        core::mem::take(&mut *domain.faults.lock())
    }

    /// Returns the refused accesses of devices that are attached to no domain, or to one whose
    /// [`Attachments`] had been dropped when their records were read, as
    /// [`take_faults`](Self::take_faults) does those of a domain.
    pub fn take_stray_faults(&self) -> (Vec<Fault>, bool) {
        let _one = self.commands.lock();
        self.read_faults();
        core::mem::take(&mut *self.faults.lock().stray.lock())
    }

    /// Reads all fault records, and keeps each fault for its owner. The commands are locked.
    ///
    /// A record is decoded before it is freed, and its low half is read while it is held: after that
    /// the unit may write it ("Fault Recording Registers").
    fn read_faults(&self) {
        let status = FaultStatus::from_bits_retain(self.registers().read32(FSTS));
        if !status.intersects(FaultStatus::PENDING | FaultStatus::OVERFLOW) {
            return;
        }
        let sorted = self.faults.lock();
        if status.contains(FaultStatus::PENDING) {
            let records = self.capabilities.fault_records();
            let first = status.first_record();
            for number in (0..records).map(|number| (first + number) % records) {
                let at = self.capabilities.fault_offset() + number * 16;
                let high = self.registers().read64(at + 8);
                if high & Fault::HELD == 0 {
                    continue;
                }
                let low = self.registers().read64(at);
                if let Some(fault) = Fault::decode(low, high) {
                    sorted.add(fault, self.domain_of(fault.device));
                }
                self.free_record(at);
            }
        }
        if status.contains(FaultStatus::OVERFLOW) {
            self.registers().write32(FSTS, FaultStatus::OVERFLOW.bits());
            sorted.add_lost();
        }
    }

    /// Frees all fault records, and clears the errors.
    fn forget_faults(&self) {
        for number in 0..self.capabilities.fault_records() {
            let at = self.capabilities.fault_offset() + number * 16;
            if self.registers().read64(at + 8) & Fault::HELD != 0 {
                self.free_record(at);
            }
        }
        let errors = FaultStatus::OVERFLOW
            | FaultStatus::QUEUE_ERROR
            | FaultStatus::COMPLETION_ERROR
            | FaultStatus::TIME_OUT;
        let status = FaultStatus::from_bits_retain(self.registers().read32(FSTS)) & errors;
        if !status.is_empty() {
            self.registers().write32(FSTS, status.bits());
        }
    }

    /// Writes the upper half of the high word alone: F is its bit 31, and cleared by a 1.
    fn free_record(&self, at: u32) {
        self.registers().write32(at + 12, 1 << 31);
    }

    /// The status word of a domain.
    #[cfg(test)]
    pub(crate) fn status_for_test(&self, domain: u16) -> &'static core::sync::atomic::AtomicU64 {
        self.status.word(usize::from(domain) % 512)
    }

    /// A queue for the domain of `attachments`, without a table.
    #[cfg(test)]
    pub(crate) fn queue_for_test<T>(
        self: &Arc<Self>,
        attachments: &Attachments,
        translator: T,
        limit: WaitLimit,
    ) -> DomainQueue<R, W, T> {
        let state = Arc::clone(&attachments.state);
        DomainQueue::new(Arc::clone(&self.queue), state, translator, limit, Ticket(0))
    }

    /// Returns how many answers of devices to flushes of their TLBs were wrong.
    pub fn wrong_answers(&self) -> u32 {
        self.queue.wrong_answers.load(Ordering::Relaxed)
    }
}

/// Disables translation of a unit, and then its queue, once that is empty, for an owner of the
/// registers that outlives the unit's other handles. Unlike [`Unit::disable`] it cannot see whether
/// fetched descriptors have completed: flushes that matter have been waited for.
///
/// # Errors
/// As there. A queue that has stopped at a descriptor (IQE) is reported at once, and stays enabled:
/// nothing is left that could replace the descriptor.
///
/// # Safety
/// As there; and nothing else gives the unit a command meanwhile.
pub unsafe fn disable(registers: &impl Registers) -> Result<(), UnitError> {
    command(registers, Global::TRANSLATION, false, DISABLE)?;
    // QH and QT, bits 4 to 18.
    let place = |register| registers.read64(register) >> 4 & 0x7fff;
    let is_empty = || place(IQH) == place(IQT);
    let errors = || FaultStatus::from_bits_retain(registers.read32(FSTS));
    // A device that has not answered holds up the queue. It is not active, and translation has ended.
    let is_stopped = || {
        if errors().contains(FaultStatus::TIME_OUT) {
            registers.write32(FSTS, FaultStatus::TIME_OUT.bits());
            registers.write64(IQT, registers.read64(IQT));
        }
        errors().contains(FaultStatus::QUEUE_ERROR)
    };
    poll(registers, EMPTY_QUEUE, || is_empty() || is_stopped(), true)?;
    if !is_empty() {
        // It never will be: the descriptor is the owner's of the queue, whose handles are gone.
        let what = "to empty the queue, which has stopped at an error (FSTS, IQE)";
        return Err(UnitError::Command { what, status: registers.read32(GSTS) });
    }
    command(registers, Global::QUEUE, false, "to disable the queue")
}

/// Refuses a unit of which something is enabled.
fn refuse_in_use(registers: &impl Registers) -> Result<(), UnitError> {
    let status = registers.read32(GSTS);
    let used = Global::TRANSLATION | Global::QUEUE | Global::INTERRUPTS;
    if Global::from_bits_retain(status).intersects(used) {
        return Err(UnitError::InUse { status });
    }
    Ok(())
}

/// Gives a command, and waits until the status says that it has been carried out: bit `bit` is
/// then `on`. Everything that is enabled stays so ("Global Command Register": software reads the
/// status, masks the commands of one time, and changes one bit).
fn command(
    registers: &impl Registers,
    bit: Global,
    on: bool,
    what: &'static str,
) -> Result<(), UnitError> {
    let lasting = registers.read32(GSTS) & Global::LASTING;
    if bit.bits() & Global::LASTING != 0 && (lasting & bit.bits() != 0) == on {
        return Ok(());
    }
    let value = if on { lasting | bit.bits() } else { lasting & !bit.bits() };
    registers.write32(GCMD, value);
    poll(registers, what, || registers.read32(GSTS) & bit.bits() != 0, on)
}

fn poll(
    registers: &impl Registers,
    what: &'static str,
    read: impl Fn() -> bool,
    wanted: bool,
) -> Result<(), UnitError> {
    for _ in 0..REGISTER_POLLS {
        if read() == wanted {
            return Ok(());
        }
        core::hint::spin_loop();
    }
    Err(UnitError::Command { what, status: registers.read32(GSTS) })
}

/// DID of a context entry, bits 8 to 23 of its high word.
#[expect(clippy::cast_possible_truncation, reason = "16 bits")]
fn domain_in(high: &core::sync::atomic::AtomicU64) -> u16 {
    (high.load(Ordering::Relaxed) >> 8) as u16
}

impl<R, W> fmt::Debug for Unit<R, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unit").field("capabilities", &self.capabilities).finish_non_exhaustive()
    }
}
