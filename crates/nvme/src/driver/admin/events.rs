//! Asynchronous events (Base 5.2).

use crate::spec::Cqe;
use std::collections::VecDeque;

/// How many event requests are outstanding at most, whatever AERL says.
const REQUESTS: usize = 4;
/// How many events are kept for a caller that does not ask.
const KEPT: usize = 64;
/// Notice 00h: namespace attribute changed.
const NAMESPACE_ATTRIBUTE_CHANGED: u8 = 0;

/// What an asynchronous event is about: its type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// An error of no command: a wrong doorbell, for example.
    Error,
    /// SMART / health status: reliability, temperature, spare.
    Health,
    /// A notice: a namespace changed, firmware is being activated.
    Notice,
    /// Of an I/O command set.
    CommandSet,
    /// The vendor's.
    Vendor,
    /// Another type.
    Other(u8),
}

/// An asynchronous event, as the controller reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// Its type.
    pub kind: EventKind,
    /// Which event of that type.
    pub information: u8,
    /// The log page that says more.
    pub log_page: u8,
}

impl Event {
    /// DW0 of the completion of an event request: type in bits 2:0, information in 15:8, log page in 23:16.
    fn new(dword: u32) -> Self {
        let [kind, information, log_page, _] = dword.to_le_bytes();
        let kind = match kind & 7 {
            0 => EventKind::Error,
            1 => EventKind::Health,
            2 => EventKind::Notice,
            6 => EventKind::CommandSet,
            7 => EventKind::Vendor,
            other => EventKind::Other(other),
        };
        Self { kind, information, log_page }
    }

    /// Whether a namespace was attached, detached, or changed its size or format.
    pub fn is_namespace_change(&self) -> bool {
        (self.kind, self.information) == (EventKind::Notice, NAMESPACE_ATTRIBUTE_CHANGED)
    }
}

/// The events of a controller, and how many requests for them are outstanding.
#[derive(Debug, Default)]
pub(in crate::driver) struct Events {
    limit: usize,
    requested: usize,
    kept: VecDeque<Event>,
    /// Log pages that were named since the last time they were read: until then their events are masked.
    unread: Vec<u8>,
    /// Namespace changes: the controller was not asked since.
    namespaces_changed: bool,
}

impl Events {
    /// The controller was disabled: no request is outstanding.
    pub(super) fn restart(&mut self) {
        (self.limit, self.requested, self.namespaces_changed) = (0, 0, false);
        self.unread.clear();
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(REQUESTS);
    }

    /// Whether one more request is to be sent.
    pub(super) fn take_request(&mut self) -> bool {
        let more = self.requested < self.limit;
        self.requested += usize::from(more);
        more
    }

    /// A request was completed: the event, and whether one was dropped for it.
    pub(super) fn accept(&mut self, cqe: &Cqe) -> Option<(Event, bool)> {
        self.requested = self.requested.saturating_sub(1);
        if !cqe.status().is_success() {
            // More than it takes, or it has none: it is not asked again.
            self.limit = self.requested;
            return None;
        }
        let event = Event::new(cqe.result.get());
        self.namespaces_changed |= event.is_namespace_change();
        if !self.unread.contains(&event.log_page) {
            self.unread.push(event.log_page);
        }
        let full = self.kept.len() == KEPT;
        if full {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
        Some((event, full))
    }

    /// The events since the last call.
    pub(in crate::driver) fn take(&mut self) -> Vec<Event> {
        self.kept.drain(..).collect()
    }

    /// A log page to be read, so that its events are reported again.
    pub(in crate::driver) fn take_unread(&mut self) -> Option<u8> {
        self.unread.pop()
    }

    /// Whether a namespace changed since the last call.
    pub(in crate::driver) fn take_namespaces_changed(&mut self) -> bool {
        std::mem::take(&mut self.namespaces_changed)
    }

    /// The namespaces could not be identified: they are to be at the next occasion.
    pub(in crate::driver) fn set_namespaces_changed(&mut self) {
        self.namespaces_changed = true;
    }
}
