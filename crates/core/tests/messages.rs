//! Messages of this crate name no command, option or privilege of a system, because the crate does
//! not know which program or system it is part of. Callers add them: an error's `remedy`, or a
//! message of the crate above.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// Returns the first word of `line` that only a program or a system knows.
fn foreign(line: &str) -> Option<&str> {
    let mut words = line.split(|c: char| c.is_whitespace() || "`\"'()[],;:".contains(c));
    words.find(|word| {
        let option =
            word.strip_prefix("--").is_some_and(|name| name.starts_with(char::is_alphabetic));
        let command = ["sudo", "ulimit", "sysctl", "modprobe", "doctor"].contains(word);
        option
            || command
            || word.starts_with("CAP_")
            || word.starts_with("/proc/")
            || word.starts_with("/sys/")
    })
}

#[test]
fn no_message_names_a_command_or_an_option() {
    assert_eq!(foreign("#[error(\"unknown; use sudo\")]"), Some("sudo"));
    assert_eq!(foreign("\"raise it (`ulimit -v`)\""), Some("ulimit"));
    assert_eq!(foreign("\"MappingPolicy::Whole (--protect static)\""), Some("--protect"));
    assert_eq!(foreign("\"that needs CAP_SYS_ADMIN\""), Some("CAP_SYS_ADMIN"));
    assert_eq!(foreign("\"cannot map 5 bytes\" -- --- a--b"), None);
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files).unwrap();
    assert!(files.len() > 50, "{}", files.len());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in text.lines().enumerate() {
            if !line.trim_start().starts_with("//") {
                assert_eq!(foreign(line), None, "{}:{}", file.display(), number + 1);
            }
        }
    }
}
