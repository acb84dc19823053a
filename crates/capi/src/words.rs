//! Messages of the crates below, in the words of C: they name types and methods that a C program
//! does not have.

/// A message's words, and the words that replace them in C.
const WORDS: &[(&str, &str)] = &[
    ("set its size with size(bytes)", "set pf_arena_opts.size"),
    (
        "name at least one, or give the caller's own memory with caller(base, len)",
        "set pf_arena_opts.sources, or pass the program's own memory in pf_arena_opts.va",
    ),
    ("; build it larger", "; create a larger one"),
    ("free some, or build it larger", "free some, or create a larger one"),
    (
        "drop idle `PoolLocal`s, free blocks, or build the pool with a larger maximum",
        "destroy idle caches, put blocks back, or create the pool with a larger `maximum`",
    ),
    (
        "drop idle `PoolLocal`s, free blocks, or add another range",
        "destroy idle caches, put blocks back, or add memory with pf_pool_add",
    ),
    ("drop idle `PoolLocal`s, free some, or", "destroy idle caches, put blocks back, or"),
    ("or give the source more memory", "or use a larger arena"),
    (
        "is owned by a value, which frees it on drop: use its `into_raw` to free it by address",
        "is not the program's: it is the library's own",
    ),
    ("or raise `max_in_use`", "or create a pool of which more may be in use"),
    (
        "call map_into with this domain on their arena or OwnedMemory, or register_memory, or allocate \
         from an arena of this domain",
        "call pf_arena_map_into or pf_register for this domain, or allocate from an arena of it",
    ),
    ("build the arena with MappingPolicy::Whole", "create the arena with PF_POLICY_WHOLE"),
    ("MappingPolicy::Whole", "PF_POLICY_WHOLE"),
    (
        "other handles or pieces: unmap and drop them, then reclaim again",
        "mappings or requests: end them, then call pf_reg_destroy again",
    ),
    ("counted by quarantined_bytes()", "counted by pf_quarantine()"),
    (
        "only the unsafe `Options::without_iommu` allows it",
        "libpinfold does not allow it: enable the IOMMU",
    ),
    ("`Options::without_iommu`", "the option of the Rust library"),
    ("are in use: drop one", "are in use: destroy one"),
    (
        "enable all of them at once, or drop those first",
        "enable all of them at once, or disable those first by pf_device_irqs with 0",
    ),
    ("and say that it has stopped", "and call pf_requests_stopped"),
    ("Controller::namespaces() lists those", "pf_nvme_info() describes them"),
    ("raise `SoftConfig::table_bytes`", "map less at a time"),
    ("donate more, or reclaim what is retired", "map less at a time"),
];

/// Returns the message in the words of C.
pub(crate) fn in_c(message: String) -> String {
    WORDS.iter().fold(message, |message, (rust, c)| {
        if message.contains(rust) { message.replace(rust, c) } else { message }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files whose errors C programs see.
    const ERRORS: &[(&str, &str)] = &[
        ("dma_pool", include_str!("../../core/src/dma_pool/error.rs")),
        ("page_pool", include_str!("../../core/src/page_pool/error.rs")),
        ("domain", include_str!("../../core/src/domain/error.rs")),
        ("folio", include_str!("../../core/src/folio/error.rs")),
        ("iova", include_str!("../../core/src/iova/error.rs")),
        ("frame", include_str!("../../core/src/frame/number.rs")),
        ("arena", include_str!("../../pinfold/src/memory/arena/error.rs")),
        ("owned", include_str!("../../pinfold/src/memory/owned.rs")),
        ("backend", include_str!("../../pinfold/src/backend/error.rs")),
        ("nvme", include_str!("../../nvme/src/driver/error.rs")),
        ("device", include_str!("../../pinfold/src/vfio/device.rs")),
        ("token", include_str!("../../pinfold/src/requests/slots.rs")),
    ];
    /// Words of Rust.
    const RUST: &[&str] = &[
        "::",
        "drop ",
        "drop:",
        "PoolLocal",
        "build ",
        "build it",
        "reclaim",
        "unsafe",
        "()",
        "map_into",
    ];
    /// Messages that no C program sees: what they are of has no function in C.
    const UNSEEN: &[&str] =
        &["call reclaim::<{owner}>()", "copy through memory(), or build the arena"];

    /// Yields the messages of the file's errors, each on one line.
    fn messages(source: &str) -> Vec<String> {
        let joined = source.replace("\\\n", "\u{1}");
        let mut joined = joined.split('\u{1}').map(str::trim_start).collect::<Vec<_>>().join("");
        joined.truncate(joined.find("#[cfg(test)]").unwrap_or(joined.len()));
        let parts = joined.split("error(").skip(1);
        parts
            .filter_map(|rest| {
                rest.trim_start().strip_prefix('"')?.split('"').next().map(str::to_owned)
            })
            .collect()
    }

    #[test]
    fn messages_in_c_do_not_speak_rust() {
        let mut seen = 0;
        for (file, source) in ERRORS {
            for message in messages(source) {
                seen += 1;
                if UNSEEN.iter().any(|unseen| message.contains(unseen)) {
                    continue;
                }
                let told = in_c(message);
                let word = RUST.iter().find(|word| told.contains(**word) && !told.contains("pf_"));
                assert_eq!(word, None, "{file}: {told}");
            }
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn each_phrase_is_replaced() {
        assert_eq!(
            in_c("cannot allocate 5 bytes: the arena has 4; build it larger".to_owned()),
            "cannot allocate 5 bytes: the arena has 4; create a larger one"
        );
        for (rust, _) in WORDS {
            assert_ne!(in_c((*rust).to_owned()), *rust);
        }
    }
}
