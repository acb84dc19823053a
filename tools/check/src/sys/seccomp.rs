//! seccomp's user notification (Linux 5.0; an answer that installs a descriptor, 5.14; a wait that
//! only a fatal signal ends, 5.19).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `AUDIT_ARCH_X86_64`: EM_X86_64, 64 bits, little-endian.
#[cfg(target_arch = "x86_64")]
pub(crate) const NATIVE: u32 = 0xc000_003e;
/// `AUDIT_ARCH_AARCH64`.
#[cfg(target_arch = "aarch64")]
pub(crate) const NATIVE: u32 = 0xc000_00b7;

/// The number of `ioctl` of 32-bit x86 (`asm/unistd_32.h`).
const IOCTL_32: u32 = 54;
/// The bit of system calls of x32 (`__X32_SYSCALL_BIT`), and the number of its `ioctl`.
const X32: u32 = 0x4000_0000;
const X32_IOCTL: u32 = X32 + 514;

/// The advice of `madvise` with which the content of memory goes.
const MADVISE_GONE: [i32; 4] =
    [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_REMOVE, libc::MADV_DONTNEED_LOCKED];

/// The type byte of the requests of VFIO and iommufd, in its place in the request.
const TYPE_MASK: u32 = 0xff00;
const TYPE: u32 = (b';' as u32) << 8;
/// The upper half of the offset of the first region that is not BAR 0, and of the end of the last:
/// the kernel's offsets are `index << 40`.
const REGION_FIRST: u32 = 1 << 8;
const REGION_END: u32 = 9 << 8;

