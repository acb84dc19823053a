//! Asynchronous events (Base 5.2), and the health that they report.

use crate::spec::{Cqe, SmartData};
use std::collections::VecDeque;
use std::fmt;
use zerocopy::little_endian::U128;

/// Most event requests outstanding, whatever AERL allows.
const MAX_REQUESTS: usize = 4;
/// Most events kept for a caller that does not collect them.
const MAX_KEPT: usize = 64;
/// Notice 00h: namespace attribute changed.
const NAMESPACE_ATTRIBUTE_CHANGED: u8 = 0;

/// The type of an asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// An error that belongs to no command: an invalid doorbell write, for example.
    Error,
    /// SMART / health status: reliability, temperature, spare.
    Health,
    /// A notice: a namespace changed, firmware is being activated.
    Notice,
    /// Specific to an I/O command set.
    CommandSet,
    /// Vendor specific.
    Vendor,
    /// Another type.
    Other(u8),
}

/// An asynchronous event, as the controller reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The type.
    pub kind: EventKind,
    /// The event within that type.
    pub information: u8,
    /// The log page with details.
    pub log_page: u8,
}

impl Event {
    /// Decodes DW0 of the completion of an event request: type in bits 2:0, information in 15:8,
    /// log page in 23:16.
    fn new(dword: u32) -> Self {
        let [kind, information, log_page, _] = dword.to_le_bytes();
        let kind = match kind & 7 {
            0 => EventKind::Error,
            1 => EventKind::Health,
            2 => EventKind::Notice,
            6 => EventKind::CommandSet,
            7 => EventKind::Vendor,
            other => EventKind::Other(other),
        };
        Self { kind, information, log_page }
    }

    /// Returns whether a namespace was attached, detached, or changed its size or format.
    pub fn is_namespace_change(&self) -> bool {
        (self.kind, self.information) == (EventKind::Notice, NAMESPACE_ATTRIBUTE_CHANGED)
    }
}

/// The events of a controller that have not been collected, and its outstanding event requests.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    limit: usize,
    requested: usize,
    kept: VecDeque<Event>,
    /// Log pages named since they were last read: until then the controller masks their events.
    unread: Vec<u8>,
    /// Whether a namespace changed since the last scan.
    namespaces_changed: bool,
}

impl EventLog {
    /// Resets the requests: a controller that was disabled has none outstanding.
    pub(super) fn restart(&mut self) {
        (self.limit, self.requested, self.namespaces_changed) = (0, 0, false);
        self.unread.clear();
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(MAX_REQUESTS);
    }

    /// Counts one more request, if it may be sent.
    pub(super) fn take_request(&mut self) -> bool {
        let more = self.requested < self.limit;
        self.requested += usize::from(more);
        more
    }

