//! What a run did: the statistics of its parts, as text and as JSON.

pub(crate) mod copy;
pub(crate) mod cpu;
pub(crate) mod fio;
pub(crate) mod io;
pub(crate) mod nvme;
mod nvme_text;
pub(crate) mod receive;
mod remedies;
pub(crate) mod replay;
mod requests;
pub(crate) mod serve;
pub(crate) mod stack;
mod stack_text;
mod text;
