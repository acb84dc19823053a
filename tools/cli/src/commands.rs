//! The commands.

pub(crate) mod check;
pub(crate) mod copy;
pub(crate) mod io;
pub(crate) mod machine;
pub(crate) mod receive;
pub(crate) mod replay;
pub(crate) mod serve;
