//! Numbers that name a right to memory are unique in the process, not in one controller.

use crate::common::*;
use pinfold_nvme::driver::{Config, Outcome};
use pinfold_nvme_model::{Fault, ModelConfig, Trigger};

fn started() -> Bench {
    bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default())
}

/// Both requests are the first of the first queue of their controller.
#[test]
fn a_completion_of_another_controller_ends_nothing() {
    let (one, other) = (started(), started());
    let mut first = one.controller.create_queue(4).unwrap();
    let mut second = other.controller.create_queue(4).unwrap();
    other.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let done = first.read(1, 0, 8, Buffer::new(&one.arena, 4096)).unwrap();
    let held = second.read(1, 0, 8, Buffer::new(&other.arena, 4096)).unwrap();
    assert_eq!((first.id(), done.tag()), (second.id(), held.tag()), "alike but for the controller");
    second.ring_doorbell();
    let completion = first.wait().unwrap().unwrap();
    let Outcome::Foreign(held, completion) = held.finish(completion) else {
        panic!("the payload of a command in flight was released");
    };
    let Outcome::Completed { result, .. } = done.finish(completion) else { panic!() };
    assert_eq!(result, Ok(()));
    other.model.faults().release();
    assert_eq!(crate::common::one(&mut second, held).1, Ok(()));
}
