//! Conversations with the state machine, and properties of any of them.
#![allow(clippy::unwrap_used, reason = "helpers outside of test functions, too")]

mod fuzzed;

use fuzzed::{Outcome, check, export, run};
use pinfold_nbd::protocol::{ExtentFlags, OPTION_MAGIC, OPTION_REPLY_MAGIC, option, option_reply};
use pinfold_nbd::reply::{self, ReplyHeader, chunk};
use pinfold_nbd::{
    Command, CommandFlags, ErrorNumber, Handshake, HandshakeError, RequestHeader, Session, Step,
};
use proptest::prelude::*;

const GREETING: usize = 18;

fn len32(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}

fn opt(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(len32(payload).to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&len32(text.as_bytes()).to_be_bytes(), text.as_bytes()].concat()
}

fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend(u16::try_from(wanted.len()).unwrap().to_be_bytes());
    bytes.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    bytes
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
    queries.iter().for_each(|query| bytes.extend(string(query)));
    bytes
}

/// Runs a client that sets `flags` and sends `options`.
fn talk(flags: u32, options: &[Vec<u8>]) -> Outcome {
    run(false, std::iter::once(&*said(flags, options)))
}

/// Returns the same where TLS is required.
fn talk_tls(flags: u32, options: &[Vec<u8>]) -> Outcome {
    run(true, std::iter::once(&*said(flags, options)))
}

fn said(flags: u32, options: &[Vec<u8>]) -> Vec<u8> {
    [flags.to_be_bytes().to_vec(), options.concat()].concat()
}

