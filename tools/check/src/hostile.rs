//! A device that is legal and as bad as the specification allows: all of it from one seed, each
//! property also by its name.

use crate::watch::Watch;
use pinfold_nvme::spec::{SglSupport, Status};
use pinfold_nvme_model::{CommandInfo, Fault, Faults, ModelConfig, Trigger};
use pinfold_soft::Random;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// A property of a device: its values, and how it is chosen.
#[derive(Debug)]
struct Rule {
    name: &'static str,
    least: u64,
    most: u64,
    /// Its value for a device that is not hostile.
    plain: u64,
    /// The values from which a seed chooses, by their weight.
    chosen: &'static [(u64, u64)],
}

macro_rules! knobs {
    ($($(#[$doc:meta])* $at:ident $name:literal: $least:literal..=$most:literal, $plain:literal, [$($weight:literal * $value:literal),*];)*) => {
        /// The knobs by their place.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        enum At { $($(#[$doc])* $at),* }

        const RULES: &[Rule] = &[$(Rule {
            name: $name,
            least: $least,
            most: $most,
            plain: $plain,
            chosen: &[$(($weight, $value)),*],
        }),*];
    };
}

knobs! {
    /// CAP.MQES; of virtio the size of a queue.
    Mqes "mqes": 1..=65535, 1023,
        [1*1, 1*2, 1*3, 1*15, 1*63, 2*127, 1*254, 1*255, 3*1023];
    /// CAP.DSTRD.
    Dstrd "dstrd": 0..=3, 0, [2*0, 1*1, 1*2, 1*3];
    /// CAP.MPSMIN and MPSMAX. Few drivers know other pages than of 4 KiB.
    Mpsmin "mpsmin": 0..=4, 0, [31*0, 1*1];
    /// MDTS. The smallest limit is two pages: 0 is no limit.
    Mdts "mdts": 0..=20, 8, [2*1, 1*2, 1*3, 1*5, 1*8, 1*0];
    /// The queue pairs that are granted, or the queues of a virtio disk.
    Queues "queues": 1..=255, 16, [2*1, 1*2, 1*3, 1*5, 1*7, 1*16];
    /// SGLS: none, of any alignment, of whole dwords.
    Sgl "sgl": 0..=2, 0, [4*0, 1*1, 1*2];
    /// VWC.
    Cache "cache": 0..=1, 1, [1*0, 1*1];
    /// The size of a block: 512 or 4096. (Plain: that of the device.)
    Block "block": 512..=4096, 0, [2*512, 1*4096];
    /// CAP.TO, in units of 500 ms, raised where `ready-ms` is longer.
    To "to": 1..=255, 20, [2*1, 1*2, 1*4];
    /// How long CSTS.RDY takes. A plain one is long enough that a driver that does not wait is seen.
    ReadyMs "ready-ms": 0..=120_000, 1, [4*0, 4*3, 4*19, 1*150, 1*450, 1*900, 1*1700];
    /// How long the namespace is not ready after that. (Plain: that of the device.)
    NotReadyMs "not-ready-ms": 0..=60_000, 0, [6*0, 1*20, 1*200];
    /// ACL: the aborts that may be outstanding, 0-based.
    Acl "acl": 0..=255, 3, [1*0, 1*3];
    /// Whether Abort aborts.
    Aborts "aborts": 0..=1, 1, [2*1, 1*0];
    /// AERL: the requests for events that may be outstanding, 0-based.
    Aerl "aerl": 0..=255, 3, [2*0, 1*3];
    /// One I/O command in so many is preceded by an asynchronous event.
    Events "events": 0..=1_000_000, 0, [2*0, 1*4, 1*64];
    /// One command in so many is preceded by interrupts without a completion.
    Spurious "spurious": 0..=1_000_000, 0, [2*0, 1*1, 1*8];
    /// One command in so many is late.
    Late "late": 0..=1_000_000, 16, [1*0, 1*1, 1*2, 1*4, 1*16];
    /// By how much.
    LateUs "late-us": 1..=10_000_000, 1000, [1*50, 1*200, 1*1000, 1*5000];
    /// One I/O command in so many is overtaken by others.
    Reorder "reorder": 0..=1_000_000, 0, [1*0, 1*2, 1*3, 1*8];
    /// One I/O command in so many fails, and may be sent again.
    Retry "retry": 0..=1_000_000, 0, [3*0, 1*16, 1*64];
    /// The CRD of its status.
    Crd "crd": 0..=3, 1, [1*0, 2*1, 1*2, 1*3];
    /// CRDT1 to CRDT3, in units of 100 ms.
    Crdt1 "crdt1": 0..=65535, 0, [1*0, 1*1];
    Crdt2 "crdt2": 0..=65535, 0, [1*0, 1*2];
    Crdt3 "crdt3": 0..=65535, 0, [1*0, 1*3];
    /// Whether data is written in pieces, in any order.
    Scatter "scatter": 0..=1, 0, [1*0, 1*1];
    /// The I/O command at which CSTS.CFS is set; 0 is none.
    Cfs "cfs": 0..=4_000_000_000, 0, [38*0, 1*3, 1*40];
    /// The I/O command at which the device is removed; 0 is none.
    Remove "remove": 0..=4_000_000_000, 0, [38*0, 1*5, 1*50];
    /// How long I/O commands are gathered that then complete together.
    BurstUs "burst-us": 0..=10_000_000, 0, [8*0, 1*100, 1*500];
}

impl Rule {
    fn choose(&self, random: &mut Random) -> u64 {
        let mut at = random.below(self.chosen.iter().map(|(weight, _)| weight).sum());
        for (weight, value) in self.chosen {
            match at.checked_sub(*weight) {
                Some(rest) => at = rest,
                None => return *value,
            }
        }
        self.plain
    }
}

/// A property of the devices by its name: `mqes=1`. `docs/check.md` lists them.
///
/// ```
/// let knob: pinfold_check::Knob = "mqes=1".parse()?;
/// assert_eq!(knob.to_string(), "mqes=1");
/// assert!("mqes=0".parse::<pinfold_check::Knob>().is_err());
/// # Ok::<(), pinfold_check::KnobError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Knob {
    place: usize,
    value: u64,
}

/// Why a text is no knob.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KnobError {
    /// It has another form.
    #[error("a knob is NAME=VALUE, with a number as the value")]
    Form,
    /// There is none of this name.
    #[error("there is no knob {name:?}: {}", names())]
    Name {
        /// The name.
        name: String,
    },
    /// The value is out of range.
    #[error("{name} is {value}: it may be {least} to {most}")]
    Range {
        /// The name.
        name: &'static str,
        /// The value.
        value: u64,
        /// The smallest valid value.
        least: u64,
        /// The largest valid value.
        most: u64,
    },
}

