//! A virtio disk behind a PCI function (virtio 1.2 sections 4.1 and 5.2): the model disk of
//! `pinfold-virtio`.
//!
//! A driver selects a register and reads another one at once, so the registers are in BAR 4, which
//! cannot be mapped: each access is a call. The notifications of the queues are in BAR 0, which is
//! memory and is polled.

mod engine;
mod registers;

use crate::function::{Endpoint, Port};
use crate::hostile::VirtioBehaviour;
use crate::pci::{Identity, Layout};
use engine::Engine;
use pinfold_nvme_model::Media;
use registers::COMMON_BYTES;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// BAR 0: the notifications, a word for each queue, the MSI-X table and the pending bits.
const BAR_BYTES: u32 = 0x4000;
const NOTIFY_BYTES: u32 = 0x1000;
const MSIX_TABLE: u32 = 0x2000;
const MSIX_PENDING: u32 = 0x3000;
/// BAR 4: the common configuration, the interrupt status, the configuration of the disk.
const CALLED_BYTES: u32 = 0x4000;
const ISR: usize = 0x1000;
const DEVICE: usize = 0x2000;
/// The size of `struct virtio_blk_config` without the fields of later features.
const DEVICE_BYTES: usize = 60;
/// A disk that is not transitional (section 5.2.1).
const IDENTITY: Identity =
    Identity { id: [0x1af4, 0x1042], subsystem: [0x1af4, 0x1100], class: 0x01_0000, revision: 1 };

/// Returns what the function of a disk shows.
pub(crate) fn layout(behaviour: &VirtioBehaviour) -> Layout {
    // Length and type of the structure, BAR, offset and length (section 4.1.4).
    let capability = |kind: u8, bar: u8, at: usize, len: usize, more: &[u8]| {
        let size = u8::try_from(16 + more.len()).unwrap_or(16);
        let mut body = vec![size, kind, bar, 0, 0, 0];
        body.extend(u32::try_from(at).unwrap_or(0).to_le_bytes());
        body.extend(u32::try_from(len).unwrap_or(0).to_le_bytes());
        body.extend(more);
        body
    };
    let queues = usize::from(behaviour.queues);
    Layout {
        identity: IDENTITY,
        bar_bytes: BAR_BYTES,
        register_bytes: NOTIFY_BYTES,
        table: MSIX_TABLE,
        pending: MSIX_PENDING,
        vectors: behaviour.queues.saturating_add(1),
        messages: 0,
        called_bytes: CALLED_BYTES,
        vendor: vec![
            capability(1, 4, 0, COMMON_BYTES, &[]),
            // Words for notifications, 4 bytes apart.
            capability(2, 0, 0, queues * 4, &4u32.to_le_bytes()),
            capability(3, 4, ISR, 1, &[]),
            capability(4, 4, DEVICE, DEVICE_BYTES, &[]),
        ],
    }
}

/// A disk.
#[derive(Debug)]
struct Disk {
    engine: Arc<Engine>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a disk that behaves so.
pub(crate) fn start(
    port: &Port,
    media: Arc<dyn Media>,
    behaviour: VirtioBehaviour,
) -> io::Result<Box<dyn Endpoint>> {
    let engine = Arc::new(Engine::new(port.clone(), media, behaviour));
    let own = engine.clone();
    let thread = std::thread::Builder::new().name("virtio-blk".into()).spawn(move || own.run())?;
    Ok(Box::new(Disk { engine, thread: Some(thread) }))
}

impl Disk {
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.engine.stop();
        self.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            drop(thread.join());
        }
    }
}

impl Endpoint for Disk {
    fn read(&self, at: u32, to: &mut [u8]) {
        let mut image = vec![0; CALLED_BYTES as usize];
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let range = at..at.saturating_add(to.len()).min(image.len());
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(to) = image.get_mut(at..at + bytes.len()) {
                to.copy_from_slice(bytes);
            }
        };
        put(0, &self.engine.common());
        put(DEVICE, &self.engine.device_config());
        if range.contains(&ISR) {
            // Reading it clears it.
            put(ISR, &[self.engine.take_interrupt_status()]);
        }
        for (to, byte) in to.iter_mut().zip(image.get(range).unwrap_or_default()) {
            *to = *byte;
        }
    }

    fn write(&self, at: u32, from: &[u8]) {
        // Only the common configuration can be written.
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        if at < COMMON_BYTES {
            self.engine.write(at, from);
            self.wake();
        }
    }

    fn reset(&self) {
        self.engine.reset();
    }

    fn is_disabled(&self) -> bool {
        !self.engine.is_started()
    }

    fn is_removed(&self) -> bool {
        false
    }

    fn requests(&self) -> u64 {
        self.engine.requests()
    }
}
