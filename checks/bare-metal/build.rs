//! The program's link options: without the code that a process starts with, at fixed addresses.

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/link.ld");
    println!("cargo::rerun-if-changed={script}");
    for word in ["-nostartfiles", "-static", "-no-pie", "-Wl,-z,norelro", "-Wl,--build-id=none"] {
        println!("cargo::rustc-link-arg={word}");
    }
    println!("cargo::rustc-link-arg=-Wl,-T,{script}");
}
