//! Help, completions, the man page, `doctor` and `pools`.

use crate::common::{Folder, bytes, finish, pinfold, start, words};

#[test]
fn help_names_every_command_the_targets_and_the_exit_codes() {
    let help = pinfold(&["--help"]).ok();
    for part in [
        "copy",
        "io",
        "doctor",
        "pools",
        "bench",
        "replay",
        "completions",
        "man",
        "soft:SIZE",
        "130",
        "Examples:",
    ] {
        assert!(help.contains(part), "{part}");
    }
    for command in ["copy", "io", "doctor", "pools", "bench", "replay", "completions", "man"] {
        assert!(pinfold(&[command, "--help"]).ok().contains("Examples:"), "{command}");
    }
    assert!(pinfold(&["--version"]).ok().starts_with("pinfold 0"));
}

#[test]
fn completions_and_the_man_page_have_all_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = pinfold(&["completions", shell]).ok();
        assert!(script.contains("iodepth") && script.contains("rwmixread"), "{shell}");
    }
    let page = pinfold(&["man"]).ok();
    for part in [".TH", "pinfold", "iodepth", "rwmixread", "COMMAND DOCTOR", "EXIT CODES"] {
        assert!(page.to_uppercase().contains(&part.to_uppercase()), "{part}");
    }
}

#[test]
fn doctor_reports_what_is_supported_and_what_is_missing() {
    let text = pinfold(&["doctor"]).ok();
    let report = pinfold(&["doctor", "--json"]).json();
    let findings = report["findings"].as_array().unwrap();
    for what in [
        "kernel", "2 MiB", "1 GiB", "MEMLOCK", "IOMMU", "VFIO", "iommufd", "io_uring", "AF_XDP",
        "NUMA",
    ] {
        let named = |finding: &serde_json::Value| finding["what"].as_str().unwrap().contains(what);
        assert!(findings.iter().any(named), "{what}");
        assert!(text.contains(what), "{what}");
    }
    for finding in findings {
        assert!(["good", "limited", "missing"].contains(&finding["state"].as_str().unwrap()));
        if let Some(fix) = finding["fix"].as_str() {
            assert!(text.contains(&format!("fix: {fix}")));
        }
    }
}

#[test]
fn pools_prints_the_kernels_report() {
    let out = pinfold(&["pools"]).ok();
    let mut lines = out.lines();
    assert_eq!(lines.next(), Some("poolinfo - 0.1"));
    let report = pinfold(&["pools", "--json"]).json();
    let pools = report["pools"].as_array().unwrap();
    assert!(!pools.is_empty());
    for pool in pools {
        let line = lines.next().unwrap();
        let name = pool["name"].as_str().unwrap();
        assert!(line.starts_with(name), "{line}");
        assert_eq!(line[name.len()..].split_whitespace().count(), 4, "{line}");
        assert!(
            pool["peak"].as_u64().unwrap() > 0
                && pool["blocks"].as_u64() >= pool["in_use"].as_u64()
        );
    }
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1 << 20));
    let line = format!("copy {source} {} --via soft:1M --pools", folder.arg("out"));
    assert!(pinfold(&words(&line)).ok().contains("\npoolinfo - 0.1\n"));
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let mut child = start(&["doctor"]);
    drop(child.stdout.take());
    let (empty, writer) = std::io::pipe().unwrap();
    drop(writer);
    child.stdout = Some(std::process::ChildStdout::from(std::os::fd::OwnedFd::from(empty)));
    let ended = finish(child);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
}
