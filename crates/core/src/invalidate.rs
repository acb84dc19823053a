//! Invalidation: requests in, tickets out. (Skeleton.)

/// A point in the sequence of an invalidation queue: `done >= ticket` means that the flush is over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ticket(pub u64);
