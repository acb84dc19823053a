//! The address of a PCI device.

use std::fmt;
use std::str::FromStr;

/// The address of a PCI function: domain, bus, device, function. `0000:01:00.0`; `01:00.0` means
/// domain 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text that is not the address of a PCI device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a PCI address (example: 0000:01:00.0; `lspci -D` lists them)")]
pub struct InvalidBdf(pub String);

impl FromStr for Bdf {
    type Err = InvalidBdf;

    fn from_str(text: &str) -> Result<Self, InvalidBdf> {
        parse(text).ok_or_else(|| InvalidBdf(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Bdf> {
    let (rest, function) = text.split_once('.')?;
    let (front, device) = rest.rsplit_once(':')?;
    let (domain, bus) = front.split_once(':').unwrap_or(("0000", front));
    let bdf = Bdf {
        domain: hex(domain, 4, 8)?,
        bus: u8::try_from(hex(bus, 2, 2)?).ok()?,
        device: u8::try_from(hex(device, 2, 2)?).ok()?,
        function: u8::try_from(hex(function, 1, 1)?).ok()?,
    };
    (bdf.device < 32 && bdf.function < 8).then_some(bdf)
}

/// Parses a number of `least` to `most` hexadecimal digits.
fn hex(digits: &str, least: usize, most: usize) -> Option<u32> {
    let valid =
        (least..=most).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if valid { u32::from_str_radix(digits, 16).ok() } else { None }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Debug for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_and_long_addresses_parse() {
        for (text, long) in [
            ("01:00.0", "0000:01:00.0"),
            ("0000:Af:1f.7", "0000:af:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<Bdf>().unwrap().to_string(), long);
        }
        for text in [
            "",
            "1:0.0",
            "01:20.0",
            "01:00.8",
            "00:01:00.0",
            "01:00",
            "0000:01:00.0 ",
            "../..:0.0",
            "+1:00.0",
        ] {
            assert_eq!(text.parse::<Bdf>(), Err(InvalidBdf(text.to_owned())), "{text}");
        }
    }

    proptest! {
        #[test]
        fn display_and_parse_round_trip(domain in 0u32..=0xf_ffff, bus: u8, device in 0u8..32, function in 0u8..8) {
            let bdf = Bdf { domain, bus, device, function };
            prop_assert_eq!(bdf.to_string().parse(), Ok(bdf));
        }

        #[test]
        fn no_parsed_address_contains_a_slash(text in "[0-9a-f:./]{0,16}") {
            if let Ok(bdf) = text.parse::<Bdf>() {
                prop_assert!(!bdf.to_string().contains('/'));
            }
        }
    }
}
