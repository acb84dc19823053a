//! The limits of this process's control groups (cgroups v1 and v2), each with the file that states
//! it.
//!
//! A limit that cannot be read is reported as such, and never taken for a limit that does not
//! exist.

use super::errno::Errno;
use super::{files, process};
use pinfold_core::addr::PageSize;
use std::fmt;
use std::path::{Path, PathBuf};

/// The limit of one control group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupLimit {
    /// The file that states it.
    pub file: PathBuf,
    /// Bytes that the group may use.
    pub limit: u64,
    /// Bytes that it uses; page cache, which the kernel reclaims, is not included.
    pub used: u64,
}

impl GroupLimit {
    /// Returns how many more bytes the group may use.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl fmt::Display for GroupLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, limit, used } = self;
        write!(f, "{}: {used} of {limit} bytes in use", file.display())
    }
}

/// The limits of a process's control group and of all groups that contain it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupLimits {
    /// The limits that could be read. A group without a limit is not listed.
    pub limits: Vec<GroupLimit>,
    /// Why there may be others that could not be read.
    pub unknown: Option<String>,
}

impl GroupLimits {
    /// Returns the limit that leaves the least.
    pub fn tightest(&self) -> Option<&GroupLimit> {
        self.limits.iter().min_by_key(|limit| limit.left())
    }

    /// Returns the limits that refuse `bytes` more.
    pub fn refusing(&self, bytes: u64) -> Vec<GroupLimit> {
        self.limits.iter().filter(|limit| limit.left() < bytes).cloned().collect()
    }
}

/// Returns the shell command that raises each of `limits` so that `bytes` more fit.
pub fn raise_command(limits: &[GroupLimit], bytes: u64) -> String {
    let raise = |limit: &GroupLimit| {
        // systemd writes `-` in a name as `\x2d`.
        let file = process::shell_word(&limit.file.display().to_string());
        format!("echo {} > {file}", limit.used.saturating_add(bytes))
    };
    let script = limits.iter().map(raise).collect::<Vec<_>>().join(" && ");
    format!("sudo sh -c {}", process::shell_word(&script))
}

/// Returns the limits of memory. `proc` is where procfs is mounted.
pub fn memory(proc: &Path) -> GroupLimits {
    read(proc, Resource::Memory)
}

/// Returns the limits of hugetlb pages of this size, in use and reserved.
pub fn hugetlb(proc: &Path, page: PageSize) -> GroupLimits {
    read(proc, Resource::Hugetlb(page))
}

/// Returns the limits of threads: `limit` and `used` count them.
pub(crate) fn threads(proc: &Path) -> GroupLimits {
    read(proc, Resource::Threads)
}

#[derive(Clone, Copy)]
enum Resource {
    Memory,
    Threads,
    Hugetlb(PageSize),
}

impl Resource {
    /// Returns the controller's name.
    fn controller(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Threads => "pids",
            Self::Hugetlb(_) => "hugetlb",
        }
    }

    /// Returns the files of limits, with those of what is used.
    fn files(self, v2: bool) -> Vec<(String, String)> {
        let (limit, usage) =
            if v2 { ("max", "current") } else { ("limit_in_bytes", "usage_in_bytes") };
        let pair = |prefix: &str| (format!("{prefix}.{limit}"), format!("{prefix}.{usage}"));
        match self {
            // Exceeding `memory.high` is not refused: the kernel throttles the process more and
            // more.
            Self::Memory if v2 => {
                vec![pair("memory"), ("memory.high".to_owned(), "memory.current".to_owned())]
            }
            Self::Memory => vec![pair("memory")],
            Self::Threads => vec![("pids.max".to_owned(), "pids.current".to_owned())],
            Self::Hugetlb(page) => {
                let size = if page == PageSize::Size1G { "1GB" } else { "2MB" };
                // Pages in use, and (Linux 5.7) pages that a mapping has reserved.
                vec![pair(&format!("hugetlb.{size}")), pair(&format!("hugetlb.{size}.rsvd"))]
            }
        }
    }
}

