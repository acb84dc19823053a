//! What happens at the target's limits: interrupts that nobody waits for, buffers that do not come back, clients that leave.

use super::*;

/// The controller's interrupt stays signalled after the last completion, and must not end every wait.
#[test]
fn an_idle_loop_sleeps() {
    let (clients, _) = serve(4 << 20, |[mut a, _b], _| {
        assert_eq!(a.simple(Command::FLUSH, 0, 0), None);
        std::thread::sleep(Duration::from_millis(500));
    });
    assert!(clients.turns < 1000, "{clients:?}");
}

#[test]
fn a_last_flush_that_fails_is_counted() {
    for fails in [false, true] {
        let (stats, _) = serve(4 << 20, |[mut a, _b], faults| {
            assert_eq!(a.write(0, 1, 4096), None);
            if fails {
                let flush = |command: &CommandInfo| command.opcode == pinfold_nvme::spec::nvm::FLUSH;
                let failure = Fault::Fail(Status::WRITE_FAULT.do_not_retry());
                faults.inject(Trigger::Matches(Box::new(flush)), failure);
            }
        });
        assert_eq!((stats.unflushed, stats.errors), (u64::from(fails), 0));
    }
}
