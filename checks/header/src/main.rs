//! Generates `crates/capi/include/pinfold.h`; with `--check` compares it with the existing file.

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
    // The section on safety is Rust's: the parameters' descriptions say the same in C's terms.
    let made = plain(&inside(&String::from_utf8_lossy(&made)));
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

/// Moves what follows the include guard (the `trailer` of cbindgen.toml: functions that are compiled
/// into programs) behind the other functions.
fn inside(header: &str) -> String {
    let moved = header.split_once("#endif  /* PINFOLD_H */").and_then(|(body, trailer)| {
        let end = body.rfind("#ifdef __cplusplus")?;
        let (functions, end) = body.split_at_checked(end)?;
        Some(format!("{functions}{}\n\n{end}#endif  /* PINFOLD_H */\n", trailer.trim()))
    });
    moved.unwrap_or_else(|| header.to_owned())
}

/// Leaves out the sections `# Safety` of comments, and the names without `struct` of types that do
/// not end in `_t`: functions may have these names.
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
            lines.push(untyped(line.trim_end()));
        }
    }
    let mut header = checked(&lines.join("\n"));
    header.push('\n');
    header
}

/// Marks the functions whose result says whether the program may go on: all that return a number or
/// an address, except those that end or free something, and reports.
fn checked(header: &str) -> String {
    const UNMARKED: [&str; 8] =
        ["_put(", "_put_bulk(", "_destroy(", "_free(", "_strerror_last(", "_trace_set(", "_stats", "_version("];
    let mut made = Vec::new();
    let mut marking = false;
    for line in header.lines() {
        let starts = line.starts_with("int ") || line.starts_with("void *") || line.starts_with("int64_t ");
        if starts && line.contains("pf_") && line.contains('(') {
            marking = !UNMARKED.iter().any(|name| line.contains(name));
        }
        match line.strip_suffix(");").filter(|_| marking) {
            Some(declaration) => {
                made.push(format!("{declaration}) PF_CHECKED;"));
                marking = false;
            }
            None => made.push(line.to_owned()),
        }
    }
    made.join("\n")
}

/// Returns the first or last line of a type's definition without its `typedef`, unless the name ends
/// in `_t`; any other line as it is.
fn untyped(line: &str) -> &str {
    if let Some(definition) = line.strip_prefix("typedef ")
        && let Some(name) = definition.strip_suffix(" {")
        && !name.ends_with("_t")
    {
        return definition;
    }
    match line.strip_prefix("} ").and_then(|rest| rest.strip_suffix(';')) {
        Some(name) if !name.ends_with("_t") => "};",
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_follows_the_guard_is_moved_into_it() {
        let header = "int pf(void);\n\n#ifdef __cplusplus\n}\n#endif\n\n#endif  /* PINFOLD_H */\n\n\nstatic int f(void);\n";
        let moved = "int pf(void);\n\nstatic int f(void);\n\n#ifdef __cplusplus\n}\n#endif\n\n#endif  /* PINFOLD_H */\n";
        assert_eq!(super::inside(header), moved);
    }

    #[test]
    fn only_types_that_end_in_t_have_a_name_without_struct() {
        let header = "typedef struct pf_event {\n} pf_event;\ntypedef struct pf_map_t {\n} pf_map_t;\n\
                      typedef void (*pf_trace_fn)(void);\n#endif\n";
        let plain = "struct pf_event {\n};\ntypedef struct pf_map_t {\n} pf_map_t;\n\
                     typedef void (*pf_trace_fn)(void);\n#endif\n";
        assert_eq!(super::plain(header), plain);
    }

    #[test]
    fn what_allocates_is_checked_and_what_frees_is_not() {
        let header = "int pf_get(int a);\nint pf_map(int a,\n           int b);\nint pf_put(int a);\nint pf_free(int a);\n\
                      void *pf_alloc(void);\nconst char *pf_strerror_last(void);\ntypedef int (*pf_fn)(void);\n";
        let made = "int pf_get(int a) PF_CHECKED;\nint pf_map(int a,\n           int b) PF_CHECKED;\nint pf_put(int a);\n\
                    int pf_free(int a);\nvoid *pf_alloc(void) PF_CHECKED;\nconst char *pf_strerror_last(void);\n\
                    typedef int (*pf_fn)(void);\n";
        assert_eq!(super::plain(header), made);
    }

    #[test]
    fn sections_on_safety_are_left_out_with_the_line_before_them() {
        let header = "/**\n * Does it.\n *\n * # Safety\n * It is.\n */\nint pf(void);\n";
        assert_eq!(super::plain(header), "/**\n * Does it.\n */\nint pf(void);\n");
    }
}
