//! The negotiation of options, from the greeting on: "Fixed newstyle negotiation".

use crate::export::{Export, Session};
use crate::protocol::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, GREETING_MAGIC, HandshakeFlags, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, TransmissionFlags, info, option, option_reply,
};

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
        /// The value found.
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
        /// The number of bytes passed.
        bytes: usize,
    },
}

/// The longest option that is looked at: a name and two hundred context queries.
const MAX_OPTION: u32 = 16 << 10;
/// The longest option that is skipped and refused; the connection ends at any longer one.
const MAX_SKIPPED: u32 = 1 << 20;
/// The most options of one client.
const MAX_OPTIONS: u32 = 256;

/// The next step after a call of [`Handshake::advance`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// More input is needed, or all of it was not used yet.
    Continue,
    /// The handshake is complete; what follows are requests.
    Transmission(Session),
    /// Send the output, begin TLS, then call [`Handshake::secured`]. Input that was received before
    /// is plaintext and must not be used: pass it to [`Handshake::advance`] first, which refuses
    /// it. Only after [`Handshake::requiring_tls`].
    StartTls,
    /// The client ends the connection: send the output, then close.
    Closed,
}

enum State {
    ClientFlags,
    Header,
    Payload {
        option: u32,
    },
    Skip {
        option: u32,
        left: u32,
    },
    /// Between the reply to STARTTLS and the beginning of TLS, when no input is valid.
    Securing,
}

/// The TLS policy of a server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tls {
    /// "NOTLS".
    Unsupported,
    /// "FORCEDTLS", before TLS.
    Required,
    /// "FORCEDTLS", inside TLS.
    Established,
}

/// The handshake of one connection. It holds at most 16 KiB of input.
pub struct Handshake {
    state: State,
    /// The bytes of the current item, up to `needed`.
    item: Vec<u8>,
    needed: usize,
    flags: HandshakeFlags,
    session: Session,
    options: u32,
    tls: Tls,
}

impl Handshake {
    /// Starts a handshake without TLS by appending the greeting to `output`.
    pub fn new(output: &mut Vec<u8>) -> Self {
        output.extend(GREETING_MAGIC.to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        let flags = HandshakeFlags::all().bits();
        output.extend(u16::try_from(flags).unwrap_or_default().to_be_bytes());
        Self {
            state: State::ClientFlags,
            item: Vec::new(),
            needed: 4,
            flags: HandshakeFlags::empty(),
            session: Session::default(),
            options: 0,
            tls: Tls::Unsupported,
        }
    }

    /// Starts a handshake that refuses all options but `NBD_OPT_STARTTLS` and `NBD_OPT_ABORT` until
    /// TLS is established ("FORCEDTLS"), by appending the greeting to `output`.
    pub fn requiring_tls(output: &mut Vec<u8>) -> Self {
        Self { tls: Tls::Required, ..Self::new(output) }
    }

    /// Goes on inside TLS, which begins after [`Step::StartTls`]: all input from now on must come
    /// out of TLS. Without such a step it changes nothing.
    pub fn secured(&mut self) {
        if matches!(self.state, State::Securing) {
            self.tls = Tls::Established;
            self.expect(State::Header, 16);
        }
    }

    /// Processes input up to the end of one item at most, appends the reply to `output`, and
    /// returns how many bytes it has used. Call it again with the rest, after sending the output; a
    /// call appends at most 20 KiB. O(bytes).
    ///
    /// # Errors
    /// [`HandshakeError`]; close the connection.
    pub fn advance(
        &mut self,
        export: &Export,
        input: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), HandshakeError> {
        if matches!(self.state, State::Securing) && !input.is_empty() {
            return Err(HandshakeError::Plaintext { bytes: input.len() });
        }
        if let State::Skip { option, left } = &mut self.state {
            let used = (*left as usize).min(input.len());
            *left -= u32::try_from(used).unwrap_or(*left);
            if *left == 0 {
                let option = *option;
                match self.tls {
                    Tls::Required if option != option::STARTTLS => tls_required(output, option),
                    _ => reply(output, option, option_reply::TOO_BIG, b"the option is too long"),
                }
                self.expect(State::Header, 16);
            }
            return Ok((used, Step::Continue));
        }
        let used = self.needed.saturating_sub(self.item.len()).min(input.len());
        self.item.extend(input.iter().take(used));
        if self.item.len() < self.needed {
            return Ok((used, Step::Continue));
        }
        let item = std::mem::take(&mut self.item);
        let step = match self.state {
            State::ClientFlags => self.client_flags(&item)?,
            State::Header => self.header(&item, export, output)?,
            State::Payload { option } => self.option(option, &item, export, output)?,
            State::Skip { .. } | State::Securing => Step::Continue,
        };
        Ok((used, step))
    }

    fn expect(&mut self, state: State, needed: usize) {
        (self.state, self.needed) = (state, needed);
    }

    /// "Client flags".
    fn client_flags(&mut self, item: &[u8]) -> Result<Step, HandshakeError> {
        let found = Fields::new(item).u32().unwrap_or_default();
        self.flags =
            HandshakeFlags::from_bits(found).ok_or(HandshakeError::UnknownFlags { found })?;
        self.expect(State::Header, 16);
        Ok(Step::Continue)
    }

    fn header(
        &mut self,
        item: &[u8],
        export: &Export,
        output: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        let mut fields = Fields::new(item);
        let mut header = || Some((fields.u64()?, fields.u32()?, fields.u32()?));
        let (found, option, length) = header().unwrap_or_default();
        if found != OPTION_MAGIC {
            return Err(HandshakeError::Magic { found });
        }
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(HandshakeError::TooManyOptions { limit: MAX_OPTIONS });
        }
        if !self.flags.contains(HandshakeFlags::FIXED_NEWSTYLE) && option != option::EXPORT_NAME {
            return Err(HandshakeError::NotFixed { option });
        }
        match length {
            0 => return self.option(option, &[], export, output),
            1..=MAX_OPTION => self.expect(State::Payload { option }, length as usize),
            // The option that has no reply for errors is not skipped.
            ..=MAX_SKIPPED if option != option::EXPORT_NAME => {
                self.state = State::Skip { option, left: length }
            }
            _ => return Err(HandshakeError::TooLong { option, length, limit: MAX_SKIPPED }),
        }
        Ok(Step::Continue)
    }

