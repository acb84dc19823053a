//! The errno value of each error of the library.

use crate::failure::Failure;
use libc::{
    EACCES, EBADF, EBUSY, EEXIST, EFAULT, EINVAL, EIO, ENODEV, ENOENT, ENOMEM, ENOSPC, ENOTSUP,
    ENXIO, EOVERFLOW, ERANGE, ETIMEDOUT,
};
use pinfold::arena::{AllocError, BuildError};
use pinfold::core::domain::BackendError;
use pinfold::core::invalidate::WaitError;
use pinfold::memory::Inaccessible;
use pinfold::uring::RegisterError;
use pinfold::vfio::OpenError;
use pinfold::{dma_pool, page_pool};
use std::ffi::c_int;

/// An error that C gets as an errno value.
pub(crate) trait Errno: std::error::Error {
    fn errno(&self) -> c_int;
}

impl<E: Errno> From<&E> for Failure {
    fn from(error: &E) -> Self {
        Self::from_error(error.errno(), error)
    }
}

impl Errno for OpenError {
    fn errno(&self) -> c_int {
        match self {
            Self::Address(_) => EINVAL,
            Self::NoDevice(_) => ENODEV,
            Self::OtherDriver { .. } | Self::NotViable { .. } | Self::Busy { .. } => EBUSY,
            Self::Denied { .. } | Self::Unprotected(_) | Self::NotAcknowledged(_) => EACCES,
            Self::NoModule { .. } => ENOENT,
            Self::Kernel { errno, .. } => errno.raw(),
            Self::Domain(error) => error.errno(),
            _ => ENOTSUP,
        }
    }
}

impl Errno for WaitError {
    fn errno(&self) -> c_int {
        match self {
            Self::TimedOut { .. } => ETIMEDOUT,
            Self::Unknown { .. } => EINVAL,
            _ => EIO,
        }
    }
}

impl Errno for BackendError {
    fn errno(&self) -> c_int {
        match self {
            Self::NotPages { .. } | Self::LengthsDiffer { .. } | Self::NotReserved { .. } => EINVAL,
            Self::NotRegistered { .. } | Self::OtherDomain { .. } => ENXIO,
            Self::AlreadyRegistered { .. } => EEXIST,
            Self::NoMemory { .. } | Self::LockedMemory { .. } | Self::Table(_) => ENOMEM,
            Self::Iova(_) | Self::NoEntries { .. } => ENOSPC,
            Self::Flush(error)
            | Self::MapNotFlushed { flush: error, .. }
            | Self::RollbackIncomplete { flush: error, .. } => error.errno(),
            Self::Unmappable { .. } | Self::BeyondLimit { .. } => ERANGE,
            Self::NoTranslation | Self::NotContiguous { .. } | Self::Movable { .. } => ENOTSUP,
            Self::PhysAddrUnknown { .. } => EACCES,
            Self::System { code, .. } => *code,
            _ => EIO,
        }
    }
}

impl Errno for BuildError {
    fn errno(&self) -> c_int {
        match self {
            Self::NoSize | Self::NoSourceNamed | Self::CallerAlignment { .. } => EINVAL,
            Self::TooLarge { .. } => EOVERFLOW,
            Self::NoMemory { .. } | Self::NotLocked(_) | Self::Frames(_) => ENOMEM,
            Self::Node { errno, .. } | Self::Fork(errno) => errno.raw(),
            Self::Inaccessible(_) => EFAULT,
            Self::InUse(_) => EEXIST,
            Self::Domain(error) => error.errno(),
            _ => EIO,
        }
    }
}

impl Errno for Inaccessible {
    fn errno(&self) -> c_int {
        EFAULT
    }
}

impl Errno for AllocError {
    fn errno(&self) -> c_int {
        match self {
            Self::Length { .. } => EINVAL,
            _ => ENOMEM,
        }
    }
}

impl Errno for dma_pool::CreateError {
    fn errno(&self) -> c_int {
        match self {
            Self::Minimum { .. } | Self::NoMemory { .. } => ENOMEM,
            _ => EINVAL,
        }
    }
}

impl Errno for dma_pool::FreeError {
    fn errno(&self) -> c_int {
        EINVAL
    }
}

impl Errno for dma_pool::RangeError {
    fn errno(&self) -> c_int {
        match self {
            Self::Maximum { .. } | Self::Numbers { .. } => ENOSPC,
            Self::NoMemory { .. } => ENOMEM,
            _ => EINVAL,
        }
    }
}

impl Errno for RegisterError {
    fn errno(&self) -> c_int {
        match self {
            Self::NoRing { .. } => EBADF,
            Self::HasTable => EBUSY,
            Self::NoTable => ENXIO,
            Self::OtherThread | Self::Overlaps { .. } => EEXIST,
            Self::Memlock { .. } | Self::NoMemory { .. } => ENOMEM,
            Self::Memory { .. } => EFAULT,
            Self::System { errno } => errno.raw(),
            _ => EINVAL,
        }
    }
}

impl Errno for page_pool::CreateError {
    fn errno(&self) -> c_int {
        match self {
            Self::NoMemory { .. } => ENOMEM,
            _ => EINVAL,
        }
    }
}
