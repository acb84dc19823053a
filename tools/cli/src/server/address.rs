//! The address where clients connect, as the user names it.

use std::ffi::OsString;
use std::fmt::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The address where clients connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NbdAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host name or address, and a port.
    Tcp(String),
}

/// A word that is not an address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0:?} is not an address to listen on: write unix:PATH, or HOST:PORT (127.0.0.1:10809, [::1]:10809, port 0 for any)"
)]
pub(crate) struct InvalidAddress(String);

impl TryFrom<OsString> for NbdAddress {
    type Error = InvalidAddress;

    fn try_from(word: OsString) -> Result<Self, InvalidAddress> {
        // A path may have any bytes.
        match word.as_bytes().strip_prefix(b"unix:") {
            Some(path) if !path.is_empty() => {
                return Ok(Self::Unix(PathBuf::from(OsString::from_vec(path.to_vec()))));
            }
            _ => {}
        }
        let text = word
            .into_string()
            .map_err(|word| InvalidAddress(word.to_string_lossy().into_owned()))?;
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text))
            }
            _ => Err(InvalidAddress(text)),
        }
    }
}

/// Returns the part of a URI that encodes `bytes`: slashes and unreserved bytes as they are
/// (RFC 3986, section 2.3).
pub(super) fn encode(bytes: &[u8]) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_others_refused() {
        let parse = |text: &str| NbdAddress::try_from(OsString::from(text));
        assert_eq!(parse("unix:/run/a:1"), Ok(NbdAddress::Unix(PathBuf::from("/run/a:1"))));
        assert_eq!(
            parse("unix:unix:x"),
            Ok(NbdAddress::Unix(PathBuf::from("unix:x"))),
            "one prefix"
        );
        let path = OsString::from_vec(b"unix:a\xff".to_vec());
        let path = NbdAddress::try_from(path).unwrap();
        assert_eq!(path, NbdAddress::Unix(PathBuf::from(OsString::from_vec(b"a\xff".to_vec()))));
        assert!(NbdAddress::try_from(OsString::from_vec(b"a\xff:1".to_vec())).is_err());
        for text in ["127.0.0.1:10809", "[::1]:0", "localhost:65535"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        for text in ["", "unix:", "host", "host:", ":1", "host:65536", "host:x", "/run/socket"] {
            assert!(parse(text).unwrap_err().to_string().contains("unix:PATH"), "{text}");
        }
    }

    #[test]
    fn reserved_characters_of_uris_are_encoded() {
        assert_eq!(
            encode("/a b#c?d&e%41;é+=~".as_bytes()),
            "/a%20b%23c%3Fd%26e%2541%3B%C3%A9%2B%3D~"
        );
        assert_eq!(encode(b"\xff\n"), "%FF%0A");
    }
}
