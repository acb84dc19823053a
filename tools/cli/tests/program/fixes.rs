//! Every command that the product prints as a fix, and the test that runs it: after it, what was
//! refused works.
use crate::common::{Ended, Folder, copy_program, finish_with, pinfold, skipped, words};
use crate::limits::{finding, is_root, works};
use crate::receive::ended_once_released;
use crate::wire::{Wire, run};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pinfold");

/// The beginning of each command in the source, behind `sudo `, and the test that runs it: one of
/// the programs' tests, or a function of the virtual machine's (`vm/guest/tests`), which has what
/// these commands change. Without one, why no test can run it.
const FIXES: &[(&str, &str)] = &[
    ("sh -c {}", "the_memory_limit_of_a_control_group_is_reported_and_checked"),
    ("sh -c 'echo madvise > {}'", "fixes_hugepages"),
    ("sh -c 'echo {pages} > {file}; grep -qx", "fixes_gigantic_pages"),
    ("sysctl vm.nr_hugepages={pages}", "fixes_hugepages"),
    (
        "sysctl vm.nr_hugepages=64",
        "it is for a unit taken from the kernel: vm/vtd reserves pages first",
    ),
    ("sysctl vm.compact_memory=1", "fixes_hugepages"),
    ("sysctl vm.overcommit_kbytes={kib}", "fixes_overcommit"),
    ("sysctl kernel.io_uring_disabled=0", "fixes_switches"),
    ("sysctl {name}={needed}", "fixes_switches"),
    ("prlimit --pid $$ --{name}={needed}:{needed}", "fixes_of_limits_of_the_process_work"),
    (
        "setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep",
        "capabilities_of_the_file_suffice",
    ),
    ("chmod o+rx {}", "a_node_behind_a_closed_folder_is_denied_and_not_absent"),
    ("chmod o+rx {folder}", "a_node_behind_a_closed_folder_is_denied_and_not_absent"),
    ("chown $USER {word}", "a_node_behind_a_closed_folder_is_denied_and_not_absent"),
    ("modprobe {name}", "fixes_modules"),
    ("sed -i 's/^GRUB_CMDLINE_LINUX=", "the_command_line_of_the_boot_loader_is_extended_once"),
    ("chown $USER /dev/vfio/GROUP", "limits_memlock_is_reported"),
    ("pinfold bind $BDF", "vfio_bind_and_unbind"),
    ("pinfold bind BDF", "vfio_bind_and_unbind"),
    ("pinfold bind {bdf}", "vfio_bind_and_unbind"),
    ("pinfold bind {}", "vfio_bind_and_unbind"),
    ("tee /sys/module/vfio_iommu_type1/parameters/dma_entry_limit", "limits_entries_are_reported"),
    ("tee {}`, then unbind and bind it again", "noiommu_only_on_request"),
    ("tee /sys/bus/pci/", "it follows a driver that has refused its own device"),
    ("ip link set dev {interface} up", "fixes_of_links_work"),
    ("ip link set dev {interface} mtu {limit}", "fixes_of_links_work"),
    ("ip link set dev {interface} xdp off", "fixes_of_a_foreign_xdp_program_work"),
    ("ip link set dev {interface} xdpgeneric off", "fixes_of_a_foreign_xdp_program_work"),
    ("ethtool -K", "tags_that_an_offload_removes_are_named_until_it_is_off"),
    ("ethtool --set-channels {name} tx {}", "queues_that_are_added_are_reported"),
    ("modprobe nvme", "it is the driver of the kernel, which the measurement compares"),
    ("pinfold-bench ", "it is the measurement itself, as root"),
    ("apt-get install ", "it is a package of the distribution"),
    ("fuser -v {path}", "it names a program, and changes nothing"),
    ("fuser -v {}", "it names a program, and changes nothing"),
    ("fuser -v {node}", "it names a program, and changes nothing"),
];

/// How a command begins that is printed without `sudo`.
const COMMANDS: &[&str] = &[
    "ulimit",
    "prlimit",
    "sysctl ",
    "modprobe",
    "systemd-run",
    "--property",
    "--cap-add",
    "--security-opt",
    "SystemCallFilter=",
    "`cat",
    "`dmesg",
    "in dmesg",
    "see dmesg",
    "lspci",
    "lsattr",
    "chattr",
    "`ip ",
    "`ss ",
    "`ethtool ",
    "taskset",
    "; mount ",
    "echo ",
    "lsof",
    "apparmor",
];

