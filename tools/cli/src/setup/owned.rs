//! Controllers behind a VT-d unit that the program takes from the kernel: the one thing that it does
//! unsafely, where the user has asked for it (`--i-own-this-machine`).
#![allow(unsafe_code)]

use pinfold::pci::Bdf;
use pinfold::vtd::Device;
use pinfold_nvme::vfio::PciError;
use pinfold_nvme::vtd::UnitController;

/// Takes the unit of a controller, and opens the controller. The user has the machine, and has said
/// so.
pub(super) fn open(bdf: Bdf) -> Result<UnitController, PciError> {
    // SAFETY: with the option the user has said that nothing else uses the machine, and that the
    // program is not killed while it runs.
    let device = unsafe { Device::open(&bdf.to_string()) }?;
    UnitController::from_device(device)
}
