//! The fields of an event: `name=value` in any order, because kernels differ in which they print
//! and where.

use std::fmt;

/// Why a line that should be an event is not one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Damage {
    /// It is longer than [`MAX_LINE`](super::super::MAX_LINE).
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
    fn what_is_cut_is_told_from_what_is_wrong() {
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
