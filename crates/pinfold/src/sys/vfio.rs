//! VFIO's system calls (`linux/vfio.h`): numbers, layouts, one function per call.
//!
//! Groups and type1 exist since Linux 3.6, type1 version 2 since 4.0; later calls state their
//! version.

pub(crate) mod container;
pub(crate) mod device;
pub(crate) mod layout;
