//! How long to wait before a command is retried: CRDT1 to CRDT3 of the identify data, as the status
//! selects by CRD (Base 3.3.3.2.1); without one, a back-off that doubles.

use crate::spec::{ControllerData, Status};

/// The first delay where the controller asks for none; each further one is twice as long.
const FIRST_DELAY_NS: u64 = 1_000_000;
const MAX_DELAY_NS: u64 = 1_000_000_000;

/// CRDT1 to CRDT3 of a controller, in nanoseconds; 0 means that it reports none.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct RetryDelays([u64; 3]);

impl RetryDelays {
    pub(super) fn new(data: &ControllerData) -> Self {
        Self(
            data.retry_delays
                .map(|units| u64::from(units.get()) * ControllerData::RETRY_DELAY_UNIT_NS),
        )
    }

    /// Whether the controller reports any delay.
    pub(super) fn any(self) -> bool {
        self.0.iter().any(|ns| *ns > 0)
    }

    /// Returns how long to wait after `status`, when the command has been retried `attempts` times
    /// and `left_ns` are left; `None` if that is too short. A back-off ends with a last attempt at
    /// the limit.
    pub(super) fn delay_ns(self, status: Status, attempts: u32, left_ns: u64) -> Option<u64> {
        let reported =
            usize::from(status.retry_delay()).checked_sub(1).and_then(|index| self.0.get(index));
        match reported {
            Some(&ns @ 1..) => (ns <= left_ns).then_some(ns),
            _ if left_ns == 0 => None,
            _ => Some((FIRST_DELAY_NS << attempts.min(16)).min(MAX_DELAY_NS).min(left_ns)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::little_endian::U16;

    #[test]
    fn a_delay_is_the_controllers_or_a_back_off() {
        let mut data = ControllerData::zeroed();
        assert!(!RetryDelays::new(&data).any());
        data.retry_delays = [20, 0, 65_535].map(U16::new);
        let delays = RetryDelays::new(&data);
        let status = |crd| Status::NAMESPACE_NOT_READY.with_retry_delay(crd);
        let second = 1_000_000_000;
        assert_eq!(delays.delay_ns(status(1), 9, 2 * second), Some(2 * second));
        assert_eq!(delays.delay_ns(status(1), 0, 2 * second - 1), None);
        assert_eq!(delays.delay_ns(status(3), 0, u64::MAX), Some(6_553_500_000_000));
        // CRD 2 selects a delay that is not reported, and CRD 0 none.
        for crd in [0, 2] {
            let after = |attempts, left_ns| delays.delay_ns(status(crd), attempts, left_ns);
            let long: Vec<_> =
                [0, 1, 2, 9, 10, u32::MAX].map(|n| after(n, u64::MAX).unwrap() / 1_000_000).into();
            assert_eq!(long, [1, 2, 4, 512, 1000, 1000]);
            assert_eq!((after(9, 5), after(9, 0)), (Some(5), None));
        }
    }
}
