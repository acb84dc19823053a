//! Prefetching of memory that is accessed soon.

/// The bytes of a cache line.
const LINE: usize = 64;

/// Prefetches the cache lines of `value`, where the processor has an instruction for that, without
/// waiting for them.
///
/// For one of many places in memory that is in no cache, some hundred instructions before it is
/// accessed.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    let first = core::ptr::from_ref(value).cast::<u8>();
    prefetch_line(first);
    // Any address may be named, so none of these is followed: the last byte may be in a line of its
    // own.
    for offset in (LINE..size_of::<T>()).step_by(LINE) {
        prefetch_line(first.wrapping_add(offset));
    }
    // A value no larger than its alignment is in one line.
    if size_of::<T>() > align_of::<T>() {
        prefetch_line(first.wrapping_add(size_of::<T>() - 1));
    }
}

#[inline(always)]
fn prefetch_line(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which reads no value and faults nowhere; every processor of this
        // architecture has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Values of no bytes, of a part of a line, and of many lines, one of which begins in the
    /// middle of a line.
    #[test]
    fn a_prefetch_leaves_values_as_they_are() {
        prefetch(&());
        let nothing: &[u64; 0] = &[];
        prefetch(nothing);
        let bytes: [u8; 1000] = core::array::from_fn(|at| at.to_le_bytes()[0]);
        let copy = bytes;
        prefetch(&bytes);
        prefetch(&bytes[63]);
        prefetch(bytes[37..].first_chunk::<200>().unwrap());
        assert_eq!(bytes, copy);
    }

    /// The lowest and the highest addresses, those that no processor translates, and those of
    /// memory that was unmapped.
    #[test]
    fn a_prefetch_of_what_is_not_mapped_does_not_fault() {
        // So large that the allocator maps it by itself, and unmaps it.
        let gone = vec![0u8; if cfg!(miri) { 4096 } else { 64 << 20 }];
        let range = gone.as_ptr_range();
        drop(gone);
        let places =
            [0, 1, 4095, 1 << 47, 1 << 63, usize::MAX, range.start.addr(), range.end.addr()];
        for at in places.into_iter().chain((range.start.addr()..range.end.addr()).step_by(4 << 20))
        {
            prefetch_line(core::ptr::without_provenance(at));
        }
    }
}
