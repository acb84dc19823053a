//! The server's side of the NBD protocol as a state machine without I/O.
//!
//! The program moves the bytes: it passes what it received to [`Handshake::advance`] and then to
//! [`RequestReader`], decides each request with [`Export::check`], and sends what [`reply`]
//! encodes. Payloads never pass through this crate, so they can be received straight into the
//! memory of a device. Every length that a client names is checked against a limit before anything
//! depends on it; hostile input ends with a typed error.
//!
//! ```
//! use pinfold_nbd::{Command, Export, Handshake, RequestHeader, RequestReader, Step};
//! use pinfold_nbd::{TransmissionFlags, reply};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let export = Export::new("disk", 1 << 20, TransmissionFlags::SEND_FLUSH);
//! let mut output = Vec::new(); // to be sent
//! let mut handshake = Handshake::new(&mut output);
//!
//! // The client's flags, and NBD_OPT_EXPORT_NAME "disk".
//! let mut input = &b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk"[..];
//! let session = loop {
//!     let (used, step) = handshake.advance(&export, input, &mut output)?;
//!     input = &input[used..];
//!     match step {
//!         Step::Continue => {} // an event loop returns here if `input` is empty
//!         Step::Transmission(session) => break session,
//!         Step::StartTls => unreachable!("only after `Handshake::requiring_tls`"),
//!         Step::Closed => return Ok(()),
//!     }
//! };
//!
//! let header = RequestHeader {
//!     command: Command::READ,
//!     cookie: 7,
//!     offset: 4096,
//!     length: 512,
//!     ..RequestHeader::default()
//! };
//! let mut reader = RequestReader::default();
//! let (_, header) = reader.read(&header.to_bytes())?;
//! let header = header.ok_or("an incomplete header")?;
//! let request = export.check(&session, &header).map_err(|error| format!("refused: {error:?}"))?;
//! assert_eq!((request.offset, request.length), (4096, 512));
//! let header = reply::simple(None, request.cookie); // followed by 512 bytes
//! # assert_eq!(header.len(), 16);
//! # Ok(()) }
//! ```
//!
//! Sections are those of the protocol's document, `doc/proto.md` of the NBD project: "the fixed
//! newstyle protocol", with structured replies and metadata contexts. Extended headers are refused.
//! TLS is the program's: [`Handshake::requiring_tls`] says when it begins, and refuses everything
//! else before.
//!
//! | module | contents |
//! | --- | --- |
//! | [`protocol`] | flags, error numbers and types of messages |
//! | [`Export`], [`Session`] | what is served; what a client has negotiated |
//! | [`Handshake`] | from the greeting to the end of option haggling |
//! | [`RequestHeader`], [`RequestReader`], [`Request`] | requests as received, and checked |
//! | [`reply`] | simple and structured replies, encoded, and parsed for clients |
#![forbid(unsafe_code)]

mod export;
mod handshake;
pub mod protocol;
pub mod reply;
mod request;

pub use export::{BlockSizes, Export, Session};
pub use handshake::{Handshake, HandshakeError, Step};
pub use protocol::{CommandFlags, ErrorNumber, TransmissionFlags};
pub use request::{Command, Operation, Request, RequestError, RequestHeader, RequestReader};
