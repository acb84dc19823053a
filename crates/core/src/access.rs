//! The access that a device has to memory, as a value and as a type.
//!
//! ```
//! use pinfold_core::access::{Access, Bidirectional, Direction, FromDevice};
//!
//! assert_eq!(FromDevice::ACCESS, Access::WRITE);
//! assert!(Bidirectional::ACCESS.contains(Access::READ));
//! ```

bitflags::bitflags! {
    /// The access that a device has to memory.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Access: u8 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 2;
    }
}

/// The direction of a transfer, as a type.
pub trait Direction: sealed::Sealed + Copy + Send + 'static {
    /// The access that the device needs.
    const ACCESS: Access;
}
/// A direction in which the device reads.
#[diagnostic::on_unimplemented(
    message = "the device may not read what is mapped `{Self}`",
    label = "here the device reads",
    note = "map the memory `ToDevice` or `Bidirectional`"
)]
pub trait DeviceReads: Direction {}
/// A direction in which the device writes.
#[diagnostic::on_unimplemented(
    message = "the device may not write what is mapped `{Self}`",
    label = "here the device writes",
    note = "map the memory `FromDevice` or `Bidirectional`"
)]
pub trait DeviceWrites: Direction {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! direction {
    ($(#[$doc:meta] $name:ident $access:expr, [$($marker:ident),*];)*) => {$(
        #[$doc]
        #[derive(Clone, Copy, Debug)]
        pub struct $name;
        impl sealed::Sealed for $name {}
        impl Direction for $name {
            const ACCESS: Access = $access;
        }
        $(impl $marker for $name {})*
    )*};
}
direction! {
    /// The device reads.
    ToDevice Access::READ, [DeviceReads];
    /// The device writes.
    FromDevice Access::WRITE, [DeviceWrites];
    /// The device reads and writes.
    Bidirectional Access::READ.union(Access::WRITE), [DeviceReads, DeviceWrites];
}
