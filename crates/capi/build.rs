//! Link options of the shared library, for any build tool.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Its threads run its code to the end of the process, so `dlclose` leaves it where it is.
    println!("cargo:rustc-link-arg=-Wl,-z,nodelete");
}
