//! Listening, and passing new clients to the event loops.

use super::address::{NbdAddress, encode};
use super::error::{MAX_PATH, ServeError};
use super::stream::Stream;
use super::watch::Watch;
use crate::signal::Interrupt;
use listenfd::ListenFd;
use pinfold_nvme::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::sockopt::socket_acceptconn;
use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// The longest delay until a signal is noticed.
const MAX_SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// The time to wait if the process or the machine has no descriptor left.
const NO_DESCRIPTORS: Duration = Duration::from_millis(100);
/// The number of ports tried where any port will do for all addresses of a name.
const ATTEMPTS: usize = 16;
/// The time to wait for the lock of a folder, which servers hold for a moment, and the interval of
/// attempts.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// A socket that clients connect to. The file of a Unix socket that this has created is removed
/// when it is dropped.
#[derive(Debug)]
pub(crate) enum Listener {
    /// A Unix socket; the inode of its file, unless it was passed by socket activation.
    Unix { listener: UnixListener, path: PathBuf, inode: Option<u64> },
    /// TCP sockets at all addresses of a name, on the same port.
    Tcp(Vec<TcpListener>),
}

impl Listener {
    /// Listens at `address`. The file of a Unix socket at which nothing listens any more is
    /// replaced.
    pub(crate) fn bind(address: &NbdAddress) -> Result<Self, ServeError> {
        let failed = |error| ServeError::Listen { address: address.clone(), error };
        match address {
            NbdAddress::Tcp(name) => {
                let addresses = resolve(name).map_err(failed)?;
                let any_port = addresses.iter().all(|address| address.port() == 0);
                let mut attempts = 0;
                let listeners = loop {
                    match bind_all(&addresses) {
                        // The port that is free at the first address is not at another one.
                        Err(ServeError::InUse(_)) if any_port && attempts < ATTEMPTS => {
                            attempts += 1
                        }
                        bound => break bound?,
                    }
                };
                let nonblocking =
                    listeners.iter().try_for_each(|listener| listener.set_nonblocking(true));
                nonblocking.map_err(failed)?;
                Ok(Self::Tcp(listeners))
            }
            NbdAddress::Unix(path) => {
                let bytes = path.as_os_str().len();
                if bytes > MAX_PATH {
                    return Err(ServeError::PathTooLong { path: path.clone(), bytes });
                }
                // Until it listens: to another server, a socket that does not yet looks like that
                // of a dead one.
                let _lock = lock_folder(path);
                let in_use = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
                let listener = match UnixListener::bind(path) {
                    Err(error) if in_use(&error) => {
                        remove_stale(path, address)?;
                        UnixListener::bind(path).map_err(|error| match in_use(&error) {
                            true => ServeError::InUse(address.clone()),
                            false => failed(error),
                        })?
                    }
                    bound => bound.map_err(failed)?,
                };
                listener.set_nonblocking(true).map_err(failed)?;
                let inode = Some(path.symlink_metadata().map_err(failed)?.ino());
                // Clients are in other folders; one that is too long for them works at least in
                // this.
                let absolute = std::path::absolute(path).ok();
                let absolute = absolute.filter(|path| path.as_os_str().len() <= MAX_PATH);
                Ok(Self::Unix { listener, path: absolute.unwrap_or_else(|| path.clone()), inode })
            }
        }
    }

