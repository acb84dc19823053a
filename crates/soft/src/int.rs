//! Conversions between the 64 bits of addresses and this machine's integers.

/// Converts an address or an offset. One that does not fit (on 32 bits) becomes an address where
/// nothing is.
#[inline]
pub(crate) fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
