//! Limits of the machine, set by their real mechanisms: the cause that is named is what refused,
//! and the fix changes it.
use crate::common::{Ended, Folder, bytes, finish_with, pinfold, skipped, words};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pinfold");

/// Runs the program by the command `by`, which limits it.
fn run(by: &[&str], args: &str) -> Ended {
    let mut command = Command::new(by[0]);
    command.args(&by[1..]).arg(PROGRAM).args(words(args));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish_with(command)
}

/// Runs the program in a shell, after `setup`.
fn run_after(by: &[&str], setup: &str, args: &str) -> Ended {
    let script = format!("{setup}; exec \"$0\" \"$@\"");
    run(&[by, &["sh", "-c", &script]].concat(), args)
}

pub(crate) fn works(command: &[&str]) -> bool {
    let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output();
    output.is_ok_and(|output| output.status.success())
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the report of doctor about `what`: the state, the detail, the fix.
pub(crate) fn finding(report: &Value, what: &str) -> (String, String, Option<String>) {
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|finding| finding["what"] == what).unwrap();
    let text = |key: &str| found[key].as_str().map(str::to_owned);
    (text("state").unwrap(), text("detail").unwrap(), text("fix"))
}

/// A control group of its own, which is removed with all processes gone.
struct Group(PathBuf);

impl Group {
    /// Creates it where the controller has its hierarchy; `None`, with a message, where that is not
    /// possible.
    fn new(controller: &str, name: &str) -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let has = |line: &&str| match line.split_once(" - ") {
            Some((_, kind)) if kind.starts_with("cgroup2 ") => {
                let controllers =
                    PathBuf::from(line.split(' ').nth(4).unwrap()).join("cgroup.controllers");
                let controllers = std::fs::read_to_string(controllers).unwrap_or_default();
                controllers.split_whitespace().any(|one| one == controller)
            }
            Some((_, kind)) if kind.starts_with("cgroup ") => {
                kind.rsplit(' ').next().unwrap().split(',').any(|one| one == controller)
            }
            _ => false,
        };
        let Some(mount) = mounts.lines().find(has).and_then(|line| line.split(' ').nth(4)) else {
            skipped(&format!("no hierarchy of the controller {controller} is mounted"));
            return None;
        };
        let mount = Path::new(mount);
        // For v2; the file does not exist in v1.
        let _ = std::fs::write(mount.join("cgroup.subtree_control"), format!("+{controller}"));
        let group = mount.join(format!("pinfold-test-{}-{name}", std::process::id()));
        if let Err(error) = std::fs::create_dir(&group) {
            skipped(&format!("may not create {}: {error}", group.display()));
            return None;
        }
        Some(Self(group))
    }

    /// Sets a limit; false if the group has no such file.
    fn set(&self, v2: &str, v1: &str, value: &str) -> Option<PathBuf> {
        let file = [v2, v1].iter().map(|name| self.0.join(name)).find(|file| file.exists())?;
        std::fs::write(&file, value).unwrap();
        Some(file)
    }

    /// Runs the program in it.
    fn run(&self, args: &str) -> Ended {
        run_after(&[], &format!("echo $$ > {}/cgroup.procs", self.0.display()), args)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).unwrap();
    }
}

/// Carries a fix out, as root.
fn apply(fix: &str) {
    let fix = fix.strip_prefix("sudo ").unwrap();
    assert!(works(&["sh", "-c", fix]), "{fix}");
}

