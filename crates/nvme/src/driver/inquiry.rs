//! [`Inquiry`]: an admin command of the program's own that only reads.

use super::error::Error;
use crate::spec::{Command, PAGE_BYTES, admin};
use zerocopy::little_endian::U32;

/// An admin command that asks a controller, for
/// [`Controller::inquire`](super::Controller::inquire).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Inquiry {
    /// Identify, Get Log Page or Get Features (see [`spec::admin`](crate::spec::admin)).
    pub opcode: u8,
    /// The namespace; 0 or `u32::MAX` where the command is not about one.
    pub nsid: u32,
    /// CDW10 to CDW15.
    pub cdw: [u32; 6],
}

impl Inquiry {
    /// Returns the command, without the address of its data, and its name.
    ///
    /// # Errors
    /// [`Error::NoInquiry`], [`Error::InquiryLength`].
    pub(super) fn command(&self) -> Result<(&'static str, Command), Error> {
        let Self { opcode, nsid, cdw } = *self;
        let what = match opcode {
            admin::IDENTIFY => "identify",
            admin::GET_LOG_PAGE => "get log page",
            admin::GET_FEATURES => "get features",
            _ => return Err(Error::NoInquiry { opcode }),
        };
        let [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15] = cdw;
        if opcode == admin::GET_LOG_PAGE {
            // NUMDL and NUMDU: a number of words, less 1.
            let words = u64::from(cdw10 >> 16 | cdw11 << 16) + 1;
            let bytes = words * 4;
            if bytes > PAGE_BYTES as u64 {
                return Err(Error::InquiryLength { bytes });
            }
        }
        let [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15] =
            [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15].map(U32::new);
        let nsid = U32::new(nsid);
        let command = Command::default();
        Ok((what, Command { opcode, nsid, cdw10, cdw11, cdw12, cdw13, cdw14, cdw15, ..command }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_command_is_sent_that_changes_anything() {
        let sent = |opcode| Inquiry { opcode, ..Inquiry::default() }.command().is_ok();
        let opcodes: Vec<u8> = (0..=u8::MAX).filter(|opcode| sent(*opcode)).collect();
        assert_eq!(opcodes, [admin::GET_LOG_PAGE, admin::IDENTIFY, admin::GET_FEATURES]);
    }

    #[test]
    fn a_log_page_is_at_most_the_page_that_receives_it() {
        let log = |numd: u32| {
            let cdw = [numd << 16 | 2, numd >> 16, 0, 0, 0, 0];
            Inquiry { opcode: admin::GET_LOG_PAGE, nsid: 0, cdw }.command().map(drop)
        };
        assert_eq!((log(0), log(1023)), (Ok(()), Ok(())));
        assert_eq!(log(1024), Err(Error::InquiryLength { bytes: 4100 }));
        assert_eq!(log(1 << 16), Err(Error::InquiryLength { bytes: (1 << 18) + 4 }));
        assert_eq!(log(u32::MAX), Err(Error::InquiryLength { bytes: 1 << 34 }));
    }
}
