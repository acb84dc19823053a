//! The payloads of options, and the encoding of their replies: "Option haggling".

use crate::export::Export;
use crate::protocol::{OPTION_REPLY_MAGIC, info, option_reply};

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

    /// A length and as many bytes.
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
