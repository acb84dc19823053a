//! Bad input: an exit code, one line, and nothing left behind.

use crate::common::{Ended, Folder, bytes, finish, pinfold, skipped, start, words};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn numbers_are_reported_with_their_limits() {
    let folder = Folder::new();
    let (source, out) = (folder.file("in", b"x"), folder.arg("out"));
    for (options, parts) in [
        ("--bs 0", &["--bs 0", "multiple of 512"][..]),
        ("--bs 3", &["--bs 3", "multiple of 512"]),
        ("--bs 513", &["--bs 513", "multiple of 512"]),
        ("--bs 1T", &["--bs 1099511627776", "at most 67108864 bytes (64 MiB)"]),
        ("--bs 128M", &["at most 67108864"]),
        ("--iodepth 0", &["--iodepth 0", "at least one"]),
        ("--iodepth 1000000000", &["--iodepth 1000000000", "soft:1M", "at most 1023"]),
        ("--iodepth 1024", &["at most 1023"]),
        ("--iodepth 99999999999999999999", &["at most 1023"]),
        ("--bs 99999999999T", &["--bs", "64 bits"]),
        ("--bs 4q", &["--bs", "\"4q\" is not a size"]),
        ("--bs -1", &["--bs", "\"-1\" is not a size"]),
        ("--iodepth -1", &["--iodepth", "-1"]),
        ("--iodepth many", &["many", "--iodepth"]),
        ("--protect none", &["none", "strict, revoke, batch, static"]),
        ("--memory gold", &["gold", "hugetlb-2m"]),
        ("--frobnicate", &["--frobnicate"]),
    ] {
        pinfold(&words(&format!("copy {source} {out} --via soft:1M {options}"))).failed(2, parts);
    }
    let line = format!("copy {source} {out} --iodepth 1000000000");
    pinfold(&words(&line)).failed(2, &["at most 4096"]);
    assert_eq!(folder.names(), ["in"]);
}

#[test]
fn unknown_words_are_reported_with_the_known_ones() {
    let none: [&str; 0] = [];
    assert_eq!(pinfold(&none).code, Some(2));
    pinfold(&["frobnicate"]).failed(2, &["frobnicate"]);
    for target in ["vfio:", "http://example.com", "soft:", "soft:0", "soft:511", ""] {
        pinfold(&["copy", target, "out"]).failed(2, &["soft:"]);
    }
    pinfold(&["io", "soft:1M", "--rw", "sideways"]).failed(2, &["sideways", "randread"]);
    pinfold(&["completions", "tcsh"]).failed(2, &["tcsh", "bash"]);
}

#[test]
fn a_source_must_be_a_regular_file() {
    let folder = Folder::new();
    let out = folder.arg("out");
    pinfold(&["copy", &folder.arg("nothing"), &out])
        .failed(1, &["nothing", "No such file", "check the path"]);
    pinfold(&["copy", &folder.arg(""), &out]).failed(1, &["not a regular file"]);
    pinfold(&["copy", "/dev/zero", &out]).failed(1, &["/dev/zero", "not a regular file"]);
    pinfold(&["copy", "soft:1M", &out]).failed(2, &["only zeroes"]);
    let odd = folder.file("odd.img", &bytes(513));
    pinfold(&["copy", &format!("soft:{odd}"), &out])
        .failed(1, &["513", "must be a multiple of 512"]);
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    pinfold(&["copy", &folder.arg("pipe"), &out]).failed(1, &["not a regular file"]);
    assert_eq!(folder.names(), ["odd.img", "pipe"]);
}

