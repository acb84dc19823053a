//! The parent: starts the program, answers its system calls, and sees its end.

use crate::findings;
use crate::kernel::{Caller, Kernel, Node, Reply};
use crate::process::{self, Inode, Memory};
use crate::sys::seccomp::{Listener, NATIVE, Notification};
use crate::{memory_calls, namespace};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How often closed devices and masked interrupts are looked at, and how often after a time without
/// a call or a command.
const LOOK: Duration = Duration::from_millis(20);
const IDLE_LOOK: Duration = Duration::from_millis(100);
const BUSY_TIME: Duration = Duration::from_secs(1);
/// How long after its time a program is killed by another thread, where the parent does not come to it.
const GRACE: Duration = Duration::from_secs(1);
/// The longest path that is read.
const PATH_BYTES: usize = 4096;
/// How many address spaces are kept open.
const MEMORIES: usize = 256;

/// What is known of a thread: valid while its process has not executed another program.
#[derive(Debug)]
struct Known {
    start: [u64; 2],
    memory: Arc<Memory>,
}

/// How the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// It returned this code.
    Exit(u8),
    /// A signal ended it.
    Signal(u8),
    /// It ran longer than the limit, and was killed.
    TimeLimit,
    /// It was killed because check was stopped.
    Stopped,
}

/// The parent's state while the program runs.
pub(crate) struct Supervisor {
    kernel: Kernel,
    listener: Listener,
    nodes: Vec<(Inode, Node)>,
    known: HashMap<u32, Known>,
    /// The address spaces by process and the start of its stack.
    memories: HashMap<(u32, u64), Arc<Memory>>,
    children: Arc<Children>,
}

impl Supervisor {
    pub(crate) fn new(
        kernel: Kernel,
        listener: Listener,
        program: u32,
        children: Children,
    ) -> Self {
        let nodes = namespace::nodes(program, &kernel.shared.functions);
        let (known, memories) = (HashMap::new(), HashMap::new());
        Self { kernel, listener, nodes, known, memories, children: Arc::new(children) }
    }

    /// Kills what there is of the program.
    pub(crate) fn kill_children(&self) {
        self.children.kill();
    }

    /// Answers until no process of the program is left; returns how the first one ended.
    pub(crate) fn run(
        &mut self,
        program: u32,
        limit: Option<Duration>,
        stop: &AtomicBool,
    ) -> io::Result<Ending> {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let (done, children) = (AtomicBool::new(false), self.children.clone());
        std::thread::scope(|scope| {
            let late = || kill_late(&children, end, stop, &done);
            let killer = std::thread::Builder::new().name("check-limit".to_owned());
            let killer = killer.spawn_scoped(scope, late)?;
            let ending = self.run_until(program, end, stop);
            done.store(true, Ordering::Relaxed);
            killer.thread().unpark();
            ending
        })
    }

