//! The cause of `ENOMEM` for an io_uring: the limit of locked memory, a limit of what the process
//! maps, or a shortage of the kernel's own memory. The error is the same, so the cause is found by
//! calls that only one of them refuses.

use super::errno::{Errno, last_errno};

use super::limits::{MapLimit, MapSetting, MemlockLimit, MemlockRefusal};
use super::region::Region;
use super::release::{charges_rings, release};
use super::uring;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

/// The cause of a refused ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shortage {
    /// The limit of locked memory.
    Locked(MemlockRefusal),
    /// The kernel creates such a ring, and did not map it: a limit of what the process maps, if one
    /// refuses as much.
    NotMapped(Option<MapLimit>),
    /// The kernel's memory; whether it suffices for a ring of one entry.
    Kernel { smaller: bool },
}

/// Returns the bytes of locked memory that a ring is charged at most.
pub(crate) fn ring_bytes(depth: u32) -> u64 {
    let page = rustix::param::page_size() as u64;
    let entries = u64::from(depth).next_power_of_two();
    // Submissions are 64 bytes and an index of 4; completions are twice as many of 16 bytes, after
    // a header of some 320.
    (entries * 64).next_multiple_of(page) + (entries * 36 + 512).next_multiple_of(page)
}

impl Shortage {
    /// Finds what refused a ring of this depth with `ENOMEM`; `more` bytes of locked memory are to
    /// follow it. `None` if the kernel now refuses it otherwise.
    pub(super) fn of(depth: u32, more: u64) -> Option<Self> {
        match uring::setup(depth) {
            Ok(_) => {
                let refuses = |limit: &MapLimit| {
                    limit.setting == MapSetting::AddressSpace && limit.left < ring_bytes(depth)
                };
                Some(Self::NotMapped(MapLimit::here().into_iter().find(refuses)))
            }
            Err(errno) if errno.raw() == libc::ENOMEM => {
                let locked = charges_rings(&release())
                    .then(|| MemlockRefusal::of(errno, ring_bytes(depth)))
                    .flatten();
                Some(match locked {
                    Some(refused) => {
                        let requested = refused.requested.saturating_add(more);
                        Self::Locked(MemlockRefusal { requested, ..refused })
                    }
                    None => Self::Kernel { smaller: depth > 1 && uring::setup(1).is_ok() },
                })
            }
            Err(_) => None,
        }
    }
}

impl MemlockRefusal {
    /// Returns it if the limit of locked memory is what answered `errno` to a call that would lock
    /// `requested` bytes for a ring: it binds this process, and refuses as much again where the
    /// kernel needs no memory for it. Where that cannot be tried, it is assumed.
    pub(crate) fn of(errno: Errno, requested: u64) -> Option<Self> {
        let limit = MemlockLimit::here().binding().filter(|_| errno.raw() == libc::ENOMEM)?;
        let refuses = requested > limit || limit_refuses(requested).unwrap_or(true);
        (requested > 0 && refuses).then_some(Self { requested, limit })
    }
}

/// The number of repetitions of a refused call if the refusal no longer has a cause when one is
/// looked for.
const AGAIN: u32 = 8;

/// Makes a call that locks `requested` bytes for a ring, and makes it again if it was refused with
/// `ENOMEM` and the limit of locked memory does not refuse as much any more: the kernel returns what
/// a ring had locked some time after the end of the ring or of its process, so the cause of such a
/// refusal, and with it the remedy, could no longer be named.
pub(crate) fn locking<T, E: Copy + Into<Errno>>(
    requested: impl Fn() -> u64,
    mut call: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let mut result = call();
    for _ in 0..AGAIN {
        match &result {
            Err(errno)
                if (*errno).into().raw() == libc::ENOMEM
                    && MemlockRefusal::of((*errno).into(), requested()).is_none() =>
            {
                result = call();
            }
            _ => break,
        }
    }
    result
}

/// A page of memory is registered so often, at most: what a table holds.
const MOST_PLACES: u64 = 16_384;

