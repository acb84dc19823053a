//! The common configuration of a virtio device over PCI (virtio 1.2 section 4.1.4.3): what a driver
//! selects, accepts and sets.

/// `VIRTIO_MSI_NO_VECTOR`.
pub(super) const NO_VECTOR: u16 = 0xffff;
/// The size of the structure without the fields of features that are not offered.
pub(super) const COMMON_BYTES: usize = 0x38;

/// Bits of the device status (section 2.1).
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;
pub(super) const NEEDS_RESET: u8 = 0x40;

/// `VIRTIO_BLK_F_FLUSH` and others of section 5.2.3, `VIRTIO_F_INDIRECT_DESC` and others of section 6.
pub(super) const SEG_MAX: u64 = 1 << 2;
pub(super) const BLK_SIZE: u64 = 1 << 6;
pub(super) const FLUSH: u64 = 1 << 9;
pub(super) const MQ: u64 = 1 << 12;
pub(super) const INDIRECT: u64 = 1 << 28;
pub(super) const VERSION_1: u64 = 1 << 32;
pub(super) const ACCESS_PLATFORM: u64 = 1 << 33;

/// A queue as the driver sets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueRegisters {
    pub(super) size: u16,
    pub(super) vector: u16,
    pub(super) enabled: bool,
    /// The descriptor table, the available ring and the used ring.
    pub(super) rings: [u64; 3],
}

/// What a write asks the device for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// A reset, by status 0.
    Reset,
    /// The driver's features are refused: these bits are not offered, or are missing.
    Refused(u64),
    /// The driver is ready.
    Started,
    /// A queue is enabled.
    Enabled(u16),
    /// A queue is enabled at a wrong time.
    EnabledOutOfOrder(u16),
    /// A queue gets a size that it cannot have.
    Size(u16, u16),
}

/// The registers.
#[derive(Clone, Debug)]
pub(super) struct Registers {
    offered: u64,
    most: u16,
    vectors: u16,
    device_select: u32,
    driver_select: u32,
    pub(super) accepted: u64,
    config_vector: u16,
    pub(super) status: u8,
    queue_select: u16,
    pub(super) queues: Vec<QueueRegisters>,
}

impl Registers {
    /// Creates the registers of a device that offers these features, with so many queues of at most
    /// `most` entries, and so many vectors.
    pub(super) fn new(offered: u64, queues: u16, most: u16, vectors: u16) -> Self {
        let queue = QueueRegisters { size: most, vector: NO_VECTOR, enabled: false, rings: [0; 3] };
        Self {
            offered,
            most,
            vectors,
            device_select: 0,
            driver_select: 0,
            accepted: 0,
            config_vector: NO_VECTOR,
            status: 0,
            queue_select: 0,
            queues: vec![queue; usize::from(queues)],
        }
    }

    pub(super) fn reset(&mut self) {
        let queues = u16::try_from(self.queues.len()).unwrap_or(0);
        *self = Self::new(self.offered, queues, self.most, self.vectors);
    }

    pub(super) fn is_started(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    /// Returns the structure as the driver reads it.
    pub(super) fn bytes(&self) -> [u8; COMMON_BYTES] {
        let mut bytes = [0; COMMON_BYTES];
        let mut put = |at: usize, value: &[u8]| {
            if let Some(to) = bytes.get_mut(at..at + value.len()) {
                to.copy_from_slice(value);
            }
        };
        put(0x00, &self.device_select.to_le_bytes());
        put(0x04, &half(self.offered, self.device_select).to_le_bytes());
        put(0x08, &self.driver_select.to_le_bytes());
        put(0x0c, &half(self.accepted, self.driver_select).to_le_bytes());
        put(0x10, &self.config_vector.to_le_bytes());
        put(0x12, &u16::try_from(self.queues.len()).unwrap_or(0).to_le_bytes());
        put(0x14, &[self.status]);
        put(0x16, &self.queue_select.to_le_bytes());
        // A queue that does not exist has size 0.
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(0x18, &queue.size.to_le_bytes());
            put(0x1a, &queue.vector.to_le_bytes());
            put(0x1c, &u16::from(queue.enabled).to_le_bytes());
            put(0x1e, &self.queue_select.to_le_bytes());
            for (at, ring) in [0x20, 0x28, 0x30].into_iter().zip(queue.rings) {
                put(at, &ring.to_le_bytes());
            }
        }
        bytes
    }

