//! What a driver did wrong: the kinds of findings, their collection, and the report.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many findings of one kind are kept with their details; the others are counted.
const KEPT: usize = 3;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing: nothing goes wrong because of it.
    Note,
    /// Fails, or is slow, on some systems or devices.
    Warning,
    /// Corrupts data, or is not allowed by the specification.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// A kind of finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    /// The identifier, which suppressions name.
    pub id: &'static str,
    /// Its severity.
    pub severity: Severity,
    /// What the driver probably meant, or how to mend it.
    pub advice: &'static str,
    /// The section of a specification, or the kernel's document.
    pub specification: &'static str,
}

macro_rules! kinds {
    ($($name:ident $id:literal $severity:ident $advice:literal $specification:literal;)*) => {
        /// All kinds, in the order of the page `docs/check.md`.
        pub const KINDS: &[Kind] = &[$($name),*];
        $(
            pub(crate) const $name: Kind = Kind {
                id: $id,
                severity: Severity::$severity,
                advice: $advice,
                specification: $specification,
            };
        )*
    };
}

kinds! {
    UNMAPPED "dma-unmapped" Error
        "map the memory before the command is submitted, and unmap it after its completion"
        "linux/vfio.h VFIO_IOMMU_MAP_DMA";
    REMAPPED "dma-remapped" Error
        "map an address again only after the completion of every command that uses it: otherwise \
         the device reads or writes another buffer, and no error tells"
        "linux/vfio.h VFIO_IOMMU_MAP_DMA";
    UNMAP_IN_FLIGHT "unmap-in-flight" Error
        "wait for the completion (or delete the queue, or reset) before the unmap"
        "NVM Express Base 2.0, 3.3.1.2; virtio 1.2, 2.7.13";
    MEMORY_GONE "memory-gone" Error
        "unmap from the IOMMU before munmap: the kernel keeps the pages pinned, and the device \
         writes to memory that the program no longer sees"
        "Linux Documentation/driver-api/vfio.rst";
    WRITTEN_TWICE "overlapping-reads" Error
        "give each command in flight a buffer of its own, or wait for the first one's completion: \
         the order in which a device writes the bytes is not defined"
        "NVM Express Base 2.0, 3.4.1; virtio 1.2, 5.2.6.2";
    DATA_CHANGED "data-changed" Error
        "leave the data of a write, and the list of a command, unchanged until its completion"
        "NVM Express Base 2.0, 3.3.1.2; virtio 1.2, 2.7.13";
    DIRECTION "dma-direction" Error
        "map memory that the device writes with VFIO_DMA_MAP_FLAG_WRITE (IOMMU_IOAS_MAP_WRITEABLE), \
         and memory that it reads with READ"
        "linux/vfio.h VFIO_IOMMU_MAP_DMA";
    MAP_REFUSED "map-refused-ignored" Error
        "check the result of the map: the device was given the address all the same"
        "linux/vfio.h VFIO_IOMMU_MAP_DMA";
    UNMAP_PART "unmap-part" Warning
        "unmap whole mappings: type 1 version 2 and iommufd cut none, and nothing was unmapped"
        "linux/vfio.h VFIO_IOMMU_UNMAP_DMA";
    UNMAP_NOTHING "unmap-nothing" Warning
        "unmap what was mapped, once, and look at the field size of the answer: where nothing is \
         mapped the call succeeds, and the size is 0"
        "linux/vfio.h VFIO_IOMMU_UNMAP_DMA";
    ENTRY_LIMIT "entry-limit" Warning
        "map larger pieces, or map once and reuse: type 1 allows 65,535 mappings"
        "linux/vfio.h VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL";
    MAPPED_OFTEN "mapped-often" Note
        "map memory once, and use the mapping again: each one counts against RLIMIT_MEMLOCK"
        "Linux Documentation/driver-api/vfio.rst";
    MAPS_LEFT "maps-left" Note
        "unmap before the last descriptor is closed, although the kernel then does: mappings that \
         are left are often forgotten"
        "linux/vfio.h VFIO_IOMMU_UNMAP_DMA";
    DOORBELL_VALUE "doorbell-value" Error
        "wrap the index: a doorbell takes one below the number of entries"
        "NVM Express Base 2.0, 5.2 (Invalid Doorbell Write Value)";
    HEAD_AHEAD "cq-head-ahead" Error
        "set a completion queue's doorbell to the entry after the last one whose phase says that it is \
         new, once for each that was taken: the device may refuse the value, or overwrite completions"
        "NVM Express Base 2.0, 5.2 (Invalid Doorbell Write Value)";
    SQ_OVERRUN "sq-overrun" Error
        "keep one entry of a submission queue free, and take an entry for free only after a completion \
         whose SQHD has passed it: the device may refuse the value, or miss commands"
        "NVM Express Base 2.0, 5.2 (Invalid Doorbell Write Value)";
    DOORBELL_QUEUE "doorbell-queue" Error
        "ring only doorbells of queues that exist (the admin queues do when CSTS.RDY is 1), at 1000h + (2 * queue + is completion) * (4 << \
         CAP.DSTRD); notify only queues that are enabled, after DRIVER_OK"
        "NVM Express over PCIe 1.0, 3.1.2; virtio 1.2, 4.1.5.2";
    CQ_FULL "completion-queue-full" Warning
        "submit no more commands than the completion queue has free entries, and set its doorbell to \
         the entry after the last one that was taken: completions wait, and with them the device"
        "NVM Express Base 2.0, 3.3.1.2";
    ENTRY_CHANGED "entry-changed" Error
        "leave an entry unchanged until a completion's SQHD has passed it, a descriptor until its \
         chain is used"
        "NVM Express Base 2.0, 3.3.1.2; virtio 1.2, 2.7.13";
    CID_TWICE "command-id-twice" Error
        "choose a command identifier that no outstanding command of the queue has"
        "NVM Express Base 2.0, 3.3.3.1; virtio 1.2, 2.7.13";
    QUEUE_UNMAPPED "queue-unmapped" Error
        "delete the queue, or reset the device or disable it and wait for CSTS.RDY 0, before its memory \
         is unmapped"
        "NVM Express Base 2.0, 5.5; virtio 1.2, 3.3.1";
    QUEUE_LIMIT "queue-limit" Error
        "create no more queues than Set Features (Number of Queues) granted, of at most CAP.MQES + \
         1 entries (QSIZE and AQA are 0-based), whose sizes are in CC: IOSQES 6 and IOCQES 4; of virtio of a power of two, at most queue_size"
        "NVM Express Base 2.0, 5.27.1.5; virtio 1.2, 4.1.4.3";
    QUEUE_ORDER "queue-order" Error
        "create the completion queue first and delete it last; enable virtqueues after FEATURES_OK and \
         before DRIVER_OK"
        "NVM Express Base 2.0, 5.4 to 5.7; virtio 1.2, 3.1.1";
    PRP "prp" Error
        "count the pages from NLB, which is 0-based, and the offset of PRP1: PRP2 is the second of two \
         pages, and the list of all pages after the first where there are more; the offset of PRP1 is \
         a multiple of 4, that of all other entries 0; a list that does not end in its page goes on \
         at its last entry; map what the entries name"
        "NVM Express Base 2.0, 4.1.1";
    SGL "sgl" Error
        "use SGLs only where SGLS of Identify Controller allows them, of the length of the command"
        "NVM Express Base 2.0, 4.1.2";
    TRANSFER_SIZE "transfer-size" Error
        "split transfers at MDTS of Identify Controller"
        "NVM Express Base 2.0, 5.17.2.1 (MDTS)";
    LBA_RANGE "lba-range" Error
        "end commands at the last block of the namespace (NSZE of Identify Namespace), or of the \
         disk (capacity): compare both in blocks of the same size"
        "NVM Express NVM Command Set 1.0, 3.2; virtio 1.2, 5.2.6.1";
    FIELD "command-field" Error
        "clear what is reserved, and use only what Identify reports"
        "NVM Express Base 2.0, 3.3.3.1; virtio 1.2, 5.2.6";
    OPCODE "opcode" Error
        "send only commands that the device supports, as ONCS and OACS, or the features, say"
        "NVM Express Base 2.0, 3.1.2; virtio 1.2, 5.2.3";
    NAMESPACE "namespace" Error
        "use the namespaces of the active namespace list"
        "NVM Express Base 2.0, 3.2.1";
    VIRTQUEUE "virtqueue" Error
        "keep indices below the size of the queue, buffers that the device writes behind those that \
         it reads, and the rings aligned to 16, 2 and 4 bytes"
        "virtio 1.2, 2.7";
    FEATURES "features" Error
        "accept VIRTIO_F_VERSION_1, VIRTIO_F_ACCESS_PLATFORM (the device is behind an IOMMU), and \
         nothing that is not offered"
        "virtio 1.2, 2.2.1 and 6.1";
    ADMIN_CHANGED "admin-queue-changed" Error
        "set AQA, ASQ and ACQ while CC.EN is 0, and change them only then"
        "NVM Express Base 2.0, 3.1.3.8";
    ENABLE "enable" Error
        "give CC and the admin queues values that CAP allows before CC.EN is set"
        "NVM Express Base 2.0, 3.5.1";
    EARLY_CHANGE "enable-early" Error
        "wait until CSTS.RDY has followed CC.EN"
        "NVM Express Base 2.0, 3.1.3.5";
    BUS_MASTER "bus-master-off" Error
        "set bit 2 of the command register: VFIO leaves it clear"
        "PCI Local Bus 3.0, 6.2.2";
    NO_EVENTFD "interrupt-lost" Warning
        "set an eventfd for each interrupt that a queue raises, by VFIO_DEVICE_SET_IRQS, and unmask \
         INTx after each one"
        "linux/vfio.h VFIO_DEVICE_SET_IRQS";
    RESET_IN_FLIGHT "reset-in-flight" Warning
        "wait for the commands, or delete their queues, before the device is reset, disabled or \
         closed; after an error take their data for unknown: none of them will complete"
        "NVM Express Base 2.0, 3.7.2; virtio 1.2, 3.3";
    FAILURE_IGNORED "failure-ignored" Warning
        "watch CSTS.CFS (of virtio DEVICE_NEEDS_RESET, of a removal VFIO's request interrupt and \
         registers that read as ones), or limit the time of a command; then reset or close the device"
        "NVM Express Base 2.0, 9.5; virtio 1.2, 2.1.2";
    NO_SHUTDOWN "shutdown-skipped" Note
        "write CC.SHN and wait for CSTS.SHST before the device is closed: a volatile cache may be lost"
        "NVM Express Base 2.0, 3.6.1";
    NOT_COVERED "not-covered" Note
        "test on a kernel what depends on the request: the program received the answer of one that \
         does not know it"
        "docs/check.md";
    FOREIGN_CALLER "foreign-caller" Error
        "build the program for this machine's 64-bit architecture: check supports no other"
        "docs/check.md";
}

