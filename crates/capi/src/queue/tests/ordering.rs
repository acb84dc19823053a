//! Requests of a program to the same blocks while the older one waits for its retry: the younger is
//! never carried out first, through the same queue or another.

use super::*;
use crate::admin::pf_nvme_command;

/// The controller asks for a retry after 100 ms.
const LATER: Status = Status::NAMESPACE_NOT_READY.with_retry_delay(1);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Younger {
    Write,
    Discard,
    CommandWrite,
    CommandZeroes,
}

impl Younger {
    const ALL: [Self; 4] = [Self::Write, Self::Discard, Self::CommandWrite, Self::CommandZeroes];

    fn has_memory(self) -> bool {
        matches!(self, Self::Write | Self::CommandWrite)
    }
}

/// A request for the first blocks.
fn request(op: u32, iov: &iovec) -> pf_request {
    pf_request {
        op,
        nsid: 1,
        offset: 0,
        len: 0,
        iov,
        iovcnt: 1,
        flags: 0,
        command: null(),
        user_data: 0,
    }
}

fn submit(queue: *mut pf_queue_t, request: &pf_request) {
    // SAFETY: one request, whose entry and command the caller has.
    assert_eq!(unsafe { pf_submit(queue, request, 1) }, 1, "{}", message());
}

/// Submits what has the bytes of `iov`, or zeroes.
fn submit_younger(queue: *mut pf_queue_t, kind: Younger, iov: &iovec) {
    let opcode = if kind == Younger::CommandWrite { nvm::WRITE } else { nvm::WRITE_ZEROES };
    let command = pf_nvme_command {
        struct_size: size_of::<pf_nvme_command>(),
        opcode: opcode.into(),
        cdw12: u32::try_from(BLOCK / 512 - 1).unwrap(),
        ..<pf_nvme_command as crate::options::Options>::DEFAULT
    };
    let bare = pf_request { iov: null(), iovcnt: 0, ..request(PF_DISCARD, iov) };
    let one = match kind {
        Younger::Write => request(PF_WRITE, iov),
        Younger::Discard => pf_request { len: BLOCK as u64, ..bare },
        Younger::CommandWrite => {
            pf_request { command: &raw const command, ..request(PF_COMMAND, iov) }
        }
        Younger::CommandZeroes => {
            pf_request { op: PF_COMMAND, command: &raw const command, ..bare }
        }
    };
    submit(queue, &pf_request { user_data: 1, ..one });
}

/// Returns the `user_data` of what has ended without an error.
fn ended(queue: *mut pf_queue_t) -> Vec<u64> {
    let none = pf_completion { user_data: 9, result: 1, status: 1, ..pf_completion::NONE };
    let mut done = [none; 4];
    // SAFETY: four fit.
    let stored = unsafe { pf_complete(queue, done.as_mut_ptr(), 4) };
    let done = &done[..usize::try_from(stored).unwrap()];
    assert!(done.iter().all(|one| (one.result, one.status) == (0, 0)), "a request failed");
    done.iter().map(|one| one.user_data).collect()
}

#[test]
fn what_overlaps_a_write_that_is_sent_again_ends_after_it() {
    for protect in [PF_PROTECT_STATIC, PF_PROTECT_BATCH] {
        for (kind, is_other) in
            Younger::ALL.into_iter().flat_map(|kind| [(kind, false), (kind, true)])
        {
            let case = format!("{protect}, {kind:?}, another queue: {is_other}");
            let delays = |model: &mut ModelConfig| model.retry_delays = [1, 0, 0];
            let core = Domain::soft().unwrap();
            let program = Program::on(core, protect, Config::default(), delays);
            let opts = pf_queue_opts {
                struct_size: size_of::<pf_queue_opts>(),
                depth: 4,
                protect,
                ..pf_queue_opts::DEFAULT
            };
            let mut second = null_mut();
            // SAFETY: the options have as many bytes as they say, and the handle can be stored.
            let created =
                unsafe { pf_queue_create(program.nvme, &raw const opts, &raw mut second) };
            assert_eq!(created, 0);
            let iovs = [0, 1, 2].map(|at| iovec {
                iov_base: program.memory.wrapping_byte_add(at * BLOCK),
                iov_len: BLOCK,
            });
            for (iov, byte) in iovs.iter().zip([0xaa, 0xbb, 0xcc]) {
                // SAFETY: inside of the allocation, which no request has.
                unsafe { iov.iov_base.cast::<u8>().write_bytes(byte, BLOCK) };
            }

            program.faults.inject(nth(1), Fault::Fail(LATER));
            submit(program.queue, &request(PF_WRITE, &iovs[0]));
            // Other queues wait for a request from when its queue knows of the retry.
            while is_other && QUEUES.get_mut(program.queue).unwrap().queue.stats().errors == 0 {
                assert!(ended(program.queue).is_empty(), "{case}");
            }
            let younger = if is_other { second } else { program.queue };
            submit_younger(younger, kind, &iovs[1]);
            let mut order = Vec::new();
            while order.len() < 2 {
                order.extend(ended(second));
                order.extend(ended(program.queue));
            }
            // A request without memory waits for no flush, and the end of one of another queue is
            // seen by another call: each may be returned before a write whose flush is in flight.
            if protect == PF_PROTECT_BATCH && (is_other || !kind.has_memory()) {
                order.sort_unstable();
            }
            assert_eq!(order, [0, 1], "{case}");
            assert_eq!(QUEUES.get_mut(program.queue).unwrap().queue.stats().retries, 1, "{case}");

            submit(second, &request(PF_READ, &iovs[2]));
            while ended(second).is_empty() {}
            // SAFETY: inside of the allocation, which no request has any more.
            let found = unsafe { std::slice::from_raw_parts(iovs[2].iov_base.cast::<u8>(), BLOCK) };
            let expected = if kind.has_memory() { 0xbb } else { 0 };
            assert!(found.iter().all(|byte| *byte == expected), "{case}: {:#x}", found[0]);
            assert_eq!(pf_queue_destroy(second), 0);
            program.end();
        }
    }
}
