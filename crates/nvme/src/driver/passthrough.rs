//! [`RawCommand`]: a command of the program's own, which the driver sends for it. The driver
//! refuses commands that affect its own state: its queues, their interrupts' events, and commands
//! that would give the controller an address.

use super::error::{Error, Reject};
use crate::spec::{Command, PAGE_BYTES, admin, feature, nvm};
use zerocopy::little_endian::U32;

/// A command, as the NVM Express specification numbers its words; for
/// [`Controller::admin`](super::Controller::admin) and [`Queue::raw`](super::Queue::raw).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RawCommand {
    /// The opcode. Its lowest two bits are the direction of its data.
    pub opcode: u8,
    /// The namespace; of an admin command that is not about one, 0 or `u32::MAX`.
    pub nsid: u32,
    /// CDW10 to CDW15.
    pub cdw: [u32; 6],
}

/// The direction of a command's data (Base, "Opcodes": bits 1:0).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataDirection {
    /// It has none.
    None,
    /// The controller reads them.
    ToController,
    /// The controller writes them.
    FromController,
    /// Both, which no command that is sent has.
    Both,
}

impl RawCommand {
    /// Returns the direction of the command's data.
    pub fn direction(&self) -> DataDirection {
        match self.opcode & 3 {
            0 => DataDirection::None,
            1 => DataDirection::ToController,
            2 => DataDirection::FromController,
            _ => DataDirection::Both,
        }
    }

    fn words(&self) -> Command {
        let [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15] = self.cdw.map(U32::new);
        let (opcode, nsid) = (self.opcode, U32::new(self.nsid));
        Command { opcode, nsid, cdw10, cdw11, cdw12, cdw13, cdw14, cdw15, ..Command::default() }
    }

    /// Returns the admin command, without the address of its data, and its name.
    ///
    /// # Errors
    /// [`Error::OwnedByDriver`], [`Error::NotSent`], [`Error::DataLength`].
    pub(super) fn admin(&self) -> Result<(&'static str, Command), Error> {
        let [cdw10, cdw11, cdw12, ..] = self.cdw;
        // A number of words, less 1.
        let words = |count: u64| (count + 1) * 4;
        let (what, bytes) = match self.opcode {
            admin::CREATE_SQ | admin::DELETE_SQ | admin::CREATE_CQ | admin::DELETE_CQ => {
                return Err(Error::OwnedByDriver { what: "its queues" });
            }
            admin::ABORT => return Err(Error::OwnedByDriver { what: "aborts" }),
            admin::ASYNC_EVENT => return Err(Error::OwnedByDriver { what: "event requests" }),
            admin::KEEP_ALIVE => return Err(Error::OwnedByDriver { what: "the keep alive timer" }),
            admin::VIRTUALIZATION => {
                return Err(Error::OwnedByDriver { what: "the controller's resources" });
            }
            admin::DOORBELL_BUFFER => return Err(Error::OwnedByDriver { what: "its doorbells" }),
            admin::SET_FEATURES => ("set features", self.feature()?),
            admin::GET_LOG_PAGE => ("get log page", words(u64::from(cdw10 >> 16 | cdw11 << 16))),
            admin::FIRMWARE_DOWNLOAD => ("firmware image download", words(cdw10.into())),
            admin::DIRECTIVE_SEND | admin::DIRECTIVE_RECEIVE => ("directive", words(cdw10.into())),
            admin::SECURITY_SEND | admin::SECURITY_RECEIVE => ("security", cdw11.into()),
            admin::LBA_STATUS => ("get LBA status", words(cdw12.into())),
            admin::IDENTIFY => ("identify", 0),
            admin::GET_FEATURES => ("get features", 0),
            admin::NAMESPACE_MANAGEMENT => ("namespace management", 0),
            admin::NAMESPACE_ATTACHMENT => ("namespace attachment", 0),
            admin::FIRMWARE_COMMIT => ("firmware commit", 0),
            admin::SELF_TEST => ("device self-test", 0),
            admin::FORMAT => ("format NVM", 0),
            admin::SANITIZE => ("sanitize", 0),
            VENDOR.. if self.direction() != DataDirection::Both => ("vendor command", 0),
            opcode => return Err(Error::NotSent { opcode }),
        };
        if bytes > PAGE_BYTES as u64 {
            return Err(Error::DataLength { bytes });
        }
        Ok((what, self.words()))
    }

    /// Checks the feature of a "set features"; returns the length of its data, where that is not
    /// fixed and at most a page.
    fn feature(&self) -> Result<u64, Error> {
        let [fid, ..] = self.cdw[0].to_le_bytes();
        let what = match fid {
            feature::NUMBER_OF_QUEUES => "the number of queues",
            feature::ASYNC_EVENTS => "the events that are reported",
            feature::HOST_MEMORY_BUFFER => "the host memory buffer",
            feature::KEEP_ALIVE_TIMER => "the keep alive timer",
            feature::HOST_BEHAVIOR => "the host's behavior",
            feature::COMMAND_SET_PROFILE => "the command set profile",
            _ => return Ok(0),
        };
        Err(Error::OwnedByDriver { what })
    }

    /// Returns whether the namespaces may have changed when the command has succeeded. The controller
    /// need not report an event to the host that changed them.
    pub(super) fn changes_namespaces(&self) -> bool {
        matches!(
            self.opcode,
            admin::NAMESPACE_MANAGEMENT
                | admin::NAMESPACE_ATTACHMENT
                | admin::FORMAT
                | admin::SANITIZE
        )
    }

    /// Returns the I/O command, without its identifier and the address of its data.
    pub(super) fn io(&self) -> Command {
        self.words()
    }

