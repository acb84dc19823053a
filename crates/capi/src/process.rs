//! The process that this copy of the library is used in: its key, which a child does not have; and
//! the protection of a thread from being stopped inside a call.
//!
//! A child made by `fork`, `_Fork` or `clone` has a copy of the memory, which no device reaches, and
//! copies of locks whose threads it does not have. The key is on a page that the kernel wipes in a
//! child, whichever function made it. A program may have several copies of the library (linked
//! statically and shared, or opened from two places): their keys differ, so that a handle of one is
//! no handle of another.

use std::hash::{BuildHasher, RandomState};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Data on a page of its own.
struct Page {
    /// Not 0, except in a child.
    key: AtomicU64,
    /// The process that made it.
    process: AtomicU32,
}

/// Before the first object is made: not wiped in a child, which may make one.
static NONE: Page = Page { key: AtomicU64::new(1), process: AtomicU32::new(0) };
static PAGE: AtomicPtr<Page> = AtomicPtr::new((&raw const NONE).cast_mut());

#[inline(always)]
fn page() -> &'static Page {
    // Acquire: it was written before.
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: `NONE`, or a page that `map` has initialized and that is never unmapped.
    unsafe { &*page }
}

/// Returns whether this process is a child of one that had objects.
#[inline(always)]
pub(crate) fn is_child() -> bool {
    page().key.load(Ordering::Relaxed) == 0
}

/// Returns the key of this copy of the library.
#[inline(always)]
pub(crate) fn key() -> u64 {
    page().key.load(Ordering::Relaxed)
}

/// Why no object can be made: the errno value, and the sentence.
pub(crate) struct Refused(pub(crate) i32, pub(crate) String);

/// Prepares for an object.
///
/// # Errors
/// `ENOMEM`: no page is left. `EPERM`: a child that shares the memory of its parent (`vfork`) must
/// not make objects: they would outlive it.
pub(crate) fn enter() -> Result<(), Refused> {
    let mut page = page();
    let mut is_own = true;
    if std::ptr::eq(page, &raw const NONE) {
        is_own = !shares_memory_of_parent();
        if is_own {
            page = map()?;
        }
    }
    if is_own && page.process.load(Ordering::Relaxed) == std::process::id() {
        return Ok(());
    }
    let why = "this process shares the memory of the one that uses libpinfold (vfork): call _exit or exec only";
    Err(Refused(libc::EPERM, why.to_owned()))
}

/// Returns whether this process is a `vfork` child: objects that it made would be mistaken for the
/// parent's. `kcmp` since Linux 3.5; if the kernel lacks it or refuses it, the result is false.
#[cold]
fn shares_memory_of_parent() -> bool {
    /// `linux/kcmp.h`: compares the memory. Missing in libc.
    const KCMP_VM: libc::c_int = 1;
    let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
    // SAFETY: numbers only; it compares what two processes use.
    unsafe { libc::syscall(libc::SYS_kcmp, own, parent, KCMP_VM, 0, 0) == 0 }
}

/// Maps the page, unless another thread is faster.
#[cold]
fn map() -> Result<&'static Page, Refused> {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, at an address that the kernel chooses.
    let memory = unsafe { libc::mmap(null_mut(), size_of::<Page>(), access, kind, -1, 0) };
    if memory == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error();
        let why = format!("cannot map a page for the library: {error}");
        return Err(Refused(libc::ENOMEM, why));
    }
    // SAFETY: a whole page, which was just mapped. Where the kernel refuses it, the handler below
    // does the same for the children of `fork`.
    let _ = unsafe { libc::madvise(memory, size_of::<Page>(), libc::MADV_WIPEONFORK) };
    let new: *mut Page = memory.cast();
    // Odd, so that it is not 0.
    let key = AtomicU64::new(RandomState::new().hash_one(memory.addr()) | 1);
    // SAFETY: the page is large enough, aligned, and this thread's alone.
    unsafe { new.write(Page { key, process: AtomicU32::new(std::process::id()) }) };
    let none = (&raw const NONE).cast_mut();
    // Release: a thread that sees the page sees the key.
    match PAGE.compare_exchange(none, new, Ordering::Release, Ordering::Acquire) {
        Ok(_) => {
            // SAFETY: the handler stores to one atomic, which is allowed after `fork`.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
        Err(_) => {
            // SAFETY: it was mapped above, and no other thread has seen it.
            unsafe { libc::munmap(memory, size_of::<Page>()) };
        }
    }
    Ok(page())
}

extern "C" fn in_child() {
    page().key.store(0, Ordering::Relaxed);
}

/// Keeps `pthread_cancel` from ending this thread until it is dropped: a thread that ended inside a
/// call would leave its object in use for good.
pub(crate) struct Uncancelled {
    before: i32,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
}

/// `PTHREAD_CANCEL_DISABLE`, of glibc and musl.
const DISABLE: i32 = 1;

impl Uncancelled {
    #[inline]
    pub(crate) fn new() -> Self {
        let mut before = 0;
        // SAFETY: it stores the former state there; it fails for unknown states only.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        let mut own = 0;
        // SAFETY: as above. The state is the one that the thread had.
        unsafe { pthread_setcancelstate(self.before, &raw mut own) };
    }
}

#[cfg(all(test, not(handle_model)))]
pub(crate) mod tests {
    use super::*;

    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> i32;
    }

    /// Calls `body` in this thread, which a cancellation point would end, and the program with it.
    pub(crate) fn with_cancel_pending<R>(body: impl FnOnce() -> R) -> R {
        let mut before = 0;
        let _until_the_end = Uncancelled::new();
        // SAFETY: it has no preconditions.
        let own = unsafe { libc::pthread_self() };
        // SAFETY: this thread, which has cancellation disabled.
        assert_eq!(unsafe { pthread_cancel(own) }, 0);
        // SAFETY: `PTHREAD_CANCEL_ENABLE`, of glibc and musl.
        unsafe { pthread_setcancelstate(0, &raw mut before) };
        let result = body();
        // SAFETY: it stores the former state there.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        assert_eq!(before, 0);
        result
    }
}