/// Their length of 0, or of a page, is not that of what reading them yields.
#[test]
fn a_file_that_does_not_tell_its_length_is_refused() {
    let folder = Folder::new();
    let (out, socket) = (folder.arg("out"), folder.arg("socket"));
    for file in ["/proc/version", "/proc/sys/kernel/ostype", "/proc/self/cmdline"] {
        for line in [
            format!("copy {file} {out}"),
            format!("copy {file} {out} --via soft:1M --verify"),
            format!("copy {file} soft:{out}"),
            format!("io {file}"),
            format!("serve {file} --read-only --nbd unix:{socket}"),
        ] {
            pinfold(&words(&line)).failed(1, &[file, "length of 0 bytes and holds more", "`cat`"]);
        }
    }
    let file = "/sys/devices/system/cpu/online";
    if std::path::Path::new(file).exists() {
        pinfold(&["copy", file, &out])
            .failed(1, &[file, "ended at byte", "had 4096 bytes", "/sys"]);
        pinfold(&words(&format!("io {file} --bs 512"))).failed(1, &["ended at byte", "/sys"]);
    } else {
        skipped("no /sys");
    }
    assert!(folder.names().is_empty());
    let empty = folder.file("empty", b"");
    pinfold(&["copy", &empty, &out]).ok();
    assert_eq!(std::fs::read(out).unwrap(), b"");
}

#[test]
fn an_existing_destination_is_kept_without_force() {
    let folder = Folder::new();
    let (source, out) = (folder.file("in", b"new"), folder.file("out", b"old"));
    pinfold(&["copy", &source, &out]).failed(1, &["out exists", "--force"]);
    assert_eq!(std::fs::read(&out).unwrap(), b"old");
    pinfold(&["copy", &source, &out, "--force"]).ok();
    assert_eq!(std::fs::read(&out).unwrap(), b"new");
    pinfold(&["copy", &source, &source, "--force"]).failed(1, &["the source itself"]);
    pinfold(&["copy", &source, &folder.arg("")]).failed(1, &["directory"]);
    pinfold(&["copy", &source, &folder.arg("no/where")]).failed(1, &["no/where", "No such file"]);
    pinfold(&["copy", &source, "/dev/null", "--force"]).failed(1, &["not a regular file"]);
    let line = format!("copy soft:{source} {out} --via soft:{source} --force");
    pinfold(&words(&line)).failed(1, &["must be a multiple of 512"]);
    let image = folder.file("disk.img", &bytes(512));
    let line = format!("copy soft:{image} {out} --via soft:{image} --force");
    pinfold(&words(&line)).failed(1, &["the source itself"]);
    assert!(std::fs::read(&image).unwrap() == bytes(512));
    assert_eq!(folder.names(), ["disk.img", "in", "out"]);
}

#[test]
fn a_target_too_small_is_refused_before_any_write() {
    let folder = Folder::new();
    let (source, out) = (folder.file("in", &bytes(4097)), folder.arg("out"));
    for via in ["soft:4k", "soft:4607", "soft:512"] {
        pinfold(&["copy", &source, &out, "--via", via]).failed(1, &["4608 are needed"]);
    }
    pinfold(&["copy", &source, &out, "--via", "soft:4608"]).ok();
    std::fs::remove_file(&out).unwrap();
    pinfold(&["copy", &source, "soft:1k"]).failed(1, &["has 1024 bytes and 4608 are needed"]);
    let image = folder.sparse("disk.img", 4096);
    pinfold(&["copy", &source, &out, "--via", &format!("soft:{image}")])
        .failed(1, &["4608 are needed"]);
    pinfold(&["copy", &source, &out, "--via", "soft:2T"]).failed(1, &["at most 1099511627776"]);
    let huge = folder.sparse("huge", 1 << 40);
    pinfold(&["copy", &huge, &out, "--via", "soft:1T"])
        .failed(2, &["of targets", "available", "soft:disk.img"]);
    assert_eq!(folder.names(), ["disk.img", "huge", "in"]);
}

/// Makes a copy of 512 MiB take many seconds.
const SLOW: &str = "--bs 4k --iodepth 1 --sparse never";

/// Starts a slow copy, stops the program once the temporary file exists, calls `meanwhile`, and
/// lets it go on: until it fails, which each of these copies does that has not copied all by then.
fn interfere(folder: &Folder, options: &str, meanwhile: impl Fn(Pid)) -> Ended {
    interfere_once(folder, options, |_| true, meanwhile)
}

