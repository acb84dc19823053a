//! Parses the lines of a trace: those of `/sys/kernel/tracing/trace`, of `trace-cmd report` and of
//! `perf script`.
//!
//! ```text
//!   iperf3-221     [000] b..1.    31.913312: dma_map_page: 0000:00:03.0 dir=TO_DEVICE dma_addr=ff884c0a size=54 phys_addr=…
//!   task-pid       [cpu] flags    time:      event:        what the event prints
//! ```
//!
//! The flags may be missing, a thread group may be in parentheses between task and processor, and
//! the event may be preceded by its system (`dma:dma_map_page`). Fields are found by their names:
//! kernels since 6.12 have added some.
//!
//! ```
//! use pinfold_replay::parse::{Action, Line};
//!
//! let line = "t-1 [000] ..... 12.5: dma_unmap_page: 0000:00:03.0 dir=TO_DEVICE dma_addr=f0c0a size=54 attrs=";
//! let Line::Event(event) = Line::parse(line) else { panic!() };
//! assert_eq!(event.time_ns, Some(12_500_000_000));
//! assert_eq!(event.action, Action::Unmap { device: "0000:00:03.0", allocated: false, address: 0xf0c0a });
//! ```

use pinfold_core::access::Access;
use std::fmt;

/// The address that the DMA interface returns for a map that failed.
const MAP_ERROR: u64 = u64::MAX;

impl<'l> Line<'l> {
    /// Parses one line, without its end. Any text is accepted. O(length).
    pub fn parse(line: &'l str) -> Self {
        let text = line.trim();
        if is_header(text) {
            return Self::Header;
        }
        if let Some(events) = lost(text) {
            return Self::Lost { events };
        }
        let Some(header) = Header::find(text) else { return Self::Damaged(Damage::NoEvent) };
        let Header { time_ns, cpu, pid, event, fields } = header;
        match Action::parse(event, fields) {
            Ok(Some(action)) => Self::Event(Event { time_ns, cpu, pid, action }),
            Ok(None) => Self::Other,
            Err(damage) => Self::Damaged(damage),
        }
    }
}

/// Recognises what tracefs (`# …`) and trace-cmd (`cpus=2`, `CPU 1 is empty`) print beside the
/// events.
fn is_header(text: &str) -> bool {
    let of_trace_cmd =
        text.starts_with("cpus=") || text.starts_with("CPU ") && text.ends_with(" is empty");
    text.is_empty() || text.starts_with('#') || of_trace_cmd
}

/// Recognises `CPU:1 [LOST 20 EVENTS]` (tracefs) and `CPU:1 [20 EVENTS DROPPED]` (trace-cmd), with
/// or without the number.
fn lost(text: &str) -> Option<Option<u64>> {
    let (cpu, note) = text.strip_prefix("CPU:")?.split_once('[')?;
    cpu.trim().parse::<u32>().ok()?;
    let note = note.strip_suffix(']')?;
    let known = note.contains("EVENTS") && (note.contains("LOST") || note.contains("DROPPED"));
    known.then(|| note.split_whitespace().find_map(|word| word.parse().ok()))
}

/// A line up to the event's fields.
struct Header<'l> {
    time_ns: Option<u64>,
    cpu: u32,
    pid: u32,
    event: &'l str,
    fields: Fields<'l>,
}

/// The most bytes of a line's header: a task's name, a few numbers and an event's name.
const HEADER: usize = 512;

impl<'l> Header<'l> {
    /// Tries each number in brackets as the processor: the name of a task may contain some too.
    /// O(1) but for the fields, which are not looked at.
    fn find(text: &'l str) -> Option<Self> {
        let end = (0..=HEADER.min(text.len())).rev().find(|end| text.is_char_boundary(*end))?;
        let (head, behind) = text.split_at_checked(end)?;
        let mut found = head
            .match_indices('[')
            .find_map(|(at, _)| Self::at(head.get(..at)?, head.get(at + 1..)?))?;
        // The fields go on behind the part that was looked at.
        let fields = end.checked_sub(found.fields.0.len())?;
        if !behind.is_empty() {
            found.fields = Fields(text.get(fields..)?);
        }
        Some(found)
    }

