//! The machine: ports, the serial line, the way out, PCI's configuration space, ACPI's tables, and
//! what the compiler expects of a C library.

use core::arch::{asm, global_asm};
use core::fmt;

global_asm!(include_str!("boot.s"), options(att_syntax));

/// Writes 8 bits to a port.
fn out8(port: u16, value: u8) {
    // SAFETY: the ports of this file are devices that access no memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) }
}

fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: as for `out8`.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) }
    value
}

fn out32(port: u16, value: u32) {
    // SAFETY: as for `out8`; a device that can then access memory is behind the unit.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack)) }
}

fn in32(port: u16) -> u32 {
    let value;
    // SAFETY: as for `out8`.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack)) }
    value
}

/// The first serial line, as the firmware has set it up.
pub(crate) struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        const DATA: u16 = 0x3f8;
        const STATUS: u16 = DATA + 5;
        const CAN_SEND: u8 = 1 << 5;
        for byte in text.bytes() {
            while in8(STATUS) & CAN_SEND == 0 {}
            out8(DATA, byte);
        }
        Ok(())
    }
}

/// Prints a line on the serial line.
macro_rules! say {
    ($($words:tt)*) => {{
        use core::fmt::Write as _;
        // It does not fail.
        let _ = writeln!(crate::machine::Serial, $($words)*);
    }};
}
pub(crate) use say;

/// Ends the machine: QEMU's `isa-debug-exit` makes 2 `code` + 1 of it. A machine that resets
/// itself, as after a fault of the processor, makes it 0, which is no success therefore.
pub(crate) fn exit(code: u8) -> ! {
    loop {
        out8(0xf4, code);
    }
}

pub(crate) const PASSED: u8 = 16;
pub(crate) const FAILED: u8 = 17;

/// Registers, or a table of the firmware's, at a physical address below 4 GiB, where everything is
/// mapped at its physical address.
#[derive(Clone, Copy)]
pub(crate) struct At(pub(crate) u64);

impl At {
    /// Reads a word by one access.
    pub(crate) fn read<T: Copy>(self, offset: u64) -> T {
        // SAFETY: registers or tables of the machine, which no reference of the program covers; words
        // of any value.
        unsafe { ((self.0 + offset) as *const T).read_volatile() }
    }

    /// Writes a register by one access.
    pub(crate) fn write<T>(self, offset: u64, value: T) {
        // SAFETY: as for `read`. What a device does to memory by it, is behind the unit.
        unsafe { ((self.0 + offset) as *mut T).write_volatile(value) }
    }

    /// Returns the bytes of a table of the firmware's.
    fn table(self) -> &'static [u8] {
        let len: u32 = self.read(4);
        // SAFETY: "System Description Table Header": its length is in bytes 4 to 7. Nothing writes it.
        unsafe { core::slice::from_raw_parts(self.0 as *const u8, len as usize) }
    }
}

/// A PCI function's configuration space, by ports.
#[derive(Clone, Copy)]
pub(crate) struct Pci(pub(crate) pinfold_vtd::SourceId);

impl Pci {
    const ADDRESS: u16 = 0xcf8;
    const DATA: u16 = 0xcfc;

    fn select(self, offset: u8) {
        out32(Self::ADDRESS, 1 << 31 | u32::from(self.0.0) << 8 | u32::from(offset & 0xfc));
    }

    pub(crate) fn read(self, offset: u8) -> u32 {
        self.select(offset);
        in32(Self::DATA)
    }

    pub(crate) fn write(self, offset: u8, value: u32) {
        self.select(offset);
        out32(Self::DATA, value);
    }

    /// Lets the function decode its registers and master the bus.
    pub(crate) fn enable(self) {
        // The upper half is status, which is cleared by ones.
        self.write(4, self.read(4) & 0xffff | 6);
    }

    /// Returns registers number `bar`, which the firmware has placed below 4 GiB.
    pub(crate) fn bar(self, bar: u8) -> At {
        At(u64::from(self.read(0x10 + bar * 4) & !0xf))
    }
}

/// Returns a function's whole configuration space ("PCI Firmware Specification", MCFG table: an entry
/// for each segment begins with the address, at byte 44).
pub(crate) fn ecam(start_info: u64, function: pinfold_vtd::SourceId) -> Option<At> {
    let base = acpi_table(start_info, b"MCFG")?.get(44..52)?.try_into().ok()?;
    Some(At(u64::from_le_bytes(base) + (u64::from(function.0) << 12)))
}

/// Returns the command line.
pub(crate) fn command_line(start_info: u64) -> &'static [u8] {
    const COMMAND_LINE: u64 = 24;
    let at: u64 = At(start_info).read(COMMAND_LINE);
    let len = (0..256).take_while(|offset| at != 0 && At(at).read::<u8>(*offset) != 0).count();
    if len == 0 {
        return &[];
    }
    // SAFETY: the loader's, which nothing writes; not at address 0.
    unsafe { core::slice::from_raw_parts(at as *const u8, len) }
}

/// Returns ACPI's table `name`, by the start information of the loader.
pub(crate) fn acpi_table(start_info: u64, name: &[u8; 4]) -> Option<&'static [u8]> {
    const RSDP: u64 = 32;
    let rsdp = At(At(start_info).read(RSDP));
    // "Root System Description Table" of 32-bit addresses: every firmware has it.
    let root = At(u64::from(rsdp.read::<u32>(16))).table();
    let tables = root.get(36..)?.chunks_exact(4).filter_map(|at| at.try_into().ok());
    let mut tables = tables.map(|at| At(u64::from(u32::from_le_bytes(at))).table());
    tables.find(|table| table.starts_with(name))
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("{info}");
    exit(FAILED)
}

/// Memory functions that compiled code calls.
mod libc {
    use core::arch::asm;

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
        // SAFETY: the contract of `memcpy`; the direction flag is clear.
        unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _,
                options(nostack, preserves_flags));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
        if to.addr().wrapping_sub(from.addr()) >= len {
            // SAFETY: a copy upwards reads each byte before it is written.
            return unsafe { memcpy(to, from, len) };
        }
        let (last_to, last_from) = (to.wrapping_add(len - 1), from.wrapping_add(len - 1));
        // SAFETY: the contract of `memmove`; a copy downwards reads each byte before it is written.
        unsafe {
            asm!("std", "rep movsb", "cld", inout("rcx") len => _, inout("rdi") last_to => _,
                inout("rsi") last_from => _, options(nostack));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, value: i32, len: usize) -> *mut u8 {
        // SAFETY: the contract of `memset`; the direction flag is clear.
        unsafe {
            asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") value as u8,
                options(nostack, preserves_flags));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
        for at in 0..len {
            // SAFETY: the contract of `memcmp`. Volatile, or the loop might become a call of itself.
            let one = unsafe { a.wrapping_add(at).read_volatile() };
            // SAFETY: as above.
            let other = unsafe { b.wrapping_add(at).read_volatile() };
            if one != other {
                return i32::from(one) - i32::from(other);
            }
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
        // SAFETY: the same contract.
        unsafe { memcmp(a, b, len) }
    }
}
