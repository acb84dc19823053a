//! STARTTLS where TLS is required: what is refused before it, and what holds after it.

use crate::fuzzed::export;
use crate::{contexts, info, kinds, opt, said, talk_tls};
use pinfold_nbd::protocol::{option, option_reply};
use pinfold_nbd::{Handshake, HandshakeError, Session, Step};

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
    // What was asked for before does not count.
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
