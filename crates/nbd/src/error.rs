//! Why a connection cannot go on.

/// A client that broke the rules of the handshake: close the connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// "Client flags" that the server did not offer.
    #[error("the client sets unknown handshake flags: {found:#x}")]
    UnknownFlags {
        /// The flags.
        found: u32,
    },
    /// An option without its magic number.
    #[error("an option starts with {found:#x} instead of IHAVEOPT")]
    Magic {
        /// What was found.
        found: u64,
    },
    /// An option that is too long even to skip.
    #[error("option {option} has {length} bytes; at most {limit} are accepted")]
    TooLong {
        /// The option.
        option: u32,
        /// Its length.
        length: u32,
        /// The limit.
        limit: u32,
    },
    /// A client that only negotiates.
    #[error("more than {limit} options")]
    TooManyOptions {
        /// The limit.
        limit: u32,
    },
    /// `NBD_OPT_EXPORT_NAME` of an unknown export, which has no reply for errors.
    #[error("no export is called {name:?}")]
    NoSuchExport {
        /// The name, shortened.
        name: String,
    },
    /// An option other than `NBD_OPT_EXPORT_NAME` without the fixed newstyle handshake.
    #[error("option {option} without the fixed newstyle handshake")]
    NotFixed {
        /// The option.
        option: u32,
    },
    /// `NBD_OPT_EXPORT_NAME` without TLS where it is required: the option has no reply for errors.
    #[error("the client chooses an export without TLS, which is required")]
    TlsRequired,
    /// Input between `NBD_OPT_STARTTLS` and the end of the TLS handshake: anyone on the way may
    /// have added it.
    #[error("{bytes} bytes of plaintext follow NBD_OPT_STARTTLS")]
    Plaintext {
        /// How many bytes were passed.
        bytes: usize,
    },
}

/// A request that cannot be skipped: close the connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A request without its magic number: what follows cannot be told from requests.
    #[error("a request starts with {found:#x} instead of {:#x}", crate::protocol::REQUEST_MAGIC)]
    Magic {
        /// What was found.
        found: u32,
    },
    /// A payload that is too long even to discard.
    #[error("a request announces a payload of {length} bytes; at most {limit} are received")]
    TooLong {
        /// Its length.
        length: u32,
        /// The limit.
        limit: u32,
    },
}