/// A mistake that would explain a finding, and need not be the one that was made.
pub(crate) type Likely = &'static str;

/// A command has one block more than there is room for.
pub(crate) const NLB: Likely =
    "perhaps NLB (CDW12) has the number of blocks: it is 0-based, one less";
/// A queue has one entry more than there is room for, or than its driver uses.
pub(crate) const QUEUE_SIZE: Likely =
    "perhaps AQA or QSIZE (CDW10) has the number of entries: both are 0-based, one less";

/// A finding.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The identifier of its kind.
    pub id: &'static str,
    /// Its severity.
    pub severity: Severity,
    /// What happened, in one sentence.
    pub text: String,
    /// The command, register or range concerned, and where in the program, a line each.
    pub details: Vec<String>,
    /// How to mend it.
    pub advice: &'static str,
    /// The section of a specification.
    pub specification: &'static str,
    /// How often it was found, with this text; the details are those of the first time.
    pub count: u64,
}

/// Returns a number of things in words.
pub(crate) fn counted(number: impl fmt::Display + PartialEq + From<u8>, thing: &str) -> String {
    let ending = if number == 1.into() { "" } else { "s" };
    format!("{number} {thing}{ending}")
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}: {}", self.severity, self.id, self.text)?;
        for detail in &self.details {
            writeln!(f, "    {detail}")?;
        }
        if self.count > 1 {
            writeln!(f, "    found {} times, this is the first", self.count)?;
        }
        writeln!(f, "    mend: {}", self.advice)?;
        writeln!(f, "    see: {}", self.specification)
    }
}