fn names() -> String {
    RULES.iter().map(|rule| rule.name).collect::<Vec<_>>().join(", ")
}

impl Knob {
    /// Returns its name.
    pub fn name(&self) -> &'static str {
        RULES.get(self.place).map_or("", |rule| rule.name)
    }
}

impl FromStr for Knob {
    type Err = KnobError;

    fn from_str(text: &str) -> Result<Self, KnobError> {
        let (name, value) = text.split_once('=').ok_or(KnobError::Form)?;
        let found = RULES.iter().enumerate().find(|(_, rule)| rule.name == name);
        let (place, rule) = found.ok_or_else(|| KnobError::Name { name: name.to_owned() })?;
        let value = value.parse().map_err(|_| KnobError::Form)?;
        let Rule { name, least, most, .. } = *rule;
        if value < least || value > most {
            return Err(KnobError::Range { name, value, least, most });
        }
        Ok(Self { place, value })
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name(), self.value)
    }
}

/// What a device has that is not left to a seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given {
    /// The size of its medium.
    pub(crate) bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) not_ready: Duration,
}

/// Chooses one of so many: by a seed, or without one the first, and then regularly.
#[derive(Clone, Debug)]
pub(crate) struct OneIn {
    n: u64,
    random: Option<Random>,
    seen: u64,
}

impl OneIn {
    pub(crate) fn next(&mut self) -> bool {
        if self.n == 0 {
            return false;
        }
        self.seen += 1;
        match &mut self.random {
            Some(random) => random.one_in(self.n),
            None => self.n == 1 || self.seen % self.n == 1,
        }
    }
}

/// How a virtio disk behaves.
#[derive(Clone, Debug)]
pub(crate) struct VirtioBehaviour {
    /// The largest queue, a power of two, and the number of queues.
    pub(crate) queue_size: u16,
    pub(crate) queues: u16,
    pub(crate) has_cache: bool,
    /// Which requests are late, and by how much.
    pub(crate) late: OneIn,
    pub(crate) late_by: Duration,
    /// Which requests are preceded by an interrupt.
    pub(crate) spurious: OneIn,
    /// The knobs that concern it, for reports.
    pub(crate) knobs: Vec<String>,
}

