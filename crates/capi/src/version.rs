//! The version, of the header and of the library.

use std::ffi::c_uint;

/// The version of this header: major << 16 | minor << 8 | patch. pf_version() has the library's.
pub const PF_VERSION: u32 = 0x000200;

/// Returns the version of the library: as PF_VERSION of the header that belongs to it. Structs and
/// functions that the header has and an older library lacks are refused (E2BIG), or not linked.
///
/// Thread: any; also in a child. Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_version() -> c_uint {
    PF_VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_package_s() {
        let [major, minor, patch] = [16, 8, 0].map(|shift| pf_version() >> shift & 0xff);
        assert_eq!(format!("{major}.{minor}.{patch}"), env!("CARGO_PKG_VERSION"));
    }
}