    fn option(
        &mut self,
        option: u32,
        payload: &[u8],
        export: &Export,
        output: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        self.expect(State::Header, 16);
        let ack = |output: &mut Vec<u8>| reply(output, option, option_reply::ACK, &[]);
        let malformed = |output: &mut Vec<u8>| {
            reply(output, option, option_reply::INVALID, b"malformed option")
        };
        match option {
            option::ABORT => {
                ack(output);
                return Ok(Step::Closed);
            }
            option::STARTTLS if self.tls != Tls::Unsupported => {
                if self.tls == Tls::Established || !payload.is_empty() {
                    malformed(output);
                    return Ok(Step::Continue);
                }
                ack(output);
                // Nothing that was agreed on in plaintext holds inside TLS.
                self.session = Session::default();
                self.expect(State::Securing, 0);
                return Ok(Step::StartTls);
            }
            option::EXPORT_NAME if self.tls == Tls::Required => {
                return Err(HandshakeError::TlsRequired);
            }
            _ if self.tls == Tls::Required => tls_required(output, option),
            option::EXPORT_NAME => return self.export_name(payload, export, output),
            option::LIST if payload.is_empty() => {
                let name = export.name.as_bytes();
                let length = u32::try_from(name.len()).unwrap_or(0).to_be_bytes();
                let parts = [&length, name, export.description.as_bytes()].concat();
                reply(output, option, option_reply::SERVER, &parts);
                ack(output);
            }
            option::STRUCTURED_REPLY if payload.is_empty() => {
                self.session.structured = true;
                ack(output);
            }
            option::INFO | option::GO => match InfoRequest::parse(payload) {
                Some(wanted) if !export.is_called(wanted.name) => unknown(output, option),
                Some(wanted) => {
                    reply_info(output, option, export, self.transmission_flags(export), wanted);
                    ack(output);
                    if option == option::GO {
                        return Ok(Step::Transmission(self.session));
                    }
                }
                None => malformed(output),
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(option, payload, export, output);
            }
            option::LIST | option::STRUCTURED_REPLY => malformed(output),
            // STARTTLS among them: without TLS it is answered like an unknown option.
            _ => reply(output, option, option_reply::UNSUPPORTED, b"unsupported option"),
        }
        Ok(Step::Continue)
    }

    /// "`NBD_OPT_EXPORT_NAME`".
    fn export_name(
        &self,
        name: &[u8],
        export: &Export,
        output: &mut Vec<u8>,
    ) -> Result<Step, HandshakeError> {
        if !export.is_called(name) {
            let name = String::from_utf8_lossy(name.get(..64).unwrap_or(name)).into_owned();
            return Err(HandshakeError::NoSuchExport { name });
        }
        output.extend(export.size.to_be_bytes());
        output.extend(self.transmission_flags(export).to_be_bytes());
        if !self.flags.contains(HandshakeFlags::NO_ZEROES) {
            output.extend([0; 124]);
        }
        Ok(Step::Transmission(self.session))
    }

