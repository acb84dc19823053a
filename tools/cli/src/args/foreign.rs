//! The replacements for options of other programs: fio's in `io`, other servers' in `serve`.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The program with which all of fio's options and job files work.
pub(crate) const ENGINE: &str = "fio itself runs on Pinfold, with all its options and job files, by its engine libpinfold-fio.so \
                                 (docs/io.md, \"fio\")";

/// fio's options in `io` of which there is another spelling or an equivalent.
const OF_FIO: [(&[&str], &str); 18] = [
    (
        &["filename", "directory"],
        "name the target, or a folder for a scratch file, without an option",
    ),
    (&["readwrite"], "use --rw"),
    (&["rwmixwrite"], "use --rwmixread, the percentage of reads"),
    (&["blocksize", "block_size"], "use --bs"),
    (&["filesize"], "use --size"),
    (&["fill_device", "fill_fs"], "use --size 100%"),
    (&["offset_increment"], "use --offset-increment"),
    (&["time_based"], "use --time-based"),
    (&["ramp_time"], "use --ramp-time"),
    (&["rate_iops"], "use --rate, in bytes per second"),
    (&["verify_requests"], "use --verify-requests"),
    (
        &["fdatasync", "end_fsync", "fsync_on_close", "sync"],
        "use --fsync N; what was written is always flushed at the end",
    ),
    (&["hipri"], "use --poll"),
    (&["mem", "iomem", "hugepage_size"], "use --memory"),
    (&["output_format", "minimal"], "use --json, which has keys of its own (docs/io-json.md)"),
    (&["readonly"], "data that exists is overwritten only with --force: leave it out"),
    (
        &["cpus_allowed", "cpumask", "numa_cpu_nodes", "numa_mem_policy"],
        "start pinfold under taskset or numactl",
    ),
    (
        &[
            "ioengine",
            "direct",
            "buffered",
            "thread",
            "group_reporting",
            "norandommap",
            "randrepeat",
            "invalidate",
        ],
        "the target decides, and jobs are threads that are reported together: leave it out",
    ),
];

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

/// Adds to clap's refusal of an option of `io` or `serve` what to write instead of an option of fio
/// or of another server, in place of its guess at a similar one; names fio's engine wherever `io`
/// refuses an option; and removes the guess at a value that would destroy data.
pub(crate) fn with_alternative(mut error: clap::Error) -> clap::Error {
    if guess_is_harmful(&error) {
        error.remove(ContextKind::SuggestedValue);
    }
    let text = error.to_string();
    let (of_io, of_serve) = (text.contains("pinfold io"), text.contains("pinfold serve"));
    let table: &[_] = if of_io {
        &OF_FIO
    } else if of_serve {
        &OF_SERVERS
    } else {
        &[]
    };
    let alternative = look_up(table, &error);
    if alternative.is_some() {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
    }
    let is_refused = matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::TooManyValues);
    let engine = (of_io && is_refused).then_some(ENGINE);
    let tips: Vec<_> = alternative.into_iter().chain(engine).map(Into::into).collect();
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
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
    fn an_option_of_fio_is_refused_with_ours_and_with_fios_engine() {
        for (option, part) in [
            ("--filename=soft:2M", "without an option"),
            ("--time_based", "use --time-based"),
            ("--filesize=1M", "use --size"),
            ("--sync=1", "use --fsync N"),
            ("--readonly", "--force"),
            ("--fill_device=1", "--size 100%"),
            ("--output-format=json", "use --json"),
            ("--output_format=json", "use --json"),
            ("--thread", "leave it out"),
        ] {
            let text = refusal(&["pinfold", "io", "soft:1M", option]);
            assert!(
                text.contains("tip: ") && text.contains(part) && text.contains(ENGINE),
                "{text}"
            );
            assert!(!text.contains("similar argument"), "{text}");
        }
        // Options without a counterpart here.
        for option in [
            "--steadystate=iops:0.3%",
            "--loops=2",
            "--thinktime=10",
            "--verify=crc32c",
            "--poll=1",
        ] {
            let text = refusal(&["pinfold", "io", "soft:1M", option]);
            assert!(text.contains("tip: ") && text.contains(ENGINE), "{text}");
        }
    }

    #[test]
    fn a_job_file_is_refused_with_fios_engine_unless_it_is_named_a_file() {
        let text = refusal(&["pinfold", "io", "jobs/a.fio"]);
        assert!(text.contains("jobs/a.fio") && text.contains(ENGINE), "{text}");
        assert!(text.contains("file:jobs/a.fio"), "{text}");
        Cli::try_parse_from(["pinfold", "io", "file:jobs/a.fio"]).unwrap();
        Cli::try_parse_from(["pinfold", "io", "soft:a.fio"]).unwrap();
        Cli::try_parse_from(["pinfold", "copy", "a.fio", "b.fio"]).unwrap();
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
        // For other options, all guesses stay.
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
    fn other_commands_and_unknown_options_keep_their_message() {
        let text = refusal(&["pinfold", "copy", "a", "b", "--sync"]);
        assert!(!text.contains("--fsync") && !text.contains(ENGINE), "{text}");
        assert!(refusal(&["pinfold", "io", "soft:1M", "--io-depth=1"]).contains("'--iodepth'"));
        let text = refusal(&["pinfold", "io", "soft:1M", "--bs=x"]);
        assert!(text.contains("is not a size") && !text.contains(ENGINE), "{text}");
    }

    #[test]
    fn no_alternative_is_for_an_option_that_exists() {
        for name in OF_FIO.iter().flat_map(|(names, _)| names.iter()) {
            let error = Cli::try_parse_from(["pinfold", "io", "soft:1M", &format!("--{name}")])
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnknownArgument, "{name}: {error}");
        }
    }
}
