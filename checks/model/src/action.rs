//! The steps of the model. Each that the stack makes names the function that it stands for; the
//! others are the hardware's.

use std::fmt;

/// A step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// `Domain::map` takes a payload and a free address, and `Table::map` finds the page linked,
    /// brings back one that was retired there, or links a free one. (Without a page it fails, and
    /// changes nothing.)
    Map { owner: u8, buffer: u8, at: u8 },
    /// `Table::map` writes the leaf, and `Domain::map` returns.
    Leaf { owner: u8 },
    /// The same, and the next piece of the map fails: `TableBackend::roll_back`.
    RollBack { owner: u8 },
    /// `Mapping::revoke`: `Table::clear` clears the leaf.
    Clear { owner: u8, buffer: u8 },
    /// `Table::clear` retires the page, which is empty.
    Retire { owner: u8 },
    /// `Invalidator::request` of the leaf's flush.
    Request { owner: u8, buffer: u8 },
    /// `TableBackend::flush_retired`.
    FlushRetired { owner: u8 },
    /// `Backend::window`: an owner opens a window.
    Pin { owner: u8, window: u8 },
    /// `WindowToken::close`: an owner closes its window.
    Unpin { owner: u8, window: u8 },
    /// `Invalidator::take_batch`, by whichever thread polls.
    TakeBatch,
    /// `InvalidationQueue::submit`, by the same.
    Submit,
    /// `Invalidator::publish` of the oldest batch.
    Publish,
    /// `Invalidator::recover`: restarts the queue and flushes the domain.
    Recover,
    /// `Revoked::poll` returns the payload.
    Poll { buffer: u8 },
    /// `Revoked::wait` times out, and the domain holds the payload.
    TimeOut { buffer: u8 },
    /// `Domain::release_late` releases what it held.
    ReleaseLate { buffer: u8 },
    /// `DeferredReclaim::reclaim` frees a table page.
    Reclaim { page: u8 },
    /// A unit carries out one flush of a batch.
    Flush { unit: u8, flight: u8, bit: u8 },
    /// The device's TLB carries out one.
    FlushDevice { flight: u8, bit: u8 },
    /// The unit aborts the batches in flight.
    Abort,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Map { owner, buffer, at } => write!(
                f,
                "owner {owner}: Domain::map takes buffer {buffer} and address {at}; Table::map has a page"
            ),
            Self::Leaf { owner } => {
                write!(f, "owner {owner}: Table::map writes the leaf; Domain::map returns")
            }
            Self::RollBack { owner } => write!(
                f,
                "owner {owner}: Table::map writes the leaf; the next piece fails; TableBackend::roll_back"
            ),
            Self::Clear { owner, buffer } => {
                write!(f, "owner {owner}: revokes buffer {buffer}: Table::clear clears the leaf")
            }
            Self::Retire { owner } => {
                write!(f, "owner {owner}: Table::clear retires the table page")
            }
            Self::Request { owner, buffer } => {
                write!(f, "owner {owner}: Invalidator::request of the flush for buffer {buffer}")
            }
            Self::FlushRetired { owner } => {
                write!(f, "owner {owner}: TableBackend::flush_retired requests the page's flush")
            }
            Self::Pin { owner, window } => {
                write!(f, "owner {owner}: Backend::window of window {window}")
            }
            Self::Unpin { owner, window } => {
                write!(f, "owner {owner}: WindowToken::close of window {window}")
            }
            Self::TakeBatch => write!(f, "a thread polls: Invalidator::take_batch"),
            Self::Submit => write!(f, "the same thread: InvalidationQueue::submit"),
            Self::Publish => write!(f, "a thread polls: Invalidator::publish of the oldest batch"),
            Self::Recover => {
                write!(f, "a thread polls: Invalidator::recover flushes the domain instead")
            }
            Self::Poll { buffer } => write!(f, "Revoked::poll returns buffer {buffer}"),
            Self::TimeOut { buffer } => write!(f, "Revoked::wait for buffer {buffer} times out"),
            Self::ReleaseLate { buffer } => {
                write!(f, "Domain::release_late releases buffer {buffer}")
            }
            Self::Reclaim { page } => write!(f, "DeferredReclaim::reclaim frees table page {page}"),
            Self::Flush { unit, flight, bit } => {
                write!(f, "unit {unit} carries out a flush of batch {flight}: ")?;
                flush(f, bit)
            }
            Self::FlushDevice { flight, bit } => {
                write!(f, "the device's TLB carries out a flush of batch {flight}: ")?;
                flush(f, bit)
            }
            Self::Abort => write!(f, "the unit aborts what is in flight"),
        }
    }
}

fn flush(f: &mut fmt::Formatter<'_>, bit: u8) -> fmt::Result {
    let windows = crate::state::WINDOWS as u8;
    match bit.checked_sub(windows) {
        None => write!(f, "the leaf of address {bit}"),
        Some(window) => write!(f, "all of window {window}"),
    }
}
