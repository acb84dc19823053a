//! Enabling and identifying a controller (Base 3.5.1, "Memory-based Controller Initialization").

use super::state::{Control, ControllerInfo, Inner};
use crate::driver::clock::RetryDelays;
use crate::driver::config::nanoseconds;
use crate::driver::enable::{EnableControl, ReadyWait};
use crate::driver::error::Error;
use crate::driver::event::{Event, Health};
use crate::driver::namespace::{self, Identity, NamespaceInfo, Unusable};
use crate::registers::Registers;
use crate::spec::{
    Command, ControllerData, Cqe, NamespaceData, NamespaceDescriptors, NamespaceList, PAGE_BYTES,
    SmartData, Status, VERSION_1_1, VERSION_1_3, admin, cns, csi, feature, log_page, offset,
};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// The largest transfer of one command: five PRP list pages reach further.
const MAX_TRANSFER: u32 = 8 << 20;
const PAGE_BYTES_32: u32 = 4096;

impl<R: Registers, S: ChunkSource + Clone> Inner<R, S> {
    /// Disables and enables the controller and identifies it.
    pub(in crate::driver) fn start(&self) -> Result<(), Error> {
        let mut control = self.control();
        self.stop(&mut control, ReadyWait::Reported)?;
        let _transition = self.shared.begin_transition();
        control.admin.as_mut().ok_or(Error::NeedsReset)?.attach(&*self.registers);
        control.attached = true;
        let enabled = self.enable_control().enable();
        control.unresponsive = matches!(enabled, Err(Error::NotReady { .. }));
        enabled?;
        control.set_usable(true);
        self.identify(&mut control).inspect_err(|_| control.set_usable(false))
    }

    pub(in crate::driver) fn shut_down(&self) -> Result<(), Error> {
        let mut control = self.control();
        self.notify_shutdown(&control);
        self.stop(&mut control, ReadyWait::Reported)
    }

    /// Notifies a working controller of the shutdown. Its response does not affect what follows.
    pub(super) fn notify_shutdown(&self, control: &Control<S>) {
        if !control.attached || control.unresponsive {
            return;
        }
        let _transition = self.shared.begin_transition();
        if !self.enable_control().shut_down(control.info.rtd3_entry_us) {
            tracing::warn!("the controller did not complete its shutdown (CSTS.SHST)");
        }
    }

    /// Disables the controller. After success it makes no more accesses to memory, and what waited
    /// for that has been released.
    pub(super) fn stop(&self, control: &mut Control<S>, wait: ReadyWait) -> Result<(), Error> {
        let _transition = self.shared.begin_transition();
        control.set_usable(false);
        let stopped = self.enable_control().disable(wait);
        control.unresponsive = matches!(stopped, Err(Error::NotReady { .. }));
        stopped?;
        self.on_disabled(control);
        Ok(())
    }