    fn at(task: &str, rest: &'l str) -> Option<Self> {
        let (cpu, rest) = rest.split_once(']')?;
        let cpu = cpu.parse().ok()?;
        let pid = pid(task)?;
        let (first, after) = word(rest)?;
        // The flags may be missing.
        let (at, rest) = if time(first).is_some() { (first, after) } else { word(after)? };
        let time_ns = time(at)?;
        let (event, fields) = word(rest)?;
        let event = event.strip_suffix(':')?;
        let event = event.rsplit_once(':').map_or(event, |(_, name)| name);
        Some(Self { time_ns, cpu, pid, event, fields: Fields(fields) })
    }
}

/// Returns the number behind the last `-` (or blank, as perf prints it), before an optional thread
/// group.
fn pid(task: &str) -> Option<u32> {
    let task = task.trim_end();
    let task = match task.strip_suffix(')') {
        Some(with_group) => with_group.rsplit_once('(')?.0.trim_end(),
        None => task,
    };
    task.rsplit(['-', ' ']).next()?.parse().ok()
}

/// Splits the first word off, and the blanks behind it.
fn word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    if text.is_empty() {
        return None;
    }
    Some(text.split_once(' ').map_or((text, ""), |(word, rest)| (word, rest.trim_start())))
}

/// Reads `12.345678:`, in seconds. Clocks that count something else print no point, and give
/// `None`.
fn time(text: &str) -> Option<Option<u64>> {
    let text = text.strip_suffix(':')?;
    let Some((seconds, fraction)) = text.split_once('.') else {
        return text.parse::<u64>().ok().map(|_| None);
    };
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| (1..=9).contains(digits))?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction = fraction.parse::<u64>().ok()? * 10u64.pow(9 - digits);
    let ns = seconds.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(fraction)?;
    Some(Some(ns))
}

impl<'l> Action<'l> {
    /// Parses the fields of an event; `None` if it maps and unmaps nothing.
    fn parse(event: &str, fields: Fields<'l>) -> Result<Option<Self>, Damage> {
        let action = match event {
            "dma_map_page" | "dma_map_phys" | "dma_map_resource" => Self::map,
            "dma_alloc" | "dma_alloc_pages" | "dma_alloc_sgt" => Self::alloc,
            "dma_map_sg" => Self::map_list,
            "dma_unmap_page" | "dma_unmap_phys" | "dma_unmap_resource" => Self::unmap,
            "dma_free" | "dma_free_pages" | "dma_free_sgt" => Self::free,
            "dma_unmap_sg" => Self::unmap_list,
            "dma_map_sg_err" | "dma_alloc_sgt_err" => Self::failed,
            "map" | "unmap" | "attach_device_to_domain" | "io_page_fault" => {
                // Other systems have events of these names.
                let Some(fields) = fields.0.strip_prefix("IOMMU:") else { return Ok(None) };
                return Self::iommu(event, Fields(fields.trim_start())).map(Some);
            }
            _ => return Ok(None),
        };
        if fields.0.starts_with("[FAILED TO PARSE]") {
            return Err(Damage::NotDecoded);
        }
        action(fields).map(Some)
    }

    fn map(fields: Fields<'l>) -> Result<Self, Damage> {
        let device = fields.first()?;
        let access = access(fields)?;
        let address = fields.hex("dma_addr")?;
        let (size, memory) = (fields.decimal("size")?, fields.hex("phys_addr")?);
        fields.has("attrs")?;
        if address == MAP_ERROR {
            return Ok(Self::Failed { device });
        }
        let size = checked_size(memory, checked_size(address, size)?)?;
        Ok(Self::Map {
            device,
            allocated: false,
            access,
            address,
            size,
            memory: Recorded::At(memory),
        })
    }

