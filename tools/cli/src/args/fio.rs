//! Options of fio that `io` does not have, with what to write instead.

use crate::units::TimeSpan;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::str::FromStr;
use std::time::Duration;

/// fio's options that change nothing here, whatever their value: jobs are threads, sections run one
/// after the other, and buffers and files are registered wherever the kernel supports it.
pub(super) const IGNORED: [&str; 20] = [
    "allrandrepeat",
    "stonewall",
    "wait_for_previous",
    "wait-for-previous",
    "fixedbufs",
    "registerfiles",
    "nonvectored",
    "random_generator",
    "random-generator",
    "new_group",
    "new-group",
    "exitall",
    "create_serialize",
    "create-serialize",
    "fallocate",
    "softrandommap",
    "gtod_cpu",
    "eta",
    "clocksource",
    "overwrite",
];

/// fio's options with values that say what happens here anyway. Job files often have them.
const DEFAULTS: [(&str, &[&str]); 19] = [
    ("sync", &["0", "none"]),
    ("nrfiles", &["1"]),
    ("unlink", &["0"]),
    ("create_only", &["0"]),
    ("create_on_open", &["0"]),
    ("pre_read", &["0"]),
    ("zero_buffers", &["0"]),
    ("gtod_reduce", &["0"]),
    ("disable_lat", &["0"]),
    ("disable_clat", &["0"]),
    ("disable_slat", &["0"]),
    ("clat_percentiles", &["1"]),
    ("lat_percentiles", &["0"]),
    ("slat_percentiles", &["0"]),
    ("continue_on_error", &["none"]),
    ("do_verify", &["1"]),
    ("verify_fatal", &["1"]),
    ("bs_unaligned", &["0"]),
    ("zonemode", &["none"]),
];

/// Returns whether a job file's option says what happens here anyway.
pub(super) fn is_default(key: &str, value: &str) -> bool {
    DEFAULTS.iter().any(|(name, values)| *name == key && values.contains(&value))
}

/// Names as fio spells them, and the alternative.
const ALTERNATIVES: [(&[&str], &str); 30] = [
    (&["filesize"], "use --size"),
    (&["fill_device", "fill_fs"], "use --size 100%"),
    (&["readonly"], "data that exists is overwritten only with --force: leave it out"),
    (&["section"], "write the section into a job file of its own"),
    (
        &[
            "steadystate",
            "ss",
            "steadystate_duration",
            "ss_dur",
            "steadystate_ramp_time",
            "ss_ramp",
        ],
        "use --ramp_time and --runtime",
    ),
    (&["bssplit", "bs_unaligned", "blockalign"], "use --bs, or --bsrange with --verify"),
    (
        &["filename_format", "nrfiles", "openfiles", "file_service_type", "opendir"],
        "a job has one target: use --filename",
    ),
    (&["output", "append_terse"], "redirect the standard output"),
    (
        &[
            "minimal",
            "terse_version",
            "status_interval",
            "write_bw_log",
            "write_lat_log",
            "write_iops_log",
            "bandwidth_log",
        ],
        "use --output-format json",
    ),
    (&["iomem", "hugepage_size"], "use --memory"),
    (
        &[
            "do_verify",
            "verify_fatal",
            "verify_pattern",
            "verify_only",
            "verify_async",
            "verify_backlog",
            "verify_interval",
            "verify_offset",
            "verify_state_save",
            "verify_state_load",
            "verify_dump",
        ],
        "use --verify, which compares every byte",
    ),
    (&["experimental_verify"], "use --verify"),
    (
        &["cpus_allowed", "cpumask", "cpus_allowed_policy", "numa_cpu_nodes", "numa_mem_policy"],
        "start pinfold under taskset or numactl",
    ),
    (&["prio", "prioclass", "nice"], "start pinfold under ionice or nice"),
    (
        &["startdelay", "start_delay", "exec_prerun", "exec_postrun"],
        "run the command before or after pinfold",
    ),
    (
        &[
            "iodepth_batch",
            "iodepth_batch_submit",
            "iodepth_batch_complete",
            "iodepth_batch_complete_min",
            "iodepth_batch_complete_max",
            "iodepth_low",
        ],
        "batches are automatic: leave it out",
    ),
    (&["clat_percentiles", "lat_percentiles", "slat_percentiles"], "use --percentile_list"),
    (&["sync"], "--fsync 1 flushes after each write (sync=0 is the default: leave it out)"),
    (&["sync_file_range", "write_barrier"], "use --fsync"),
    (&["invalidate"], "--direct 1, the default, bypasses the page cache: leave it out"),
    (
        &["unlink", "create_on_open", "create_only", "pre_read"],
        "a scratch file never has a name during the run: leave it out",
    ),
    (
        &[
            "zero_buffers",
            "scramble_buffers",
            "buffer_pattern",
            "buffer_compress_percentage",
            "dedupe_percentage",
        ],
        "buffers hold random data: leave it out, or use --refill_buffers",
    ),
    (
        &["rw_sequencer", "percentage_random", "unified_rw_reporting"],
        "write one section for each kind of request in a job file",
    ),
    (
        &[
            "rate_min",
            "rate_iops_min",
            "rate_process",
            "rate_cycle",
            "latency_target",
            "latency_window",
            "latency_percentile",
            "max_latency",
        ],
        "use --rate or --rate_iops, and the percentiles of the report",
    ),
    (
        &["thinktime_spin", "thinktime_iotime", "thinktime_blocks_type"],
        "use --thinktime and --thinktime_blocks",
    ),
    (
        &["continue_on_error", "error_dump", "ignore_error"],
        "the first error ends the run, which reports what was done: leave it out",
    ),
    (
        &["gtod_reduce", "disable_lat", "disable_clat", "disable_slat", "disable_bw_measurement"],
        "latencies are always measured: leave it out",
    ),
    (&["bwavgtime", "iopsavgtime", "log_avg_msec"], "samples are taken every 500 ms: leave it out"),
    (
        &["zonemode", "zonesize", "zoneskip", "zonerange"],
        "use --offset, --size and --offset_increment",
    ),
    (&["sqthread_poll", "hipri_percentage", "uncached", "nowait"], "use --poll, or leave it out"),
];

