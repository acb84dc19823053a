//! The texts with which the compiler refuses programs that use memory wrongly. Each program differs
//! in its body from one that compiles, and only the texts that Pinfold gives are looked for.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, where a failure may panic"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A function `body` with a domain, an arena, a queue, and a driver's function of one's own.
fn program(body: &str) -> String {
    format!(
        "#![crate_type = \"lib\"]
        use pinfold::{{Arena, Bidirectional, Domain, FromDevice, ToDevice, dma_pool::ChunkSource}};
        use pinfold_nvme::{{Registers, driver::Queue}};
        pub fn f<R: Registers, S: ChunkSource + Clone>(
            domain: &Domain, arena: &Arena, queue: &mut Queue<R, S>,
        ) {{
            let buffer = arena.alloc(4096).unwrap();
            {body}
        }}"
    )
}

/// Programs that compile.
const RIGHT: [&str; 3] = [
    "queue.write(1, 0, 8, domain.map(buffer, ToDevice).unwrap()).ok();",
    "queue.read(1, 0, 8, domain.map(buffer, FromDevice).unwrap()).ok();",
    "queue.read(1, 0, 8, domain.map(buffer, Bidirectional).unwrap()).ok();",
];

const NOT_PINNED: [&str; 3] = [
    "cannot be mapped: it is not pinned memory that the value owns",
    "a device would reach memory that may move, or be freed while it is mapped",
    "allocate a buffer of an arena (`arena.alloc(len)`), or hand memory that the program has to an `OwnedMemory`",
];
const NOT_MAPPED: [&str; 3] = [
    "is not mapped for the device",
    "a transfer takes a mapping",
    "`domain.map(buffer, ToDevice)` for what the device reads (a write to the device)",
];
const NOT_READ: [&str; 3] = [
    "the device may not read what is mapped `FromDevice`",
    "here the device reads",
    "map the memory `ToDevice` or `Bidirectional`",
];
const NOT_WRITTEN: [&str; 3] = [
    "the device may not write what is mapped `ToDevice`",
    "here the device writes",
    "map the memory `FromDevice` or `Bidirectional`",
];

/// Programs that do not, with the message, the label and the note of each.
const WRONG: [(&str, [&str; 3]); 8] = [
    ("domain.map(vec![0u8; 4096], ToDevice).ok();", NOT_PINNED),
    ("domain.map([0u8; 4096], ToDevice).ok();", NOT_PINNED),
    ("domain.local().map(vec![0u8; 4096], ToDevice).ok();", NOT_PINNED),
    ("queue.write(1, 0, 8, buffer).ok();", NOT_MAPPED),
    ("queue.read(1, 0, 8, buffer).ok();", NOT_MAPPED),
    ("queue.read(1, 0, 8, vec![0u8; 4096]).ok();", NOT_MAPPED),
    ("queue.write(1, 0, 8, domain.map(buffer, FromDevice).unwrap()).ok();", NOT_READ),
    ("queue.read(1, 0, 8, domain.map(buffer, ToDevice).unwrap()).ok();", NOT_WRITTEN),
];

/// The compiler, with the libraries that this test was built with.
struct Compiler {
    deps: PathBuf,
    crates: [PathBuf; 2],
}

impl Compiler {
    /// The newest libraries with which a right program compiles: others are left from builds of
    /// other versions or features.
    fn new() -> Self {
        let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let (nvme, pinfold) = (newest(&deps, "libpinfold_nvme-"), newest(&deps, "libpinfold-"));
        let mut said = String::new();
        for crates in nvme.iter().flat_map(|n| pinfold.iter().map(|p| [n.clone(), p.clone()])) {
            let compiler = Self { deps: deps.clone(), crates };
            match compiler.errors_of(RIGHT[0]) {
                None => return compiler,
                Some(errors) => said = errors,
            }
        }
        panic!("{nvme:?} and {pinfold:?}: no two of them belong together: {said}");
    }

    /// The errors of a program, all on one line each; none if it compiles.
    fn errors_of(&self, body: &str) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("program.rs");
        std::fs::write(&file, program(body)).unwrap();
        let mut rustc = Command::new("rustc");
        // Below a folder with the name of the target where that is not the compiler's own.
        let target = self.deps.ancestors().nth(2).unwrap().file_name().unwrap().to_str().unwrap();
        if target.starts_with(std::env::consts::ARCH) {
            rustc.args(["--target", target]);
        }
        let [nvme, pinfold] = &self.crates;
        let output = rustc
            .args(["--edition=2024", "--emit=metadata", "--error-format=json", "--cap-lints=allow"])
            .arg("--out-dir")
            .arg(dir.path())
            .arg(format!("-Ldependency={}", self.deps.display()))
            .arg(format!("--extern=pinfold_nvme={}", nvme.display()))
            .arg(format!("--extern=pinfold={}", pinfold.display()))
            .arg(file)
            .output()
            .unwrap();
        (!output.status.success()).then(|| String::from_utf8(output.stderr).unwrap())
    }
}

/// The libraries in `deps` whose names begin with `prefix`, the newest first.
fn newest(deps: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(deps)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(prefix) && name.ends_with(".rlib")
        })
        .collect();
    found.sort_by_key(|path| std::cmp::Reverse(path.metadata().unwrap().modified().unwrap()));
    found
}

#[test]
fn the_compiler_says_how_to_mend_a_wrong_use_of_memory() {
    let compiler = Compiler::new();
    for body in &RIGHT[1..] {
        assert_eq!(compiler.errors_of(body), None, "{body}");
    }
    for (body, texts) in WRONG {
        let errors = compiler.errors_of(body).unwrap_or_else(|| panic!("{body}: it compiles"));
        for text in texts {
            assert!(errors.contains(text), "{body}: {text:?} is not in\n{errors}");
        }
    }
}
