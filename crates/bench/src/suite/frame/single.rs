//! One frame at a time.

use super::{BenchError, FRAMES};
use crate::baseline::buddy::Buddy;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::harness::{Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{Baseline, Dice, Hand, TWO, alone, give_all, slots, take_all, together};
use pinfold_core::frame::{Frame, Zone};

pub(super) fn pairs(harness: &Harness<'_>, zone: &Zone, buddy: &Buddy) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(1_000_000);
    let stack = Lifo::new(FRAMES as usize, Frame::BYTES);
    let stack = &stack;
    let (one, two) = ("pair-4k", "pair-4k-2t");
    // One thread and two in turn, so that their ratio holds.
    harness.interleave(vec![
        Subject::countable("pinfold", alone(one, times, || zone.local())),
        Subject::countable("pinfold-shared", alone(one, times, || zone)),
        Subject::new("single", alone(one, times, || Baseline(buddy))),
        Subject::new("lifo", alone(one, times, || Baseline(stack))),
        Subject::new("thread-list", alone(one, times, || Baseline(ThreadList::new(stack)))),
        Subject::countable("pinfold", together(two, TWO, || zone.local())),
        Subject::countable("pinfold-shared", together(two, TWO, || zone)),
        Subject::new("single", together(two, TWO, || Baseline(buddy))),
        Subject::new("lifo", together(two, TWO, || Baseline(stack))),
        Subject::new("thread-list", together(two, TWO, || Baseline(ThreadList::new(stack)))),
    ])
}

pub(super) fn random_frees(
    harness: &Harness<'_>,
    zone: &Zone,
    buddy: &Buddy,
) -> Result<Vec<Record>, BenchError> {
    let frames = harness.scale(1 << 16);
    let stack = Lifo::new(FRAMES as usize, Frame::BYTES);
    let stack = &stack;
    harness.interleave(vec![
        Subject::countable("pinfold", shuffled(frames, || zone.local())),
        Subject::countable("pinfold-shared", shuffled(frames, || zone)),
        Subject::new("single", shuffled(frames, || Baseline(buddy))),
        Subject::new("lifo", shuffled(frames, || Baseline(stack))),
        Subject::new("thread-list", shuffled(frames, || Baseline(ThreadList::new(stack)))),
    ])
}

fn shuffled<H: Hand>(
    frames: usize,
    hand: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (mut hand, mut held) = (hand(), slots(frames));
        take_all(&mut hand, &mut held)?;
        Dice::new().shuffle(&mut held);
        out.cost("random-free", give_all(&mut hand, held)?, frames);
        Ok(())
    }
}
