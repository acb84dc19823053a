//! A PCI function's configuration space: the header and the capabilities of a device with MSI-X
//! (PCI Local Bus 3.0, 6.1 and 6.8; PCI Express 3.0, 7.8).

/// The size of the configuration space of a PCI Express device.
pub(crate) const CONFIG_BYTES: usize = 4096;
/// Bits of the command register.
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const INTX_DISABLE: u16 = 1 << 10;
/// Where the capabilities are; those of the vendor follow.
const POWER: usize = 0x40;
const MSI: usize = 0x50;
const MSIX: usize = 0x60;
const EXPRESS: usize = 0x70;
const VENDOR: usize = 0xb0;
const VENDOR_SPECIFIC: u8 = 0x09;
/// Device control of the PCI Express capability, and its bit for a function level reset.
const DEVICE_CONTROL: usize = EXPRESS + 8;
const FUNCTION_RESET: u8 = 1 << 7;
/// The enable bits of MSI and MSI-X: the kernel sets them with the interrupts. It shows that of MSI as
/// the program has written it, which it can while MSI is enabled.
const MSI_ENABLE: u8 = 1;
const MSIX_ENABLE: u8 = 1 << 7;

/// The identity of a function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Vendor and device.
    pub id: [u16; 2],
    /// Vendor and device of the subsystem.
    pub subsystem: [u16; 2],
    /// Base class, sub-class and programming interface.
    pub class: u32,
    /// Revision.
    pub revision: u8,
}

/// What a function shows in configuration space, and how a program reaches it.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) identity: Identity,
    /// The size of BAR 0, which is memory: registers that are polled, up to `register_bytes`, the
    /// MSI-X table and the pending bits.
    pub(crate) bar_bytes: u32,
    pub(crate) register_bytes: u32,
    pub(crate) table: u32,
    pub(crate) pending: u32,
    /// The number of MSI-X vectors, and of messages without MSI-X: 32 or 0.
    pub(crate) vectors: u16,
    pub(crate) messages: u16,
    /// The size of BAR 4, which cannot be mapped: each access is a call. 0: there is none.
    pub(crate) called_bytes: u32,
    /// The vendor-specific capabilities, without their identifier and link.
    pub(crate) vendor: Vec<Vec<u8>>,
}

/// A configuration space as VFIO shows it.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    bytes: Box<[u8; CONFIG_BYTES]>,
    /// The bits that a program can write.
    writable: Box<[u8; CONFIG_BYTES]>,
    initial: Box<[u8; CONFIG_BYTES]>,
    /// MSI is enabled.
    has_messages: bool,
}

/// The effect of a write to configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Effect {
    /// A function level reset is requested.
    pub(crate) reset: bool,
    /// Bus mastering changed.
    pub(crate) bus_master: Option<bool>,
}

