//! The namespaces of a controller, those that this driver cannot use too (Base 5.17.2, NVM 4.1.5).

use super::core::{Control, Core};
use super::identify::command;
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{
    NamespaceData, NamespaceDescriptors, NamespaceList, Status, VERSION_1_1, VERSION_1_3, cns, csi, offset,
};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::IntoBytes;

/// A namespace that this driver can use: blocks of 512 or 4096 bytes of the NVM command set, without metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Namespace {
    /// Its identifier.
    pub nsid: u32,
    /// Its size in blocks.
    pub blocks: u64,
    /// The size of a block: 512 or 4096 bytes.
    pub block_bytes: u32,
    /// Whether blocks that were discarded read as zeroes (DLFEAT).
    pub discard_zeroes: bool,
}

impl Namespace {
    /// Its size in bytes; `u64::MAX` where it is more than that.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes.into())
    }
}

/// Why this driver cannot use a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// The identifier is 0 or above NN.
    #[error("its identifier is not valid: the controller has 1 to {highest} (NN)")]
    Invalid {
        /// NN.
        highest: u32,
    },
    /// It is not attached to the controller, or not allocated.
    #[error("it is not active")]
    Inactive,
    /// Identify failed for it.
    #[error("the controller cannot identify it: {0}")]
    Identify(Status),
    /// It belongs to another I/O command set.
    #[error("its I/O command set is {}, not NVM (CSI {csi:02x}h)", command_set_name(*.csi))]
    CommandSet {
        /// CSI.
        csi: u8,
    },
    /// FLBAS names a format that there is not.
    #[error("its LBA format is number {index}, and it has {count} (FLBAS, NLBAF)")]
    Format {
        /// The format in use.
        index: u8,
        /// How many there are.
        count: u16,
    },
    /// Blocks of another size.
    #[error("its blocks have 2^{shift} bytes (LBADS): this driver works with 512 and 4096")]
    BlockSize {
        /// LBADS; less than 9 is reserved.
        shift: u8,
    },
    /// End-to-end protection information is enabled.
    #[error("its blocks carry protection information of type {kind} (DPS)")]
    Protection {
        /// The type.
        kind: u8,
    },
    /// Blocks carry metadata.
    #[error(
        "its blocks carry {bytes} bytes of metadata, {} (MS, FLBAS)",
        if *.interleaved { "interleaved" } else { "in a separate buffer" }
    )]
    Metadata {
        /// How many bytes a block.
        bytes: u16,
        /// Whether they are interleaved with the data.
        interleaved: bool,
    },
    /// It has no blocks, or more bytes than 64 bits count.
    #[error("its size is {blocks} blocks (NSZE): this driver works with 1 block to 2^64 bytes")]
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

/// An active namespace, whether this driver can use it or not (NVM, "Identify Namespace Data Structure"). Where the
/// controller cannot identify it, its numbers are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceInfo {
    /// Its identifier.
    pub nsid: u32,
    /// NSZE: its size in blocks.
    pub blocks: u64,
    /// NCAP: how many of them may hold data at a time.
    pub capacity_blocks: u64,
    /// NUSE: how many of them do.
    pub used_blocks: u64,
    /// The size of a block in bytes; 0 where FLBAS names no format that there is.
    pub block_bytes: u64,
    /// How many bytes of metadata a block has.
    pub metadata_bytes: u16,
    /// Whether blocks that were discarded read as zeroes (DLFEAT).
    pub discard_zeroes: bool,
    /// Why this driver cannot use it; `None` where it can.
    pub unusable: Option<Unusable>,
}

impl NamespaceInfo {
    fn new(nsid: u32, data: &NamespaceData, csi: u8) -> Self {
        let format = data.current_format();
        Self {
            nsid,
            blocks: data.size.get(),
            capacity_blocks: data.capacity.get(),
            used_blocks: data.used.get(),
            block_bytes: format.map_or(0, |f| 1u64.checked_shl(f.data_shift.into()).unwrap_or(0)),
            metadata_bytes: format.map_or(0, |f| f.metadata.get()),
            discard_zeroes: data.deallocate & 7 == NamespaceData::DEALLOCATE_ZEROES,
            unusable: objection(data, csi),
        }
    }

    fn unidentified(nsid: u32, unusable: Unusable) -> Self {
        Self { unusable: Some(unusable), ..Self::new(nsid, &NamespaceData::zeroed(), csi::NVM) }
    }

    /// The namespace, if this driver can use it.
    pub fn usable(&self) -> Option<Namespace> {
        let Self { nsid, blocks, discard_zeroes, .. } = *self;
        let block_bytes = u32::try_from(self.block_bytes).ok()?;
        self.unusable.is_none().then_some(Namespace { nsid, blocks, block_bytes, discard_zeroes })
    }
}

