//! I/O commands (NVM 3.2).

use super::run::Engine;
use crate::bus::Bus;
use crate::config::{Counters, Namespace};
use crate::identify::DSM_RANGES;
use crate::media::MediaError;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, DsmRange, Status, nvm};
use zerocopy::FromBytes;

/// A byte range of a medium.
struct Extent {
    at: u64,
    len: u64,
}

impl<B: Bus> Engine<B> {
    pub(super) fn execute_io(&mut self, command: &Command) -> Status {
        // No fused commands, and no metadata SGLs.
        let result = if command.flags & !Command::PSDT_SGL != 0 {
            Err(Status::INVALID_FIELD.do_not_retry())
        } else {
            match command.opcode {
                nvm::READ => self.read(command),
                nvm::WRITE => self.write(command),
                nvm::FLUSH => self.flush(command),
                nvm::WRITE_ZEROES => self.write_zeroes(command),
                nvm::DATASET_MANAGEMENT => self.dataset_management(command),
                _ => Err(Status::INVALID_OPCODE.do_not_retry()),
            }
        };
        result.err().unwrap_or(Status::SUCCESS)
    }

    /// Returns the largest transfer in bytes; `u64::MAX` where MDTS is 0.
    fn transfer_limit(&self) -> u64 {
        match self.config.mdts {
            0 => u64::MAX,
            shift => (self.config.page_size() as u64).checked_shl(shift.into()).unwrap_or(u64::MAX),
        }
    }

    fn extent(&self, command: &Command) -> Result<(Extent, usize), Status> {
        let namespace = find(&self.config.namespaces, command.nsid.get())?;
        let extent = within(namespace, command.slba(), command.blocks())?;
        if extent.len > self.transfer_limit() {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let len = usize::try_from(extent.len).map_err(|_| Status::INVALID_FIELD.do_not_retry())?;
        Ok((extent, len))
    }

    fn read(&mut self, command: &Command) -> Result<(), Status> {
        let (extent, len) = self.extent(command)?;
        let media = &find(&self.config.namespaces, command.nsid.get())?.media;
        let mut at = extent.at;
        for run in self.resolver.resolve(&self.bus, command, len)? {
            let mut to = run.iova.raw();
            media
                .read(at, run.len, &mut |bytes| {
                    self.bus.write(Iova::new(to), bytes)?;
                    to = to.wrapping_add(bytes.len() as u64);
                    Ok(())
                })
                .map_err(|error| status_of(&error, Status::UNRECOVERED_READ_ERROR))?;
            at += run.len as u64;
        }
        Counters::add(&self.counters.reads, 1);
        Counters::add(&self.counters.bytes_read, extent.len);
        Ok(())
    }

    fn write(&mut self, command: &Command) -> Result<(), Status> {
        let (extent, len) = self.extent(command)?;
        let media = &find(&self.config.namespaces, command.nsid.get())?.media;
        let mut at = extent.at;
        for run in self.resolver.resolve(&self.bus, command, len)? {
            let mut from = run.iova.raw();
            media
                .write(at, run.len, &mut |bytes| {
                    self.bus.read(Iova::new(from), bytes)?;
                    from = from.wrapping_add(bytes.len() as u64);
                    Ok(())
                })
                .map_err(|error| status_of(&error, Status::WRITE_FAULT))?;
            at += run.len as u64;
        }
        Counters::add(&self.counters.writes, 1);
        Counters::add(&self.counters.bytes_written, extent.len);
        Ok(())
    }

    fn flush(&mut self, command: &Command) -> Result<(), Status> {
        let all = command.nsid.get() == u32::MAX;
        if !all {
            find(&self.config.namespaces, command.nsid.get())?;
        }
        for (nsid, namespace) in (1..).zip(&self.config.namespaces) {
            if all || nsid == command.nsid.get() {
                // Another flush cannot bring back what this one has lost.
                let lost = |error| status_of(&error, Status::WRITE_FAULT).do_not_retry();
                namespace.media.flush().map_err(lost)?;
            }
        }
        Ok(())
    }

    /// Discards the blocks, whether DEAC allows it or not: they read as zeroes.
    fn write_zeroes(&mut self, command: &Command) -> Result<(), Status> {
        let (extent, _) = self.extent(command)?;
        let media = &find(&self.config.namespaces, command.nsid.get())?.media;
        media
            .discard(extent.at, extent.len)
            .map_err(|error| status_of(&error, Status::WRITE_FAULT))?;
        Counters::add(&self.counters.writes, 1);
        Ok(())
    }

    fn dataset_management(&mut self, command: &Command) -> Result<(), Status> {
        let namespace = find(&self.config.namespaces, command.nsid.get())?;
        let count = usize::try_from(command.cdw10.get() & 0xff).unwrap_or(0) + 1;
        let mut ranges = [DsmRange::default(); DSM_RANGES];
        let mut bytes = [0; DSM_RANGES * size_of::<DsmRange>()];
        let mut at = 0;
        let len = count * size_of::<DsmRange>();
        for run in self.resolver.resolve(&self.bus, command, len)? {
            let part = bytes.get_mut(at..at + run.len).ok_or(Status::INTERNAL_ERROR)?;
            self.bus.read(run.iova, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            at += run.len;
        }
        for (range, from) in
            ranges.iter_mut().zip(bytes.chunks_exact(size_of::<DsmRange>())).take(count)
        {
            *range = DsmRange::read_from_bytes(from).unwrap_or_default();
            within(namespace, range.slba.get(), range.blocks.get())?;
        }
        if command.cdw11.get() & nvm::DEALLOCATE == 0 {
            // The other attributes are hints.
            return Ok(());
        }
        for range in ranges.iter().take(count) {
            let extent = within(namespace, range.slba.get(), range.blocks.get())?;
            namespace
                .media
                .discard(extent.at, extent.len)
                .map_err(|error| status_of(&error, Status::WRITE_FAULT))?;
        }
        Ok(())
    }
}

fn find(namespaces: &[Namespace], nsid: u32) -> Result<&Namespace, Status> {
    let index = nsid.checked_sub(1).and_then(|i| usize::try_from(i).ok());
    index.and_then(|i| namespaces.get(i)).ok_or(Status::INVALID_NAMESPACE.do_not_retry())
}

/// Returns the extent of `blocks` blocks from `slba`, if it is inside the namespace.
fn within(namespace: &Namespace, slba: u64, blocks: u32) -> Result<Extent, Status> {
    match slba.checked_add(blocks.into()) {
        Some(end) if end <= namespace.blocks() => Ok(Extent {
            at: slba << namespace.block_shift(),
            len: u64::from(blocks) << namespace.block_shift(),
        }),
        _ => Err(Status::LBA_OUT_OF_RANGE.do_not_retry()),
    }
}

fn status_of(error: &MediaError, media: Status) -> Status {
    match error {
        MediaError::Bus(_) => Status::DATA_TRANSFER_ERROR,
        // Retries free no space.
        MediaError::Full => Status::CAPACITY_EXCEEDED.do_not_retry(),
        MediaError::Io(_) => media,
    }
}
