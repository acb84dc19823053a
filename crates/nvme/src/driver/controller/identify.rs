//! What a controller and its namespaces are (Base 5.17).

use super::core::{Control, Core};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Cap, Command, ControllerData, NamespaceData, NamespaceList, admin, cns};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// What a controller says of itself (Base, "Identify Controller Data Structure").
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Identity {
    /// VID: the PCI vendor.
    pub vendor: u16,
    /// MN.
    pub model: String,
    /// SN.
    pub serial: String,
    /// FR.
    pub firmware: String,
    /// SUBNQN: the subsystem's qualified name; empty where it has none.
    pub subsystem: String,
    /// CNTLID: the controller's number in its subsystem.
    pub controller_id: u16,
    /// VS: major, minor, tertiary.
    pub version: (u16, u8, u8),
    /// MDTS in bytes: the most that the controller moves by one command; `None` where it sets no limit.
    pub mdts_bytes: Option<u64>,
    /// The most bytes in one command: MDTS, the driver's limit and
    /// [`Config::max_transfer_bytes`](crate::driver::Config::max_transfer_bytes), whichever is least.
    pub max_transfer_bytes: u32,
    /// CAP.MQES + 1: the most entries of a queue.
    pub max_queue_entries: u32,
    /// How many I/O queue pairs were granted.
    pub queues: u16,
    /// NN: the highest namespace identifier there may be.
    pub namespaces: u32,
    /// Whether it can discard (ONCS bit 2).
    pub can_discard: bool,
    /// Whether it has a volatile write cache (VWC bit 0), so that a flush matters.
    pub volatile_cache: bool,
}

/// A namespace that this driver can use: blocks of 512 or 4096 bytes without metadata.
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

/// An active namespace, whether this driver can use it or not (NVM, "Identify Namespace Data Structure").
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
}

impl NamespaceInfo {
    fn new(nsid: u32, data: &NamespaceData) -> Self {
        let format = data.current_format();
        Self {
            nsid,
            blocks: data.size.get(),
            capacity_blocks: data.capacity.get(),
            used_blocks: data.used.get(),
            block_bytes: format.map_or(0, |f| 1u64.checked_shl(f.data_shift.into()).unwrap_or(0)),
            metadata_bytes: format.map_or(0, |f| f.metadata.get()),
            discard_zeroes: data.deallocate & 7 == NamespaceData::DEALLOCATE_ZEROES,
        }
    }

    /// The namespace, if this driver can use it.
    pub fn usable(&self) -> Option<Namespace> {
        let Self { nsid, blocks, discard_zeroes, .. } = *self;
        let block_bytes = u32::try_from(self.block_bytes).ok().filter(|bytes| matches!(bytes, 512 | 4096))?;
        (self.metadata_bytes == 0).then_some(Namespace { nsid, blocks, block_bytes, discard_zeroes })
    }
}

/// How many lists of namespaces are looked at: a controller that invents them does not keep the driver for ever.
const LISTS: usize = 64;

/// The identify command; where its data goes is set by who sends it.
pub(super) fn command(nsid: u32, cns: u8) -> Command {
    Command {
        opcode: admin::IDENTIFY,
        nsid: U32::new(nsid),
        cdw10: U32::new(cns.into()),
        ..Command::default()
    }
}

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    /// Sends an admin command that reads a page or less.
    pub(super) fn fetch<T: FromBytes>(
        &self,
        control: &mut Control<S>,
        what: &'static str,
        command: Command,
    ) -> Result<Box<T>, Error> {
        let admin = control.admin.as_mut().ok_or(Error::NeedsReset)?;
        admin.fetch(&self.registers, self.cap, &self.config, what, command)
    }

    /// All active namespaces: lists of up to 1024 identifiers, then each by itself.
    pub(super) fn survey(&self, control: &mut Control<S>) -> Result<Vec<NamespaceInfo>, Error> {
        let mut found = Vec::new();
        let mut after = 0;
        for _ in 0..LISTS {
            let what = "identify active namespaces";
            let list: Box<NamespaceList> =
                self.fetch(control, what, command(after, cns::ACTIVE_NAMESPACES))?;
            let nsids = list.nsids.iter().map(|nsid| nsid.get());
            // Ascending, or it would be asked for the same ones again and again.
            for nsid in nsids.clone().take_while(|nsid| *nsid > after) {
                let data: Box<NamespaceData> =
                    self.fetch(control, "identify namespace", command(nsid, cns::NAMESPACE))?;
                found.push(NamespaceInfo::new(nsid, &data));
            }
            match nsids.max() {
                Some(last) if last > after => after = last,
                _ => break,
            }
        }
        Ok(found)
    }
}

pub(super) fn identity(
    data: &ControllerData,
    cap: Cap,
    queues: u32,
    max_transfer: u32,
    version: u32,
) -> Identity {
    let text = |bytes: &[u8]| {
        let printable = |b: &u8| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '?' };
        bytes.iter().map(printable).collect::<String>().trim_end().to_owned()
    };
    let [tertiary, minor, major_low, major_high] = version.to_le_bytes();
    let mdts = match data.mdts {
        0 => None,
        // In units of the smallest page, which is the one that is used.
        shift => Some(cap.min_page_bytes().checked_shl(shift.into()).filter(|b| *b > 0).unwrap_or(u64::MAX)),
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
        queues: u16::try_from(queues).unwrap_or(u16::MAX),
        namespaces: data.namespaces.get(),
        can_discard: data.oncs.get() & ControllerData::ONCS_DATASET_MANAGEMENT != 0,
        volatile_cache: data.vwc & 1 != 0,
    }
}
