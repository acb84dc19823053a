//! The `pinfold` program. (Skeleton.)
fn main() {}
