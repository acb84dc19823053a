//! A model of an AHCI controller (AHCI 1.3.1) with one SATA disk (ATA8-ACS), without queued commands.
//! A thread polls memory that a driver writes as its registers, and does DMA through a bus.
//!
//! Memory does not tell that the same value was written again. So bits that are cleared by writing 1
//! are compared with what the model has stored last, and those that an interrupt told of count as
//! cleared when the driver has unmasked its interrupts again, which it does last.

use pinfold_core::addr::Iova;
use pinfold_nvme_model::{Bus, BusFault};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

// 3.1, "Generic Host Control".
const CAP: usize = 0x00;
/// S64A, and 32 command slots; NP 0 stands for one port.
const CAPABILITIES: u32 = 1 << 31 | 31 << 8;
const GHC: usize = 0x04;
const GHC_RESET: u32 = 1;
const GHC_INTERRUPTS: u32 = 1 << 1;
const GHC_AHCI: u32 = 1 << 31;
const IS: usize = 0x08;
const PI: usize = 0x0c;
const VS: usize = 0x10;
// 3.3, "Port Registers", of the first port.
const PORT_CLB: usize = 0x100;
const PORT_FB: usize = 0x108;
const PORT_IS: usize = 0x110;
const PORT_IE: usize = 0x114;
const PORT_CMD: usize = 0x118;
const PORT_TFD: usize = 0x120;
const PORT_SIG: usize = 0x124;
const PORT_SSTS: usize = 0x128;
const PORT_SERR: usize = 0x130;
const PORT_CI: usize = 0x138;
const BYTES: usize = 0x180;
// 3.3.5, "Port x Interrupt Status".
const REGISTER_FIS: u32 = 1;
const OVERFLOW: u32 = 1 << 24;
const BUS_ERROR: u32 = 1 << 29;
const TASK_FILE_ERROR: u32 = 1 << 30;
/// A reserved bit of the interrupt enables, in which the model keeps that it has sent an interrupt:
/// the driver's next write clears it.
const SENT: u32 = 1 << 8;
// 3.3.7, "Port x Command and Status".
const START: u32 = 1;
const RECEIVE: u32 = 1 << 4;
const RECEIVES: u32 = 1 << 14;
const RUNS: u32 = 1 << 15;

/// Bits of the status that ATA calls DRDY and DSC; ERR; and the error ABRT.
const READY: u8 = 0x50;
const ERROR: u8 = 1;
const ABORTED: u8 = 1 << 2;

const BLOCK: usize = 512;

/// The registers, the interrupts, and the thread of a controller.
pub(crate) struct Hba {
    registers: &'static [AtomicU32],
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// Interrupts that were sent and not taken.
    sent: AtomicU64,
    ends: AtomicBool,
    /// No command is carried out.
    holds: AtomicBool,
    /// The disk aborts every command.
    refuses: AtomicBool,
}

impl Hba {
    /// Creates a controller that has a disk of `blocks` blocks of zeros.
    pub(crate) fn spawn(bus: impl Bus, blocks: usize) -> Self {
        // Never freed, since the driver keeps their address.
        let registers: &[AtomicU32] =
            Box::leak((0..BYTES / 4).map(|_| AtomicU32::new(0)).collect());
        let shared = Arc::new(Shared::default());
        let mut model = Model {
            registers,
            bus,
            disk: vec![0; blocks * BLOCK],
            held: [0; 3],
            sent: 0,
            receives: false,
            stopped: false,
        };
        for (register, value) in [(CAP, CAPABILITIES), (PI, 1), (VS, 0x1_0301)] {
            model.store(register, value);
        }
        model.reset();
        let its = shared.clone();
        let thread = std::thread::spawn(move || {
            while !its.ends.load(Ordering::SeqCst) {
                model.step(&its);
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        Self { registers, shared, thread: Some(thread) }
    }

    pub(crate) fn registers(&self) -> &'static [AtomicU32] {
        self.registers
    }

    /// Returns whether there was an interrupt.
    pub(crate) fn take_interrupt(&self) -> bool {
        self.shared.sent.swap(0, Ordering::SeqCst) > 0
    }

    /// Leaves commands alone, or carries them out.
    pub(crate) fn hold(&self, holds: bool) {
        self.shared.holds.store(holds, Ordering::SeqCst);
    }

    /// Has the disk refuse all commands.
    pub(crate) fn refuse(&self) {
        self.shared.refuses.store(true, Ordering::SeqCst);
    }

    /// Returns whether a command was issued and has not ended.
    pub(crate) fn is_busy(&self) -> bool {
        self.registers[PORT_CI / 4].load(Ordering::SeqCst) != 0
    }
}

impl Drop for Hba {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || !matches!(ended, Some(Err(_))), "the model panicked");
    }
}