#[derive(Debug, Default)]
struct State {
    kept: Vec<Finding>,
    counts: BTreeMap<&'static str, u64>,
}

/// The findings of a run.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    state: Mutex<State>,
    suppressed: Vec<String>,
    /// How many were made of those that are suppressed.
    hidden: AtomicU64,
}

impl Findings {
    pub(crate) fn new(suppressed: Vec<String>) -> Self {
        Self { suppressed, ..Self::default() }
    }

    // Each change is a push or an addition, so a panic leaves it consistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a finding. `details` is called where they will be printed.
    pub(crate) fn add(&self, kind: &Kind, text: String, details: impl FnOnce() -> Vec<String>) {
        if self.suppressed.iter().any(|id| id == kind.id) {
            self.hidden.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if !self.count(kind, &text) {
            return;
        }
        // Without the lock: the caller may take its own.
        let details = details();
        let mut state = self.state();
        let is_it = |kept: &&mut Finding| kept.id == kind.id && kept.text == text;
        if let Some(kept) = state.kept.iter_mut().find(is_it) {
            kept.details = details;
        }
    }

    /// Counts a finding, and returns whether it is a new one that is kept, without its details yet.
    fn count(&self, kind: &Kind, text: &str) -> bool {
        let mut state = self.state();
        *state.counts.entry(kind.id).or_default() += 1;
        let mut number = 0;
        for kept in state.kept.iter_mut().filter(|kept| kept.id == kind.id) {
            if kept.text == text {
                kept.count += 1;
                return false;
            }
            number += 1;
        }
        if number == KEPT {
            return false;
        }
        state.kept.push(Finding {
            id: kind.id,
            severity: kind.severity,
            text: text.to_owned(),
            details: Vec::new(),
            advice: kind.advice,
            specification: kind.specification,
            count: 1,
        });
        true
    }

    /// Returns how many findings were suppressed.
    pub(crate) fn suppressed(&self) -> u64 {
        self.hidden.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self) -> (Vec<Finding>, BTreeMap<&'static str, u64>) {
        let state = std::mem::take(&mut *self.state());
        (state.kept, state.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_unique_words() {
        for (at, kind) in KINDS.iter().enumerate() {
            assert!(kind.id.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'));
            assert!(KINDS[..at].iter().all(|other| other.id != kind.id), "{}", kind.id);
            assert!(!kind.advice.is_empty() && !kind.specification.is_empty());
        }
    }

    #[test]
    fn each_advice_begins_with_what_to_do() {
        const VERBS: &str = "accept build check choose clear count create delete end give keep leave \
                             map ring send set split submit test unmap use wait watch wrap write";
        for kind in KINDS {
            let first = kind.advice.split(' ').next().unwrap();
            assert!(VERBS.split(' ').any(|verb| verb == first), "{}: {}", kind.id, kind.advice);
        }
    }

    #[test]
    fn one_thing_is_no_plural() {
        let said = [0, 1, 2].map(|number: usize| counted(number, "command"));
        assert_eq!(said, ["0 commands", "1 command", "2 commands"]);
    }

    #[test]
    fn a_repeated_finding_says_how_often_it_was_made() {
        let findings = Findings::default();
        let printed = |times: usize| {
            (0..times).for_each(|_| findings.add(&OPCODE, "x".to_owned(), Vec::new));
            findings.take().0[0].to_string()
        };
        assert!(!printed(1).contains("times"));
        assert!(printed(3).contains("\n    found 3 times, this is the first\n"));
    }

    #[test]
    fn repetitions_are_counted_and_not_kept() {
        let findings = Findings::new(vec!["opcode".into()]);
        for n in 0..10 {
            findings.add(&UNMAPPED, format!("access {}", n / 2), || vec![format!("round {n}")]);
        }
        findings.add(&OPCODE, "suppressed".into(), || unreachable!());
        assert_eq!(findings.suppressed(), 1);
        let (kept, counts) = findings.take();
        let kept: Vec<_> =
            kept.iter().map(|kept| (&*kept.text, &*kept.details[0], kept.count)).collect();
        assert_eq!(
            kept,
            [("access 0", "round 0", 2), ("access 1", "round 2", 2), ("access 2", "round 4", 2)]
        );
        assert_eq!(counts.into_iter().collect::<Vec<_>>(), [("dma-unmapped", 10)]);
    }
}