/// As [`FIXES`], of the commands that are printed without `sudo`.
const FIXES_WITHOUT: &[(&str, &str)] = &[
    ("ulimit -{option} {}", "fixes_of_limits_of_the_process_work"),
    ("ulimit -v`", "fixes_of_limits_of_the_process_work"),
    ("ulimit -d`", "fixes_of_limits_of_the_process_work"),
    ("ulimit -u`", "fixes_of_limits_of_the_process_work"),
    ("ulimit -n`", "a_limit_of_open_files_is_named_by_every_command"),
    ("ulimit -f`", "a_limit_of_a_files_length_is_named_where_memory_is_a_file"),
    ("sysctl user.max_user_namespaces", "a_limit_of_namespaces_is_named_and_can_be_raised"),
    (
        "sysctl kernel.unprivileged_userns_clone=1",
        "switches of the kernels of two distributions, which the virtual machine's does not have",
    ),
    (
        "apparmor_restrict_unprivileged_userns=0",
        "a switch of one distribution's kernel, which the virtual machine's does not have",
    ),
    ("--security-opt seccomp=unconfined", "it starts a container, which no test does"),
    ("--cap-add", "it starts a container, which no test does"),
    ("--security-opt seccomp=PROFILE", "it starts a container, which no test does"),
    ("echo {} > {file}", "the_memory_limit_of_a_control_group_is_reported_and_checked"),
    ("echo 100 > napi_defer_hard_irqs", "it is a step of a measurement, which runs it itself"),
    ("echo 200000 > gro_flush_timeout", "it is a step of a measurement, which runs it itself"),
    ("SystemCallFilter=)", "it is a setting of a service, which no test starts"),
    ("`cat`", "what_is_no_regular_file_is_written_by_way_of_one"),
    ("chattr`", "a_destination_that_cannot_be_replaced_is_refused_first"),
    ("lsattr", "it shows attributes, and changes nothing"),
    ("`dmesg", "it shows what the kernel has said, and changes nothing"),
    ("in dmesg", "it shows what the kernel has said, and changes nothing"),
    ("see dmesg", "it shows what the kernel has said, and changes nothing"),
    ("lspci -", "it lists devices, and changes nothing"),
    ("`ip link`", "it lists interfaces, and changes nothing"),
    ("`ss --xdp", "it lists sockets, and changes nothing"),
    ("`ethtool --show-channels`", "it lists queues, and changes nothing"),
    ("`ethtool --set-channels`", "queues_that_are_added_are_reported"),
    ("taskset or numactl", "they place threads, in place of another program's options"),
    ("; mount /proc", "a machine without /proc has no other mapping to look at"),
];

/// Returns all files below a folder whose names end so.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, end));
        } else if path.to_string_lossy().ends_with(end) {
            found.push(path);
        }
    }
    found
}

/// Returns the lines of a source that are neither tests nor comments, joined as the compiler joins
/// a string that goes on in the next line.
fn product(source: &str) -> String {
    let (mut kept, mut is_test, mut before) = (String::new(), false, "");
    for line in source.lines() {
        is_test |= before == "#[cfg(test)]" && line.contains("mod ") && line.ends_with('{');
        let is_comment = line.trim_start().starts_with("//");
        if !is_test && !is_comment {
            match kept.strip_suffix("\\\n") {
                Some(open) => kept = open.to_owned() + line.trim_start() + "\n",
                None => kept += &format!("{line}\n"),
            }
        }
        is_test &= line != "}";
        before = line;
    }
    kept
}