/// How the offsets of random requests are distributed over the part that is used.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Distribution {
    /// All blocks are as likely.
    Random,
    /// A block's likelihood is its rank to the power of minus `theta`.
    Zipf(f64),
    /// A share `h` of the requests goes to a share of 1 - `h` of the blocks.
    Pareto(f64),
    /// Around the middle, with a standard deviation in per cent of the region.
    Normal(f64),
}

impl FromStr for Distribution {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let (name, number) =
            word.split_once(':').map_or((word, None), |(name, number)| (name, Some(number)));
        let number = number.map(|text| {
            let allowed = |n: &f64| match name {
                "zipf" => *n > 0.0 && *n <= 100.0 && *n != 1.0,
                "pareto" => *n > 0.0 && *n < 1.0,
                _ => *n > 0.0 && *n <= 100.0,
            };
            text.parse::<f64>().ok().filter(allowed)
        });
        match (name, number) {
            ("random", None) => Ok(Self::Random),
            // fio's default values.
            ("zipf", None) => Ok(Self::Zipf(1.1)),
            ("pareto", None) => Ok(Self::Pareto(0.2)),
            ("zipf", Some(Some(theta))) => Ok(Self::Zipf(theta)),
            ("pareto", Some(Some(h))) => Ok(Self::Pareto(h)),
            ("normal", Some(Some(deviation))) => Ok(Self::Normal(deviation)),
            ("zoned" | "zoned_abs", _) => {
                Err("zones are not supported: write a section with --offset and --size for each".to_owned())
            }
            _ => {
                Err("write random, zipf:THETA (above 0, at most 100, not 1), pareto:H (between 0 and 1), or \
                      normal:DEVIATION (above 0, at most 100 per cent)"
                    .to_owned())
            }
        }
    }
}

/// A pause as fio writes it: microseconds, unless a unit follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ThinkTime(pub(crate) Duration);

impl FromStr for ThinkTime {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let number = word.strip_suffix("us").unwrap_or(word);
        if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) {
            let microseconds = number.parse().ok().filter(|us| *us <= 86_400_000_000);
            return microseconds
                .map(Duration::from_micros)
                .map(Self)
                .ok_or_else(|| "at most 1d".to_owned());
        }
        let span: Result<TimeSpan, _> = word.parse();
        span.map(|TimeSpan(time)| Self(time)).map_err(|_| {
            "write microseconds, or a whole number followed by us, ms, s, m, h or d, at most 1d"
                .to_owned()
        })
    }
}