/// How a device behaves.
#[derive(Clone, Debug)]
pub(crate) struct Behaviour {
    seed: Option<u64>,
    /// The values of the knobs, in the order of the rules.
    values: Vec<u64>,
}

impl Behaviour {
    /// Returns what follows from a seed and from the knobs that have a value of their own. `number`
    /// is that of the device. Without a seed one I/O command in 16, the first included, takes a
    /// millisecond, so that what a driver does meanwhile is seen.
    pub(crate) fn new(seed: Option<u64>, number: u64, named: &[Knob], device: &Given) -> Self {
        let mut random = seed.map(|seed| Random::new(seed ^ number.rotate_left(32)));
        // All are chosen, so that a named one does not change the others.
        let choose = |rule: &Rule| match &mut random {
            Some(random) => rule.choose(random),
            None => rule.plain,
        };
        let mut own = Self { seed, values: RULES.iter().map(choose).collect() };
        // A medium keeps its last blocks, and a device that has large ones keeps them.
        let is_fixed =
            seed.is_none() || device.block_bytes != 512 || !device.bytes.is_multiple_of(4096);
        if is_fixed {
            own.set(At::Block, device.block_bytes.into());
        }
        if !device.not_ready.is_zero() {
            own.set(At::NotReadyMs, u64::try_from(device.not_ready.as_millis()).unwrap_or(0));
        }
        for knob in named {
            if let Some(value) = own.values.get_mut(knob.place) {
                *value = knob.value;
            }
        }
        // Within the time that CAP.TO promises, also on a busy machine.
        const SLACK_MS: u64 = 250;
        let least = (own.value(At::ReadyMs) + SLACK_MS) / 500 + 1;
        own.set(At::To, own.value(At::To).max(least));
        own
    }

    fn value(&self, at: At) -> u64 {
        self.values.get(at as usize).copied().unwrap_or(0)
    }

    fn set(&mut self, at: At, value: u64) {
        if let Some(to) = self.values.get_mut(at as usize) {
            *to = value;
        }
    }

    /// Returns a value whose rule bounds it by its type.
    fn get<T: TryFrom<u64> + Default>(&self, at: At) -> T {
        T::try_from(self.value(at)).unwrap_or_default()
    }

    /// Returns the size of a block.
    pub(crate) fn block_bytes(&self) -> u32 {
        self.get(At::Block)
    }

    /// Changes the configuration of a controller accordingly.
    pub(crate) fn configure(&self, config: &mut ModelConfig) {
        config.mqes = self.get(At::Mqes);
        config.stride_shift = self.get(At::Dstrd);
        config.mpsmin = self.get(At::Mpsmin);
        config.mdts = self.get(At::Mdts);
        config.queues = self.get(At::Queues);
        config.sgls = match self.value(At::Sgl) {
            0 => SglSupport::Unsupported,
            1 => SglSupport::AnyAlignment,
            _ => SglSupport::DwordAligned,
        };
        config.volatile_cache = self.value(At::Cache) != 0;
        config.timeout_500ms = self.get(At::To);
        config.ready_delay = Duration::from_millis(self.value(At::ReadyMs));
        config.not_ready = Duration::from_millis(self.value(At::NotReadyMs));
        config.retry_delays = [self.get(At::Crdt1), self.get(At::Crdt2), self.get(At::Crdt3)];
        config.acl = self.get(At::Acl);
        config.aborts = self.value(At::Aborts) != 0;
        config.aerl = self.get(At::Aerl);
    }

    /// Returns a choice of one request in so many, as a knob says.
    fn one_in(&self, stream: u64, at: At) -> OneIn {
        let random = self.seed.map(|seed| Random::new(seed.wrapping_add(stream)));
        OneIn { n: self.value(at), random, seen: 0 }
    }

    /// Returns what of it concerns a virtio disk.
    pub(crate) fn virtio(&self) -> VirtioBehaviour {
        const KNOBS: [At; 7] =
            [At::Mqes, At::Queues, At::Cache, At::Spurious, At::Late, At::LateUs, At::Scatter];
        // The largest power of two that is no larger, and takes a chain.
        let entries: u16 = self.get::<u16>(At::Mqes).saturating_add(1).max(4);
        let knob = |at: At| Knob { place: at as usize, value: self.value(at) }.to_string();
        VirtioBehaviour {
            queue_size: (1 << entries.ilog2()).min(1024),
            queues: self.get::<u16>(At::Queues).min(16),
            has_cache: self.value(At::Cache) != 0,
            late: self.one_in(1, At::Late),
            late_by: Duration::from_micros(self.value(At::LateUs)),
            spurious: self.one_in(5, At::Spurious),
            knobs: KNOBS.map(knob).into(),
        }
    }

