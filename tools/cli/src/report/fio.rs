//! A workload's report with fio's JSON keys (those of fio 3.33), so that scripts written for fio
//! can read it.
//!
//! Each field is measured as its name says in fio, or absent: docs/io-json.md lists them.

use super::RequestReport;
use super::io::{DirectionReport, IoReport};
use crate::engine::worker::{Classes, Rates, RequestStats, WorkerStats};
use crate::histogram::Latency;
use serde_json::{Map, Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// fio's version whose keys these are.
const VERSION: &str = "fio-3.33";

/// Returns the reports of all jobs as one object; `elapsed` is the time since the program's start.
pub(crate) fn to_json(reports: &[IoReport], elapsed: Duration) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let jobs: Vec<Value> =
        (0..).zip(reports).map(|(group, report)| job(group, report, elapsed)).collect();
    json!({
        "fio version": VERSION,
        "timestamp": now.as_secs(),
        "timestamp_ms": u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
        "time": date(now.as_secs()),
        "jobs": jobs,
    })
}

fn job(group: u64, report: &IoReport, elapsed: Duration) -> Value {
    // fio's runtime of a group is the sum of its jobs', to which it relates the processor time.
    let runtime = report.seconds * report.numjobs as f64;
    let (user, system) = report.cpu.percent_of(runtime);
    let requests = &report.requests;
    let latencies = Distribution::new(requests);
    let flushes = &requests.flushes;
    let mut job = json!({
        "jobname": report.name,
        "groupid": group,
        "error": report.errno,
        "eta": 0,
        "elapsed": elapsed.as_secs().max(1),
        "job options": options(report),
        "read": direction(report.read.as_ref(), report.seconds),
        "write": direction(report.write.as_ref(), report.seconds),
        "trim": direction(report.trim.as_ref(), report.seconds),
        "sync": { "total_ios": flushes.requests, "lat_ns": latency(&flushes.total.summary(&[])) },
        "job_runtime": milliseconds(runtime),
        "usr_cpu": user,
        "sys_cpu": system,
        "iodepth_level": classes(requests.depths, ["1", "2", "4", "8", "16", "32", ">=64"]),
        "iodepth_complete": classes(requests.collected, ["0", "4", "8", "16", "32", "64", ">=64"]),
        "latency_ns": latencies.of(0, 1, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000], None),
        "latency_us": latencies.of(1000, 1000, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000], None),
        "latency_ms": latencies.of(
            1_000_000,
            1_000_000,
            &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000],
            Some(">=2000"),
        ),
    });
    if let (Some(text), Value::Object(job)) = (description(report), &mut job) {
        job.insert("desc".to_owned(), text.into());
    }
    job
}

/// Returns fio's description: that of the user, and what fio has no key for, the notes too.
fn description(report: &IoReport) -> Option<String> {
    let scratch = report
        .scratch_file
        .then(|| format!("scratch file: {} was created for the run", report.target));
    let ended = report.ended_early.as_ref().map(|reason| format!("ended early: {reason}"));
    let parts = report.description.iter().cloned().chain(scratch).chain(ended);
    let parts: Vec<String> =
        parts.chain(report.notes.iter().map(|note| format!("note: {note}"))).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn options(report: &IoReport) -> Value {
    let mut options = json!({
        "name": report.name,
        "filename": report.target,
        "rw": report.rw.name(),
        "bs": report.block_bytes.to_string(),
        "iodepth": report.iodepth.to_string(),
        "numjobs": report.numjobs.to_string(),
        "offset": report.offset_bytes.to_string(),
        "size": report.size_bytes.to_string(),
    });
    if let (1.., Value::Object(options)) = (report.offset_increment_bytes, &mut options) {
        options.insert(
            "offset_increment".to_owned(),
            report.offset_increment_bytes.to_string().into(),
        );
    }
    options
}

fn direction(report: Option<&DirectionReport>, seconds: f64) -> Value {
    let none = DirectionReport {
        iops: 0.0,
        bytes_per_second: 0.0,
        samples: Rates::default(),
        requests: RequestReport::default(),
    };
    let (report, runtime) = report.map_or((&none, 0), |report| (report, milliseconds(seconds)));
    let requests = &report.requests;
    let bytes_per_second = whole(report.bytes_per_second);
    let mut completion = latency(&requests.completion);
    if let (Value::Object(completion), true) = (&mut completion, requests.requests > 0) {
        let percentiles = requests.completion.percentiles_ns.iter();
        let percentiles: Map<_, _> =
            percentiles.map(|(percent, ns)| (format!("{percent:.6}"), (*ns).into())).collect();
        completion.insert("percentile".to_owned(), percentiles.into());
    }
    let Rates { iops, bytes_per_second: bandwidth } = &report.samples;
    let mut direction = json!({
        "io_bytes": requests.bytes,
        "io_kbytes": requests.bytes / 1024,
        "bw_bytes": bytes_per_second,
        "bw": bytes_per_second / 1024,
        "iops": report.iops,
        "runtime": runtime,
        "total_ios": requests.requests,
        "slat_ns": latency(&requests.queueing),
        "clat_ns": completion,
        "lat_ns": latency(&requests.total),
        "bw_samples": bandwidth.samples,
        "iops_samples": iops.samples,
    });
    // Without a sample there is nothing that these could be.
    if let (1.., Value::Object(direction)) = (iops.samples, &mut direction) {
        let kib = |bytes: f64| bytes / 1024.0;
        let share = if report.bytes_per_second > 0.0 {
            bandwidth.mean * 100.0 / report.bytes_per_second
        } else {
            0.0
        };
        let figures: [(&str, Value); 9] = [
            ("bw_min", whole(kib(bandwidth.min)).into()),
            ("bw_max", whole(kib(bandwidth.max)).into()),
            ("bw_agg", share.min(100.0).into()),
            ("bw_mean", kib(bandwidth.mean).into()),
            ("bw_dev", kib(bandwidth.deviation).into()),
            ("iops_min", whole(iops.min).into()),
            ("iops_max", whole(iops.max).into()),
            ("iops_mean", iops.mean.into()),
            ("iops_stddev", iops.deviation.into()),
        ];
        direction.extend(figures.map(|(key, value)| (key.to_owned(), value)));
    }
    direction
}

fn latency(latency: &Latency) -> Value {
    json!({
        "min": latency.min_ns,
        "max": latency.max_ns,
        "mean": latency.mean_ns,
        "stddev": latency.deviation_ns,
        "N": latency.count,
    })
}

fn percent(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 * 100.0 / of as f64 }
}

