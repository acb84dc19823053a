//! Addresses, page sizes, ranges, and the [`Segment`]s of a buffer: a type for each kind, so that
//! they cannot be confused.
//!
//! Every sum is checked. A range is checked once, when it is created; a segment is not.
//!
//! ```
//! use pinfold_core::addr::{Iova, IovaRange};
//!
//! # fn main() -> Result<(), pinfold_core::addr::RangeError> {
//! let range = IovaRange::new(Iova::new(0x1000), 0x3000)?;
//! assert_eq!(range.to_string(), "iova:0x1000..0x4000");
//! assert!(range.part(0x1000, 0x3000).is_none());
//! # Ok(())
//! # }
//! ```

use core::fmt;
use core::num::NonZeroU64;

/// An address of some kind: a newtype over `u64`.
///
/// Implemented by [`Iova`] and [`PhysAddr`]; it exists so that [`AddrRange`] is written once.
pub trait Address: Copy + Ord + fmt::Debug + fmt::Display {
    /// The name of the kind in error messages.
    const KIND: &'static str;
    /// Creates the address with this value.
    fn new(raw: u64) -> Self;
    /// Returns the value of the address.
    fn raw(self) -> u64;
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Creates the address with this value.
            pub const fn new(raw: u64) -> Self {
                Self(raw)
            }

            /// Returns the value of the address.
            pub const fn raw(self) -> u64 {
                self.0
            }

            /// Returns the address `bytes` further on, or `None` if that exceeds 64 bits.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(raw) => Some(Self(raw)),
                    None => None,
                }
            }

            /// Returns the offset of `self` from `base`, or `None` if it is below.
            pub const fn checked_offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// Whether the address is a multiple of `align`, a power of two.
            pub const fn is_aligned(self, align: u64) -> bool {
                self.0 & (align - 1) == 0
            }
        }

        impl Address for $name {
            const KIND: &'static str = $prefix;
            fn new(raw: u64) -> Self {
                Self(raw)
            }
            fn raw(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, ":{:#x}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

address! {
    /// An I/O virtual address: an address as a device issues it.
    Iova, "iova"
}
address! {
    /// A physical address.
    ///
    /// Behind the software IOMMU it is the address of the memory in this process.
    PhysAddr, "phys"
}

/// The sizes of a page that processors and IOMMUs have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PageSize {
    /// 4 KiB.
    Size4K,
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl PageSize {
    /// All of them, smallest first.
    pub const ALL: [Self; 3] = [Self::Size4K, Self::Size2M, Self::Size1G];

    /// log2 of the size in bytes: 12, 21 or 30.
    pub const fn shift(self) -> u32 {
        match self {
            Self::Size4K => 12,
            Self::Size2M => 21,
            Self::Size1G => 30,
        }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// The bits of an address that lie within a page of this size.
    pub const fn mask(self) -> u64 {
        self.bytes() - 1
    }

    /// The page size of `bytes` bytes, if it is one.
    pub const fn from_bytes(bytes: u64) -> Option<Self> {
        match bytes {
            0x1000 => Some(Self::Size4K),
            0x20_0000 => Some(Self::Size2M),
            0x4000_0000 => Some(Self::Size1G),
            _ => None,
        }
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size4K => "4 KiB",
            Self::Size2M => "2 MiB",
            Self::Size1G => "1 GiB",
        })
    }
}

/// Why a range is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RangeError {
    /// A range must have at least one byte.
    #[error("an empty range at {kind}:{start:#x}: a range has at least 1 byte")]
    Empty {
        /// The kind of address.
        kind: &'static str,
        /// The requested start.
        start: u64,
    },
    /// The end of a range must fit in 64 bits.
    #[error("a range of {len:#x} bytes at {kind}:{start:#x} wraps around the end of 64 bits")]
    Wraps {
        /// The kind of address.
        kind: &'static str,
        /// The requested start.
        start: u64,
        /// The requested length in bytes.
        len: u64,
    },
}

/// A half-open range of addresses, `start..end`: never empty, never wrapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddrRange<A> {
    start: A,
    len: NonZeroU64,
}

/// A range of I/O virtual addresses.
pub type IovaRange = AddrRange<Iova>;
/// A range of physical addresses.
pub type PhysRange = AddrRange<PhysAddr>;

impl<A: Address> AddrRange<A> {
    /// Creates the range of `len` bytes from `start`.
    ///
    /// # Errors
    /// [`RangeError::Empty`] if `len` is 0, [`RangeError::Wraps`] if `start + len` is more than 64
    /// bits.
    #[inline]
    pub fn new(start: A, len: u64) -> Result<Self, RangeError> {
        let raw = start.raw();
        let len = NonZeroU64::new(len).ok_or(RangeError::Empty { kind: A::KIND, start: raw })?;
        match raw.checked_add(len.get()) {
            Some(_) => Ok(Self { start, len }),
            None => Err(RangeError::Wraps { kind: A::KIND, start: raw, len: len.get() }),
        }
    }

    /// The range of `len` bytes from `start`, cut off at the end of 64 bits, at least one byte: for
    /// callers that know that it is neither empty nor too long.
    pub(crate) fn clamped(start: A, len: u64) -> Self {
        let first = start.raw().min(u64::MAX - 1);
        let len = NonZeroU64::new(len.min(u64::MAX - first)).unwrap_or(NonZeroU64::MIN);
        Self { start: A::new(first), len }
    }

