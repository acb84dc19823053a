//! Submission queue entries (Base 3.3.3.1, figure "Common Command Format"), opcodes and features.

use core::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A submission queue entry: 64 bytes.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Command {
    /// CDW0 bits 7:0: the opcode; see [`admin`] and [`nvm`].
    pub opcode: u8,
    /// CDW0 bits 15:8: FUSE (1:0) and PSDT (7:6); 0 means not fused, with PRPs;
    /// [`PSDT_SGL`](Self::PSDT_SGL) with an SGL.
    pub flags: u8,
    /// CDW0 bits 31:16: the command identifier.
    pub cid: U16,
    /// NSID: the namespace identifier.
    pub nsid: U32,
    /// CDW2.
    pub cdw2: U32,
    /// CDW3.
    pub cdw3: U32,
    /// MPTR: the metadata pointer; not used.
    pub metadata: U64,
    /// DPTR, PRP entry 1: the first page of the data, with an offset that is a multiple of 4. Of an
    /// SGL descriptor: the address.
    pub prp1: U64,
    /// DPTR, PRP entry 2: the second page, or a list of all further ones. Of an SGL descriptor:
    /// length and type.
    pub prp2: U64,
    /// CDW10.
    pub cdw10: U32,
    /// CDW11.
    pub cdw11: U32,
    /// CDW12.
    pub cdw12: U32,
    /// CDW13.
    pub cdw13: U32,
    /// CDW14.
    pub cdw14: U32,
    /// CDW15.
    pub cdw15: U32,
}

const _: () = {
    assert!(size_of::<Command>() == Command::BYTES);
    assert!(offset_of!(Command, cid) == 2);
    assert!(offset_of!(Command, nsid) == 4);
    assert!(offset_of!(Command, metadata) == 16);
    assert!(offset_of!(Command, prp1) == 24);
    assert!(offset_of!(Command, prp2) == 32);
    assert!(offset_of!(Command, cdw10) == 40);
    assert!(offset_of!(Command, cdw15) == 60);
};

impl Command {
    /// The size of an entry.
    pub const BYTES: usize = 64;
    /// PSDT 01b: DPTR is an SGL descriptor (Base 4.1.2).
    pub const PSDT_SGL: u8 = 1 << 6;

    /// Creates an identify command (Base 5.17). The sender sets the data pointer.
    pub fn identify(nsid: u32, cns: u8) -> Self {
        Self {
            opcode: admin::IDENTIFY,
            nsid: U32::new(nsid),
            cdw10: U32::new(cns.into()),
            ..Self::default()
        }
    }

    /// Returns DPTR as an SGL descriptor.
    pub fn sgl1(&self) -> SglDescriptor {
        zerocopy::transmute!([self.prp1, self.prp2])
    }

    /// Sets DPTR to an SGL descriptor, given as its two 64-bit words.
    pub fn set_sgl1(&mut self, words: [u64; 2]) {
        self.flags |= Self::PSDT_SGL;
        [self.prp1, self.prp2] = words.map(U64::new);
    }