fn read(proc: &Path, resource: Resource) -> GroupLimits {
    let own = match files::all(&proc.join("self/cgroup")) {
        Ok(own) => own,
        // A kernel without control groups has no such file; without procfs there is not even the
        // folder.
        Err(errno) if errno.raw() == libc::ENOENT && proc.join("self").exists() => {
            return GroupLimits::default();
        }
        Err(errno) => return unknown(format!("{}: {errno}", proc.join("self/cgroup").display())),
    };
    let name = resource.controller();
    let path_of = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        Some((controllers.to_owned(), path.to_owned()))
    };
    let groups: Vec<_> = own.lines().filter_map(path_of).collect();
    let v1 = groups.iter().find(|(controllers, _)| controllers.split(',').any(|one| one == name));
    let v2 = groups.iter().find(|(controllers, _)| controllers.is_empty());
    let Some((controllers, path)) = v1.or(v2) else { return GroupLimits::default() };
    let initial = process::in_initial_namespace(proc, "cgroup") == Some(true);
    let mounts = match files::all(&proc.join("self/mountinfo")) {
        Ok(mounts) => mounts,
        Err(errno) => {
            return unknown(format!("{}: {errno}", proc.join("self/mountinfo").display()));
        }
    };
    let mut found = GroupLimits::default();
    let (mut read_any, mut all_visible) = (false, initial && path == "/");
    for (root, mount) in mounts.lines().filter_map(|line| mount(line, name, controllers.is_empty()))
    {
        all_visible |= initial && root == "/";
        let inside = match Path::new(path).strip_prefix(&root) {
            Ok(inside) => inside,
            Err(_) if root.starts_with("/..") || path.starts_with("/..") => {
                found.unknown =
                    Some(format!("the control group {path} is not visible at {}", mount.display()));
                Path::new("")
            }
            // The path lies outside of the mount: the mount is the group itself.
            Err(_) => Path::new(""),
        };
        let lowest = mount.join(inside);
        for group in lowest.ancestors().take_while(|group| group.starts_with(&mount)) {
            for (limit, usage) in resource.files(controllers.is_empty()) {
                match read_limit(group, &limit, &usage, controllers.is_empty()) {
                    Ok(limit) => {
                        read_any = true;
                        found.limits.extend(limit);
                    }
                    Err((_, errno)) if errno.raw() == libc::ENOENT => {}
                    Err((file, errno)) => {
                        found.unknown = Some(format!("{}: {errno}", file.display()))
                    }
                }
            }
        }
    }
    if !read_any && !all_visible && found.unknown.is_none() {
        found.unknown =
            Some(format!("no file system shows the limits of the control group {path}"));
    }
    found
}

fn unknown(why: String) -> GroupLimits {
    GroupLimits { limits: Vec::new(), unknown: Some(why) }
}

/// Parses a line of `mountinfo`: the group that is mounted, and where, if it is a hierarchy of the
/// controller.
fn mount(line: &str, controller: &str, v2: bool) -> Option<(String, PathBuf)> {
    let (fields, kind) = line.split_once(" - ")?;
    let mut fields = fields.split(' ').skip(3);
    let (root, mount) = (fields.next()?, fields.next()?);
    let mut kind = kind.split(' ');
    let fits = match (kind.next()?, kind.nth(1)) {
        ("cgroup2", _) => v2,
        ("cgroup", Some(options)) => !v2 && options.split(',').any(|option| option == controller),
        _ => false,
    };
    fits.then(|| (unescaped(root), PathBuf::from(unescaped(mount))))
}