/// Returns the same once `ready` says so of the temporary file.
fn interfere_once(
    folder: &Folder,
    options: &str,
    ready: impl Fn(&Path) -> bool,
    meanwhile: impl Fn(Pid),
) -> Ended {
    for _ in 0..20 {
        let source = folder.sparse("in", 512 << 20);
        write_byte(&folder.path("in"), 1);
        let line = format!("copy {source} {} {options}", folder.arg("out"));
        let child = start(&words(&line));
        let pid = Pid::from_child(&child);
        if stop_while_it_copies(folder, pid, &ready) {
            meanwhile(pid);
            kill_process(pid, Signal::CONT).unwrap();
            let ended = finish(child);
            if ended.code != Some(0) {
                assert_eq!(folder.names(), ["in"], "{ended:#?}");
                return ended;
            }
            // It was stopped when all was copied, and only its end was left.
            assert_eq!(std::fs::metadata(folder.path("out")).unwrap().len(), 512 << 20);
        } else {
            // It was faster than this test.
            kill_process(pid, Signal::CONT).ok();
            finish(child).ok();
        }
        std::fs::remove_file(folder.path("out")).unwrap();
    }
    panic!("each copy had ended before it could be stopped");
}

fn write_byte(file: &Path, byte: u8) {
    let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[byte], 1).unwrap();
}

fn read_byte(file: &Path) -> Option<u8> {
    let mut byte = [0];
    let read = std::os::unix::fs::FileExt::read_at(&std::fs::File::open(file).ok()?, &mut byte, 1);
    (read.ok()? == 1).then_some(byte[0])
}

/// Stops the program when the temporary file is ready; false if it has ended, or has all but ended,
/// by then.
fn stop_while_it_copies(folder: &Folder, pid: Pid, ready: impl Fn(&Path) -> bool) -> bool {
    let part = || {
        folder
            .names()
            .into_iter()
            .find(|name| name.ends_with(".part"))
            .map(|name| folder.path(&name))
    };
    let until = Instant::now() + Duration::from_secs(60);
    // Left for the caller to wait for.
    let state = |options| {
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | options).unwrap()
    };
    while !part().is_some_and(|part| ready(&part)) {
        assert!(
            Instant::now() < until,
            "no temporary file, or it is not ready: {:?}",
            folder.names()
        );
        if state(WaitIdOptions::NOHANG).is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(pid, Signal::STOP).unwrap();
    state(WaitIdOptions::STOPPED).is_some_and(|status| status.stopped()) && part().is_some()
}

#[test]
fn a_signal_leaves_nothing_behind() {
    let folder = Folder::new();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        for options in [SLOW, &format!("{SLOW} --via soft:512M --protect strict")] {
            let ended = interfere(&folder, options, |pid| kill_process(pid, signal).unwrap());
            ended.failed(130, &["pinfold: interrupted"]);
        }
    }
}

#[test]
fn a_source_that_shrinks_is_an_error() {
    let folder = Folder::new();
    let cut = |_| {
        let file = std::fs::OpenOptions::new().write(true).open(folder.path("in")).unwrap();
        file.set_len(100_000).unwrap();
    };
    interfere(&folder, SLOW, cut).failed(1, &["had 536870912 bytes", "cut short"]);
    interfere(&folder, &format!("{SLOW} --via soft:512M"), cut).failed(1, &["cut short"]);
}

#[test]
fn a_source_that_grows_is_an_error() {
    let folder = Folder::new();
    let grow = |_| {
        let file = std::fs::OpenOptions::new().write(true).open(folder.path("in")).unwrap();
        file.set_len((512 << 20) + 1).unwrap();
    };
    // Fast enough to reach the end, and slow enough not to have reached it yet.
    interfere(&folder, "--bs 64k --iodepth 1 --sparse never", grow)
        .failed(1, &["grew from 536870912 to 536870913"]);
}

