//! The mistakes of the theorem's table (ARCHITECTURE.md, "The promise"), as the model makes them.

/// One decision of the protocol taken wrongly.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mistake {
    /// The flush is requested before the entry is cleared.
    FlushBeforeClear,
    /// The queue carries out the wait and no flush.
    NoFlush,
    /// A wait that has timed out returns the payload.
    TimeoutIsCompletion,
    /// The TLBs of devices are flushed before the IOTLB.
    DeviceTlbFirst,
    /// Requests that the unit aborted count as completed.
    AbortIsCompletion,
    /// A retired table page is reclaimed before its ticket has completed.
    TablePageEarly,
    /// A table page is free when it is retired. The model has one level of table pages below the
    /// directory, which stands for each: what a page translates is flushed as a whole at any level.
    TablePageEarlyAt,
    /// A retired table page is flushed as if only leaves had changed.
    LeafFlushForTablePage,
    /// The domain's addresses are released when they are revoked.
    IovaEarly,
    /// Addresses in an owner's window are returned to it when they are revoked.
    WindowEarly,
    /// A payload is returned when it is revoked.
    BufferEarly,
    /// A map that failed halfway does not wait for the flush of its rollback.
    RollbackNotAwaited,
    /// A ticket completes when the first unit has flushed.
    FirstUnitOnly,
}

impl Mistake {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::FlushBeforeClear,
        Self::NoFlush,
        Self::TimeoutIsCompletion,
        Self::DeviceTlbFirst,
        Self::AbortIsCompletion,
        Self::TablePageEarly,
        Self::TablePageEarlyAt,
        Self::LeafFlushForTablePage,
        Self::IovaEarly,
        Self::WindowEarly,
        Self::BufferEarly,
        Self::RollbackNotAwaited,
        Self::FirstUnitOnly,
    ];

    /// The caches that it takes to see it.
    pub fn caches(self) -> crate::Caches {
        match self {
            Self::FirstUnitOnly => crate::Caches::TwoUnits,
            _ => crate::Caches::DeviceTlb,
        }
    }
}
