//! The calls of a device's descriptor: information, interrupts, reset, configuration space.

use super::Caller;
use super::abi::{Answer, Capabilities, Struct};
use crate::function::Function;
use crate::irq;
use crate::process;
use std::sync::Arc;

/// The number of regions (`VFIO_PCI_NUM_REGIONS`), the BAR whose accesses are calls, and the regions
/// that are not BARs.
const REGIONS: u32 = 9;
const CALLED: u32 = 4;
const CONFIG: u32 = 7;
const VGA: u32 = 8;
const REGION_SHIFT: u32 = 40;
const READ_WRITE: u32 = 3;
const MAPPABLE: u32 = 4;
const HAS_CHAIN: u32 = 8;
/// `VFIO_REGION_INFO_CAP_MSIX_MAPPABLE`.
const CAP_MSIX_MAPPABLE: u16 = 3;

const DATA_NONE: u32 = 1;
const DATA_BOOL: u32 = 2;
const DATA_EVENTFD: u32 = 4;
const ACTION_MASK: u32 = 8;
const ACTION_UNMASK: u32 = 16;
const ACTION_TRIGGER: u32 = 32;

/// Returns how many interrupts of a kind there are.
fn count(function: &Function, kind: u32) -> u32 {
    match kind {
        irq::MSI => function.layout.messages.into(),
        irq::MSIX => function.layout.vectors.into(),
        _ => 1,
    }
}

/// `VFIO_DEVICE_GET_INFO`.
pub(crate) fn info(caller: &Caller) -> Answer {
    let mut info = Struct::sized(&caller.memory, caller.argument, 16)?;
    let given = usize::try_from(info.u32(0)).unwrap_or(24).min(24);
    info.0.resize(24, 0);
    // It can be reset, and is a PCI device.
    info.set_u32(4, 1 | 2);
    info.set_u32(8, REGIONS);
    info.set_u32(12, u32::try_from(irq::KINDS).unwrap_or(0));
    info.set_u32(16, 0);
    info.0.truncate(given);
    info.write(&caller.memory, caller.argument)
}

/// `VFIO_DEVICE_GET_REGION_INFO`.
pub(crate) fn region(function: &Function, caller: &Caller) -> Answer {
    const WHOLE: usize = 32;
    let mut info = Struct::sized(&caller.memory, caller.argument, WHOLE)?;
    let index = info.u32(8);
    if index >= REGIONS || index == VGA {
        return Err(libc::EINVAL);
    }
    let (flags, size) = match index {
        0 => (READ_WRITE | MAPPABLE, u64::from(function.layout.bar_bytes)),
        CALLED if function.layout.called_bytes > 0 => {
            (READ_WRITE, u64::from(function.layout.called_bytes))
        }
        CONFIG => (READ_WRITE, crate::pci::CONFIG_BYTES as u64),
        _ => (0, 0),
    };
    info.set_u32(4, flags);
    info.set_u32(12, 0);
    info.set_u64(16, size);
    info.set_u64(24, u64::from(index) << REGION_SHIFT);
    if index == 0 {
        info.set_u32(4, flags | HAS_CHAIN);
        let mut chain = Capabilities::default();
        chain.add(WHOLE, CAP_MSIX_MAPPABLE, 1, &[]);
        chain.finish(&mut info, WHOLE, 12, &caller.memory, caller.argument)?;
    }
    info.write(&caller.memory, caller.argument)
}

/// `VFIO_DEVICE_GET_IRQ_INFO`.
pub(crate) fn irq_info(function: &Function, caller: &Caller) -> Answer {
    const EVENTFD: u32 = 1;
    const NO_RESIZE: u32 = 8;
    let mut info = Struct::sized(&caller.memory, caller.argument, 16)?;
    let kind = info.u32(8);
    let flags = match kind {
        // Maskable, and masked by its delivery.
        irq::INTX => EVENTFD | 2 | 4,
        // Vectors may be added while others are enabled (Linux 6.5).
        irq::MSIX => EVENTFD,
        irq::MSI | irq::ERROR | irq::REQUEST => EVENTFD | NO_RESIZE,
        _ => return Err(libc::EINVAL),
    };
    info.set_u32(4, flags);
    info.set_u32(12, count(function, kind));
    info.write(&caller.memory, caller.argument)
}

