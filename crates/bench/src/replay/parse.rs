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
//! use pinfold_bench::replay::parse::{Action, Line};
//!
//! let line = "t-1 [000] ..... 12.5: dma_unmap_page: 0000:00:03.0 dir=TO_DEVICE dma_addr=f0c0a size=54 attrs=";
//! let Line::Event(event) = Line::parse(line) else { panic!() };
//! assert_eq!(event.time_ns, Some(12_500_000_000));
//! assert_eq!(event.action, Action::Unmap { device: "0000:00:03.0", allocated: false, address: 0xf0c0a });
//! ```

mod event;
mod fields;
#[cfg(test)]
mod tests;

pub use event::{Action, Event, Line, Recorded};
pub use fields::{Damage, List, MAX_ADDRESS, MAX_BYTES};

use fields::{Fields, checked_size, device_name, hex};
use pinfold_core::access::Access;

/// What the DMA interface returns as the address of a map that failed.
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

/// How many bytes of a line its header is in: a task's name, a few numbers and an event's name.
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

/// Returns what a device may do with memory that is mapped in this direction.
fn access(fields: Fields<'_>) -> Result<Access, Damage> {
    match fields.find("dir").ok_or(Damage::MissingField)? {
        "TO_DEVICE" => Ok(Access::READ),
        "FROM_DEVICE" => Ok(Access::WRITE),
        // Debugging code maps without a direction.
        "BIDIRECTIONAL" | "NONE" => Ok(Access::all()),
        _ => Err(Damage::BadField),
    }
}