    /// Takes over the socket that was passed to this process (sd_listen_fds(3)), if one was. To be
    /// called before there are threads.
    pub(crate) fn passed() -> Result<Option<Self>, ServeError> {
        let unusable = |error: io::Error| ServeError::NotUsable(error.to_string());
        let variable = |name| std::env::var(name).ok();
        if !is_passed(variable("LISTEN_PID"), variable("LISTEN_FDS"))? {
            return Ok(None);
        }
        let mut passed = ListenFd::from_env();
        let listener = match passed.take_unix_listener(0) {
            Ok(listener) => listener.map(|listener| {
                let address = listener.local_addr();
                let path = address.as_ref().ok().and_then(|address| address.as_pathname());
                let path = path.map(Path::to_owned).unwrap_or_default();
                Self::Unix { listener, path, inode: None }
            }),
            Err(_) => passed
                .take_tcp_listener(0)
                .map_err(unusable)?
                .map(|listener| Self::Tcp(vec![listener])),
        };
        match &listener {
            Some(Self::Unix { listener, .. }) => listener.set_nonblocking(true),
            Some(Self::Tcp(listeners)) => {
                listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))
            }
            None => Ok(()),
        }
        .map_err(unusable)?;
        // A socket that does not listen fails at the first client only, and then for ever.
        let mut sockets = listener.iter().flat_map(Self::sockets);
        let listens = sockets.try_fold(true, |all, socket| Ok(all && socket_acceptconn(socket)?));
        match listens {
            Ok(true) => Ok(listener),
            Ok(false) => Err(ServeError::NotUsable("a socket that does not listen".into())),
            Err(errno) => {
                let errno: rustix::io::Errno = errno;
                Err(unusable(errno.into()))
            }
        }
    }

    /// Returns its addresses as NBD clients write them ("nbds" with TLS).
    pub(crate) fn uris(&self, name: &str, tls: bool) -> Vec<String> {
        let (scheme, name) = (if tls { "nbds" } else { "nbd" }, encode(name.as_bytes()));
        match self {
            Self::Unix { path, .. } => {
                let path = encode(path.as_os_str().as_bytes());
                vec![format!("{scheme}+unix:///{name}?socket={path}")]
            }
            // A scope is behind a percent sign (RFC 6874).
            Self::Tcp(_) => self
                .addresses()
                .map(|address| {
                    format!("{scheme}://{}/{name}", address.to_string().replace('%', "%25"))
                })
                .collect(),
        }
    }

    /// Returns the address in QEMU's older form.
    pub(crate) fn legacy_uri(&self) -> OsString {
        let mut uri = OsString::from("nbd:");
        match self {
            Self::Unix { path, .. } => {
                uri.push("unix:");
                uri.push(path);
            }
            Self::Tcp(_) => uri
                .extend(self.addresses().next().map(|address| OsString::from(address.to_string()))),
        }
        uri
    }

    /// Returns the addresses of TCP sockets.
    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let listeners = if let Self::Tcp(listeners) = self { &listeners[..] } else { &[] };
        listeners.iter().filter_map(|listener| listener.local_addr().ok())
    }

    /// Returns the path of a Unix socket.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Unix { path, .. } => Some(path),
            Self::Tcp(_) => None,
        }
    }

    /// Returns the port of TCP sockets.
    pub(crate) fn port(&self) -> Option<u16> {
        self.addresses().next().map(|address| address.port())
    }

    /// Returns its sockets.
    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Unix { listener, .. } => vec![listener.as_fd()],
            Self::Tcp(listeners) => listeners.iter().map(AsFd::as_fd).collect(),
        }
    }

    /// Accepts a client of the socket with this index.
    fn accept(&self, index: usize) -> io::Result<Stream> {
        match self {
            Self::Unix { listener, .. } => {
                listener.accept().and_then(|(stream, _)| Stream::unix(stream))
            }
            Self::Tcp(listeners) => match listeners.get(index) {
                Some(listener) => listener.accept().and_then(|(stream, _)| Stream::tcp(stream)),
                None => Err(io::ErrorKind::WouldBlock.into()),
            },
        }
    }
}

/// Returns the addresses of `name`, HOST:PORT, each once. The host may be in brackets, and have a
/// scope (`[fe80::1%eth0]`).
fn resolve(name: &str) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = name.rsplit_once(':').unwrap_or((name, "0"));
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let mut addresses = Vec::new();
    for address in (host, port.parse().map_err(io::Error::other)?).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    Ok(addresses)
}

/// Listens at all of `addresses`, at the port that the first gets if theirs is 0. One that this
/// machine does not have is left out and reported, unless that is all of them: many have "::1
/// localhost" in their hosts file, and no IPv6.
fn bind_all(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, ServeError> {
    let (mut listeners, mut missing) = (Vec::new(), Vec::new());
    let mut port = None;
    for &(mut address) in addresses {
        address.set_port(port.unwrap_or(address.port()));
        let named = || NbdAddress::Tcp(address.to_string());
        let failed = |error| ServeError::Listen { address: named(), error };
        match TcpListener::bind(address) {
            Ok(listener) => {
                port = Some(listener.local_addr().map_err(failed)?.port());
                listeners.push(listener);
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err(ServeError::InUse(named()));
            }
            Err(error) if is_missing(&error) => missing.push((named(), error)),
            Err(error) => return Err(failed(error)),
        }
    }
    for (address, error) in missing {
        if listeners.is_empty() {
            return Err(ServeError::Listen { address, error });
        }
        tracing::warn!("no client can connect to {address}: {error}");
    }
    Ok(listeners)
}

/// Returns whether the machine has no such address, or none of its kind.
fn is_missing(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT))
}

/// Locks the folder of a socket, so that of several servers that find the file of a dead one only
/// one replaces it; the second would remove the first's. Where the folder cannot be locked, or is
/// locked for long by another program, there is no lock.
fn lock_folder(path: &Path) -> Option<OwnedFd> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    let until = Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(LOCK_RETRY)
            }
            Err(errno) => {
                tracing::debug!("the folder of {} is not locked: {errno}", path.display());
                return None;
            }
        }
    }
}