/// Splits the output after the greeting into replies: option, type, payload.
fn replies(outcome: &Outcome) -> Vec<(u32, u32, Vec<u8>)> {
    let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    let mut rest = &outcome.output[GREETING..];
    let mut all = Vec::new();
    while !rest.is_empty() {
        assert_eq!(rest[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        let len = word(&rest[16..20]) as usize;
        all.push((word(&rest[8..12]), word(&rest[12..16]), rest[20..20 + len].to_vec()));
        rest = &rest[20 + len..];
    }
    all
}

fn kinds(outcome: &Outcome) -> Vec<u32> {
    replies(outcome).into_iter().map(|(_, kind, _)| kind).collect()
}

#[test]
fn a_client_like_libnbd_gets_what_it_asks_for() {
    let outcome = talk(
        3,
        &[
            opt(option::STRUCTURED_REPLY, &[]),
            opt(option::LIST, &[]),
            opt(option::SET_META_CONTEXT, &contexts("disk", &["x:y", "base:allocation"])),
            opt(option::INFO, &info("disk", &[1, 2, 3, 99])),
            opt(option::GO, &info("", &[])),
        ],
    );
    assert_eq!(outcome.session, Some(Session { structured: true, base_allocation: true }));
    let (ack, server, information, context) =
        (option_reply::ACK, option_reply::SERVER, option_reply::INFO, option_reply::META_CONTEXT);
    let kinds = kinds(&outcome);
    let expected =
        [ack, server, ack, context, ack, information, information, information, information, ack];
    assert_eq!(kinds[..10], expected);
    assert_eq!(kinds[10..], [information, information, ack]);
    let replies = replies(&outcome);
    assert_eq!(replies[1].2, b"\0\0\0\x04diska disk");
    assert_eq!(replies[3].2, b"\0\0\0\x01base:allocation");
    // Size, and flags: all but READ_ONLY, DF among them.
    assert_eq!(
        replies[5].2,
        [&[0, 0][..], &(1u64 << 30).to_be_bytes(), &0x01edu16.to_be_bytes()].concat()
    );
    assert_eq!(replies[6].2, b"\0\x01disk");
    assert_eq!(replies[7].2, b"\0\x02a disk");
    assert_eq!(replies[8].2, [0, 3, 0, 0, 2, 0, 0, 0, 0x10, 0, 0, 0x10, 0, 0]);
}

#[test]
fn a_client_of_the_first_newstyle_gets_zeroes() {
    for (flags, zeroes) in [(0, 124), (1, 124), (3, 0)] {
        let outcome = talk(flags, &[opt(option::EXPORT_NAME, b"disk")]);
        assert_eq!(outcome.session, Some(Session::default()));
        assert_eq!(outcome.output.len(), GREETING + 10 + zeroes);
        assert_eq!(outcome.output[GREETING + 8..][..2], 0x016du16.to_be_bytes());
    }
    assert!(talk(0, &[opt(option::LIST, &[])]).failed.unwrap().contains("fixed newstyle"));
    assert!(talk(3, &[opt(option::EXPORT_NAME, b"other")]).failed.unwrap().contains("other"));
}

#[test]
fn errors_of_options_keep_the_connection() {
    let long = vec![0; 20_000];
    let outcome = talk(
        3,
        &[
            opt(option::STARTTLS, &[]),
            opt(11, &[]),
            opt(option::LIST, b"x"),
            opt(option::SET_META_CONTEXT, &contexts("disk", &["base:allocation"])), // not structured
            opt(option::GO, &info("other", &[])),
            opt(option::GO, b"\0\0\0\x09x"),
            opt(option::LIST, &long),
            opt(option::ABORT, &[]),
        ],
    );
    let (unsupported, invalid) = (option_reply::UNSUPPORTED, option_reply::INVALID);
    let last = [option_reply::UNKNOWN, invalid, option_reply::TOO_BIG, option_reply::ACK];
    let first = [unsupported, unsupported, invalid, invalid];
    assert_eq!(kinds(&outcome), [first, last].concat());
    assert_eq!((outcome.session, outcome.failed), (None, None));
}

#[test]
fn metadata_contexts_are_listed_and_replaced() {
    let structured = opt(option::STRUCTURED_REPLY, &[]);
    let list = |queries: &[&str]| opt(option::LIST_META_CONTEXT, &contexts("", queries));
    let context = option_reply::META_CONTEXT;
    for (queries, listed) in
        [(&[][..], true), (&["base:"], true), (&["base:allocation"], true), (&["x:"], false)]
    {
        let outcome = talk(3, &[structured.clone(), list(queries)]);
        assert_eq!(kinds(&outcome).contains(&context), listed, "{queries:?}");
    }
    let set = |queries: &[&str]| opt(option::SET_META_CONTEXT, &contexts("", queries));
    let go = opt(option::GO, &info("", &[]));
    for (second, selected) in [(set(&[]), false), (set(&["base:"]), false), (list(&["x:"]), true)] {
        let outcome = talk(3, &[structured.clone(), set(&["base:allocation"]), second, go.clone()]);
        assert_eq!(outcome.session.unwrap().base_allocation, selected);
    }
    let failed = opt(option::SET_META_CONTEXT, &contexts("other", &["base:allocation"]));
    let outcome = talk(3, &[structured, set(&["base:allocation"]), failed, go]);
    assert!(!outcome.session.unwrap().base_allocation);
}

#[test]
fn hostile_clients_are_disconnected() {
    assert!(talk(4, &[]).failed.unwrap().contains("0x4"));
    assert!(talk(3, &[b"GET / HTTP/1.1\r\n".to_vec()]).failed.unwrap().contains("IHAVEOPT"));
    let huge = [&OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 3], &[0xff; 4]].concat();
    assert!(talk(3, &[huge]).failed.unwrap().contains("4294967295"));
    let many = vec![opt(option::LIST, &[]); 300];
    assert!(talk(3, &many).failed.unwrap().contains("256"));
    let garbage = vec![opt(option::EXPORT_NAME, b""), vec![7; 28]];
    assert!(talk(3, &garbage).failed.unwrap().contains("0x7070707"));
}

fn any_header() -> impl Strategy<Value = RequestHeader> {
    (any::<u16>(), 0u16..12, any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
        |(flags, command, cookie, offset, length)| RequestHeader {
            flags: CommandFlags::from_bits_retain(flags),
            command: Command(command),
            cookie,
            offset,
            length,
        },
    )
}

/// Returns a conversation that gets far: valid options and requests, with some bytes changed.
fn conversation() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![Just("disk"), Just(""), Just("other")];
    let option = prop_oneof![
        Just(opt(option::STRUCTURED_REPLY, &[])),
        Just(opt(option::LIST, &[])),
        (
            name.clone(),
            prop_oneof![Just(option::SET_META_CONTEXT), Just(option::LIST_META_CONTEXT)]
        )
            .prop_map(|(name, number)| opt(number, &contexts(name, &["base:allocation"]))),
        (name, prop_oneof![Just(option::GO), Just(option::INFO)])
            .prop_map(|(name, number)| opt(number, &info(name, &[1, 2, 3]))),
        (any::<u32>(), prop::collection::vec(any::<u8>(), 0..64))
            .prop_map(|(number, data)| opt(number, &data)),
    ];
    let request = any_header().prop_map(|header| {
        let length = header.length % 100;
        let mut bytes = RequestHeader { length, ..header }.to_bytes().to_vec();
        bytes.resize(28 + RequestHeader { length, ..header }.payload() as usize, 0xaa);
        bytes
    });
    let options = prop::collection::vec(option, 0..6);
    let requests = prop::collection::vec(request, 0..6);
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3);
    (any::<u8>(), options, requests, changes).prop_map(|(len, options, requests, changes)| {
        let mut bytes = vec![len, 0, 0, 0, 3];
        bytes.extend(options.concat());
        bytes.extend(opt(option::GO, &info("", &[])));
        bytes.extend(requests.concat());
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes
    })
}