/// Returns the product's sources, with their paths.
fn sources() -> Vec<(String, String)> {
    let mut sources = Vec::new();
    for folder in ["crates", "tools"] {
        for file in files(&root().join(folder), ".rs") {
            let in_folder = |name: &str| file.components().any(|part| part.as_os_str() == name);
            if in_folder("src") && !in_folder("tests") && !file.ends_with("tests.rs") {
                let source = std::fs::read_to_string(&file).unwrap();
                sources.push((file.display().to_string(), product(&source)));
            }
        }
    }
    sources
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Asserts that each command is in `fixes`, and that each of these is printed and has its test.
fn assert_known(printed: &BTreeSet<(String, String)>, fixes: &[(&str, &str)], by: &str) {
    assert!(printed.len() >= 20, "{printed:#?}");
    for (command, file) in printed {
        let known = fixes.iter().any(|(beginning, _)| command.starts_with(beginning));
        assert!(known, "{file}: no test runs: {by}{command}");
    }
    let tests: String = files(&root().join("tools/cli/tests"), ".rs")
        .iter()
        .chain(&files(&root().join("vm/guest/tests"), ".sh"))
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    for (beginning, test) in fixes {
        let is_printed = printed.iter().any(|(command, _)| command.starts_with(beginning));
        assert!(is_printed, "nothing prints: {by}{beginning}");
        let (of_program, of_machine) = (format!("fn {test}()"), format!("\n{test}() {{"));
        let exists = tests.contains(&of_program) || tests.contains(&of_machine);
        // A reason is several words.
        assert!(exists || test.contains(' '), "there is no test {test}: {by}{beginning}");
    }
}

#[test]
fn every_command_that_is_printed_is_run_by_a_test() {
    let mut printed = BTreeSet::new();
    for (file, source) in sources() {
        for (at, _) in source.match_indices("sudo ") {
            let rest = &source[at + 5..];
            // Not a command: what one begins with, words about them, and a second one.
            if !["\"", "sysctl \")", "work outside", "update-grub"]
                .iter()
                .any(|word| rest.starts_with(word))
            {
                let line = rest.lines().next().unwrap();
                printed.insert((line.replace("\\\"", "\""), file.clone()));
            }
        }
    }
    assert_known(&printed, FIXES, "sudo ");
}

#[test]
fn every_command_that_is_printed_without_sudo_is_run_by_a_test() {
    let mut printed = BTreeSet::new();
    for (file, source) in sources() {
        for line in source.lines().filter(|line| line.contains(['"', '`'])) {
            for (at, _) in COMMANDS.iter().flat_map(|command| line.match_indices(command)) {
                // What is part of a name, or of a command with `sudo`.
                let is_word = !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
                let is_sudo = line[..at].contains("sudo ") || line[at..].contains("| sudo ");
                if is_word && !is_sudo {
                    printed.insert((line[at..].to_owned(), file.clone()));
                }
            }
        }
    }
    assert_known(&printed, FIXES_WITHOUT, "");
}

/// As root of a user namespace, whose own limit it is.
#[test]
fn a_limit_of_namespaces_is_named_and_can_be_raised() {
    let run = |count: u32, program: &str, args: &[&str]| {
        let script = format!(
            "echo {count} >/proc/sys/user/max_mnt_namespaces || exit 77; exec \"$0\" \"$@\""
        );
        let by = ["--user", "--map-root-user", "sh", "-c", &script, program];
        let mut command = Command::new("unshare");
        command.args(by).args(args).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        finish_with(command)
    };
    if run(0, "true", &[]).code != Some(0) {
        return skipped("needs user namespaces, whose limits can be set");
    }
    let refused = run(0, PROGRAM, &["check", "--", "true"]);
    assert!(!refused.err.contains("free some space"), "{refused:?}");
    refused.failed(125, &["a mount namespace", "sysctl user.max_user_namespaces, user.max_mnt_"]);
    run(100, PROGRAM, &["check", "--", "true"]).ok();
}

/// Runs the program in a shell, under a limit, after a command.
fn run_in(by: &[&str], setup: &str, args: &str) -> Ended {
    let script = format!("{setup}; exec \"$0\" \"$@\"");
    let mut command = Command::new(by[0]);
    command.args(&by[1..]).args(["bash", "-c", &script, PROGRAM]).args(words(args));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish_with(command)
}

#[test]
fn fixes_of_limits_of_the_process_work() {
    let user = 0x7200_0000 + std::process::id();
    let user = format!("setpriv --reuid={user} --regid={user} --clear-groups --inh-caps=-all");
    for (what, limit, low, high, of_user) in [
        ("open files", "nofile", 64u64, 4096u64, false),
        ("address space", "as", 220 << 20, 8 << 30, false),
        ("data segment", "data", 120 << 20, 8 << 30, false),
        ("threads", "nproc", 20, 4096, true),
        ("MEMLOCK", "memlock", 64 << 10, 4 << 30, true),
    ] {
        // Below the hard limit as this user, beyond it as root.
        for hard in [high, low] {
            let line =
                format!("prlimit --{limit}={low}:{hard} {}", if of_user { &user } else { "env" });
            let by = words(&line);
            let by: Vec<_> = by.iter().map(String::as_str).collect();
            if of_user && !is_root() || !works(&[&by[..], &["true"]].concat()) {
                skipped(&format!("{what}: may not set it to {low} and {hard}"));
                continue;
            }
            let (state, detail, fix) = finding(&run_in(&by, "true", "doctor --json").json(), what);
            assert_eq!(state, "limited", "{what}: {detail}");
            let Some(fix) = fix else {
                assert!(hard == low && detail.contains("raise the hard limit"), "{what}: {detail}");
                skipped(&format!("{what}: no program here may raise the hard limit"));
                continue;
            };
            assert_eq!(fix.starts_with("sudo "), hard == low, "{what}: {fix}");
            let fixed = match fix.strip_prefix("sudo ") {
                None => run_in(&by, &fix, "doctor --json"),
                // As root, for a shell that goes on as the user.
                Some(fix) => {
                    let own = format!("prlimit --{limit}={low}:{low}");
                    let by = words(&own);
                    let by: Vec<_> = by.iter().map(String::as_str).collect();
                    let go_on = if of_user { user.as_str() } else { "" };
                    let setup = format!("{fix} && exec {go_on} \"$0\" \"$@\"");
                    run_in(&by, &setup, "doctor --json")
                }
            };
            let (state, detail, _) = finding(&fixed.json(), what);
            assert_eq!(state, "good", "{what}: after {fix}: {detail}");
        }
    }
}

#[test]
fn a_run_ends_with_an_error_at_any_limit_of_what_it_maps() {
    let folder = Folder::new();
    let file = folder.file("data", &vec![7; 24 << 20]);
    let lines = [
        format!("copy {file} {} --via soft:32M --force", folder.arg("copied")),
        "io soft:24M --size 24M --bs 256k --rw write".to_owned(),
        // 16 MiB before anything is written.
        "io soft:1T --size 1M --bs 64k --rw write".to_owned(),
        format!("io {file} --size 16M --numjobs 4"),
        "pools".to_owned(),
        "nvme soft:16M".to_owned(),
    ];
    let mut codes = BTreeSet::new();
    for (limit, all) in [("data", 4..=100), ("as", 60..=240)] {
        for mib in all.step_by(20) {
            for line in &lines {
                let by = format!("--{limit}={}", mib << 20);
                let ended = run_in(&["prlimit", &by], "true", line);
                // Not by a signal, as where an allocation fails.
                assert!(matches!(ended.code, Some(0..=2)), "{by} {line}: {ended:#?}");
                codes.insert(ended.code);
            }
        }
    }
    assert!(codes.contains(&Some(0)) && codes.len() > 1, "{codes:?}");
    let kept: Vec<_> = folder.names().into_iter().filter(|name| name.contains(".part")).collect();
    assert!(kept.is_empty(), "{kept:?}");
}

/// 32 bytes for each 2 MiB: 256 MiB.
#[test]
fn a_limit_that_refuses_the_table_of_a_medium_is_named_and_raised() {
    let line = "check --nvme soft:16T -- true";
    for (limit, name) in [("data", "RLIMIT_DATA"), ("as", "RLIMIT_AS")] {
        let by = format!("--{limit}={}:{}", 200 << 20, 8u64 << 30);
        let refused = run_in(&["prlimit", &by], "true", line);
        let named = format!("{name} (`ulimit -");
        let fix = refused.err.rsplit_once(": ulimit ").and_then(|(_, fix)| fix.lines().next());
        let fix = fix.map(|fix| format!("ulimit {fix}"));
        refused.failed(125, &["soft:16T: no memory for 268435456 bytes", &named]);
        let fix = fix.unwrap();
        run_in(&["prlimit", &by], &fix, line).ok();
    }
}

#[test]
fn a_refusal_names_options_that_the_command_has() {
    // A fixed workload, and one that is the smallest already.
    for (mib, line, parts) in [
        (16, "pools --memory plain", &["free memory, or raise what allows no more"][..]),
        (64, "pools --memory plain", &["free memory, or raise what allows no more"]),
        (16, "io soft:1G --size 4k --bs 4k --iodepth 1", &["free memory, or raise"]),
        // The program itself needs more than is left.
        (16, "io soft:1G --size 256M --bs 1M --iodepth 64", &["free memory, or raise"]),
        (64, "io soft:1G --size 256M --bs 1M --iodepth 64", &["lower --iodepth or --bs"]),
        (64, "io soft:1G --size 256M --bs 64M --iodepth 1", &["lower --bs"]),
        (
            64,
            "io soft:1G --size 256M --bs 4k --iodepth 1000 --numjobs 60",
            &["--iodepth or --numjobs"],
        ),
    ] {
        let ended = run_in(&["prlimit", &format!("--data={}", mib << 20)], "true", line);
        assert!(!ended.err.contains("--size"), "{ended:?}");
        let named = parts.iter().any(|part| part.contains("--iodepth"));
        assert_eq!(ended.err.contains("--iodepth"), named, "{ended:?}");
        ended.failed(2, parts);
    }
}

#[test]
fn capabilities_of_the_file_suffice() {
    let folder = tempfile::Builder::new().prefix("it's a").tempdir().unwrap();
    let copy = folder.path().join("pin fold");
    copy_program(PROGRAM, &copy);
    let open = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    };
    open(folder.path());
    open(&copy);
    let doctor = || {
        let by = "--reuid=65534 --regid=65534 --clear-groups --inh-caps=-all";
        let output =
            Command::new("setpriv").args(words(by)).arg(&copy).args(["doctor", "--json"]).output();
        let report = output.ok().and_then(|output| serde_json::from_slice(&output.stdout).ok());
        report.map(|report: serde_json::Value| finding(&report, "AF_XDP"))
    };
    if !is_root() || !works(&["setcap", "-h"]) {
        return skipped("needs root and setcap");
    }
    let Some((_, detail, Some(fix))) = doctor() else {
        return skipped("no other user can run the program, or capabilities are out of reach");
    };
    assert!(detail.contains("AF_XDP needs cap_net_raw"), "{detail}");
    let script = fix.strip_prefix("sudo ").unwrap();
    assert!(works(&["sh", "-c", script]), "{fix}");
    let (state, detail, _) = doctor().unwrap();
    assert_eq!(state, "good", "after {fix}: {detail}");
    // On a file system that ignores them, the command is not printed.
    let script = format!(
        "mount --bind {0} {0} && mount -o remount,bind,nosuid {0} && exec \"$@\"",
        format_args!("'{}'", folder.path().display().to_string().replace('\'', "'\\''"))
    );
    let by = words("setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all");
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &script, "sh"])
        .args(by)
        .arg(&copy)
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let Ok(report) = serde_json::from_slice(&output.stdout) else {
        return skipped("needs a mount namespace");
    };
    let (_, detail, fix) = finding(&report, "AF_XDP");
    assert!(detail.contains("nosuid") && fix.is_none(), "{detail} {fix:?}");
}

