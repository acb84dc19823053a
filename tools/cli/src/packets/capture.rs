//! Packets to a file, by a thread of its own: reception never waits for it.

use crate::signal::Interrupt;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, PcapError};
use pinfold::probe::threads;
use pinfold_xdp::{LinkType, Packet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most packets that wait for the file. Further ones are counted and not written.
const WAITING: usize = 1024;
/// The longest time from the last packet until the file has it.
const IDLE: Duration = Duration::from_millis(100);
/// The number of bytes written at a time.
const BUFFER: usize = 1 << 20;
/// The time between two attempts on a FIFO without a reader, or with one that does not read.
const RETRY: Duration = Duration::from_millis(50);
/// The time for which the reader of a FIFO may read nothing after the end of reception.
const STALLED: Duration = Duration::from_secs(2);

/// Why packets could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{} {}", path.display(), what(error))]
pub(crate) struct CaptureError {
    path: PathBuf,
    error: io::Error,
}

fn what(error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::AlreadyExists => return "exists; --force replaces it".to_owned(),
        io::ErrorKind::NotFound => "; check the path: its folder does not exist",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; the file ends with the last packet that fit: free some space there"
        }
        io::ErrorKind::FileTooLarge => {
            "; the file ends with the last packet that fit: larger than a file may be (`ulimit -f`, or the file system's \
             limit)"
        }
        io::ErrorKind::ReadOnlyFilesystem => "; name a file on another file system",
        io::ErrorKind::PermissionDenied => "; name a file in a folder that you may write",
        _ => "",
    };
    format!("could not be written: {error}{advice}")
}

/// A packet and when it was received, since 1970.
pub(crate) type Stamped = (Packet, Duration);

/// The thread that writes the file.
#[derive(Debug)]
pub(crate) struct Capture {
    path: PathBuf,
    sender: SyncSender<Stamped>,
    /// Reception has ended.
    ended: Arc<AtomicBool>,
    thread: JoinHandle<Written>,
}

/// The number of packets in the file, and why there are no more.
type Written = (u64, io::Result<()>);

impl Capture {
    /// Creates the file, and starts the thread. A FIFO is not created, and its reader is waited
    /// for: `None` if the end was requested before it came.
    pub(crate) fn start(
        path: &Path,
        replace: bool,
        link: LinkType,
        interrupt: &Interrupt,
    ) -> Result<Option<Self>, CaptureError> {
        let failed = |error| CaptureError { path: path.to_owned(), error };
        let ended = Arc::new(AtomicBool::new(false));
        let Some(file) = open(path, replace, interrupt)? else { return Ok(None) };
        let output = Output::new(file, Arc::clone(&ended)).map_err(failed)?;
        let datalink = if link == LinkType::RawIp { DataLink::RAW } else { DataLink::ETHERNET };
        let header = PcapHeader { datalink, ..PcapHeader::default() };
        let writer = PcapWriter::with_header(output.clone(), header)
            .map_err(|error| failed(of_pcap(error)))?;
        // A program that reads the file meanwhile finds a file of this kind.
        output.lock().flush().map_err(failed)?;
        let (sender, packets) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("capture".into());
        let folder = path.to_owned();
        let thread = thread
            .spawn(move || write(writer, &output, &folder, &packets))
            .map_err(|error| failed(io::Error::new(error.kind(), threads::refusal(&error))))?;
        Ok(Some(Self { path: path.to_owned(), sender, ended, thread }))
    }

    /// Returns the end that receives packets.
    pub(crate) fn sender(&self) -> SyncSender<Stamped> {
        self.sender.clone()
    }

    /// Waits until all packets are written and durable; returns how many are, whatever happened.
    /// Every other sender has been dropped.
    pub(crate) fn finish(self) -> (u64, Result<(), CaptureError>) {
        let Self { path, sender, ended, thread } = self;
        ended.store(true, Ordering::Relaxed);
        drop(sender);
        let panicked = |_| (0, Err(io::Error::other("its thread panicked")));
        let (packets, written) = thread.join().unwrap_or_else(panicked);
        (packets, written.map_err(|error| CaptureError { path, error }))
    }
}

/// Opens the file, or a FIFO once it has a reader; `None` if the end was requested before.
fn open(path: &Path, replace: bool, interrupt: &Interrupt) -> Result<Option<File>, CaptureError> {
    let is_fifo = std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo());
    let mut options = OpenOptions::new();
    // Without waiting for a FIFO's reader, now and when it does not read.
    options.write(true).custom_flags(i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default());
    if !is_fifo {
        // Other users may not read the packets.
        options.create(true).create_new(!replace).truncate(replace).mode(0o600);
    }
    let mut told = false;
    loop {
        match options.open(path) {
            Err(error)
                if is_fifo
                    && error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {}
            Err(error) => return Err(CaptureError { path: path.to_owned(), error }),
            Ok(file) => return Ok(Some(file)),
        }
        if interrupt.is_raised() {
            return Ok(None);
        }
        if !told {
            told = true;
            tracing::warn!(
                "{} is a FIFO that nothing reads: waiting for its reader",
                path.display()
            );
        }
        std::thread::sleep(RETRY);
    }
}

