//! The crate `virtio-driver` (libblkio's driver), unmodified, on the virtio disk under check: the data
//! is right, and what the driver does wrong is reported. Each test runs another one of this program,
//! which is ignored otherwise.
#![expect(clippy::unwrap_used, reason = "tests")]

use pci_driver::backends::vfio::VfioPciDevice;
use pinfold_check::{CheckConfig, CheckReport, DeviceConfig, DeviceModel, Ending, run};
use pinfold_nvme_model::{Media, MemoryMedia};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use virtio_driver::{
    Pci, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf,
    VirtioBlkTransport, VirtioTransport,
};

const BDF: &str = "0000:01:00.0";
const BYTES: u64 = 16 << 20;
const QUEUES: usize = 2;
const PIECE: usize = 16 << 10;
/// The requests in flight of a queue.
const DEPTH: usize = 8;
const ROUNDS: u64 = 16;

type Queue = VirtioBlkQueue<'static, u64>;

/// Waits for the interrupts of a queue until `count` requests have completed.
fn finish(transport: &VirtioBlkTransport, number: usize, queue: &mut Queue, mut count: usize) {
    while count > 0 {
        let before = count;
        for completion in queue.completions() {
            assert_eq!(completion.ret, 0, "request {}", completion.context);
            count -= 1;
        }
        if count == before {
            transport.get_completion_fd(number).read().unwrap();
        }
    }
}

/// Returns byte `at` of the disk.
fn pattern(at: u64) -> u8 {
    let [low, high, ..] = (at / 4096).to_le_bytes();
    u8::try_from(at % 251).unwrap() ^ low ^ high
}

#[test]
#[ignore = "needs the device that the tests below provide"]
fn ignored_driver() {
    let device = VfioPciDevice::open(format!("/sys/bus/pci/devices/{BDF}")).unwrap();
    let features = VirtioBlkFeatureFlags::FLUSH | VirtioBlkFeatureFlags::MQ;
    let mut transport =
        Pci::<VirtioBlkConfig, VirtioBlkReqBuf>::new(Arc::new(device), features.bits()).unwrap();
    assert_eq!(transport.max_queues(), Some(16));
    let config = transport.get_config().unwrap();
    assert_eq!({ config.capacity }.to_native(), BYTES / 512);
    let mut queues = Queue::setup_queues(&mut transport, QUEUES, 64).unwrap();

    // In whole pages, which it maps.
    let bytes = QUEUES * DEPTH * PIECE;
    let mut memory = vec![0u8; bytes + 4096];
    let begin = memory.as_ptr().align_offset(4096);
    let memory = &mut memory[begin..begin + bytes];
    let at = memory.as_ptr().expose_provenance();
    transport.map_mem_region(at, bytes, -1, 0).unwrap();
    for write in [true, false] {
        for round in 0..ROUNDS {
            let base = round * bytes as u64;
            let pieces = memory.chunks_mut(PIECE).zip((0..).map(|n| base + n * PIECE as u64));
            for (number, (piece, from)) in pieces.enumerate() {
                let queue = &mut queues[number % QUEUES];
                let bytes = piece.iter_mut().zip(from..);
                bytes.for_each(|(byte, at)| *byte = if write { pattern(at) } else { 0xee });
                match write {
                    true => queue.write(from, piece, from).unwrap(),
                    false => queue.read(from, piece, from).unwrap(),
                }
            }
            for (number, queue) in queues.iter_mut().enumerate() {
                transport.get_submission_notifier(number).notify().unwrap();
                finish(&transport, number, queue, DEPTH);
            }
            let is_right = memory.iter().zip(base..).all(|(byte, at)| *byte == pattern(at));
            assert!(is_right, "round {round}, {write}");
        }
        queues[0].flush(0).unwrap();
        transport.get_submission_notifier(0).notify().unwrap();
        finish(&transport, 0, &mut queues[0], 1);
    }
    transport.unmap_mem_region(at, bytes).unwrap();
    drop((queues, transport));
}

/// Runs the driver under check. One at a time: check becomes the parent of what its program leaves.
fn check(hostile: Option<u64>) -> CheckReport {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let media = Arc::new(MemoryMedia::new(BYTES).unwrap());
    let device = DeviceConfig {
        bdf: BDF.parse().unwrap(),
        group: 7,
        media: media.clone(),
        model: DeviceModel::VirtioBlk,
    };
    let program = std::env::current_exe().unwrap().into_os_string();
    let words = ["--exact", "ignored_driver", "--ignored", "--nocapture"].map(Into::into);
    let mut config = CheckConfig::new(vec![device], [program].into_iter().chain(words).collect());
    config.hostile = hostile;
    // It gives up a device with fewer or smaller queues than it asks for.
    config.knobs = ["queues=16", "mqes=255", "cache=1"].map(|knob| knob.parse().unwrap()).into();
    config.time_limit = Some(Duration::from_secs(500));
    let report = run(&config).unwrap();
    let mut at = 0;
    let written = media.read(0, usize::try_from(BYTES / 4).unwrap(), &mut |bytes| {
        assert!(bytes.iter().zip(at..).all(|(byte, at)| *byte == pattern(at)));
        at += bytes.len() as u64;
        Ok(())
    });
    written.unwrap();
    report
}

/// Its transport, when it is dropped, unmaps and frees the queues before it stops the device: three
/// rings of each.
#[test]
fn the_driver_frees_the_queues_of_a_device_at_work() {
    for seed in [None, Some(1), Some(2), Some(3), Some(4)] {
        let report = check(seed);
        let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
        assert_eq!(report.ending, Ending::Exit(0), "{seed:?} {lines:#?}");
        let counts: Vec<_> = report.counts.iter().map(|(id, count)| (*id, *count)).collect();
        assert_eq!(counts, [("queue-unmapped", 3 * QUEUES as u64)], "{seed:?} {lines:#?}");
        assert!(lines[0].contains("is unmapped, and the available ring of queue 0 is in "));
        assert_eq!(report.commands, 2 * (ROUNDS * (QUEUES * DEPTH) as u64 + 1));
    }
}