/// Registers whose bits are cleared by writing 1.
const CLEARED_BY_ONE: [usize; 3] = [IS, PORT_IS, PORT_SERR];

struct Model<B> {
    registers: &'static [AtomicU32],
    bus: B,
    disk: Vec<u8>,
    /// The model's own values of the registers that are cleared by writing 1.
    held: [u32; 3],
    /// The bits of the port that an interrupt was sent for.
    sent: u32,
    /// The device has sent its signature.
    receives: bool,
    /// After an error nothing is carried out until the driver clears `START` (6.2.2).
    stopped: bool,
}

/// Why a command ends otherwise.
enum Failed {
    Bus,
    Overflow,
    /// The disk refuses it.
    Aborted,
}

impl From<BusFault> for Failed {
    fn from(_: BusFault) -> Self {
        Self::Bus
    }
}

impl<B: Bus> Model<B> {
    fn load(&self, register: usize) -> u32 {
        self.registers[register / 4].load(Ordering::SeqCst)
    }

    fn store(&self, register: usize, value: u32) {
        self.registers[register / 4].store(value, Ordering::SeqCst);
    }

    fn address(&self, register: usize) -> u64 {
        u64::from(self.load(register)) | u64::from(self.load(register + 4)) << 32
    }

    /// 10.4.3: all but capabilities, which keep their values. There is a device on an active link.
    fn reset(&mut self) {
        for register in (PORT_CLB..BYTES).step_by(4) {
            self.store(register, 0);
        }
        self.store(IS, 0);
        (self.held, self.sent, self.receives, self.stopped) = ([0; 3], 0, false, false);
        self.store(PORT_TFD, 0x7f);
        self.store(PORT_SIG, 0x101);
        self.store(PORT_SSTS, 0x123);
        self.store(GHC, GHC_AHCI);
    }

    fn step(&mut self, shared: &Shared) {
        if self.load(GHC) & GHC_RESET != 0 {
            return self.reset();
        }
        // Before the bits that the driver clears, since it clears them before it issues.
        let issued = self.load(PORT_CI);
        self.clear_what_was_written();
        if self.engines() && !shared.holds.load(Ordering::SeqCst) {
            for slot in (0..32).filter(|slot| issued & 1 << slot != 0) {
                if !self.stopped {
                    self.carry_out(slot, shared.refuses.load(Ordering::SeqCst));
                }
            }
        }
        self.interrupt(shared);
    }

    fn clear_what_was_written(&mut self) {
        for (register, number) in CLEARED_BY_ONE.into_iter().zip(0..) {
            let written = self.load(register);
            if written != self.held[number] {
                self.hold(number, self.held[number] & !written);
            }
        }
        let enabled = self.load(PORT_IE);
        if self.sent != 0 && enabled != 0 && enabled & SENT == 0 {
            self.hold(0, 0);
            self.hold(1, self.held[1] & !self.sent);
            self.sent = 0;
        }
    }

    fn hold(&mut self, number: usize, bits: u32) {
        self.held[number] = bits;
        self.store(CLEARED_BY_ONE[number], bits);
    }

