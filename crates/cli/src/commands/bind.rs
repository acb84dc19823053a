//! `bind` and `unbind`: a device to vfio-pci, and to its previous driver again.

use crate::args::{BindArgs, UnbindArgs};
use crate::engine::error::EngineError;
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

/// Binds each device to vfio-pci, one after the other.
pub(crate) fn bind(args: &BindArgs) -> Result<(), Failure> {
    rebind(&args.devices, args.json, |binder, bdf| binder.bind(bdf, args.force))
}

/// Binds each device to its previous driver.
pub(crate) fn unbind(args: &UnbindArgs) -> Result<(), Failure> {
    rebind(&args.devices, args.json, Binder::unbind)
}

/// Rebinds the devices. A signal ends it between two of them, so that none is left without a
/// driver.
fn rebind(
    devices: &[Bdf],
    json: bool,
    rebind_one: impl Fn(&Binder, Bdf) -> Result<DriverChange, BindError>,
) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let binder = Binder::new();
    devices.iter().try_for_each(|bdf| {
        if interrupt.is_raised() {
            return Err(EngineError::Interrupted.into());
        }
        print(&rebind_one(&binder, *bdf)?, json)
    })
}

fn print(change: &DriverChange, json: bool) -> Result<(), Failure> {
    if json {
        return Ok(output::json(&Report::from(change))?);
    }
    Ok(output::text(&format!("{change}\n"))?)
}