    fn alloc(fields: Fields<'l>) -> Result<Self, Damage> {
        let device = fields.first()?;
        // Kernels before 6.13 do not record a direction.
        let access = if fields.find("dir").is_some() { access(fields)? } else { Access::all() };
        let (address, size) = (fields.hex("dma_addr")?, fields.decimal("size")?);
        fields.has("attrs")?;
        let memory = if fields.find("phys_addrs").is_some() {
            Recorded::Segments(fields.list("phys_addrs")?)
        } else if fields.find("phys_addr").is_some() {
            Recorded::At(fields.hex("phys_addr")?)
        } else {
            Recorded::No
        };
        let null = fields
            .find("virt_addr")
            .is_some_and(|text| text.trim_matches('0').is_empty() || text == "(null)");
        if address == MAP_ERROR || address == 0 && null {
            return Ok(Self::Failed { device });
        }
        let size = checked_size(address, size)?;
        match memory {
            Recorded::At(at) => drop(checked_size(at, size)?),
            Recorded::Segments(list) if list.count() == 0 => return Err(Damage::BadList),
            Recorded::Segments(list) => {
                list.iter().try_for_each(|at| checked_size(at, size).map(drop))?;
            }
            Recorded::No => {}
        }
        Ok(Self::Map { device, allocated: true, access, address, size, memory })
    }

    fn map_list(fields: Fields<'l>) -> Result<Self, Damage> {
        let device = fields.first()?;
        let access = access(fields)?;
        let (addresses, sizes) = (fields.list("dma_addrs")?, fields.list("sizes")?);
        let memory = fields.list("phys_addrs")?;
        fields.has("attrs")?;
        let count = addresses.count();
        if count == 0 || sizes.count() != count || memory.count() < count {
            return Err(Damage::BadList);
        }
        for (address, size) in addresses.iter().zip(sizes.iter()) {
            checked_size(address, size)?;
        }
        let total = sizes
            .iter()
            .try_fold(0u64, |sum, size| sum.checked_add(size))
            .ok_or(Damage::BadRange)?;
        memory.iter().try_for_each(|at| checked_size(at, total).map(drop))?;
        let truncated = fields.0.contains("[TRUNCATED]");
        Ok(Self::MapList { device, access, addresses, sizes, memory, truncated })
    }

    fn unmap(fields: Fields<'l>) -> Result<Self, Damage> {
        let (device, address) = (fields.first()?, fields.hex("dma_addr")?);
        fields.has("attrs")?;
        Ok(Self::Unmap { device, allocated: false, address })
    }

    fn free(fields: Fields<'l>) -> Result<Self, Damage> {
        let (device, address) = (fields.first()?, fields.hex("dma_addr")?);
        // The last field depends on the event; a size always follows the address.
        fields.decimal("size")?;
        Ok(Self::Unmap { device, allocated: true, address })
    }

    fn unmap_list(fields: Fields<'l>) -> Result<Self, Damage> {
        let (device, memory) = (fields.first()?, fields.list("phys_addrs")?);
        fields.has("attrs")?;
        Ok(Self::UnmapList { device, memory })
    }

    fn failed(fields: Fields<'l>) -> Result<Self, Damage> {
        Ok(Self::Failed { device: fields.first()? })
    }

    fn iommu(event: &str, fields: Fields<'l>) -> Result<Self, Damage> {
        match event {
            "map" | "unmap" => {}
            "attach_device_to_domain" => {
                let device = fields.find("device").filter(|name| !name.is_empty());
                return Ok(Self::Attach {
                    device: device_name(device.ok_or(Damage::MissingField)?)?,
                });
            }
            _ => {
                // The driver, then the device: `IOMMU:e1000e 0000:00:03.0 iova=…`.
                fields.hex("iova")?;
                let device = fields.0.split_whitespace().nth(1).filter(|word| !word.contains('='));
                return Ok(Self::Fault {
                    device: device_name(device.ok_or(Damage::MissingField)?)?,
                });
            }
        }
        // Not as limited as a mapping of a driver: a virtual machine's memory is mapped by such
        // calls.
        let (iova, size) = (fields.hex("iova")?, fields.decimal("size")?);
        let end = iova
            .checked_add(size)
            .filter(|end| (iova + 1..=MAX_ADDRESS).contains(end))
            .ok_or(Damage::BadRange)?;
        // Newer kernels print the end, too: it shows whether the size is complete.
        if let Some((_, printed)) = fields.0.split_once(" - ")
            && hex(printed.split_whitespace().next().unwrap_or_default()) != Some(end)
        {
            return Err(Damage::BadRange);
        }
        if event == "unmap" {
            return Ok(Self::IommuUnmap { iova, size, unmapped: fields.decimal("unmapped_size")? });
        }
        let memory = fields.hex("paddr")?;
        memory.checked_add(size).filter(|end| *end <= MAX_ADDRESS).ok_or(Damage::BadRange)?;
        Ok(Self::IommuMap { iova, memory, size })
    }
}