    /// Starts and stops what the driver asks for (10.3). Returns whether commands are carried out.
    fn engines(&mut self) -> bool {
        let command = self.load(PORT_CMD);
        let runs = if command & START != 0 { RUNS } else { 0 };
        let wanted = if command & RECEIVE != 0 { runs | RECEIVES } else { runs };
        if command & (RUNS | RECEIVES) != wanted {
            let register = &self.registers[PORT_CMD / 4];
            register.fetch_and(!(RUNS | RECEIVES), Ordering::SeqCst);
            register.fetch_or(wanted, Ordering::SeqCst);
            if runs == 0 {
                self.store(PORT_CI, 0);
                self.stopped = false;
            }
            // The driver may have written meanwhile: nothing is done before this is looked at again.
            return false;
        }
        if wanted & RECEIVES != 0 && !self.receives {
            self.receives = true;
            self.end(READY, 0, REGISTER_FIS);
        }
        runs != 0
    }

    /// Receives a Register FIS of the device (4.2.1, and "Register - Device to Host" of Serial ATA),
    /// and sets status bits.
    fn end(&mut self, status: u8, error: u8, bits: u32) {
        let mut fis = [0; 20];
        (fis[0], fis[1], fis[2], fis[3]) = (0x34, 1 << 6, status, error);
        let at = Iova::new(self.address(PORT_FB) + 0x40);
        let received = self.bus.write(at, &fis);
        let bits = if received.is_ok() { bits } else { BUS_ERROR };
        self.hold(1, self.held[1] | bits);
        self.store(PORT_TFD, u32::from(error) << 8 | u32::from(status));
    }

