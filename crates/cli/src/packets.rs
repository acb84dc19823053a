//! Receiving packets: a thread for each queue, which may store them, or one more that writes them
//! to a file.

pub(crate) mod budget;
pub(crate) mod capture;
pub(crate) mod counts;
pub(crate) mod destination;
pub(crate) mod notes;
pub(crate) mod slot;
pub(crate) mod store;
pub(crate) mod worker;