proptest! {
    #[test]
    fn headers_survive_the_wire(header in any_header()) {
        prop_assert_eq!(RequestHeader::parse(&header.to_bytes()), Ok(header));
    }

    #[test]
    fn replies_survive_the_wire(cookie: u64, offset: u64, length in 1u32..u32::MAX - 8, number: u32, more: Vec<u8>) {
        let whole = |header: &[u8]| {
            for cut in 0..header.len().min(16) {
                assert_eq!(ReplyHeader::parse(&header[..cut]), Ok(None));
            }
            ReplyHeader::parse(&[header, &more].concat()).unwrap().unwrap()
        };
        let error = ErrorNumber::from_number(number);
        prop_assert_eq!(whole(&reply::simple(error, cookie)), (ReplyHeader::Simple { error, cookie }, 16));
        let chunk = |kind, length| (ReplyHeader::Chunk { done: true, kind, cookie, length }, 20);
        prop_assert_eq!(whole(&reply::none(cookie)), chunk(chunk::NONE, 0));
        prop_assert_eq!(whole(&reply::offset_data(cookie, offset, length)), chunk(chunk::OFFSET_DATA, length + 8));
        prop_assert_eq!(whole(&reply::error(ErrorNumber::Io, cookie)), chunk(chunk::ERROR, 6));
        let extents = [(length, ExtentFlags::empty()), (1, ExtentFlags::all())];
        let bytes = reply::block_status(cookie, &extents);
        prop_assert_eq!(whole(&bytes), chunk(chunk::BLOCK_STATUS, 20));
        prop_assert_eq!(&bytes[24..28], &length.to_be_bytes());
        prop_assert_eq!(&bytes[32..], [0, 0, 0, 1, 0, 0, 0, 3]);
    }

    #[test]
    fn any_bytes_are_safe_in_any_pieces(input: Vec<u8>) {
        check(&input);
    }

    #[test]
    fn conversations_do_not_depend_on_pieces(input in conversation()) {
        check(&input);
    }
}

#[test]
fn error_numbers_are_those_of_the_protocol() {
    let all = [
        ErrorNumber::NotPermitted,
        ErrorNumber::Io,
        ErrorNumber::NoMemory,
        ErrorNumber::Invalid,
        ErrorNumber::NoSpace,
        ErrorNumber::NotSupported,
        ErrorNumber::Shutdown,
    ];
    for error in all {
        assert_eq!(ErrorNumber::from_number(error.get()), Some(error));
    }
    assert_eq!(ErrorNumber::from_number(0), None);
    assert_eq!(ErrorNumber::from_number(75), Some(ErrorNumber::Invalid));
}

// STARTTLS where TLS is required: what is refused before it, and what holds after it.

#[test]
fn everything_else_is_refused_before_tls() {
    let outcome = talk_tls(
        3,
        &[
            opt(option::STRUCTURED_REPLY, &[]),
            opt(option::LIST, &[]),
            opt(option::SET_META_CONTEXT, &contexts("", &["base:allocation"])),
            opt(option::GO, &info("disk", &[])),
            opt(99, b"unknown"),
            opt(option::LIST, &[0; 20_000]), // too long to look at
            opt(option::STARTTLS, b"x"),
            opt(option::STARTTLS, &[0; 20_000]),
            opt(option::ABORT, &[]),
        ],
    );
    let last = [option_reply::INVALID, option_reply::TOO_BIG, option_reply::ACK];
    assert_eq!(kinds(&outcome), [&[option_reply::TLS_REQUIRED; 6][..], &last].concat());
    assert_eq!((outcome.session, outcome.secured, outcome.failed), (None, None, None));
    // This one has no reply for errors.
    let outcome = talk_tls(3, &[opt(option::EXPORT_NAME, b"disk")]);
    assert!(outcome.failed.unwrap().contains("without TLS"));
}

#[test]
fn the_handshake_goes_on_inside_tls() {
    let start = opt(option::STARTTLS, &[]);
    let structured = opt(option::STRUCTURED_REPLY, &[]);
    let go = opt(option::GO, &info("disk", &[]));
    let outcome = talk_tls(3, &[start.clone(), start.clone(), structured.clone(), go.clone()]);
    assert_eq!(kinds(&outcome)[..3], [option_reply::ACK, option_reply::INVALID, option_reply::ACK]);
    assert_eq!(outcome.session, Some(Session { structured: true, base_allocation: false }));
    // Earlier requests of the handshake do not count.
    let outcome = talk_tls(3, &[structured, start, go]);
    assert_eq!(outcome.session, Some(Session::default()));
}

#[test]
fn plaintext_behind_starttls_is_refused() {
    let (export, mut output) = (export(), Vec::new());
    let mut handshake = Handshake::requiring_tls(&mut output);
    handshake.secured(); // too early: changes nothing
    let start = said(3, &[opt(option::STARTTLS, &[])]);
    let input = [&*start, &opt(option::GO, &info("disk", &[]))].concat();
    let mut at = 0;
    while at < start.len() {
        let (used, step) = handshake.advance(&export, &input[at..], &mut output).unwrap();
        at += used;
        assert_eq!(step == Step::StartTls, at == start.len());
    }
    let (before, rest) = (output.len(), &input[at..]);
    let plaintext = Err(HandshakeError::Plaintext { bytes: rest.len() });
    assert_eq!(handshake.advance(&export, &[], &mut output), Ok((0, Step::Continue)));
    assert_eq!(handshake.advance(&export, rest, &mut output), plaintext);
    assert_eq!(output.len(), before);
}
