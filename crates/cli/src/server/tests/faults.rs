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
