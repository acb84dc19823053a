//! Receiving packets: a thread for each queue, and one that writes them to a file.

pub(crate) mod capture;
pub(crate) mod counts;
pub(crate) mod worker;
