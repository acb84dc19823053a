//! A state of the model: what the stack, the table, the queue and the hardware's caches hold.
//!
//! Everything is a small number, so that all states can be visited. A *window* is 2 MiB of
//! addresses with one table page below the directory; of its addresses the model has one, which has
//! the window's number. A ticket is a place in the queue and not a number that grows: the open
//! batch, one of the batches in flight, or completed.
//!
//! A cache is a *set*: all that it may hold. Hardware fills a cache with what it finds at any time,
//! or does not; the model fills each after every step with all that it could find then, and keeps
//! both the old value and the new one where hardware would have one of them. Nothing is lost by
//! that, and nothing added: whatever is in a set is there because of one chain of reads (a link, a
//! leaf, a request of the device), which hardware could have made at these times, and a flush drops
//! it whether or not something else is held. So one state stands for all ways in which caches could
//! have been filled.

/// Threads that map and revoke.
pub const OWNERS: usize = 2;
/// Windows, each with one address.
pub const WINDOWS: usize = 2;
/// Payloads.
pub const BUFFERS: usize = 2;
/// Table pages, each of which can be linked below either window.
pub const PAGES: usize = 2;
/// Batches that may be in flight.
pub const FLIGHTS: usize = 2;
/// IOTLBs: of the unit, and of a second unit where the model has one.
pub const UNITS: usize = 2;

/// The batch that a revocation waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Ticket {
    /// The batch that gathers requests.
    Open,
    /// A batch that was taken out; 0 is the oldest.
    Flight(u8),
    /// Its flush has completed.
    Completed,
}

/// An entry of the directory, for one window.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Entry {
    Empty,
    /// A table page.
    Link(u8),
    /// A table page that has been retired from here. A walker faults.
    Retired(u8),
}

/// The use of a table page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Use {
    Free,
    Linked,
    /// Retired, and in the list of the thread that did it.
    Retired,
    /// Retired, and reclaimed when the ticket has completed.
    Deferred(Ticket),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Page {
    pub used: Use,
    /// The leaf of its one entry: a buffer.
    pub leaf: Option<u8>,
}

/// The location of a payload.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Buffer {
    /// Owned by the program, which may use it for anything.
    Program,
    /// A thread maps or revokes it.
    Held,
    Mapped {
        at: u8,
    },
    Revoked {
        at: u8,
        ticket: Ticket,
        /// The wait for it has timed out, and the domain holds it.
        late: bool,
        /// Whether a failed map has left it.
        rollback: bool,
    },
}

/// The state of a thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Owner {
    Idle,
    /// It has the addresses, and the page is linked; the leaf is to be written.
    Linked {
        buffer: u8,
        at: u8,
    },
    /// The leaf is written, and a later piece of the map has failed.
    RollingBack {
        buffer: u8,
        at: u8,
    },
    /// The leaf is cleared; if nothing pins the page, that is to be retired.
    Cleared {
        buffer: u8,
        at: u8,
        rollback: bool,
    },
    /// The page is retired.
    Retired {
        buffer: u8,
        at: u8,
        rollback: bool,
    },
    /// The flush of the leaf is requested, that of the retired page is not. As a mistake, with the
    /// ticket: the leaf is not cleared either.
    Requested {
        buffer: u8,
        at: u8,
        rollback: bool,
        early: Option<Ticket>,
    },
    /// The window's page is retired; its flush is to be requested.
    Unpinned {
        window: u8,
    },
}

/// The entries that a batch has still to flush, a bit each: the leaf of window `w` is bit `w`,
/// everything of it (the link to its table page too) is bit `WINDOWS + w`.
pub type Flushes = Set;

/// Adds a request: one that is not of a leaf alone takes the place of one that is.
pub fn add(flushes: &mut Flushes, bit: Flushes) {
    *flushes |= bit;
    *flushes &= !(*flushes >> WINDOWS);
}

/// The bit of the flush of a leaf.
pub const fn leaf_of(at: u8) -> Flushes {
    1 << at
}

/// The bit of the flush of a window's leaf and link.
pub const fn all_of(window: u8) -> Flushes {
    1 << (WINDOWS as u8 + window)
}

