//! The thread that executes commands.

mod admin;
mod io;
mod run;
mod state;

pub(crate) use state::{Engine, EngineParts};