/// Returns the device's access to memory that is mapped in this direction.
fn access(fields: Fields<'_>) -> Result<Access, Damage> {
    match fields.find("dir").ok_or(Damage::MissingField)? {
        "TO_DEVICE" => Ok(Access::READ),
        "FROM_DEVICE" => Ok(Access::WRITE),
        // Debugging code maps without a direction.
        "BIDIRECTIONAL" | "NONE" => Ok(Access::all()),
        _ => Err(Damage::BadField),
    }
}

// The content of a line of a trace.

/// A line of a trace.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Line<'l> {
    /// A line of the tracer itself, or an empty one.
    Header,
    /// Events were lost here: the buffer of a processor was full.
    Lost {
        /// The number of lost events, if the kernel knows it.
        events: Option<u64>,
    },
    /// An event of the DMA interface or of the IOMMU.
    Event(Event<'l>),
    /// An event of something else, or one that maps nothing (`dma_sync_*`).
    Other,
    /// It cannot be read.
    Damaged(Damage),
}

/// An event.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Event<'l> {
    /// When it happened, if the trace has its times in seconds.
    pub time_ns: Option<u64>,
    /// The processor.
    pub cpu: u32,
    /// The task that ran there: what it was interrupted by has the same number.
    pub pid: u32,
    /// The event.
    pub action: Action<'l>,
}

/// The events of a trace.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Action<'l> {
    /// One range was mapped or allocated: `dma_map_page`, `dma_map_phys`, `dma_map_resource`,
    /// `dma_alloc`, `dma_alloc_pages`, `dma_alloc_sgt`.
    Map {
        /// The device.
        device: &'l str,
        /// Whether the memory was allocated for it; `dma_free*` frees it.
        allocated: bool,
        /// The access that it is permitted.
        access: Access,
        /// The address at which the device finds it.
        address: u64,
        /// The size in bytes.
        size: u64,
        /// The physical address, if it is recorded; of several segments, the list.
        memory: Recorded<'l>,
    },
    /// A scatter list was mapped: `dma_map_sg`.
    MapList {
        /// The device.
        device: &'l str,
        /// The access that it is permitted.
        access: Access,
        /// The addresses at which the device finds its segments.
        addresses: List<'l>,
        /// Their sizes in bytes.
        sizes: List<'l>,
        /// The physical addresses of the mapped memory: at least as many.
        memory: List<'l>,
        /// Whether the lists were longer than the kernel records.
        truncated: bool,
    },
    /// One range was unmapped or freed: `dma_unmap_page`, `dma_unmap_phys`, `dma_unmap_resource`,
    /// `dma_free`, `dma_free_pages`, `dma_free_sgt`.
    Unmap {
        /// The device.
        device: &'l str,
        /// Whether the memory was freed too.
        allocated: bool,
        /// The address at which the device found it.
        address: u64,
    },
    /// A scatter list was unmapped: `dma_unmap_sg`.
    UnmapList {
        /// The device.
        device: &'l str,
        /// The physical addresses that were given to the map.
        memory: List<'l>,
    },
    /// A map or an allocation failed: `dma_map_sg_err`, `dma_alloc_sgt_err`, or without an address.
    Failed {
        /// The device.
        device: &'l str,
    },
    /// The IOMMU's driver mapped a range: `iommu:map`. The device is not recorded.
    IommuMap {
        /// The address at which devices find it.
        iova: u64,
        /// The physical address.
        memory: u64,
        /// The size in bytes.
        size: u64,
    },
    /// The IOMMU's driver unmapped a range: `iommu:unmap`. The device is not recorded.
    IommuUnmap {
        /// The address at which devices found it.
        iova: u64,
        /// The size in bytes.
        size: u64,
        /// The number of bytes unmapped.
        unmapped: u64,
    },
    /// A device was attached to a domain: `iommu:attach_device_to_domain`.
    Attach {
        /// The device.
        device: &'l str,
    },
    /// A device accessed an address that is not mapped: `iommu:io_page_fault`.
    Fault {
        /// The device.
        device: &'l str,
    },
}