    /// Returns SLBA of a read or write: CDW10 and CDW11 (NVM 3.2.4, 3.2.6).
    pub fn slba(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    /// Returns the blocks of a read or write: NLB, CDW12 bits 15:0, 0-based (NVM 3.2.4, 3.2.6).
    pub fn blocks(&self) -> u32 {
        (self.cdw12.get() & 0xffff) + 1
    }

    /// Sets SLBA.
    pub fn set_slba(&mut self, slba: u64) {
        let [a, b, c, d, e, f, g, h] = slba.to_le_bytes();
        self.cdw10 = U32::from_bytes([a, b, c, d]);
        self.cdw11 = U32::from_bytes([e, f, g, h]);
    }
}

/// Opcodes of the admin queue (Base 5, figure "Opcodes for Admin Commands").
pub mod admin {
    /// Delete I/O submission queue.
    pub const DELETE_SQ: u8 = 0x00;
    /// Create I/O submission queue.
    pub const CREATE_SQ: u8 = 0x01;
    /// Get log page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O completion queue.
    pub const DELETE_CQ: u8 = 0x04;
    /// Create I/O completion queue.
    pub const CREATE_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous event request.
    pub const ASYNC_EVENT: u8 = 0x0c;
    /// Namespace management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0d;
    /// Firmware commit.
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    /// Firmware image download.
    pub const FIRMWARE_DOWNLOAD: u8 = 0x11;
    /// Device self-test.
    pub const SELF_TEST: u8 = 0x14;
    /// Namespace attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Keep alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Directive send.
    pub const DIRECTIVE_SEND: u8 = 0x19;
    /// Directive receive.
    pub const DIRECTIVE_RECEIVE: u8 = 0x1a;
    /// Virtualization management.
    pub const VIRTUALIZATION: u8 = 0x1c;
    /// Doorbell buffer config.
    pub const DOORBELL_BUFFER: u8 = 0x7c;
    /// Format NVM.
    pub const FORMAT: u8 = 0x80;
    /// Security send.
    pub const SECURITY_SEND: u8 = 0x81;
    /// Security receive.
    pub const SECURITY_RECEIVE: u8 = 0x82;
    /// Sanitize.
    pub const SANITIZE: u8 = 0x84;
    /// Get LBA status.
    pub const LBA_STATUS: u8 = 0x86;
}

/// Opcodes of I/O queues (NVM 3, figure "Opcodes for NVM Commands").
pub mod nvm {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Write zeroes CDW12 bit 25: DEAC, the controller may deallocate the blocks, if they then read
    /// as zeroes (NVM 3.2.8).
    pub const ZERO_DEALLOCATE: u32 = 1 << 25;
    /// Dataset management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
    /// Cancel (Base 7.1).
    pub const CANCEL: u8 = 0x18;
    /// Dataset management CDW11 bit 2: AD, deallocate (NVM 3.2.3).
    pub const DEALLOCATE: u32 = 1 << 2;
}

/// Bits of CDW11 of "create I/O completion queue" (Base 5.4).
pub mod create_cq {
    /// PC: physically contiguous.
    pub const CONTIGUOUS: u32 = 1;
    /// IEN: interrupts enabled, with the vector in bits 31:16.
    pub const INTERRUPTS: u32 = 1 << 1;
}

/// Feature identifiers (Base 5.27.1).
pub mod feature {
    /// Number of queues.
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    /// Volatile write cache (Base 5.27.1.4); bit 0 of DW11 enables it.
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    /// Asynchronous event configuration.
    pub const ASYNC_EVENTS: u8 = 0x0b;
    /// Host memory buffer.
    pub const HOST_MEMORY_BUFFER: u8 = 0x0d;
    /// Keep alive timer.
    pub const KEEP_ALIVE_TIMER: u8 = 0x0f;
    /// I/O command set profile.
    pub const COMMAND_SET_PROFILE: u8 = 0x19;
    /// Host behavior support.
    pub const HOST_BEHAVIOR: u8 = 0x16;
    /// Host behavior support, byte 0 of the data: ACRE, the host waits as CRD says.
    pub const ADVANCED_RETRY: u8 = 1;
    /// Asynchronous event configuration CDW11 bits 7:0: all critical warnings of the health log
    /// page.
    pub const HEALTH_EVENTS: u32 = 0xff;
}

/// An SGL descriptor (Base 4.1.2, figure "SGL Descriptor Format").
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SglDescriptor {
    /// The address of the data block or segment.
    pub address: U64,
    /// Its length in bytes.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// The type in bits 7:4, the sub type in bits 3:0; 0 is an address.
    pub kind: u8,
}

const _: () = {
    assert!(size_of::<SglDescriptor>() == SglDescriptor::BYTES);
    assert!(offset_of!(SglDescriptor, kind) == 15);
};

impl SglDescriptor {
    /// The size of a descriptor.
    pub const BYTES: usize = 16;
    /// Type 0h: a data block.
    pub const DATA_BLOCK: u8 = 0x00;
    /// Type 2h: a segment of descriptors, followed by another segment.
    pub const SEGMENT: u8 = 0x20;
    /// Type 3h: the last segment of descriptors.
    pub const LAST_SEGMENT: u8 = 0x30;
}

/// A range of dataset management (NVM 3.2.3, figure "Range Definition").
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DsmRange {
    /// Context attributes, a hint.
    pub attributes: U32,
    /// The number of blocks.
    pub blocks: U32,
    /// The first block.
    pub slba: U64,
}

const _: () = {
    assert!(size_of::<DsmRange>() == 16);
    assert!(offset_of!(DsmRange, blocks) == 4);
    assert!(offset_of!(DsmRange, slba) == 8);
};
