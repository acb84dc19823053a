//! Starts a program in a mount namespace of its own, with the filter installed.

use super::seccomp;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use std::ffi::{CStr, CString, OsString};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// A change of the file system that the program sees. Carried out between fork and exec, so its
/// strings are made before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Mounts an empty file system.
    Tmpfs(CString),
    /// Creates a folder.
    Folder(CString),
    /// Creates a file with this content.
    File(CString, Vec<u8>),
    /// Creates a symbolic link: its text, and where.
    Link(CString, CString),
    /// Mounts what is at the first path at the second, too.
    Bind(CString, CString),
    /// Moves a mount.
    Move(CString, CString),
}

impl Change {
    fn apply(&self) -> rustix::io::Result<()> {
        use rustix::{fs, mount};
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        match self {
            Self::Tmpfs(at) => {
                let flags = MountFlags::NOSUID;
                mount::mount(c"pinfold-check", at.as_c_str(), c"tmpfs", flags, c"mode=755")
            }
            Self::Folder(at) => {
                fs::mkdir(at.as_c_str(), mode | Mode::XUSR | Mode::XGRP | Mode::XOTH)
            }
            Self::File(at, content) => {
                let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
                let file = fs::open(at.as_c_str(), flags, mode)?;
                // The creation mask does not apply to nodes.
                fs::fchmod(&file, mode)?;
                if !content.is_empty() {
                    rustix::io::write(&file, content)?;
                }
                Ok(())
            }
            Self::Link(text, at) => fs::symlink(text.as_c_str(), at.as_c_str()),
            Self::Bind(from, at) => mount::mount_bind_recursive(from.as_c_str(), at.as_c_str()),
            Self::Move(from, at) => mount::mount_move(from.as_c_str(), at.as_c_str()),
        }
    }
}

/// What the child does between fork and exec, in order; a failure names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A namespace for the user, so that it may have one for mounts.
    UserNamespace,
    /// The numbers of the user in it.
    UserMap,
    /// A namespace for mounts.
    MountNamespace,
    /// A change of the file system.
    Mount,
    /// `PR_SET_NO_NEW_PRIVS`.
    NoNewPrivileges,
    /// The filter.
    Filter,
    /// The message with the listener.
    Message,
    /// `execve`.
    Exec,
}

impl Step {
    const ALL: [Self; 8] = [
        Self::UserNamespace,
        Self::UserMap,
        Self::MountNamespace,
        Self::Mount,
        Self::NoNewPrivileges,
        Self::Filter,
        Self::Message,
        Self::Exec,
    ];

    fn code(self) -> u8 {
        Self::ALL.iter().zip(1..).find(|(step, _)| **step == self).map_or(0, |(_, code)| code)
    }

    fn from_code(code: u8) -> Self {
        let step = usize::from(code).checked_sub(1).and_then(|at| Self::ALL.get(at));
        step.copied().unwrap_or(Self::Exec)
    }
}

/// Why the program did not start.
#[derive(Debug)]
pub(crate) struct SpawnError {
    pub(crate) step: Step,
    pub(crate) error: io::Error,
}

/// The maps of a user namespace, in which the user keeps its numbers.
struct UserMaps {
    uid: Vec<u8>,
    gid: Vec<u8>,
}

fn write_file(path: &CStr, content: &[u8]) -> rustix::io::Result<()> {
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, content).map(drop)
}

/// Starts `program` with the `changes`, in a user namespace too if `own_user`. `memory`: also calls by
/// which memory goes are notified. Returns the process and the listener of its notifications.
pub(crate) fn spawn(
    program: &[OsString],
    changes: Vec<Change>,
    own_user: bool,
    memory: bool,
) -> Result<(Child, seccomp::Listener), SpawnError> {
    let failed = |step| move |error: io::Error| SpawnError { step, error };
    let (parent, child) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|errno| failed(Step::Message)(errno.into()))?;
    let Some((name, arguments)) = program.split_first() else {
        return Err(failed(Step::Exec)(io::ErrorKind::InvalidInput.into()));
    };
    let maps = own_user.then(|| {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        UserMaps {
            uid: format!("{uid} {uid} 1").into_bytes(),
            gid: format!("{gid} {gid} 1").into_bytes(),
        }
    });
    let filter = seccomp::filter(memory);
    let mut command = Command::new(name);
    command.args(arguments);
    let prepare = move || {
        let mut step = Step::UserNamespace;
        let done = prepare(&mut step, maps.as_ref(), &changes, &filter, child.as_fd());
        if done.is_err() {
            // The parent reads which step it was; the error itself comes through std.
            let _ = rustix::io::write(&child, &[step.code()]);
        }
        done
    };
    // SAFETY: between fork and exec `prepare` makes system calls on values that exist, and
    // allocates, locks and drops nothing: the error of a system call is a number.
    unsafe { command.pre_exec(prepare) };
    let spawned = command.spawn();
    // Its copy of the child's end.
    drop(command);
    let (step, listener) = receive(&parent).map_err(|errno| failed(Step::Message)(errno.into()))?;
    match (spawned, listener) {
        (Ok(process), Some(listener)) => Ok((process, listener.into())),
        (Ok(_), None) => Err(failed(Step::Message)(io::ErrorKind::UnexpectedEof.into())),
        (Err(error), _) => Err(failed(step)(error)),
    }
}

fn prepare(
    step: &mut Step,
    maps: Option<&UserMaps>,
    changes: &[Change],
    filter: &[libc::sock_filter],
    socket: std::os::fd::BorrowedFd<'_>,
) -> io::Result<()> {
    // The program does not outlive this process, whose answers it would miss.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if let Some(maps) = maps {
        // SAFETY: the process has one thread, and no memory or descriptors are unshared.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }?;
        *step = Step::UserMap;
        write_file(c"/proc/self/setgroups", b"deny")?;
        write_file(c"/proc/self/uid_map", &maps.uid)?;
        write_file(c"/proc/self/gid_map", &maps.gid)?;
    }
    *step = Step::MountNamespace;
    // SAFETY: as above.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    *step = Step::Mount;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change(c"/", private)?;
    for change in changes {
        change.apply()?;
    }
    *step = Step::NoNewPrivileges;
    rustix::thread::set_no_new_privs(true)?;
    *step = Step::Filter;
    let listener = seccomp::install(filter)?;
    *step = Step::Message;
    let fds = [listener.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = [IoSlice::new(&[0])];
    rustix::net::sendmsg(socket, &bytes, &mut ancillary, SendFlags::empty())?;
    *step = Step::Exec;
    Ok(())
}

/// Receives the listener; the step that failed, if none arrives or exec failed.
fn receive(socket: &OwnedFd) -> rustix::io::Result<(Step, Option<OwnedFd>)> {
    let (mut step, mut listener) = (Step::Exec, None);
    loop {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(socket, &mut bytes, &mut ancillary, flags)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                listener = fds.last();
            }
        }
        match (got.bytes, byte) {
            (0, _) => return Ok((step, listener)),
            (_, [0]) => {}
            (_, [code]) => step = Step::from_code(code),
        }
    }
}
