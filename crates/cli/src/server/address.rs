//! Where clients connect, as the user names it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where clients connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NbdAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host name or address, and a port.
    Tcp(String),
}

/// A word that is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0:?} is no address to listen at: write unix:PATH, or HOST:PORT (127.0.0.1:10809, [::1]:10809, port 0 for any)"
)]
pub(crate) struct InvalidAddress(String);

impl FromStr for NbdAddress {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let invalid = || InvalidAddress(text.to_owned());
        match text.rsplit_once(':') {
            _ if text.starts_with("unix:") => match text.trim_start_matches("unix:") {
                "" => Err(invalid()),
                path => Ok(Self::Unix(PathBuf::from(path))),
            },
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.to_owned()))
            }
            _ => Err(invalid()),
        }
    }
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
        let parse = |text: &str| text.parse::<NbdAddress>();
        assert_eq!(parse("unix:/run/a:1"), Ok(NbdAddress::Unix(PathBuf::from("/run/a:1"))));
        for text in ["127.0.0.1:10809", "[::1]:0", "localhost:65535"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        for text in ["", "unix:", "host", "host:", ":1", "host:65536", "host:x", "/run/socket"] {
            assert!(parse(text).unwrap_err().to_string().contains("unix:PATH"), "{text}");
        }
    }
}