/// The classic BPF program that chooses the system calls for the notification.
///
/// Each test is followed by its return, so that no jump crosses another test. `memory`: also the calls
/// by which memory goes.
pub(crate) fn filter(memory: bool) -> Vec<libc::sock_filter> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
    const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const IF_ANY: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let mut program = Vec::new();
    let mut add = |code: u32, k: u32, jt: u8, jf: u8| {
        let code = u16::try_from(code).unwrap_or(0);
        program.push(libc::sock_filter { code, jt, jf, k });
    };
    let data = |offset: usize| u32::try_from(offset).unwrap_or(0);
    let number = data(offset_of!(libc::seccomp_data, nr));
    let args = data(offset_of!(libc::seccomp_data, args));
    let call = |call: libc::c_long| u32::try_from(call).unwrap_or(u32::MAX);
    // `ioctl`, if the request is of the type.
    let typed = |add: &mut dyn FnMut(u32, u32, u8, u8), number: u32| {
        add(IF_EQUAL, number, 0, 5);
        add(LOAD, args + 8, 0, 0);
        add(AND, TYPE_MASK, 0, 0);
        add(IF_EQUAL, TYPE, 0, 1);
        add(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0);
        add(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    };
    add(LOAD, data(offset_of!(libc::seccomp_data, arch)), 0, 0);
    add(IF_EQUAL, NATIVE, 8, 0);
    // Callers of another architecture, which are refused.
    add(LOAD, number, 0, 0);
    typed(&mut add, IOCTL_32);
    add(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    add(LOAD, number, 0, 0);
    typed(&mut add, X32_IOCTL);
    typed(&mut add, call(libc::SYS_ioctl));
    #[cfg(target_arch = "x86_64")]
    let opens = [libc::SYS_open, libc::SYS_openat, libc::SYS_openat2];
    #[cfg(not(target_arch = "x86_64"))]
    let opens = [libc::SYS_openat, libc::SYS_openat2];
    for open in opens {
        add(IF_EQUAL, call(open), 0, 1);
        add(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0);
    }
    if memory {
        for always in [libc::SYS_munmap, libc::SYS_mremap, libc::SYS_ftruncate] {
            add(IF_EQUAL, call(always), 0, 1);
            add(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0);
        }
        let bits = |value: i32| value.cast_unsigned();
        // The modes and flags with which something that was there goes.
        for (number, argument, flags) in
            [(libc::SYS_fallocate, 1, u32::MAX), (libc::SYS_mmap, 3, bits(libc::MAP_FIXED))]
        {
            add(IF_EQUAL, call(number), 0, 4);
            add(LOAD, args + argument * 8, 0, 0);
            add(IF_ANY, flags, 0, 1);
            add(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0);
            add(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
        }
        // Behind the load, two instructions for each, and the last.
        let after_advice = u8::try_from(2 + 2 * MADVISE_GONE.len()).unwrap_or(0);
        add(IF_EQUAL, call(libc::SYS_madvise), 0, after_advice);
        add(LOAD, args + 2 * 8, 0, 0);
        for advice in MADVISE_GONE.map(bits) {
            add(IF_EQUAL, advice, 0, 1);
            add(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0);
        }
        add(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    }
    // Accesses to configuration space, by their offset.
    add(IF_EQUAL, call(libc::SYS_pread64), 1, 0);
    add(IF_EQUAL, call(libc::SYS_pwrite64), 0, 4);
    add(LOAD, args + 3 * 8 + 4, 0, 0);
    add(IF_AT_LEAST, REGION_FIRST, 0, 2);
    add(IF_AT_LEAST, REGION_END, 1, 0);
    add(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0);
    add(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    program
}

/// Installs the filter for this thread and what it starts, and returns the listener. Allocates
/// nothing.
pub(crate) fn install(filter: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let len = u16::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut() };
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let operation = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the call reads `program`, whose filter has `len` instructions, and keeps a copy.
    let fd = unsafe { libc::syscall(libc::SYS_seccomp, operation, flags, &raw const program) };
    let fd = i32::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, so this is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A system call that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notification {
    pub(crate) id: u64,
    /// The thread, by its number in this process's namespace.
    pub(crate) tid: u32,
    pub(crate) number: i64,
    pub(crate) arch: u32,
    /// Where the thread continues.
    pub(crate) pc: u64,
    pub(crate) args: [u64; 6],
}

/// The receiving end of the notifications.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

impl From<OwnedFd> for Listener {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Listener {
    /// Makes a request of the listener; `None` if its caller no longer waits.
    fn call<T>(&self, request: libc::Ioctl, argument: &mut T) -> io::Result<Option<i32>> {
        // SAFETY: each caller passes the structure that belongs to its request.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), request, &raw mut *argument) };
        if answer >= 0 {
            return Ok(Some(answer));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::EINTR) => Ok(None),
            _ => Err(error),
        }
    }

    /// Receives a notification; `None` if its caller no longer waits.
    pub(crate) fn receive(&self) -> io::Result<Option<Notification>> {
        // The kernel requires zeroes.
        let data = libc::seccomp_data { nr: 0, arch: 0, instruction_pointer: 0, args: [0; 6] };
        let mut got = libc::seccomp_notif { id: 0, pid: 0, flags: 0, data };
        Ok(self.call(libc::SECCOMP_IOCTL_NOTIF_RECV, &mut got)?.map(|_| Notification {
            id: got.id,
            tid: got.pid,
            number: got.data.nr.into(),
            arch: got.data.arch,
            pc: got.data.instruction_pointer,
            args: got.data.args,
        }))
    }

    /// Returns whether the caller still waits, so that what was read of it is its own.
    pub(crate) fn is_waiting(&self, id: u64) -> bool {
        let mut id = id;
        matches!(self.call(libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &mut id), Ok(Some(_)))
    }

    fn respond(&self, mut response: libc::seccomp_notif_resp) -> io::Result<bool> {
        Ok(self.call(libc::SECCOMP_IOCTL_NOTIF_SEND, &mut response)?.is_some())
    }

    /// Has the system call return `value`; `false` if the caller no longer waits.
    pub(crate) fn answer(&self, id: u64, value: i64) -> io::Result<bool> {
        self.respond(libc::seccomp_notif_resp { id, val: value, error: 0, flags: 0 })
    }

    /// Has the system call fail; `false` if the caller no longer waits.
    pub(crate) fn fail(&self, id: u64, errno: i32) -> io::Result<bool> {
        self.respond(libc::seccomp_notif_resp { id, val: 0, error: -errno, flags: 0 })
    }

    /// Has the kernel execute the system call; `false` if the caller no longer waits.
    pub(crate) fn resume(&self, id: u64) -> io::Result<bool> {
        let flags = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap_or(0);
        self.respond(libc::seccomp_notif_resp { id, val: 0, error: 0, flags })
    }

    /// Installs a descriptor in the caller's process and has the system call return it; `false` if
    /// the caller no longer waits.
    ///
    /// # Errors
    /// The system error: the caller has no free descriptor, for one. It still waits.
    pub(crate) fn inject(&self, id: u64, fd: BorrowedFd<'_>, cloexec: bool) -> io::Result<bool> {
        let mut add = libc::seccomp_notif_addfd {
            id,
            flags: u32::try_from(libc::SECCOMP_ADDFD_FLAG_SEND).unwrap_or(0),
            srcfd: u32::try_from(fd.as_raw_fd()).unwrap_or(u32::MAX),
            newfd: 0,
            newfd_flags: if cloexec { libc::O_CLOEXEC.cast_unsigned() } else { 0 },
        };
        Ok(self.call(libc::SECCOMP_IOCTL_NOTIF_ADDFD, &mut add)?.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the filter does with a system call, by an interpreter written from the description of
    /// classic BPF.
    fn run(arch: u32, number: u32, args: [u64; 6]) -> u32 {
        run_with(false, arch, number, args)
    }

    fn run_with(memory: bool, arch: u32, number: u32, args: [u64; 6]) -> u32 {
        let mut data = vec![0u8; size_of::<libc::seccomp_data>()];
        data[..4].copy_from_slice(&number.to_ne_bytes());
        data[4..8].copy_from_slice(&arch.to_ne_bytes());
        for (i, arg) in args.iter().enumerate() {
            data[16 + i * 8..24 + i * 8].copy_from_slice(&arg.to_ne_bytes());
        }
        let program = filter(memory);
        let (mut at, mut a) = (0, 0u32);
        loop {
            let step = program[at];
            at += 1;
            match u32::from(step.code) {
                0x20 => {
                    let k = step.k as usize;
                    a = u32::from_ne_bytes(data[k..k + 4].try_into().unwrap());
                }
                0x54 => a &= step.k,
                0x15 => at += usize::from(if a == step.k { step.jt } else { step.jf }),
                0x45 => at += usize::from(if a & step.k != 0 { step.jt } else { step.jf }),
                0x35 => at += usize::from(if a >= step.k { step.jt } else { step.jf }),
                0x06 => return step.k,
                code => panic!("code {code:#x}"),
            }
        }
    }

    const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

    #[test]
    fn only_the_calls_concerned_are_notified() {
        let with = |at: usize, value: u64| {
            let mut args = [0; 6];
            args[at] = value;
            args
        };
        let native = |number: libc::c_long, args| run(NATIVE, u32::try_from(number).unwrap(), args);
        assert_eq!(native(libc::SYS_openat, [0; 6]), NOTIFY);
        assert_eq!(native(libc::SYS_openat2, [0; 6]), NOTIFY);
        assert_eq!(native(libc::SYS_read, [0; 6]), ALLOW);
        assert_eq!(native(libc::SYS_mmap, with(5, 7 << 40)), ALLOW);
        assert_eq!(native(libc::SYS_ioctl, with(1, 0x3b71)), NOTIFY);
        assert_eq!(native(libc::SYS_ioctl, with(1, 0xffff_ffff_0000_3b71)), NOTIFY);
        assert_eq!(native(libc::SYS_ioctl, with(1, 0x5401)), ALLOW);
        for call in [libc::SYS_pread64, libc::SYS_pwrite64] {
            assert_eq!(native(call, with(3, 7 << 40)), NOTIFY);
            assert_eq!(native(call, with(3, 1 << 40)), NOTIFY);
            assert_eq!(native(call, with(3, (9 << 40) - 1)), NOTIFY);
            assert_eq!(native(call, with(3, 9 << 40)), ALLOW);
            assert_eq!(native(call, with(3, (1 << 40) - 1)), ALLOW, "BAR 0 is memory");
            assert_eq!(native(call, with(3, u64::MAX)), ALLOW);
        }
    }

    #[test]
    fn calls_by_which_memory_goes_are_notified_on_request() {
        let with = |number: libc::c_long, at: usize, value: i32| {
            let mut args = [0; 6];
            args[at] = value.cast_unsigned().into();
            let number = u32::try_from(number).unwrap();
            [false, true].map(|memory| run_with(memory, NATIVE, number, args) == NOTIFY)
        };
        let (always, on_request, never) = ([true; 2], [false, true], [false; 2]);
        assert_eq!(with(libc::SYS_munmap, 0, 0), on_request);
        assert_eq!(with(libc::SYS_mremap, 0, 0), on_request);
        assert_eq!(with(libc::SYS_ftruncate, 0, 0), on_request);
        assert_eq!(with(libc::SYS_mmap, 3, libc::MAP_FIXED | libc::MAP_PRIVATE), on_request);
        assert_eq!(with(libc::SYS_mmap, 3, libc::MAP_PRIVATE), never);
        assert_eq!(with(libc::SYS_fallocate, 1, libc::FALLOC_FL_PUNCH_HOLE), on_request);
        assert_eq!(with(libc::SYS_fallocate, 1, 0), never);
        for advice in MADVISE_GONE {
            assert_eq!(with(libc::SYS_madvise, 2, advice), on_request, "{advice}");
        }
        assert_eq!(with(libc::SYS_madvise, 2, libc::MADV_HUGEPAGE), never);
        // The others are as before.
        assert_eq!(with(libc::SYS_openat, 0, 0), always);
        assert_eq!(with(libc::SYS_ioctl, 1, 0x3b71), always);
        assert_eq!(with(libc::SYS_pread64, 3, 0), never);
        let config = [0, 0, 0, 7 << 40, 0, 0];
        let pread = u32::try_from(libc::SYS_pread64).unwrap();
        assert_eq!(run_with(true, NATIVE, pread, config), NOTIFY);
    }

    #[test]
    fn other_architectures_reach_nothing() {
        let request = [0, 0x3b64, 0, 0, 0, 0];
        assert_eq!(run(0x4000_0003, IOCTL_32, request), NOTIFY);
        assert_eq!(run(0x4000_0003, IOCTL_32, [0; 6]), ALLOW);
        assert_eq!(run(0x4000_0003, 5, request), ALLOW);
        assert_eq!(run(NATIVE, X32_IOCTL, request), NOTIFY);
    }
}
