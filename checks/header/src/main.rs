//! Makes `crates/capi/include/pinfold.h`; with `--check` compares it with what is there.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let library = root.join("crates/capi");
    let header = library.join("include/pinfold.h");
    let config = match cbindgen::Config::from_file(library.join("cbindgen.toml")) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("header: crates/capi/cbindgen.toml: {error}");
            return ExitCode::from(2);
        }
    };
    let mut made = Vec::new();
    match cbindgen::Builder::new().with_config(config).with_crate(&library).generate() {
        Ok(bindings) => bindings.write(&mut made),
        Err(error) => {
            eprintln!("header: {error}");
            return ExitCode::from(2);
        }
    }
    // Nothing of Rust is left in the comments: intra-doc links, and the section on safety, which
    // the parameters' descriptions say in C's terms.
    let made = plain(&String::from_utf8_lossy(&made));
    if std::env::args().any(|word| word == "--check") {
        let there = std::fs::read_to_string(&header).unwrap_or_default();
        if there == made {
            return ExitCode::SUCCESS;
        }
        eprintln!("header: crates/capi/include/pinfold.h is not what the library makes: run scripts/header");
        return ExitCode::FAILURE;
    }
    match std::fs::write(&header, made) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("header: {}: {error}", header.display());
            ExitCode::from(2)
        }
    }
}

/// Leaves out the sections `# Safety` of comments.
fn plain(header: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    let mut skipping = false;
    for line in header.lines() {
        let text = line.trim_start().trim_start_matches('*').trim();
        if text == "# Safety" {
            skipping = true;
            // With the empty line before it.
            while lines.last().is_some_and(|last| last.trim() == "*") {
                lines.pop();
            }
        } else if line.trim_end().ends_with("*/") {
            skipping = false;
        }
        if !skipping {
            lines.push(line.trim_end());
        }
    }
    let mut header = lines.join("\n");
    header.push('\n');
    header
}

#[cfg(test)]
mod tests {
    #[test]
    fn sections_on_safety_are_left_out_with_the_line_before_them() {
        let header = "/**\n * Does it.\n *\n * # Safety\n * It is.\n */\nint pf(void);\n";
        assert_eq!(super::plain(header), "/**\n * Does it.\n */\nint pf(void);\n");
    }
}