    /// Writes bytes, in fields of any width; returns what the device is asked for.
    pub(super) fn write(&mut self, at: usize, from: &[u8]) -> Option<Effect> {
        let mut image = self.bytes();
        let end = at.saturating_add(from.len()).min(COMMON_BYTES);
        let len = end.saturating_sub(at);
        image.get_mut(at..end)?.copy_from_slice(from.get(..len)?);
        let touches = |field: usize, len: usize| at < field + len && field < end;
        let u16_at = |field: usize| {
            image
                .get(field..field + 2)
                .and_then(|b| b.first_chunk())
                .copied()
                .map(u16::from_le_bytes)
        };
        let u32_at = |field: usize| {
            image
                .get(field..field + 4)
                .and_then(|b| b.first_chunk())
                .copied()
                .map(u32::from_le_bytes)
        };
        let u64_at = |field: usize| {
            image
                .get(field..field + 8)
                .and_then(|b| b.first_chunk())
                .copied()
                .map(u64::from_le_bytes)
        };
        if touches(0x00, 4) {
            self.device_select = u32_at(0x00)?;
        }
        if touches(0x08, 4) {
            self.driver_select = u32_at(0x08)?;
        }
        if touches(0x0c, 4) && self.status & FEATURES_OK == 0 {
            let value = u64::from(u32_at(0x0c)?);
            match self.driver_select {
                0 => self.accepted = self.accepted & !0xffff_ffff | value,
                1 => self.accepted = self.accepted & 0xffff_ffff | value << 32,
                _ => {}
            }
        }
        let vector = |value: u16| if value < self.vectors { value } else { NO_VECTOR };
        if touches(0x10, 2) {
            self.config_vector = vector(u16_at(0x10)?);
        }
        if touches(0x16, 2) {
            self.queue_select = u16_at(0x16)?;
        }
        if touches(0x14, 1) {
            return self.set_status(*image.get(0x14)?);
        }
        let (status, select, most) = (self.status, self.queue_select, self.most);
        let queue = self.queues.get_mut(usize::from(select))?;
        if queue.enabled {
            // The driver may change nothing of it.
            return None;
        }
        if touches(0x18, 2) {
            let size = u16_at(0x18)?;
            if !size.is_power_of_two() || size > most {
                return Some(Effect::Size(select, size));
            }
            queue.size = size;
        }
        if touches(0x1a, 2) {
            queue.vector = vector(u16_at(0x1a)?);
        }
        for (field, ring) in [0x20, 0x28, 0x30].into_iter().zip(&mut queue.rings) {
            if touches(field, 8) {
                *ring = u64_at(field)?;
            }
        }
        if touches(0x1c, 2) && u16_at(0x1c)? == 1 {
            if status & FEATURES_OK == 0 || status & DRIVER_OK != 0 {
                return Some(Effect::EnabledOutOfOrder(select));
            }
            queue.enabled = true;
            return Some(Effect::Enabled(select));
        }
        None
    }

    fn set_status(&mut self, value: u8) -> Option<Effect> {
        if value == 0 {
            return Some(Effect::Reset);
        }
        let before = self.status;
        self.status = value | before & NEEDS_RESET;
        if self.status & FEATURES_OK & !before != 0 {
            let needed = (VERSION_1 | ACCESS_PLATFORM) & !self.accepted;
            let wrong = self.accepted & !self.offered | needed;
            if wrong != 0 {
                self.status &= !FEATURES_OK;
                return Some(Effect::Refused(wrong));
            }
        }
        (self.status & DRIVER_OK & !before != 0).then_some(Effect::Started)
    }
}