fn classes(classes: Classes, keys: [&str; 7]) -> Value {
    let sum = classes.0.iter().sum();
    let all = keys.iter().zip(classes.0);
    all.map(|(key, count)| ((*key).to_owned(), percent(count, sum).into()))
        .collect::<Map<_, _>>()
        .into()
}

/// The completion latencies (`clat`) of all requests, as fio's classes have them.
struct Distribution<'a> {
    stats: [&'a RequestStats; 3],
    count: u64,
}

impl<'a> Distribution<'a> {
    fn new(requests: &'a WorkerStats) -> Self {
        Self {
            stats: [&requests.reads, &requests.writes, &requests.trims],
            count: requests.requests(),
        }
    }

    fn count_up_to(&self, ns: u64) -> u64 {
        self.stats.iter().map(|stats| stats.completion.count_up_to(ns)).sum()
    }

    /// Returns the percentages between `from` and each bound times `unit`, and beyond the last
    /// under the key `beyond`.
    fn of(&self, from: u64, unit: u64, bounds: &[u64], beyond: Option<&str>) -> Value {
        let mut map = Map::new();
        let mut before = if from == 0 { 0 } else { self.count_up_to(from) };
        for bound in bounds {
            let count = self.count_up_to(bound * unit).max(before);
            map.insert(bound.to_string(), percent(count - before, self.count).into());
            before = count;
        }
        if let Some(key) = beyond {
            map.insert(
                key.to_owned(),
                percent(self.count.saturating_sub(before), self.count).into(),
            );
        }
        map.into()
    }
}

fn milliseconds(seconds: f64) -> u64 {
    whole(seconds * 1e3)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positive; `as` saturates"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

/// Formats a time in UTC as fio does: `Sun Nov 22 02:35:32 2026`.
fn date(seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [(&str, u64); 12] = [
        ("Jan", 31),
        ("Feb", 28),
        ("Mar", 31),
        ("Apr", 30),
        ("May", 31),
        ("Jun", 30),
        ("Jul", 31),
        ("Aug", 31),
        ("Sep", 30),
        ("Oct", 31),
        ("Nov", 30),
        ("Dec", 31),
    ];
    let (mut day, second) = (seconds / 86_400, seconds % 86_400);
    let weekday = usize::try_from(day % 7).ok().and_then(|day| DAYS.get(day)).unwrap_or(&"");
    let mut year = 1970;
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = "";
    for (name, days) in MONTHS {
        let days = days + u64::from(name == "Feb" && is_leap(year));
        month = name;
        if day < days {
            break;
        }
        day -= days;
    }
    let (hours, minutes, seconds) = (second / 3600, second / 60 % 60, second % 60);
    format!("{weekday} {month} {:2} {hours:02}:{minutes:02}:{seconds:02} {year}", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_classes_are_of_the_completion() {
        let mut requests = WorkerStats::default();
        requests.reads.requests = 1;
        requests.reads.completion.record(Duration::from_micros(15));
        requests.reads.total.record(Duration::from_millis(3));
        let latencies = Distribution::new(&requests);
        let share = |unit| latencies.of(unit, unit, &[4, 10, 20], None);
        assert_eq!(share(1000), json!({ "4": 0.0, "10": 0.0, "20": 100.0 }));
        assert_eq!(share(1_000_000), json!({ "4": 0.0, "10": 0.0, "20": 0.0 }));
    }

    #[test]
    fn dates_are_formatted_as_by_fio() {
        assert_eq!(date(0), "Thu Jan  1 00:00:00 1970");
        assert_eq!(date(1_709_164_800), "Thu Feb 29 00:00:00 2024");
        assert_eq!(date(1_795_314_932), "Sun Nov 22 02:35:32 2026");
        assert_eq!(date(4_102_444_799), "Thu Dec 31 23:59:59 2099");
    }
}
