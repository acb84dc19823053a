//! A namespace of an NVMe controller. A buffer moves into a mapping, with it into a command, and out of both again:
//! when a command is over its mapping is revoked, and the buffer is handed on when no device can reach it any more.

use super::{Done, Info, Refused, Request, Target, TargetError, Way};
use crate::args::Protect;
use pinfold_core::access::{Direction, FromDevice, ToDevice};
use pinfold_core::domain::{Domain, Mapped, Pinned, Revoked};
use pinfold_core::dma_pool::ChunkSource;
use pinfold_nvme::driver::{Completion, Controller, InFlight, Queue};
use pinfold_nvme::registers::Registers;
