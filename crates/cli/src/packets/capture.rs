//! Packets to a file, by a thread of its own: reception never waits for it.

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, PcapError};
use pinfold_xdp::Packet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How many packets wait for the file at most. Beyond that they are counted and not written.
const WAITING: usize = 1024;
/// How long after the last packet the file has it.
const IDLE: Duration = Duration::from_millis(100);

/// Why packets could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{} could not be written: {error}{}", path.display(), advice(error))]
pub(crate) struct CaptureError {
    path: PathBuf,
    error: io::Error,
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AlreadyExists => "; --force replaces it",
        io::ErrorKind::StorageFull => "; the file ends with the last packet that fit",
        _ => "",
    }
}

/// A packet and when it was received, since 1970.
pub(crate) type Stamped = (Packet, Duration);

/// The thread that writes the file.
#[derive(Debug)]
pub(crate) struct Capture {
    path: PathBuf,
    sender: SyncSender<Stamped>,
    thread: JoinHandle<io::Result<u64>>,
}

impl Capture {
    /// Creates the file, and starts the thread.
    pub(crate) fn start(path: &Path, replace: bool) -> Result<Self, CaptureError> {
        let failed = |error| CaptureError { path: path.to_owned(), error };
        let mut options = OpenOptions::new();
        // Packets of others are nobody else's to read.
        options.write(true).create(true).create_new(!replace).truncate(replace).mode(0o600);
        let file = Output::new(options.open(path).map_err(failed)?);
        let header = PcapHeader { datalink: DataLink::ETHERNET, ..PcapHeader::default() };
        let writer = PcapWriter::with_header(file.clone(), header).map_err(|error| failed(of_pcap(error)))?;
        // What reads the file meanwhile finds a file of this kind.
        file.clone().flush().map_err(failed)?;
        let (sender, packets) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("capture".into());
        let thread = thread.spawn(move || write(writer, file, &packets)).map_err(failed)?;
        Ok(Self { path: path.to_owned(), sender, thread })
    }

    /// Returns the end that receives packets.
    pub(crate) fn sender(&self) -> SyncSender<Stamped> {
        self.sender.clone()
    }

    /// Waits until all packets are written; returns how many. Every other sender has been dropped.
    pub(crate) fn finish(self) -> Result<u64, CaptureError> {
        let Self { path, sender, thread } = self;
        drop(sender);
        let written = thread.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")));
        written.map_err(|error| CaptureError { path, error })
    }
}

/// The file, which the library writes to and this program flushes.
#[derive(Clone, Debug)]
struct Output(Arc<Mutex<BufWriter<File>>>);

impl Output {
    fn new(file: File) -> Self {
        Self(Arc::new(Mutex::new(BufWriter::with_capacity(1 << 20, file))))
    }

    fn lock(&self) -> MutexGuard<'_, BufWriter<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock().flush()
    }
}

/// Writes until the last sender is dropped.
fn write(mut writer: PcapWriter<Output>, mut file: Output, packets: &Receiver<Stamped>) -> io::Result<u64> {
    let (mut count, mut bytes) = (0, Vec::with_capacity(4096));
    let mut unflushed = 0;
    loop {
        let (packet, received) = match packets.recv_timeout(IDLE) {
            Ok(packet) => packet,
            Err(RecvTimeoutError::Timeout) => {
                if std::mem::take(&mut unflushed) > 0 {
                    file.flush()?;
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        bytes.clear();
        packet.append_to(&mut bytes);
        // Its page returns before the file is written.
        drop(packet);
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        writer.write_packet(&PcapPacket::new(received, len, &bytes)).map_err(of_pcap)?;
        count += 1;
        unflushed += 1;
    }
    file.flush()?;
    Ok(count)
}

fn of_pcap(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}
