//! The export that is served, the features that a client has negotiated, and checks of requests.

use crate::protocol::{CommandFlags, ErrorNumber, MAX_STRING, TransmissionFlags};
use crate::request::{Command, Operation, Request, RequestHeader};

/// The sizes of requests: "Block size constraints".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this power of two.
    pub minimum: u32,
    /// Requests that are multiples of this power of two are fast.
    pub preferred: u32,
    /// The longest payload.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// Returns the constraints of a server that names none: 1, 4096 and 32 MiB.
    fn default() -> Self {
        Self { minimum: 1, preferred: 4096, maximum: 32 << 20 }
    }
}

/// The export that is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) size: u64,
    pub(crate) flags: TransmissionFlags,
    pub(crate) blocks: BlockSizes,
}

impl Export {
    /// Creates an export of `size` bytes with the default [`BlockSizes`]. Clients that name no
    /// export get it, too ("the default export"). A name longer than 4096 bytes, which no client
    /// could ask for, is cut.
    pub fn new(name: &str, size: u64, flags: TransmissionFlags) -> Self {
        Self {
            name: cut(name),
            description: String::new(),
            size,
            flags: flags | TransmissionFlags::HAS_FLAGS,
            blocks: BlockSizes::default(),
        }
    }

    /// Sets the description for people, cut at 4096 bytes.
    #[must_use]
    pub fn description(mut self, description: &str) -> Self {
        self.description = cut(description);
        self
    }

    /// Sets the sizes of requests; the export's size is rounded down to the minimum.
    #[must_use]
    pub fn block_sizes(mut self, blocks: BlockSizes) -> Self {
        let minimum = blocks.minimum.max(1);
        self.size -= self.size % u64::from(minimum);
        self.blocks = BlockSizes { minimum, ..blocks };
        self
    }

    /// Returns the sizes of requests.
    pub fn sizes(&self) -> BlockSizes {
        self.blocks
    }

    /// Returns the number of bytes served.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Checks a request: its flags, its range, and what the session has negotiated.
    ///
    /// # Errors
    /// The error to reply with; a payload still follows then. An unknown command is
    /// [`ErrorNumber::Invalid`] ("Request types").
    pub fn check(&self, session: &Session, header: &RequestHeader) -> Result<Request, ErrorNumber> {
        let RequestHeader { flags, command, cookie, offset, length } = *header;
        let has = |flag| flags.contains(flag);
        let (operation, allowed) = match command {
            Command::READ => {
                let df = if session.structured { CommandFlags::DF } else { CommandFlags::empty() };
                (Operation::Read, df)
            }
            Command::WRITE => (Operation::Write, CommandFlags::empty()),
            Command::DISCONNECT => (Operation::Disconnect, CommandFlags::all()),
            Command::FLUSH => (Operation::Flush, CommandFlags::empty()),
            Command::TRIM => (Operation::Trim, CommandFlags::empty()),
            Command::WRITE_ZEROES => {
                let may_trim = !has(CommandFlags::NO_HOLE);
                (Operation::WriteZeroes { may_trim }, CommandFlags::NO_HOLE)
            }
            Command::BLOCK_STATUS if session.base_allocation => {
                (Operation::BlockStatus { one: has(CommandFlags::REQ_ONE) }, CommandFlags::REQ_ONE)
            }
            _ => return Err(ErrorNumber::Invalid),
        };
        let writes =
            matches!(operation, Operation::Write | Operation::Trim | Operation::WriteZeroes { .. });
        if writes && self.flags.contains(TransmissionFlags::READ_ONLY) {
            return Err(ErrorNumber::NotPermitted);
        }
        let needed = match operation {
            Operation::Flush => TransmissionFlags::SEND_FLUSH,
            Operation::Trim => TransmissionFlags::SEND_TRIM,
            Operation::WriteZeroes { .. } => TransmissionFlags::SEND_WRITE_ZEROES,
            _ => TransmissionFlags::empty(),
        };
        // FUA is valid for every command ("Command flags"), and has no effect on those that write
        // nothing.
        let fua = has(CommandFlags::FUA);
        let may_fua = !fua || self.flags.contains(TransmissionFlags::SEND_FUA);
        if !(allowed | CommandFlags::FUA).contains(flags)
            || !self.flags.contains(needed)
            || !may_fua
        {
            return Err(ErrorNumber::Invalid);
        }
        let request =
            Request { operation, fua, whole: has(CommandFlags::DF), cookie, offset, length };
        match operation {
            // Neither has a range; their fields are any numbers of the client's.
            Operation::Disconnect | Operation::Flush => {
                Ok(Request { offset: 0, length: 0, ..request })
            }
            _ => self.check_range(request),
        }
    }

    fn check_range(&self, request: Request) -> Result<Request, ErrorNumber> {
        let Request { operation, offset, length, .. } = request;
        if offset.checked_add(length.into()).is_none_or(|end| end > self.size) {
            let grows = matches!(operation, Operation::Write | Operation::WriteZeroes { .. });
            return Err(if grows { ErrorNumber::NoSpace } else { ErrorNumber::Invalid });
        }
        let unit = u64::from(self.blocks.minimum);
        let aligned = offset.is_multiple_of(unit) && u64::from(length).is_multiple_of(unit);
        let moves = matches!(operation, Operation::Read | Operation::Write);
        let too_long = moves && length > self.blocks.maximum;
        let empty_status = length == 0 && matches!(operation, Operation::BlockStatus { .. });
        if !aligned || too_long || empty_status { Err(ErrorNumber::Invalid) } else { Ok(request) }
    }
}

fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_STRING);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().to_owned()
}

