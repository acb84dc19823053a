//! Several jobs side by side: a thread, a queue, buffers and a part of the target for each.

use super::engine::{self, Outcome, Workload};
use super::verify::{self, Verified};
use crate::copy::error::PumpError;
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::part::Part;
use crate::targets::{Bytes, Target};
use std::time::Instant;

/// What the jobs do, all of them together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// The workload.
    Run,
    /// The same with every byte checked: the fewest bytes of one request, and how many blocks of a job may be written more
    /// than once.
    Check(usize, u64),
}

/// What they did.
pub(crate) struct Completed {
    pub(crate) outcome: Outcome,
    pub(crate) verified: Option<Verified>,
}

/// One job's share of the workload, and where it begins.
struct Share {
    workload: Workload,
    first: u64,
}

/// Cuts the workload into as many shares as there are jobs: blocks and requests differ by one at most.
fn shares(workload: &Workload, jobs: usize) -> Vec<Share> {
    let jobs = jobs.max(1) as u64;
    let part = |of: u64, job| of / jobs + u64::from(job < of % jobs);
    let mut first = 0;
    (0..jobs)
        .map(|job| {
            let blocks = part(workload.blocks, job);
            // "Without end" is that for each.
            let requests = match workload.requests {
                u64::MAX => u64::MAX,
                requests => part(requests, job),
            };
            let share = Share { workload: Workload { blocks, requests, ..*workload }, first };
            first += blocks * workload.block as u64;
            share
        })
        .collect()
}

