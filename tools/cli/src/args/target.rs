//! A target as the user names it.

use super::foreign::ENGINE;
use crate::units::{ByteSize, TimeError, TimeSpan};
use pinfold::pci::{Bdf, InvalidBdf};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The forms of a target, for messages.
#[cfg(not(feature = "vtd"))]
pub(crate) const KNOWN: &str = "file:PATH (or a bare path), soft:SIZE, soft:IMAGE, vfio:BDF[/NSID]";
#[cfg(feature = "vtd")]
pub(crate) const KNOWN: &str =
    "file:PATH (or a bare path), soft:SIZE, soft:IMAGE, vfio:BDF[/NSID], vtd:BDF[/NSID]";

/// The interface through which a real controller is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    /// The kernel keeps the IOMMU's table.
    Vfio,
    /// This program takes the VT-d unit.
    #[cfg(feature = "vtd")]
    Vtd,
}

impl Via {
    const ALL: &[Self] = &[
        Self::Vfio,
        #[cfg(feature = "vtd")]
        Self::Vtd,
    ];

    fn of(word: &[u8]) -> Option<Self> {
        Self::ALL.iter().copied().find(|via| via.name().as_bytes() == word)
    }

    /// Returns the word before the colon.
    fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio",
            #[cfg(feature = "vtd")]
            Self::Vtd => "vtd",
        }
    }
}

/// The options of a model controller: `soft:64M,block=4k,not-ready=2s`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SoftOptions {
    /// The size of a block: 512 or 4096 bytes.
    pub(crate) block_bytes: u32,
    /// For how long its namespace is not ready after a start.
    pub(crate) not_ready: Duration,
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self { block_bytes: 512, not_ready: Duration::ZERO }
    }
}

impl SoftOptions {
    /// Splits `64M,block=4k` into what is before the options, and the options; `text` is the whole
    /// word.
    fn split<'t>(mut rest: &'t [u8], text: &str) -> Result<(&'t OsStr, Self), SpecError> {
        let mut options = Self::default();
        while let Some(comma) = rest.iter().rposition(|&byte| byte == b',') {
            let (before, option) = rest.split_at(comma);
            let option = String::from_utf8_lossy(option.get(1..).unwrap_or_default()).into_owned();
            // A comma may be part of a file's name.
            let Some((key, value)) =
                option.split_once('=').filter(|(key, _)| is_word(key.as_bytes()))
            else {
                break;
            };
            let refused =
                || SpecError::SoftOption { text: text.to_owned(), option: option.clone() };
            match key {
                "block" => {
                    let bytes = ByteSize::from_str(value).map_err(|_| refused())?.0;
                    options.block_bytes = u32::try_from(bytes)
                        .ok()
                        .filter(|b| [512, 4096].contains(b))
                        .ok_or_else(refused)?;
                }
                "not-ready" => {
                    let refused = |error| SpecError::NotReady { text: text.to_owned(), error };
                    options.not_ready = TimeSpan::from_str(value).map_err(refused)?.0;
                }
                _ => return Err(refused()),
            }
            rest = before;
        }
        Ok((OsStr::from_bytes(rest), options))
    }
}

impl fmt::Display for SoftOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.block_bytes != Self::default().block_bytes {
            write!(f, ",block={}", self.block_bytes)?;
        }
        match self.not_ready.as_millis() {
            0 => Ok(()),
            ms if ms % 1000 == 0 => write!(f, ",not-ready={}s", ms / 1000),
            ms => write!(f, ",not-ready={ms}ms"),
        }
    }
}

/// A target as the user named it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TargetSpec {
    /// A file or block device, through io_uring.
    File(PathBuf),
    /// The model controller on this much memory, zeroed at the start and freed at the end.
    SoftMemory(ByteSize, SoftOptions),
    /// The model controller on an image file.
    SoftImage(PathBuf, SoftOptions),
    /// A real controller.
    Pci {
        /// The interface.
        via: Via,
        /// Its PCI address.
        bdf: Bdf,
        /// The namespace; the first usable one, if none is named.
        nsid: Option<u32>,
    },
}

