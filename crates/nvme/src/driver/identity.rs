//! The identify data of a controller (Base 5.17.2.1).

use crate::spec::{Cap, ControllerData, SglSupport};

/// What a controller reports about itself (Base, "Identify Controller Data Structure").
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Identity {
    /// VID: the PCI vendor identifier.
    pub vendor: u16,
    /// MN: the model number.
    pub model: String,
    /// SN: the serial number.
    pub serial: String,
    /// FR: the firmware revision.
    pub firmware: String,
    /// SUBNQN: the qualified name of the subsystem; may be empty.
    pub subsystem: String,
    /// CNTLID: the controller identifier within the subsystem.
    pub controller_id: u16,
    /// VS: major, minor, tertiary.
    pub version: (u16, u8, u8),
    /// MDTS in bytes: the controller's largest transfer; `None` where it sets no limit.
    pub mdts_bytes: Option<u64>,
    /// The largest transfer of one command: the least of MDTS, the driver's limit of 8 MiB, and
    /// [`Config::max_transfer_bytes`](crate::driver::Config::max_transfer_bytes).
    pub max_transfer_bytes: u32,
    /// CAP.MQES + 1: the largest queue, in entries.
    pub max_queue_entries: u32,
    /// The number of I/O queue pairs that the controller granted.
    pub queues: u16,
    /// NN: the highest valid namespace identifier.
    pub namespaces: u32,
    /// Whether it supports dataset management (ONCS bit 2).
    pub can_discard: bool,
    /// Whether it supports write zeroes (ONCS bit 3).
    pub can_write_zeroes: bool,
    /// Whether it has a volatile write cache (VWC bit 0), so that a flush matters.
    pub volatile_cache: bool,
    /// SGLS: whether I/O commands may use SGLs.
    pub sgls: SglSupport,
}

/// Decodes everything but the number of queues, which is negotiated.
pub(super) fn decode(data: &ControllerData, cap: Cap, max_transfer: u32, version: u32) -> Identity {
    let text = |bytes: &[u8]| {
        let printable =
            |b: &u8| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '?' };
        bytes.iter().map(printable).collect::<String>().trim_end().to_owned()
    };
    let [tertiary, minor, major_low, major_high] = version.to_le_bytes();
    let mdts = match data.mdts {
        0 => None,
        // In units of the smallest page, which is the one in use.
        shift => Some(
            cap.min_page_bytes().checked_shl(shift.into()).filter(|b| *b > 0).unwrap_or(u64::MAX),
        ),
    };
    let most = u32::try_from(mdts.unwrap_or(u64::MAX)).unwrap_or(u32::MAX);
    let subsystem: Vec<u8> = data.subnqn.iter().copied().take_while(|byte| *byte != 0).collect();
    Identity {
        vendor: data.vid.get(),
        model: text(&data.model),
        serial: text(&data.serial),
        firmware: text(&data.firmware),
        subsystem: text(&subsystem),
        controller_id: data.controller_id.get(),
        version: (u16::from_le_bytes([major_low, major_high]), minor, tertiary),
        mdts_bytes: mdts,
        max_transfer_bytes: max_transfer.min(most),
        max_queue_entries: u32::from(cap.mqes()) + 1,
        queues: 0,
        namespaces: data.namespaces.get(),
        can_discard: data.oncs.get() & ControllerData::ONCS_DATASET_MANAGEMENT != 0,
        can_write_zeroes: data.oncs.get() & ControllerData::ONCS_WRITE_ZEROES != 0,
        volatile_cache: data.vwc & 1 != 0,
        sgls: data.sgl_support(),
    }
}