#[test]
fn a_hugetlb_limit_of_a_control_group_is_named_and_raised() {
    let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = std::fs::read_to_string(pool).ok().and_then(|free| free.trim().parse::<u64>().ok());
    if free.is_none_or(|free| free < 32) {
        return skipped("needs 32 free hugepages");
    }
    let Some(group) = Group::new("hugetlb", "hugetlb") else { return };
    let line = "io soft:8M --memory hugetlb-2m --bs 1M --iodepth 8 --size 8M";
    for [v2, v1] in [
        ["hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes"],
        ["hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.limit_in_bytes"],
    ] {
        let Some(file) = group.set(v2, v1, "4194304") else {
            return skipped("no limit of 2 MiB pages");
        };
        let name = file.display().to_string();
        let refused = group.run(line);
        assert!(!refused.err.contains("nr_hugepages"), "the pool has enough: {refused:?}");
        let fix = refused
            .err
            .split("; fix: ")
            .nth(1)
            .unwrap_or_default()
            .split("; lower")
            .next()
            .unwrap()
            .to_owned();
        refused.failed(1, &["a control group allows fewer", &name, "0 of 4194304 bytes in use"]);
        let (state, detail, doctor) =
            finding(&group.run("doctor --json").json(), "hugepages 2 MiB");
        assert!(state == "limited" && detail.contains(&name), "{state} {detail}");
        assert!(doctor.unwrap().contains(&name));
        // Pages that the group refuses are no memory for `auto`: what it takes instead is checked.
        let setup = format!("echo $$ > {}/cgroup.procs; ulimit -v 100000", group.0.display());
        let auto = run_after(&[], &setup, "io soft:1G --bs 8M --iodepth 14");
        auto.failed(2, &["14 buffers of 8 MiB", "RLIMIT_AS"]);
        apply(&fix);
        group.run(line).ok();
        group.set(v2, v1, "9223372036854771712").unwrap();
    }
}

#[test]
fn the_memory_limit_of_a_control_group_is_reported_and_checked() {
    let Some(group) = Group::new("memory", "memory") else { return };
    let Some(file) = group.set("memory.max", "memory.limit_in_bytes", "100663296") else {
        return skipped("the controller of memory is not delegated");
    };
    let name = file.display().to_string();
    let (state, detail, fix) = finding(&group.run("doctor --json").json(), "memory");
    assert!(
        state == "limited" && detail.contains(&format!("of 96 MiB left by {name}")),
        "{state} {detail}"
    );
    let line = "io soft:64M --bs 4M --iodepth 64 --memory plain --size 64M";
    group.run(line).failed(2, &["allowed by", &name, "--iodepth"]);
    apply(&fix.unwrap());
    group.run(line).ok();
    assert_eq!(finding(&group.run("doctor --json").json(), "memory").2, None, "the fix changes it");
}

#[test]
fn memory_is_checked_without_procfs_and_control_groups() {
    if !is_root() || !works(&["unshare", "-m", "true"]) {
        return skipped("needs root, for a mount namespace");
    }
    // 2 TiB, and 1 GiB: more than the machine has, and more than is assumed.
    let all = "io soft:64G --bs 64M --iodepth 1023 --numjobs 32 --memory plain";
    let line = "io soft:64G --bs 64M --iodepth 16 --memory plain";
    let hidden = "mount -t proc -o subset=pid proc /proc";
    if works(&["unshare", "-m", "sh", "-c", hidden]) {
        run_after(&["unshare", "-m"], hidden, all)
            .failed(2, &["needs 2", "page cache", "/proc/meminfo"]);
        let report = run_after(&["unshare", "-m"], hidden, "doctor --json").json();
        let (state, detail, _) = finding(&report, "memory");
        assert!(state == "limited" && detail.contains("without page cache"), "{detail}");
        assert_eq!(finding(&report, "kernel").0, "good", "uname tells the release");
    }
    // A file system over the mounts of the control groups hides them; the process must be in a
    // group of its own.
    let Some(group) = Group::new("memory", "hidden") else { return };
    let hidden = format!("echo $$ > {}/cgroup.procs; umount -R -l /sys", group.0.display());
    let ended = run_after(&["unshare", "-m"], &hidden, line);
    if ended.err.contains("umount") {
        return skipped("cannot unmount /sys");
    }
    ended.failed(2, &["512 MiB allowed by caution", "a control group's limit is not known"]);
    let report = run_after(&["unshare", "-m"], &hidden, "doctor --json").json();
    for what in ["memory", "IOMMU groups", "NUMA"] {
        let (state, detail, fix) = finding(&report, what);
        assert!(
            state == "limited" && detail.contains("known") && fix.is_none(),
            "{what}: {state} {detail} {fix:?}"
        );
    }
    let (_, detail, _) = finding(&report, "hugepages 2 MiB");
    assert!(!detail.contains("has no pages of this size"), "{detail}");
    run_after(&["unshare", "-m"], &hidden, "io soft:4M --size 4M").ok();
}