#[test]
fn a_failed_verification_leaves_nothing_behind() {
    let folder = Folder::new();
    // The first block changes when it has been copied.
    let scribble = |_| write_byte(&folder.path("in"), 2);
    let copied = |part: &Path| read_byte(part) == Some(1);
    let options = "--bs 64k --iodepth 1 --sparse never --verify";
    let ended = interfere_once(&folder, options, copied, scribble);
    ended.failed(1, &["differs from", "SHA-256", "was removed"]);
}

#[test]
fn a_full_disk_leaves_nothing_behind() {
    let folder = Folder::new();
    let disk = folder.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(&disk).output();
    if !mount.is_ok_and(|mount| mount.status.success()) {
        skipped("only root can mount a small file system");
        return;
    }
    let (source, out) = (folder.file("in", &bytes(8 << 20)), disk.join("out"));
    let ended = pinfold(&["copy", &source, out.to_str().unwrap()]);
    let left = std::fs::read_dir(&disk).unwrap().count();
    let small = folder.file("small", &bytes(1 << 20));
    let fits = pinfold(&["copy", &small, out.to_str().unwrap(), "--via", "soft:1M"]);
    // Lazily, since the kernel closes a ring and its file shortly after the program has ended.
    assert!(Command::new("umount").arg("-l").arg(&disk).status().unwrap().success());
    ended.failed(1, &["out", "8388608 bytes", "has 4194304 free", "free some space"]);
    assert_eq!(left, 0);
    fits.ok();
}

#[test]
fn exceeding_the_file_size_limit_leaves_nothing_behind() {
    let folder = Folder::new();
    let (source, out) = (folder.file("in", &bytes(1 << 20)), folder.arg("out"));
    // Blocks of 1024 bytes in bash, of 512 in other shells. SIGXFSZ would end the process, were it
    // not handled.
    let limited = Command::new("sh")
        .args([
            "-c",
            "ulimit -f 100 && exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_pinfold"),
            "copy",
            &source,
            &out,
        ])
        .output()
        .unwrap();
    let err = String::from_utf8(limited.stderr).unwrap();
    assert_eq!(limited.status.code(), Some(1), "{err}");
    assert!(err.contains("ulimit -f") && err.lines().count() == 1, "{err}");
    assert_eq!(folder.names(), ["in"]);
}

