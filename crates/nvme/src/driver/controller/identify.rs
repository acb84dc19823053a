//! What a controller is (Base 5.17).

use super::core::{Control, Core};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Cap, Command, ControllerData, admin};
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