/// Replaces the octal escapes of `mountinfo`: blanks and backslashes.
fn unescaped(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// Reads a group's limit; `None` if it has none.
fn read_limit(
    group: &Path,
    limit: &str,
    usage: &str,
    v2: bool,
) -> Result<Option<GroupLimit>, (PathBuf, Errno)> {
    let number = |name: &str| {
        let file = group.join(name);
        let value = files::all(&file).map_err(|errno| (file.clone(), errno))?;
        Ok((value.trim().parse::<u64>().ok(), file))
    };
    let (most, file) = number(limit)?;
    // Without a limit, v2 has `max`, and v1 the largest number of whole pages.
    let Some(most) = most.filter(|most| *most < 1 << 62) else { return Ok(None) };
    let (Some(used), _) = number(usage)? else {
        return Err((group.join(usage), Errno::new(libc::EINVAL)));
    };
    let cached = if limit.starts_with("memory.") { page_cache(group, v2) } else { 0 };
    Ok(Some(GroupLimit { file, limit: most, used: used.saturating_sub(cached) }))
}

/// Returns the group's page cache in bytes: it is reclaimed before the limit refuses anything.
fn page_cache(group: &Path, v2: bool) -> u64 {
    let prefix = if v2 { "" } else { "total_" };
    let stat = files::all(&group.join("memory.stat")).unwrap_or_default();
    let value = |list: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(&format!("{prefix}{list} ")));
        line.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
    };
    value("inactive_file").saturating_add(value("active_file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INITIAL: &str = "cgroup:[4026531835]";

    /// Returns a `/proc` and control groups in a folder: `AT` in a file's text is that folder.
    fn machine(namespace: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().display().to_string();
        std::fs::create_dir_all(root.path().join("proc/self/ns")).unwrap();
        std::os::unix::fs::symlink(namespace, root.path().join("proc/self/ns/cgroup")).unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text.replace("AT", &at)).unwrap();
        }
        let proc = root.path().join("proc");
        (root, proc)
    }

    fn v2(root: &'static str, own: &'static str) -> [(&'static str, String); 2] {
        [
            ("proc/self/mountinfo", format!("30 1 0:9 {root} AT/cg rw - cgroup2 none rw\n")),
            ("proc/self/cgroup", format!("0::{own}\n")),
        ]
    }

    fn memory_of(
        namespace: &str,
        place: &[(&'static str, String)],
        files: &[(&str, &str)],
    ) -> GroupLimits {
        let place = place.iter().map(|(name, text)| (*name, &**text));
        let files: Vec<_> = place.chain(files.iter().copied()).collect();
        let (_root, proc) = machine(namespace, &files);
        memory(&proc)
    }

    #[test]
    fn all_parent_groups_limit_and_their_page_cache_is_free() {
        let found = memory_of(
            INITIAL,
            &v2("/", "/a/b"),
            &[
                ("cg/a/b/memory.max", "max\n"),
                ("cg/a/b/memory.current", "4096\n"),
                ("cg/a/memory.max", "1000000\n"),
                ("cg/a/memory.current", "900000\n"),
                ("cg/a/memory.stat", "anon 1\ninactive_file 300000\nactive_file 100000\n"),
            ],
        );
        let tightest = found.tightest().unwrap();
        assert_eq!((tightest.left(), &found.unknown), (500_000, &None));
        assert!(tightest.file.ends_with("cg/a/memory.max"), "{tightest}");
        let place = [
            (
                "proc/self/mountinfo",
                "30 1 0:9 /a AT/c\\040g rw - cgroup none rw,memory\n".to_owned(),
            ),
            ("proc/self/cgroup", "3:cpu:/x\n4:memory:/a/b\n0::/\n".to_owned()),
        ];
        let found = memory_of(
            INITIAL,
            &place,
            &[
                ("c g/b/memory.limit_in_bytes", "9223372036854771712\n"),
                ("c g/b/memory.usage_in_bytes", "1\n"),
                ("c g/memory.limit_in_bytes", "5000\n"),
                ("c g/memory.usage_in_bytes", "4000\n"),
                ("c g/memory.stat", "inactive_file 9\ntotal_inactive_file 500\n"),
            ],
        );
        assert_eq!(found.tightest().unwrap().left(), 1500);
    }

    #[test]
    fn what_slows_a_process_down_is_a_limit() {
        let files = [
            ("cg/a/memory.max", "max\n"),
            ("cg/a/memory.high", "5000\n"),
            ("cg/a/memory.current", "4000\n"),
        ];
        let found = memory_of(INITIAL, &v2("/", "/a"), &files);
        let tightest = found.tightest().unwrap();
        assert_eq!((tightest.left(), found.limits.len()), (1000, 1));
        assert!(tightest.file.ends_with("memory.high"), "{tightest}");
        let both = [("cg/a/memory.max", "4500\n"), files[1], files[2]];
        let found = memory_of(INITIAL, &v2("/", "/a"), &both);
        assert_eq!(found.refusing(2000).len(), 2, "both are to be raised");
    }

    #[test]
    fn the_name_of_a_group_reaches_the_shell_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("it's a \\x2d $(group).max");
        let limit = GroupLimit { file: file.clone(), limit: 5, used: 2 };
        let command = raise_command(&[limit.clone(), limit], 7);
        let script = command.strip_prefix("sudo ").unwrap();
        let status = std::process::Command::new("sh").args(["-c", script]).status().unwrap();
        assert!(status.success(), "{command}");
        assert_eq!(std::fs::read_to_string(file).unwrap(), "9\n", "{command}");
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_not_no_limit() {
        let container = "cgroup:[4026532000]";
        let own = [("cg/memory.max", "7000\n"), ("cg/memory.current", "7001\n")];
        let found = memory_of(container, &v2("/", "/"), &own);
        assert_eq!((found.tightest().unwrap().left(), found.unknown), (0, None));
        let unlimited = [("cg/memory.max", "max\n"), ("cg/memory.current", "7001\n")];
        assert_eq!(memory_of(container, &v2("/", "/"), &unlimited), GroupLimits::default());
        // All groups are visible, and the controller is off: there is no limit.
        assert_eq!(memory_of(INITIAL, &v2("/", "/a"), &[]), GroupLimits::default());
        assert_eq!(
            memory_of(INITIAL, &v2("/", "/a")[1..], &[("proc/self/mountinfo", "")]).limits,
            []
        );
        for (why, found) in [
            ("no file system shows", memory_of(container, &v2("/", "/"), &[])),
            (
                "no file system shows",
                memory_of(INITIAL, &v2("/", "/a")[1..], &[("proc/self/mountinfo", "")]),
            ),
            ("is not visible at", memory_of(container, &v2("/../..", "/"), &unlimited)),
            ("mountinfo: No such file", memory_of(INITIAL, &v2("/", "/a")[1..], &[])),
            (
                "memory.current",
                memory_of(
                    INITIAL,
                    &v2("/", "/a"),
                    &[("cg/a/memory.max", "7000\n"), ("cg/a/memory.current/folder", "")],
                ),
            ),
        ] {
            assert!(
                found.unknown.as_ref().is_some_and(|said| said.contains(why)),
                "{why}: {found:?}"
            );
        }
        let nowhere = memory(Path::new("/does/not/exist"));
        assert!(nowhere.unknown.unwrap().contains("/does/not/exist/self/cgroup: No such file"));
        // A kernel without control groups.
        let (_root, proc) = machine(INITIAL, &[]);
        assert_eq!(memory(&proc), GroupLimits::default());
    }

    #[test]
    fn hugetlb_limits_are_raised_by_their_own_files() {
        let place = v2("/", "/a");
        let files = [
            ("cg/a/hugetlb.2MB.max", "4194304\n"),
            ("cg/a/hugetlb.2MB.current", "2097152\n"),
            ("cg/a/hugetlb.2MB.rsvd.max", "8388608\n"),
            ("cg/a/hugetlb.2MB.rsvd.current", "2097152\n"),
            ("cg/a/hugetlb.1GB.max", "0\n"),
            ("cg/a/hugetlb.1GB.current", "0\n"),
        ];
        let all: Vec<_> = place.iter().map(|(name, text)| (*name, &**text)).chain(files).collect();
        let (root, proc) = machine(INITIAL, &all);
        let found = hugetlb(&proc, PageSize::Size2M);
        assert_eq!(found.refusing(2 << 20), []);
        assert_eq!(found.refusing(4 << 20).len(), 1);
        let refusing = found.refusing(8 << 20);
        let group = root.path().join("cg/a").display().to_string();
        assert_eq!(
            raise_command(&refusing, 8 << 20),
            format!(
                "sudo sh -c 'echo 10485760 > {group}/hugetlb.2MB.max && echo 10485760 > {group}/hugetlb.2MB.rsvd.max'"
            )
        );
        assert_eq!(hugetlb(&proc, PageSize::Size1G).tightest().unwrap().limit, 0);
    }
}
