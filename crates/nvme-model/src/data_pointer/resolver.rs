//! The data pointer of a command, PRPs or SGL.

use crate::bus::Bus;
use crate::data_pointer::runs::{Run, Runs};
use crate::data_pointer::{prp, sgl};
use pinfold_nvme::spec::{Command, PAGE_BYTES, SglSupport, Status};

/// Resolves data pointers; keeps its memory from one command to the next.
#[derive(Debug)]
pub(crate) struct Resolver {
    sgls: SglSupport,
    runs: Runs,
    page: Box<[u8; PAGE_BYTES]>,
}

impl Resolver {
    pub(crate) fn new(sgls: SglSupport) -> Self {
        Self { sgls, runs: Runs::default(), page: Box::new([0; PAGE_BYTES]) }
    }

    /// Returns the first run of the last command.
    pub(crate) fn first(&self) -> Option<&Run> {
        self.runs.first()
    }

    /// Returns the runs of the `len` bytes of data of `command`.
    pub(crate) fn resolve(
        &mut self,
        bus: &impl Bus,
        command: &Command,
        len: usize,
    ) -> Result<&[Run], Status> {
        self.runs.clear();
        let (page, runs) = (&mut *self.page, &mut self.runs);
        let align = match self.sgls {
            SglSupport::Unsupported => None,
            SglSupport::AnyAlignment => Some(1),
            SglSupport::DwordAligned => Some(4),
        };
        match (command.flags, align) {
            (0, _) => {
                let prps = [command.prp1.get(), command.prp2.get()];
                prp::resolve(bus, prps, len, page, runs)?;
            }
            (Command::PSDT_SGL, Some(align)) => {
                sgl::resolve(bus, command.sgl1(), len, align, page, runs)?
            }
            _ => return Err(Status::INVALID_FIELD.do_not_retry()),
        }
        Ok(&self.runs)
    }
}
