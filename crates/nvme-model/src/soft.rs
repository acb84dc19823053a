//! The port of a software IOMMU as the model's bus.

use crate::bus::{Bus, BusAccess, BusFault};
use pinfold::soft::Port;
use pinfold_core::addr::Iova;

impl Bus for Port {
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
        let len = to.len();
        Port::read(self, iova, to).map_err(|fault| BusFault {
            iova: fault.iova,
            len,
            kind: BusAccess::Read,
        })
    }

    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault> {
        let len = from.len();
        Port::write(self, iova, from).map_err(|fault| BusFault {
            iova: fault.iova,
            len,
            kind: BusAccess::Write,
        })
    }

    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault> {
        // The port writes in native order.
        Port::write_u32_release(self, iova, value.to_le()).map_err(|fault| BusFault {
            iova: fault.iova,
            len: 4,
            kind: BusAccess::Write,
        })
    }
}
