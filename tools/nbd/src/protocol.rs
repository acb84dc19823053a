//! Magic numbers, flags and types of messages: the section "Values" of the protocol's document.
//!
//! ```
//! use pinfold_nbd::protocol::{ErrorNumber, TransmissionFlags};
//!
//! assert_eq!(ErrorNumber::NoSpace.get(), 28); // NBD_ENOSPC
//! assert_eq!(TransmissionFlags::CAN_MULTI_CONN.bits(), 1 << 8);
//! ```

use bitflags::bitflags;

/// `NBDMAGIC`, the start of the greeting.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the second part of the greeting and the start of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The start of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// `NBD_REQUEST_MAGIC`.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// `NBD_SIMPLE_REPLY_MAGIC`.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// `NBD_STRUCTURED_REPLY_MAGIC`.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The longest string: "String values".
pub const MAX_STRING: usize = 4096;
/// The metadata context that tells allocated ranges from holes.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The number of [`BASE_ALLOCATION`] in replies.
pub const BASE_ALLOCATION_ID: u32 = 1;

bitflags! {
    /// "Handshake flags" of the server, and the client's answers to them.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct HandshakeFlags: u32 {
        /// The fixed newstyle handshake.
        const FIXED_NEWSTYLE = 1 << 0;
        /// No 124 zeroes after the reply to `NBD_OPT_EXPORT_NAME`.
        const NO_ZEROES = 1 << 1;
    }
}

bitflags! {
    /// "Transmission flags": what an export supports.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TransmissionFlags: u16 {
        /// The other flags are valid; always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused.
        const READ_ONLY = 1 << 1;
        /// `NBD_CMD_FLUSH`.
        const SEND_FLUSH = 1 << 2;
        /// `NBD_CMD_FLAG_FUA`.
        const SEND_FUA = 1 << 3;
        /// `NBD_CMD_TRIM`.
        const SEND_TRIM = 1 << 5;
        /// `NBD_CMD_WRITE_ZEROES`.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// `NBD_CMD_FLAG_DF`; set for sessions with structured replies.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers the completed writes of all.
        const CAN_MULTI_CONN = 1 << 8;
    }
}

bitflags! {
    /// "Command flags" of a request.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct CommandFlags: u16 {
        /// The effect is durable before the reply.
        const FUA = 1 << 0;
        /// A zeroed range stays allocated.
        const NO_HOLE = 1 << 1;
        /// The reply to a read is not fragmented.
        const DF = 1 << 2;
        /// One extent is enough.
        const REQ_ONE = 1 << 3;
        /// Fail where zeroing is not faster than writing.
        const FAST_ZERO = 1 << 4;
        /// Bits without a meaning here are kept, so that they can be refused.
        const _ = !0;
    }
}

bitflags! {
    /// The state of an extent in `base:allocation`: "`base:` metadata context".
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ExtentFlags: u32 {
        /// Not allocated.
        const HOLE = 1 << 0;
        /// Reads as zeroes.
        const ZERO = 1 << 1;
    }
}

/// The options of a client: "Option types".
pub mod option {
    /// `NBD_OPT_EXPORT_NAME`: choose an export and end the handshake.
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`: end the connection.
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`: name all exports.
    pub const LIST: u32 = 3;
    /// `NBD_OPT_STARTTLS`: go on inside TLS.
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`: describe an export.
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`: describe an export and end the handshake.
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// The types of replies to options: "Option reply types".
pub mod option_reply {
    /// `NBD_REP_ACK`.
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`: an export's name.
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`.
    pub const INFO: u32 = 3;
    /// `NBD_REP_META_CONTEXT`.
    pub const META_CONTEXT: u32 = 4;
    /// `NBD_REP_ERR_UNSUP`: the option is unknown.
    pub const UNSUPPORTED: u32 = (1 << 31) + 1;
    /// `NBD_REP_ERR_INVALID`: the option is malformed.
    pub const INVALID: u32 = (1 << 31) + 3;
    /// `NBD_REP_ERR_TLS_REQD`: the option needs TLS.
    pub const TLS_REQUIRED: u32 = (1 << 31) + 5;
    /// `NBD_REP_ERR_UNKNOWN`: no such export.
    pub const UNKNOWN: u32 = (1 << 31) + 6;
    /// `NBD_REP_ERR_TOO_BIG`: the option is too long.
    pub const TOO_BIG: u32 = (1 << 31) + 9;
}

/// The kinds of information in `NBD_REP_INFO`: "Option reply types".
pub mod info {
    /// `NBD_INFO_EXPORT`: size and flags.
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`.
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`.
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Why a request failed: "Error values".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorNumber {
    /// `NBD_EPERM`: the export is read-only.
    NotPermitted,
    /// `NBD_EIO`.
    Io,
    /// `NBD_ENOMEM`.
    NoMemory,
    /// `NBD_EINVAL`.
    Invalid,
    /// `NBD_ENOSPC`: a write beyond the end.
    NoSpace,
    /// `NBD_ENOTSUP`.
    NotSupported,
    /// `NBD_ESHUTDOWN`.
    Shutdown,
}

impl ErrorNumber {
    /// Returns the number on the wire.
    pub fn get(self) -> u32 {
        match self {
            Self::NotPermitted => 1,
            Self::Io => 5,
            Self::NoMemory => 12,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::NotSupported => 95,
            Self::Shutdown => 108,
        }
    }

    /// Returns the error of a number on the wire; any unknown one is [`Invalid`](Self::Invalid), as
    /// "Error values" demands.
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::NotPermitted,
            5 => Self::Io,
            12 => Self::NoMemory,
            28 => Self::NoSpace,
            95 => Self::NotSupported,
            108 => Self::Shutdown,
            _ => Self::Invalid,
        })
    }
}
