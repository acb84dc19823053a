//! The source files of a crate as tokens, and the modules they form. Comments, literals and test
//! modules are left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file of a crate.
pub struct File {
    pub path: PathBuf,
    pub tokens: Vec<String>,
}

/// Whether the file holds tests or models of a checker only.
fn is_test(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let named = ["tests", "stress", "loom_model", "loom_models", "fake"].contains(&name.as_str());
    named
        || path
            .components()
            .any(|part| ["tests", "loom_models"].iter().any(|name| part.as_os_str() == *name))
}

/// Reads all files below `src`, by module path (`["vfio", "bar"]`).
pub fn read(src: &Path) -> BTreeMap<Vec<String>, File> {
    let (mut files, mut folders) = (BTreeMap::new(), vec![src.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs")
                || is_test(path.strip_prefix(src).unwrap_or(&path))
            {
                continue;
            }
            let inside = path.strip_prefix(src).unwrap_or(&path).with_extension("");
            let mut module: Vec<_> = inside
                .components()
                .map(|part| part.as_os_str().to_string_lossy().into_owned())
                .collect();
            if module.len() == 1 && ["lib", "main"].contains(&module[0].as_str()) {
                module.clear();
            }
            let tokens = without_tests(tokens(&std::fs::read_to_string(&path).unwrap_or_default()));
            files.insert(module, File { path, tokens });
        }
    }
    files
}

/// Splits Rust into identifiers, `::`, and single characters.
fn tokens(text: &str) -> Vec<String> {
    let (text, mut all, mut at) = (text.as_bytes(), Vec::<String>::new(), 0);
    let find = |from: usize, what: &[u8]| {
        let rest = text.get(from..).unwrap_or_default();
        rest.windows(what.len())
            .position(|part| part == what)
            .map_or(text.len(), |n| from + n + what.len())
    };
    while at < text.len() {
        let rest = &text[at..];
        let word = rest.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
        let raw = rest.strip_prefix(b"r").or(rest.strip_prefix(b"br"));
        let hashes = raw.map_or(0, |raw| raw.iter().take_while(|b| **b == b'#').count());
        if raw.is_some_and(|raw| raw.get(hashes) == Some(&b'"')) {
            let end = format!("\"{}", "#".repeat(hashes));
            at = find(find(at, b"\""), end.as_bytes());
        } else if rest.starts_with(b"//") {
            at = find(at, b"\n");
        } else if rest.starts_with(b"/*") {
            at = find(at, b"*/");
        } else if rest[0] == b'"' {
            at += 1;
            while at < text.len() && text[at] != b'"' {
                at += if text[at] == b'\\' { 2 } else { 1 };
            }
            at += 1;
        } else if rest[0] == b'\'' && rest.get(1) == Some(&b'\\') {
            at = find(at + 3, b"'");
        } else if rest[0] == b'\'' && rest.get(2) == Some(&b'\'') {
            at += 3;
        } else if word > 0 {
            all.push(String::from_utf8_lossy(&rest[..word]).into_owned());
            at += word;
        } else if rest.starts_with(b"::") {
            all.push("::".into());
            at += 2;
        } else {
            if !rest[0].is_ascii_whitespace() {
                all.push((rest[0] as char).to_string());
            }
            at += 1;
        }
    }
    all
}

/// Removes `#[cfg(test)] ITEM` and its variants (`all(test, ...)`, `any(test, ...)`).
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let attribute: String =
            tokens.iter().skip(at).take(12).take_while(|t| *t != "]").cloned().collect();
        let test = ["#[cfg(test)", "#[cfg(all(test", "#[cfg(all(loom,test", "#[cfg(any(test"];
        if !test.iter().any(|start| attribute.starts_with(start)) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        // To the end of the item: its `;`, or its outermost `}`.
        let mut depth = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token.as_str() {
                "{" => depth += 1,
                "}" if depth == 1 => break,
                "}" => depth -= 1,
                ";" | "," if depth == 0 => break,
                _ => {}
            }
        }
    }
    kept
}