    /// Has a controller behave so.
    pub(crate) fn apply(&self, faults: &Faults, watch: &Arc<Watch>) {
        // A transient internal error (Base 5.2): it concerns no command.
        const EVENT: u32 = 5 << 8 | 1 << 16;
        let plain = self.seed.is_none();
        let one_in = |stream: u64, at: At, io_only: bool| {
            let mut choice = self.one_in(stream, at);
            move |info: &CommandInfo| !(io_only && info.queue == 0) && choice.next()
        };
        faults.inject(Trigger::Nth(self.value(At::Remove)), Fault::Remove);
        faults.inject(Trigger::Nth(self.value(At::Cfs)), Fault::Fatal);
        let inject = |fault, when: Box<dyn FnMut(&CommandInfo) -> bool + Send>| {
            faults.inject(Trigger::Matches(when), fault);
        };
        let crd = self.get(At::Crd);
        let retried = Fault::Fail(Status::COMMAND_INTERRUPTED.with_retry_delay(crd));
        inject(retried, Box::new(one_in(3, At::Retry, true)));
        let mut late = one_in(1, At::Late, plain);
        let watched = watch.clone();
        let is_late = move |info: &CommandInfo| {
            let hit = late(info);
            if hit {
                watched.expect_unchanged((info.queue, info.cid));
            }
            hit
        };
        inject(Fault::Delay(Duration::from_micros(self.value(At::LateUs))), Box::new(is_late));
        inject(Fault::Reorder(3), Box::new(one_in(2, At::Reorder, true)));
        inject(Fault::Event(EVENT), Box::new(one_in(4, At::Events, true)));
        inject(Fault::SpuriousInterrupts, Box::new(one_in(5, At::Spurious, false)));
        let burst = self.value(At::BurstUs);
        let watched = watch.clone();
        let gathers = move |info: &CommandInfo| {
            let hit = burst > 0 && info.queue != 0;
            if hit {
                watched.expect_unchanged((info.queue, info.cid));
            }
            hit
        };
        inject(Fault::Burst(Duration::from_micros(burst)), Box::new(gathers));
    }

    /// Returns the knobs, for reports.
    pub(crate) fn knobs(&self) -> Vec<String> {
        let knob = |(place, value): (usize, &u64)| Knob { place, value: *value }.to_string();
        self.values.iter().enumerate().map(knob).collect()
    }

