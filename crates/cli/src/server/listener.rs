//! Listening, and passing new clients to the event loops.

use super::address::NbdAddress;
use super::error::{MAX_PATH, ServeError};
use super::stream::Stream;
use crate::signal::Interrupt;
use listenfd::ListenFd;
use pinfold_nvme::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_acceptconn;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// How soon a signal is noticed.
const MAX_SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long to wait where the process or the machine has no descriptor left.
const NO_DESCRIPTORS: Duration = Duration::from_millis(100);

/// A socket that clients connect to. The file of a Unix socket that this has created is removed when it is dropped.
#[derive(Debug)]
pub(crate) enum Listener {
    /// A Unix socket; the inode of its file, unless it was passed by socket activation.
    Unix { listener: UnixListener, path: PathBuf, inode: Option<u64> },
    /// A TCP socket.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens at `address`. The file of a Unix socket at which nothing listens any more is replaced.
    pub(crate) fn bind(address: &NbdAddress) -> Result<Self, ServeError> {
        let failed = |error| ServeError::Listen { address: address.clone(), error };
        match address {
            NbdAddress::Tcp(name) => {
                let listener = TcpListener::bind(name).map_err(|error| match error.kind() {
                    io::ErrorKind::AddrInUse => ServeError::InUse(address.clone()),
                    _ => failed(error),
                })?;
                listener.set_nonblocking(true).map_err(failed)?;
                Ok(Self::Tcp(listener))
            }
            NbdAddress::Unix(path) => {
                let bytes = path.as_os_str().len();
                if bytes > MAX_PATH {
                    return Err(ServeError::PathTooLong { path: path.clone(), bytes });
                }
                let listener = match UnixListener::bind(path) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                        remove_stale(path, address)?;
                        UnixListener::bind(path).map_err(failed)?
                    }
                    bound => bound.map_err(failed)?,
                };
                listener.set_nonblocking(true).map_err(failed)?;
                let inode = Some(path.symlink_metadata().map_err(failed)?.ino());
                Ok(Self::Unix { listener, path: path.clone(), inode })
            }
        }
    }

    /// Takes over the socket that was passed to this process (sd_listen_fds(3)), if one was. To be called before there are threads.
    pub(crate) fn passed() -> Result<Option<Self>, ServeError> {
        let unusable = |error: io::Error| ServeError::NotUsable(error.to_string());
        let mut passed = ListenFd::from_env();
        match passed.len() {
            0 => return Ok(None),
            1 => {}
            count => return Err(ServeError::NotUsable(format!("{count} descriptors"))),
        }
        let listener = match passed.take_unix_listener(0) {
            Ok(listener) => listener.map(|listener| {
                let address = listener.local_addr();
                let path = address.as_ref().ok().and_then(|address| address.as_pathname());
                let path = path.map(Path::to_owned).unwrap_or_default();
                Self::Unix { listener, path, inode: None }
            }),
            Err(_) => passed.take_tcp_listener(0).map_err(unusable)?.map(Self::Tcp),
        };
        match &listener {
            Some(Self::Unix { listener, .. }) => listener.set_nonblocking(true),
            Some(Self::Tcp(listener)) => listener.set_nonblocking(true),
            None => Ok(()),
        }
        .map_err(unusable)?;
        // A socket that does not listen fails at the first client only, and then for ever.
        let listens = listener.as_ref().map_or(Ok(true), socket_acceptconn);
        match listens {
            Ok(true) => Ok(listener),
            Ok(false) => Err(ServeError::NotUsable("a socket that does not listen".into())),
            Err(errno) => Err(unusable(errno.into())),
        }
    }

    /// Returns the address as NBD clients write it ("nbds" with TLS).
    pub(crate) fn uri(&self, name: &str, tls: bool) -> String {
        let scheme = if tls { "nbds" } else { "nbd" };
        match self {
            Self::Unix { path, .. } => format!("{scheme}+unix:///{name}?socket={}", path.display()),
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => format!("{scheme}://{address}/{name}"),
                Err(error) => format!("nbd: {error}"),
            },
        }
    }

    /// Returns the address in QEMU's older form.
    pub(crate) fn legacy_uri(&self) -> String {
        match self {
            Self::Unix { path, .. } => format!("nbd:unix:{}", path.display()),
            Self::Tcp(listener) => {
                listener.local_addr().map(|address| format!("nbd:{address}")).unwrap_or_default()
            }
        }
    }

    /// Returns the path of a Unix socket.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Unix { path, .. } => Some(path),
            Self::Tcp(_) => None,
        }
    }

    /// Returns the port of a TCP socket.
    pub(crate) fn port(&self) -> Option<u16> {
        match self {
            Self::Unix { .. } => None,
            Self::Tcp(listener) => listener.local_addr().ok().map(|address| address.port()),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix { listener, .. } => listener.accept().and_then(|(stream, _)| Stream::unix(stream)),
            Self::Tcp(listener) => listener.accept().and_then(|(stream, _)| Stream::tcp(stream)),
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
            let error = io::Error::new(io::ErrorKind::AlreadyExists, "a file is there, and no socket");
            Err(ServeError::Listen { address: address.clone(), error })
        }
        Err(error) => Err(ServeError::Listen { address: address.clone(), error }),
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix { listener, .. } => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
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

/// Where an event loop receives its clients.
#[derive(Debug)]
pub(crate) struct Outbox {
    /// Its clients.
    pub(crate) streams: Sender<Stream>,
    /// Wakes it.
    pub(crate) wake: Arc<EventFd>,
}

/// Accepts clients until the interrupt is raised, and passes them to the event loops in turn. At most `most` are connected at
/// any time; others are refused by closing their connection. Returns how many were refused.
pub(crate) fn accept_all(
    listener: &Listener,
    outboxes: &[Outbox],
    connected: &AtomicUsize,
    most: usize,
    interrupt: &Interrupt,
) -> u64 {
    let mut refused = 0;
    let mut turns = outboxes.iter().cycle();
    while !interrupt.is_raised() {
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&MAX_SLEEP)), Ok(1..)) {
            continue;
        }
        match listener.accept() {
            Ok(_) if connected.load(Ordering::Relaxed) >= most => refused += 1,
            Ok(stream) => {
                let Some(outbox) = turns.next() else { return refused };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_dead_server_is_replaced_and_a_live_one_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = NbdAddress::Unix(path.clone());
        let first = Listener::bind(&address).unwrap();
        assert!(first.uri("x", false).starts_with("nbd+unix:///x?socket=/"));
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

    #[test]
    fn a_port_in_use_is_reported() {
        let first = Listener::bind(&NbdAddress::Tcp("127.0.0.1:0".into())).unwrap();
        let uri = first.uri("", true);
        let address = uri.trim_start_matches("nbds://").trim_end_matches('/');
        let again = Listener::bind(&NbdAddress::Tcp(address.into()));
        assert!(matches!(again, Err(ServeError::InUse(_))), "{again:?}");
    }
}
