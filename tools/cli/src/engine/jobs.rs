//! Several jobs side by side: a thread, a queue, buffers and a part of the target for each.

use super::verify::{self, Verified, VerifyOptions};
use super::worker::{AllRates, EngineError, Sampler};
use super::workload::{self, Observers, Workload, WorkloadStats};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::target::{DataBuffer, Target};
use std::time::{Duration, Instant};

/// The task of the jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// The workload of all jobs together.
    pub(crate) workload: Workload,
    /// The verification of every byte, if requested.
    pub(crate) verify: Option<VerifyOptions>,
}

/// The results of the jobs, also if they ended early.
#[derive(Debug, Default)]
pub(crate) struct JobsStats {
    /// The workload's statistics.
    pub(crate) workload: WorkloadStats,
    /// The samples of all jobs together.
    pub(crate) rates: AllRates,
    /// The result of the verification.
    pub(crate) verified: Option<Verified>,
    /// Why they ended early, if they did.
    pub(crate) ended: Option<EngineError>,
}

/// Returns the workload of each job: the same for all, each `increment` further on.
fn each(workload: &Workload, jobs: usize) -> Vec<Workload> {
    let job = |number: u64| Workload {
        start: workload.start.saturating_add(workload.increment.saturating_mul(number)),
        // Jobs with the same part draw different blocks.
        seed: number,
        ..*workload
    };
    (0..jobs.max(1) as u64).map(job).collect()
}

/// Splits the workload into one for each job: their blocks, and their requests, differ by one at
/// most.
fn split(workload: &Workload, jobs: usize) -> Vec<Workload> {
    let jobs = jobs.max(1) as u64;
    let part = |of: u64, job| of / jobs + u64::from(job < of % jobs);
    let mut start = workload.start;
    (0..jobs)
        .map(|job| {
            let blocks = part(workload.blocks, job);
            // A workload without a limit has none for any job.
            let requests = match workload.requests {
                u64::MAX => u64::MAX,
                requests => part(requests, job),
            };
            let own = Workload { start, blocks, requests, ..*workload };
            start += blocks * workload.block as u64;
            own
        })
        .collect()
}

