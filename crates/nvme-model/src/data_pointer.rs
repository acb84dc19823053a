//! Resolves a command's data pointer, PRPs or an SGL, to runs of bus addresses.

mod prp;
mod resolver;
mod runs;
mod sgl;

pub(crate) use resolver::Resolver;