/// Why a word is not a target.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum SpecError {
    /// The kind before the colon is unknown.
    #[error(
        "{word:?} is not a kind of target: write one of {KNOWN} (a file whose name has a colon: file:{rest})"
    )]
    UnknownKind {
        /// The word before the colon.
        word: String,
        /// The whole word.
        rest: String,
    },
    /// Nothing follows the colon.
    #[error("{0:?} names no target: write one of {KNOWN}")]
    Empty(String),
    /// `soft`, `vfio`.
    #[error("{0:?} names no target: write one of {KNOWN} (a file of this name: ./{0})")]
    KindAlone(String),
    /// `soft:1.5G`, `soft:10X`.
    #[error(
        "{text:?}: {size} is no size: write a whole number, alone or with K, M, G or T, for example soft:1536M (an image of this \
         name: soft:./{size})"
    )]
    NoSize {
        /// The whole word.
        text: String,
        /// The word after the colon.
        size: String,
    },
    /// `soft:0`, `soft:3`.
    #[error("soft:{0} has no blocks; the smallest controller is soft:{1}, one block")]
    NoBlocks(u64, u32),
    /// `soft:1M,not-ready=0s`.
    #[error("{text:?}: not-ready: {error}; leave it out for a controller that is ready at once")]
    NotReady {
        /// The whole word.
        text: String,
        /// Why the value is refused.
        error: TimeError,
    },
    /// `soft:1M,block=1k`.
    #[error(
        "{text:?}: {option:?} is not an option of soft: write block=512, block=4096 or not-ready=TIME"
    )]
    SoftOption {
        /// The whole word.
        text: String,
        /// The option.
        option: String,
    },
    /// `vfio:nonsense`.
    #[error("{text:?} does not name a controller: {error}")]
    Address {
        /// The whole word.
        text: String,
        /// The parser's error.
        error: InvalidBdf,
    },
    /// `vfio:0000:01:00.0/x`.
    #[error("{0:?}: write the number of a namespace, from 1, after the slash")]
    Namespace(String),
    /// `io jobs.fio`.
    #[error("{0}: a job file of fio's: {ENGINE}; a target of this name is written file:{0}")]
    JobFile(String),
}

impl TargetSpec {
    /// Parses a target. Letters, digits, `-` and `_` before the first colon are its kind.
    pub(crate) fn parse(text: &OsStr) -> Result<Self, SpecError> {
        let bytes = text.as_bytes();
        let empty = || SpecError::Empty(text.to_string_lossy().into_owned());
        let kind = bytes.iter().position(|&byte| byte == b':').map(|colon| bytes.split_at(colon));
        let (word, rest) = match kind {
            Some((word, rest)) if is_word(word) => (word, rest.get(1..).unwrap_or_default()),
            _ if bytes.is_empty() => return Err(empty()),
            _ if is_kind_alone(bytes) => {
                return Err(SpecError::KindAlone(text.to_string_lossy().into_owned()));
            }
            _ => return Ok(Self::File(PathBuf::from(text))),
        };
        let rest = OsStr::from_bytes(rest);
        if let Some(via) = Via::of(word) {
            if rest.is_empty() {
                return Err(empty());
            }
            return Self::pci(via, &rest.to_string_lossy(), &text.to_string_lossy());
        }
        match (word, rest.is_empty()) {
            (b"file" | b"soft", true) => Err(empty()),
            (b"file", false) => Ok(Self::File(PathBuf::from(rest))),
            (b"soft", false) => Self::soft(rest.as_bytes(), &text.to_string_lossy()),
            _ => Err(SpecError::UnknownKind {
                word: String::from_utf8_lossy(word).into_owned(),
                rest: text.to_string_lossy().into_owned(),
            }),
        }
    }

    /// Returns whether the text names its kind before a colon.
    pub(crate) fn has_kind(text: &OsStr) -> bool {
        let kind = text.as_bytes().split(|byte| *byte == b':').next().unwrap_or_default();
        let is_kind = matches!(kind, b"file" | b"soft") || Via::of(kind).is_some();
        is_kind && kind.len() < text.len()
    }

    /// Parses `SIZE` or `IMAGE`, with options; `text` is the whole word.
    fn soft(rest: &[u8], text: &str) -> Result<Self, SpecError> {
        let (rest, options) = SoftOptions::split(rest, text)?;
        match rest.to_str().map(ByteSize::from_str) {
            Some(Ok(ByteSize(bytes))) if bytes < options.block_bytes.into() => {
                Err(SpecError::NoBlocks(bytes, options.block_bytes))
            }
            Some(Ok(size)) => Ok(Self::SoftMemory(size, options)),
            _ if rest.is_empty() => Err(SpecError::Empty(text.to_owned())),
            Some(Err(_)) if is_like_a_size(rest.as_bytes()) => {
                let size = rest.to_string_lossy().into_owned();
                Err(SpecError::NoSize { text: text.to_owned(), size })
            }
            _ => Ok(Self::SoftImage(PathBuf::from(rest), options)),
        }
    }

    /// Returns the options of a model controller, by default for other targets.
    pub(crate) fn soft_options(&self) -> SoftOptions {
        match self {
            Self::SoftMemory(_, options) | Self::SoftImage(_, options) => *options,
            Self::File(_) | Self::Pci { .. } => SoftOptions::default(),
        }
    }

