//! The program on an interface that passes packets to sockets.
//!
//! ```no_run
//! use pinfold_xdp::redirect::{self, Redirect};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let redirect = Redirect::attach(&redirect::interface("veth1")?)?;
//! println!("attached: {:?}", redirect.attached());
//! # Ok(()) } // detached here
//! ```

use crate::error::{self, OpenError};
use pinfold::xdp::{Attached, Interface, Program, RawSocket};
use std::sync::Arc;

/// Queues that a program serves if the driver does not say how many there are.
const QUEUES: u32 = 64;

/// Looks an interface up in the network namespace of the calling thread.
///
/// # Errors
/// [`OpenError::NoInterface`].
pub fn interface(name: &str) -> Result<Interface, OpenError> {
    Interface::named(name).map_err(|error| error::of_lookup(name, error))
}

/// The program on an interface. A handle: the program is detached when the last handle and the last socket that it passes
/// packets to are dropped, or the process ends.
#[derive(Clone, Debug)]
pub struct Redirect {
    program: Arc<Program>,
    interface: Interface,
}

impl Redirect {
    /// Attaches the program: in the driver, or in the network stack if the driver cannot run one. Packets still go to the
    /// kernel until a socket is entered ([`Socket::redirect`](crate::Socket::redirect)).
    ///
    /// # Errors
    /// [`OpenError`], for instance if the interface has another program.
    pub fn attach(interface: &Interface) -> Result<Self, OpenError> {
        let queues = interface.queues().unwrap_or(QUEUES);
        let attach = |attached| error::while_busy(interface, || Program::attach(interface, queues, attached));
        let program = match attach(Attached::Native) {
            Err(error) if error::is_unsupported(error.errno) => attach(Attached::Generic),
            attached => attached,
        };
        let program = Arc::new(program.map_err(|error| error::of_attach(interface, error))?);
        Ok(Self { program, interface: interface.clone() })
    }

    /// Returns where the program runs.
    pub fn attached(&self) -> Attached {
        self.program.attached()
    }

    pub(crate) fn enter(&self, queue: u32, socket: &RawSocket) -> Result<(), OpenError> {
        let entered = self.program.redirect(queue, socket);
        entered.map_err(|error| error::of_bind(&self.interface, queue, error))
    }
}