/// Returns whether the limit of locked memory refuses `bytes` more to this user, by charging as
/// much: a ring of one entry, with a small piece of memory registered as often as it takes. `None`
/// if that cannot be tried.
fn limit_refuses(bytes: u64) -> Option<bool> {
    let page = rustix::param::page_size() as u64;
    let ring = match uring::setup(1) {
        Ok(ring) => ring,
        Err(errno) if errno.raw() == libc::ENOMEM => return limit_refuses_two_pages(),
        Err(_) => return None,
    };
    let charged = if charges_rings(&release()) { ring_bytes(1) } else { 0 };
    let rest = bytes.saturating_sub(charged).next_multiple_of(page);
    if rest == 0 {
        return Some(false);
    }
    let piece = rest.div_ceil(MOST_PLACES).next_multiple_of(page).max(64 << 10).min(rest);
    let memory = Region::anonymous(super::errno::bytes(piece), super::errno::bytes(page)).ok()?;
    // A larger page is charged once, however often it is registered.
    let _ = memory.ask_for_plain_pages();
    let place = |len| libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(memory.addr()),
        iov_len: super::errno::bytes(len),
    };
    let mut places = vec![place(piece); super::errno::bytes(rest / piece)];
    places.extend((rest % piece > 0).then(|| place(rest % piece)));
    match uring::register(ring.as_fd(), &places) {
        Ok(()) => {
            // Closing the ring returns the charge as well, but later.
            let _ = uring::unregister(ring.as_fd());
            Some(false)
        }
        Err(errno) if errno.raw() == libc::ENOMEM => Some(true),
        Err(_) => None,
    }
}

