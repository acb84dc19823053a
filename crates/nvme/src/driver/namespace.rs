//! Namespaces as their identify data describes them (Base 5.17.2, NVM 4.1.5), and the controller.

use crate::spec::{Cap, ControllerData, NamespaceData, SglSupport, Status, csi};
use zerocopy::IntoBytes;

/// A namespace that this driver supports: NVM command set, blocks of 512 or 4096 bytes, no
/// metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Namespace {
    /// The namespace identifier.
    pub nsid: u32,
    /// The size in blocks.
    pub blocks: u64,
    /// The size of a block: 512 or 4096 bytes.
    pub block_bytes: u32,
    /// Whether discarded blocks read as zeroes (DLFEAT).
    pub discard_zeroes: bool,
}

impl Namespace {
    /// Returns the size in bytes, at most `u64::MAX`.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes.into())
    }
}

/// Why this driver does not support a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// The identifier is 0 or above NN.
    #[error("invalid namespace identifier: the controller has 1 to {highest} (NN)")]
    Invalid {
        /// NN.
        highest: u32,
    },
    /// It is not attached to the controller, or not allocated.
    #[error("the namespace is not active")]
    Inactive,
    /// An identify command failed.
    #[error("the controller cannot identify the namespace: {0}")]
    Identify(Status),
    /// Its I/O command set is not NVM.
    #[error("unsupported I/O command set: {} (CSI {csi:02x}h)", command_set_name(*.csi))]
    CommandSet {
        /// CSI.
        csi: u8,
    },
    /// FLBAS names a format that does not exist.
    #[error("invalid LBA format: number {index} of {count} (FLBAS, NLBAF)")]
    Format {
        /// The format in use.
        index: u8,
        /// The number of formats.
        count: u16,
    },
    /// The block size is not supported.
    #[error("unsupported block size of 2^{shift} bytes (LBADS): this driver supports 512 and 4096")]
    BlockSize {
        /// LBADS; less than 9 is reserved.
        shift: u8,
    },
    /// End-to-end protection information is enabled.
    #[error("unsupported protection information of type {kind} (DPS)")]
    Protection {
        /// The type.
        kind: u8,
    },
    /// Blocks carry metadata.
    #[error(
        "unsupported metadata of {bytes} bytes per block, {} (MS, FLBAS)",
        if *.interleaved { "interleaved" } else { "in a separate buffer" }
    )]
    Metadata {
        /// Bytes per block.
        bytes: u16,
        /// Whether they are interleaved with the data.
        interleaved: bool,
    },
    /// It has no blocks, or more bytes than 64 bits count.
    #[error(
        "unsupported size of {blocks} blocks (NSZE): this driver supports 1 block to 2^64 bytes"
    )]
    Size {
        /// NSZE.
        blocks: u64,
    },
}

fn command_set_name(csi: u8) -> &'static str {
    match csi {
        csi::KEY_VALUE => "key value",
        csi::ZONED => "zoned",
        _ => "unknown",
    }
}

/// An active namespace, supported or not (NVM, "Identify Namespace Data Structure"). Where the
/// controller cannot identify it, its numbers are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceInfo {
    /// The namespace identifier.
    pub nsid: u32,
    /// NSZE: the size in blocks.
    pub blocks: u64,
    /// NCAP: the number of blocks that may hold data at a time.
    pub capacity_blocks: u64,
    /// NUSE: the number of blocks that hold data.
    pub used_blocks: u64,
    /// The block size in bytes; 0 where FLBAS names a format that does not exist.
    pub block_bytes: u64,
    /// Bytes of metadata per block.
    pub metadata_bytes: u16,
    /// Whether discarded blocks read as zeroes (DLFEAT).
    pub discard_zeroes: bool,
    /// Why this driver does not support it; `None` where it does.
    pub unusable: Option<Unusable>,
}

impl NamespaceInfo {
    pub(super) fn new(nsid: u32, data: &NamespaceData, csi: u8) -> Self {
        let format = data.current_format();
        Self {
            nsid,
            blocks: data.size.get(),
            capacity_blocks: data.capacity.get(),
            used_blocks: data.used.get(),
            block_bytes: format.map_or(0, |f| 1u64.checked_shl(f.data_shift.into()).unwrap_or(0)),
            metadata_bytes: format.map_or(0, |f| f.metadata.get()),
            discard_zeroes: data.deallocate & 7 == NamespaceData::DEALLOCATE_ZEROES,
            unusable: unsupported(data, csi),
        }
    }

    pub(super) fn unidentified(nsid: u32, unusable: Unusable) -> Self {
        Self { unusable: Some(unusable), ..Self::new(nsid, &NamespaceData::zeroed(), csi::NVM) }
    }

    /// Returns the namespace, if this driver supports it.
    pub fn usable(&self) -> Option<Namespace> {
        let Self { nsid, blocks, discard_zeroes, .. } = *self;
        let block_bytes = u32::try_from(self.block_bytes).ok()?;
        self.unusable.is_none().then_some(Namespace { nsid, blocks, block_bytes, discard_zeroes })
    }
}

/// Returns why a namespace with this data is not supported.
fn unsupported(data: &NamespaceData, csi: u8) -> Option<Unusable> {
    if csi != csi::NVM {
        return Some(Unusable::CommandSet { csi });
    }
    if data.as_bytes().iter().all(|byte| *byte == 0) {
        return Some(Unusable::Inactive);
    }
    let Some(format) = data.current_format() else {
        return Some(Unusable::Format {
            index: data.format_index(),
            count: u16::from(data.formats) + 1,
        });
    };
    let blocks = data.size.get();
    match (format.data_shift, format.metadata.get(), data.protection()) {
        (shift, ..) if shift != 9 && shift != 12 => Some(Unusable::BlockSize { shift }),
        (.., kind @ 1..) => Some(Unusable::Protection { kind }),
        (_, bytes @ 1.., _) => {
            Some(Unusable::Metadata { bytes, interleaved: data.is_interleaved() })
        }
        (shift, ..) if blocks == 0 || blocks > u64::MAX >> shift => Some(Unusable::Size { blocks }),
        _ => None,
    }
}

// The identify data of a controller (Base 5.17.2.1).

/// The identity and limits that a controller reports (Base, "Identify Controller Data Structure").
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
pub(super) fn decode_identity(
    data: &ControllerData,
    cap: Cap,
    max_transfer: u32,
    version: u32,
) -> Identity {
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