impl Config {
    /// Creates the space of a function. The sizes of its BARs are powers of two.
    pub(crate) fn new(layout: &Layout) -> Self {
        let zeroes = || Box::new([0; CONFIG_BYTES]);
        let mut config =
            Self { bytes: zeroes(), writable: zeroes(), initial: zeroes(), has_messages: false };
        let identity = &layout.identity;
        let [vendor, device] = identity.id;
        let [sub_vendor, sub_device] = identity.subsystem;
        let [_, base, sub, interface] = identity.class.to_be_bytes();
        config.put(0x00, &vendor.to_le_bytes());
        config.put(0x02, &device.to_le_bytes());
        // The kernel enables the device when it is opened, without bus mastering.
        config.put(0x04, &MEMORY_SPACE.to_le_bytes());
        config.allow(0x04, &(0x0147 | MEMORY_SPACE | BUS_MASTER | INTX_DISABLE).to_le_bytes());
        // Status: there is a list of capabilities.
        config.put(0x06, &0x0010u16.to_le_bytes());
        config.put(0x08, &[identity.revision, interface, sub, base]);
        config.allow(0x0c, &[0xff, 0xff]);
        // BAR 0: memory, 64 bits.
        config.put(0x10, &4u32.to_le_bytes());
        config.allow(0x10, &(!(u64::from(layout.bar_bytes) - 1)).to_le_bytes());
        if let Some(mask) = layout.called_bytes.checked_sub(1) {
            config.allow(0x20, &(!mask).to_le_bytes());
        }
        config.put(0x2c, &sub_vendor.to_le_bytes());
        config.put(0x2e, &sub_device.to_le_bytes());
        config.put(0x34, &[0x40]);
        // Interrupt line, and pin A.
        config.put(0x3c, &[0xff, 1]);
        config.allow(0x3c, &[0xff]);
        let after_power = if layout.messages > 0 { 0x50 } else { 0x60 };
        config.put(POWER, &[0x01, after_power, 0x03, 0x00]);
        config.allow(POWER + 4, &[3]);
        if layout.messages > 0 {
            // MSI: 32 vectors, 64 bits of address.
            config.put(MSI, &[0x05, 0x60, 0x8a, 0x00]);
            config.allow(MSI + 2, &[0x70 | MSI_ENABLE]);
            let address_and_data = [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
            config.allow(MSI + 4, &address_and_data);
        }
        config.put(MSIX, &[0x11, 0x70]);
        config.put(MSIX + 2, &(layout.vectors.saturating_sub(1) & 0x7ff).to_le_bytes());
        config.put(MSIX + 4, &layout.table.to_le_bytes());
        config.put(MSIX + 8, &layout.pending.to_le_bytes());
        // Version 2, an endpoint, whose function can be reset.
        config.put(EXPRESS, &[0x10, 0x00, 0x02, 0x00]);
        config.put(EXPRESS + 4, &(0x8000u32 | 1 << 28).to_le_bytes());
        config.allow(DEVICE_CONTROL, &[0xff, 0x7f]);
        let (mut link, mut at) = (EXPRESS + 1, VENDOR);
        for body in &layout.vendor {
            config.put(link, &[u8::try_from(at).unwrap_or(0)]);
            config.put(at, &[VENDOR_SPECIFIC, 0]);
            config.put(at + 2, body);
            (link, at) = (at + 1, (at + 2 + body.len()).next_multiple_of(4));
        }
        config.initial.copy_from_slice(&*config.bytes);
        config
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(to) = self.bytes.get_mut(at..at + bytes.len()) {
            to.copy_from_slice(bytes);
        }
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        if let Some(to) = self.writable.get_mut(at..at + bits.len()) {
            to.copy_from_slice(bits);
        }
    }

    fn command(&self) -> u16 {
        let [.., low, high] = *self.bytes.first_chunk::<6>().unwrap_or(&[0; 6]);
        u16::from_le_bytes([low, high])
    }

    pub(crate) fn is_bus_master(&self) -> bool {
        self.command() & BUS_MASTER != 0
    }

    /// Returns whether the function answers at its BARs.
    pub(crate) fn decodes_memory(&self) -> bool {
        self.command() & MEMORY_SPACE != 0
    }

    /// Returns the bytes at `at`, as many as there are.
    pub(crate) fn read(&self, at: usize, len: usize) -> &[u8] {
        let end = at.saturating_add(len).min(CONFIG_BYTES);
        self.bytes.get(at..end).unwrap_or_default()
    }

    /// Writes the bits that a program can write; returns how many bytes are inside, and the effect.
    pub(crate) fn write(&mut self, at: usize, from: &[u8]) -> (usize, Effect) {
        let before = self.is_bus_master();
        let mut effect = Effect::default();
        let places = self.bytes.iter_mut().zip(&*self.writable).enumerate().skip(at);
        let mut count = 0;
        for ((place, (byte, mask)), new) in places.zip(from) {
            // The kernel carries it out and shows 0.
            effect.reset |= place == DEVICE_CONTROL + 1 && new & FUNCTION_RESET != 0;
            let is_refused = place == MSI + 2 && !self.has_messages;
            let new = if is_refused { new & !MSI_ENABLE } else { *new };
            *byte = *byte & !mask | new & mask;
            count += 1;
        }
        let after = self.is_bus_master();
        effect.bus_master = (before != after).then_some(after);
        (count, effect)
    }

    /// Notes which message-signalled interrupts are enabled.
    pub(crate) fn set_interrupts(&mut self, msi: bool, msix: bool) {
        self.has_messages = msi;
        if let Some(byte) = self.bytes.get_mut(MSIX + 3) {
            *byte = *byte & !MSIX_ENABLE | if msix { MSIX_ENABLE } else { 0 };
        }
    }

    /// Returns to the state after the device was opened. `keep_bars`: the kernel restores them after
    /// a reset.
    pub(crate) fn reset(&mut self) {
        let bars = self.bytes.get(0x10..0x28).map(<[u8]>::to_vec).unwrap_or_default();
        self.bytes.copy_from_slice(&*self.initial);
        self.put(0x10, &bars);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let identity = Identity {
            id: [0x1b36, 0x10],
            subsystem: [0x1af4, 0x1100],
            class: 0x01_0802,
            revision: 2,
        };
        Layout {
            identity,
            bar_bytes: 0x8000,
            register_bytes: 0x6000,
            table: 0x6000,
            pending: 0x7000,
            vectors: 33,
            messages: 32,
            called_bytes: 0,
            vendor: Vec::new(),
        }
    }

    fn config() -> Config {
        Config::new(&layout())
    }

    /// Returns the identifiers of the capabilities, in their order.
    fn capabilities(config: &Config) -> Vec<(u8, usize)> {
        let byte = |at: usize| config.read(at, 1)[0];
        let mut found = Vec::new();
        let mut at = usize::from(byte(0x34));
        while at != 0 {
            found.push((byte(at), at));
            at = usize::from(byte(at + 1));
        }
        found
    }

    #[test]
    fn capabilities_are_linked() {
        let ids = |layout: &Layout| -> Vec<u8> {
            capabilities(&Config::new(layout)).iter().map(|(id, _)| *id).collect()
        };
        assert_eq!(ids(&layout()), [1, 5, 0x11, 0x10]);
        let vendor = vec![vec![16, 1, 4], vec![20, 2]];
        let other = Layout { messages: 0, called_bytes: 0x4000, vendor, ..layout() };
        assert_eq!(ids(&other), [1, 0x11, 0x10, 9, 9]);
        let mut config = Config::new(&other);
        assert_eq!(capabilities(&config)[3..], [(9, 0xb0), (9, 0xb8)]);
        assert_eq!(config.read(0xb2, 3), [16, 1, 4]);
        assert_eq!(config.read(0xba, 2), [20, 2]);
        config.write(0x20, &[0xff; 4]);
        assert_eq!(config.read(0x20, 8), [0x00, 0xc0, 0xff, 0xff, 0, 0, 0, 0]);
        config.write(MSI, &[0xff; 16]);
        assert_eq!(config.read(MSI, 16), [0; 16]);
    }

    #[test]
    fn the_header_identifies_the_function() {
        let config = config();
        assert_eq!(config.read(0, 4), [0x36, 0x1b, 0x10, 0x00]);
        assert_eq!(config.read(8, 4), [2, 2, 8, 1]);
        assert_eq!(config.read(MSIX + 2, 2), [32, 0], "N - 1");
        assert_eq!(config.read(4094, 8).len(), 2);
        assert!(config.read(4096, 1).is_empty() && config.read(usize::MAX, 2).is_empty());
    }

    #[test]
    fn a_bar_tells_its_size() {
        let mut config = config();
        config.write(0x10, &[0xff; 8]);
        assert_eq!(config.read(0x10, 8), [0x04, 0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        config.write(0x14, &[0xff; 4]);
        assert_eq!(config.write(4094, &[1; 8]).0, 2);
    }

    #[test]
    fn read_only_bits_stay() {
        let mut config = config();
        config.write(0, &[0; 16]);
        assert_eq!(config.read(0, 4), [0x36, 0x1b, 0x10, 0x00]);
        assert_eq!(config.read(6, 2), [0x10, 0x00]);
        config.write(MSIX + 2, &[0xff, 0xff]);
        assert_eq!(config.read(MSIX + 2, 2), [32, 0], "the kernel enables MSI-X");
    }

    #[test]
    fn messages_are_enabled_in_configuration_space_while_they_are() {
        let mut config = config();
        let enabled = |config: &Config| config.read(MSI + 2, 1)[0] & MSI_ENABLE;
        config.write(MSI + 2, &[0x71]);
        config.set_interrupts(true, false);
        assert_eq!(enabled(&config), 0);
        config.write(MSI + 2, &[0x71]);
        config.set_interrupts(false, false);
        assert_eq!(config.read(MSI + 2, 1)[0] & 0x71, 0x71);
        config.write(MSI + 2, &[0x71]);
        assert_eq!(config.read(MSI + 2, 1)[0] & 0x71, 0x70);
    }

    #[test]
    fn bus_mastering_and_resets_are_effects() {
        let mut config = config();
        assert_eq!(config.write(4, &[6, 0]).1.bus_master, Some(true));
        assert_eq!(config.write(4, &[6, 4]).1, Effect::default());
        assert_eq!(config.write(4, &[2, 4]).1.bus_master, Some(false));
        assert!(config.write(DEVICE_CONTROL, &[0, FUNCTION_RESET]).1.reset);
        assert_eq!(config.read(DEVICE_CONTROL, 2), [0, 0]);
        assert!(!config.write(DEVICE_CONTROL + 1, &[0x7f]).1.reset);
    }

    #[test]
    fn memory_is_decoded_from_the_start() {
        let mut config = config();
        assert!(config.decodes_memory() && !config.is_bus_master());
        config.write(4, &[4, 0]);
        assert!(!config.decodes_memory() && config.is_bus_master());
        config.reset();
        assert!(config.decodes_memory());
    }

    #[test]
    fn a_reset_keeps_the_bars() {
        let mut config = config();
        config.write(4, &[6, 0]);
        config.write(0x10, &[0, 0, 0xe0, 0xfe, 0, 0, 0, 0]);
        config.set_interrupts(false, true);
        assert_eq!(config.read(MSIX + 3, 1), [0x80]);
        config.reset();
        assert_eq!(config.read(4, 2), [2, 0]);
        assert_eq!(config.read(0x10, 4), [4, 0, 0xe0, 0xfe]);
        assert_eq!(config.read(MSIX + 3, 1), [0]);
    }
}
