//! The body of the fuzz target `nbd`, which the tests run with random bytes as well: any bytes as a
//! connection, whole and in pieces.

use pinfold_nbd::{
    BlockSizes, Command, Export, Handshake, Operation, RequestHeader, RequestReader, Session, Step,
    TransmissionFlags,
};

/// The outcome of a connection.
#[derive(PartialEq, Eq, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) output: Vec<u8>,
    pub(crate) session: Option<Session>,
    /// The offset in the output at which TLS began.
    pub(crate) secured: Option<usize>,
    pub(crate) requests: Vec<RequestHeader>,
    /// The number of payload bytes consumed.
    pub(crate) payload: u64,
    pub(crate) failed: Option<String>,
}

pub(crate) fn export() -> Export {
    let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 };
    let flags = TransmissionFlags::all() - TransmissionFlags::READ_ONLY;
    Export::new("disk", 1 << 30, flags).description("a disk").block_sizes(blocks)
}

/// Runs a connection that receives `pieces` one after the other. If TLS is required, what follows
/// STARTTLS came out of TLS.
pub(crate) fn run<'b>(tls: bool, pieces: impl Iterator<Item = &'b [u8]>) -> Outcome {
    let export = export();
    let mut outcome = Outcome::default();
    let start = if tls { Handshake::requiring_tls } else { Handshake::new };
    let mut handshake = start(&mut outcome.output);
    let mut reader = RequestReader::default();
    for mut piece in pieces {
        while !piece.is_empty() {
            let used = match outcome.session {
                None => {
                    let before = outcome.output.len();
                    match handshake.advance(&export, piece, &mut outcome.output) {
                        Ok((used, step)) => {
                            assert!(used > 0, "input is used");
                            assert!(
                                outcome.output.len() - before <= 20 << 10,
                                "the output is bounded"
                            );
                            match step {
                                Step::Continue => {}
                                Step::Transmission(session) => {
                                    assert_eq!(
                                        outcome.secured.is_some(),
                                        tls,
                                        "TLS where it is required"
                                    );
                                    outcome.session = Some(session);
                                }
                                Step::StartTls => {
                                    assert!(tls && outcome.secured.is_none(), "TLS begins once");
                                    outcome.secured = Some(outcome.output.len());
                                    handshake.secured();
                                }
                                Step::Closed => return outcome,
                            }
                            used
                        }
                        Err(error) => {
                            outcome.failed = Some(error.to_string());
                            return outcome;
                        }
                    }
                }
                Some(session) => match transmit(&export, session, &mut reader, piece, &mut outcome)
                {
                    Some(used) => used,
                    None => return outcome,
                },
            };
            piece = &piece[used..];
        }
    }
    outcome
}

fn transmit(
    export: &Export,
    session: Session,
    reader: &mut RequestReader,
    piece: &[u8],
    outcome: &mut Outcome,
) -> Option<usize> {
    if reader.payload() > 0 {
        let used = piece.len().min(reader.payload() as usize);
        reader.take_payload(u32::try_from(used).unwrap_or(u32::MAX));
        outcome.payload += used as u64;
        return Some(used);
    }
    match reader.read(piece) {
        Ok((used, header)) => {
            assert!(used > 0 && reader.missing() > 0);
            if let Some(header) = header {
                assert_eq!(RequestHeader::parse(&header.to_bytes()), Ok(header));
                check_request(export, session, &header);
                outcome.requests.push(header);
                if header.command == Command::DISCONNECT {
                    return None;
                }
            }
            Some(used)
        }
        Err(error) => {
            outcome.failed = Some(error.to_string());
            None
        }
    }
}

fn check_request(export: &Export, session: Session, header: &RequestHeader) {
    let Ok(request) = export.check(&session, header) else { return };
    if !matches!(request.operation, Operation::Flush | Operation::Disconnect) {
        assert!(request.offset + u64::from(request.length) <= export.size());
        assert!(request.offset % 512 == 0 && request.length % 512 == 0);
    }
    if matches!(request.operation, Operation::BlockStatus { .. }) {
        assert!(session.base_allocation && request.length > 0);
    }
}

/// The first byte is the length of the pieces, the rest what the client sends.
pub(crate) fn check(input: &[u8]) {
    let Some((&len, bytes)) = input.split_first() else { return };
    for tls in [false, true] {
        let whole = run(tls, std::iter::once(bytes));
        assert_eq!(whole, run(tls, bytes.chunks(usize::from(len).max(1))), "pieces change nothing");
    }
}
