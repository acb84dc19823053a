//! Sizes and times as users write and read them. Suffixes are binary: `k` is 1024.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `4096`, `4k`, `8M`, `1G`, `2T`, optionally followed by `iB` or `B`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ByteSize(pub(crate) u64);

/// Why a word is not a size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum SizeError {
    /// It does not start with digits, or the suffix is unknown.
    #[error(
        "{0:?} is not a size: write a whole number, optionally with k, M, G or T (1k is 1024 bytes)"
    )]
    Word(String),
    /// It is not two sizes in ascending order.
    #[error("{0:?} is not a range of sizes: write the minimum and the maximum, for example 512-1M")]
    Range(String),
    /// It is not a percentage.
    #[error("{0:?} is not a percentage: write a whole number from 1 to 100 before the %")]
    Percent(String),
    /// It does not fit.
    #[error("{0:?} exceeds 64 bits: the limit is 16777215T")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(word: &str) -> Result<Self, SizeError> {
        let digits = word.bytes().take_while(u8::is_ascii_digit).count();
        let (number, letter) = word.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::Word(word.to_owned()));
        }
        let shift = match letter.to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(SizeError::Word(word.to_owned())),
        };
        let too_large = || SizeError::TooLarge(word.to_owned());
        let number: u64 = number.parse().map_err(|_| too_large())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(too_large)
    }
}

/// A part of something: bytes, or per cent (`50%`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Share {
    /// This many bytes.
    Bytes(u64),
    /// 1 to 100 per cent of it.
    Percent(u8),
}

impl Share {
    /// Returns how many of `whole` bytes it is.
    pub(crate) fn of(self, whole: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => {
                // At most `whole`.
                u64::try_from(u128::from(whole) * u128::from(percent) / 100).unwrap_or(whole)
            }
        }
    }
}

impl FromStr for Share {
    type Err = SizeError;

    fn from_str(word: &str) -> Result<Self, SizeError> {
        let Some(number) = word.strip_suffix('%') else {
            return word.parse().map(|ByteSize(size)| Self::Bytes(size));
        };
        let percent = number
            .parse()
            .ok()
            .filter(|percent| (1..=100).contains(percent) && !number.starts_with('+'));
        percent.map(Self::Percent).ok_or_else(|| SizeError::Percent(word.to_owned()))
    }
}

/// A range of sizes: `512-1M`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SizeRange {
    /// The least.
    pub(crate) min: ByteSize,
    /// The greatest, no less than `min`.
    pub(crate) max: ByteSize,
}

impl FromStr for SizeRange {
    type Err = SizeError;

    fn from_str(word: &str) -> Result<Self, SizeError> {
        let (min, max) = word.split_once('-').ok_or_else(|| SizeError::Range(word.to_owned()))?;
        let (min, max) = (min.parse()?, max.parse()?);
        if min > max { Err(SizeError::Range(word.to_owned())) } else { Ok(Self { min, max }) }
    }
}

/// A duration: `10` (seconds), `10s`, `500ms`, `2m`, `1h`, `1d`. From 1 ms to a
/// day.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TimeSpan(pub(crate) Duration);

/// Why a word is not a time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum TimeError {
    /// It does not start with digits, or the unit is unknown.
    #[error(
        "{0:?} is not a time: write a whole number of seconds, or one followed by ms, s, m, h or d"
    )]
    Word(String),
    /// It is zero or too long.
    #[error("{0:?} is not between 1ms and 1d")]
    Outside(String),
}

impl FromStr for TimeSpan {
    type Err = TimeError;

    fn from_str(word: &str) -> Result<Self, TimeError> {
        let digits = word.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = word.split_at(digits);
        let milliseconds: u64 = match unit {
            "ms" => 1,
            "" | "s" | "sec" => 1000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(TimeError::Word(word.to_owned())),
        };
        if number.is_empty() {
            return Err(TimeError::Word(word.to_owned()));
        }
        let outside = || TimeError::Outside(word.to_owned());
        let number: u64 = number.parse().map_err(|_| outside())?;
        let span = number.checked_mul(milliseconds).filter(|ms| (1..=86_400_000).contains(ms));
        span.map(|ms| Self(Duration::from_millis(ms))).ok_or_else(outside)
    }
}

impl ByteSize {
    /// Formats it as on a command line: `512M`.
    pub(crate) fn to_arg(self) -> String {
        let suffixes = [("T", 40), ("G", 30), ("M", 20), ("k", 10)];
        let fits =
            suffixes.iter().find(|(_, shift)| self.0 > 0 && self.0.trailing_zeros() >= *shift);
        fits.map_or_else(
            || self.0.to_string(),
            |(suffix, shift)| format!("{}{suffix}", self.0 >> shift),
        )
    }
}

impl fmt::Display for ByteSize {
    /// Writes it exactly where a unit allows it (`8 MiB`), else with one decimal (`1.5 MiB`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut unit, mut shift) = ("B", 0);
        for (name, at) in [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)] {
            if self.0 >> at > 0 {
                (unit, shift) = (name, at);
            }
        }
        let text = if self.0 & ((1 << shift) - 1) == 0 {
            format!("{} {unit}", self.0 >> shift)
        } else {
            format!("{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64)
        };
        f.pad(&text)
    }
}