/// Removes the file of a socket, unless it is something else or a server answers there.
fn remove_stale(path: &Path, address: &NbdAddress) -> Result<(), ServeError> {
    // A connection to a file that is no socket is refused, too.
    let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    match UnixStream::connect(path) {
        Err(error) if is_socket && error.kind() == io::ErrorKind::ConnectionRefused => {
            let removed = std::fs::remove_file(path);
            removed.map_err(|error| ServeError::Listen { address: address.clone(), error })
        }
        Ok(_) => Err(ServeError::InUse(address.clone())),
        Err(_) if !is_socket => {
            let error =
                io::Error::new(io::ErrorKind::AlreadyExists, "a file is there, and no socket");
            Err(ServeError::Listen { address: address.clone(), error })
        }
        Err(error) => Err(ServeError::Listen { address: address.clone(), error }),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another server may have replaced it meanwhile.
        if let Self::Unix { path, inode: Some(inode), .. } = self
            && path.symlink_metadata().is_ok_and(|metadata| metadata.ino() == *inode)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The channel through which an event loop receives its clients.
#[derive(Debug)]
pub(crate) struct Outbox {
    /// Its clients.
    pub(crate) streams: Sender<Stream>,
    /// Wakes it.
    pub(crate) wake: Arc<EventFd>,
}

/// Accepts clients until the interrupt is raised, and passes them to the event loops in turn. At
/// most `most` are connected at any time; others are refused by closing their connection. With each,
/// the served file is looked at. Returns how many were refused.
pub(crate) fn accept_all(
    listener: &Listener,
    outboxes: &[Outbox],
    (connected, most): (&AtomicUsize, usize),
    watch: Option<&Watch>,
    interrupt: &Interrupt,
) -> u64 {
    let mut refused = 0;
    let mut next_outbox = outboxes.iter().cycle();
    let sockets = listener.sockets();
    let mut fds: Vec<_> =
        sockets.iter().map(|socket| PollFd::from_borrowed_fd(*socket, PollFlags::IN)).collect();
    // The socket that is looked at next: one with many clients keeps no other waiting.
    let mut next = 0;
    while !interrupt.is_raised() {
        if !matches!(poll(&mut fds, Some(&MAX_SLEEP)), Ok(1..)) {
            continue;
        }
        next = (0..fds.len())
            .map(|step| (next + 1 + step) % fds.len())
            .find(|index| fds.get(*index).is_some_and(|fd| !fd.revents().is_empty()))
            .unwrap_or(0);
        match listener.accept(next) {
            Ok(_) if connected.load(Ordering::Relaxed) >= most => refused += 1,
            Ok(stream) => {
                let Some(outbox) = next_outbox.next() else { return refused };
                if let Some(watch) = watch {
                    watch.warn();
                }
                connected.fetch_add(1, Ordering::Relaxed);
                if outbox.streams.send(stream).is_err() {
                    // Its loop has ended with an error, which ends the server.
                    connected.fetch_sub(1, Ordering::Relaxed);
                }
                outbox.wake.signal();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!("a client cannot be accepted: {error}");
                std::thread::sleep(NO_DESCRIPTORS);
            }
        }
    }
    refused
}

/// Returns whether one descriptor was passed to this process. `ListenFd` accepts any number of
/// them, for which it takes memory, and those that were meant for no process.
fn is_passed(pid: Option<String>, count: Option<String>) -> Result<bool, ServeError> {
    let is_meant = pid.is_some_and(|pid| pid.parse() == Ok(std::process::id()));
    let Some(count) = count.filter(|_| is_meant) else { return Ok(false) };
    match count.parse::<u64>() {
        Ok(0) => Ok(false),
        Ok(1) => Ok(true),
        Ok(count) => Err(ServeError::NotUsable(format!("{count} descriptors"))),
        Err(error) => Err(ServeError::NotUsable(format!("LISTEN_FDS={count:?} ({error})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_file_of_a_dead_server_is_replaced_and_a_live_one_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = NbdAddress::Unix(path.clone());
        let first = Listener::bind(&address).unwrap();
        assert!(first.uris("x", false)[0].starts_with("nbd+unix:///x?socket=/"));
        assert!(matches!(Listener::bind(&address), Err(ServeError::InUse(_))));
        drop(first);
        assert!(!path.exists(), "removed at the end");
        drop(UnixListener::bind(&path).unwrap()); // leaves its file, as a killed server does
        assert!(path.exists());
        let second = Listener::bind(&address).unwrap();
        drop(second);
        std::fs::write(&path, "a file").unwrap();
        let error = Listener::bind(&address).unwrap_err();
        assert!(error.to_string().contains("no socket"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    }

    #[test]
    fn a_path_too_long_for_a_socket_says_by_how_much() {
        let dir = tempfile::tempdir().unwrap();
        let path = |bytes: usize| {
            let name = "x".repeat(bytes - dir.path().as_os_str().len() - 1);
            NbdAddress::Unix(dir.path().join(name))
        };
        drop(Listener::bind(&path(MAX_PATH)).unwrap());
        let error = Listener::bind(&path(130)).unwrap_err().to_string();
        assert!(error.contains("130 bytes, 23 more than the 107"), "{error}");
    }

    /// Both find the file of a dead server: without a lock one of them removes the file of the
    /// other, which no client reaches then.
    #[test]
    fn of_two_servers_at_once_one_replaces_a_dead_ones_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = NbdAddress::Unix(path.clone());
        for _ in 0..500 {
            drop(UnixListener::bind(&path).unwrap());
            let start = std::sync::Barrier::new(2);
            let bind = || {
                start.wait();
                Listener::bind(&address)
            };
            let (one, other) = std::thread::scope(|scope| {
                let other = scope.spawn(bind);
                (bind(), other.join().unwrap())
            });
            let (served, refused) = if one.is_ok() { (one, other) } else { (other, one) };
            let served = served.unwrap();
            assert!(matches!(refused, Err(ServeError::InUse(_))), "{refused:?}");
            let _client = UnixStream::connect(&path).unwrap();
            served.accept(0).unwrap();
            drop(served);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_folder_that_another_program_has_locked_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let address = NbdAddress::Unix(dir.path().join("socket"));
        let locked = lock_folder(&dir.path().join("socket")).unwrap();
        drop(Listener::bind(&address).unwrap());
        drop(locked);
        assert!(lock_folder(&dir.path().join("no/socket")).is_none());
    }

    #[test]
    fn all_addresses_of_a_name_are_served_on_one_port() {
        let parse = |text: &str| text.parse::<SocketAddr>().unwrap();
        let both = [parse("127.0.0.1:0"), parse("[::1]:0")];
        if matches!(TcpListener::bind(both[1]), Err(error) if is_missing(&error)) {
            return writeln!(io::stderr(), "SKIPPED: this machine has no IPv6").unwrap();
        }
        let listeners = bind_all(&both).unwrap();
        let ports: Vec<_> =
            listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        assert!(ports.len() == 2 && ports[0] == ports[1] && ports[0] != 0, "{ports:?}");
        let listener = Listener::Tcp(listeners);
        let uris = listener.uris("é", false);
        assert_eq!(uris[1], format!("nbd://[::1]:{}/%C3%A9", ports[1]));
        drop(listener);
        // The second is in use.
        let taken = TcpListener::bind(both[1]).unwrap().local_addr().unwrap();
        let _taken = TcpListener::bind(taken).unwrap();
        let fixed = [SocketAddr::new(both[0].ip(), taken.port()), taken];
        let error = bind_all(&fixed).unwrap_err();
        assert!(
            matches!(&error, ServeError::InUse(NbdAddress::Tcp(name)) if *name == taken.to_string()),
            "{error}"
        );
        // One that no machine has (RFC 5737).
        let foreign = parse("192.0.2.1:0");
        assert_eq!(bind_all(&[foreign, both[0]]).unwrap().len(), 1);
        let error = bind_all(&[foreign]).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1:0"), "{error}");
    }

    #[test]
    fn an_address_may_have_the_name_of_its_interface() {
        let addresses = resolve("[fe80::1%lo]:10809").unwrap();
        let [SocketAddr::V6(address)] = addresses[..] else { panic!("{addresses:?}") };
        assert_eq!((address.scope_id(), address.port()), (1, 10_809));
        assert_eq!(resolve("[::1]:0").unwrap().len(), 1);
        assert!(resolve("[fe80::1%none]:10809").is_err());
    }

    #[test]
    fn a_port_in_use_is_reported() {
        let first = Listener::bind(&NbdAddress::Tcp("127.0.0.1:0".into())).unwrap();
        let uris = first.uris("", true);
        let [uri] = &uris[..] else { panic!("{uris:?}") };
        let address = uri.trim_start_matches("nbds://").trim_end_matches('/');
        let again = Listener::bind(&NbdAddress::Tcp(address.into()));
        assert!(matches!(again, Err(ServeError::InUse(_))), "{again:?}");
    }
}