    fn run_until(
        &mut self,
        program: u32,
        end: Option<Instant>,
        stop: &AtomicBool,
    ) -> io::Result<Ending> {
        let pid = i32::try_from(program).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidData)?;
        let mut ending = None;
        let (mut active, mut looked, mut commands) = (Instant::now(), Instant::now(), 0);
        loop {
            let now = Instant::now();
            let is_killed = |ending| matches!(ending, Some(Ending::TimeLimit | Ending::Stopped));
            let is_late = end.is_some_and(|end| now >= end);
            if !is_killed(ending) && (is_late || stop.load(Ordering::Relaxed)) {
                self.report_hangs();
                ending = Some(if is_late { Ending::TimeLimit } else { Ending::Stopped });
            }
            // Until none is left: each may start others meanwhile.
            if is_killed(ending) {
                self.children.kill();
            }
            let busy = self.kernel.has_open_device() && now.duration_since(active) < BUSY_TIME;
            let (listening, ended) = self.wait(if busy { LOOK } else { IDLE_LOOK })?;
            let before = std::mem::replace(&mut commands, self.commands());
            if listening || commands != before {
                active = Instant::now();
            }
            if listening && let Some(notification) = self.listener.receive()? {
                self.answer(&notification)?;
            }
            // Also where the program calls all the time: it may wait for the effect of a close.
            if !listening || looked.elapsed() >= LOOK {
                looked = Instant::now();
                self.kernel.reap();
                for function in &self.kernel.shared.functions {
                    function.irqs.deliver_held();
                }
            }
            // Also processes that it has left to this one.
            while let Ok(Some((ended, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                if ended == pid {
                    ending = ending.or(Some(ending_of(status)));
                }
            }
            if ended {
                break;
            }
        }
        let ending = match ending {
            Some(ending) => ending,
            // The filter ends a moment before its last process can be waited for.
            None => match rustix::process::waitpid(Some(pid), WaitOptions::empty())? {
                Some((_, status)) => ending_of(status),
                None => Ending::Signal(0),
            },
        };
        self.kernel.finish();
        // A signal to the group ends the program as well, often before this process has seen it.
        let is_stopped = ending != Ending::TimeLimit && stop.load(Ordering::Relaxed);
        Ok(if is_stopped { Ending::Stopped } else { ending })
    }

    /// Reports what a program may wait for that is killed: a device that has failed, and an
    /// interrupt that is masked.
    fn report_hangs(&self) {
        for function in &self.kernel.shared.functions {
            if !function.is_open() {
                continue;
            }
            if function.watch.has_failed() {
                let text = "the device had failed or was removed, and was in use when the program was killed";
                function.watch.add(&findings::FAILURE_IGNORED, text.to_owned(), Vec::new);
            }
            if let Some(text) = function.irqs.waiting() {
                function.watch.add(&findings::NO_EVENTFD, text.to_owned(), Vec::new);
            }
        }
    }

    /// Returns how many commands the devices have executed.
    fn commands(&self) -> u64 {
        self.kernel.shared.functions.iter().map(|function| function.requests()).sum()
    }

    /// Waits for a notification, a closed descriptor, or a time; returns whether there is a
    /// notification, and whether no process is left that makes any.
    fn wait(&self, time: Duration) -> io::Result<(bool, bool)> {
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        polled.extend(
            self.kernel.ends().map(|end| PollFd::from_borrowed_fd(end, PollFlags::empty())),
        );
        let time = Timespec::try_from(time).ok();
        match rustix::event::poll(&mut polled, time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let events = polled.first().map_or(PollFlags::empty(), PollFd::revents);
        Ok((events.contains(PollFlags::IN), events.contains(PollFlags::HUP)))
    }

    fn answer(&mut self, call: &Notification) -> io::Result<()> {
        let reply = self.reply(call);
        send(&self.listener, call.id, reply)
    }

    fn reply(&mut self, call: &Notification) -> Reply {
        #[cfg(target_arch = "x86_64")]
        let is_x32 = call.number & 0x4000_0000 != 0;
        #[cfg(not(target_arch = "x86_64"))]
        let is_x32 = false;
        if call.arch != NATIVE || is_x32 {
            let text = format!("thread {} made a 32-bit (or x32) call of VFIO", call.tid);
            self.kernel.shared.findings.add(&findings::FOREIGN_CALLER, text, Vec::new);
            return Reply::Error(libc::ENOSYS);
        }
        let [first, second, third, fourth, ..] = call.args;
        // Descriptors are `int`s, and requests 32 bits: the kernel ignores the upper halves.
        let int = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap_or(0).cast_signed();
        let number = call.number;
        if memory_calls::CALLS.contains(&number) {
            self.look_at_memory(call);
            return Reply::Resume;
        }
        if number == libc::SYS_ioctl || number == libc::SYS_pread64 || number == libc::SYS_pwrite64
        {
            let Some(inode) = process::inode_of(call.tid, int(first)) else {
                if number == libc::SYS_ioctl && process::is_hidden(call.tid) {
                    self.kernel.shared.not_covered(
                        "calls of a process whose memory check may not read, as after \
                         prctl(PR_SET_DUMPABLE, 0), or of a file that cannot be read: run check as root",
                    );
                }
                return Reply::Resume;
            };
            let Ok(memory) = self.memory(call.tid) else { return Reply::Resume };
            let argument = if number == libc::SYS_ioctl { third } else { second };
            let caller = Caller::new(call.tid, call.pc, argument, memory);
            if !self.listener.is_waiting(call.id) {
                return Reply::Resume;
            }
            if number == libc::SYS_ioctl {
                let request = int(second).cast_unsigned();
                let reply = self.kernel.ioctl(inode, request, &caller);
                if matches!(reply, Reply::Resume) && self.nodes.iter().any(|(own, _)| *own == inode)
                {
                    self.kernel.shared.not_covered("a node that was opened by another call");
                }
                return reply;
            }
            let write = number == libc::SYS_pwrite64;
            return self.kernel.access(inode, [second, third, fourth], write, &caller);
        }
        #[cfg(target_arch = "x86_64")]
        if number == libc::SYS_open {
            return self.open(call, libc::AT_FDCWD, first, int(second), 0);
        }
        if number == libc::SYS_openat {
            return self.open(call, int(first), second, int(third), 0);
        }
        // openat2: flags, mode, and how the path is resolved, in a structure. The kernel refuses one
        // that is shorter, or has flags of its upper half.
        let Ok(memory) = self.memory(call.tid) else { return Reply::Resume };
        let mut how = [0u64; 3];
        let is_read =
            fourth >= size_of_val(&how) as u64 && memory.read(third, how.as_mut_bytes()).is_ok();
        let [flags, _, resolve] = how;
        match u32::try_from(flags) {
            Ok(flags) if is_read => {
                self.open(call, int(first), second, flags.cast_signed(), resolve)
            }
            _ => Reply::Resume,
        }
    }

    /// Looks at a call by which memory goes, before the kernel carries it out.
    fn look_at_memory(&mut self, call: &Notification) {
        let Ok(memory) = self.memory(call.tid) else { return };
        if let Some(going) = memory_calls::going(call)
            && self.listener.is_waiting(call.id)
        {
            self.kernel.memory_goes(&going, &Caller::new(call.tid, call.pc, 0, memory));
        }
    }

    fn open(
        &mut self,
        call: &Notification,
        folder: i32,
        path: u64,
        flags: i32,
        resolve: u64,
    ) -> Reply {
        const NEW: i32 = libc::O_CREAT | libc::O_EXCL;
        // Opened as what it is, an empty file; or refused as such.
        if flags & (libc::O_PATH | libc::O_DIRECTORY) != 0 || flags & NEW == NEW {
            return Reply::Resume;
        }
        let Ok(memory) = self.memory(call.tid) else { return Reply::Resume };
        let Ok(path) = memory.string(path, PATH_BYTES) else { return Reply::Resume };
        if !namespace::may_be_node(&path) {
            return Reply::Resume;
        }
        let found = locate(call.tid, folder, &path, flags, resolve);
        if !self.listener.is_waiting(call.id) {
            return Reply::Resume;
        }
        // The kernel opens no device by what is in /proc, as it has no file of its own.
        if found.iter().any(|found| self.kernel.is_device(*found)) {
            return Reply::Error(libc::ENXIO);
        }
        match self.nodes.iter().find(|(inode, _)| found.contains(inode)) {
            // All but the container's node belong to one user, as udev makes them.
            Some((_, node)) if *node != Node::Container && !process::may_open(call.tid) => {
                Reply::Error(libc::EACCES)
            }
            Some((_, node)) => self.kernel.open(*node, flags),
            None => Reply::Resume,
        }
    }

    /// Returns the memory of a thread's process.
    fn memory(&mut self, tid: u32) -> io::Result<Arc<Memory>> {
        let start = start_of(tid).ok_or(io::ErrorKind::NotFound)?;
        if let Some(known) = self.known.get(&tid).filter(|known| known.start == start)
            && known.memory.is_alive()
        {
            return Ok(known.memory.clone());
        }
        if self.known.len() > MEMORIES {
            self.known.clear();
            self.memories.retain(|_, memory| Arc::strong_count(memory) > 1 && memory.is_alive());
        }
        let new = Memory::of(tid)?;
        let [_, stack] = start;
        let key = (new.pid, stack);
        let memory = match self.memories.get(&key).filter(|memory| memory.is_alive()) {
            Some(memory) => memory.clone(),
            None => Arc::new(new),
        };
        self.memories.insert(key, memory.clone());
        self.known.insert(tid, Known { start, memory: memory.clone() });
        Ok(memory)
    }
}

/// Kills the program after its time where the parent waits for it, as for the answer of a file system
/// that it serves: this ends with its last process.
fn kill_late(children: &Children, end: Option<Instant>, stop: &AtomicBool, done: &AtomicBool) {
    let mut since = None;
    while !done.load(Ordering::Relaxed) {
        if end.is_some_and(|end| Instant::now() >= end) || stop.load(Ordering::Relaxed) {
            let since = *since.get_or_insert_with(Instant::now);
            if since.elapsed() >= GRACE {
                children.kill();
            }
        }
        std::thread::park_timeout(IDLE_LOOK);
    }
}

/// Sends the answer to a call. One that finds no waiter, because its caller was killed, is undone: a
/// mapping is removed, and a descriptor is closed, which ends its object.
fn send(listener: &Listener, id: u64, reply: Reply) -> io::Result<()> {
    match reply {
        Reply::Value(value, undo) => {
            let is_answered = listener.answer(id, value)?;
            if !is_answered && let Some((space, span)) = undo {
                space.remove(span, &process::Site::default());
            }
        }
        Reply::Error(errno) => {
            listener.fail(id, errno)?;
        }
        Reply::Resume => {
            listener.resume(id)?;
        }
        Reply::Descriptor(fd, cloexec) => {
            if let Err(error) = listener.inject(id, fd.as_fd(), cloexec) {
                // Its table of descriptors is full.
                listener.fail(id, error.raw_os_error().unwrap_or(libc::EMFILE))?;
            }
        }
    }
    Ok(())
}

/// Returns when a thread started, and the start of its process's stack, which is another one after
/// an exec.
fn start_of(tid: u32) -> Option<[u64; 2]> {
    let stat = std::fs::read(format!("/proc/{tid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name is in parentheses and may have any characters.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    // Fields 22 and 28; the first one here is 3.
    let start = fields.nth(19)?.parse().ok()?;
    let stack = fields.nth(5)?.parse().ok()?;
    Some([start, stack])
}

/// Returns the descriptor that a path of a thread names by its number, and of which thread it is.
fn named_descriptor(tid: u32, path: &[u8]) -> Option<(u32, i32)> {
    let parts: Vec<&str> = std::str::from_utf8(path).ok()?.split('/').collect();
    let (thread, number) = match parts[..] {
        ["", "dev", "fd", number] | ["", "proc", "self" | "thread-self", "fd", number] => {
            (tid, number)
        }
        ["", "proc", thread, "fd", number] | ["", "proc", _, "task", thread, "fd", number] => {
            (thread.parse().ok()?, number)
        }
        _ => return None,
    };
    Some((thread, number.parse().ok()?))
}

/// Returns the file that a thread's path leads to; of a relative path also the file to which it leads
/// by links to absolute paths.
fn locate(tid: u32, folder: i32, path: &[u8], flags: i32, resolve: u64) -> Vec<Inode> {
    let how = ResolveFlags::from_bits_retain(resolve);
    let follow = flags & libc::O_NOFOLLOW == 0;
    // This process would find its own there.
    let named = named_descriptor(tid, path).filter(|_| follow && how.is_empty());
    if let Some((thread, fd)) = named {
        return process::inode_of(thread, fd).into_iter().collect();
    }
    let place = |name: &str| format!("/proc/{tid}/{name}");
    let find = |from: &str, path: &[u8], how: ResolveFlags| -> Option<Inode> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let from = rustix::fs::open(place(from), flags, Mode::empty()).ok()?;
        let flags = if follow { flags } else { flags | OFlags::NOFOLLOW };
        let found = rustix::fs::openat2(from, path, flags, Mode::empty(), how).ok()?;
        let found = rustix::fs::fstat(found).ok()?;
        Some((found.st_dev, found.st_ino))
    };
    // Absolute links inside begin at the thread's root too.
    let in_root = how | ResolveFlags::IN_ROOT;
    // Then its folder is the root, or may not be left.
    let is_scoped = how.intersects(ResolveFlags::IN_ROOT | ResolveFlags::BENEATH);
    if path.starts_with(b"/") && !is_scoped {
        return find("root", path, in_root).into_iter().collect();
    }
    let folder = match folder {
        libc::AT_FDCWD => "cwd".to_owned(),
        fd => format!("fd/{fd}"),
    };
    let whole = || {
        let (at, root) = (std::fs::read_link(place(&folder)), std::fs::read_link(place("root")));
        let whole = at.ok()?.strip_prefix(root.ok()?).ok()?.join(OsStr::from_bytes(path));
        find("root", whole.as_os_str().as_bytes(), in_root)
    };
    let by_links = if is_scoped { None } else { whole() };
    find(&folder, path, how).into_iter().chain(by_links).collect()
}

fn ending_of(status: WaitStatus) -> Ending {
    let byte = |value: i32| u8::try_from(value & 0xff).unwrap_or(u8::MAX);
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Ending::Exit(byte(code)),
        (None, signal) => Ending::Signal(byte(signal.unwrap_or(0))),
    }
}

/// The lists of this process's children, which are open before the program can use up what
/// descriptors there are.
#[derive(Debug)]
pub(crate) struct Children(Vec<File>);

impl Children {
    /// Opens the list of the calling thread, whose child the program is, and that of the first one,
    /// which gets the processes whose parents have ended.
    pub(crate) fn open() -> io::Result<Self> {
        let first = std::process::id().to_string();
        let own = rustix::thread::gettid().as_raw_nonzero().to_string();
        let list = |thread: &String| File::open(format!("/proc/self/task/{thread}/children"));
        let lists = [&first].into_iter().chain((own != first).then_some(&own)).map(list);
        Ok(Self(lists.collect::<io::Result<_>>()?))
    }

    /// Kills all processes that this one has started, and theirs, as far as these can be found:
    /// they become its own when their parents have ended, so it is called until none is left.
    pub(crate) fn kill(&self) {
        let mut next = Vec::new();
        for list in &self.0 {
            let mut text = vec![0; 1 << 16];
            let len = list.read_at(&mut text, 0).unwrap_or(0);
            text.truncate(len);
            next.extend(pids(&String::from_utf8_lossy(&text)));
        }
        while let Some(pid) = next.pop() {
            let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            next.extend(pids(&list.unwrap_or_default()));
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Returns the processes of a list of children, in which a space ends each: the beginning of a number
/// that was cut off is another process's.
fn pids(list: &str) -> Vec<i32> {
    let (whole, _) = list.rsplit_once(' ').unwrap_or_default();
    whole.split(' ').filter_map(|pid| pid.parse().ok()).collect()
}

/// Returns whether this process may mount without a user namespace of its own.
pub(crate) fn may_mount() -> bool {
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return false };
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok());
    set.is_some_and(|set| set & CAP_SYS_ADMIN != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::{Entry, Space, Span};
    use crate::sys::spawn::spawn;
    use std::process::Child;

    /// Returns a program that waits for the answer to its first open.
    fn waiting() -> Option<(Child, Listener, Notification)> {
        let program = ["cat", "/dev/null"].map(Into::into);
        // Where a namespace is refused, no test of check can run.
        let (child, listener) = spawn(&program, Vec::new(), !may_mount(), false).ok()?;
        loop {
            if let Some(call) = listener.receive().unwrap() {
                return Some((child, listener, call));
            }
        }
    }

    fn mapped() -> (Arc<Space>, Span) {
        let (space, span) = (Arc::new(Space::default()), Span::new(0x1000, 4096).unwrap());
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let (vaddr, site) = (0x1000, process::Site::default());
        space.insert(Entry { span, vaddr, read: true, write: true, memory, serial: 0, site });
        (space, span)
    }

    #[test]
    fn a_number_that_was_cut_off_is_no_process() {
        assert_eq!(pids("12 345 67"), [12, 345]);
        assert_eq!(pids("12 345 "), [12, 345]);
        assert_eq!((pids("12"), pids("")), (vec![], vec![]));
    }

    #[test]
    fn a_map_whose_caller_is_gone_is_undone() {
        let Some((mut child, listener, call)) = waiting() else { return };
        let (space, span) = mapped();
        child.kill().unwrap();
        child.wait().unwrap();
        send(&listener, call.id, Reply::Value(0, Some((space.clone(), span)))).unwrap();
        assert_eq!(space.count(), 0);
        // No other answer is an error.
        let (_, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        for reply in [Reply::Error(1), Reply::Resume, Reply::Descriptor(theirs.into(), true)] {
            send(&listener, call.id, reply).unwrap();
        }
    }

    #[test]
    fn a_descriptor_whose_caller_is_gone_is_closed() {
        let Some((mut child, listener, call)) = waiting() else { return };
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        send(&listener, call.id, Reply::Descriptor(theirs.into(), true)).unwrap();
        let mut polled = [PollFd::new(&ours, PollFlags::empty())];
        // A child of another test may have a copy until it has executed its program.
        rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
        assert!(polled[0].revents().contains(PollFlags::HUP));
    }

    #[test]
    fn a_map_whose_caller_waits_stays() {
        let Some((mut child, listener, call)) = waiting() else { return };
        let (space, span) = mapped();
        send(&listener, call.id, Reply::Value(-1, Some((space.clone(), span)))).unwrap();
        assert_eq!(space.count(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
