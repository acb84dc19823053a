//! Asynchronous events (Base 5.2).

use crate::spec::Cqe;
use std::collections::VecDeque;

/// Most event requests outstanding, whatever AERL allows.
const MAX_REQUESTS: usize = 4;
/// Most events kept for a caller that does not collect them.
const MAX_KEPT: usize = 64;
/// Notice 00h: namespace attribute changed.
const NAMESPACE_ATTRIBUTE_CHANGED: u8 = 0;

/// The type of an asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// An error that belongs to no command: an invalid doorbell write, for example.
    Error,
    /// SMART / health status: reliability, temperature, spare.
    Health,
    /// A notice: a namespace changed, firmware is being activated.
    Notice,
    /// Specific to an I/O command set.
    CommandSet,
    /// Vendor specific.
    Vendor,
    /// Another type.
    Other(u8),
}

/// An asynchronous event, as the controller reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The type.
    pub kind: EventKind,
    /// The event within that type.
    pub information: u8,
    /// The log page with details.
    pub log_page: u8,
}

impl Event {
    /// Decodes DW0 of the completion of an event request: type in bits 2:0, information in 15:8,
    /// log page in 23:16.
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

/// The events of a controller that have not been collected, and its outstanding event requests.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    limit: usize,
    requested: usize,
    kept: VecDeque<Event>,
    /// Log pages named since they were last read: until then the controller masks their events.
    unread: Vec<u8>,
    /// Whether a namespace changed since the last scan.
    namespaces_changed: bool,
}

impl EventLog {
    /// Resets the requests: a controller that was disabled has none outstanding.
    pub(super) fn restart(&mut self) {
        (self.limit, self.requested, self.namespaces_changed) = (0, 0, false);
        self.unread.clear();
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(MAX_REQUESTS);
    }

    /// Counts one more request, if it may be sent.
    pub(super) fn take_request(&mut self) -> bool {
        let more = self.requested < self.limit;
        self.requested += usize::from(more);
        more
    }

    /// Records the completion of a request; returns the event, and whether an older one was dropped
    /// for it.
    pub(super) fn accept(&mut self, cqe: &Cqe) -> Option<(Event, bool)> {
        self.requested = self.requested.saturating_sub(1);
        if !cqe.status().is_success() {
            // Above the controller's limit, or it has no events: send no more.
            self.limit = self.requested;
            return None;
        }
        let event = Event::new(cqe.result.get());
        self.namespaces_changed |= event.is_namespace_change();
        if !self.unread.contains(&event.log_page) {
            self.unread.push(event.log_page);
        }
        let full = self.kept.len() == MAX_KEPT;
        if full {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
        Some((event, full))
    }

    /// Returns the events since the last call.
    pub(super) fn take(&mut self) -> Vec<Event> {
        self.kept.drain(..).collect()
    }

    /// Returns a log page to be read, so that the controller reports its events again.
    pub(super) fn take_unread(&mut self) -> Option<u8> {
        self.unread.pop()
    }

    /// Whether a namespace changed since the last call.
    pub(super) fn take_namespaces_changed(&mut self) -> bool {
        std::mem::take(&mut self.namespaces_changed)
    }

    /// Requests another scan: the last one failed.
    pub(super) fn set_namespaces_changed(&mut self) {
        self.namespaces_changed = true;
    }
}