/// Like [`limit_refuses`], for the two pages of the smallest ring, where none can be created: a
/// datagram of one byte to the process itself that is not copied (`MSG_ZEROCOPY`, Linux 5.0) is
/// charged as much to the same counter. `None` without a loopback interface.
fn limit_refuses_two_pages() -> Option<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    socket.connect(socket.local_addr().ok()?).ok()?;
    let on: libc::c_int = 1;
    let len = libc::socklen_t::try_from(size_of_val(&on)).ok()?;
    let at = std::ptr::from_ref(&on).cast();
    let fd = socket.as_raw_fd();
    // SAFETY: the kernel reads an integer from there during the call.
    if unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, at, len) } != 0 {
        return None;
    }
    static BYTE: u8 = 0;
    // SAFETY: the kernel reads one byte of a static, which is never written.
    let sent = unsafe { libc::send(fd, std::ptr::from_ref(&BYTE).cast(), 1, libc::MSG_ZEROCOPY) };
    match sent {
        1 => Some(false),
        _ if last_errno().raw() == libc::ENOBUFS => Some(true),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::kernel::{RingRefusal, RingRefusalCause};
    use super::*;
    use std::os::fd::OwnedFd;
    use std::sync::{Mutex, PoisonError};
    use std::time::{Duration, Instant};

    /// Runs `body` on a thread without `CAP_IPC_LOCK`: the kernel counts what it pins. One at a
    /// time, since all threads of a user share the limit.
    pub(crate) fn without_ipc_lock<R: Send>(body: impl FnOnce() -> R + Send) -> R {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
        static LIMIT: Mutex<()> = Mutex::new(());
        let _alone = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
        let run = || {
            let mut sets = capabilities(None).unwrap();
            sets.effective -= CapabilitySet::IPC_LOCK;
            set_capabilities(None, sets).unwrap();
            body()
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    /// Runs `body` on a thread where system call `call` fails with `errno` if its argument of number
    /// `argument` is at least `from`.
    pub(crate) fn refusing<R: Send>(
        call: libc::c_long,
        (argument, from): (u32, u32),
        errno: i32,
        body: impl FnOnce() -> R + Send,
    ) -> R {
        let op = |code: u32, jt, jf, k| libc::sock_filter {
            code: u16::try_from(code).unwrap(),
            jt,
            jf,
            k,
        };
        let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
        let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap();
        let mut filter = [
            op(load, 0, 0, 0),
            op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 3, u32::try_from(call).unwrap()),
            // The lower half of the argument.
            op(load, 0, 0, 16 + 8 * argument),
            op(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, from),
            op(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
            op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let run = move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            let program = libc::sock_fprog { len: 6, filter: filter.as_mut_ptr() };
            // SAFETY: the kernel copies the program, which outlives the call, and its six
            // instructions; it holds for this thread alone.
            let set = unsafe {
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
            };
            assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
            body()
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    /// A ring with a table, whose charge ends with it and not some time later.
    struct Charged(OwnedFd);

    impl Drop for Charged {
        fn drop(&mut self) {
            uring::unregister(self.0.as_fd()).unwrap();
        }
    }

    /// Returns a ring that uses all of the limit but `left` bytes; `None` where no limit binds, or
    /// one that is too large for a test.
    fn filled(left: u64) -> Option<Charged> {
        let limit = MemlockLimit::here().binding().filter(|limit| *limit <= 256 << 20)?;
        let page = rustix::param::page_size();
        let ring = uring::setup(1).ok()?;
        let memory = Region::anonymous(64 << 10, page).unwrap();
        memory.ask_for_plain_pages().unwrap();
        let place = |len| libc::iovec { iov_base: memory.base().as_ptr().cast(), iov_len: len };
        let charge = |bytes: u64| {
            let pages = bytes / 4096 - if charges_rings(&release()) { 2 } else { 0 };
            let mut places = vec![place(64 << 10); usize::try_from(pages / 16).unwrap()];
            let rest = usize::try_from(pages % 16).unwrap() << 12;
            places.extend((rest > 0).then(|| place(rest)));
            uring::register(ring.as_fd(), &places)
        };
        // All of it fits when the charges of rings that were closed before have been returned.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(errno) = charge(limit) {
            assert!(Instant::now() < deadline, "{errno}");
            std::thread::sleep(Duration::from_millis(5));
        }
        uring::unregister(ring.as_fd()).unwrap();
        charge(limit - left).unwrap();
        Some(Charged(ring))
    }

    #[test]
    fn the_limit_refuses_exactly_what_exceeds_it() {
        without_ipc_lock(|| {
            // Each trial begins without the charge of the ring before it, which ends late.
            let tried = |left, trial: &dyn Fn() -> Option<bool>| {
                let _filled = filled(left)?;
                trial()
            };
            if tried(0, &|| Some(true)).is_none() {
                return eprintln!("SKIPPED: no limit");
            }
            for left in [0, 4096, 8192, 5 << 12, 1 << 20] {
                let two = tried(left, &limit_refuses_two_pages);
                assert_eq!(two, Some(left < 8192), "{left} bytes left");
                let more = tried(left, &|| limit_refuses(left + 4096));
                assert_eq!(more, Some(true), "{left} bytes left");
                if left >= 8192 {
                    for fits in [left, left - 1, 1] {
                        let refused = tried(left, &|| limit_refuses(fits));
                        assert_eq!(refused, Some(false), "{fits} of {left} bytes left");
                    }
                }
            }
        });
    }

    /// Returns the cause of an `ENOMEM` of a ring of this depth.
    fn cause(depth: u32) -> RingRefusal {
        RingRefusal::of(Errno::new(libc::ENOMEM), (5, 6), depth, 1 << 20)
    }

    #[test]
    fn the_kernels_memory_is_not_named_a_limit() {
        let setup = libc::SYS_io_uring_setup;
        let none = without_ipc_lock(|| refusing(setup, (0, 0), libc::ENOMEM, || cause(256)));
        let RingRefusalCause::NoMemory { smaller: false, .. } = none.cause else {
            panic!("{none}")
        };
        assert!(none.to_string().contains("even for the smallest ring"), "{none}");
        let large = without_ipc_lock(|| refusing(setup, (0, 65), libc::ENOMEM, || cause(256)));
        let requested = ring_bytes(256);
        let expected = RingRefusalCause::NoMemory { depth: 256, requested, smaller: true };
        assert_eq!(large.cause, expected, "{large}");
        assert!(large.to_string().contains("use a lower queue depth"), "{large}");
        assert_eq!(large.fix(), None);
        // The kernel refuses it otherwise by now.
        let other = refusing(setup, (0, 0), libc::EMFILE, || cause(256));
        assert_eq!(other.cause, RingRefusalCause::Other);
    }

    #[test]
    fn a_call_whose_refusal_has_lost_its_cause_is_made_again() {
        without_ipc_lock(|| {
            let Some(filled) = filled(4096) else { return eprintln!("SKIPPED: no limit") };
            let ring = uring::setup(1);
            let memory = Region::anonymous(64 << 10, rustix::param::page_size()).unwrap();
            memory.ask_for_plain_pages().unwrap();
            let place = libc::iovec { iov_base: memory.base().as_ptr().cast(), iov_len: 64 << 10 };
            // Another program's memory is released after the refusal, before its cause is looked for.
            let mut filled = Some(filled);
            let (mut made, mut first) = (0, None);
            let result = locking(
                || 64 << 10,
                || {
                    made += 1;
                    let ring = match &ring {
                        Ok(ring) => ring,
                        Err(errno) if filled.is_some() => {
                            drop(filled.take());
                            first = Some(*errno);
                            return Err(*errno);
                        }
                        Err(_) => return Ok(()),
                    };
                    let result = uring::register(ring.as_fd(), &[place]);
                    first = first.or(result.err());
                    drop(filled.take());
                    result
                },
            );
            assert_eq!(first.map(Errno::raw), Some(libc::ENOMEM));
            assert!(result.is_ok() && made >= 2, "{result:?} after {made}");
        });
    }

    #[test]
    fn a_call_that_is_refused_for_another_reason_is_not_repeated_for_ever() {
        for (errno, calls) in [(libc::ENOMEM, AGAIN + 1), (libc::EBUSY, 1)] {
            let mut made = 0;
            let refused: Result<(), _> = locking(
                || 4096,
                || {
                    made += 1;
                    Err(Errno::new(errno))
                },
            );
            assert_eq!((refused, made), (Err(Errno::new(errno)), calls));
        }
        // More than the limit allows at all is not tried again.
        without_ipc_lock(|| {
            if MemlockLimit::here().binding().is_some() {
                let mut made = 0;
                let refused: Result<(), _> = locking(
                    || u64::MAX,
                    || {
                        made += 1;
                        Err(Errno::new(libc::ENOMEM))
                    },
                );
                assert_eq!((refused, made), (Err(Errno::new(libc::ENOMEM)), 1));
            }
        });
    }

    #[test]
    fn the_limit_that_refuses_a_ring_is_named_with_what_follows_it() {
        without_ipc_lock(|| {
            if !charges_rings(&release()) {
                return eprintln!("SKIPPED: Linux {} does not charge rings", release());
            }
            for left in [4096, 16 << 10] {
                let Some(_ring) = filled(left) else { return eprintln!("SKIPPED: no limit") };
                let refusal = cause(256);
                let RingRefusalCause::LockedMemory(refused) = refusal.cause else {
                    panic!("{refusal}")
                };
                assert_eq!(refused.requested, ring_bytes(256) + (1 << 20));
                let fix = refusal.placed_fix().unwrap();
                assert!(fix.contains("memlock") || fix.contains("ulimit -l"), "{fix}");
            }
        });
    }

    #[test]
    fn a_ring_that_is_only_not_mapped_names_the_limit_that_refuses_it() {
        let refusal = cause(4);
        assert_eq!(refusal.errno, Errno::new(libc::ENOMEM));
        let RingRefusalCause::NotMapped { limit: None, requested } = refusal.cause else {
            panic!("{refusal}")
        };
        assert_eq!(requested, ring_bytes(4));
        assert!(refusal.to_string().contains("vm.max_map_count"), "{refusal}");
        let limit = MapLimit { setting: MapSetting::AddressSpace, left: 4096, limit: 1 << 30 };
        let cause = RingRefusalCause::NotMapped { requested: 8192, limit: Some(limit) };
        let refusal = RingRefusal { errno: Errno::new(libc::ENOMEM), cause };
        assert!(refusal.to_string().contains("8192 bytes more exceed RLIMIT_AS"), "{refusal}");
        assert!(refusal.placed_fix().is_some());
    }
}
