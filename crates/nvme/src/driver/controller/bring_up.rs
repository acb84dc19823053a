//! Disable, enable, ask (Base 3.5.1, "Memory-based Controller Initialization").

use super::core::{Control, Core};
use super::{Identity, Namespace};
use crate::driver::clock::Backoff;
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{
    Cc, Command, ControllerData, Csts, NamespaceData, NamespaceList, admin, cns, feature, offset,
};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;

/// What one command carries at most: five PRP list pages reach further than this.
const MAX_TRANSFER: u32 = 8 << 20;
const PAGE_BYTES_32: u32 = 4096;

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    pub(super) fn bring_up(&self) -> Result<(), Error> {
        let mut control = self.control();
        if let Some(admin) = &mut control.admin {
            admin.set_usable(false);
        }
        self.disable()?;
        self.on_disabled(&mut control);
        let Control { admin: Some(admin), .. } = &mut *control else { return Err(Error::NeedsReset) };
        admin.attach(&self.registers);
        self.registers.write32(offset::CC, Cc::ENABLED.0);
        self.wait_ready(true)?;
        admin.set_usable(true);
        let asked = self.ask(&mut control);
        if asked.is_err()
            && let Some(admin) = &mut control.admin
        {
            admin.set_usable(false);
        }
        asked
    }

    /// When this succeeds, the controller makes no access to memory any more.
    pub(super) fn disable(&self) -> Result<(), Error> {
        let csts = self.registers.read32(offset::CSTS);
        if csts == Csts::GONE {
            return Err(Error::Gone);
        }
        self.registers.write32(offset::CC, Cc::DISABLED.0);
        self.wait_ready(false)
    }

    /// Waits until CSTS.RDY is `ready`, at most CAP.TO.
    fn wait_ready(&self, ready: bool) -> Result<(), Error> {
        // TO may be 0 where a controller is quick; one unit is then what it gets.
        let limit = self.cap.timeout_ns().max(500_000_000);
        let start = self.config.clock.now_ns();
        let mut backoff = Backoff::default();
        loop {
            let csts = self.registers.read32(offset::CSTS);
            if csts == Csts::GONE {
                return Err(Error::Gone);
            }
            let csts = Csts::from_bits_retain(csts);
            // While it is being disabled it may still show the failure for which it is reset.
            if ready && csts.contains(Csts::FATAL) {
                return Err(Error::Fatal);
            }
            if csts.contains(Csts::READY) == ready {
                return Ok(());
            }
            if self.config.clock.now_ns().saturating_sub(start) >= limit {
                let wanted = if ready { "ready" } else { "disabled" };
                return Err(Error::NotReady { wanted, limit_ms: limit / 1_000_000 });
            }
            backoff.pause();
        }
    }

    fn ask(&self, control: &mut Control<S>) -> Result<(), Error> {
        let Control { admin: Some(admin), facts, .. } = control else { return Err(Error::NeedsReset) };
        let (registers, cap, config) = (&self.registers, self.cap, &self.config);
        let data: Box<ControllerData> =
            admin.fetch(registers, cap, config, "identify controller", (0, cns::CONTROLLER))?;
        let wanted = u32::from(config.queues.max(1) - 1).min(0xfffe);
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::NUMBER_OF_QUEUES.into()),
            cdw11: U32::new(wanted | wanted << 16),
            ..Command::default()
        };
        let granted = admin.execute(registers, cap, config, "set features: number of queues", command)?;
        let granted = (granted & 0xffff).min(granted >> 16).min(wanted) + 1;
        let list: Box<NamespaceList> =
            admin.fetch(registers, cap, config, "identify active namespaces", (0, cns::ACTIVE_NAMESPACES))?;
        let mut namespaces = Vec::new();
        // More than 1024 namespaces would need further lists; no controller that this driver meets has them.
        for nsid in list.nsids.iter().map(|nsid| nsid.get()).take_while(|nsid| *nsid != 0) {
            let data: Box<NamespaceData> =
                admin.fetch(registers, cap, config, "identify namespace", (nsid, cns::NAMESPACE))?;
            match usable(nsid, &data) {
                Some(namespace) => namespaces.push(namespace),
                None => tracing::warn!(nsid, "left out: blocks are not 512 or 4096 bytes, or carry metadata"),
            }
        }
        let max = config.max_transfer_bytes.clamp(PAGE_BYTES_32, MAX_TRANSFER) & !(PAGE_BYTES_32 - 1);
        facts.identity = identity(&data, cap.mqes(), granted, max, registers.read32(offset::VS));
        facts.namespaces = namespaces.into();
        Ok(())
    }
}

fn usable(nsid: u32, data: &NamespaceData) -> Option<Namespace> {
    let format = data.current_format()?;
    if format.metadata.get() != 0 || !matches!(format.data_shift, 9 | 12) {
        return None;
    }
    Some(Namespace {
        nsid,
        blocks: data.size.get(),
        block_bytes: 1 << format.data_shift,
        discard_zeroes: data.deallocate & 7 == NamespaceData::DEALLOCATE_ZEROES,
    })
}

fn identity(data: &ControllerData, mqes: u16, queues: u32, max_transfer: u32, version: u32) -> Identity {
    let text = |bytes: &[u8]| {
        let printable = |b: &u8| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '?' };
        bytes.iter().map(printable).collect::<String>().trim_end().to_owned()
    };
    let [tertiary, minor, major_low, major_high] = version.to_le_bytes();
    let mdts = match data.mdts {
        0 => u32::MAX,
        shift => PAGE_BYTES_32.saturating_mul(1u32.checked_shl(shift.into()).unwrap_or(0)),
    };
    Identity {
        model: text(&data.model),
        serial: text(&data.serial),
        firmware: text(&data.firmware),
        version: (u16::from_le_bytes([major_low, major_high]), minor, tertiary),
        max_transfer_bytes: max_transfer.min(if mdts == 0 { u32::MAX } else { mdts }),
        max_queue_entries: u32::from(mqes) + 1,
        queues: u16::try_from(queues).unwrap_or(u16::MAX),
        can_discard: data.oncs.get() & ControllerData::ONCS_DATASET_MANAGEMENT != 0,
        volatile_cache: data.vwc & 1 != 0,
    }
}
