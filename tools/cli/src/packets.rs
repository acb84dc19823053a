//! Receiving packets: a thread for each queue, which may store them, or one more that writes them
//! to a file.

pub(crate) mod capture;
pub(crate) mod counts;
pub(crate) mod store;
pub(crate) mod worker;