    /// Parses `BDF` or `BDF/NSID`; `text` is the whole word.
    fn pci(via: Via, rest: &str, text: &str) -> Result<Self, SpecError> {
        let (address, nsid) =
            rest.split_once('/').map_or((rest, None), |(bdf, nsid)| (bdf, Some(nsid)));
        let bdf = Bdf::from_str(address)
            .map_err(|error| SpecError::Address { text: text.to_owned(), error })?;
        let number = |nsid: &str| nsid.parse().ok().filter(|nsid| (1..u32::MAX).contains(nsid));
        let nsid = nsid
            .map(|nsid| number(nsid).ok_or_else(|| SpecError::Namespace(text.to_owned())))
            .transpose()?;
        Ok(Self::Pci { via, bdf, nsid })
    }

    /// Parses a target, or the bare address of a controller.
    pub(crate) fn controller(text: OsString) -> Result<Self, SpecError> {
        match text.to_str().map(Bdf::from_str) {
            Some(Ok(bdf)) => Ok(Self::Pci { via: Via::Vfio, bdf, nsid: None }),
            _ => Self::from_os_string(text),
        }
    }

    /// Parses a target, as clap calls it.
    #[expect(clippy::needless_pass_by_value, reason = "the shape of clap's `try_map`")]
    pub(crate) fn from_os_string(text: OsString) -> Result<Self, SpecError> {
        Self::parse(&text)
    }
}

/// Returns whether the text is the kind of a controller without anything that says which.
fn is_kind_alone(text: &[u8]) -> bool {
    let text = text.to_ascii_lowercase();
    text == b"soft" || Via::of(&text).is_some()
}

/// Returns whether the text is a number, perhaps with a fraction, and at most a unit of bytes (one
/// letter, and `B` or `iB`): no one names an image so, except as a path.
fn is_like_a_size(text: &[u8]) -> bool {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.strip_suffix(b"B").or(unit.strip_suffix(b"b")).unwrap_or(unit);
    let unit = unit.strip_suffix(b"i").unwrap_or(unit);
    number.first().is_some_and(u8::is_ascii_digit)
        && unit.len() <= 1
        && unit.iter().all(u8::is_ascii_alphabetic)
}