/// Options of nbdkit and qemu-nbd that `serve` does not have, and the alternative.
const OF_SERVERS: [(&[&str], &str); 6] = [
    (&["p", "port", "i", "ipaddr", "b", "bind"], "use --nbd HOST:PORT"),
    (&["k", "socket"], "use -U PATH"),
    (&["e", "exportname", "export_name", "x"], "use --name"),
    (&["D"], "use --description"),
    (&["f", "foreground"], "it stays in the foreground: leave it out"),
    (&["t", "persistent"], "it goes on after the first client: leave it out"),
];

/// Returns the option that `error` names, without what follows it.
fn option_of(error: &clap::Error) -> Option<&str> {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) => option.split(' ').next(),
        _ => None,
    }
}

fn look_up(table: &[(&[&str], &'static str)], error: &clap::Error) -> Option<&'static str> {
    let name = option_of(error)?.trim_start_matches('-').replace('-', "_");
    let mut rows = table.iter();
    let known =
        rows.find(|(names, _)| names.contains(&name.as_str())).map(|(_, alternative)| *alternative);
    known.filter(|_| error.kind() == ErrorKind::UnknownArgument)
}

/// Returns what to write in place of the option that `error` refuses, if it is one of fio's.
pub(super) fn alternative(error: &clap::Error) -> Option<&'static str> {
    look_up(&ALTERNATIVES, error)
}

/// Returns what to write where a command line of fio means something else, or lacks what `io`
/// needs.
fn next_step(error: &clap::Error) -> Option<&'static str> {
    match error.kind() {
        ErrorKind::MissingRequiredArgument => match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(missing))
                if missing.iter().any(|name| name.contains("TARGET")) =>
            {
                Some(
                    "name the target with --filename, or a folder for a scratch file with --directory",
                )
            }
            _ => None,
        },
        // The second one begins a second job in fio.
        ErrorKind::ArgumentConflict
            if option_of(error) == Some("--name")
                && error.to_string().contains("multiple times") =>
        {
            Some("write a job file (a name that ends in .fio) with a section for each job")
        }
        _ => alternative(error),
    }
}

/// Returns whether clap's guess at a value changes what a target holds, where the word did not ask
/// for it: `--rw random` is not `randtrim`.
fn guess_is_harmful(error: &clap::Error) -> bool {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        Some(ContextValue::Strings(texts)) => texts.first().map_or("", String::as_str),
        _ => "",
    };
    let changes = |word: &str| word.contains('w') || word.contains('t');
    option_of(error) == Some("--rw")
        && changes(text(ContextKind::SuggestedValue))
        && !changes(text(ContextKind::InvalidValue))
}