/// The file, which the library writes to and this program flushes.
#[derive(Clone, Debug)]
struct Output(Arc<Mutex<Buffer>>);

impl Output {
    fn new(file: File, ended: Arc<AtomicBool>) -> io::Result<Self> {
        let is_regular = file.metadata()?.is_file();
        let buffer = Vec::with_capacity(BUFFER);
        let state =
            Buffer { file, is_regular, ended, buffer, ends: Vec::new(), written: 0, packets: 0 };
        Ok(Self(Arc::new(Mutex::new(state))))
    }

    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().buffer.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock().flush()
    }
}

/// The bytes that are not in the file yet, and where its packets end: a file that cannot take all
/// of it ends with a whole packet.
#[derive(Debug)]
struct Buffer {
    file: File,
    is_regular: bool,
    /// Reception has ended.
    ended: Arc<AtomicBool>,
    buffer: Vec<u8>,
    ends: Vec<usize>,
    /// Bytes and packets in the file.
    written: u64,
    packets: u64,
}

impl Buffer {
    /// Records that a packet is complete.
    fn complete(&mut self) -> io::Result<()> {
        self.ends.push(self.buffer.len());
        if self.buffer.len() < BUFFER { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        let (bytes, result) = self.write_out();
        let whole = if result.is_ok() {
            bytes
        } else {
            self.ends.iter().copied().take_while(|end| *end <= bytes).last().unwrap_or(0)
        };
        self.packets += self.ends.iter().filter(|end| **end <= whole).count() as u64;
        self.written += whole as u64;
        self.buffer.clear();
        self.ends.clear();
        if result.is_err() && self.is_regular {
            // The part of a packet that did fit. If it stays, readers say that the file was cut
            // short.
            let _ = self.file.set_len(self.written);
        }
        result
    }

    /// Returns how many bytes of the buffer were written.
    fn write_out(&mut self) -> (usize, io::Result<()>) {
        let (mut done, mut progress) = (0, Instant::now());
        while let Some(rest) = self.buffer.get(done..).filter(|rest| !rest.is_empty()) {
            match self.file.write(rest) {
                Ok(0) => return (done, Err(io::ErrorKind::WriteZero.into())),
                Ok(more) => (done, progress) = (done + more, Instant::now()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.ended.load(Ordering::Relaxed) {
                        progress = Instant::now();
                    } else if progress.elapsed() > STALLED {
                        return (
                            done,
                            Err(io::Error::new(
                                io::ErrorKind::TimedOut,
                                "its reader does not read",
                            )),
                        );
                    }
                    if let Err(errno) = wait_writable(&self.file) {
                        return (done, Err(errno));
                    }
                }
                Err(error) => return (done, Err(error)),
            }
        }
        (done, Ok(()))
    }
}

fn wait_writable(file: &File) -> io::Result<()> {
    let limit = Timespec { tv_sec: 0, tv_nsec: i64::from(RETRY.subsec_nanos()) };
    let mut polled = [PollFd::from_borrowed_fd(file.as_fd(), PollFlags::OUT)];
    match poll(&mut polled, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Writes until the last sender is dropped, and makes it durable.
fn write(
    mut writer: PcapWriter<Output>,
    output: &Output,
    path: &Path,
    packets: &Receiver<Stamped>,
) -> Written {
    let written = write_all(&mut writer, output, packets);
    let mut buffer = output.lock();
    let written = written.and_then(|()| buffer.flush());
    // Also what precedes an error.
    let synced = if buffer.is_regular {
        buffer.file.sync_all().and_then(|()| sync_folder(path))
    } else {
        Ok(())
    };
    (buffer.packets, written.and(synced))
}

fn write_all(
    writer: &mut PcapWriter<Output>,
    output: &Output,
    packets: &Receiver<Stamped>,
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4096);
    loop {
        let (packet, received) = match packets.recv_timeout(IDLE) {
            Ok(packet) => packet,
            Err(RecvTimeoutError::Timeout) => {
                output.lock().flush()?;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        bytes.clear();
        packet.append_to(&mut bytes);
        // Its page returns before the file is written.
        drop(packet);
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        writer.write_packet(&PcapPacket::new(received, len, &bytes)).map_err(of_pcap)?;
        output.lock().complete()?;
    }
}

/// Makes the name of a file durable.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let synced = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
    match synced {
        // Some network and host-shared file systems cannot flush a folder.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

fn of_pcap(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}
