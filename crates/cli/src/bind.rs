//! `bind` and `unbind`: a device to VFIO, and back to the driver that it had.

use crate::args::{BindArgs, UnbindArgs};
use crate::copy::error::PumpError;
use crate::failure::Failure;
use crate::output;
use crate::signal::Interrupt;
use pinfold::pci::{Bdf, BindError, Binder, DriverChange};
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    device: String,
    from: Option<String>,
    to: Option<String>,
    group: Option<u32>,
    others: Vec<String>,
}

impl From<&DriverChange> for Report {
    fn from(change: &DriverChange) -> Self {
        Self {
            device: change.bdf.to_string(),
            from: change.from.clone(),
            to: change.to.clone(),
            group: change.group,
            others: change.others.iter().map(|other| other.address.clone()).collect(),
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
    hand: impl Fn(&Binder, Bdf) -> Result<DriverChange, BindError>,
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

fn print(change: &DriverChange, json: bool) -> Result<(), Failure> {
    if json {
        return output::json(&Report::from(change));
    }
    output::text(&format!("{change}\n"))
}
