//! `bind` and `unbind`: a device to VFIO, and back to the driver that it had.

use crate::args::{BindArgs, UnbindArgs};
use crate::copy::error::PumpError;
use crate::failure::Failure;
use crate::output;
use crate::signal::Interrupt;
use pinfold::vfio::{Bdf, BindError, Binder, Handed};
use serde::Serialize;
use std::fmt::Write;

/// The driver that gives devices to programs.
const VFIO: &str = "vfio-pci";

#[derive(Serialize)]
struct Report {
    device: String,
    from: Option<String>,
    to: Option<String>,
    group: Option<u32>,
    others: Vec<String>,
}

impl From<&Handed> for Report {
    fn from(handed: &Handed) -> Self {
        Self {
            device: handed.bdf.to_string(),
            from: handed.from.clone(),
            to: handed.to.clone(),
            group: handed.group,
            others: handed.others.iter().map(|other| other.address.clone()).collect(),
        }
    }
}

/// Gives each device to VFIO, one after the other.
pub(crate) fn bind(args: &BindArgs) -> Result<(), Failure> {
    each(&args.devices, args.json, |binder, bdf| binder.bind(bdf, args.force))
}

/// Gives each device back.
pub(crate) fn unbind(args: &UnbindArgs) -> Result<(), Failure> {
    each(&args.devices, args.json, Binder::unbind)
}

/// One device after the other. A signal ends it between two of them: none is left without a driver.
fn each(
    devices: &[Bdf],
    json: bool,
    hand: impl Fn(&Binder, Bdf) -> Result<Handed, BindError>,
) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let binder = Binder::new();
    devices.iter().try_for_each(|bdf| {
        if interrupt.asked() {
            return Err(PumpError::Interrupted.into());
        }
        print(&hand(&binder, *bdf)?, json)
    })
}

fn print(handed: &Handed, json: bool) -> Result<(), Failure> {
    if json {
        return output::json(&Report::from(handed));
    }
    output::text(&words(handed))
}

fn words(handed: &Handed) -> String {
    let name = |driver: &Option<String>| driver.clone().unwrap_or_else(|| "no driver".to_owned());
    let mut line = format!("{}: ", handed.bdf);
    // Writing to a `String` does not fail.
    let _ = if handed.from == handed.to {
        write!(line, "{} has it already", name(&handed.to))
    } else {
        write!(line, "{} -> {}", name(&handed.from), name(&handed.to))
    };
    let _ = match handed.group {
        Some(group) => writeln!(line, ", group {group}"),
        None => writeln!(line, ", in no IOMMU group"),
    };
    if handed.to.as_deref() == Some(VFIO) && !handed.others.is_empty() {
        let others: Vec<String> =
            handed.others.iter().map(|other| format!("{} ({})", other.address, other.driver)).collect();
        let _ = writeln!(
            line,
            "  the IOMMU can not tell it from {}: give these to VFIO too, or it can not be opened",
            others.join(", ")
        );
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::vfio::Neighbour;

    #[test]
    fn what_was_done_in_words() {
        let bdf = "0000:01:00.0".parse().unwrap();
        let mut handed = Handed {
            bdf,
            from: Some("nvme".into()),
            to: Some("vfio-pci".into()),
            group: Some(7),
            others: vec![],
        };
        assert_eq!(words(&handed), "0000:01:00.0: nvme -> vfio-pci, group 7\n");
        handed.from = handed.to.clone();
        handed.others = vec![Neighbour { address: "0000:01:00.1".into(), driver: "ahci".into() }];
        let text = words(&handed);
        assert!(text.starts_with("0000:01:00.0: vfio-pci has it already, group 7\n"), "{text}");
        assert!(text.contains("0000:01:00.1 (ahci)"), "{text}");
        handed.to = None;
        handed.group = None;
        assert!(words(&handed).starts_with("0000:01:00.0: vfio-pci -> no driver, in no IOMMU group\n"));
    }
}