    /// Records the completion of a request; returns the event, and whether an older one was dropped
    /// for it.
    pub(super) fn accept(&mut self, cqe: &Cqe) -> Option<(Event, bool)> {
        self.requested = self.requested.saturating_sub(1);
        if !cqe.status().is_success() {
            // Above the controller's limit, or it has no events: send no more.
            self.limit = self.requested;
            return None;
        }
        let event = Event::new(cqe.result.get());
        self.namespaces_changed |= event.is_namespace_change();
        if !self.unread.contains(&event.log_page) {
            self.unread.push(event.log_page);
        }
        let full = self.kept.len() == MAX_KEPT;
        if full {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
        Some((event, full))
    }

    /// Returns the events since the last call.
    pub(super) fn take(&mut self) -> Vec<Event> {
        self.kept.drain(..).collect()
    }

    /// Returns a log page to be read, so that the controller reports its events again.
    pub(super) fn take_unread(&mut self) -> Option<u8> {
        self.unread.pop()
    }

    /// Returns whether a namespace changed since the last call.
    pub(super) fn take_namespaces_changed(&mut self) -> bool {
        std::mem::take(&mut self.namespaces_changed)
    }

    /// Requests another scan: the last one failed.
    pub(super) fn set_namespaces_changed(&mut self) {
        self.namespaces_changed = true;
    }
}

// The health of a controller (Base 5.16.1.3).

/// SMART / health information of a controller. Counts beyond 64 bits saturate.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Health {
    /// Bit 0: spare is low; 1: too hot or too cold; 2: reliability is degraded; 3: read-only; 4:
    /// the volatile backup failed; 5: a persistent memory region is read-only. 0: no warning.
    pub critical_warning: u8,
    /// The composite temperature in kelvin.
    pub temperature_kelvin: u16,
    /// Remaining spare capacity in per cent.
    pub available_spare_percent: u8,
    /// The spare capacity below which there is a warning.
    pub spare_threshold_percent: u8,
    /// The vendor's estimate of the device life used, in per cent; may exceed 100.
    pub used_percent: u8,
    /// Bytes read by hosts, in steps of 512,000.
    pub bytes_read: u64,
    /// Bytes written by hosts, in steps of 512,000.
    pub bytes_written: u64,
    /// Read commands.
    pub host_reads: u64,
    /// Write commands.
    pub host_writes: u64,
    /// Minutes with a command outstanding.
    pub busy_minutes: u64,
    /// Power cycles.
    pub power_cycles: u64,
    /// Hours powered on.
    pub power_on_hours: u64,
    /// Losses of power without a shutdown.
    pub unsafe_shutdowns: u64,
    /// Unrecovered data integrity errors.
    pub media_errors: u64,
    /// Error log entries over the life of the controller.
    pub error_entries: u64,
    /// Minutes above the warning temperature.
    pub warning_minutes: u32,
    /// Minutes above the critical temperature.
    pub critical_minutes: u32,
    /// The implemented temperature sensors, in kelvin.
    pub sensors_kelvin: Vec<u16>,
}

impl From<&SmartData> for Health {
    fn from(data: &SmartData) -> Self {
        let count = |count: U128| u64::try_from(count.get()).unwrap_or(u64::MAX);
        let units = |units: U128| count(units).saturating_mul(512_000);
        Self {
            critical_warning: data.critical_warning,
            temperature_kelvin: data.temperature.get(),
            available_spare_percent: data.available_spare,
            spare_threshold_percent: data.spare_threshold,
            used_percent: data.percentage_used,
            bytes_read: units(data.data_units_read),
            bytes_written: units(data.data_units_written),
            host_reads: count(data.host_reads),
            host_writes: count(data.host_writes),
            busy_minutes: count(data.busy_minutes),
            power_cycles: count(data.power_cycles),
            power_on_hours: count(data.power_on_hours),
            unsafe_shutdowns: count(data.unsafe_shutdowns),
            media_errors: count(data.media_errors),
            error_entries: count(data.error_entries),
            warning_minutes: data.warning_minutes.get(),
            critical_minutes: data.critical_minutes.get(),
            sensors_kelvin: data
                .sensors
                .iter()
                .map(|kelvin| kelvin.get())
                .filter(|k| *k != 0)
                .collect(),
        }
    }
}

/// Lists the values line by line, as `smart-log` tools do.
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let celsius = i32::from(self.temperature_kelvin) - 273;
        writeln!(f, "critical warning: {:#04x}", self.critical_warning)?;
        writeln!(f, "temperature: {celsius} °C")?;
        writeln!(
            f,
            "available spare: {} % (threshold {} %)",
            self.available_spare_percent, self.spare_threshold_percent
        )?;
        writeln!(f, "used: {} %", self.used_percent)?;
        writeln!(f, "read: {} bytes, {} commands", self.bytes_read, self.host_reads)?;
        writeln!(f, "written: {} bytes, {} commands", self.bytes_written, self.host_writes)?;
        writeln!(f, "power: {} cycles, {} hours", self.power_cycles, self.power_on_hours)?;
        writeln!(f, "unsafe shutdowns: {}", self.unsafe_shutdowns)?;
        write!(f, "media errors: {}, error log entries: {}", self.media_errors, self.error_entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::little_endian::U16;

    #[test]
    fn counts_beyond_64_bits_saturate() {
        let mut data = SmartData::zeroed();
        data.data_units_read = U128::new(u128::MAX);
        data.host_reads = U128::new(7);
        data.sensors[2] = U16::new(310);
        let health = Health::from(&*data);
        assert_eq!((health.bytes_read, health.host_reads), (u64::MAX, 7));
        assert_eq!(health.sensors_kelvin, [310]);
    }
}