/// Does `task` by one job for each of `targets`, with as many of the buffers each. The first failure ends the others. The
/// buffers are in `buffers` again when this returns, except those that had to be quarantined.
pub(crate) fn run<B: Bytes + Send>(
    targets: Vec<&mut (dyn Target<B> + Send)>,
    (workload, task): (&Workload, Task),
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Completed, PumpError> {
    let count = targets.len().max(1);
    let each = buffers.len() / count;
    let stop = interrupt.child();
    let began = Instant::now();
    let mut jobs = Vec::new();
    for (target, share) in targets.into_iter().zip(shares(workload, count)) {
        let at = buffers.len() - each;
        jobs.push((target, share, buffers.split_off(at)));
    }
    let one = |(target, share, mut mine): (&mut (dyn Target<B> + Send), Share, Vec<B>)| {
        let Share { workload, first } = share;
        let mut part = Part::new(target, first, workload.blocks * workload.block as u64);
        let did = go(&mut part, (&workload, task), &mut mine, progress, &stop);
        if did.is_err() {
            stop.raise();
        }
        (did, mine)
    };
    let mut failed = None;
    let results: Vec<_> = std::thread::scope(|scope| {
        // The last one needs no thread of its own.
        let last = jobs.pop();
        let one = &one;
        let mut threads = Vec::with_capacity(jobs.len());
        for (job, number) in jobs.into_iter().zip(1..) {
            match std::thread::Builder::new()
                .name(format!("job {number}"))
                .spawn_scoped(scope, move || one(job))
            {
                Ok(thread) => threads.push(thread),
                // Its buffers went with it; the arena has them again.
                Err(error) => {
                    failed = Some(PumpError::NoThread { job: number, jobs: count, error });
                    stop.raise();
                    break;
                }
            }
        }
        let last = last.filter(|_| failed.is_none()).map(one);
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect::<Vec<_>>().into_iter().chain(last).collect()
    });
    let elapsed = began.elapsed();
    let mut dids = Vec::new();
    for (did, mine) in results {
        buffers.extend(mine);
        match did {
            Ok(did) => dids.push(did),
            // A job that was stopped says that it was interrupted; why is more to the point.
            Err(PumpError::Interrupted) if failed.is_some() => {}
            Err(error) => match failed {
                None | Some(PumpError::Interrupted) => failed = Some(error),
                Some(_) => {}
            },
        }
    }
    let mut dids = dids.into_iter();
    match (failed, dids.next()) {
        (None, Some(first)) => Ok(dids.fold(first, |all, did| all.with(did, elapsed))),
        (failed, _) => Err(failed.unwrap_or(PumpError::NoBuffers)),
    }
}

fn go<B: Bytes>(
    target: &mut dyn Target<B>,
    (workload, task): (&Workload, Task),
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Completed, PumpError> {
    match task {
        Task::Run => {
            let outcome = engine::run(target, *workload, buffers, progress, interrupt)?;
            Ok(Completed { outcome, verified: None })
        }
        Task::Check(least, counted) => {
            let unit = target.info().unit;
            let region = workload.blocks.saturating_mul(workload.block as u64);
            let workload = Workload { blocks: region / unit as u64, ..*workload };
            let (outcome, verified) =
                verify::run(target, (&workload, least, counted), buffers, progress, interrupt)?;
            Ok(Completed { outcome, verified: Some(verified) })
        }
    }
}

impl Completed {
    /// Together with what another job did, in `elapsed`.
    fn with(mut self, other: Self, elapsed: std::time::Duration) -> Self {
        self.outcome.elapsed = elapsed;
        self.outcome.reads.add(&other.outcome.reads);
        self.outcome.writes.add(&other.outcome.writes);
        if let (Some(all), Some(verified)) = (&mut self.verified, other.verified) {
            all.add(verified);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Rw;
    use crate::targets::fake::{Fake, Fault};

    fn workload(rw: Rw, blocks: u64, requests: u64) -> Workload {
        Workload { rw, block: 512, blocks, requests, runtime: None, reads_in_100: 50 }
    }

    #[test]
    fn shares_are_the_whole_and_do_not_overlap() {
        for (blocks, requests, jobs) in [(100, 250, 3), (7, 7, 7), (1000, u64::MAX, 16), (5, 1, 1)] {
            let shares = shares(&workload(Rw::Read, blocks, requests), jobs);
            assert_eq!(shares.len(), jobs);
            let mut at = 0;
            for share in &shares {
                assert_eq!(share.first, at);
                at += share.workload.blocks * 512;
            }
            assert_eq!(at, blocks * 512);
            if requests == u64::MAX {
                assert!(shares.iter().all(|share| share.workload.requests == u64::MAX));
            } else {
                assert_eq!(shares.iter().map(|share| share.workload.requests).sum::<u64>(), requests);
            }
        }
    }

    fn go(fakes: &mut [Fake], workload: &Workload, task: Task) -> (Result<Completed, PumpError>, usize) {
        let mut buffers = vec![vec![7; 4096]; fakes.len() * 4];
        let targets = fakes.iter_mut().map(|fake| -> &mut (dyn Target<Vec<u8>> + Send) { fake }).collect();
        let did = run(targets, (workload, task), &mut buffers, &Progress::hidden(), &Interrupt::default());
        (did, buffers.len())
    }

    #[test]
    fn each_job_has_its_own_part_and_the_sums_are_right() {
        let mut fakes: Vec<_> = (0..3).map(|_| Fake::new(vec![0; 51_200], 512)).collect();
        let (did, left) = go(&mut fakes, &workload(Rw::Write, 100, 100), Task::Run);
        let did = did.unwrap();
        assert_eq!((did.outcome.writes.requests, did.outcome.writes.bytes, left), (100, 51_200, 12));
        assert_eq!(did.outcome.writes.total.summary().count, 100);
        let written = |fake: &Fake| -> Vec<_> { (0..100).filter(|i| fake.data[i * 512] != 0).collect() };
        assert_eq!(fakes.iter().map(written).collect::<Vec<_>>().concat(), (0..100).collect::<Vec<_>>());
        let (did, _) = go(&mut fakes, &workload(Rw::Randrw, 100, 200), Task::Check(512, u64::MAX));
        let verified = did.unwrap().verified.unwrap();
        assert_eq!((verified.requests, verified.parts.len()), (200, 3));
        assert_eq!(verified.sha256, None, "of the whole it is nobody's");
    }

    #[test]
    fn a_failure_of_one_ends_all_and_is_what_is_said() {
        let mut fakes: Vec<_> = (0..4).map(|_| Fake::new(vec![0; 51_200], 512)).collect();
        fakes[2].fault = Some((30, Fault::Fail));
        let (did, left) = go(&mut fakes, &workload(Rw::Randread, 100, u64::MAX), Task::Run);
        assert!(matches!(did, Err(PumpError::Target(_))));
        assert_eq!(left, 16);
    }
}
