//! Collects the runs of a buffer and merges those that are adjacent for the device.

use super::error::{BufferError, check_extent};
use super::table::{Run, Table};
use crate::addr::{IovaRange, PageSize, Segment};
use alloc::vec::Vec;

pub(super) struct Runs {
    addr: usize,
    len: u64,
    list: Vec<Run>,
}

impl Runs {
    pub(super) fn new(addr: usize) -> Self {
        Self { addr, len: 0, list: Vec::new() }
    }

    /// Adds the next run, which follows the last one in the process.
    pub(super) fn push(&mut self, segment: Segment) -> Result<(), BufferError> {
        IovaRange::new(segment.iova, segment.len)?;
        let len = self.len.saturating_add(segment.len);
        check_extent(self.addr, len)?;
        // Does not wrap: `check_extent` has checked the end, which is larger.
        let addr = self.addr as u64 + self.len;
        self.len = len;
        if let Some(last) = self.list.last_mut() {
            if last.segment.iova.checked_add(last.segment.len) == Some(segment.iova) {
                last.segment.len += segment.len;
                return Ok(());
            }
            if addr.trailing_zeros() < PageSize::Size4K.shift() {
                return Err(BufferError::Ragged { addr });
            }
        }
        let no_memory =
            BufferError::NoMemory { folios: self.list.len() as u64 + 1, bytes: size_of::<Run>() };
        self.list.try_reserve(1).map_err(|_| no_memory)?;
        self.list.push(Run { addr, segment });
        Ok(())
    }

    /// Returns address, length and table of the buffer.
    pub(super) fn finish(self) -> Result<(usize, u64, Table), BufferError> {
        check_extent(self.addr, self.len)?;
        Ok((self.addr, self.len, Table::new(&self.list)?))
    }
}
