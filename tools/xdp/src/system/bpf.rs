//! `bpf`: a socket map, a program that redirects to it, and the link that attaches the program to
//! an interface.
//!
//! The program ends with its link's descriptor, so nothing stays attached when the process is
//! killed (Linux 5.9). A second program sends: the kernel runs it on copies of a packet.

use super::last_errno;
use pinfold::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `BPF_MAP_CREATE`.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    flags: u32,
    inner: u32,
    node: u32,
    name: [u8; 16],
}

/// `BPF_MAP_UPDATE_ELEM`.
#[repr(C)]
struct MapUpdate {
    map: u32,
    reserved: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    kind: u32,
    instructions: u32,
    first: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
}

/// `BPF_LINK_CREATE`.
#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// `BPF_LINK_DETACH`.
#[repr(C)]
struct LinkDetach {
    link: u32,
}

/// `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    answer: u32,
    data_bytes: u32,
    data_out_bytes: u32,
    data: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_bytes: u32,
    context_out_bytes: u32,
    context: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<TestRun>() == 80);
const _: () = assert!(size_of::<MapCreate>() == 44 && size_of::<MapUpdate>() == 32);
const _: () = assert!(size_of::<ProgramLoad>() == 72 && size_of::<LinkCreate>() == 16);

const MAP_CREATE: i32 = 0;
const MAP_UPDATE: i32 = 2;
const PROGRAM_LOAD: i32 = 5;
const TEST_RUN: i32 = 10;
const LINK_CREATE: i32 = 28;
const LINK_DETACH: i32 = 34;
/// `BPF_MAP_TYPE_XSKMAP`, `BPF_PROG_TYPE_XDP`, `BPF_XDP`.
const SOCKET_MAP: u32 = 17;
const XDP_PROGRAM: u32 = 6;
const XDP_ATTACH: u32 = 37;
/// `XDP_FLAGS_SKB_MODE`, `XDP_FLAGS_DRV_MODE`.
const GENERIC: u32 = 1 << 1;
const NATIVE: u32 = 1 << 2;
/// `XDP_FLAGS_DRV_MODE`, `XDP_FLAGS_UPDATE_IF_NOEXIST`: for netlink.
pub(crate) const NATIVE_IF_NONE: u32 = NATIVE | 1;
/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;
const NAME: [u8; 16] = *b"pinfold_receive\0";

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    // The two registers are bit fields, whose order is that of the machine.
    let registers = if cfg!(target_endian = "big") { to << 4 | from } else { from << 4 | to };
    Instruction { code, registers, offset, immediate }
}