fn is_word(bytes: &[u8]) -> bool {
    !bytes.is_empty()
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

impl fmt::Display for TargetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::SoftMemory(size, options) => write!(f, "soft:{}{options}", size.to_arg()),
            Self::SoftImage(path, options) => write!(f, "soft:{}{options}", path.display()),
            Self::Pci { via, bdf, nsid: None } => write!(f, "{}:{bdf}", via.name()),
            Self::Pci { via, bdf, nsid: Some(nsid) } => write!(f, "{}:{bdf}/{nsid}", via.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TargetSpec, SpecError> {
        TargetSpec::parse(OsStr::new(text))
    }

    #[test]
    fn a_bare_path_is_a_file() {
        let file = |path: &str| Ok(TargetSpec::File(PathBuf::from(path)));
        assert_eq!(parse("a.bin"), file("a.bin"));
        assert_eq!(parse("file:a.bin"), file("a.bin"));
        assert_eq!(parse("file:soft:1M"), file("soft:1M"));
        assert_eq!(parse("./a:b"), file("./a:b"));
        assert_eq!(parse("a b:c"), file("a b:c"));
        assert_eq!(parse(":"), file(":"));
        let raw = OsStr::from_bytes(b"file:\xff");
        assert_eq!(
            TargetSpec::parse(raw),
            Ok(TargetSpec::File(PathBuf::from(OsStr::from_bytes(b"\xff"))))
        );
    }

    #[test]
    fn a_model_controller_has_memory_or_an_image() {
        let memory = |bytes| Ok(TargetSpec::SoftMemory(ByteSize(bytes), SoftOptions::default()));
        let image =
            |path: &str| Ok(TargetSpec::SoftImage(PathBuf::from(path), SoftOptions::default()));
        assert_eq!(parse("soft:512M"), memory(512 << 20));
        assert_eq!(parse("soft:disk.img"), image("disk.img"));
        assert_eq!(parse("soft:./512M"), image("./512M"));
        assert_eq!(parse("soft:a,b.img"), image("a,b.img"));
        assert_eq!(parse("soft:0"), Err(SpecError::NoBlocks(0, 512)));
        assert_eq!(parse("soft:511"), Err(SpecError::NoBlocks(511, 512)));
        assert_eq!(parse("soft:512"), memory(512));
    }

    #[test]
    fn a_model_controller_has_options() {
        let options = SoftOptions { block_bytes: 4096, not_ready: Duration::from_secs(2) };
        let text = "soft:1M,block=4k,not-ready=2s";
        assert_eq!(parse(text), Ok(TargetSpec::SoftMemory(ByteSize(1 << 20), options)));
        assert_eq!(parse(text).unwrap().to_string(), "soft:1M,block=4096,not-ready=2s");
        let image = TargetSpec::SoftImage(PathBuf::from("a,b.img"), options);
        assert_eq!(parse("soft:a,b.img,not-ready=2s,block=4096"), Ok(image.clone()));
        assert_eq!(parse(&image.to_string()), Ok(image));
        assert_eq!(parse("soft:512,block=512").unwrap().to_string(), "soft:512");
        assert_eq!(parse("soft:4095,block=4k"), Err(SpecError::NoBlocks(4095, 4096)));
        assert_eq!(parse("soft:,block=4k"), Err(SpecError::Empty("soft:,block=4k".into())));
        for text in ["soft:1M,block=1k", "soft:1M,blok=4k", "soft:a.img,block="] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(text) && message.contains("block=4096"), "{message}");
        }
        for value in ["x", "0s", "2d"] {
            let text = format!("soft:1M,not-ready={value}");
            let (message, error) =
                (parse(&text).unwrap_err().to_string(), TimeSpan::from_str(value));
            assert!(message.contains(&text) && !message.contains("not an option"), "{message}");
            assert!(message.contains(&error.unwrap_err().to_string()), "{message}");
        }
    }

    #[test]
    fn a_real_controller_is_named_by_its_address() {
        let pci =
            |via, bdf: &str, nsid| Ok(TargetSpec::Pci { via, bdf: bdf.parse().unwrap(), nsid });
        let vfio = |bdf: &str, nsid| pci(Via::Vfio, bdf, nsid);
        #[cfg(feature = "vtd")]
        {
            assert_eq!(parse("vtd:01:00.0/2"), pci(Via::Vtd, "0000:01:00.0", Some(2)));
            assert_eq!(parse("vtd:01:00.0").unwrap().to_string(), "vtd:0000:01:00.0");
            assert_eq!(parse("vtd"), Err(SpecError::KindAlone("vtd".into())));
            assert!(TargetSpec::has_kind(OsStr::new("vtd:x.fio")));
        }
        #[cfg(not(feature = "vtd"))]
        assert!(matches!(parse("vtd:01:00.0"), Err(SpecError::UnknownKind { .. })));
        assert_eq!(parse("vfio:0000:01:00.0"), vfio("0000:01:00.0", None));
        assert_eq!(parse("vfio:01:00.0/2"), vfio("0000:01:00.0", Some(2)));
        assert_eq!(parse("vfio:01:00.0/2").unwrap().to_string(), "vfio:0000:01:00.0/2");
        assert_eq!(TargetSpec::controller("01:00.0".into()), vfio("0000:01:00.0", None));
        assert_eq!(TargetSpec::controller("vfio:01:00.0".into()), vfio("0000:01:00.0", None));
        assert_eq!(TargetSpec::controller("soft:1M".into()), parse("soft:1M"));
        for text in ["vfio:1", "vfio:0000:01:00", "vfio:/2", "vfio:../x"] {
            assert!(matches!(parse(text), Err(SpecError::Address { .. })), "{text}");
        }
        for text in ["vfio:01:00.0/", "vfio:01:00.0/0", "vfio:01:00.0/x", "vfio:01:00.0/4294967295"]
        {
            assert_eq!(parse(text), Err(SpecError::Namespace(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn unknown_kinds_are_reported_with_the_known_ones() {
        for text in ["nvme:0000:01:00.0", "http://x", "SOFT:1M"] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains("soft:SIZE") && message.contains(text), "{message}");
        }
        for text in ["soft", "vfio", "Soft", "VFIO"] {
            assert_eq!(parse(text), Err(SpecError::KindAlone(text.to_owned())));
        }
        for text in ["./soft", "soft.img", "file:soft", "softly", "file", "a/vfio"] {
            assert!(matches!(parse(text), Ok(TargetSpec::File(_))), "{text}");
        }
        for size in ["1.5G", "10X", "1.5", "1..2", "7q", "3XiB", "10Xb", "99999999999999999999"] {
            let text = format!("soft:{size}");
            let options = format!("{text},block=4k");
            for text in [text, options] {
                let refused = SpecError::NoSize { text: text.clone(), size: size.to_owned() };
                assert_eq!(parse(&text), Err(refused));
            }
        }
        for image in ["./10X", "1.img", "10XY", "2024-01", "a1.5G", ".5G", "1,5G", "10 X"] {
            let text = format!("soft:{image}");
            assert!(matches!(parse(&text), Ok(TargetSpec::SoftImage(..))), "{text}");
        }
        for text in ["", "file:", "soft:", "vfio:"] {
            assert_eq!(parse(text), Err(SpecError::Empty(text.to_owned())));
        }
    }
}
