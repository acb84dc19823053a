//! What commands do at the target.

use super::*;

/// Deallocation is advice: a controller may complete it without any effect, whatever DLFEAT says of what it deallocates.
#[test]
fn zeroes_are_read_after_a_controller_has_ignored_a_deallocation() {
    let ignored = Trigger::Matches(Box::new(|command| command.queue != 0 && command.opcode == 9));
    let (_, target) = serve(4 << 20, |[mut a, _b], faults| {
        faults.inject(ignored, Fault::Fail(Status::SUCCESS));
        assert_eq!(a.write(0, 0xaa, 64 << 10), None);
        assert_eq!(a.simple(Command::WRITE_ZEROES, 0, 64 << 10), None);
        assert_eq!(a.read(0, 64 << 10), Ok(vec![0; 64 << 10]));
    });
    assert_eq!(target.trims.requests, 0);
}