/// Returns a command that runs another one under a limit that only a system call sets, by Python.
fn python(setup: &str) -> Option<Vec<String>> {
    let script = format!(
        "import ctypes, os, struct, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n{setup}\nos.execvp(sys.argv[1], sys.argv[1:])"
    );
    if !works(&["python3", "-c", "import ctypes"]) {
        skipped("needs python3");
        return None;
    }
    Some(vec!["python3".into(), "-c".into(), script])
}

fn run_by(by: &[String], args: &str) -> Ended {
    run(&by.iter().map(String::as_str).collect::<Vec<_>>(), args)
}

/// Returns a seccomp filter that answers the system call `number` with `errno`.
fn seccomp(number: u32, errno: i32) -> Option<Vec<String>> {
    python(&format!(
        "code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x50000 | {errno}), (0x06, 0, 0, 0x7fff0000)]\n\
         text = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *one) for one in code))\n\
         class Program(ctypes.Structure):\n    _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_void_p)]\n\
         program = Program(len(code), ctypes.addressof(text))\n\
         assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0"
    ))
}

#[test]
fn a_filter_that_refuses_io_uring_is_not_the_kernel() {
    let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    if switch.trim() != "0"
        || finding(&pinfold(&["doctor", "--json"]).json(), "io_uring").0 == "missing"
    {
        return skipped("io_uring is off, or this kernel has no switch for it");
    }
    let folder = Folder::new();
    let file = folder.file("data", &[7; 65536]);
    // `io_uring_setup` and `io_uring_register`, which have these numbers on every architecture;
    // EPERM and ENOSYS.
    for (number, errno) in [(425, 1), (425, 38), (427, 1)] {
        let Some(by) = seccomp(number, errno) else { return };
        let ended = run_by(&by, &format!("io {file}"));
        assert_eq!(ended.code, Some(0), "it works by system calls: {ended:?}");
        let (state, detail, fix) = finding(&run_by(&by, "doctor --json").json(), "io_uring");
        assert_eq!((state.as_str(), fix), ("missing", None));
        for text in [ended.out + &ended.err, detail] {
            assert!(text.contains("a seccomp filter of this process"), "{text}");
            for wrong in ["needs Linux", "sysctl", "does not support", "or later"] {
                assert!(!text.contains(wrong), "{wrong}: {text}");
            }
        }
    }
}

#[test]
fn transparent_hugepages_off_for_a_process_are_named() {
    let (state, detail, _) =
        finding(&pinfold(&["doctor", "--json"]).json(), "transparent hugepages");
    if state != "good" {
        return skipped(&format!("no transparent hugepages: {detail}"));
    }
    let Some(by) = python("assert libc.prctl(41, 1, 0, 0, 0) == 0") else { return };
    let (state, detail, fix) =
        finding(&run_by(&by, "doctor --json").json(), "transparent hugepages");
    assert!(
        state == "missing" && detail.contains("PR_SET_THP_DISABLE") && fix.is_none(),
        "{state} {detail}"
    );
    let ended = run_by(&by, "io soft:4M --memory thp --size 4M");
    assert!(
        !ended.err.contains("no 2 MiB of memory are free") && !ended.err.contains("fix:"),
        "{ended:?}"
    );
    ended.failed(1, &["switched off for this process"]);
}