/// Runs `task` with one job for each of `targets`, the buffers divided equally: as fio does, each
/// the same; if it is verified, each a part of it. The first failure ends the others, and what was
/// done until then is returned. The buffers are in `buffers` again when this returns, except those
/// that had to be quarantined.
pub(crate) fn run<B: DataBuffer + Send>(
    targets: Vec<&mut (dyn Target<B> + Send)>,
    task: Task,
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> JobsStats {
    let count = targets.len().max(1);
    let buffers_each = buffers.len() / count;
    let (stop, sampler) = (interrupt.child(), Sampler::new());
    let observers = Observers { progress, sampler: &sampler, interrupt: &stop };
    let began = Instant::now();
    let workloads = if task.verify.is_some() { split } else { each };
    let mut jobs = Vec::new();
    for (target, workload) in targets.into_iter().zip(workloads(&task.workload, count)) {
        let own = buffers.split_off(buffers.len() - buffers_each);
        jobs.push((target, Task { workload, ..task }, own));
    }
    let run_job = |(target, task, mut own): (&mut (dyn Target<B> + Send), Task, Vec<B>)| {
        let stats = run_one(target, task, &mut own, observers);
        if stats.ended.is_some() {
            stop.raise();
        }
        (stats, own)
    };
    let mut ended = None;
    let results: Vec<_> = std::thread::scope(|scope| {
        // The last one runs on this thread.
        let last = jobs.pop();
        let run_job = &run_job;
        let mut threads = Vec::with_capacity(jobs.len());
        for (job, number) in jobs.into_iter().zip(1..) {
            match std::thread::Builder::new()
                .name(format!("job {number}"))
                .spawn_scoped(scope, move || run_job(job))
            {
                Ok(thread) => threads.push(thread),
                // Its buffers were dropped with it, which frees them.
                Err(error) => {
                    let error = pinfold::probe::threads::refusal(&error);
                    ended = Some(EngineError::NoThread { job: number, jobs: count, error });
                    stop.raise();
                    break;
                }
            }
        }
        let last = last.filter(|_| ended.is_none()).map(run_job);
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect::<Vec<_>>().into_iter().chain(last).collect()
    });
    let elapsed = began.elapsed().saturating_sub(task.workload.ramp);
    let mut all: Option<JobsStats> = None;
    for (mut stats, own) in results {
        buffers.extend(own);
        match (stats.ended.take(), &ended) {
            // A job that was stopped was interrupted; the cause is another job's failure.
            (Some(EngineError::Interrupted), Some(_)) | (None, _) => {}
            (Some(error), None | Some(EngineError::Interrupted)) => ended = Some(error),
            (Some(_), Some(_)) => {}
        }
        match &mut all {
            None => all = Some(stats),
            Some(all) => all.add(stats, elapsed),
        }
    }
    JobsStats { ended, rates: sampler.into_rates(), ..all.unwrap_or_default() }
}

fn run_one<B: DataBuffer>(
    target: &mut dyn Target<B>,
    Task { workload, verify }: Task,
    buffers: &mut Vec<B>,
    observers: Observers<'_>,
) -> JobsStats {
    let (workload, verified, result) = match verify {
        None => {
            let (workload, result) = workload::run(target, workload, buffers, observers);
            (workload, None, result)
        }
        Some(options) => {
            let region = workload.blocks.saturating_mul(workload.block as u64);
            let workload = Workload { blocks: region / target.info().alignment as u64, ..workload };
            let (workload, verified, result) =
                verify::run(target, &workload, options, buffers, observers);
            (workload, Some(verified), result)
        }
    };
    JobsStats { workload, verified, ended: result.err(), ..JobsStats::default() }
}

impl JobsStats {
    /// Adds another job's statistics; all jobs together took `elapsed`.
    fn add(&mut self, other: Self, elapsed: Duration) {
        self.workload.elapsed = elapsed;
        self.workload.requests.add(&other.workload.requests);
        if let (Some(all), Some(verified)) = (&mut self.verified, other.verified) {
            all.add(verified);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Rw;
    use crate::targets::fake::{Fake, Fault};

    #[test]
    fn parts_are_the_whole_and_do_not_overlap() {
        for (blocks, requests, jobs) in [(100, 250, 3), (7, 7, 7), (1000, u64::MAX, 16), (5, 1, 1)]
        {
            let whole = Workload { start: 1024, ..Workload::sample(Rw::Read, blocks, requests) };
            let parts = split(&whole, jobs);
            assert_eq!(parts.len(), jobs);
            let mut at = 1024;
            for part in &parts {
                assert_eq!(part.start, at);
                at += part.blocks * 512;
            }
            assert_eq!(at, 1024 + blocks * 512);
            if requests == u64::MAX {
                assert!(parts.iter().all(|part| part.requests == u64::MAX));
            } else {
                assert_eq!(parts.iter().map(|part| part.requests).sum::<u64>(), requests);
            }
        }
    }

    fn execute(
        fakes: &mut [Fake],
        workload: Workload,
        verify: Option<VerifyOptions>,
    ) -> (JobsStats, usize) {
        let mut buffers = vec![vec![7; 4096]; fakes.len() * 4];
        let targets =
            fakes.iter_mut().map(|fake| -> &mut (dyn Target<Vec<u8>> + Send) { fake }).collect();
        let task = Task { workload, verify };
        let stats = run(targets, task, &mut buffers, &Progress::hidden(), &Interrupt::default());
        (stats, buffers.len())
    }

    #[test]
    fn each_job_has_its_own_part_and_the_sums_are_right() {
        let mut fakes: Vec<_> = (0..3).map(|_| Fake::new(vec![0; 51_200], 512)).collect();
        let parts =
            Workload { blocks: 30, increment: 35 * 512, ..Workload::sample(Rw::Write, 30, 30) };
        let (stats, left) = execute(&mut fakes, parts, None);
        let writes = stats.workload.requests.writes;
        assert_eq!((writes.requests, writes.bytes, left), (90, 46_080, 12));
        assert_eq!(writes.total.summary(&[]).count, 90);
        let written =
            |fake: &Fake| -> Vec<_> { (0..100).filter(|i| fake.data[i * 512] != 0).collect() };
        for (fake, first) in fakes.iter().zip([0, 35, 70]) {
            assert_eq!(written(fake), (first..first + 30).collect::<Vec<_>>());
        }
        let options = VerifyOptions { min_block: 512, counted_blocks: u64::MAX };
        let (stats, _) = execute(&mut fakes, Workload::sample(Rw::Randrw, 100, 200), Some(options));
        let verified = stats.verified.unwrap();
        assert_eq!((verified.requests, verified.parts.len()), (200, 3));
        assert_eq!(verified.sha256, None, "no job has hashed the whole");
    }

    #[test]
    fn jobs_of_the_same_part_draw_different_blocks() {
        let jobs = each(&Workload::sample(Rw::Randread, 100, 10), 3);
        assert!(jobs.iter().all(|job| (job.start, job.blocks, job.requests) == (0, 100, 10)));
        assert!(jobs[0].seed != jobs[1].seed && jobs[1].seed != jobs[2].seed);
    }

    #[test]
    fn a_failure_of_one_job_ends_all_and_keeps_what_was_done() {
        let mut fakes: Vec<_> = (0..4).map(|_| Fake::new(vec![0; 51_200], 512)).collect();
        fakes[2].fault = Some((30, Fault::Fail));
        let (stats, left) =
            execute(&mut fakes, Workload::sample(Rw::Randread, 100, u64::MAX), None);
        assert!(matches!(stats.ended, Some(EngineError::Target(_))));
        assert!(stats.workload.requests.requests() > 0);
        assert_eq!(left, 16);
    }
}
