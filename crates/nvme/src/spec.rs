//! What the NVM Express specifications lay down: registers, commands, completions, identify data, log pages.
//!
//! "Base" is the NVM Express Base Specification 2.0, "NVM" the NVM Command Set Specification 1.0. Layouts are
//! little-endian by type and asserted when compiled; nothing here reads or writes memory.

mod command;
mod completion;
mod identify;
mod log;
mod register;

pub use command::{Command, DsmRange, admin, create_cq, feature, nvm};
pub use completion::{Cqe, Status};
pub use identify::{
    ControllerData, LbaFormat, NamespaceData, NamespaceDescriptors, NamespaceList, PowerState, cns, csi,
};
pub use log::{SmartData, log_page};
pub use register::{Cap, Cc, Crto, Csts, Doorbell, doorbell_offset, offset};

/// The memory page that this driver and the model work with (CC.MPS = 0): 4096 bytes.
pub const PAGE_BYTES: usize = 4096;
/// A page's size as an address.
pub const PAGE: u64 = 4096;
/// How many PRP entries a list page holds.
pub const PRPS_PER_PAGE: usize = PAGE_BYTES / 8;

/// VS of version 1.1, which has the list of active namespaces (CNS 02h).
pub const VERSION_1_1: u32 = 0x1_0100;
/// VS of version 1.3, which has identification descriptors (CNS 03h).
pub const VERSION_1_3: u32 = 0x1_0300;
