//! The commands.

pub(crate) mod bench;
pub(crate) mod bind;
pub(crate) mod copy;
pub(crate) mod doctor;
pub(crate) mod io;
pub(crate) mod nvme;
pub(crate) mod pools;
pub(crate) mod receive;
pub(crate) mod replay;
pub(crate) mod serve;
