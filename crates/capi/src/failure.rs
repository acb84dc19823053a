//! `Failure`: an errno value with its message; and `call`, the border between C and Rust.

use crate::process::{self, Uncancelled};
use crate::words::in_c;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call is refused: what C gets as `-errno`, and the sentence of `pf_strerror_last`.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: c_int,
    message: String,
}

impl Failure {
    #[cold]
    pub(crate) fn new(errno: c_int, message: String) -> Self {
        Self { errno, message: in_c(message) }
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
        Self { errno, message: in_c(message) }
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
        set_message(&self.message);
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

/// A number of things, in words: "1 mapping or request", "2 mappings or requests".
pub(crate) struct Counted(pub(crate) u64, pub(crate) &'static str);

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, what) = self;
        if *count == 1 {
            write!(f, "1 {what}")
        } else {
            write!(f, "{count} {}s", what.replace(" or ", "s or "))
        }
    }
}

/// The longest message, with its end.
const MESSAGE_BYTES: usize = 2048;

thread_local! {
    /// The message of this thread's last call that failed, with its end: in place as long as the
    /// thread exists, also while its destructors run.
    static MESSAGE: [Cell<u8>; MESSAGE_BYTES] = const { [const { Cell::new(0) }; MESSAGE_BYTES] };
}

/// Stores the message of this thread, cut off to fit. Allocates nothing: a child may do it.
fn set_message(message: &str) {
    let fitting = message.floor_char_boundary(MESSAGE_BYTES - 1);
    let bytes = message.bytes().take(fitting).map(|byte| if byte == 0 { b' ' } else { byte });
    MESSAGE.with(|cells| {
        for (cell, byte) in cells.iter().zip(bytes.chain([0])) {
            cell.set(byte);
        }
    });
}

/// Runs a call of the C program: no panic leaves it, and pthread_cancel() acts after it.
pub(crate) fn call(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    let _uncancelled = Uncancelled::new();
    brief_call(body)
}

/// Like [`call`], for functions that reach no cancellation point: they make no system call, or only
/// such as libc has no function for.
#[inline(always)]
pub(crate) fn brief_call(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    if process::is_child() {
        return forked();
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

/// Like [`call`], for a function that returns a pointer: null where it fails, and `errno` is set.
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

/// Refuses a call in a child, without the heap: `_Fork` leaves its locks as they were.
#[cold]
fn forked() -> c_int {
    set_message(
        "this process was forked from one that uses libpinfold: devices do not reach its memory; fork before the first \
         call, or exec",
    );
    -libc::EPERM
}

/// Returns the message of the last failed call of this thread: a sentence with the value, the limit
/// and the next step. The empty string if none has failed; also in handlers that run at the end of
/// the thread or of the process (pthread_key_create(), atexit()).
///
/// The text is in a buffer of the thread, at the same address as long as the thread exists; the
/// next call of the library in this thread that fails changes it. At most 2047 bytes.
///
/// Thread: any; the message is the thread's own. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_strerror_last() -> *const c_char {
    MESSAGE.with(|cells| cells.as_ptr().cast())
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
#[inline(always)]
pub(crate) fn check_out<T>(out: *const T, name: &str) -> Result<(), Failure> {
    if out.is_null() { Err(missing(name)) } else { Ok(()) }
}

#[cold]
fn missing(name: &str) -> Failure {
    fail!(EFAULT, "`{name}` is NULL: this parameter is needed")
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
        // SAFETY: a C string of this thread, which nothing changes meanwhile.
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
    fn a_message_stays_where_it_is_and_is_cut_off_to_fit() {
        let before = pf_strerror_last();
        let long = "\u{e4}".repeat(MESSAGE_BYTES);
        assert_eq!(call(|| Err(Failure::new(libc::EIO, long))), -libc::EIO);
        assert_eq!(before, pf_strerror_last());
        assert_eq!(last(), "\u{e4}".repeat(MESSAGE_BYTES / 2 - 1));
        assert_eq!(call(|| Err(fail!(EIO, "a\0b"))), -libc::EIO);
        assert_eq!(last(), "a b");
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
    fn one_thing_is_counted_in_the_singular() {
        let told = [0, 1, 2].map(|count| Counted(count, "mapping or request").to_string());
        let some = "mappings or requests";
        assert_eq!(told, [format!("0 {some}"), "1 mapping or request".into(), format!("2 {some}")]);
    }

    #[test]
    fn a_null_pointer_names_the_parameter() {
        // SAFETY: null is allowed.
        let failure = unsafe { store(std::ptr::null_mut::<u8>(), 1, "out") }.unwrap_err();
        assert_eq!(failure.errno(), libc::EFAULT);
        assert!(failure.message.starts_with("`out` is NULL"));
    }
}