/// `VFIO_DEVICE_SET_IRQS`.
pub(crate) fn set_irqs(function: &Function, caller: &Caller) -> Answer {
    const LEAST: usize = 20;
    let set = Struct::sized(&caller.memory, caller.argument, LEAST)?;
    let (argsz, flags, kind) = (set.u32(0), set.u32(4), set.u32(8));
    let (start, number) = (set.u32(12), set.u32(16));
    if usize::try_from(kind).map_or(true, |kind| kind >= irq::KINDS)
        || number >= u32::MAX - start
        || flags & !0x3f != 0
    {
        return Err(libc::EINVAL);
    }
    let most = count(function, kind);
    if start >= most || start.saturating_add(number) > most {
        return Err(libc::EINVAL);
    }
    let data = flags & (DATA_NONE | DATA_BOOL | DATA_EVENTFD);
    let size = match data {
        DATA_NONE => 0,
        DATA_BOOL => 1,
        DATA_EVENTFD => 4,
        _ => return Err(libc::EINVAL),
    };
    let room = usize::try_from(argsz).unwrap_or(usize::MAX) - LEAST;
    let wanted = usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(size);
    if room < wanted {
        return Err(libc::EINVAL);
    }
    let from = caller.argument.wrapping_add(LEAST as u64);
    let items = Struct::read(&caller.memory, from, wanted)?.0;
    let action = flags & (ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER);
    let answer = match (kind, action) {
        (irq::INTX, ACTION_MASK | ACTION_UNMASK) => {
            if !function.irqs.is_enabled(kind) || start != 0 || number != 1 {
                return Err(libc::EINVAL);
            }
            if data == DATA_EVENTFD {
                // An eventfd that unmasks, which only virtual machines use.
                return Err(libc::ENOTTY);
            }
            if data == DATA_NONE || items.first() == Some(&1) {
                match action {
                    ACTION_MASK => function.irqs.mask(),
                    _ => function.irqs.unmask(),
                }
            }
            Ok(0)
        }
        (_, ACTION_TRIGGER) => trigger(function, caller, kind, start, number, data, &items),
        _ => Err(libc::ENOTTY),
    };
    function.show_interrupts();
    answer
}

fn trigger(
    function: &Function,
    caller: &Caller,
    kind: u32,
    start: u32,
    number: u32,
    data: u32,
    items: &[u8],
) -> Answer {
    let irqs = &function.irqs;
    let is_enabled = irqs.is_enabled(kind);
    let is_whole = matches!(kind, irq::INTX | irq::MSI | irq::MSIX);
    if data == DATA_NONE && number == 0 && is_enabled {
        irqs.disable(kind);
        return Ok(0);
    }
    let other = [irq::INTX, irq::MSI, irq::MSIX].into_iter().filter(|other| *other != kind);
    if is_whole && other.into_iter().any(|other| irqs.is_enabled(other)) {
        return Err(libc::EINVAL);
    }
    // Of these there is one.
    let is_missing = match kind {
        irq::INTX => number != 1,
        irq::MSI | irq::MSIX => false,
        _ => data != DATA_NONE && number == 0,
    };
    if is_missing {
        return Err(libc::EINVAL);
    }
    if data == DATA_EVENTFD {
        return set_eventfds(function, caller, kind, start, number, items);
    }
    if !is_enabled && (is_whole || data == DATA_NONE) {
        return Err(libc::EINVAL);
    }
    for (at, vector) in (start..).take(usize::try_from(number).unwrap_or(0)).enumerate() {
        if data == DATA_NONE || items.get(at) == Some(&1) {
            irqs.trigger(kind, vector);
        }
    }
    Ok(0)
}

