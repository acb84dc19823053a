//! The thread that executes commands.

mod admin;
mod io;
mod run;

pub(crate) use run::{Engine, EngineParts};