/// A flush of the domain.
pub const DOMAIN: Flushes = ((1 << WINDOWS) - 1) << WINDOWS;

/// A set of small numbers, a bit each.
pub type Set = u8;

/// The members of a set.
pub fn members(set: Set) -> impl Iterator<Item = u8> {
    (0..8).filter(move |member| set & (1 << member) != 0)
}

/// A batch that was taken out of the lock that requesters need.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Flight {
    /// Whether the queue has it.
    pub submitted: bool,
    /// The entries that each IOTLB has still to drop.
    pub iotlb: [Flushes; UNITS],
    /// The entries that the device's TLB has still to drop.
    pub device: Flushes,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct State {
    pub owners: [Owner; OWNERS],
    pub buffers: [Buffer; BUFFERS],
    /// The buffer that each address belongs to.
    pub addresses: [Option<u8>; WINDOWS],
    /// The owner that has pinned each window.
    pub pins: [Option<u8>; WINDOWS],
    pub directory: [Entry; WINDOWS],
    pub pages: [Page; PAGES],
    /// The flushes that the open batch requests.
    pub open: Flushes,
    /// Batches in flight, the oldest first.
    pub flights: [Option<Flight>; FLIGHTS],
    /// Whether the unit has aborted the batches in flight.
    pub aborted: bool,
    /// Table pages that each unit may hold, by window: its paging-structure cache, and a walker that
    /// has read a link and not yet the leaf.
    pub walker: [[Set; WINDOWS]; UNITS],
    /// Buffers that each IOTLB may hold, by address.
    pub iotlb: [[Set; WINDOWS]; UNITS],
    /// Buffers that the device's TLB may hold, by address.
    pub device: [Set; WINDOWS],
}

impl State {
    pub fn new() -> Self {
        Self {
            owners: [Owner::Idle; OWNERS],
            buffers: [Buffer::Program; BUFFERS],
            addresses: [None; WINDOWS],
            pins: [None; WINDOWS],
            directory: [Entry::Empty; WINDOWS],
            pages: [Page { used: Use::Free, leaf: None }; PAGES],
            open: 0,
            flights: [None; FLIGHTS],
            aborted: false,
            walker: [[0; WINDOWS]; UNITS],
            iotlb: [[0; WINDOWS]; UNITS],
            device: [0; WINDOWS],
        }
    }

    /// The buffer that the table has at address `at`.
    pub fn mapped(&self, at: usize) -> Option<u8> {
        match self.directory[at] {
            Entry::Link(page) => self.pages[usize::from(page)].leaf,
            Entry::Empty | Entry::Retired(_) => None,
        }
    }

    /// Fills the caches of the first `units` units, and that of the device if it has one, with all
    /// that they can find now.
    pub fn fill(&mut self, units: usize, has_device_tlb: bool) {
        for at in 0..WINDOWS {
            for unit in 0..units {
                if let Entry::Link(page) = self.directory[at] {
                    self.walker[unit][at] |= 1 << page;
                }
                for page in members(self.walker[unit][at]) {
                    if let Some(buffer) = self.pages[usize::from(page)].leaf {
                        self.iotlb[unit][at] |= 1 << buffer;
                    }
                }
            }
            if has_device_tlb {
                self.device[at] |= self.iotlb[0][at];
            }
        }
    }

    /// The buffers that a device may reach from address `at`: what the caches may hold, in which
    /// what the table says is too.
    pub fn reachable(&self, at: usize) -> Set {
        self.iotlb.iter().fold(self.device[at], |all, iotlb| all | iotlb[at])
    }

    /// Changes every ticket.
    pub fn renumber(&mut self, change: impl Fn(Ticket) -> Ticket) {
        for buffer in &mut self.buffers {
            if let Buffer::Revoked { ticket, .. } = buffer {
                *ticket = change(*ticket);
            }
        }
        for page in &mut self.pages {
            if let Use::Deferred(ticket) = &mut page.used {
                *ticket = change(*ticket);
            }
        }
        for owner in &mut self.owners {
            if let Owner::Requested { early: Some(ticket), .. } = owner {
                *ticket = change(*ticket);
            }
        }
    }

    /// The number of batches in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.iter().flatten().count()
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}
