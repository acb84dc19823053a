//! Identifying the namespaces of a controller (Base 5.17.2).

use super::state::{Control, Inner};
use crate::driver::config::nanoseconds;
use crate::driver::error::Error;
use crate::driver::namespace::{NamespaceInfo, Unusable};
use crate::registers::Registers;
use crate::spec::{
    Command, NamespaceData, NamespaceDescriptors, NamespaceList, Status, VERSION_1_1, VERSION_1_3,
    cns, csi, offset,
};
use pinfold_core::dma_pool::ChunkSource;

/// Most namespaces identified in one scan, whatever lists and NN say.
const MAX_NAMESPACES: usize = 4096;
/// Most identifiers tried one by one where there is no list.
const MAX_SEQUENTIAL: u32 = 1024;
/// A scan ends after this many times
/// [`Config::admin_timeout`](crate::driver::Config::admin_timeout).
const SCAN_TIMEOUTS: u64 = 4;

impl<R: Registers, S: ChunkSource + Clone> Inner<R, S> {
    /// Returns all active namespaces of a controller with NN = `highest`. One that cannot be
    /// identified is reported as such; an error means that the controller no longer completes admin
    /// commands. Bounded in namespaces and in time.
    pub(in crate::driver) fn scan_namespaces(
        &self,
        control: &mut Control<S>,
        highest: u32,
    ) -> Result<Vec<NamespaceInfo>, Error> {
        let limit_ns = nanoseconds(self.config.admin_timeout).saturating_mul(SCAN_TIMEOUTS);
        let deadline_ns = self.config.clock.now_ns().saturating_add(limit_ns);
        let listed = self.active_namespaces(control)?;
        let is_listed = listed.is_some();
        let nsids = listed.unwrap_or_else(|| (1..=highest.min(MAX_SEQUENTIAL)).collect());
        if !is_listed && highest > MAX_SEQUENTIAL {
            tracing::warn!(
                highest,
                MAX_SEQUENTIAL,
                "no list of active namespaces: not all are tried"
            );
        }
        let mut found = Vec::new();
        for nsid in nsids {
            if self.config.clock.now_ns() > deadline_ns {
                tracing::warn!(
                    nsid,
                    "the namespace scan took too long: the remaining ones are not used"
                );
                break;
            }
            let info = self.identify_namespace(control, nsid)?;
            // Without a list, either sign of an inactive namespace omits it.
            let inactive = match info.unusable {
                Some(Unusable::Identify(status)) => status.code() == Status::INVALID_NAMESPACE,
                unusable => unusable == Some(Unusable::Inactive),
            };
            if is_listed || !inactive {
                found.push(info);
            }
        }
        Ok(found)
    }

    /// Reads the lists of active namespaces, each of up to 1024 identifiers; `None` where the
    /// controller has none. Version 1.0 has one bit of CNS and would read 02h as 00h, so it is not
    /// asked.
    fn active_namespaces(&self, control: &mut Control<S>) -> Result<Option<Vec<u32>>, Error> {
        if self.version() < VERSION_1_1 {
            return Ok(None);
        }
        let mut all = Vec::new();
        let mut after = 0;
        while all.len() < MAX_NAMESPACES {
            let command = Command::identify(after, cns::ACTIVE_NAMESPACES);
            let list: Box<NamespaceList> =
                match self.fetch(control, "identify active namespaces", command) {
                    Err(Error::Admin { .. }) if after == 0 => return Ok(None),
                    other => other?,
                };
            // Identifiers must ascend, or the scan would not end.
            let before = all.len();
            for nsid in list.nsids.iter().map(|nsid| nsid.get()) {
                if nsid <= after || nsid == u32::MAX {
                    break;
                }
                all.push(nsid);
                after = nsid;
            }
            // A list that is not full is the last, and NSIDs from FFFFFFFEh on are not valid in the
            // command.
            if all.len() - before < list.nsids.len() || after >= 0xffff_fffe {
                return Ok(Some(all));
            }
        }
        tracing::warn!(
            MAX_NAMESPACES,
            "the controller lists more namespaces: the remaining ones are not used"
        );
        Ok(Some(all))
    }

    fn identify_namespace(
        &self,
        control: &mut Control<S>,
        nsid: u32,
    ) -> Result<NamespaceInfo, Error> {
        let csi = match self.command_set(control, nsid) {
            Ok(csi) => csi,
            Err(error) => return unidentified(control, nsid, error),
        };
        let command = Command::identify(nsid, cns::NAMESPACE);
        match self.fetch::<NamespaceData>(control, "identify namespace", command) {
            Ok(data) => Ok(NamespaceInfo::new(nsid, &data, csi)),
            Err(Error::Admin { .. }) if csi != csi::NVM => {
                Ok(NamespaceInfo::unidentified(nsid, Unusable::CommandSet { csi }))
            }
            Err(error) => unidentified(control, nsid, error),
        }
    }

    /// Reads CSI. A controller without descriptors has only the NVM command set, unless CAP.CSS
    /// reports others.
    fn command_set(&self, control: &mut Control<S>, nsid: u32) -> Result<u8, Error> {
        if self.version() < VERSION_1_3 {
            return Ok(csi::NVM);
        }
        let command = Command::identify(nsid, cns::DESCRIPTORS);
        match self.fetch::<NamespaceDescriptors>(control, "identify namespace descriptors", command)
        {
            Ok(list) => Ok(list.command_set().unwrap_or(csi::NVM)),
            Err(Error::Admin { .. }) if !self.registers.cap().has_io_command_sets() => Ok(csi::NVM),
            Err(error) => Err(error),
        }
    }

    fn version(&self) -> u32 {
        self.registers.read32(offset::VS)
    }
}

/// Reports a namespace for which an identify command failed, unless the controller no longer
/// completes commands.
fn unidentified<S: ChunkSource + Clone>(
    control: &mut Control<S>,
    nsid: u32,
    error: Error,
) -> Result<NamespaceInfo, Error> {
    let status = match error {
        Error::Admin { status, .. } => status,
        // It was aborted, and the controller continues.
        Error::AdminTimeout { .. } if control.usable_admin().is_ok() => Status::ABORT_REQUESTED,
        error => return Err(error),
    };
    Ok(NamespaceInfo::unidentified(nsid, Unusable::Identify(status)))
}
