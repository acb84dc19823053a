//! The commands.

pub(crate) mod copy;
pub(crate) mod io;
pub(crate) mod machine;
pub(crate) mod receive;
pub(crate) mod replay;
pub(crate) mod serve;

use crate::args::StackArgs;
use crate::failure::Failure;
use crate::setup::resolve::{ResolvedTarget, domain_of};
use crate::setup::stack::{self, BufferNeed, Stack};

/// Allocates the memory of a run with these targets, after a check that the machine has it.
fn stack_for(
    args: StackArgs,
    targets: &[&ResolvedTarget],
    buffers: BufferNeed,
) -> Result<Stack, Failure> {
    let domain = domain_of(targets, args.iommu_units)?;
    let controllers = targets.iter().filter(|target| target.has_controller()).count() as u64;
    let held = targets.iter().map(|target| target.held_bytes()).sum();
    stack::check(Stack::need(buffers, controllers, held), args.memory)?;
    Ok(Stack::build(args, domain, buffers, controllers)?)
}