/// Sets eventfds from `start` on, as far as they are valid: where one is not, none of them is set.
fn set_eventfds(
    function: &Function,
    caller: &Caller,
    kind: u32,
    start: u32,
    number: u32,
    items: &[u8],
) -> Answer {
    let irqs = &function.irqs;
    let is_enabled = irqs.is_enabled(kind);
    // Messages are allocated when they are enabled; a table has room for more later.
    let room = match kind {
        irq::MSI if is_enabled => irqs.enabled_vectors(kind),
        _ => usize::MAX,
    };
    if matches!(kind, irq::MSI | irq::MSIX) && number == 0 {
        if is_enabled {
            return Ok(0);
        } else if start == 0 {
            return Err(libc::ERANGE);
        }
    }
    let first = usize::try_from(start).unwrap_or(usize::MAX);
    let mut events = Vec::new();
    for (vector, item) in (first..).zip(items.as_chunks::<4>().0) {
        let taken = match i32::from_ne_bytes(*item) {
            fd if fd >= 0 && vector >= room => Err(libc::EINVAL),
            fd if fd >= 0 => process::take_eventfd(caller.tid, fd).map(Some),
            fd if fd < -1 && matches!(kind, irq::ERROR | irq::REQUEST) => Err(libc::EINVAL),
            _ => Ok(None),
        };
        match taken {
            Ok(event) => events.push(event),
            Err(errno) => {
                // Those before it, and its own, are released.
                if is_enabled && matches!(kind, irq::MSI | irq::MSIX) {
                    let most = irqs.enabled_vectors(kind).saturating_sub(first);
                    let released = (0..=events.len()).take(most).map(|_| None).collect();
                    irqs.set(kind, start, released);
                }
                return Err(errno);
            }
        }
    }
    if matches!(kind, irq::ERROR | irq::REQUEST) && events.iter().all(Option::is_none) {
        irqs.disable(kind);
    } else {
        events.truncate(room.saturating_sub(first));
        irqs.set(kind, start, events);
    }
    Ok(0)
}

/// `pread` and `pwrite` of a region that is not BAR 0.
pub(crate) fn access(
    function: &Arc<Function>,
    caller: &Caller,
    [buffer, len, offset]: [u64; 3],
    write: bool,
) -> Answer {
    let (index, at) = (offset >> REGION_SHIFT, offset & ((1 << REGION_SHIFT) - 1));
    let len = i64::try_from(len).map_err(|_| libc::EINVAL)?.cast_unsigned();
    if len == 0 {
        return Ok(0);
    }
    if index == u64::from(CALLED) {
        return registers(function, caller, [buffer, len, at], write);
    }
    if index != u64::from(CONFIG) {
        return Err(libc::EINVAL);
    }
    // All of it or nothing, unlike registers.
    let whole = |value: u64| usize::try_from(value).map_err(|_| libc::EFAULT);
    let (at, len) = (whole(at)?, whole(len)?);
    if at.checked_add(len).is_none_or(|end| end > crate::pci::CONFIG_BYTES) {
        return Err(libc::EFAULT);
    }
    let done = if write {
        let bytes = Struct::read(&caller.memory, buffer, len)?.0;
        function.write_config(at, &bytes)
    } else {
        let bytes = function.read_config(at, len);
        caller.memory.write(buffer, &bytes).map_err(|_| libc::EFAULT)?;
        bytes.len()
    };
    i64::try_from(done).map_err(|_| libc::EINVAL)
}

/// `pread` and `pwrite` of the BAR whose accesses are calls.
fn registers(
    function: &Function,
    caller: &Caller,
    [buffer, len, at]: [u64; 3],
    write: bool,
) -> Answer {
    let end = function.layout.called_bytes;
    let at = u32::try_from(at).ok().filter(|at| *at < end).ok_or(libc::EINVAL)?;
    if !function.decodes_memory() {
        return Err(libc::EIO);
    }
    let most = u64::from(end - at).min(len);
    let len = usize::try_from(most).map_err(|_| libc::EINVAL)?;
    if write {
        let bytes = Struct::read(&caller.memory, buffer, len)?.0;
        function.write_registers(at, &bytes);
    } else {
        let bytes = function.read_registers(at, len);
        caller.memory.write(buffer, &bytes).map_err(|_| libc::EFAULT)?;
    }
    i64::try_from(most).map_err(|_| libc::EINVAL)
}

/// Answers a request of a device; `None` for one that is not covered.
pub(crate) fn call(function: &Function, caller: &Caller, request: u32) -> Option<Answer> {
    use super::abi;
    Some(match request {
        abi::DEVICE_GET_INFO => info(caller),
        abi::DEVICE_GET_REGION_INFO => region(function, caller),
        abi::DEVICE_GET_IRQ_INFO => irq_info(function, caller),
        abi::DEVICE_SET_IRQS => set_irqs(function, caller),
        abi::DEVICE_RESET => {
            function.reset();
            Ok(0)
        }
        _ => return None,
    })
}