    /// Checks that an I/O command is not the driver's own, and that its data go the way of its
    /// payload.
    pub(super) fn check_io(&self, payload: DataDirection) -> Result<(), Reject> {
        let opcode = self.opcode;
        match self.direction() {
            // Cancel ends other commands of the queue.
            _ if opcode == nvm::CANCEL => Err(Reject::OwnedByDriver { what: "aborts" }),
            DataDirection::Both => Err(Reject::NotSent { opcode }),
            direction if direction != payload => Err(Reject::Direction { opcode }),
            _ => Ok(()),
        }
    }

    /// Returns the blocks of an I/O command that names them as a read does: the first, and how many.
    pub(super) fn blocks(&self) -> Option<(u64, u32)> {
        let names_blocks = matches!(
            self.opcode,
            nvm::READ
                | nvm::WRITE
                | nvm::WRITE_UNCORRECTABLE
                | nvm::COMPARE
                | nvm::WRITE_ZEROES
                | nvm::VERIFY
        );
        names_blocks.then(|| (self.words().slba(), self.words().blocks()))
    }

    /// Returns whether the data of the command are the blocks that it names.
    pub(super) fn moves_blocks(&self) -> bool {
        matches!(self.opcode, nvm::READ | nvm::WRITE | nvm::COMPARE)
    }

    /// Returns whether the command may change blocks.
    pub(super) fn changes_blocks(&self) -> bool {
        let reads = matches!(self.opcode, nvm::COMPARE | nvm::VERIFY);
        !reads && self.direction() != DataDirection::FromController
    }
}

/// The first opcode of vendors, of admin commands.
const VENDOR: u8 = 0xc0;

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(opcode: u8, cdw: [u32; 6]) -> Result<(), Error> {
        RawCommand { opcode, nsid: 0, cdw }.admin().map(drop)
    }

    #[test]
    fn commands_that_the_driver_relies_on_are_refused_by_type() {
        let owned: Vec<u8> = (0..=u8::MAX)
            .filter(|opcode| matches!(sent(*opcode, [0; 6]), Err(Error::OwnedByDriver { .. })))
            .collect();
        assert_eq!(owned, [0, 1, 4, 5, 8, 0x0c, 0x18, 0x1c, 0x7c]);
        let standard: Vec<u8> = (0..0xc0).filter(|opcode| sent(*opcode, [0; 6]).is_ok()).collect();
        let expected = [
            0x02, 0x06, 0x09, 0x0a, 0x0d, 0x10, 0x11, 0x14, 0x15, 0x19, 0x1a, 0x80, 0x81, 0x82,
            0x84, 0x86,
        ];
        assert_eq!(standard, expected);
        for opcode in 0xc0..=u8::MAX {
            let is_sent = sent(opcode, [0; 6]);
            assert_eq!(is_sent.is_ok(), opcode & 3 != 3);
            assert!(is_sent.is_ok() || is_sent == Err(Error::NotSent { opcode }));
        }
    }

    #[test]
    fn features_that_the_driver_has_set_are_refused_by_type() {
        // The upper bits of the word are not the feature's.
        let set = |fid: u32| sent(admin::SET_FEATURES, [fid | 1 << 31, 0, 0, 0, 0, 0]);
        let owned: Vec<u32> = (0..=255).filter(|fid| set(*fid).is_err()).collect();
        assert_eq!(owned, [0x07, 0x0b, 0x0d, 0x0f, 0x16, 0x19]);
        assert!(matches!(set(7), Err(Error::OwnedByDriver { .. })));
        // Reading them is allowed.
        assert_eq!(sent(admin::GET_FEATURES, [7, 0, 0, 0, 0, 0]), Ok(()));
    }

    #[test]
    fn data_are_at_most_the_page_that_the_controller_gets() {
        let numd = |opcode, count: u32| sent(opcode, [count, 0, 0, 0, 0, 0]);
        let log =
            |count: u32| sent(admin::GET_LOG_PAGE, [count << 16 | 2, count >> 16, 0, 0, 0, 0]);
        assert_eq!((log(0), log(1023)), (Ok(()), Ok(())));
        assert_eq!(log(1024), Err(Error::DataLength { bytes: 4100 }));
        assert_eq!(log(1 << 16), Err(Error::DataLength { bytes: (1 << 18) + 4 }));
        assert_eq!(log(u32::MAX), Err(Error::DataLength { bytes: 1 << 34 }));
        for opcode in [0x11, 0x19, 0x1a] {
            assert_eq!(numd(opcode, 1023), Ok(()));
            assert_eq!(numd(opcode, 1024), Err(Error::DataLength { bytes: 4100 }));
        }
        for opcode in [0x81, 0x82] {
            let security = |bytes| sent(opcode, [0, bytes, 0, 0, 0, 0]);
            assert_eq!(security(4096), Ok(()));
            assert_eq!(security(4097), Err(Error::DataLength { bytes: 4097 }));
        }
        let status = |count| sent(admin::LBA_STATUS, [0, 0, count, 0, 0, 0]);
        assert_eq!(status(1023), Ok(()));
        assert_eq!(status(1024), Err(Error::DataLength { bytes: 4100 }));
    }

    #[test]
    fn commands_that_change_namespaces_have_them_identified_again() {
        let changing: Vec<u8> = (0..=u8::MAX)
            .filter(|opcode| {
                RawCommand { opcode: *opcode, ..RawCommand::default() }.changes_namespaces()
            })
            .collect();
        assert_eq!(changing, [0x0d, 0x15, 0x80, 0x84]);
    }
}