    /// "`NBD_OPT_LIST_META_CONTEXT`", "`NBD_OPT_SET_META_CONTEXT`".
    fn contexts(&mut self, option: u32, payload: &[u8], export: &Export, output: &mut Vec<u8>) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            // A failure deselects everything, too.
            self.session.base_allocation = false;
        }
        let Some(request) =
            ContextRequest::parse(payload, !sets).filter(|_| self.session.structured)
        else {
            return reply(
                output,
                option,
                option_reply::INVALID,
                b"malformed, or without structured replies",
            );
        };
        if !export.is_called(request.name) {
            return unknown(output, option);
        }
        // A list without a query lists everything; a selection without one selects nothing.
        if request.matches || (!sets && request.queries == 0) {
            self.session.base_allocation |= sets;
            let id = if sets { BASE_ALLOCATION_ID } else { 0 };
            let payload = [&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()].concat();
            reply(output, option, option_reply::META_CONTEXT, &payload);
        }
        reply(output, option, option_reply::ACK, &[]);
    }

    fn transmission_flags(&self, export: &Export) -> u16 {
        let df = if self.session.structured {
            TransmissionFlags::SEND_DF
        } else {
            TransmissionFlags::empty()
        };
        ((export.flags - TransmissionFlags::SEND_DF) | df).bits()
    }
}

impl Export {
    /// Returns whether a client means this export.
    fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

fn tls_required(output: &mut Vec<u8>, option: u32) {
    reply(output, option, option_reply::TLS_REQUIRED, b"TLS is required");
}

fn unknown(output: &mut Vec<u8>, option: u32) {
    reply(output, option, option_reply::UNKNOWN, b"no such export");
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshake").field("session", &self.session).finish_non_exhaustive()
    }
}

// The payloads of options, and the encoding of their replies: "Option haggling".

/// Bytes that are parsed from the front. A read beyond the end yields `None`.
pub(crate) struct Fields<'b>(&'b [u8]);

impl<'b> Fields<'b> {
    pub(crate) fn new(bytes: &'b [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*first))
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*first))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_be_bytes(*first))
    }

    /// Returns a length and as many bytes.
    pub(crate) fn string(&mut self) -> Option<&'b [u8]> {
        let len = usize::try_from(self.u32()?).ok()?;
        let (first, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(first)
    }

    /// `Some` at the end.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// The payload of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct InfoRequest<'b> {
    pub(crate) name: &'b [u8],
    pub(crate) wants_name: bool,
    pub(crate) wants_description: bool,
}

impl<'b> InfoRequest<'b> {
    pub(crate) fn parse(bytes: &'b [u8]) -> Option<Self> {
        let mut fields = Fields::new(bytes);
        let mut request = Self { name: fields.string()?, ..Self::default() };
        for _ in 0..fields.u16()? {
            match fields.u16()? {
                info::NAME => request.wants_name = true,
                info::DESCRIPTION => request.wants_description = true,
                // The others are sent anyway, or unknown, which is to be ignored.
                _ => {}
            }
        }
        fields.end()?;
        Some(request)
    }
}

/// The payload of `NBD_OPT_SET_META_CONTEXT` and `NBD_OPT_LIST_META_CONTEXT`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ContextRequest<'b> {
    pub(crate) name: &'b [u8],
    /// Whether one of the queries selects `base:allocation`.
    pub(crate) matches: bool,
    pub(crate) queries: u32,
}

impl<'b> ContextRequest<'b> {
    /// Parses a list, in which `base:` names all contexts of the namespace if `lists` is set.
    pub(crate) fn parse(bytes: &'b [u8], lists: bool) -> Option<Self> {
        let mut fields = Fields::new(bytes);
        let name = fields.string()?;
        let queries = fields.u32()?;
        let mut matches = false;
        // Each query takes 4 bytes at least, so the loop is bounded by the payload.
        for _ in 0..queries {
            let query = fields.string()?;
            matches |= query == crate::protocol::BASE_ALLOCATION.as_bytes()
                || (lists && query == b"base:");
        }
        fields.end()?;
        Some(Self { name, matches, queries })
    }
}

/// Appends a reply to an option.
pub(crate) fn reply(output: &mut Vec<u8>, option: u32, kind: u32, payload: &[u8]) {
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(kind.to_be_bytes());
    // All payloads are built from strings of at most 4096 bytes.
    output.extend(u32::try_from(payload.len()).unwrap_or(0).to_be_bytes());
    output.extend(payload);
}

/// Appends the replies that describe an export.
pub(crate) fn reply_info(
    output: &mut Vec<u8>,
    option: u32,
    export: &Export,
    flags: u16,
    wanted: InfoRequest<'_>,
) {
    let mut send = |kind: u16, parts: &[&[u8]]| {
        let payload: Vec<u8> = kind.to_be_bytes().into_iter().chain(parts.concat()).collect();
        reply(output, option, option_reply::INFO, &payload);
    };
    send(info::EXPORT, &[&export.size.to_be_bytes(), &flags.to_be_bytes()]);
    if wanted.wants_name {
        send(info::NAME, &[export.name.as_bytes()]);
    }
    if wanted.wants_description && !export.description.is_empty() {
        send(info::DESCRIPTION, &[export.description.as_bytes()]);
    }
    let blocks = export.blocks;
    let sizes = [blocks.minimum, blocks.preferred, blocks.maximum].map(u32::to_be_bytes);
    send(info::BLOCK_SIZE, &[sizes.as_flattened()]);
}
