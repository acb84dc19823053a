//! The hook that sees each alloc, free, map and revoke, with the address and the caller.
//!
//! Off by default: then each call pays one load and a branch. The caller's address is the return
//! address of the call into the library: a stub of two instructions passes it on as one more
//! argument (`pass_caller!`).

use crate::failure::call;
use crate::process::Uncancelled;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// The kind of an event.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum pf_event_kind {
    /// Memory was allocated: `va`, `len`.
    PF_EVENT_ALLOC = 1,
    /// Memory was freed.
    PF_EVENT_FREE = 2,
    /// Memory was mapped: `va`, `iova`, `len`.
    PF_EVENT_MAP = 3,
    /// A mapping was revoked.
    PF_EVENT_REVOKE = 4,
}

/// One event.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pf_event {
    /// sizeof(struct pf_event), as the library knows it: what is behind that is not there.
    pub struct_size: usize,
    /// The kind: `enum pf_event_kind`.
    pub kind: u32,
    /// Reserved: 0.
    pub reserved: u32,
    /// The memory, as the program addresses it.
    pub va: *mut c_void,
    /// The memory, as a device addresses it; 0 where it has no such address.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// The instruction behind the call of the library.
    pub caller: *const c_void,
    /// The handle that was used.
    pub handle: u64,
}

/// Called in the thread of the event, inside its call: it must not call the library, and must not
/// unwind or jump out of it.
pub type pf_trace_fn = Option<unsafe extern "C" fn(arg: *mut c_void, event: *const pf_event)>;

struct Hook {
    function: unsafe extern "C" fn(*mut c_void, *const pf_event),
    arg: *mut c_void,
}

static HOOK: AtomicPtr<Hook> = AtomicPtr::new(null_mut());
/// All hooks that were ever set: a call that began before may still use an old one.
static HOOKS: Mutex<Vec<&'static Hook>> = Mutex::new(Vec::new());

// SAFETY: `pf_trace_set` requires that the function can be called with the argument by any thread.
unsafe impl Sync for Hook {}

/// The address behind the call of the library.
pub(crate) type Caller = *const c_void;

/// Returns the hook if one is set.
#[inline(always)]
pub(crate) fn hook() -> Option<Tracer> {
    // Acquire: the hook's fields were written before it was set.
    let hook = HOOK.load(Ordering::Acquire);
    // SAFETY: a hook that was ever set is never freed.
    unsafe { hook.as_ref() }.map(Tracer)
}

/// The origin of an event.
#[derive(Clone, Copy)]
pub(crate) struct Site {
    pub(crate) caller: Caller,
    /// The handle that was used.
    pub(crate) handle: u64,
}

impl Site {
    #[inline(always)]
    pub(crate) fn new<T>(caller: Caller, handle: *mut T) -> Self {
        Self { caller, handle: handle.addr() as u64 }
    }
}

