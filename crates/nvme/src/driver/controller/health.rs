//! How a controller is (Base 5.16.1.3).

use super::core::Core;
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Command, SmartData, admin, log_page};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::{U32, U128};

/// SMART / health information of a controller. Counts beyond 64 bits read as the largest that 64 bits hold.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Health {
    /// Bit 0: spare is low; 1: too hot or too cold; 2: reliability is degraded; 3: read-only; 4: the volatile backup
    /// failed; 5: a persistent memory region is read-only. 0 is well.
    pub critical_warning: u8,
    /// The composite temperature in kelvin.
    pub temperature_kelvin: u16,
    /// What is left of the spare, per cent.
    pub available_spare_percent: u8,
    /// Below this there is a warning.
    pub spare_threshold_percent: u8,
    /// How much of the device's life is used up by the vendor's estimate, per cent; may be more than 100.
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
    /// How often it was powered up.
    pub power_cycles: u64,
    /// For how many hours it was.
    pub power_on_hours: u64,
    /// How often power was lost without a shutdown.
    pub unsafe_shutdowns: u64,
    /// How often data was found not to be whole.
    pub media_errors: u64,
    /// Entries of the error log over its life.
    pub error_entries: u64,
    /// Minutes above the warning temperature.
    pub warning_minutes: u32,
    /// Minutes above the critical temperature.
    pub critical_minutes: u32,
    /// What the sensors that there are say, in kelvin.
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
            sensors_kelvin: data.sensors.iter().map(|kelvin| kelvin.get()).filter(|k| *k != 0).collect(),
        }
    }
}

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    pub(super) fn health(&self) -> Result<Health, Error> {
        // All namespaces: every controller has the log page of itself.
        let command = Command {
            opcode: admin::GET_LOG_PAGE,
            nsid: U32::new(u32::MAX),
            cdw10: U32::new(log_page::cdw10(log_page::SMART, SmartData::BYTES_32)),
            ..Command::default()
        };
        let data: Box<SmartData> = self.fetch(&mut self.control(), "get log page: SMART", command)?;
        Ok(Health::from(&*data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::little_endian::U16;

    #[test]
    fn what_does_not_fit_is_the_largest_that_does() {
        let mut data = SmartData::zeroed();
        data.data_units_read = U128::new(u128::MAX);
        data.host_reads = U128::new(7);
        data.sensors[2] = U16::new(310);
        let health = Health::from(&*data);
        assert_eq!((health.bytes_read, health.host_reads), (u64::MAX, 7));
        assert_eq!(health.sensors_kelvin, [310]);
    }
}
