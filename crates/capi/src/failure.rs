//! `Failure`: an errno value with its message; and `call`, the border between C and Rust.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a call is refused: what C gets as `-errno`, and the sentence of `pf_strerror_last`.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: c_int,
    message: String,
}

impl Failure {
    #[cold]
    pub(crate) fn new(errno: c_int, message: String) -> Self {
        Self { errno, message }
    }

    /// Returns the failure of a library call, with its message and its causes.
    #[cold]
    pub(crate) fn from_error(errno: c_int, error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Some errors print their cause themselves.
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            source = cause.source();
        }
        Self { errno, message }
    }

    /// Returns the same failure, of one of several things.
    #[cold]
    pub(crate) fn of(self, what: impl std::fmt::Display) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// Returns the errno value, positive.
    #[cfg(test)]
    pub(crate) fn errno(&self) -> c_int {
        self.errno
    }

    /// Stores the message for this thread, and returns what C gets.
    #[cold]
    fn raise(self) -> c_int {
        set_message(self.message);
        -self.errno
    }
}

/// `fail!(EBUSY, "message {}", value)`: a [`Failure`].
macro_rules! fail {
    ($errno:ident, $($message:tt)+) => {
        $crate::failure::Failure::new(libc::$errno, format!($($message)+))
    };
}
pub(crate) use fail;

thread_local! {
    /// The message of this thread's last call that failed.
    static MESSAGE: RefCell<Option<CString>> = const { RefCell::new(None) };
}

fn set_message(message: String) {
    let message = CString::new(message.replace('\0', " ")).ok();
    // A thread that is ending has no message any more.
    let _ = MESSAGE.try_with(|last| last.replace(message));
}

/// Runs a call of the C program: no panic leaves it.
pub(crate) fn call(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    if FORKED.load(Ordering::Relaxed) {
        return forked().raise();
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => failure.raise(),
        Err(_) => {
            let failure = fail!(
                ENOTRECOVERABLE,
                "a defect of libpinfold: it panicked, and the message is on standard error; please report it"
            );
            failure.raise()
        }
    }
}

/// As [`call`], for a function that returns a pointer: null where it fails, and `errno` is set.
pub(crate) fn call_pointer<T>(body: impl FnOnce() -> Result<*mut T, Failure>) -> *mut T {
    let mut pointer = std::ptr::null_mut();
    let code = call(|| {
        pointer = body()?;
        Ok(0)
    });
    if code < 0 {
        // SAFETY: the function can always be called.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the address of this thread's `errno`.
        unsafe { *errno = -code };
    }
    pointer
}

/// This process is a child of one that had objects.
static FORKED: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

/// Notes that this process has objects: a child made by `fork` from now on cannot use them. Locks
/// may be held by threads that the child does not have, and devices reach the parent's memory only.
pub(crate) fn note_use() {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    WATCH.call_once(|| {
        // SAFETY: the handler stores to one atomic, which is allowed after `fork`. Where it cannot
        // be registered (no memory), a child is not refused, as documented for `fork` in general.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

#[cold]
fn forked() -> Failure {
    fail!(
        EPERM,
        "this process was forked from one that uses libpinfold: devices do not reach its memory; fork before the \
         first call, or exec"
    )
}

/// Returns what the last failed call of this thread said: a sentence with the value, the limit and
/// the next step. The empty string if none has failed; also in handlers that run at the end of the
/// thread or of the process (pthread_key_create(), atexit()).
///
/// Valid until the next call of the library in this thread that fails.
///
/// Thread: any; the message is the thread's own. Since 0.1.
#[unsafe(no_mangle)]
pub extern "C" fn pf_strerror_last() -> *const c_char {
    let message = |last: &RefCell<Option<CString>>| {
        last.try_borrow().ok().and_then(|last| last.as_ref().map(|message| message.as_ptr()))
    };
    MESSAGE.try_with(message).ok().flatten().unwrap_or(c"".as_ptr())
}

/// Stores `value` where a C program wants it.
///
/// # Safety
/// `out` is null, or valid for a write of a `T`.
pub(crate) unsafe fn store<T>(out: *mut T, value: T, name: &str) -> Result<(), Failure> {
    check_out(out, name)?;
    // SAFETY: not null, so the caller promises that it can be written. C need not align it.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Refuses a null pointer before anything is done.
pub(crate) fn check_out<T>(out: *const T, name: &str) -> Result<(), Failure> {
    if out.is_null() {
        Err(fail!(EFAULT, "`{name}` is NULL: this parameter is needed"))
    } else {
        Ok(())
    }
}

/// Stores a text, as `snprintf` does: with its end, cut off to fit; returns its whole length.
///
/// # Safety
/// `to` is null, or `len` bytes can be written there.
pub(crate) unsafe fn store_text(text: &str, to: *mut c_char, len: usize) -> c_int {
    if !to.is_null()
        && let Some(room) = len.checked_sub(1)
    {
        let count = text.len().min(room);
        // SAFETY: `count` bytes of the text, and less than the `len` that the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), count) };
        // SAFETY: `count` is less than `len`.
        unsafe { to.wrapping_add(count).write(0) };
    }
    c_int::try_from(text.len()).unwrap_or(c_int::MAX)
}

/// Checks a number of slots that a call returns as `c_int`, and that there are such slots.
pub(crate) fn count<T>(n: c_uint, slots: *const T, name: &str) -> Result<usize, Failure> {
    if c_int::try_from(n).is_err() {
        return Err(fail!(EINVAL, "n {n}: at most {} in one call", c_int::MAX));
    }
    if n > 0 {
        check_out(slots, name)?;
    }
    Ok(n as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the function returns a C string that is valid until the next failure.
        unsafe { CStr::from_ptr(pf_strerror_last()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_failure_is_a_negative_errno_and_a_message_of_the_thread() {
        assert_eq!(last(), "");
        assert_eq!(call(|| Ok(3)), 3);
        assert_eq!(call(|| Err(fail!(EINVAL, "size {}", 5))), -libc::EINVAL);
        assert_eq!(last(), "size 5");
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
        assert_eq!(call(|| Ok(0)), 0);
        assert_eq!(last(), "size 5");
    }

    #[test]
    fn a_panic_does_not_cross_the_border() {
        let code = call(|| panic!("a defect"));
        assert_eq!(code, -libc::ENOTRECOVERABLE);
        assert!(last().contains("defect of libpinfold"));
    }

    #[test]
    fn a_text_is_cut_off_to_fit_and_has_its_end() {
        let mut room = [7 as c_char; 4];
        // SAFETY: three bytes of four.
        assert_eq!(unsafe { store_text("text", room.as_mut_ptr(), 3) }, 4);
        assert_eq!(room.map(|byte| byte as u8), [b't', b'e', 0, 7]);
        // SAFETY: no bytes.
        assert_eq!(unsafe { store_text("text", room.as_mut_ptr(), 0) }, 4);
        assert_eq!(room[0] as u8, b't');
    }

    #[test]
    fn a_null_pointer_names_the_parameter() {
        // SAFETY: null is allowed.
        let failure = unsafe { store(std::ptr::null_mut::<u8>(), 1, "out") }.unwrap_err();
        assert_eq!(failure.errno(), libc::EFAULT);
        assert!(failure.message.starts_with("`out` is NULL"));
    }
}