/// Returns the half of the features that is selected.
fn half(features: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFERED: u64 = FLUSH | VERSION_1 | ACCESS_PLATFORM;

    fn registers() -> Registers {
        Registers::new(OFFERED, 2, 64, 3)
    }

    fn read(registers: &Registers, at: usize) -> u16 {
        let bytes = registers.bytes();
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }

    /// Accepts `features`; returns the effect of FEATURES_OK.
    fn accept(registers: &mut Registers, features: u64) -> Option<Effect> {
        for select in [0, 1] {
            registers.write(0x08, &[select, 0, 0, 0]);
            let value = features >> (32 * u64::from(select));
            registers.write(0x0c, &value.to_le_bytes()[..4]);
        }
        registers.write(0x14, &[3 | FEATURES_OK])
    }

    #[test]
    fn features_are_read_by_halves() {
        let mut registers = registers();
        registers.write(0x00, &[1, 0, 0, 0]);
        assert_eq!(read(&registers, 0x04), 3);
        registers.write(0x00, &[0, 0, 0, 0]);
        assert_eq!(read(&registers, 0x04), 1 << 9);
        registers.write(0x00, &[2, 0, 0, 0]);
        assert_eq!(read(&registers, 0x04), 0);
    }

    #[test]
    fn features_that_are_not_offered_or_missing_are_refused() {
        for (features, wrong) in
            [(OFFERED | 1 << 5, 1 << 5), (VERSION_1, ACCESS_PLATFORM), (ACCESS_PLATFORM, VERSION_1)]
        {
            let mut registers = registers();
            assert_eq!(accept(&mut registers, features), Some(Effect::Refused(wrong)));
            assert_eq!(registers.status, 3);
        }
        let mut registers = registers();
        assert_eq!(accept(&mut registers, VERSION_1 | ACCESS_PLATFORM), None);
        assert_eq!(registers.status, 3 | FEATURES_OK);
        // Afterwards they stay.
        registers.write(0x0c, &[0; 4]);
        assert_eq!(registers.accepted, VERSION_1 | ACCESS_PLATFORM);
    }

    #[test]
    fn a_queue_is_enabled_between_features_and_driver_ok() {
        let mut registers = registers();
        registers.write(0x16, &[1, 0]);
        assert_eq!(registers.write(0x1c, &[1, 0]), Some(Effect::EnabledOutOfOrder(1)));
        accept(&mut registers, OFFERED);
        registers.write(0x20, &[1, 2, 3, 4]);
        registers.write(0x24, &[5, 6, 7, 8]);
        registers.write(0x1a, &[2, 0]);
        assert_eq!(registers.write(0x1c, &[0, 0]), None);
        assert_eq!(registers.write(0x1c, &[1, 0]), Some(Effect::Enabled(1)));
        let queue = registers.queues[1];
        assert_eq!((queue.rings[0], queue.vector), (0x0807_0605_0403_0201, 2));
        // Nothing of it changes any more.
        registers.write(0x20, &[0; 8]);
        assert_eq!(registers.queues[1].rings[0], 0x0807_0605_0403_0201);
        assert_eq!(registers.write(0x14, &[3 | FEATURES_OK | DRIVER_OK]), Some(Effect::Started));
        assert!(registers.is_started());
        registers.write(0x16, &[0, 0]);
        assert_eq!(registers.write(0x1c, &[1, 0]), Some(Effect::EnabledOutOfOrder(0)));
        assert_eq!(registers.write(0x14, &[0]), Some(Effect::Reset));
        registers.reset();
        assert!(!registers.is_started() && !registers.queues[1].enabled);
    }

    #[test]
    fn sizes_vectors_and_queues_have_limits() {
        let mut registers = registers();
        assert_eq!(read(&registers, 0x18), 64);
        for size in [0, 3, 128] {
            assert_eq!(registers.write(0x18, &[size, 0]), Some(Effect::Size(0, size.into())));
        }
        assert_eq!(registers.write(0x18, &[16, 0]), None);
        assert_eq!(read(&registers, 0x18), 16);
        registers.write(0x1a, &[3, 0]);
        assert_eq!(read(&registers, 0x1a), NO_VECTOR);
        registers.write(0x10, &[9, 0]);
        assert_eq!(read(&registers, 0x10), NO_VECTOR);
        registers.write(0x16, &[2, 0]);
        assert_eq!((read(&registers, 0x12), read(&registers, 0x18)), (2, 0));
        assert_eq!(registers.write(0x18, &[16, 0]), None);
        assert_eq!(registers.write(0x36, &[1; 8]), None);
        assert_eq!(registers.write(0x38, &[1]), None);
    }

    #[test]
    fn a_device_that_has_failed_says_so_until_its_reset() {
        let mut registers = registers();
        registers.status = NEEDS_RESET | DRIVER_OK;
        registers.write(0x14, &[7]);
        assert_eq!(registers.status, NEEDS_RESET | 7);
    }
}