/// Reports events.
#[derive(Clone, Copy)]
pub(crate) struct Tracer(&'static Hook);

impl Tracer {
    /// Reports an event of `len` bytes at `va`, which a device reaches at `iova`, or 0.
    #[cold]
    pub(crate) fn report<T>(
        self,
        kind: pf_event_kind,
        va: *mut T,
        iova: u64,
        len: u64,
        site: Site,
    ) {
        let (kind, va, Site { caller, handle }) = (kind as u32, va.cast(), site);
        let struct_size = size_of::<pf_event>();
        let event = pf_event { struct_size, kind, reserved: 0, va, iova, len, caller, handle };
        // The function may well reach a cancellation point.
        let _uncancelled = Uncancelled::new();
        // SAFETY: `pf_trace_set` requires that the function can be called with its argument, in
        // any thread, as long as calls are made that began before another one was set.
        unsafe { (self.0.function)(self.0.arg, &raw const event) }
    }
}

/// Sets the function that sees each alloc, free, map and revoke; NULL for none. Off at first.
///
/// @function: called in the thread of the event, after the event, inside its call. It must not
/// call the library, and must not jump out. Calls that began before it was replaced may still call
/// it. The event of a pf_put() may come after that of the block's next pf_get() by another thread.
/// @arg: passed to it.
/// @former_arg: where the argument of the former function is stored, NULL if there was none; NULL:
/// not needed. A function that calls the former one, with this argument, leaves both at work; it
/// may be called before this call has returned.
///
/// Return: the former function; NULL if there was none. In a child nothing is set, and it is NULL.
/// Thread: any. Allocates 16 bytes for each function that is set, which stay for good. Ownership:
/// `arg` stays the caller's. Since 0.2.
///
/// # Safety
/// `function` can be called with `arg` from any thread; `former_arg` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_trace_set(
    function: pf_trace_fn,
    arg: *mut c_void,
    former_arg: *mut *mut c_void,
) -> pf_trace_fn {
    let mut former: Option<&'static Hook> = None;
    call(|| {
        let hook = function.map_or(null_mut(), |function| {
            let hook: &'static Hook = Box::leak(Box::new(Hook { function, arg }));
            HOOKS.lock().unwrap_or_else(PoisonError::into_inner).push(hook);
            std::ptr::from_ref(hook).cast_mut()
        });
        // Release: its fields come before it. Acquire: so do those of the old one, which may still be
        // in use, so it is not freed.
        let old = HOOK.swap(hook, Ordering::AcqRel);
        // SAFETY: a hook that was ever set is never freed.
        former = unsafe { old.as_ref() };
        Ok(0)
    });
    if !former_arg.is_null() {
        let arg = former.map_or(null_mut(), |hook| hook.arg);
        // SAFETY: not null, so the caller promises that it can be written. C need not align it.
        unsafe { former_arg.write_unaligned(arg) };
    }
    former.map(|hook| hook.function)
}

/// The body of a C function with the given number of arguments: jumps to `$target`, which has the
/// same arguments and then the [`Caller`]. The compiler describes no naked function to unwinders,
/// so the `.cfi` lines do: else what walks the stack, as a hook may, stops here.
macro_rules! pass_caller {
    (1, $target:path) => { $crate::trace::pass_caller!(@ "rsi", "x1", "a1", $target) };
    (2, $target:path) => { $crate::trace::pass_caller!(@ "rdx", "x2", "a2", $target) };
    (3, $target:path) => { $crate::trace::pass_caller!(@ "rcx", "x3", "a3", $target) };
    (4, $target:path) => { $crate::trace::pass_caller!(@ "r8", "x4", "a4", $target) };
    (5, $target:path) => { $crate::trace::pass_caller!(@ "r9", "x5", "a5", $target) };
    // The seventh argument is on the stack, which `push` leaves aligned.
    (6, $target:path) => {
        #[cfg(target_arch = "x86_64")]
        ::std::arch::naked_asm!(
            ".cfi_startproc",
            "push qword ptr [rsp]",
            ".cfi_adjust_cfa_offset 8",
            "call {}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "ret",
            ".cfi_endproc",
            sym $target
        );
        #[cfg(target_arch = "aarch64")]
        ::std::arch::naked_asm!(
            ".cfi_startproc",
            "mov x6, x30",
            "b {}",
            ".cfi_endproc",
            sym $target
        );
        #[cfg(target_arch = "riscv64")]
        ::std::arch::naked_asm!(
            ".cfi_startproc",
            "mv a6, ra",
            "tail {}",
            ".cfi_endproc",
            sym $target
        );
    };
    (@ $x86:literal, $arm:literal, $riscv:literal, $target:path) => {
        #[cfg(target_arch = "x86_64")]
        ::std::arch::naked_asm!(
            ".cfi_startproc",
            concat!("mov ", $x86, ", [rsp]"),
            "jmp {}",
            ".cfi_endproc",
            sym $target
        );
        #[cfg(target_arch = "aarch64")]
        ::std::arch::naked_asm!(
            ".cfi_startproc",
            concat!("mov ", $arm, ", x30"),
            "b {}",
            ".cfi_endproc",
            sym $target
        );
        #[cfg(target_arch = "riscv64")]
        ::std::arch::naked_asm!(
            ".cfi_startproc",
            concat!("mv ", $riscv, ", ra"),
            "tail {}",
            ".cfi_endproc",
            sym $target
        );
    };
}
pub(crate) use pass_caller;