#[test]
fn the_command_line_of_the_boot_loader_is_extended_once() {
    // As in `findings/devices.rs`, for a file elsewhere.
    let source = include_str!("../../../../crates/pinfold/src/probe/findings/devices.rs");
    let command = source.lines().find(|line| line.contains("sudo sed -i")).unwrap();
    let folder = Folder::new();
    let grub = folder.file("grub", b"GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX=\"quiet\"\n");
    let command = command.trim().trim_matches('"').replace("\\\"", "\"");
    let command = command.replace("{word}", "intel_iommu=on").replace("/etc/default/grub", &grub);
    let (edit, apply) = command.split_once(" && ").unwrap();
    assert!(works(&["sh", "-c", edit.strip_prefix("sudo ").unwrap()]), "{edit}");
    assert_eq!(apply, "sudo update-grub");
    let text = std::fs::read_to_string(&grub).unwrap();
    assert_eq!(text, "GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX=\"intel_iommu=on quiet\"\n");
}

/// Returns the command in an error.
fn command_in(error: &str) -> String {
    let after = error.split("sudo ").nth(1).unwrap_or_else(|| panic!("{error}"));
    after.lines().next().unwrap().to_owned()
}

#[test]
fn fixes_of_links_work() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let receive = || pinfold(&["receive", "v1", "--seconds", "100ms", "--memory", "8M"]);
    for break_it in ["ip link set dev v1 down", "ip link set dev v1 mtu 9000"] {
        run(break_it);
        let refused = receive();
        assert_eq!(refused.code, Some(1), "{break_it}: {refused:?}");
        run(&command_in(&refused.err));
        ended_once_released(receive).ok();
    }
}

