//! The copy of the workspace with the changes in it, and its test programs.

use crate::rewrite::{Written, rewrite, switch};
use crate::sites::Site;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

/// A workspace with changes.
pub struct Tree {
    /// The original file.
    pub source: PathBuf,
    /// The copy.
    pub copy: PathBuf,
    pub target: PathBuf,
    pub packages: Vec<String>,
    pub loom: bool,
    /// The largest number of a change.
    pub last: u32,
}

/// A test program, and the folder that its tests expect to run in.
pub struct Program {
    pub path: PathBuf,
    pub folder: PathBuf,
    pub name: String,
    /// The arguments of a program in C, which is one test.
    pub arguments: Option<Vec<String>>,
}

impl Tree {
    /// Copies what git knows of the workspace, as it is in the folder.
    ///
    /// # Errors
    /// git, or a file.
    pub fn copy(&self) -> io::Result<()> {
        let listed = Command::new("git")
            .args(["ls-files", "-co", "--exclude-standard", "-z"])
            .current_dir(&self.source)
            .output()?;
        for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = String::from_utf8_lossy(name).into_owned();
            let (from, to) = (self.source.join(&name), self.copy.join(&name));
            if from.is_file() {
                write_if_changed(&to, &fs::read(&from)?)?;
                fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
            }
        }
        Ok(())
    }

    /// Writes all changes but `refused` into the copy, and returns where each is.
    ///
    /// # Errors
    /// A file.
    pub fn write(
        &self,
        sites: &[Site],
        refused: &BTreeSet<u32>,
    ) -> io::Result<BTreeMap<String, Vec<Written>>> {
        let mut of_file: BTreeMap<&str, Vec<Site>> = BTreeMap::new();
        for site in sites.iter().filter(|site| !refused.contains(&site.id)) {
            of_file.entry(&site.file).or_default().push(site.clone());
        }
        let mut places = BTreeMap::new();
        for (file, sites) in of_file {
            let (text, written) = rewrite(&fs::read_to_string(self.source.join(file))?, &sites);
            write_if_changed(&self.copy.join(file), text.as_bytes())?;
            places.insert(file.to_owned(), written);
        }
        for package in &self.packages {
            let folder = format!("crates/{package}/src");
            let lib = fs::read_to_string(self.source.join(&folder).join("lib.rs"))?;
            let changed = self.copy.join(&folder).join("lib.rs");
            let present = places.contains_key(&format!("{folder}/lib.rs"));
            let text = if present { fs::read_to_string(&changed)? } else { lib };
            let module = "#[allow(missing_docs, unreachable_pub)]\n#[doc(hidden)]\npub mod pinfold_mutant;\n";
            write_if_changed(&changed, format!("{text}\n{module}").as_bytes())?;
            write_if_changed(
                &self.copy.join(&folder).join("pinfold_mutant.rs"),
                switch(self.last).as_bytes(),
            )?;
        }
        Ok(places)
    }

    fn cargo(&self, what: &[&str]) -> Command {
        let mut cargo = Command::new("cargo");
        cargo
            .current_dir(&self.copy)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_INCREMENTAL", "0");
        // The changes have warnings of their own.
        let flags = if self.loom { "--cfg loom --cap-lints allow" } else { "--cap-lints allow" };
        cargo.env("RUSTFLAGS", flags);
        cargo.args(what).args([
            "--locked",
            "--profile",
            "mutants",
            "--message-format=json",
            "--lib",
        ]);
        if !self.loom {
            cargo.arg("--tests");
        }
        for package in &self.packages {
            let name = if package == "pinfold" { package.clone() } else { format!("pinfold-{package}") };
            cargo.args(["-p", &name]);
        }
        cargo.stdin(Stdio::null()).stderr(Stdio::piped());
        cargo
    }

    /// Compiles; returns the changes that are no Rust, if any. `drops` are those that leave out the
    /// end of a borrow: the error is where the next one begins.
    ///
    /// # Errors
    /// cargo cannot run, or an error of the compiler is at no change.
    pub fn refused(
        &self,
        places: &BTreeMap<String, Vec<Written>>,
        drops: &BTreeSet<u32>,
    ) -> io::Result<BTreeSet<u32>> {
        let output = self.cargo(&["check", "--keep-going"]).output()?;
        let mut refused = BTreeSet::new();
        let mut errors = Vec::new();
        for message in
            messages(&output.stdout).filter(|message| message["message"]["level"] == "error")
        {
            let spans = message["message"]["spans"].as_array().cloned().unwrap_or_default();
            let culprit = spans.iter().filter_map(|span| {
                let file = span["file_name"].as_str()?;
                let (start, end) = (span["byte_start"].as_u64()?, span["byte_end"].as_u64()?);
                let (start, end) = (usize::try_from(start).ok()?, usize::try_from(end).ok()?);
                let written = places.get(file)?;
                let within = written
                    .iter()
                    .filter(|written| written.place.start <= start && end <= written.place.end);
                within.min_by_key(|written| written.place.len()).map(|written| written.id)
            });
            let mut culprits: Vec<_> = culprit.collect();
            if culprits.is_empty() {
                let before = spans.iter().filter_map(|span| {
                    let written = places.get(span["file_name"].as_str()?)?;
                    let start = usize::try_from(span["byte_start"].as_u64()?).ok()?;
                    let drops = written.iter().filter(|written| drops.contains(&written.id));
                    let before = drops.filter(|written| written.place.end <= start);
                    before.max_by_key(|written| written.place.end).map(|written| written.id)
                });
                culprits.extend(before.last());
            }
            if culprits.is_empty() {
                errors.push(message["message"]["rendered"].as_str().unwrap_or_default().to_owned());
            }
            refused.extend(culprits);
        }
        let ended = output.status.success() || !refused.is_empty();
        if ended {
            Ok(refused)
        } else {
            // If cargo itself refuses, no error is the compiler's.
            let said = String::from_utf8_lossy(&output.stderr);
            let errors = if errors.is_empty() { said.into_owned() } else { errors.join("\n") };
            Err(io::Error::other(format!("the copy does not compile:\n{errors}")))
        }
    }

    /// Returns the test programs.
    ///
    /// # Errors
    /// cargo cannot run, or the tests do not compile.
    pub fn programs(&self) -> io::Result<Vec<Program>> {
        let output = self.cargo(&["test", "--no-run"]).output()?;
        if !output.status.success() {
            return Err(io::Error::other("the tests of the copy do not compile"));
        }
        let programs = messages(&output.stdout).filter_map(|message| {
            let path = PathBuf::from(message["executable"].as_str()?);
            let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
            let name = message["target"]["name"].as_str()?.to_owned();
            let program = Program { path, folder, name, arguments: None };
            message["profile"]["test"].as_bool()?.then_some(program)
        });
        let mut programs: Vec<_> = programs.collect();
        if !self.loom && self.packages.iter().any(|package| package == "capi") {
            programs.extend(self.programs_in_c()?);
        }
        Ok(programs)
    }

    /// Returns the tests of the C library, but those that need a device of `pinfold check`.
    fn programs_in_c(&self) -> io::Result<Vec<Program>> {
        let mut script = Command::new(self.copy.join("scripts/capi"));
        script.arg("programs").env("PROFILE", "mutants").env("CARGO_TARGET_DIR", &self.target);
        script.env("CARGO_INCREMENTAL", "0").env("RUSTFLAGS", "--cap-lints allow");
        let output = script.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(io::Error::other("the tests of the copy in C do not compile"));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let program = |line: &str| {
            let mut words = line.split_whitespace().map(str::to_owned);
            let name = words.next()?;
            let (path, folder) = (self.copy.join(&name), self.copy.clone());
            Some(Program { path, folder, name, arguments: Some(words.collect()) })
        };
        Ok(text.lines().filter_map(program).collect())
    }
}

fn messages(output: &[u8]) -> impl Iterator<Item = Value> {
    output.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

/// Leaves the time of what stays the same, so that cargo builds no more than it must.
fn write_if_changed(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, bytes)
}
