//! What happens at the target's limits: interrupts that nobody waits for, buffers that do not come
//! back, clients that leave.

use super::*;

/// The controller's interrupt stays signalled after the last completion, and must not end every
/// wait.
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
                let flush =
                    |command: &CommandInfo| command.opcode == pinfold_nvme::spec::nvm::FLUSH;
                let failure = Fault::Fail(Status::WRITE_FAULT.do_not_retry());
                faults.inject(Trigger::Matches(Box::new(flush)), failure);
            }
        });
        assert_eq!((stats.unflushed, stats.errors), (u64::from(fails), 0));
    }
}

/// Each tries when another has failed to get some, and at times without an event.
#[test]
fn clients_that_wait_for_memory_do_not_wake_each_other() {
    let (stats, _) = serve_at(2 * PAGE, |[mut a, mut b], faults, door| {
        let [mut c, mut d] = [(); 2].map(|()| door.client());
        let (seen, taken) = channel();
        faults.inject(Trigger::Matches(Box::new(move |_| seen.send(()).is_ok())), Fault::Hold);
        c.send(Command::READ, 1, 0, 4096);
        d.send(Command::READ, 1, 0, 4096);
        // Both pages are at the controller.
        (0..2).for_each(|_| taken.recv_timeout(Duration::from_secs(60)).unwrap());
        a.send(Command::READ, 1, 0, 4096);
        b.send(Command::READ, 1, 0, 4096);
        std::thread::sleep(Duration::from_millis(500));
        faults.clear();
        faults.release();
        for client in [&mut a, &mut b, &mut c, &mut d] {
            assert_eq!(client.reply(), (1, None));
            client.0.read_exact(&mut [0; 4096]).unwrap();
        }
    });
    assert!(stats.memory_waits > 0 && stats.memory_waits < 2000, "{stats:?}");
}