    fn enable_control(&self) -> EnableControl<'_, R> {
        EnableControl::new(&self.registers, &*self.config.clock)
    }

    fn identify(&self, control: &mut Control<S>) -> Result<(), Error> {
        let command = Command::identify(0, cns::CONTROLLER);
        let data: Box<ControllerData> = self.fetch(control, "identify controller", command)?;
        if !data.supports_entries(Command::BYTES, Cqe::BYTES) {
            return Err(Error::EntrySize { sqes: data.sqes, cqes: data.cqes });
        }
        let delays = RetryDelays::new(&data);
        self.enable_retry_delays(control, delays)?;
        self.enable_events(control, &data)?;
        let queues = self.request_queues(control)?;
        let found = self.scan_namespaces(control, data.namespaces.get())?;
        let max = self.config.max_transfer_bytes.clamp(PAGE_BYTES_32, MAX_TRANSFER)
            & !(PAGE_BYTES_32 - 1);
        let version = self.registers.read32(offset::VS);
        let info = &mut control.info;
        info.identity = Identity {
            queues,
            ..namespace::decode_identity(&data, self.registers.cap(), max, version)
        };
        info.set_namespaces(found);
        self.shared.namespaces_scanned();
        info.retry_delays = delays;
        info.rtd3_entry_us = data.rtd3_entry_us.get();
        Ok(())
    }

    /// Tells a controller with retry delays that the driver waits for them (ACRE; Base, "Host
    /// Behavior Support"). One that rejects the feature reports no CRD.
    fn enable_retry_delays(
        &self,
        control: &mut Control<S>,
        delays: RetryDelays,
    ) -> Result<(), Error> {
        control.usable_admin()?.set_retry_delays(delays);
        if !delays.any() {
            return Ok(());
        }
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::HOST_BEHAVIOR.into()),
            ..Command::default()
        };
        match self.send_data(
            control,
            "set features: host behavior",
            command,
            &[feature::ADVANCED_RETRY],
        ) {
            Ok(_) | Err(Error::Admin { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Requests I/O queue pairs; returns how many the controller granted (Base 5.27.1.5; all counts
    /// 0-based).
    fn request_queues(&self, control: &mut Control<S>) -> Result<u16, Error> {
        let limit = self.registers.max_queue_id();
        let wanted = u32::from(self.config.queues.clamp(1, limit.max(1)) - 1).min(0xfffe);
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::NUMBER_OF_QUEUES.into()),
            cdw11: U32::new(wanted | wanted << 16),
            ..Command::default()
        };
        let granted = self.execute(control, "set features: number of queues", command)?;
        let granted = (granted & 0xffff).min(granted >> 16).min(wanted) + 1;
        Ok(u16::try_from(granted).unwrap_or(u16::MAX))
    }
}

const _: () = assert!(PAGE_BYTES == PAGE_BYTES_32 as usize);

// Identifying the namespaces of a controller (Base 5.17.2).

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
        // At most 4 lists: one that is not full is the last.
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

// Asynchronous events (Base 5.2), and the admin commands that they cause.

impl<R: Registers, S: ChunkSource + Clone> Inner<R, S> {
    /// Enables the events that the driver handles: all of health, and of namespaces where the
    /// controller has them (Base 5.27.1.8). A controller that rejects the feature chooses what it
    /// reports.
    pub(super) fn enable_events(
        &self,
        control: &mut Control<S>,
        data: &ControllerData,
    ) -> Result<(), Error> {
        let wanted =
            feature::HEALTH_EVENTS | data.oaes.get() & ControllerData::OAES_NAMESPACE_ATTRIBUTES;
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::ASYNC_EVENTS.into()),
            cdw11: U32::new(wanted),
            ..Command::default()
        };
        match self.execute(control, "set features: asynchronous events", command) {
            Ok(_) | Err(Error::Admin { .. }) => {}
            Err(error) => return Err(error),
        }
        control.usable_admin()?.set_limits(&self.registers, data);
        Ok(())
    }

    /// Processes admin completions, unless another thread holds the control lock. Never waits.
    pub(in crate::driver) fn poll_admin(&self) {
        if let Some(mut control) = self.try_control()
            && let Ok(admin) = control.usable_admin()
        {
            admin.poll(&self.registers);
        }
    }

    /// Handles and returns the events since the last call.
    pub(in crate::driver) fn take_events(&self) -> Result<Vec<Event>, Error> {
        let mut control = self.control();
        self.handle_events(&mut control)?;
        Ok(control.usable_admin()?.events.take())
    }

    /// Reads the log pages that events named, so that the controller reports such events again, and
    /// scans the namespaces if one changed.
    fn handle_events(&self, control: &mut Control<S>) -> Result<(), Error> {
        control.usable_admin()?.poll(&self.registers);
        // A controller may name page after page, and take long for each: the rest is read by the
        // next call.
        let limit_ns = nanoseconds(self.config.admin_timeout);
        let deadline_ns = self.config.clock.now_ns().saturating_add(limit_ns);
        while self.config.clock.now_ns() < deadline_ns {
            let Some(page) = control.usable_admin()?.events.take_unread() else { break };
            let read = if page == log_page::CHANGED_NAMESPACES {
                self.log_page::<NamespaceList>(control, "get log page: events", page).map(drop)
            } else {
                self.log_page::<SmartData>(control, "get log page: events", page).map(drop)
            };
            match read {
                Ok(()) | Err(Error::Admin { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if !control.usable_admin()?.events.take_namespaces_changed() {
            return Ok(());
        }
        let highest = control.info.identity.namespaces;
        match self.scan_namespaces(control, highest) {
            Ok(found) => {
                control.info.set_namespaces(found);
                self.shared.namespaces_scanned();
                Ok(())
            }
            Err(error) => {
                if let Some(admin) = &mut control.admin {
                    admin.events.set_namespaces_changed();
                }
                Err(error)
            }
        }
    }

    /// Returns the current namespaces, scanned again if one changed, and their version.
    pub(in crate::driver) fn current_namespaces(&self) -> Result<(ControllerInfo, u64), Error> {
        let mut control = self.control();
        self.handle_events(&mut control)?;
        Ok((control.info.clone(), self.shared.namespace_version() & !1))
    }

    /// Reads the SMART / health log page of the controller (Base 5.16.1.3).
    pub(in crate::driver) fn health(&self) -> Result<Health, Error> {
        let data = self.log_page::<SmartData>(
            &mut self.control(),
            "get log page: SMART",
            log_page::SMART,
        )?;
        Ok(Health::from(&*data))
    }

    /// Reads the first `size_of::<T>()` bytes of a log page of the controller.
    fn log_page<T: FromBytes + IntoBytes>(
        &self,
        control: &mut Control<S>,
        what: &'static str,
        page: u8,
    ) -> Result<Box<T>, Error> {
        let bytes = u32::try_from(size_of::<T>()).unwrap_or(u32::MAX);
        let command = Command {
            opcode: admin::GET_LOG_PAGE,
            nsid: U32::new(u32::MAX),
            cdw10: U32::new(log_page::cdw10(page, bytes)),
            ..Command::default()
        };
        self.fetch(control, what, command)
    }
}
