//! Packets to a file, by a thread of its own: reception never waits for it.

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, PcapError};
use pinfold_xdp::Packet;
use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How many packets wait for the file at most. Beyond that they are counted and not written.
const WAITING: usize = 1024;

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
        let file = BufWriter::with_capacity(1 << 20, options.open(path).map_err(failed)?);
        let header = PcapHeader { datalink: DataLink::ETHERNET, ..PcapHeader::default() };
        let writer = PcapWriter::with_header(file, header).map_err(|error| failed(of_pcap(error)))?;
        let (sender, packets) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("capture".into());
        let thread = thread.spawn(move || write(writer, &packets)).map_err(failed)?;
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

/// Writes until the last sender is dropped.
fn write(mut writer: PcapWriter<BufWriter<std::fs::File>>, packets: &Receiver<Stamped>) -> io::Result<u64> {
    let (mut count, mut bytes) = (0, Vec::with_capacity(4096));
    for (packet, received) in packets {
        bytes.clear();
        packet.append_to(&mut bytes);
        // Its page returns before the file is written.
        drop(packet);
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        writer.write_packet(&PcapPacket::new(received, len, &bytes)).map_err(of_pcap)?;
        count += 1;
    }
    writer.into_writer().flush()?;
    Ok(count)
}

fn of_pcap(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}