    /// Returns the first address.
    #[inline]
    pub fn start(&self) -> A {
        self.start
    }

    /// Returns the first address after the range.
    #[inline]
    pub fn end(&self) -> A {
        // No wrap: the constructors check this sum.
        A::new(self.start.raw() + self.len.get())
    }

    /// Returns the last address of the range.
    #[inline]
    pub fn last(&self) -> A {
        A::new(self.start.raw() + (self.len.get() - 1))
    }

    /// Returns the length in bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a range is never empty")]
    #[inline]
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Whether `address` lies in the range.
    #[inline]
    pub fn contains(&self, address: A) -> bool {
        self.start <= address && address < self.end()
    }

    /// Whether all of `other` lies in the range.
    #[inline]
    pub fn covers(&self, other: &Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }

    /// Whether the two have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// Returns the two as one, if one begins at the other's end.
    pub fn merged(&self, other: &Self) -> Option<Self> {
        let (low, high) = if self.start <= other.start { (self, other) } else { (other, self) };
        (low.end() == high.start)
            .then(|| low.len.checked_add(high.len.get()).map(|len| Self { start: low.start, len }))
            .flatten()
    }

    /// Returns the part of `len` bytes at `offset`, or `None` if that is empty or not inside.
    #[inline]
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let len = NonZeroU64::new(len)?;
        if offset.checked_add(len.get())? > self.len.get() {
            return None;
        }
        Some(Self { start: A::new(self.start.raw() + offset), len })
    }

    /// Whether start and length are both multiples of `align`, a power of two.
    #[inline]
    pub fn is_aligned(&self, align: u64) -> bool {
        (self.start.raw() | self.len.get()) & (align - 1) == 0
    }
}

impl<A: Address> fmt::Display for AddrRange<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{:#x}", self.start, self.end().raw())
    }
}

impl<A: Address> fmt::Debug for AddrRange<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A range that a device can address in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Segment {
    /// Its start.
    pub iova: Iova,
    /// Its length in bytes.
    pub len: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), len).unwrap()
    }

    #[test]
    fn a_range_is_neither_empty_nor_wrapping() {
        assert_eq!(
            IovaRange::new(Iova::new(7), 0),
            Err(RangeError::Empty { kind: "iova", start: 7 })
        );
        assert_eq!(
            PhysRange::new(PhysAddr::new(u64::MAX), 1),
            Err(RangeError::Wraps { kind: "phys", start: u64::MAX, len: 1 })
        );
        assert_eq!(range(u64::MAX - 1, 1).end(), Iova::new(u64::MAX));
        assert_eq!(range(0x1000, 0x2000).last(), Iova::new(0x2fff));
        assert_eq!(range(7, 1).last(), Iova::new(7));
    }

    #[test]
    fn a_clamped_range_is_a_range_whatever_it_is_made_of() {
        for (start, len) in
            [(0, 1), (4096, 4096), (7, 0), (u64::MAX, 5), (u64::MAX, 0), (8, u64::MAX)]
        {
            let range = IovaRange::clamped(Iova::new(start), len);
            assert_eq!(IovaRange::new(range.start(), range.len()), Ok(range));
        }
        assert_eq!(IovaRange::clamped(Iova::new(4096), 8192), range(4096, 8192));
    }

    #[test]
    fn each_kind_prints_with_its_own_prefix() {
        assert_eq!(Iova::new(0x1000).to_string(), "iova:0x1000");
        assert_eq!(PhysAddr::new(0x1000).to_string(), "phys:0x1000");
        assert_eq!(range(0x1000, 0x1000).to_string(), "iova:0x1000..0x2000");
    }

    #[test]
    fn page_sizes_agree_with_their_shifts() {
        for size in PageSize::ALL {
            assert_eq!(PageSize::from_bytes(size.bytes()), Some(size));
            assert_eq!(size.bytes().trailing_zeros(), size.shift());
        }
        assert_eq!(PageSize::from_bytes(8192), None);
    }

    proptest! {
        #[test]
        fn ranges_agree_with_sets_of_numbers(a in 0u64..64, al in 1u64..32, b in 0u64..64, bl in 1u64..32) {
            let (x, y) = (range(a, al), range(b, bl));
            let both: Vec<u64> = (a..a + al).filter(|i| (b..b + bl).contains(i)).collect();
            prop_assert_eq!(x.overlaps(&y), !both.is_empty());
            prop_assert_eq!(x.covers(&y), both.len() as u64 == bl);
            prop_assert_eq!(x.merged(&y).is_some(), a + al == b || b + bl == a);
            if let Some(m) = x.merged(&y) {
                prop_assert_eq!((m.start().raw(), m.len()), (a.min(b), al + bl));
            }
        }

        #[test]
        fn a_part_lies_inside(start in any::<u32>(), len in 1u64..1000, offset in 0u64..2000, want in 0u64..2000) {
            let whole = range(start.into(), len);
            match whole.part(offset, want) {
                Some(part) => prop_assert!(whole.covers(&part) && part.len() == want),
                None => prop_assert!(want == 0 || offset + want > len),
            }
        }
    }
}
