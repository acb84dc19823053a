//! Helpers for the tests of the built program.
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsStr;
use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) use crate::wire::wait_until;

/// The time limit for a run of the program.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The outcome of a run of the program.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code, or 128 plus the signal that ended it, as in a shell.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// Asserts success and returns the output.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.out
    }

    /// Asserts exit code `code` and one line on standard error that contains all of `parts`.
    #[track_caller]
    pub(crate) fn failed(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in {self:#?}");
        }
        // The line may be preceded by a warning. clap's errors have more lines: the word, the
        // known ones, the usage.
        let lines = self.err.lines().filter(|line| !line.starts_with(" WARN ")).count();
        assert!(lines == 1 || self.err.starts_with("error: "), "{self:#?}");
    }

    /// Asserts success and parses the output.
    #[track_caller]
    pub(crate) fn json(self) -> serde_json::Value {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.report()
    }

    /// Parses the output.
    #[track_caller]
    pub(crate) fn report(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// A child that is killed when it is dropped, as by a test that fails.
#[derive(Debug)]
pub(crate) struct Running(Child);

impl From<Child> for Running {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Neither does anything to a child that was waited for.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Starts the program with the default action for the signals that it handles: a test run in the
/// background may have inherited that they are ignored, and the program respects that.
pub(crate) fn start<S: AsRef<OsStr>>(args: &[S]) -> Running {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_pinfold")]).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap().into()
}

/// Waits until the program has written a line with `words` to standard error; `finish` returns what
/// it writes after this line.
pub(crate) fn wait_for_words(child: &mut Child, words: &str) {
    let (end, mut line) = (Instant::now() + TIMEOUT, Vec::new());
    let mut err = child.stderr.take().unwrap();
    while !(line.ends_with(b"\n") && String::from_utf8_lossy(&line).contains(words)) {
        if line.ends_with(b"\n") {
            line.clear();
        }
        let mut readable = [PollFd::new(&err, PollFlags::IN)];
        poll(&mut readable, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
        assert!(Instant::now() < end, "not written: {words}");
        let mut byte = [0];
        // One at a time: what follows is not this function's.
        if !readable[0].revents().is_empty() {
            err.read_exact(&mut byte).unwrap_or_else(|_| panic!("ended without: {words}"));
            line.push(byte[0]);
        }
    }
    child.stderr = Some(err);
}

pub(crate) fn finish(child: impl Into<Running>) -> Ended {
    let mut child = child.into();
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<&mut dyn Read>| {
        let mut text = String::new();
        if let Some(pipe) = pipe {
            pipe.read_to_string(&mut text).unwrap();
        }
        text
    };
    let until = Instant::now() + TIMEOUT;
    let (code, out, err) = std::thread::scope(|scope| {
        let out = scope.spawn(move || read(out.as_mut().map(|pipe| pipe as _)));
        let err = scope.spawn(move || read(err.as_mut().map(|pipe| pipe as _)));
        let code = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status.code().or(status.signal().map(|signal| 128 + signal)),
                None if Instant::now() > until => {
                    // The threads read to its end.
                    child.kill().unwrap();
                    panic!("the program hangs");
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        (code, out.join().unwrap(), err.join().unwrap())
    });
    Ended { code, out, err }
}

/// Runs a command whose streams are configured.
pub(crate) fn finish_with(mut command: Command) -> Ended {
    finish(command.spawn().unwrap())
}

pub(crate) fn pinfold<S: AsRef<OsStr>>(args: &[S]) -> Ended {
    finish(start(args))
}

/// Splits at blanks.
pub(crate) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// A temporary folder on the disk of the build folder: `/tmp` may be in memory, without O_DIRECT.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the path as an argument, without blanks.
    pub(crate) fn arg(&self, name: &str) -> String {
        self.path(name).into_os_string().into_string().unwrap()
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.arg(name)
    }

    /// Creates a file of `len` bytes without data.
    pub(crate) fn sparse(&self, name: &str, len: u64) -> String {
        std::fs::File::create(self.path(name)).unwrap().set_len(len).unwrap();
        self.arg(name)
    }

    /// Returns the names of all files, temporary ones included.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Copies a program that is run afterwards. By another process: a thread of this one may start a
/// child while the copy is open for writing, and until that child executes its own program, which
/// closes the descriptor, the kernel refuses to execute the copy (ETXTBSY).
pub(crate) fn copy_program(from: impl AsRef<Path>, to: &Path) {
    assert!(Command::new("cp").arg(from.as_ref()).arg(to).status().unwrap().success());
}

/// Returns pseudo-random bytes.
pub(crate) fn bytes(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ len as u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Asserts that both files have the same contents, without printing them.
#[track_caller]
pub(crate) fn assert_same(a: &Path, b: &Path) {
    let (mut a, mut b) = (std::fs::File::open(a).unwrap(), std::fs::File::open(b).unwrap());
    assert_eq!(a.metadata().unwrap().len(), b.metadata().unwrap().len());
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut at = 0;
    loop {
        let len = a.read(&mut left).unwrap();
        b.read_exact(&mut right[..len]).unwrap();
        assert!(left[..len] == right[..len], "they differ within the {len} bytes from {at}");
        if len == 0 {
            return;
        }
        at += len;
    }
}

/// Reports a skipped test, past the test harness, which captures the output.
pub(crate) fn skipped(what: &str) {
    use std::io::Write;
    // Not by `eprintln`, which the test harness keeps to itself.
    writeln!(std::io::stderr(), "skipped: {what}").unwrap();
}