/// Loads an XDP program that passes each packet, and pins it to its argument.
const PINNED_PROGRAM: &str = "import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def bpf(command, attributes):
    text = ctypes.create_string_buffer(attributes.ljust(128, b'\\0'))
    result = libc.syscall(ctypes.c_long(int(sys.argv[2])), command, text, 128)
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result
code = ctypes.create_string_buffer(struct.pack('=BBhiBBhi', 0xb7, 0, 0, 2, 0x95, 0, 0, 0))
licence, path = ctypes.create_string_buffer(b'GPL'), ctypes.create_string_buffer(sys.argv[1].encode())
program = bpf(5, struct.pack('=IIQQ', 6, 2, ctypes.addressof(code), ctypes.addressof(licence)))
bpf(6, struct.pack('=QI', ctypes.addressof(path), program))";

#[test]
fn fixes_of_a_foreign_xdp_program_work() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let (mount, program) = (folder.path("bpf"), folder.path("bpf/program"));
    std::fs::create_dir(&mount).unwrap();
    let number = if cfg!(target_arch = "x86_64") { "321" } else { "280" };
    let mount = mount.display();
    let load = format!(
        "mount -t bpf bpf {mount} && exec python3 -c \"$0\" {} {number}",
        program.display()
    );
    let attach = |mode| format!("ip link set dev v1 {mode} pinned {}", program.display());
    // In a mount namespace of its own the file would be gone with the command.
    if !works(&["sh", "-c", &load, PINNED_PROGRAM]) || !works(&["sh", "-c", &attach("xdpgeneric")])
    {
        let _ = Command::new("umount").arg(mount.to_string()).status();
        return skipped("needs python3, and a kernel and an `ip` that load and attach programs");
    }
    run("ip link set dev v1 xdpgeneric off");
    let receive = || pinfold(&["receive", "v1", "--seconds", "100ms", "--memory", "8M"]);
    for mode in ["xdpdrv", "xdpgeneric"] {
        // Each on a wire of its own, whose queue no earlier run has had.
        let Some(_wire) = Wire::new(1, 1500) else { return };
        run(&attach(mode));
        let refused = receive();
        assert_eq!(refused.code, Some(1), "{mode}: {refused:?}");
        for fix in refused.err.split("`sudo ").skip(1) {
            run(fix.split('`').next().unwrap());
        }
        ended_once_released(receive).ok();
    }
    run(&format!("umount {mount}"));
}

