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
use crate::system::{Attached, CallError, Interface, Program, RawSocket};
use std::sync::Arc;

/// The number of queues that a program serves if the driver does not report it.
const QUEUES: u32 = 64;

fn queues(interface: &Interface) -> u32 {
    interface.queues().unwrap_or(QUEUES)
}

/// Looks an interface up in the network namespace of the calling thread.
///
/// # Errors
/// [`OpenError::NoInterface`].
pub fn interface(name: &str) -> Result<Interface, OpenError> {
    Interface::named(name).map_err(|error| error::of_lookup(name, error))
}

/// The program on an interface. A handle: the program is detached when the last handle and the last
/// socket that it passes packets to are dropped, or the process ends.
#[derive(Clone, Debug)]
pub struct Redirect {
    program: Arc<Program>,
    interface: Interface,
}

impl Redirect {
    /// Attaches the program: in the driver, or in the network stack if the driver refuses it, for
    /// whatever reason; then the reason is logged as a warning. Packets still go to the kernel
    /// until a socket is entered ([`Socket::redirect`](crate::Socket::redirect)).
    ///
    /// # Errors
    /// [`OpenError`], for instance if the interface has another program.
    pub fn attach(interface: &Interface) -> Result<Self, OpenError> {
        let native = match error::while_busy(interface, || Self::of(interface, Attached::Native)) {
            Err(error) if error::is_final(&error) => {
                return Err(error::of_attach(interface, error));
            }
            Err(error) => error,
            Ok(attached) => return Ok(attached),
        };
        // The driver is asked for its reason before the stack has a program, which would be another
        // one.
        let refused = error::of_refusal(interface, Attached::Native, native);
        // A driver may be busy, too; the kernel allows no program in the stack beside one in the
        // driver.
        let attached = Self::of(interface, Attached::Generic).map_err(|generic| {
            if error::is_refusal(&native) {
                error::of_refusal(interface, Attached::Generic, generic)
            } else {
                error::of_attach(interface, native)
            }
        })?;
        tracing::warn!("{refused}: it is received in generic mode, which is slower");
        Ok(attached)
    }

    /// Attaches the program in the driver or in the network stack, and nowhere else.
    ///
    /// # Errors
    /// [`OpenError`]: [`OpenError::Refused`] with the reason if the driver does not run it.
    pub fn attach_as(interface: &Interface, attached: Attached) -> Result<Self, OpenError> {
        let result = error::while_busy(interface, || Self::of(interface, attached));
        result.map_err(|error| match error::is_refusal(&error) {
            true => error::of_refusal(interface, attached, error),
            false => error::of_attach(interface, error),
        })
    }

    fn of(interface: &Interface, attached: Attached) -> Result<Self, CallError> {
        let program = Program::attach(interface, queues(interface), attached)?;
        Ok(Self { program: Arc::new(program), interface: interface.clone() })
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