/// The features that a client has negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Session {
    /// Replies are structured.
    pub structured: bool,
    /// `NBD_CMD_BLOCK_STATUS` reports `base:allocation`.
    pub base_allocation: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: TransmissionFlags = TransmissionFlags::all();

    fn header(command: Command, offset: u64, length: u32, flags: CommandFlags) -> RequestHeader {
        RequestHeader { command, offset, length, flags, cookie: 1 }
    }

    #[test]
    fn ranges_and_flags_are_checked() {
        let writable = Export::new("", 8192, ALL - TransmissionFlags::READ_ONLY);
        let all = Session { structured: true, base_allocation: true };
        let none = CommandFlags::empty();
        let check = |command, offset, length, flags| {
            let checked = writable.check(&all, &header(command, offset, length, flags));
            checked.map(|request| request.operation)
        };
        assert_eq!(check(Command::READ, 0, 8192, none), Ok(Operation::Read));
        assert_eq!(check(Command::READ, 0, 8192, CommandFlags::DF), Ok(Operation::Read));
        assert_eq!(check(Command::READ, 1, 8192, none), Err(ErrorNumber::Invalid));
        assert_eq!(check(Command::READ, u64::MAX, 2, none), Err(ErrorNumber::Invalid));
        assert_eq!(check(Command::WRITE, 8192, 1, none), Err(ErrorNumber::NoSpace));
        assert_eq!(check(Command::WRITE, 8192, 0, none), Ok(Operation::Write));
        assert_eq!(check(Command::WRITE, 0, 1, CommandFlags::DF), Err(ErrorNumber::Invalid));
        assert_eq!(check(Command::TRIM, 4096, 4097, none), Err(ErrorNumber::Invalid));
        assert_eq!(check(Command::WRITE_ZEROES, 0, 8193, none), Err(ErrorNumber::NoSpace));
        assert_eq!(
            check(Command::WRITE_ZEROES, 0, 1, CommandFlags::FAST_ZERO),
            Err(ErrorNumber::Invalid)
        );
        let zeroes = Operation::WriteZeroes { may_trim: false };
        assert_eq!(check(Command::WRITE_ZEROES, 0, 1, CommandFlags::NO_HOLE), Ok(zeroes));
        assert_eq!(check(Command::BLOCK_STATUS, 0, 0, none), Err(ErrorNumber::Invalid));
        let one = Operation::BlockStatus { one: true };
        assert_eq!(check(Command::BLOCK_STATUS, 0, 1, CommandFlags::REQ_ONE), Ok(one));
        assert_eq!(check(Command::FLUSH, 1 << 40, 9, CommandFlags::FUA), Ok(Operation::Flush));
        for unknown in [5, 8, 9, u16::MAX] {
            assert_eq!(check(Command(unknown), 0, 1, none), Err(ErrorNumber::Invalid));
        }
        assert_eq!(
            check(Command::READ, 0, 1, CommandFlags::from_bits_retain(1 << 9)),
            Err(ErrorNumber::Invalid)
        );
    }

    #[test]
    fn an_accepted_request_has_a_range_inside_the_export() {
        let export = Export::new("", 8192, ALL - TransmissionFlags::READ_ONLY);
        let all = Session { structured: true, base_allocation: true };
        for command in (0..=Command::BLOCK_STATUS.0).map(Command) {
            for (offset, length) in
                [(u64::MAX, u32::MAX), (u64::MAX, 0), (8193, 0), (8192, 1), (1 << 63, 512)]
            {
                let checked =
                    export.check(&all, &header(command, offset, length, CommandFlags::empty()));
                let range = checked.map(|request| (request.offset, request.length));
                assert!(range.is_err() || range == Ok((0, 0)), "{command:?}: {range:?}");
            }
        }
    }

    #[test]
    fn commands_not_negotiated_are_refused() {
        let read_only = Export::new("", 8192, ALL);
        let plain = Session::default();
        let check =
            |command, flags| read_only.check(&plain, &header(command, 0, 512, flags)).unwrap_err();
        assert_eq!(check(Command::WRITE, CommandFlags::empty()), ErrorNumber::NotPermitted);
        assert_eq!(check(Command::TRIM, CommandFlags::FUA), ErrorNumber::NotPermitted);
        assert_eq!(check(Command::READ, CommandFlags::DF), ErrorNumber::Invalid);
        assert_eq!(check(Command::BLOCK_STATUS, CommandFlags::empty()), ErrorNumber::Invalid);
        let bare = Export::new("", 8192, TransmissionFlags::empty());
        let check =
            |command, flags| bare.check(&plain, &header(command, 0, 512, flags)).unwrap_err();
        assert_eq!(check(Command::FLUSH, CommandFlags::empty()), ErrorNumber::Invalid);
        assert_eq!(check(Command::TRIM, CommandFlags::empty()), ErrorNumber::Invalid);
        assert_eq!(check(Command::WRITE, CommandFlags::FUA), ErrorNumber::Invalid);
    }

    #[test]
    fn block_sizes_bind_and_round_the_size() {
        let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum: 4096 };
        let export = Export::new("", 10_000, TransmissionFlags::empty()).block_sizes(blocks);
        assert_eq!(export.size(), 9728);
        let check = |offset, length| {
            let header = header(Command::READ, offset, length, CommandFlags::empty());
            export.check(&Session::default(), &header).is_ok()
        };
        assert!(check(512, 4096) && !check(1, 512) && !check(0, 511) && !check(0, 4608));
    }

    #[test]
    fn long_strings_are_cut_between_characters() {
        let name = "é".repeat(3000);
        assert_eq!(Export::new(&name, 0, TransmissionFlags::empty()).name.len(), 4096);
        assert_eq!(cut(&format!("x{name}")).len(), 4095);
    }
}
