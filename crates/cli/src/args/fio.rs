//! Options of fio that `io` does not have, with what to write instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Names as fio spells them, and the alternative.
const ALTERNATIVES: [(&[&str], &str); 17] = [
    (&["thread"], "jobs always run as threads: leave it out"),
    (
        &["stonewall", "wait_for_previous"],
        "it separates the sections of a job file: write one, or leave it out",
    ),
    (&["buffered"], "use --direct 0"),
    (&["io_size", "filesize"], "use --size, and --time_based to go on after --size bytes"),
    (&["loops"], "use --runtime and --time_based"),
    (&["rate_iops"], "use --rate, in bytes per second"),
    (&["rwmixwrite"], "use --rwmixread with the rest of 100"),
    (&["bssplit"], "use --bs, or --bsrange with --verify"),
    (&["directory"], "use --filename with the whole path"),
    (&["output"], "redirect the standard output"),
    (&["minimal", "terse_version"], "use --output-format json"),
    (&["iomem", "hugepage_size"], "use --memory"),
    (&["do_verify", "verify_fatal"], "use --verify, which compares every byte"),
    (&["cpus_allowed", "numa_cpu_nodes"], "start pinfold under taskset or numactl"),
    (&["fixedbufs", "registerfiles"], "done wherever the kernel supports it: leave it out"),
    (
        &["iodepth_batch", "iodepth_batch_submit", "iodepth_batch_complete"],
        "batches are automatic: leave it out",
    ),
    (&["clat_percentiles", "lat_percentiles", "slat_percentiles"], "use --percentile_list"),
];

/// Returns what to write in place of the option that `error` refuses, if it is one of fio's.
pub(super) fn alternative(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = option.trim_start_matches('-').replace('-', "_");
    let mut rows = ALTERNATIVES.iter();
    let known = rows.find(|(names, _)| names.contains(&name.as_str())).map(|(_, alternative)| *alternative);
    known.filter(|_| error.kind() == ErrorKind::UnknownArgument)
}

/// Replaces clap's guess at a similar option of `io` by the alternative to an option of fio.
pub(crate) fn with_alternative(mut error: clap::Error) -> clap::Error {
    if let Some(alternative) = alternative(&error)
        && error.to_string().contains("pinfold io")
    {
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
        let text = refusal(&["pinfold", "io", "soft:1M", "--io-size=1M"]);
        assert!(text.contains("--io-size") && text.contains("use --size"), "{text}");
        let text = refusal(&["pinfold", "io", "soft:1M", "--thread"]);
        assert!(text.contains("as threads") && !text.contains("rwmixread"), "{text}");
    }

    #[test]
    fn other_commands_and_unknown_options_keep_their_message() {
        assert!(!refusal(&["pinfold", "copy", "a", "b", "--thread"]).contains("as threads"));
        assert!(refusal(&["pinfold", "io", "soft:1M", "--io-depth=1"]).contains("iodepth"));
    }

    #[test]
    fn no_alternative_is_for_an_option_that_exists() {
        for (name, _) in
            ALTERNATIVES.iter().flat_map(|(names, text)| names.iter().map(move |name| (name, text)))
        {
            let error = Cli::try_parse_from(["pinfold", "io", "soft:1M", &format!("--{name}")]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnknownArgument, "{name}: {error}");
        }
    }
}