    /// Returns the sequence that orders the pieces of writes.
    pub(crate) fn scatter(&self) -> Option<Random> {
        let is_on = self.value(At::Scatter) != 0;
        is_on.then(|| Random::new(self.seed.unwrap_or(0).wrapping_add(9)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_nvme_model::{MemoryMedia, ModelController, Namespace};

    fn device(bytes: u64) -> Given {
        Given { bytes, block_bytes: 512, not_ready: Duration::ZERO }
    }

    fn knobs(seed: Option<u64>, number: u64, named: &[&str]) -> Vec<String> {
        let named: Vec<Knob> = named.iter().map(|text| text.parse().unwrap()).collect();
        Behaviour::new(seed, number, &named, &device(1 << 20)).knobs()
    }

    #[test]
    fn a_seed_decides_everything() {
        assert_eq!(knobs(Some(7), 0, &[]), knobs(Some(7), 0, &[]));
        assert_ne!(knobs(Some(7), 0, &[]), knobs(Some(8), 0, &[]));
        assert_ne!(knobs(Some(7), 0, &[]), knobs(Some(7), 1, &[]));
    }

    #[test]
    fn every_value_of_a_rule_is_chosen_by_a_seed() {
        let mut left: Vec<(usize, u64)> = Vec::new();
        for (place, rule) in RULES.iter().enumerate() {
            for (weight, value) in rule.chosen {
                assert!(*weight > 0 && (rule.least..=rule.most).contains(value), "{rule:?}");
                left.push((place, *value));
            }
            // Written out, each is a knob again.
            let text = Knob { place, value: rule.least }.to_string();
            assert_eq!(text.parse(), Ok(Knob { place, value: rule.least }));
        }
        for seed in 0..4000 {
            let own = Behaviour::new(Some(seed), 0, &[], &device(1 << 20));
            left.retain(|(place, value)| own.values[*place] != *value);
        }
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn a_named_knob_changes_no_other() {
        for seed in [None, Some(3)] {
            let (plain, named) = (knobs(seed, 0, &[]), knobs(seed, 0, &["mqes=77", "late=9"]));
            let changed: Vec<_> =
                plain.iter().zip(&named).filter(|(a, b)| a != b).map(|(_, b)| b).collect();
            assert_eq!(changed, ["mqes=77", "late=9"]);
        }
        assert!(knobs(None, 0, &["mqes=5", "mqes=6"]).contains(&"mqes=6".to_owned()));
    }

    #[test]
    fn every_device_is_legal() {
        let media = Arc::new(MemoryMedia::new(1 << 20).unwrap());
        let mut config = ModelConfig::new(vec![Namespace::new(media, 512).unwrap()]);
        for seed in 0..2000 {
            let own = Behaviour::new(Some(seed), 0, &[], &device(1 << 20));
            own.configure(&mut config);
            assert!(config.mqes >= 1 && config.stride_shift <= 3);
            let promised = Duration::from_millis(500 * u64::from(config.timeout_500ms));
            let slack = Duration::from_millis(250);
            assert!(config.ready_delay + slack <= promised && promised <= Duration::from_secs(2));
        }
        // The time that is promised follows the one that it takes.
        let own = knobs(None, 0, &["to=1", "ready-ms=1000"]);
        assert!(own.contains(&"to=3".to_owned()), "{own:?}");
    }

    #[test]
    fn a_device_keeps_its_blocks() {
        let large = |device: &Given| {
            let own = |seed| Behaviour::new(Some(seed), 0, &[], device).block_bytes() == 4096;
            (0..100).filter(|seed| own(*seed)).count()
        };
        assert!((20..50).contains(&large(&device(1 << 20))));
        assert_eq!(large(&device((1 << 20) + 512)), 0, "its last block would be lost");
        assert_eq!(large(&Given { block_bytes: 4096, ..device(1 << 20) }), 100);
        let slow = Given { not_ready: Duration::from_millis(7), ..device(1 << 20) };
        assert_eq!(Behaviour::new(Some(1), 0, &[], &slow).value(At::NotReadyMs), 7);
    }

    #[test]
    fn each_knob_of_commands_is_a_fault() {
        use crate::watch::WatchedBus;
        let watch = Watch::new("test".to_owned(), Arc::default(), None);
        let watch = Arc::new(watch);
        let media = Arc::new(MemoryMedia::new(1 << 20).unwrap());
        let config = ModelConfig::new(vec![Namespace::new(media, 512).unwrap()]);
        let model = ModelController::spawn(WatchedBus(watch.clone()), config).unwrap();
        let named = ["late-us=77", "cfs=5", "remove=6", "crd=2", "burst-us=99"]
            .map(|text| text.parse().unwrap());
        Behaviour::new(None, 0, &named, &device(1 << 20)).apply(&model.faults(), &watch);
        let rules = format!("{:?}", model.faults());
        // The first that applies is taken: an end of the device is not delayed.
        let retried = Status::COMMAND_INTERRUPTED.with_retry_delay(2);
        let expected = [
            "when: Nth(6), fault: Remove",
            "when: Nth(5), fault: Fatal",
            &format!("fault: Fail({retried:?})"),
            "fault: Delay(77µs)",
            "fault: Reorder(3)",
            "fault: Event(66816)",
            "fault: SpuriousInterrupts",
            "fault: Burst(99µs)",
        ];
        let places: Vec<_> = expected.iter().map(|text| rules.find(text)).collect();
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?} {rules}");
    }

    #[test]
    fn the_page_lists_every_knob() {
        let page = include_str!("../../../docs/check.md");
        for rule in RULES {
            assert!(page.contains(&format!("| `{}` | ", rule.name)), "{}", rule.name);
        }
    }

    #[test]
    fn a_text_that_is_no_knob_is_refused() {
        let error = |text: &str| text.parse::<Knob>().unwrap_err();
        for text in ["", "mqes", "mqes=", "mqes=-1", "mqes=x", "mqes=1,dstrd=2"] {
            assert_eq!(error(text), KnobError::Form, "{text}");
        }
        assert!(error("mqe=1").to_string().contains("mqes, dstrd"));
        let range = error("mqes=65536");
        assert_eq!(range.to_string(), "mqes is 65536: it may be 1 to 65535");
        assert_eq!(error("dstrd=4").to_string(), "dstrd is 4: it may be 0 to 3");
    }
}
