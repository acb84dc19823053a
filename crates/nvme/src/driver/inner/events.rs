//! Asynchronous events (Base 5.2), and the admin commands that they cause.

use super::state::{Control, ControllerInfo, Inner};
use crate::driver::error::Error;
use crate::driver::event::Event;
use crate::driver::health::Health;
use crate::registers::Registers;
use crate::spec::{Command, ControllerData, NamespaceList, SmartData, admin, feature, log_page};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

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
        // There are 256 pages; this bounds the loop against a controller that names them again and
        // again.
        for _ in 0..=u8::MAX {
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