/// A pipe as a device: the refusal says how to write into it, and that does.
#[test]
fn what_is_no_regular_file_is_written_by_way_of_one() {
    let folder = Folder::new();
    let data = bytes(300_000);
    let (source, pipe, new) = (folder.file("in", &data), folder.arg("pipe"), folder.arg("new"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    pinfold(&["copy", &source, &pipe, "--force"])
        .failed(1, &[&pipe, "name a new file and write that into it (`cat`)", "vfio:BDF"]);
    pinfold(&["copy", &source, &new]).ok();
    let mut cat =
        Command::new("sh").args(["-c", "cat \"$0\" >\"$1\"", &new, &pipe]).spawn().unwrap();
    assert_eq!(std::fs::read(&pipe).unwrap(), data);
    assert!(cat.wait().unwrap().success());
}

/// Found before the copy: it would fail when all is written, at the renaming.
#[test]
fn a_destination_that_cannot_be_replaced_is_refused_first() {
    let folder = Folder::new();
    let (source, out) = (folder.sparse("in", 1 << 20), folder.file("out", b"old"));
    std::fs::hard_link(&out, folder.path("link")).unwrap();
    let copied = format!("copy {source} {out} --force");
    for bind in ["", " && mount -o remount,bind,ro \"$0\""] {
        let run = |program: &str, args: &[String]| {
            let script =
                format!("mount --bind \"$0\" \"$0\" {bind} || exit 77; exec {program} \"$@\"");
            let mut command = Command::new("unshare");
            command
                .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script, &out])
                .args(args);
            command.output().ok()
        };
        if !run("true", &[]).is_some_and(|ended| ended.status.success()) {
            skipped("no mount namespace of a user");
            break;
        }
        let ended = run(env!("CARGO_BIN_EXE_pinfold"), &words(&copied)).unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{err}");
        assert!(
            err.contains("is a mount point") && err.contains("`cat`") && err.lines().count() == 1,
            "{err}"
        );
        assert!(ended.stdout.is_empty(), "nothing was begun");
    }
    let attribute = |change, path: &str| Command::new("chattr").args([change, path]).output();
    let whole = folder.arg("");
    for (set, clear, path) in
        [("+i", "-i", &out), ("+a", "-a", &out), ("+i", "-i", &whole), ("+a", "-a", &whole)]
    {
        if !attribute(set, path).is_ok_and(|set| set.status.success()) {
            skipped("no immutable files: not root, or not on this file system");
            break;
        }
        let ended = pinfold(&words(&copied));
        assert!(attribute(clear, path).unwrap().status.success());
        assert_eq!(ended.out, "", "nothing was begun");
        ended.failed(1, &[path.trim_end_matches('/'), "immutable or append-only", "chattr"]);
    }
    assert_eq!(
        (std::fs::read(&out).unwrap(), folder.names()),
        (b"old".to_vec(), words("in link out"))
    );
    // The help mentions an option that can.
    pinfold(&words(&copied)).ok();
    assert_eq!(std::fs::metadata(&out).unwrap().len(), 1 << 20);
    assert_eq!(std::fs::read(folder.path("link")).unwrap(), b"old");
}

#[test]
fn a_name_with_line_ends_is_reported_on_one_line() {
    let folder = Folder::new();
    let source = folder.file("two\nlines \u{1b}[31m", b"x");
    pinfold(&["copy", &source, &folder.arg("out")]).ok();
    pinfold(&["copy", &folder.arg("out"), &source]).failed(1, &["two\\nlines \\u{1b}[31m exists"]);
}

#[test]
fn an_unwritable_destination_is_reported_with_the_remedy() {
    let folder = Folder::new();
    let source = folder.file("in", b"x");
    pinfold(&["copy", &source, &folder.arg("no/out")]).failed(1, &["make the folder first"]);
    pinfold(&["copy", &source, &folder.arg("in/out")])
        .failed(1, &["Not a directory", "name a file in"]);
    pinfold(&["copy", &source, &folder.arg(&"n".repeat(300))]).failed(1, &["shorter name"]);
    assert_eq!(folder.names(), ["in"]);
}

#[test]
fn too_much_memory_is_refused() {
    let folder = Folder::new();
    let (source, out) = (folder.sparse("in", 1 << 40), folder.arg("out"));
    // Either the disk is too small for the copy, or the memory for the buffers.
    let line = format!("copy {source} {out} --bs 64M --iodepth 4096");
    let ended = pinfold(&words(&line));
    assert!(matches!(ended.code, Some(1 | 2)), "{ended:#?}");
    assert_eq!(folder.names(), ["in"]);
    // 63.9 GiB, and 1 TiB: refused before any is allocated.
    for line in [
        "io soft:64G --bs 64M --iodepth 1023",
        "io soft:64G --bs 64M --iodepth 1023 --numjobs 16 --size 1T",
    ] {
        let line = format!("{line} --memory plain");
        let limited =
            ["-c", "ulimit -v 8000000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_pinfold")];
        let limited = Command::new("sh").args(limited).args(words(&line)).output().unwrap();
        let err = String::from_utf8(limited.stderr).unwrap();
        assert_eq!(limited.status.code(), Some(2), "{err}");
        for part in if line.contains("1T") {
            &["--size"][..]
        } else {
            &["needs 6", "available", "allowed by", "--iodepth"]
        } {
            assert!(err.contains(part) && err.lines().count() == 1, "{part}: {err}");
        }
    }
}