/// Formats a number with commas between its thousands: `1,048,576`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things: `1 segment`, `2 segments`.
pub(crate) fn counted(number: u64, singular: &str) -> String {
    format!("{} {singular}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// Formats nanoseconds in the unit that leaves up to three digits before the point: `950 ns`,
/// `3.20 ms`.
pub(crate) fn time(ns: u64) -> String {
    let ns = ns as f64;
    match ns {
        n if n < 1e3 => format!("{n} ns"),
        n if n < 1e6 => three_digits(n / 1e3, "µs"),
        n if n < 1e9 => three_digits(n / 1e6, "ms"),
        n => three_digits(n / 1e9, "s"),
    }
}

fn three_digits(value: f64, unit: &str) -> String {
    let decimals = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// Returns `count` per second of `elapsed`; 0 if no time has passed.
pub(crate) fn per_second(count: u64, elapsed: Duration) -> f64 {
    let seconds = elapsed.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// Formats bytes per second: `1.2 GiB/s`.
pub(crate) fn rate(bytes: u64, elapsed: Duration) -> String {
    // Whole bytes are exact enough to print; the cast saturates.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a rate rounded to whole bytes; `as` saturates"
    )]
    let whole = per_second(bytes, elapsed) as u64;
    format!("{}/s", ByteSize(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (word, ms) in
            [("10", 10_000), ("2s", 2000), ("500ms", 500), ("2m", 120_000), ("1d", 86_400_000)]
        {
            assert_eq!(word.parse(), Ok(TimeSpan(Duration::from_millis(ms))), "{word}");
        }
        for word in ["", "s", "-1", "1.5s", "1us", "2 s"] {
            assert_eq!(word.parse::<TimeSpan>(), Err(TimeError::Word(word.to_owned())), "{word}");
        }
        for word in ["0", "0ms", "2d", "86401", "99999999999999999999s"] {
            assert_eq!(
                word.parse::<TimeSpan>(),
                Err(TimeError::Outside(word.to_owned())),
                "{word}"
            );
        }
    }

    #[test]
    fn a_share_is_bytes_or_per_cent() {
        assert_eq!(("4k".parse(), "50%".parse()), (Ok(Share::Bytes(4096)), Ok(Share::Percent(50))));
        assert_eq!(
            [Share::Percent(33).of(1000), Share::Percent(100).of(u64::MAX)],
            [330, u64::MAX]
        );
        for word in ["0%", "101%", "%", "1.5%", "+5%", "-1%", "5%%"] {
            assert_eq!(word.parse::<Share>(), Err(SizeError::Percent(word.to_owned())), "{word}");
        }
    }

    #[test]
    fn ranges_are_two_sizes_in_order() {
        assert_eq!("512-1M".parse(), Ok(SizeRange { min: ByteSize(512), max: ByteSize(1 << 20) }));
        assert_eq!("4k-4k".parse(), Ok(SizeRange { min: ByteSize(4096), max: ByteSize(4096) }));
        for word in ["", "512", "1M-512"] {
            assert_eq!(word.parse::<SizeRange>(), Err(SizeError::Range(word.to_owned())));
        }
        assert_eq!("512-".parse::<SizeRange>(), Err(SizeError::Word(String::new())));
    }

    #[test]
    fn sizes_are_binary_and_whole() {
        for (word, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("8M", 8 << 20),
            ("1g", 1 << 30),
            ("2T", 2 << 40),
            ("16777215T", 16_777_215 << 40),
        ] {
            assert_eq!(word.parse(), Ok(ByteSize(bytes)), "{word}");
        }
    }

    #[test]
    fn an_invalid_size_is_named() {
        for word in ["", "k", "-1", "+1", "1.5M", "4 k", "4q", "0x10", "1kk", "4k,8k"] {
            assert_eq!(word.parse::<ByteSize>(), Err(SizeError::Word(word.to_owned())), "{word}");
        }
        for word in ["16777216T", "18446744073709551616", "99999999999999999999G"] {
            assert_eq!(
                word.parse::<ByteSize>(),
                Err(SizeError::TooLarge(word.to_owned())),
                "{word}"
            );
        }
    }

    #[test]
    fn sizes_are_exact_where_a_unit_allows_it() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (256 << 20, "256 MiB"),
            ((1 << 30) + 1, "1.0 GiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }

    #[test]
    fn arguments_parse_as_what_was_formatted() {
        for (bytes, word) in
            [(0, "0"), (1000, "1000"), (1536, "1536"), (512 << 20, "512M"), (3 << 40, "3T")]
        {
            assert_eq!(ByteSize(bytes).to_arg(), word);
            assert_eq!(word.parse(), Ok(ByteSize(bytes)));
        }
    }

    #[test]
    fn numbers_times_and_rates_are_formatted() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([1, 2].map(|n| counted(n, "wait")), ["1 wait", "2 waits"]);
        assert_eq!(
            [999, 1_000, 12_500, 950_400, 3_200_000, 2_000_000_000].map(time),
            ["999 ns", "1.00 µs", "12.5 µs", "950 µs", "3.20 ms", "2.00 s"]
        );
        assert_eq!(rate(1 << 20, Duration::from_millis(500)), "2 MiB/s");
        assert_eq!(rate(1 << 20, Duration::ZERO), "0 B/s");
    }
}
