//! The names of functions in ELF files (System V ABI, "Symbol Table"), and the size of their frames.

use gimli::Register;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// The largest table that is read.
const LIMIT: u64 = 64 << 20;
/// Types of sections and symbols, and the only type of program header that is used.
const SHT_SYMTAB: u32 = 2;
const SHT_DYNSYM: u32 = 11;
const STT_FUNC: u8 = 2;
const PT_LOAD: u32 = 1;
/// The stack pointer, by its number in unwind data (System V ABI of x86-64, figure 3.36; of AArch64,
/// "DWARF register names").
const STACK_POINTER: Register = Register(if cfg!(target_arch = "x86_64") { 7 } else { 31 });

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.get(..N)?.try_into().ok()
}
fn half(bytes: &[u8], at: usize) -> Option<u16> {
    word(bytes, at).map(u16::from_le_bytes)
}
fn int(bytes: &[u8], at: usize) -> Option<u32> {
    word(bytes, at).map(u32::from_le_bytes)
}
fn long(bytes: &[u8], at: usize) -> Option<u64> {
    word(bytes, at).map(u64::from_le_bytes)
}

fn read(file: &File, at: u64, len: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len.min(LIMIT)).ok()?];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

/// An ELF file of 64 bits, little-endian.
pub(crate) struct Elf {
    file: File,
    head: Vec<u8>,
    /// The section headers.
    table: Vec<u8>,
    entry: usize,
}

impl Elf {
    pub(crate) fn open(path: &str) -> Option<Self> {
        // The path is the program's, and may be that of a pipe by now, whose open would wait.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let head = read(&file, 0, 64)?;
        if !head.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]) {
            return None;
        }
        let (size, count) = (u64::from(half(&head, 58)?), u64::from(half(&head, 60)?));
        let table = read(&file, long(&head, 40)?, size.checked_mul(count)?)?;
        Some(Self { file, head, table, entry: usize::try_from(size).ok()?.max(1) })
    }

    fn sections(&self) -> impl Iterator<Item = &[u8]> {
        self.table.chunks_exact(self.entry)
    }

    fn content(&self, section: &[u8]) -> Option<Vec<u8>> {
        read(&self.file, long(section, 24)?, long(section, 32)?)
    }

    /// Returns the address and the content of a section.
    fn section(&self, name: &[u8]) -> Option<(u64, Vec<u8>)> {
        let names = self.sections().nth(half(&self.head, 62)?.into())?;
        let names = self.content(names)?;
        let section = self.sections().find(|section| {
            let at = int(section, 0).and_then(|at| usize::try_from(at).ok());
            let own = at.and_then(|at| names.get(at..)).unwrap_or_default();
            own.split(|byte| *byte == 0).next() == Some(name)
        })?;
        Some((long(section, 16)?, self.content(section)?))
    }

    /// Returns the function at an offset of the file: `name+0x12`.
    pub(crate) fn symbol(&self, offset: u64) -> Option<String> {
        let address = address_of(&self.file, &self.head, offset)?;
        [SHT_SYMTAB, SHT_DYNSYM].iter().find_map(|wanted| {
            let section = self.sections().find(|section| int(section, 4) == Some(*wanted))?;
            let strings = self.sections().nth(usize::try_from(int(section, 40)?).ok()?)?;
            nearest(&self.content(section)?, &self.content(strings)?, address)
        })
    }

    /// Returns how far above the stack pointer the frame ends of the function at an offset of the
    /// file, by its unwind data; `None` if that is not known from the stack pointer alone.
    pub(crate) fn frame_bytes(&self, offset: u64) -> Option<u64> {
        use gimli::{BaseAddresses, CfaRule, EhFrame, LittleEndian, UnwindContext, UnwindSection};
        let address = address_of(&self.file, &self.head, offset)?;
        let (at, content) = self.section(b".eh_frame")?;
        let frames = EhFrame::new(&content, LittleEndian);
        let text = self.section(b".text").map_or(0, |(at, _)| at);
        let bases = BaseAddresses::default().set_eh_frame(at).set_text(text);
        let mut context = UnwindContext::new();
        let find = EhFrame::cie_from_offset;
        let row = frames.unwind_info_for_address(&bases, &mut context, address, find).ok()?;
        match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } if *register == STACK_POINTER => {
                u64::try_from(*offset).ok()
            }
            _ => None,
        }
    }
}

/// Returns the address of an offset of the file, by the program headers.
fn address_of(file: &File, head: &[u8], offset: u64) -> Option<u64> {
    let (size, count) = (u64::from(half(head, 54)?), u64::from(half(head, 56)?));
    let table = read(file, long(head, 32)?, size.checked_mul(count)?)?;
    table.chunks_exact(usize::try_from(size).ok()?.max(1)).find_map(|part| {
        let (at, address, len) = (long(part, 8)?, long(part, 16)?, long(part, 32)?);
        let inside = int(part, 0)? == PT_LOAD && (at..at.checked_add(len)?).contains(&offset);
        inside.then(|| address.wrapping_add(offset - at))
    })
}

fn nearest(symbols: &[u8], names: &[u8], address: u64) -> Option<String> {
    let containing = symbols.chunks_exact(24).find(|symbol| {
        let kind = symbol.get(4).map_or(0, |info| info & 0xf);
        let (start, len) = (long(symbol, 8).unwrap_or(0), long(symbol, 16).unwrap_or(0));
        kind == STT_FUNC && address.checked_sub(start).is_some_and(|distance| distance < len)
    })?;
    let name = names.get(usize::try_from(int(containing, 0)?).ok()?..)?;
    let name = name.split(|byte| *byte == 0).next()?;
    let distance = address - long(containing, 8)?;
    Some(format!("{}+{distance:#x}", String::from_utf8_lossy(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_program_has_no_symbols() {
        for path in ["/proc/self/status", "/dev/null", "/nonexistent"] {
            assert!(Elf::open(path).is_none());
        }
    }

    #[test]
    fn a_function_is_found_by_its_place_in_the_file() {
        // Of this program, by its own map.
        let here = a_function_is_found_by_its_place_in_the_file as fn() as usize as u64;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = std::env::current_exe().unwrap().display().to_string();
        let found = maps.lines().filter(|line| line.ends_with(&path)).find_map(|line| {
            let mut words = line.split([' ', '-']);
            let mut number = || u64::from_str_radix(words.next().unwrap(), 16).unwrap();
            let (start, end) = (number(), number());
            let offset = u64::from_str_radix(line.split(' ').nth(2).unwrap(), 16).unwrap();
            (start..end).contains(&here).then(|| here - start + offset)
        });
        let elf = Elf::open(&path).unwrap();
        assert!(elf.frame_bytes(found.unwrap()).is_some(), "at its first instruction");
        let name = elf.symbol(found.unwrap() + 1).unwrap();
        assert!(name.contains("a_function_is_found") && name.ends_with("+0x1"), "{name}");
    }
}
