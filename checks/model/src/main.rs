//! Explores the protocol without a mistake, and tells the shortest story of each mistake.

use pinfold_model::{Caches, Mistake, Protocol, story};
use stateright::{Checker, Model};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut wrong = false;
    for caches in [Caches::TwoUnits, Caches::DeviceTlb] {
        let start = Instant::now();
        let checker = Protocol { caches, mistake: None }.checker().threads(2).spawn_bfs().join();
        println!(
            "{caches:?}: {} states, {} steps, at most {} deep, {} s",
            checker.unique_state_count(),
            checker.state_count(),
            checker.max_depth(),
            start.elapsed().as_secs()
        );
        for (property, path) in checker.discoveries() {
            wrong = true;
            println!("{property}:\n{}", story::tell(checker.model(), property, path));
        }
    }
    for mistake in Mistake::ALL {
        match story::of(mistake) {
            Some(story) => println!("{story}"),
            None => {
                wrong = true;
                println!("{mistake:?}: not found");
            }
        }
    }
    ExitCode::from(u8::from(wrong))
}