/// Replaces clap's guess at a similar option of `io` or `serve` by the alternative to an option of
/// fio or of other servers, and removes its guess at a value that would destroy data.
pub(crate) fn with_alternative(mut error: clap::Error) -> clap::Error {
    if guess_is_harmful(&error) {
        error.remove(ContextKind::SuggestedValue);
    }
    let text = error.to_string();
    let of_io = next_step(&error).filter(|_| text.contains("pinfold io"));
    let of_serve = look_up(&OF_SERVERS, &error).filter(|_| text.contains("pinfold serve"));
    if let Some(alternative) = of_io.or(of_serve) {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![alternative.into()]));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn refusal(args: &[&str]) -> String {
        with_alternative(Cli::try_parse_from(args).unwrap_err()).to_string()
    }

    #[test]
    fn an_option_of_fio_is_refused_with_the_alternative() {
        let text = refusal(&["pinfold", "io", "soft:1M", "--filesize=1M"]);
        assert!(text.contains("--filesize") && text.contains("use --size"), "{text}");
        let text = refusal(&["pinfold", "io", "soft:1M", "--sync=1"]);
        assert!(text.contains("--fsync 1") && !text.contains("rwmixread"), "{text}");
        for (option, part) in [
            ("--readonly", "--force"),
            ("--section=a", "job file"),
            ("--fill_device=1", "--size 100%"),
            ("--steadystate=iops:0.3%", "--ramp_time"),
        ] {
            let text = refusal(&["pinfold", "io", "soft:1M", option]);
            assert!(text.contains("tip: ") && text.contains(part), "{text}");
        }
    }

    #[test]
    fn no_value_that_destroys_data_is_guessed() {
        for (word, guess) in [
            ("random", None),
            ("rand", None),
            ("randrea", Some("randread")),
            ("randwrit", Some("randwrite")),
            ("randtrm", Some("randtrim")),
        ] {
            let text = refusal(&["pinfold", "io", "soft:1M", &format!("--rw={word}")]);
            let guessed = text.split("tip: a similar value exists: '").nth(1);
            let guessed = guessed.and_then(|rest| rest.split('\'').next());
            assert_eq!(guessed, guess, "{text}");
        }
        // Of other options all guesses stay.
        let text = refusal(&["pinfold", "io", "soft:1M", "--protect=stric"]);
        assert!(text.contains("'strict'"), "{text}");
    }

    #[test]
    fn an_option_of_other_servers_is_refused_with_the_alternative() {
        for (options, part) in [
            (&["-p", "10809"][..], "--nbd HOST:PORT"),
            (&["-e", "name"], "--name"),
            (&["-x", "name"], "--name"),
            (&["-f"], "stays in the foreground"),
            (&["-t"], "after the first client"),
        ] {
            let text = refusal(&[&["pinfold", "serve", "soft:1M"], options].concat());
            assert!(text.contains("tip: ") && text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_fio_command_without_target_or_with_two_jobs_has_a_tip() {
        let text = refusal(&["pinfold", "io", "--name=x", "--rw=write", "--size=4M"]);
        assert!(text.contains("--filename") && text.contains("--directory"), "{text}");
        let text = refusal(&["pinfold", "io", "soft:1M", "--name=a", "--name=b"]);
        assert!(text.contains("job file") && text.contains("section"), "{text}");
    }

    #[test]
    fn rates_are_one_for_all_directions() {
        for option in ["--rate=1m,2m", "--rate_iops=10,20"] {
            let text = refusal(&["pinfold", "io", "soft:1M", option]);
            assert!(text.contains("rate for each direction"), "{text}");
        }
        for option in ["--rate=1m,1m", "--rate_iops=10,10"] {
            Cli::try_parse_from(["pinfold", "io", "soft:1M", option]).unwrap();
        }
    }

    #[test]
    fn harmless_options_are_accepted_with_any_value() {
        for name in IGNORED.into_iter().chain(["thread"]) {
            for value in ["", "=0", "=tausworthe64"] {
                let option = format!("--{name}{value}");
                Cli::try_parse_from(["pinfold", "io", "soft:1M", &option]).unwrap();
            }
        }
    }

    #[test]
    fn distributions_and_pauses_are_parsed_as_by_fio() {
        assert_eq!("zipf:1.2".parse(), Ok(Distribution::Zipf(1.2)));
        assert_eq!("pareto".parse(), Ok(Distribution::Pareto(0.2)));
        assert_eq!("normal:10".parse(), Ok(Distribution::Normal(10.0)));
        for word in [
            "", "zipf:1", "zipf:x", "zipf:NaN", "pareto:1", "normal", "normal:0", "flat",
            "random:2",
        ] {
            assert!(word.parse::<Distribution>().unwrap_err().contains("zipf:THETA"), "{word}");
        }
        assert!("zoned:60/10".parse::<Distribution>().unwrap_err().contains("--offset"));
        for (word, us) in [("100", 100), ("100us", 100), ("2ms", 2000), ("1s", 1_000_000), ("0", 0)]
        {
            assert_eq!(word.parse(), Ok(ThinkTime(Duration::from_micros(us))), "{word}");
        }
        for word in ["", "us", "x", "1y", "-1", "99999999999999999999"] {
            assert!(word.parse::<ThinkTime>().is_err(), "{word}");
        }
    }

    #[test]
    fn other_commands_and_unknown_options_keep_their_message() {
        assert!(!refusal(&["pinfold", "copy", "a", "b", "--sync"]).contains("--fsync"));
        assert!(refusal(&["pinfold", "io", "soft:1M", "--io-depth=1"]).contains("iodepth"));
    }

    #[test]
    fn no_alternative_is_for_an_option_that_exists() {
        for (name, _) in
            ALTERNATIVES.iter().flat_map(|(names, text)| names.iter().map(move |name| (name, text)))
        {
            let error = Cli::try_parse_from(["pinfold", "io", "soft:1M", &format!("--{name}")])
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnknownArgument, "{name}: {error}");
        }
    }
}
