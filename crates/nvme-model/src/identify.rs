//! Identify data and log pages of the model controller.

use crate::config::{Counters, ModelConfig, Namespace};
use pinfold_nvme::spec::{
    ControllerData, LbaFormat, NamespaceData, NamespaceDescriptors, NamespaceList, SglSupport,
    SmartData,
};
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64, U128};

/// Most ranges of a dataset management command.
pub(crate) const DSM_RANGES: usize = 256;

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = from;
    }
    field
}

/// Identify controller.
pub(crate) fn controller(config: &ModelConfig) -> Box<ControllerData> {
    let mut data = ControllerData::zeroed();
    data.serial = padded("PINFOLD-MODEL-0001");
    data.model = padded("Pinfold model controller");
    data.firmware = padded(env!("CARGO_PKG_VERSION"));
    data.mdts = config.mdts;
    data.controller_id = U16::new(1);
    data.version = U32::new(config.version);
    data.rtd3_entry_us = U32::new(config.rtd3_entry_us);
    data.retry_delays = config.retry_delays.map(U16::new);
    data.oaes = U32::new(ControllerData::OAES_NAMESPACE_ATTRIBUTES);
    (data.acl, data.aerl) = (config.acl, config.aerl);
    (data.sqes, data.cqes) = (0x66, 0x44);
    data.max_commands = U16::new(config.mqes);
    data.namespaces = U32::new(u32::try_from(config.namespaces.len()).unwrap_or(u32::MAX));
    data.oncs =
        U16::new(ControllerData::ONCS_DATASET_MANAGEMENT | ControllerData::ONCS_WRITE_ZEROES);
    data.vwc = config.volatile_cache.into();
    data.sgls = U32::new(match config.sgls {
        SglSupport::Unsupported => 0,
        SglSupport::AnyAlignment => 1,
        SglSupport::DwordAligned => 2,
    });
    for (to, from) in data.subnqn.iter_mut().zip(b"nqn.2026-01.io.pinfold:model") {
        *to = *from;
    }
    data
}

/// Identify namespace.
pub(crate) fn namespace(namespace: &Namespace) -> Box<NamespaceData> {
    let mut data = NamespaceData::zeroed();
    data.size = U64::new(namespace.blocks());
    data.capacity = data.size;
    data.used = data.size;
    data.formats = 1;
    data.format = u8::from(namespace.block_shift() == 12);
    data.deallocate = NamespaceData::DEALLOCATE_ZEROES;
    for (format, shift) in data.lba_formats.iter_mut().zip([9, 12]) {
        *format = LbaFormat { metadata: U16::new(0), data_shift: shift, performance: 0 };
    }
    data
}

/// Namespace identification descriptors: the command set is NVM.
pub(crate) fn descriptors() -> Box<NamespaceDescriptors> {
    let mut list = Box::new(NamespaceDescriptors { bytes: [0; 4096] });
    let [kind, len, ..] = &mut list.bytes;
    (*kind, *len) = (NamespaceDescriptors::COMMAND_SET, 1);
    list
}

/// Returns the active namespaces above `after`, of 1 to `count`.
pub(crate) fn active(after: u32, count: u32) -> Box<NamespaceList> {
    let mut list = Box::new(NamespaceList::new_zeroed());
    for (to, nsid) in list.nsids.iter_mut().zip(after.saturating_add(1)..=count) {
        *to = U32::new(nsid);
    }
    list
}

/// SMART / health information: a healthy model, at room temperature.
pub(crate) fn smart(counters: &Counters) -> Box<SmartData> {
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let count = |counter| U128::new(get(counter).into());
    let units = |bytes: &AtomicU64| U128::new(get(bytes).div_ceil(512_000).into());
    let mut data = SmartData::zeroed();
    data.temperature = U16::new(300);
    (data.available_spare, data.spare_threshold) = (100, 10);
    data.data_units_read = units(&counters.bytes_read);
    data.data_units_written = units(&counters.bytes_written);
    data.host_reads = count(&counters.reads);
    data.host_writes = count(&counters.writes);
    data.power_cycles = U128::new(1);
    data
}
