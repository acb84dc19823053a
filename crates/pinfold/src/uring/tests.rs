//! Queues and rings on this machine's kernel, with real files.

mod lifetimes;
mod refusals;
mod transfers;

use super::file::Target;
use super::queue::LAST_WAIT;
use super::slot::Slot;
use super::*;
use pinfold_core::mem::DmaMemory;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