#[test]
fn small_buffers_fit_transparent_hugepages() {
    if finding(&pinfold(&["doctor", "--json"]).json(), "transparent hugepages").0 != "good" {
        return skipped("no transparent hugepages");
    }
    for line in ["--bs 4k --iodepth 1", "--bs 64k --iodepth 7", "--bs 1M --iodepth 3"] {
        let ended = pinfold(&words(&format!("io soft:4M --memory thp --size 1M {line}")));
        if ended.code == Some(1) && ended.err.contains("no 2 MiB of memory are free") {
            return skipped("memory is fragmented");
        }
        assert!(ended.ok().contains("from thp in pages of 2 MiB"), "{line}");
    }
}

#[test]
fn doctor_and_receive_agree_on_af_xdp() {
    if !is_root() || !works(&["unshare", "-Urn", "true"]) || !works(&["ip", "-V"]) {
        return skipped("needs root, user namespaces and ip");
    }
    let docker = "-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,\
                  +net_bind_service,+sys_chroot,+kill,+audit_write";
    let docker = format!("--bounding-set={docker}");
    let wire = "ip link add v0 type veth peer name v1 && ip link set v0 up && ip link set v1 up";
    for (by, refused) in [
        (vec!["unshare", "-n"], None),
        (vec!["unshare", "-Urn"], Some("user namespace")),
        (vec!["unshare", "-n", "setpriv", &docker, "--inh-caps=-all"], Some("bounding set")),
        (
            vec!["unshare", "-n", "setpriv", "--bounding-set=-all", "--inh-caps=-all"],
            Some("cap_net_raw"),
        ),
    ] {
        // The interfaces are made before the capabilities are dropped.
        let at = by.iter().position(|part| *part == "setpriv").unwrap_or(by.len());
        let script = format!("{wire}; exec \"$0\" \"$@\"");
        let by = [&by[..at], &["sh", "-c", &script], &by[at..]].concat();
        let (state, detail, fix) = finding(&run(&by, "doctor --json").json(), "AF_XDP");
        let received = run(&by, "receive v1 --seconds 100ms --memory 8M");
        assert_eq!(state == "good", received.code == Some(0), "{detail} {received:?}");
        let Some(part) = refused else {
            if state == "good" {
                continue;
            }
            return skipped(&format!("no AF_XDP: {detail}"));
        };
        if detail.contains("for all processes of this user") {
            // Other processes of this user, all of which count, have the rest of the limit.
            skipped(&detail);
            continue;
        }
        assert!(detail.contains(part) && fix.is_none(), "{detail} {fix:?}");
        // Memory that cannot be locked is refused before, unless the limit allows it.
        if !received.err.contains("cannot be locked") {
            // Other processes of this user may have had the rest of the limit when one of the two
            // asked: then the other is refused by a later call.
            let memory = "setsockopt (XDP_UMEM_REG)";
            let call = detail.split(": ").next().unwrap();
            let call = if call == memory || received.err.contains(memory) { "" } else { call };
            received.failed(1, &[call, "not permitted", part]);
        }
    }
}

