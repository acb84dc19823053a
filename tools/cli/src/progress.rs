//! The live line of a run, on a terminal only: how far it is, its rates, and when it will end.

use crate::units::{per_second, rate};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::termios::tcgetwinsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most columns of the live line.
const COLUMNS: usize = 80;
/// The interval at which it is drawn.
const REDRAW: Duration = Duration::from_millis(200);
/// The time over which the rates are those of, at least.
const WINDOW: Duration = Duration::from_secs(1);

/// The progress of a phase, drawn on standard error if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    is_hidden: bool,
    title: String,
    began: Instant,
    /// The end of the phase.
    end: End,
    /// The line says requests per second.
    shows_requests: bool,
    requests: AtomicU64,
    bytes: AtomicU64,
    /// When the line is due, ms since `began`.
    due: AtomicU64,
    window: Mutex<Window>,
}

/// The end of a phase: the first limit that is reached.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End {
    /// After this many bytes.
    pub(crate) bytes: Option<u64>,
    /// After this time.
    pub(crate) time: Option<Duration>,
}

/// The figures at the start of the time over which the rates are measured.
#[derive(Clone, Copy, Debug)]
struct Window {
    from: Figures,
    /// The figures with which the next one begins.
    next: Figures,
}

#[derive(Clone, Copy, Debug)]
struct Figures {
    at: Instant,
    requests: u64,
    bytes: u64,
}

impl Progress {
    /// Creates the line of `total` bytes that are moved, preceded by `title`.
    pub(crate) fn new(title: &str, total: u64) -> Self {
        Self::of(title, End { bytes: Some(total), time: None }, false)
    }

    /// Creates the line of requests, which says how many there are per second.
    pub(crate) fn requests(title: &str, end: End) -> Self {
        Self::of(title, end, true)
    }

    fn of(title: &str, end: End, shows_requests: bool) -> Self {
        // `stderr` draws nothing where standard error is not a terminal. No thread draws it, which
        // could not always be started.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        let figures = Figures { at: Instant::now(), requests: 0, bytes: 0 };
        Self {
            is_hidden: bar.is_hidden(),
            bar,
            title: title.to_owned(),
            began: figures.at,
            end,
            shows_requests,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            due: AtomicU64::new(0),
            window: Mutex::new(Window { from: figures, next: figures }),
        }
    }

    /// Creates a line that is never drawn.
    pub(crate) fn hidden() -> Self {
        let mut progress = Self::of("", End::default(), false);
        progress.is_hidden = true;
        progress
    }

    /// Counts a completed request of `bytes`, and draws the line if it is due.
    pub(crate) fn add(&self, bytes: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if !self.is_hidden {
            self.tick(Instant::now());
        }
    }

    /// Draws the line if it is due at `now`.
    pub(crate) fn tick(&self, now: Instant) {
        if self.is_hidden {
            return;
        }
        let elapsed = u64::try_from(now.saturating_duration_since(self.began).as_millis())
            .unwrap_or(u64::MAX);
        let due = self.due.load(Ordering::Relaxed);
        let next = elapsed.saturating_add(u64::try_from(REDRAW.as_millis()).unwrap_or(u64::MAX));
        // If another thread draws it, this one need not.
        if elapsed >= due
            && self.due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            self.bar.set_message(self.line(now, columns_here()));
        }
    }

    /// Returns the line, of at most `columns`.
    fn line(&self, now: Instant, columns: usize) -> String {
        let (requests, bytes) =
            (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        let figures = Figures { at: now, requests, bytes };
        let from = self.window.lock().map_or(figures, |mut window| {
            if now.saturating_duration_since(window.next.at) >= WINDOW {
                *window = Window { from: window.next, next: figures };
            }
            window.from
        });
        let passed = now.saturating_duration_since(from.at);
        let bandwidth = rate(bytes.saturating_sub(from.bytes), passed);
        let elapsed = now.saturating_duration_since(self.began);
        let part_of =
            |part: f64, whole: f64| if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 1.0 };
        let by_bytes = self.end.bytes.map(|all| {
            let part = part_of(bytes as f64, all as f64);
            // At the mean rate so far.
            (part, elapsed.as_secs_f64() * (1.0 / part - 1.0))
        });
        let by_time = self.end.time.map(|all| {
            let part = part_of(elapsed.as_secs_f64(), all.as_secs_f64());
            (part, all.saturating_sub(elapsed).as_secs_f64())
        });
        let (part, left) = by_bytes
            .into_iter()
            .chain(by_time)
            .fold((0.0_f64, f64::INFINITY), |all, one| (all.0.max(one.0), all.1.min(one.1)));
        let iops = match self.shows_requests {
            true => {
                format!(
                    "{} IOPS  ",
                    thousands(per_second(requests.saturating_sub(from.requests), passed))
                )
            }
            false => String::new(),
        };
        let mut line =
            format!("{}  {:3.0}%  {iops}{bandwidth}  ETA {}", self.title, part * 100.0, eta(left));
        // The bar gets the remaining columns.
        let room = columns.saturating_sub(line.chars().count() + 4).min(30);
        if room >= 5 {
            let filled = (0..room).filter(|&at| (at as f64) < part * room as f64).count();
            let bar = format!("  [{}{}]", "=".repeat(filled), " ".repeat(room - filled));
            line.insert_str(self.title.len(), &bar);
        }
        line.chars().take(columns).collect()
    }
}