/// Why a namespace with this data cannot be used.
fn objection(data: &NamespaceData, csi: u8) -> Option<Unusable> {
    if csi != csi::NVM {
        return Some(Unusable::CommandSet { csi });
    }
    if data.as_bytes().iter().all(|byte| *byte == 0) {
        return Some(Unusable::Inactive);
    }
    let Some(format) = data.current_format() else {
        return Some(Unusable::Format { index: data.format_index(), count: u16::from(data.formats) + 1 });
    };
    let blocks = data.size.get();
    match (format.data_shift, format.metadata.get(), data.protection()) {
        (shift, ..) if shift != 9 && shift != 12 => Some(Unusable::BlockSize { shift }),
        (.., kind @ 1..) => Some(Unusable::Protection { kind }),
        (_, bytes @ 1.., _) => Some(Unusable::Metadata { bytes, interleaved: data.is_interleaved() }),
        (shift, ..) if blocks == 0 || blocks > u64::MAX >> shift => Some(Unusable::Size { blocks }),
        _ => None,
    }
}

/// How many lists of namespaces are looked at: a controller that invents them does not keep the driver for ever.
const LISTS: usize = 64;
/// How many identifiers are tried one by one where there is no list, whatever NN says.
const SEQUENTIAL: u32 = 1024;

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    /// All active namespaces of a controller with NN = `highest`. One that cannot be identified is reported as such;
    /// an error means that the controller answers no admin commands any more.
    pub(super) fn survey(&self, control: &mut Control<S>, highest: u32) -> Result<Vec<NamespaceInfo>, Error> {
        let mut found = Vec::new();
        let Some(listed) = self.active(control)? else {
            if highest > SEQUENTIAL {
                tracing::warn!(highest, SEQUENTIAL, "no list of active namespaces: not all are tried");
            }
            for nsid in 1..=highest.min(SEQUENTIAL) {
                let info = self.identify_namespace(control, nsid)?;
                // What is not active is not part of the survey, by either sign of it.
                let absent = match info.unusable {
                    Some(Unusable::Identify(status)) => status.code() == Status::INVALID_NAMESPACE,
                    unusable => unusable == Some(Unusable::Inactive),
                };
                if !absent {
                    found.push(info);
                }
            }
            return Ok(found);
        };
        for nsid in listed {
            found.push(self.identify_namespace(control, nsid)?);
        }
        Ok(found)
    }

    /// The lists of active namespaces, each of up to 1024 identifiers; `None` where the controller has none. Version
    /// 1.0 has one bit of CNS and would take 02h for 00h, so it is not asked.
    fn active(&self, control: &mut Control<S>) -> Result<Option<Vec<u32>>, Error> {
        if self.version() < VERSION_1_1 {
            return Ok(None);
        }
        let mut all = Vec::new();
        let mut after = 0;
        for _ in 0..LISTS {
            let what = "identify active namespaces";
            let list: Box<NamespaceList> =
                match self.fetch(control, what, command(after, cns::ACTIVE_NAMESPACES)) {
                    Err(Error::Admin { .. }) if after == 0 => return Ok(None),
                    other => other?,
                };
            // Ascending, or it would be asked for the same ones again and again.
            let before = all.len();
            for nsid in list.nsids.iter().map(|nsid| nsid.get()) {
                if nsid <= after || nsid == u32::MAX {
                    break;
                }
                all.push(nsid);
                after = nsid;
            }
            // A list that is not full is the last, and NSIDs from FFFFFFFEh on may not be asked for.
            if all.len() - before < list.nsids.len() || after >= 0xffff_fffe {
                break;
            }
        }
        Ok(Some(all))
    }

    fn identify_namespace(&self, control: &mut Control<S>, nsid: u32) -> Result<NamespaceInfo, Error> {
        let csi = match self.command_set(control, nsid) {
            Ok(csi) => csi,
            Err(error) => return unidentified(control, nsid, error),
        };
        match self.fetch::<NamespaceData>(control, "identify namespace", command(nsid, cns::NAMESPACE)) {
            Ok(data) => Ok(NamespaceInfo::new(nsid, &data, csi)),
            Err(Error::Admin { .. }) if csi != csi::NVM => {
                Ok(NamespaceInfo::unidentified(nsid, Unusable::CommandSet { csi }))
            }
            Err(error) => unidentified(control, nsid, error),
        }
    }

    /// CSI. A controller without descriptors has the NVM command set alone, unless CAP.CSS says that there are others.
    fn command_set(&self, control: &mut Control<S>, nsid: u32) -> Result<u8, Error> {
        if self.version() < VERSION_1_3 {
            return Ok(csi::NVM);
        }
        let what = "identify namespace descriptors";
        match self.fetch::<NamespaceDescriptors>(control, what, command(nsid, cns::DESCRIPTORS)) {
            Ok(list) => Ok(list.command_set().unwrap_or(csi::NVM)),
            Err(Error::Admin { .. }) if !self.cap.has_io_command_sets() => Ok(csi::NVM),
            Err(error) => Err(error),
        }
    }

    fn version(&self) -> u32 {
        self.registers.read32(offset::VS)
    }
}

/// A namespace for which an identify command failed, unless the controller takes no commands any more.
fn unidentified<S: ChunkSource + Clone>(
    control: &Control<S>,
    nsid: u32,
    error: Error,
) -> Result<NamespaceInfo, Error> {
    let status = match error {
        Error::Admin { status, .. } => status,
        // It was aborted: the controller goes on.
        Error::AdminTimeout { .. } if control.is_usable() => Status::ABORT_REQUESTED,
        error => return Err(error),
    };
    Ok(NamespaceInfo::unidentified(nsid, Unusable::Identify(status)))
}
