//! Changes of a served file by others: its clients see the state at the start.

use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// A file that is served.
#[derive(Debug)]
pub(crate) struct Watch {
    path: PathBuf,
    file: File,
    /// Its length at the start.
    length: u64,
    warned: AtomicBool,
}

impl Watch {
    /// Watches the file that was opened at `path`.
    pub(crate) fn new(path: PathBuf, file: File, length: u64) -> Self {
        Self { path, file, length, warned: AtomicBool::new(false) }
    }

    /// Warns about the first change that a new client would not see.
    pub(super) fn warn(&self) {
        if let Some(change) = self.change()
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{change}");
        }
    }

    /// Returns the changes since the start, and what clients see of them.
    pub(crate) fn change(&self) -> Option<String> {
        let path = self.path.display();
        let other = match (self.path.metadata(), self.file.metadata()) {
            (Err(error), _) if error.kind() == ErrorKind::NotFound => {
                Some("no file any more".to_owned())
            }
            // A link to itself, or a folder above it that is a file now or closed.
            (Err(error), _) => Some(format!("not to be found any more ({error})")),
            (Ok(there), Ok(own)) if (there.dev(), there.ino()) != (own.dev(), own.ino()) => {
                Some("another file now".to_owned())
            }
            _ => None,
        };
        if let Some(other) = other {
            return Some(format!(
                "{path} is {other}: the one that was opened at the start is served until the server is started again"
            ));
        }
        let now = seek(&self.file, SeekFrom::End(0)).ok().filter(|now| *now != self.length)?;
        Some(format!(
            "{path} has {now} bytes now and had {} at the start: that is what clients see until the server is started again",
            self.length
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 1000]).unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let watch = Watch::new(path.clone(), open(), 1000);
        assert_eq!(watch.change(), None);
        open().set_len(2000).unwrap();
        let text = watch.change().unwrap();
        assert!(text.contains("2000 bytes now") && text.contains("1000 at the start"), "{text}");
        open().set_len(1000).unwrap();
        assert_eq!(watch.change(), None);
        std::fs::remove_file(&path).unwrap();
        assert!(watch.change().unwrap().contains("no file any more"));
        std::fs::write(&path, [0; 1000]).unwrap();
        assert!(watch.change().unwrap().contains("another file now"));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let text = watch.change().unwrap();
        assert!(
            text.contains("not to be found any more (") && text.contains("opened at"),
            "{text}"
        );
        watch.warn();
        assert!(watch.warned.load(Ordering::Relaxed));
    }
}
