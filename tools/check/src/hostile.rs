//! A device that is legal and as bad as the specification allows, all of it from one seed.

use crate::random::Random;
use crate::watch::Watch;
use pinfold_nvme::spec::{SglSupport, Status};
use pinfold_nvme_model::{Fault, Faults, ModelConfig, Trigger};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How a device behaves.
#[derive(Clone, Debug)]
pub(crate) struct Behaviour {
    seed: Option<u64>,
    /// One command in so many is late; 0 is none.
    late: u64,
    late_us: u64,
    /// One command in so many is overtaken by others.
    reordered: u64,
    /// One I/O command in so many fails, and may be sent again.
    retried: u64,
    pub(crate) scattered: bool,
    knobs: Vec<String>,
}

impl Behaviour {
    /// Returns that of a device that is not hostile: one I/O command in 16, the first included,
    /// takes a millisecond, so that what a driver does meanwhile is seen.
    pub(crate) fn plain(config: &mut ModelConfig) -> Self {
        // Long enough that a driver that does not wait is seen.
        config.ready_delay = Duration::from_millis(1);
        Self {
            seed: None,
            late: 16,
            late_us: 1000,
            reordered: 0,
            retried: 0,
            scattered: false,
            knobs: Vec::new(),
        }
    }

    /// Returns what follows from a seed, and changes the configuration accordingly. `number` is
    /// that of the function.
    pub(crate) fn hostile(seed: u64, number: u64, config: &mut ModelConfig) -> Self {
        let mut random = Random::new(seed ^ number.rotate_left(32));
        let random = &mut random;
        config.mqes = random.choose(&[1, 2, 3, 15, 63, 127, 127, 254, 255, 1023, 1023, 1023]);
        config.stride_shift = random.choose(&[0, 0, 1, 2, 3]);
        config.mdts = random.choose(&[1, 1, 2, 3, 5, 8, 0]);
        config.queues = random.choose(&[1, 1, 2, 3, 5, 7, 16]);
        config.sgls =
            if random.once_in(3) { SglSupport::AnyAlignment } else { SglSupport::Unsupported };
        config.volatile_cache = random.once_in(2);
        config.timeout_500ms = random.choose(&[1, 1, 2, 4]);
        // Within the time that CAP.TO promises.
        let most_ms = u64::from(config.timeout_500ms) * 400;
        let delay_ms = if random.once_in(4) { random.below(most_ms) } else { random.below(20) };
        config.ready_delay = Duration::from_millis(delay_ms);
        config.retry_delays = random.choose(&[[0; 3], [1, 0, 0], [1, 2, 3]]);
        config.aerl = random.choose(&[0, 0, 3]);
        config.acl = random.choose(&[0, 3]);
        if random.once_in(8) {
            config.not_ready = Duration::from_millis(random.below(200));
        }
        let mut behaviour = Self {
            seed: Some(seed),
            late: random.choose(&[0, 1, 2, 4, 16]),
            late_us: random.choose(&[50, 200, 1000, 5000]),
            reordered: random.choose(&[0, 2, 3, 8]),
            retried: random.choose(&[0, 0, 0, 16, 64]),
            scattered: random.once_in(2),
            knobs: Vec::new(),
        };
        let mut knob = |name: &str, value: &dyn fmt::Display| {
            behaviour.knobs.push(format!("{name}={value}"));
        };
        knob("mqes", &config.mqes);
        knob("dstrd", &config.stride_shift);
        knob("mdts", &config.mdts);
        knob("queues", &config.queues);
        knob("sgl", &(config.sgls != SglSupport::Unsupported));
        knob("cache", &config.volatile_cache);
        knob("to", &config.timeout_500ms);
        knob("ready-ms", &delay_ms);
        knob("not-ready-ms", &config.not_ready.as_millis());
        let (late, late_us) = (behaviour.late, behaviour.late_us);
        knob("late", &format!("{late}:{late_us}us"));
        let (reordered, retried) = (behaviour.reordered, behaviour.retried);
        let scattered = behaviour.scattered;
        behaviour.knobs.push(format!("reorder={reordered}"));
        behaviour.knobs.push(format!("retry={retried}"));
        behaviour.knobs.push(format!("scatter={scattered}"));
        behaviour
    }

    /// Has a controller behave so.
    pub(crate) fn apply(&self, faults: &Faults, watch: &Arc<Watch>) {
        let seed = self.seed.unwrap_or(0);
        let rule = |stream: u64, n: u64, io_only: bool| {
            let mut random = Random::new(seed.wrapping_add(stream));
            let plain = self.seed.is_none();
            let mut seen = 0u64;
            move |queue: u16| {
                if n == 0 || io_only && queue == 0 {
                    return false;
                }
                seen += 1;
                if plain { seen % n == 1 } else { random.once_in(n) }
            }
        };
        let mut late = rule(1, self.late, self.seed.is_none());
        let watched = watch.clone();
        let is_late = move |info: &pinfold_nvme_model::CommandInfo| {
            let hit = late(info.queue);
            if hit {
                watched.expect_unchanged(info.queue, info.cid);
            }
            hit
        };
        let mut reordered = rule(2, self.reordered, true);
        let mut retried = rule(3, self.retried, true);
        let delay = Fault::Delay(Duration::from_micros(self.late_us));
        let fail = Fault::Fail(Status::COMMAND_INTERRUPTED.with_retry_delay(1));
        faults.inject(Trigger::Matches(Box::new(move |info| retried(info.queue))), fail);
        faults.inject(Trigger::Matches(Box::new(is_late)), delay);
        let swap = Fault::Reorder(3);
        faults.inject(Trigger::Matches(Box::new(move |info| reordered(info.queue))), swap);
    }

    /// Returns the knobs by name, for reports.
    pub(crate) fn knobs(&self) -> &[String] {
        &self.knobs
    }

    /// Returns the sequence that orders the pieces of writes.
    pub(crate) fn scatter(&self) -> Option<Random> {
        self.scattered.then(|| Random::new(self.seed.unwrap_or(0).wrapping_add(9)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_nvme_model::{MemoryMedia, Namespace};

    fn config() -> ModelConfig {
        let media = Arc::new(MemoryMedia::new(1 << 20));
        ModelConfig::new(vec![Namespace::new(media, 512).unwrap()])
    }

    #[test]
    fn a_seed_decides_everything() {
        let knobs = |seed, number| {
            let mut config = config();
            Behaviour::hostile(seed, number, &mut config).knobs().to_vec()
        };
        assert_eq!(knobs(7, 0), knobs(7, 0));
        assert_ne!(knobs(7, 0), knobs(8, 0));
        assert_ne!(knobs(7, 0), knobs(7, 1));
    }

    #[test]
    fn every_device_is_legal() {
        for seed in 0..2000 {
            let mut config = config();
            Behaviour::hostile(seed, 0, &mut config);
            assert!(config.mqes >= 1 && config.stride_shift <= 3);
            let promised = Duration::from_millis(500 * u64::from(config.timeout_500ms));
            assert!(config.ready_delay < promised && promised <= Duration::from_secs(2));
        }
    }
}
