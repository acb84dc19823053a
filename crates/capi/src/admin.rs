//! Commands of a program's own, to a controller that the library drives: admin commands here, I/O
//! commands in its queues.

use crate::failure::{Failure, call, check_out, fail};
use crate::nvme::{NVMES, pf_nvme_t};
use crate::options::{Options, fill, read};
use pinfold_nvme::driver::{DataDirection, Error, RawCommand};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// A command, as the NVM Express specification numbers its words: for pf_nvme_admin(), or of a
/// request (PF_COMMAND). Set `struct_size` to its sizeof.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_nvme_command {
    /// sizeof(struct pf_nvme_command).
    pub struct_size: usize,
    /// The opcode. Its lowest two bits are the direction of its data: 0: none; 1: to the
    /// controller; 2: from it.
    pub opcode: u32,
    /// The namespace; 0 or 0xffffffff where the command is not about one.
    pub nsid: u32,
    /// CDW10.
    pub cdw10: u32,
    /// CDW11.
    pub cdw11: u32,
    /// CDW12.
    pub cdw12: u32,
    /// CDW13.
    pub cdw13: u32,
    /// CDW14.
    pub cdw14: u32,
    /// CDW15.
    pub cdw15: u32,
    /// The library's: DW0 of the completion of an admin command.
    pub result: u32,
    /// The library's: bits 31:17 of DW3 of an admin command's completion; 0 where there is none.
    pub status: u32,
}

// SAFETY: a size and ten halves of words, without padding.
unsafe impl Options for pf_nvme_command {
    const DEFAULT: Self = Self {
        struct_size: 0,
        opcode: 0,
        nsid: 0,
        cdw10: 0,
        cdw11: 0,
        cdw12: 0,
        cdw13: 0,
        cdw14: 0,
        cdw15: 0,
        result: 0,
        status: 0,
    };
}

/// Sends an admin command, and waits for its completion, for at most a minute. Its data are copied
/// through a page of the library's: the controller reaches none of the program's memory.
///
/// Commands that change state on which the library relies are refused: its queues (create, delete),
/// aborts, event requests, doorbells, keep alive, virtualization, and "set features" of the number
/// of queues, of events, of the host memory buffer, of keep alive, of the host's behavior and of
/// the command set profile. After a command that changes namespaces (format, sanitize, management,
/// attachment) they are identified again, and queues refuse a namespace whose blocks have changed
/// (ESTALE). Opcodes of the standard that are newer than the library are refused, too; those of
/// vendors (from 0xc0) are sent, and must not move more than 4096 bytes.
///
/// @nvme: the controller.
/// @command: the command; `result` and `status` are stored there.
/// @data: the first `len` bytes of its data, with zeroes behind them; or where the first `len`
/// bytes are stored that the controller has written, zeroes after these. NULL if `len` is 0. After
/// an error nothing is stored there.
/// @len: at most 4096; 0 for a command without data.
///
/// Return: 0, or -errno: EIO (the controller refuses the command: its `status`; or has failed);
/// EACCES (it changes what the library relies on: the message says what); EINVAL (an unknown
/// opcode, more data than 4096 bytes, `len`, `struct_size`); ETIMEDOUT (no completion: nothing more
/// is accepted); ENODEV (it is gone); E2BIG; EFAULT; EBADF.
/// Thread: any; one at a time waits. May allocate small amounts: for events of the controller, and
/// 4096 bytes, and some 200 for each namespace, where namespaces are identified again. Since 0.2.
///
/// # Safety
/// `command` is null, or can be read and written for as many bytes as its first field says; `data`
/// is null or can be written for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_nvme_admin(
    nvme: *mut pf_nvme_t,
    command: *mut pf_nvme_command,
    data: *mut c_void,
    len: usize,
) -> c_int {
    call(|| {
        check_out(command, "command")?;
        if len > 0 {
            check_out(data, "data")?;
        }
        let device = Arc::clone(&NVMES.get(nvme)?.device);
        // SAFETY: as the caller promises.
        let mut asked = unsafe { read(command.cast_const()) }?;
        let raw = asked.raw(asked.nsid)?;
        let mut page = [0; PAGE];
        let Some(part) = page.get_mut(..len) else {
            return Err(fail!(EINVAL, "{len} bytes of data: a command has at most {PAGE}"));
        };
        let direction = raw.direction();
        if direction == DataDirection::None && len > 0 {
            return Err(fail!(EINVAL, "{len} bytes of data: opcode {:#x} has none", raw.opcode));
        }
        if direction == DataDirection::ToController {
            // SAFETY: `len` bytes, as the caller promises; the page is this call's, and as long.
            unsafe { std::ptr::copy_nonoverlapping(data.cast(), part.as_mut_ptr(), len) };
        }
        let answer = device.controller.admin(&raw, &mut page);
        (asked.result, asked.status) = match &answer {
            Ok(result) => (*result, 0),
            Err(Error::Admin { status, .. }) => (0, status.bits().into()),
            Err(_) => (0, 0),
        };
        // SAFETY: as the caller promises.
        unsafe { fill(command, &asked, "command") }?;
        answer.map_err(|error| Failure::from(&error))?;
        if direction == DataDirection::FromController {
            // SAFETY: `len` bytes, as the caller promises, and no more than the page has.
            unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), data.cast(), len) };
        }
        Ok(0)
    })
}

/// The most data of an admin command.
const PAGE: usize = 4096;

impl pf_nvme_command {
    /// Returns the command for the driver, for a namespace.
    ///
    /// # Errors
    /// `EINVAL`: the opcode has more than 8 bits.
    pub(crate) fn raw(&self, nsid: u32) -> Result<RawCommand, Failure> {
        let Ok(opcode) = u8::try_from(self.opcode) else {
            return Err(fail!(EINVAL, "opcode {:#x}: it has 8 bits", self.opcode));
        };
        let Self { cdw10, cdw11, cdw12, cdw13, cdw14, cdw15, .. } = *self;
        Ok(RawCommand { opcode, nsid, cdw: [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15] })
    }
}