/// The memory of a range.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Recorded<'l> {
    /// Not recorded, as for most allocations.
    No,
    /// At one physical address.
    At(u64),
    /// In segments, whose sizes are not recorded.
    Segments(List<'l>),
}

// The fields of an event: `name=value` in any order, because kernels differ in which they print
// and where.

/// Why a line that should be an event is not one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Damage {
    /// It is longer than [`MAX_LINE`](crate::MAX_LINE).
    TooLong,
    /// It is neither an event nor one of the tracer's own lines.
    NoEvent,
    /// A field that the event has in every kernel is missing: the line was cut.
    MissingField,
    /// A field has a value that cannot be read.
    BadField,
    /// The range ends beyond [`MAX_ADDRESS`], or the size is 0 or more than [`MAX_BYTES`].
    BadRange,
    /// The lists of a scatter list contradict each other.
    BadList,
    /// `trace-cmd` could not decode the event.
    NotDecoded,
}

/// The most bytes of one mapping: an I/O address and its size are 32 bits in the segments of a
/// scatter list, and no driver maps more at once.
pub const MAX_BYTES: u64 = 4 << 30;
/// The longest name of a device; the kernel's are shorter.
const MAX_NAME: usize = 128;
/// The end of all addresses of both kinds; no machine has more than 2^60.
pub const MAX_ADDRESS: u64 = 1 << 60;

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLong => "longer than 64 KiB",
            Self::NoEvent => "not a line of a trace",
            Self::MissingField => "cut off: a field is missing",
            Self::BadField => "a field cannot be read",
            Self::BadRange => "the size is 0 or more than 4 GiB, or the range ends beyond 2^60",
            Self::BadList => "the lists of the scatter list contradict each other",
            Self::NotDecoded => {
                "not decoded by trace-cmd (FAILED TO PARSE): use the text of tracefs"
            }
        })
    }
}

/// A list of numbers: `{0x1000,0x2000}`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct List<'l>(&'l str);

impl<'l> List<'l> {
    /// Reads a list with its braces.
    fn read(text: &'l str) -> Option<Self> {
        let list = Self(text.strip_prefix('{')?.strip_suffix('}')?);
        list.numbers().all(|number| number.is_some()).then_some(list)
    }

    fn numbers(self) -> impl Iterator<Item = Option<u64>> + 'l {
        let words = self.0.split([',', ' ']).filter(|word| !word.is_empty());
        words.map(hex)
    }

    /// Returns the numbers.
    pub fn iter(self) -> impl Iterator<Item = u64> + 'l {
        self.numbers().flatten()
    }

    /// Returns how many there are. O(n).
    pub fn count(self) -> usize {
        self.numbers().count()
    }
}

/// The text of an event behind its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'l>(pub(super) &'l str);

impl<'l> Fields<'l> {
    /// Returns the first word, which has no name: the device.
    pub(super) fn first(self) -> Result<&'l str, Damage> {
        let word = self.0.split_whitespace().next().filter(|word| !word.contains('='));
        device_name(word.ok_or(Damage::MissingField)?)
    }

    /// Returns the text of a field; a list with its braces.
    pub(super) fn find(self, name: &str) -> Option<&'l str> {
        let mut rest = self.0;
        loop {
            let at = rest.find(name)?;
            let starts =
                rest.get(..at).is_none_or(|before| before.is_empty() || before.ends_with(' '));
            rest = rest.get(at + name.len()..)?;
            let Some(value) = rest.strip_prefix('=').filter(|_| starts) else { continue };
            let end = if value.starts_with('{') {
                value.find('}').map(|at| at + 1)
            } else {
                value.find(' ')
            };
            return value.get(..end.unwrap_or(value.len()));
        }
    }

    fn required(self, name: &str) -> Result<&'l str, Damage> {
        self.find(name).ok_or(Damage::MissingField)
    }

    /// Returns a hexadecimal number, with or without `0x`.
    pub(super) fn hex(self, name: &str) -> Result<u64, Damage> {
        hex(self.required(name)?).ok_or(Damage::BadField)
    }

    /// Returns a decimal number.
    pub(super) fn decimal(self, name: &str) -> Result<u64, Damage> {
        let text = self.required(name)?;
        if text.is_empty() {
            return Err(Damage::MissingField);
        }
        text.parse().map_err(|_| Damage::BadField)
    }

    /// Returns a list.
    pub(super) fn list(self, name: &str) -> Result<List<'l>, Damage> {
        let text = self.required(name)?;
        if text.starts_with('{') && !text.ends_with('}') {
            return Err(Damage::MissingField);
        }
        List::read(text).ok_or(Damage::BadField)
    }

    /// Succeeds if a field is present. The last one of an event shows that its line is complete.
    pub(super) fn has(self, name: &str) -> Result<(), Damage> {
        self.required(name).map(drop)
    }
}