#[test]
fn a_limit_of_open_files_is_not_the_drivers_refusal() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let mut named = 0;
    for files in 4..16 {
        let by = format!("--nofile={files}:4096");
        let ended = run_in(&["prlimit", &by], "true", "receive v1 --seconds 100ms --memory 8M");
        assert!(
            !["refused by the kernel", "refused by the driver"]
                .iter()
                .any(|by| ended.err.contains(by)),
            "{files}: {ended:?}"
        );
        if let Some((_, fix)) = ended.err.split_once(": ulimit -n ") {
            let fix = format!("ulimit -n {}", fix.lines().next().unwrap());
            let line = "receive v1 --seconds 100ms --memory 8M";
            ended_once_released(|| run_in(&["prlimit", &by], &fix, line)).ok();
            named += 1;
        }
    }
    assert!(named > 0, "no call was refused");
}

#[test]
fn a_limit_of_open_files_is_named_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("in");
    std::fs::write(&source, [7; 4096]).unwrap();
    let (source, out) = (source.display(), folder.path().join("out"));
    let copy = format!("copy {source} {} --force", out.display());
    for line in [&copy, "serve soft:1M --run true", "check -- true"] {
        let mut named = 0;
        for files in 4..12 {
            let by = format!("--nofile={files}:4096");
            let ended = run_in(&["prlimit", &by], "true", line);
            if ended.err.contains("Too many open files") {
                assert!(ended.err.contains("ulimit -n"), "{line}, {files}: {ended:?}");
                run_in(&["prlimit", &by], "ulimit -n 64", line).ok();
                named += 1;
            }
        }
        assert!(named > 0, "{line}: no call was refused");
    }
}

#[test]
fn a_limit_of_a_files_length_is_named_where_memory_is_a_file() {
    let ended = run_in(&["prlimit", "--fsize=0:unlimited"], "true", "check -- true");
    ended.failed(125, &["too large", "ulimit -f"]);
    run_in(&["prlimit", "--fsize=0:unlimited"], "ulimit -f unlimited", "check -- true").ok();
}
