//! Structures of the NVM Express specifications: registers, commands, completions, identify data,
//! log pages.
//!
//! "Base" is the NVM Express Base Specification 2.0, "NVM" the NVM Command Set Specification 1.0.
//! Layouts are little-endian by type and asserted at compile time; nothing here accesses memory.
//!
//! ```
//! use pinfold_nvme::spec::{Command, cns};
//! use zerocopy::IntoBytes;
//!
//! let command = Command::identify(1, cns::NAMESPACE);
//! assert_eq!(command.as_bytes()[0], 0x06); // the opcode of Identify
//! ```

mod command;
mod completion;
mod identify;
mod register;

pub use command::{Command, DsmRange, SglDescriptor, admin, create_cq, feature, nvm};
pub use completion::{Cqe, Status};
pub use identify::{
    ControllerData, LbaFormat, NamespaceData, NamespaceDescriptors, NamespaceList, PowerState,
    SglSupport, SmartData, cns, csi, log_page,
};
pub use register::{Cap, Cc, Crto, Csts, Doorbell, doorbell_offset, offset};

/// The memory page size that the driver uses (CC.MPS = 0).
pub const PAGE_BYTES: usize = 4096;
/// The same as a 64-bit number.
pub const PAGE: u64 = 4096;

/// VS of version 1.1, which has the list of active namespaces (CNS 02h).
pub const VERSION_1_1: u32 = 0x1_0100;
/// VS of version 1.3, which has identification descriptors (CNS 03h).
pub const VERSION_1_3: u32 = 0x1_0300;
