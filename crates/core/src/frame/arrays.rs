//! Arrays of slots: filling the empty ones from parts of words, and emptying the full ones by
//! parts.
//!
//! Most arrays are filled and emptied as a whole, from whole words of the map. Their slots are
//! written and compared by loops without branches, which the compiler turns into wide operations.

use super::inner::Bounds;
use super::map::Part;
use super::number::{AlreadyFree, Frame, FrameError};

/// The frames of a word.
const WORD: usize = 64;
/// The fewest slots that are compared with a run of neighbours. Fewer are checked one by one.
const MIN_RUN: usize = 8;

/// The result of a fill.
pub(super) struct Filled {
    /// The number of slots that were empty.
    pub(super) asked: usize,
    /// The number of slots filled.
    pub(super) got: usize,
    /// The rest of the last part.
    pub(super) left: Part,
}

/// Fills the empty slots from the parts that `next` claims; its argument is how many frames are
/// still wanted.
#[inline(always)]
pub(super) fn fill_from(slots: &mut [Option<Frame>], next: impl FnMut(u32) -> Part) -> Filled {
    let all_empty = slots.iter().fold(0, |bits, slot| bits | Frame::raw(*slot)) == 0;
    if all_empty { fill_empty(slots, next) } else { fill_gaps(slots, next) }
}

/// Like [`fill_from`], where all slots are empty.
#[inline(always)]
fn fill_empty(slots: &mut [Option<Frame>], mut next: impl FnMut(u32) -> Part) -> Filled {
    let asked = slots.len();
    let (mut part, mut rest) = (Part::NONE, slots);
    while !rest.is_empty() {
        if part.mask == 0 {
            part = next(u32::try_from(rest.len()).unwrap_or(u32::MAX));
            if part.mask == 0 {
                break;
            }
        }
        let filled = match rest.first_chunk_mut::<WORD>() {
            Some(word) if part.mask == !0 => {
                write_run(word, part.first());
                part.mask = 0;
                WORD
            }
            _ => fill_slots(&mut part, rest),
        };
        rest = rest.get_mut(filled..).unwrap_or_default();
    }
    Filled { asked, got: asked - rest.len(), left: part }
}

/// Like [`fill_from`], where some slots are full.
#[inline(never)]
fn fill_gaps(slots: &mut [Option<Frame>], mut next: impl FnMut(u32) -> Part) -> Filled {
    let asked = slots.iter().filter(|slot| slot.is_none()).count();
    let (mut part, mut got, mut rest) = (Part::NONE, 0, slots);
    while got < asked {
        if part.mask == 0 {
            part = next(u32::try_from(asked - got).unwrap_or(u32::MAX));
            if part.mask == 0 {
                break;
            }
        }
        let full = rest.iter().take_while(|slot| slot.is_some()).count();
        rest = rest.get_mut(full..).unwrap_or_default();
        let empty = rest.iter().take(WORD).take_while(|slot| slot.is_none()).count();
        let filled = fill_slots(&mut part, rest.get_mut(..empty).unwrap_or_default());
        rest = rest.get_mut(filled..).unwrap_or_default();
        got += filled;
    }
    Filled { asked, got, left: part }
}

/// Moves the first frames of a part that are neighbours into slots, which are empty. Returns how
/// many.
#[inline(always)]
fn fill_slots(part: &mut Part, slots: &mut [Option<Frame>]) -> usize {
    let shift = part.mask.trailing_zeros();
    let run = (part.mask >> shift).trailing_ones();
    let filled = run.min(u32::try_from(slots.len()).unwrap_or(u32::MAX));
    write_run(slots.get_mut(..filled as usize).unwrap_or_default(), part.first());
    part.mask &= !((!0 >> (64 - filled)) << shift);
    filled as usize
}

/// Writes neighbours into slots, from `first` on.
#[inline(always)]
fn write_run(slots: &mut [Option<Frame>], first: Frame) {
    for (slot, index) in slots.iter_mut().zip(first.index()..) {
        *slot = Frame::new(index);
    }
}

/// Empties the full slots by parts of one word each, which `give` frees with the number of frames
/// in each. Returns how many slots those were.
#[inline(always)]
pub(super) fn empty_into(
    bounds: Bounds,
    slots: &mut [Option<Frame>],
    mut give: impl FnMut(Part, u32) -> Result<(), AlreadyFree>,
) -> (usize, Result<(), FrameError>) {
    let (mut freed, mut rest) = (0, slots);
    while !rest.is_empty() {
        let Leading { part, slots: len, frames } = match Leading::of(bounds, rest) {
            Ok(found) => found,
            Err(error) => return (freed, Err(error)),
        };
        let (these, behind) = rest.split_at_mut(len.min(rest.len()));
        if frames > 0 {
            if give(part, frames).is_ok() {
                these.fill(None);
                freed += frames as usize;
            } else {
                // One of them is already free; those before it are still freed.
                for slot in these {
                    if let Some(frame) = *slot {
                        if let Err(error) = give(Part::of(frame), 1) {
                            return (freed, Err(error.into()));
                        }
                        *slot = None;
                        freed += 1;
                    }
                }
            }
        }
        rest = behind;
    }
    (freed, Ok(()))
}

/// The frames of one word at the start of some slots.
struct Leading {
    part: Part,
    /// The number of those slots.
    slots: usize,
    /// The number of full slots among them.
    frames: u32,
}

impl Leading {
    #[inline(always)]
    fn of(bounds: Bounds, slots: &[Option<Frame>]) -> Result<Self, FrameError> {
        match Self::run(bounds, slots) {
            Some(found) => Ok(found),
            None => Self::any(bounds, slots),
        }
    }

    /// Returns the rest of a word if the slots start with it in order, as a fill leaves it.
    #[inline(always)]
    fn run(bounds: Bounds, slots: &[Option<Frame>]) -> Option<Self> {
        let first = (*slots.first()?)?;
        let shift = first.index() % 64;
        let run = slots.len().min(WORD - shift as usize);
        let frames = u32::try_from(run).ok()?;
        if run < MIN_RUN || bounds.check(first, frames).is_err() {
            return None;
        }
        let in_order = match slots.first_chunk::<WORD>() {
            Some(word) if shift == 0 => is_run(word, first),
            _ => is_run(slots.get(..run)?, first),
        };
        let mask = (!0 >> (64 - frames)) << shift;
        in_order.then_some(Self {
            part: Part { word: first.index() / 64, mask },
            slots: run,
            frames,
        })
    }

    /// Returns the frames of one word, in any order, up to one that occurs twice.
    #[inline(never)]
    fn any(bounds: Bounds, slots: &[Option<Frame>]) -> Result<Self, FrameError> {
        let (mut part, mut frames) = (Part::NONE, 0);
        for (index, slot) in slots.iter().enumerate() {
            let Some(frame) = *slot else { continue };
            let one = Part::of(frame);
            if part.mask == 0 {
                bounds.check(frame, 1)?;
                part = one;
            } else if one.word != part.word
                || one.mask & part.mask != 0
                || bounds.check(frame, 1).is_err()
            {
                return Ok(Self { part, slots: index, frames });
            } else {
                part.mask |= one.mask;
            }
            frames += 1;
        }
        Ok(Self { part, slots: slots.len(), frames })
    }
}

/// Whether slots hold neighbours, from `first` on.
#[inline(always)]
fn is_run(slots: &[Option<Frame>], first: Frame) -> bool {
    let expected = Frame::raw(Some(first))..;
    slots
        .iter()
        .zip(expected)
        .fold(0, |wrong, (slot, expected)| wrong | (Frame::raw(*slot) ^ expected))
        == 0
}