/// Returns the program: a packet goes to the socket of its queue if there is one, else to the
/// kernel's stack (`XDP_PASS`).
fn redirect(map: BorrowedFd<'_>) -> [Instruction; 6] {
    [
        // r2 = context.rx_queue_index
        instruction(0x61, 2, 1, 16, 0),
        // r1 = map (BPF_PSEUDO_MAP_FD), in two halves
        instruction(0x18, 1, 1, 0, map.as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        // r3 = XDP_PASS
        instruction(0xb7, 3, 0, 0, 2),
        // r0 = bpf_redirect_map(r1, r2, r3)
        instruction(0x85, 0, 0, 0, 51),
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// Returns the program that sends each packet through an interface.
fn send(interface: u32) -> [Instruction; 4] {
    [
        // r1 = interface, r2 = no flags
        instruction(0xb7, 1, 0, 0, interface.cast_signed()),
        instruction(0xb7, 2, 0, 0, 0),
        // r0 = bpf_redirect(r1, r2)
        instruction(0x85, 0, 0, 0, 23),
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// Creates a map from queue numbers below `queues` to sockets. Requires `CAP_BPF` and
/// `CAP_NET_ADMIN`.
pub(crate) fn create_socket_map(queues: u32) -> Result<OwnedFd, Errno> {
    let create = MapCreate {
        kind: SOCKET_MAP,
        key_bytes: 4,
        value_bytes: 4,
        entries: queues,
        name: NAME,
        ..MapCreate::default()
    };
    // SAFETY: the structure that `BPF_MAP_CREATE` takes; it refers to no other memory.
    unsafe { descriptor(MAP_CREATE, &create) }
}

/// Enters a socket for a queue. The kernel removes it when the socket is closed.
pub(crate) fn enter_socket(
    map: BorrowedFd<'_>,
    queue: u32,
    socket: BorrowedFd<'_>,
) -> Result<(), Errno> {
    let value = descriptor_number(socket);
    let update = MapUpdate {
        map: descriptor_number(map),
        reserved: 0,
        key: std::ptr::from_ref(&queue).expose_provenance() as u64,
        value: std::ptr::from_ref(&value).expose_provenance() as u64,
        flags: 0,
    };
    // SAFETY: the structure that `BPF_MAP_UPDATE_ELEM` takes; key and value have the 4 bytes that
    // the map was created with, and outlive the call.
    unsafe { call(MAP_UPDATE, &update) }.map(drop)
}

/// Loads the program that redirects to `map`. Requires `CAP_BPF` and `CAP_NET_ADMIN`.
pub(crate) fn load_redirect(map: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    load(&redirect(map))
}

/// Loads the program that sends through an interface. Requires `CAP_BPF` and `CAP_NET_ADMIN`.
pub(crate) fn load_send(interface: u32) -> Result<OwnedFd, Errno> {
    load(&send(interface))
}

/// The number of retries of a load. The kernel's check of a program ends with `EAGAIN` when the
/// thread has work to do for a signal or a descriptor that was just closed; libbpf tries as often.
const LOAD_RETRIES: u32 = 5;

fn load(program: &[Instruction]) -> Result<OwnedFd, Errno> {
    let license = c"MIT";
    let load = ProgramLoad {
        kind: XDP_PROGRAM,
        // A handful.
        instructions: u32::try_from(program.len()).unwrap_or(u32::MAX),
        first: program.as_ptr().expose_provenance() as u64,
        license: license.as_ptr().expose_provenance() as u64,
        name: NAME,
        attach_type: XDP_ATTACH,
        ..ProgramLoad::default()
    };
    let mut tries = 0;
    loop {
        // SAFETY: the structure that `BPF_PROG_LOAD` takes; it refers to as many instructions as it
        // says and to a string, which outlive the call.
        match unsafe { descriptor(PROGRAM_LOAD, &load) } {
            Err(errno) if errno.raw() == libc::EAGAIN && tries < LOAD_RETRIES => tries += 1,
            result => return result,
        }
    }
}

/// Runs a program on `count` packets with these bytes, which go where it redirects them. Linux
/// 5.18.
pub(crate) fn run_on_copies(
    program: BorrowedFd<'_>,
    packet: &[u8],
    count: u32,
) -> Result<(), Errno> {
    let mut run = TestRun {
        program: descriptor_number(program),
        // The kernel refuses what does not fit into a page.
        data_bytes: u32::try_from(packet.len()).unwrap_or(u32::MAX),
        data: packet.as_ptr().expose_provenance() as u64,
        repeat: count,
        flags: LIVE_FRAMES,
        ..TestRun::default()
    };
    // SAFETY: the structure that `BPF_PROG_TEST_RUN` takes, which the kernel writes results to; it
    // refers to the packet's bytes, which are only read and outlive the call.
    unsafe { call_at(TEST_RUN, &raw mut run) }.map(drop)
}

/// Attaches a program to an interface, in the driver or in the network stack, until the descriptor
/// is closed.
pub(crate) fn attach(
    program: BorrowedFd<'_>,
    interface: u32,
    native: bool,
) -> Result<OwnedFd, Errno> {
    let create = LinkCreate {
        program: descriptor_number(program),
        interface,
        attach_type: XDP_ATTACH,
        flags: if native { NATIVE } else { GENERIC },
    };
    // SAFETY: the structure that `BPF_LINK_CREATE` takes; it refers to no other memory.
    unsafe { descriptor(LINK_CREATE, &create) }
}

/// Detaches the program before the descriptor is closed: the kernel does so some time after the
/// close. Linux 5.9.
pub(crate) fn detach(link: BorrowedFd<'_>) -> Result<(), Errno> {
    let detach = LinkDetach { link: descriptor_number(link) };
    // SAFETY: the structure that `BPF_LINK_DETACH` takes; it refers to no other memory.
    unsafe { call(LINK_DETACH, &detach) }.map(drop)
}

fn descriptor_number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Makes a call that returns a new descriptor.
///
/// # Safety
/// As for [`call`], and the command returns a descriptor.
unsafe fn descriptor<T>(command: i32, argument: &T) -> Result<OwnedFd, Errno> {
    // SAFETY: passed on from this function's contract.
    let raw = unsafe { call(command, argument) }?;
    // SAFETY: a new descriptor that nothing else owns; `bpf` sets close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Makes a call of `bpf`: Linux 3.18; links of XDP since 5.9.
///
/// # Safety
/// `T` is what the command takes, without padding, and what it refers to is valid.
unsafe fn call<T>(command: i32, argument: &T) -> Result<i32, Errno> {
    // SAFETY: passed on from this function's contract; only `BPF_PROG_TEST_RUN` writes to its
    // structure.
    unsafe { call_at(command, std::ptr::from_ref(argument).cast_mut()) }
}

/// Makes a call that may write to its structure.
///
/// # Safety
/// As for [`call`], and nothing else refers to the structure if the command writes to it.
unsafe fn call_at<T>(command: i32, argument: *mut T) -> Result<i32, Errno> {
    // SAFETY: the kernel accesses `size_of::<T>()` bytes of the structure, and what the caller
    // vouches for.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, argument, size_of::<T>()) };
    if answer < 0 { Err(last_errno()) } else { Ok(i32::try_from(answer).unwrap_or(-1)) }
}