/// Returns how many columns the line has on the terminal, which may be resized at any time.
fn columns_here() -> usize {
    let size = tcgetwinsize(std::io::stderr()).ok();
    columns(size.map(|size| size.ws_col.into()), std::env::var("COLUMNS").ok().as_deref())
}

/// Returns how many columns the line has: those of the terminal, or of the variable where the
/// terminal does not know its size; at most 80, less one, in which the cursor stays.
fn columns(terminal: Option<usize>, variable: Option<&str>) -> usize {
    let variable = || variable.and_then(|text| text.parse().ok());
    let known = |columns: &usize| *columns > 0;
    let columns = terminal.filter(known).or_else(|| variable().filter(known));
    columns.map_or(COLUMNS, |columns| columns.min(COLUMNS)).saturating_sub(1)
}

/// Formats a time to come: `01:30`, `2:00:05`, `--:--` where it is unknown.
fn eta(seconds: f64) -> String {
    let Ok(left) = Duration::try_from_secs_f64(seconds.ceil()) else { return "--:--".to_owned() };
    let (hours, minutes, seconds) =
        (left.as_secs() / 3600, left.as_secs() / 60 % 60, left.as_secs() % 60);
    match hours {
        0 => format!("{minutes:02}:{seconds:02}"),
        1..1000 => format!("{hours}:{minutes:02}:{seconds:02}"),
        _ => "--:--".to_owned(),
    }
}

/// Formats a number of requests: `950`, `12.5k`, `1.25M`.
fn thousands(value: f64) -> String {
    match value {
        v if v < 999.5 => format!("{v:.0}"),
        v if v < 999_500.0 => format!("{:.1}k", v / 1e3),
        v => format!("{:.2}M", v / 1e6),
    }
}

/// A line of figures that change, drawn on standard error if that is a terminal.
#[derive(Debug)]
pub(crate) struct Line(ProgressBar);

impl Line {
    /// Creates the line, preceded by `title`.
    pub(crate) fn new(title: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        if let Ok(style) = ProgressStyle::with_template("{prefix}: {wide_msg}") {
            bar.set_style(style);
        }
        bar.set_prefix(title.to_owned());
        Self(bar)
    }

    /// Shows what `text` returns, which is not called where nothing is drawn.
    pub(crate) fn show(&self, text: impl FnOnce() -> String) {
        if !self.0.is_hidden() {
            self.0.set_message(text());
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Progress {
    /// Removes the bar; the report has the figures.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(progress: &Progress, time: Duration) -> String {
        progress.line(progress.began + time, COLUMNS - 1)
    }

    #[test]
    fn the_line_has_rates_and_eta_and_fits_80_columns() {
        for title in ["running", "verifying source"] {
            let timed = Progress::requests(
                title,
                End { bytes: None, time: Some(Duration::from_secs(3600)) },
            );
            for _ in 0..1_500_000 {
                timed.add(4096);
            }
            let line = after(&timed, Duration::from_secs(1));
            for part in [title, "  0%", "1.50M IOPS", "5.7 GiB/s", "ETA 59:59"] {
                assert!(line.contains(part), "{part:?} is not in {line:?}");
            }
            assert!(line.chars().count() < 80, "{line:?}");
        }
        let bytes = Progress::new("copying", 100 << 20);
        bytes.add(40 << 20);
        let line = after(&bytes, Duration::from_secs(4));
        for part in ["copying  [============                  ]", " 40%", "10 MiB/s", "ETA 00:06"] {
            assert!(line.contains(part), "{part:?} is not in {line:?}");
        }
        assert!(!line.contains("IOPS") && line.chars().count() < 80, "{line:?}");
        let both = Progress::requests(
            "",
            End { bytes: Some(1 << 40), time: Some(Duration::from_secs(10)) },
        );
        both.add(1);
        assert!(after(&both, Duration::from_secs(3)).contains("ETA 00:07"));
        assert!(after(&Progress::new("x", 100), Duration::ZERO).contains("ETA --:--"));
    }

    #[test]
    fn the_rates_are_those_of_the_last_seconds() {
        let progress = Progress::new("x", 100 << 20);
        progress.add(40 << 20);
        after(&progress, Duration::from_secs(4));
        progress.add(1 << 20);
        after(&progress, Duration::from_secs(5));
        progress.add(1 << 20);
        let line = after(&progress, Duration::from_secs(6));
        assert!(line.contains(" 1 MiB/s"), "{line:?}");
    }

    #[test]
    fn columns_are_those_of_the_terminal_or_the_variable() {
        for variable in [None, Some(""), Some("0"), Some("x"), Some("200")] {
            assert_eq!(
                [None, Some(0), Some(80), Some(300)].map(|terminal| columns(terminal, variable)),
                [79; 4]
            );
            assert_eq!(columns(Some(50), variable), 49);
        }
        assert_eq!([None, Some(0)].map(|terminal| columns(terminal, Some("40"))), [39; 2]);
        assert_eq!(columns(Some(50), Some("40")), 49);
        let narrow = Progress::new("copying", 100);
        assert_eq!(narrow.line(narrow.began + Duration::from_secs(1), 19).chars().count(), 19);
    }

    #[test]
    fn times_to_come_are_formatted() {
        assert_eq!([0.0, 59.2, 3599.0, 3600.0].map(eta), ["00:00", "01:00", "59:59", "1:00:00"]);
        assert_eq!([f64::INFINITY, f64::NAN, 1e9].map(eta), ["--:--"; 3]);
    }
}
