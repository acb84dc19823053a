//! Runs a program against one model device of 64 MiB: the least that a test of a driver needs.
//!
//! ```text
//! cargo run -p pinfold-check --example check_program -- qemu-img info nvme://0000:01:00.0/1
//! ```

use pinfold_check::{CheckConfig, DeviceConfig, DeviceModel, Severity, run};
use pinfold_nvme_model::MemoryMedia;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let device = DeviceConfig {
        bdf: "0000:01:00.0".parse()?,
        group: 7,
        media: Arc::new(MemoryMedia::new(64 << 20)?),
        model: DeviceModel::nvme(),
    };
    let mut config = CheckConfig::new(vec![device], std::env::args_os().skip(1).collect());
    config.hostile = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let report = run(&config)?;
    for finding in &report.findings {
        eprint!("{finding}");
    }
    eprintln!("{:?}, {} commands", report.ending, report.commands);
    Ok(if report.worst() == Some(Severity::Error) { ExitCode::from(3) } else { ExitCode::SUCCESS })
}