/// Returns a device's name, if it is one that can be printed: a terminal obeys what a trace says.
pub(super) fn device_name(name: &str) -> Result<&str, Damage> {
    let printable = name.len() <= MAX_NAME && name.bytes().all(|byte| byte.is_ascii_graphic());
    if printable { Ok(name) } else { Err(Damage::BadField) }
}

/// Returns the size in a field, if a range of this size at `start` is valid.
pub(super) fn checked_size(start: u64, size: u64) -> Result<u64, Damage> {
    let inside = start.checked_add(size).is_some_and(|end| end <= MAX_ADDRESS);
    if size == 0 || size > MAX_BYTES || !inside { Err(Damage::BadRange) } else { Ok(size) }
}

/// Reads a hexadecimal number, with or without `0x`.
pub(super) fn hex(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    // `from_str_radix` accepts a sign.
    if digits.starts_with(['+', '-']) { None } else { u64::from_str_radix(digits, 16).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name_wherever_it_is() {
        let fields =
            Fields("0000:00:02.0 dma_addr=fff0 size=12 unmapped_size=8 list={0x1, 0x2,0x3} last=");
        assert_eq!(fields.first(), Ok("0000:00:02.0"));
        assert_eq!((fields.hex("dma_addr"), fields.decimal("size")), (Ok(0xfff0), Ok(12)));
        assert_eq!(fields.decimal("unmapped_size"), Ok(8));
        assert_eq!(fields.list("list").map(|list| list.iter().collect()), Ok(vec![1, 2, 3]));
        assert_eq!(
            (fields.find("last"), fields.find("addr"), fields.find("mapped_size")),
            (Some(""), None, None)
        );
    }

    #[test]
    fn truncated_lines_are_told_from_wrong_ones() {
        let cut = Fields("dev size= list={0x1,0x");
        assert_eq!(cut.decimal("size"), Err(Damage::MissingField));
        assert_eq!(cut.list("list"), Err(Damage::MissingField));
        assert_eq!(Fields("dev list={0x1,x}").list("list"), Err(Damage::BadField));
        assert_eq!(Fields("dev list={}").list("list").map(List::count), Ok(0));
        for bad in ["size=-1", "size=0x10", "size=99999999999999999999"] {
            assert_eq!(Fields(bad).decimal("size"), Err(Damage::BadField), "{bad}");
        }
        for bad in ["at=+1", "at=-1", "at=g", "at=0x1ffffffffffffffff"] {
            assert_eq!(Fields(bad).hex("at"), Err(Damage::BadField), "{bad}");
        }
    }

    #[test]
    fn ranges_are_checked() {
        assert_eq!(checked_size(0, 0), Err(Damage::BadRange));
        assert_eq!(checked_size(0, MAX_BYTES), Ok(MAX_BYTES));
        assert_eq!(checked_size(0, MAX_BYTES + 1), Err(Damage::BadRange));
        assert_eq!(checked_size(MAX_ADDRESS - 1, 1), Ok(1));
        assert_eq!(checked_size(MAX_ADDRESS - 1, 2), Err(Damage::BadRange));
        assert_eq!(checked_size(u64::MAX, 2), Err(Damage::BadRange));
    }
}

#[cfg(test)]
#[path = "tests/parse.rs"]
mod lines;