#[test]
fn a_node_behind_a_closed_folder_is_denied_and_not_absent() {
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    if !is_root() || !works(&["unshare", "-m", "true"]) || !works(&[&user[..], &["true"]].concat())
    {
        return skipped("needs root, for a mount namespace");
    }
    let setup = "mount -t tmpfs -o mode=755 tmpfs /dev && cp \"$0\" /dev/pinfold && mkdir -m 700 /dev/vfio && \
                 touch /dev/vfio/vfio /dev/iommu && chmod 666 /dev/vfio/vfio && chmod 600 /dev/iommu";
    let inside = |then: &str, by: &[&str]| {
        let script = format!("{setup} && {then} && exec \"$@\"");
        let command = [&["-m", "sh", "-c", &script, PROGRAM], by].concat();
        let output = Command::new("unshare")
            .args(command)
            .args(["/dev/pinfold", "doctor", "--json"])
            .output()
            .unwrap();
        serde_json::from_slice::<Value>(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let closed = inside("true", &user);
    let (state, detail, fix) = finding(&closed, "VFIO");
    assert_eq!(
        (&*state, fix.as_deref()),
        ("limited", Some("sudo chmod o+rx /dev/vfio")),
        "{detail}"
    );
    assert!(detail.contains("Permission denied"), "{detail}");
    let (state, detail, fix) = finding(&closed, "iommufd");
    assert_eq!(
        (&*state, fix.as_deref()),
        ("limited", Some("sudo chown $USER /dev/iommu")),
        "{detail}"
    );
    // Both commands as they were printed, by root.
    let fix = |what: &str| finding(&closed, what).2.unwrap().replace("sudo ", "USER=65534; ");
    let opened = inside(&format!("{}; {}", fix("VFIO"), fix("iommufd")), &user);
    assert!(finding(&opened, "VFIO").1.contains("no device is bound"), "{opened}");
    assert_eq!(finding(&opened, "iommufd").0, "good");
    let root = inside("rm /dev/iommu", &["env"]);
    assert_eq!(finding(&root, "iommufd").0, "missing", "it does not exist");
}

#[test]
fn limits_of_the_process_are_in_doctor() {
    let few = run(&["prlimit", "--nofile=100:4096"], "doctor --json").json();
    let (state, detail, fix) = finding(&few, "open files");
    assert!(state == "limited" && detail.starts_with("soft 100, hard 4096"), "{detail}");
    assert!(fix.as_ref().is_some_and(|fix| fix.starts_with("ulimit -n ")), "{fix:?}");
    let fixed = run_after(&["prlimit", "--nofile=100:4096"], &fix.unwrap(), "doctor --json").json();
    assert_eq!(finding(&fixed, "open files").0, "good");
    let refused =
        run(&["prlimit", "--as=268435456"], "io soft:1G --bs 64M --iodepth 4 --memory plain");
    refused.failed(2, &["RLIMIT_AS"]);
}

/// Runs programs as a user of its own, whom no other process adds to, with RLIMIT_MEMLOCK of
/// `bytes`; `None`, with a message, where that is not possible or the limit does not bind.
fn with_memlock(user: u32, bytes: u64) -> Option<Vec<String>> {
    let user = 0x7000_0000 + user * 0x40_0000 + std::process::id() % 0x40_0000;
    let line = format!(
        "prlimit --memlock={bytes}:{bytes} setpriv --reuid={user} --regid={user} --clear-groups --inh-caps=-all"
    );
    let by = words(&line);
    let (command, args) = by.split_first().unwrap();
    let output = Command::new(command).args(args).args([PROGRAM, "doctor", "--json"]).output().ok();
    let report = output.and_then(|output| serde_json::from_slice::<Value>(&output.stdout).ok());
    let Some(report) = report.filter(|_| is_root()) else {
        skipped("needs root, for a user of its own");
        return None;
    };
    if finding(&report, "io_uring").1.contains("kernel") {
        skipped("no io_uring");
        return None;
    }
    Some(by)
}

/// Returns the limit in a fix, be it a command or words.
fn memlock_of(fix: &str) -> u64 {
    let after = fix.split("memlock").nth(1).unwrap_or_else(|| panic!("{fix}"));
    let digits = after.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

fn notes_and_fixes(report: &Value) -> (String, Vec<String>) {
    let fixes = report["stack"]["fixes"].as_array().unwrap();
    (
        report["notes"].to_string(),
        fixes.iter().map(|fix| fix.as_str().unwrap().to_owned()).collect(),
    )
}

/// Runs it until nothing is refused, for a minute at most: the kernel releases the rings of a
/// process some time after its end.
fn without_notes(by: &[String], line: &str) -> (String, Vec<String>) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let found = notes_and_fixes(&run_by(by, line).json());
        if found.0 == "[]" || Instant::now() > until {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns a folder that all users may use, with a file.
fn shared_file() -> (Folder, String) {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let file = folder.file("data", &[7; 1 << 20]);
    std::fs::set_permissions(folder.path(""), PermissionsExt::from_mode(0o777)).unwrap();
    (folder, file)
}

#[test]
fn one_fix_of_locked_memory_is_enough_for_all_queues() {
    let (_folder, file) = shared_file();
    // An arena of 512 KiB, registered by each of eight queues; the second limit refuses all of
    // them, the third the rings, too.
    let line = format!("io {file} --bs 4k --iodepth 16 --numjobs 8 --memory plain --json");
    for (limit, part) in [
        (2 << 20, " of 8 queues: no fixed buffers: "),
        (256 << 10, ""),
        (16 << 10, "no io_uring: "),
    ] {
        let Some(by) = with_memlock(0, limit) else { return };
        let (notes, fixes) = notes_and_fixes(&run_by(&by, &line).json());
        assert!(
            notes.contains(part) && notes.contains(&format!("{limit} bytes for all processes")),
            "{notes}"
        );
        assert!(!notes.contains("needs Linux") && !notes.contains("os error 12); it"), "{notes}");
        let [fix] = &fixes[..] else { panic!("one command for all queues: {fixes:?}") };
        let raised = memlock_of(fix);
        assert!(raised > limit, "{fix}");
        if !works(&["prlimit", &format!("--memlock={raised}:{raised}"), "true"]) {
            return skipped(&format!("may not raise the limit to {raised}"));
        }
        let by = with_memlock(0, raised).unwrap();
        assert_eq!(without_notes(&by, &line), ("[]".to_owned(), vec![]), "{fix}");
    }
}

#[test]
fn locked_memory_of_the_users_other_processes_is_allowed_for() {
    use std::io::BufRead;
    let (folder, file) = shared_file();
    let limit = 4 << 20;
    let Some(by) = with_memlock(1, limit) else { return };
    let line = format!(
        "serve {file} --nbd unix:{} --read-only --threads 1 --buffers 2M --memory plain",
        folder.arg("s")
    );
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,TERM").args(&by).arg(PROGRAM).args(words(&line));
    let mut holder = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut started = String::new();
    std::io::BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut started).unwrap();
    // The limit would suffice for this process alone.
    let line = format!("io {file} --bs 64k --iodepth 32 --memory plain --json");
    let (notes, fixes) = notes_and_fixes(&run_by(&by, &line).json());
    let raised = fixes.first().and_then(|fix| with_memlock(1, memlock_of(fix)));
    let again = raised.map(|by| without_notes(&by, &line));
    let doctor = run_by(&by, "doctor --json").json();
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(
        notes.contains("no fixed buffers: 2097152 bytes more exceed RLIMIT_MEMLOCK"),
        "{started}: {notes}"
    );
    assert!(memlock_of(&fixes[0]) > limit, "{fixes:?}");
    assert_eq!(again, Some(("[]".to_owned(), vec![])), "{fixes:?}");
    let (_, detail, _) = finding(&doctor, "MEMLOCK");
    assert!(
        detail.contains("0 B used by this process; ")
            && detail.contains("all processes of this user"),
        "{detail}"
    );
}

#[test]
fn a_ring_refused_by_the_limit_of_locked_memory_is_not_missing() {
    let Some(by) = with_memlock(2, 4096) else { return };
    let (state, detail, fix) = finding(&run_by(&by, "doctor --json").json(), "io_uring");
    if state == "good" {
        return skipped("this kernel does not count the memory of rings");
    }
    assert!(
        state == "limited" && detail.contains("exceed RLIMIT_MEMLOCK, which is 4096 bytes"),
        "{state} {detail}"
    );
    assert!(memlock_of(&fix.unwrap_or(detail.replace("RLIMIT_MEMLOCK", ""))) > 1 << 30);
}

#[test]
fn the_limit_that_refuses_a_thread_is_named() {
    let (_folder, file) = shared_file();
    let line = format!("io {file} --bs 4k --numjobs 12 --time-based --runtime 60");
    if let Some(group) = Group::new("pids", "pids") {
        let name = group.set("pids.max", "pids.max", "6").unwrap().display().to_string();
        let ended = group.run(&line);
        assert!(!ended.err.contains("ulimit"), "{ended:?}");
        ended.failed(
            1,
            &["of 12", &format!("{name} is 6, 6 in use; raise it, or use fewer with --numjobs")],
        );
    }
    let user = 0x7100_0000 + std::process::id();
    let by = format!(
        "prlimit --nproc=6:6 setpriv --reuid={user} --regid={user} --clear-groups --inh-caps=-all"
    );
    let by = words(&by);
    if !is_root() || run_by(&by, "--version").code != Some(0) {
        return skipped("needs root, for a user of its own");
    }
    let ended = run_by(&by, &line);
    assert!(!ended.err.contains("pids.max"), "{ended:?}");
    ended.failed(
        1,
        &["of 12", "RLIMIT_NPROC", "is 6, 6 in use; raise it, or use fewer with --numjobs"],
    );
}

#[test]
fn a_fix_that_works_elsewhere_only_says_where() {
    let line = "io soft:4M --size 4M --memory hugetlb-1g";
    let here = pinfold(&words(line));
    if !here.err.contains("; fix: sudo ") {
        return skipped(&format!("pages of 1 GiB are free, or not supported: {here:?}"));
    }
    if !works(&["unshare", "-Ur", "true"]) {
        return skipped("no user namespaces");
    }
    run(&["unshare", "-Ur"], line).failed(1, &["; fix: outside of this user namespace: sudo "]);
    // The pool of these pages is set below either of them.
    let frozen = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && mount -o remount,bind,ro /sys";
    if is_root() && works(&["unshare", "-m", "sh", "-c", frozen]) {
        run_after(&["unshare", "-m"], frozen, line)
            .failed(1, &["; fix: on the host (", "is read-only here): sudo "]);
    }
}

#[test]
fn a_filter_is_not_the_file_system() {
    let folder = Folder::new();
    let file = folder.file("data", &[7; 65536]);
    let number = |name: &str| match name {
        "fsync" => {
            if cfg!(target_arch = "x86_64") {
                74
            } else {
                82
            }
        }
        _ => {
            if cfg!(target_arch = "x86_64") {
                318
            } else {
                278
            }
        }
    };
    for (name, errno) in [("fsync", 1), ("fsync", 38), ("getrandom", 1)] {
        let Some(by) = seccomp(number(name), errno) else { return };
        let ended = run_by(&by, &format!("copy {file} {} --force", folder.arg("copied")));
        assert!(!ended.err.contains("lsattr"), "{name}: {ended:?}");
        ended.failed(1, &["a seccomp filter or a security module refuses the call"]);
    }
}

#[test]
fn a_filter_of_address_families_is_the_cause() {
    // `socket` of the family 44, as RestrictAddressFamilies= of a service answers.
    let number = if cfg!(target_arch = "x86_64") { 41 } else { 198 };
    let errno = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
    let Some(by) = seccomp(number, errno) else { return };
    let (state, detail, fix) = finding(&run_by(&by, "doctor --json").json(), "AF_XDP");
    if !detail.contains("this kernel has AF_XDP") {
        assert!(detail.contains("without AF_XDP"), "{detail}");
        return skipped("no AF_XDP");
    }
    assert!(state == "missing" && fix.is_none(), "{state} {fix:?}");
    assert!(detail.contains("RestrictAddressFamilies="), "{detail}");
}

#[test]
fn hugepages_are_used_without_procfs() {
    if !is_root() || !works(&["unshare", "-m", "umount", "-l", "/proc"]) {
        return skipped("needs root, for a mount namespace");
    }
    let (state, detail, _) =
        finding(&pinfold(&["doctor", "--json"]).json(), "transparent hugepages");
    if state != "good" {
        return skipped(&format!("no transparent hugepages: {detail}"));
    }
    let report = run_after(&["unshare", "-m"], "umount -l /proc", "doctor --json").json();
    let (state, detail, _) = finding(&report, "transparent hugepages");
    assert_eq!(state, "good", "{detail}");
    let line = "io soft:4M --size 4M --bs 1M --iodepth 4 --memory thp";
    run_after(&["unshare", "-m"], "umount -l /proc", line).ok();
}

/// A limit that leaves too little for what is written is an error of the request, also where what
/// the process has mapped is not known.
#[test]
fn a_limit_ends_the_writes_of_a_client_and_not_the_server() {
    let folder = Folder::new();
    let (source, proc) = (folder.file("source", &bytes(128 << 20)), folder.arg("proc"));
    std::fs::create_dir(&proc).unwrap();
    if !works(&["nbdcopy", "--version"]) {
        return skipped("no nbdcopy: apt-get install libnbd-bin");
    }
    let hidden = format!("mount --bind /proc {proc} && umount -l /proc");
    for (by, setup, proc) in
        [(&["env"][..], "true", "/proc"), (&["unshare", "-m"], hidden.as_str(), proc.as_str())]
    {
        if by.len() > 1 && !works(&[by, &["sh", "-c", setup]].concat()) {
            skipped("needs root, for a mount namespace");
            continue;
        }
        // 40 MiB more than it has mapped by now, of which 16 are for a client.
        let write = format!(
            "size=$(awk '/VmSize/ {{ print $2 }}' {proc}/$PPID/status) && \
             prlimit --pid $PPID --as=$(((size + 40960) * 1024)): && nbdcopy {source} \"$uri\""
        );
        let script = format!("{setup}; exec \"$0\" serve soft:128M --threads 1 --run \"$1\"");
        let run = || {
            let mut command = Command::new(by[0]);
            command.args(&by[1..]).args(["sh", "-c", &script, PROGRAM, &write]);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            finish_with(command)
        };
        let mut ended = run();
        // Without /proc the limit is tried by mapping what is to be left, and in that moment another
        // thread may ask for memory: seen once in hundreds of runs.
        for _ in 0..2 {
            if by.len() > 1 && ended.err.contains("memory allocation of") {
                ended = run();
            }
        }
        assert_eq!(ended.code, Some(1), "{setup}: {ended:?}");
        for part in ["capacity exceeded", "No space left on device", "exit status: 1"] {
            assert!(ended.err.contains(part), "{setup}: {ended:?}");
        }
        assert!(ended.err.contains("served soft:128M"), "{setup}: {ended:?}");
    }
}

#[test]
fn a_limit_of_threads_is_named_wherever_one_is_started() {
    let Some(group) = Group::new("pids", "started") else { return };
    let (folder, file) = shared_file();
    let name = group.set("pids.max", "pids.max", "2").unwrap().display().to_string();
    // The command of --run is a process.
    let line =
        format!("serve {file} --read-only --threads 1 -U {} --run true", folder.arg("socket"));
    let mut named = 0;
    for limit in 2..8 {
        std::fs::write(&name, limit.to_string()).unwrap();
        let ended = group.run(&line);
        if ended.code != Some(0) {
            assert!(ended.err.contains(&format!("{name} is {limit}")), "{limit}: {ended:?}");
            named += usize::from(ended.err.contains("--run"));
        }
    }
    assert!(named > 0, "the command was never refused");
    // The threads of the devices, and the timer of a policy.
    let trace =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../replay/samples/linux-6.12-nvme-ahci-e1000e.txt");
    let (mut devices, mut timers) = (0, 0);
    for options in ["--timing original", ""] {
        for limit in 1..8 {
            std::fs::write(&name, limit.to_string()).unwrap();
            let ended = group.run(&format!("replay {trace} {options}"));
            if ended.code == Some(0) {
                break;
            }
            assert!(ended.err.contains(&format!("{name} is {limit}")), "{limit}: {ended:?}");
            devices += usize::from(ended.err.contains("cannot start a thread for"));
            timers += usize::from(ended.err.contains("cannot start the flush timer"));
        }
    }
    assert!(devices > 0 && timers > 0, "{devices} devices and {timers} timers were refused");
}
