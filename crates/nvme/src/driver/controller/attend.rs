//! What the controller says unasked: asynchronous events (Base 5.2).

use super::core::{Control, Core, Facts};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Command, ControllerData, admin, feature, log_page};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    /// Requests the events that the driver knows something to do about: all of health, and of namespaces where the
    /// controller has them (Base 5.27.1.8). A controller that does not take the feature reports what it likes.
    pub(super) fn request_events(
        &self,
        control: &mut Control<S>,
        data: &ControllerData,
    ) -> Result<(), Error> {
        let wanted = feature::HEALTH_EVENTS | data.oaes.get() & ControllerData::OAES_NAMESPACE_ATTRIBUTES;
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
        let admin = control.admin.as_mut().ok_or(Error::NeedsReset)?;
        admin.set_limits(&self.registers, self.cap, data);
        Ok(())
    }

    /// Takes admin completions that have come, unless another thread has the admin queue. It never waits.
    pub(in crate::driver) fn look(&self) {
        if let Some(mut control) = self.try_control()
            && let Some(admin) = control.admin.as_mut().filter(|admin| admin.is_usable())
        {
            admin.reap(&self.registers, self.cap);
        }
    }

    /// Reads the log pages that events named, so that the controller reports such events again, and identifies the
    /// namespaces again if one changed.
    pub(super) fn attend(&self, control: &mut Control<S>) -> Result<(), Error> {
        let admin = control.admin.as_mut().filter(|admin| admin.is_usable()).ok_or(Error::NeedsReset)?;
        admin.reap(&self.registers, self.cap);
        // There are 256 pages, and a controller that names them again and again does not keep the caller.
        for _ in 0..=u8::MAX {
            let Some(page) = control.admin.as_mut().and_then(|admin| admin.events.take_unread()) else {
                break;
            };
            let bytes = if page == log_page::CHANGED_NAMESPACES { 4096 } else { 512 };
            let command = Command {
                opcode: admin::GET_LOG_PAGE,
                nsid: U32::new(u32::MAX),
                cdw10: U32::new(log_page::cdw10(page, bytes)),
                ..Command::default()
            };
            match self.fetch::<u8>(control, "get log page: events", command) {
                Ok(_) | Err(Error::Admin { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let changed = control.admin.as_mut().is_some_and(|admin| admin.events.take_namespaces_changed());
        if !changed {
            return Ok(());
        }
        let highest = control.facts.identity.namespaces;
        match self.survey(control, highest) {
            Ok(found) => {
                control.facts.set_namespaces(found);
                self.life.namespaces_identified();
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

    /// What is known of the namespaces, identified again if one changed, and the number that goes with it.
    pub(in crate::driver) fn namespaces_now(&self) -> Result<(Facts, u64), Error> {
        let mut control = self.control();
        self.attend(&mut control)?;
        Ok((control.facts.clone(), self.life.namespaces() & !1))
    }
}