    fn interrupt(&mut self, shared: &Shared) {
        let enabled = self.load(PORT_IE);
        let pending = self.held[1] & enabled & !SENT;
        if pending == 0 {
            return;
        }
        self.hold(0, 1);
        if self.sent == 0 && self.load(GHC) & GHC_INTERRUPTS != 0 {
            self.sent = pending;
            self.registers[PORT_IE / 4].fetch_or(SENT, Ordering::SeqCst);
            shared.sent.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Carries out the command of a slot (5.5).
    fn carry_out(&mut self, slot: u64, refuses: bool) {
        let header = self.address(PORT_CLB) + slot * 32;
        let ended = if refuses { Err(Failed::Aborted) } else { self.command(header) };
        self.stopped = ended.is_err();
        match ended {
            Ok(bytes) => {
                // PRDBC (4.2.2). Its list has been read.
                let counted = self.bus.write(Iova::new(header + 4), &bytes.to_le_bytes());
                self.end(READY, 0, if counted.is_ok() { REGISTER_FIS } else { BUS_ERROR });
                self.registers[PORT_CI / 4].fetch_and(!(1 << slot), Ordering::SeqCst);
            }
            Err(Failed::Bus) => self.hold(1, self.held[1] | BUS_ERROR),
            Err(Failed::Overflow) => self.hold(1, self.held[1] | OVERFLOW),
            Err(Failed::Aborted) => self.end(READY | ERROR, ABORTED, TASK_FILE_ERROR),
        }
    }

    /// Carries out the command of a header in the command list (4.2.2). Returns how many bytes it has
    /// transferred.
    fn command(&mut self, header: u64) -> Result<u32, Failed> {
        let [options, _, low, high] = self.words(header)?;
        let table = u64::from(low & !0x7f) | u64::from(high) << 32;
        // 4.2.3.1, and "Register - Host to Device" of Serial ATA: a command, and no control.
        let mut fis = [0; 20];
        self.bus.read(Iova::new(table), &mut fis)?;
        if options & 0x1f != 5 || fis[0] != 0x27 || fis[1] & 1 << 7 == 0 {
            return Err(Failed::Aborted);
        }
        let places = self.places(table, options >> 16)?;
        let to_device = options & 1 << 6 != 0;
        match (fis[2], to_device) {
            // IDENTIFY DEVICE.
            (0xec, false) => self.read(&places, &self.identity()),
            // READ DMA EXT.
            (0x25, false) => {
                let blocks = self.blocks(&fis)?;
                self.read(&places, &self.disk[blocks])
            }
            // WRITE DMA EXT, and with FUA.
            (0x35 | 0x3d, true) => {
                let blocks = self.blocks(&fis)?;
                self.write(&places, blocks)
            }
            // FLUSH CACHE, and EXT.
            (0xe7 | 0xea, false) => Ok(0),
            _ => Err(Failed::Aborted),
        }
    }

    fn words(&self, at: u64) -> Result<[u32; 4], BusFault> {
        let mut bytes = [0; 16];
        self.bus.read(Iova::new(at), &mut bytes)?;
        Ok(std::array::from_fn(|word| {
            u32::from_le_bytes(std::array::from_fn(|byte| bytes[word * 4 + byte]))
        }))
    }

    /// Reads the PRD table (4.2.3.3): addresses, and lengths that are stored less one.
    fn places(&self, table: u64, entries: u32) -> Result<Vec<(u64, usize)>, BusFault> {
        let place = |entry: u32| {
            let [low, high, _, count] = self.words(table + 0x80 + u64::from(entry) * 16)?;
            let at = u64::from(low) | u64::from(high) << 32;
            Ok((at, (count & 0x3f_ffff) as usize + 1))
        };
        (0..entries).map(place).collect()
    }

    /// Cuts `len` bytes into the pieces of `places`.
    fn pieces(
        places: &[(u64, usize)],
        len: usize,
    ) -> Result<Vec<(Iova, std::ops::Range<usize>)>, Failed> {
        let mut done = 0;
        let mut pieces = Vec::new();
        for &(at, room) in places {
            let end = len.min(done + room);
            pieces.push((Iova::new(at), done..end));
            done = end;
        }
        if done < len { Err(Failed::Overflow) } else { Ok(pieces) }
    }

    /// The device's data to memory.
    fn read(&self, places: &[(u64, usize)], data: &[u8]) -> Result<u32, Failed> {
        for (at, part) in Self::pieces(places, data.len())? {
            self.bus.write(at, &data[part])?;
        }
        Ok(u32::try_from(data.len()).unwrap())
    }

    /// Memory to blocks of the disk.
    fn write(
        &mut self,
        places: &[(u64, usize)],
        blocks: std::ops::Range<usize>,
    ) -> Result<u32, Failed> {
        let data = &mut self.disk[blocks];
        for (at, part) in Self::pieces(places, data.len())? {
            self.bus.read(at, &mut data[part])?;
        }
        Ok(u32::try_from(data.len()).unwrap())
    }

    /// Returns the bytes of the blocks that a command with 48 bits of address names; a count of 0
    /// stands for 65,536.
    fn blocks(&self, fis: &[u8; 20]) -> Result<std::ops::Range<usize>, Failed> {
        let lba = [fis[4], fis[5], fis[6], fis[8], fis[9], fis[10], 0, 0];
        let count = u16::from_le_bytes([fis[12], fis[13]]);
        let count = if count == 0 { 1 << 16 } else { u64::from(count) };
        let first = usize::try_from(u64::from_le_bytes(lba)).unwrap();
        let end = first + usize::try_from(count).unwrap();
        if end > self.disk.len() / BLOCK {
            Err(Failed::Aborted)
        } else {
            Ok(first * BLOCK..end * BLOCK)
        }
    }

    /// Returns the data of IDENTIFY DEVICE.
    fn identity(&self) -> [u8; BLOCK] {
        let blocks = self.disk.len() / BLOCK;
        let mut data = [0; BLOCK];
        let words = [
            // LBA and DMA.
            (49, 3 << 8),
            // Valid; FLUSH CACHE EXT, FLUSH CACHE, 48 bits of address.
            (83, 1 << 14 | 1 << 13 | 1 << 12 | 1 << 10),
            // Valid; FUA.
            (84, 1 << 14 | 1 << 6),
            (100, blocks & 0xffff),
            (101, blocks >> 16),
        ];
        for (word, value) in words {
            data[word * 2..word * 2 + 2]
                .copy_from_slice(&u16::try_from(value).unwrap().to_le_bytes());
        }
        data
    }
}
