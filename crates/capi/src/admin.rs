//! Admin commands of a program, to a controller that the library drives.

use crate::failure::{Failure, call, check_out, fail};
use crate::nvme::{NVMES, pf_nvme_t};
use crate::options::{Options, fill, read};
use pinfold_nvme::driver::{Error, Inquiry};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// An admin command, as the NVM Express specification numbers its words. Set `struct_size` to
/// its sizeof.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_nvme_command {
    /// sizeof(struct pf_nvme_command).
    pub struct_size: usize,
    /// 0x06: identify; 0x02: get log page, of at most 4096 bytes; 0x0a: get features.
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
    /// The library's: DW0 of the completion.
    pub result: u32,
    /// The library's: bits 31:17 of the completion's DW3; 0 where there is none.
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

/// Sends an admin command that only reads, and waits for its completion. The library's own memory
/// receives the data, which are copied: the controller reaches none of the program's. Other
/// commands would change what the library relies on: a driver of the program's own
/// (pf_device_open()) sends them.
///
/// @nvme: the controller.
/// @command: the command; `result` and `status` are stored there.
/// @data: where the first `len` bytes of its data are stored, zeroes after what the controller has
/// written; NULL if `len` is 0. After an error nothing is stored there.
/// @len: at most 4096.
///
/// Return: 0, or -errno: EIO (the controller refuses the command: its `status`; or has failed);
/// EINVAL (another command, a longer log page, `len`, `struct_size`); ETIMEDOUT (no completion:
/// nothing more is accepted); ENODEV (it is gone); E2BIG; EFAULT; EBADF.
/// Thread: any; one at a time waits. Since 0.2.
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
        let Ok(opcode) = u8::try_from(asked.opcode) else {
            return Err(fail!(EINVAL, "opcode {:#x}: it has 8 bits", asked.opcode));
        };
        let pf_nvme_command { nsid, cdw10, cdw11, cdw12, cdw13, cdw14, cdw15, .. } = asked;
        let cdw = [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15];
        if len > 4096 {
            return Err(fail!(EINVAL, "{len} bytes of data: a command has at most 4096"));
        }
        let answer = device.controller.inquire(&Inquiry { opcode, nsid, cdw });
        (asked.result, asked.status) = match &answer {
            Ok((_, result)) => (*result, 0),
            Err(Error::Admin { status, .. }) => (0, status.bits().into()),
            Err(_) => (0, 0),
        };
        // SAFETY: as the caller promises.
        unsafe { fill(command, &asked, "command") }?;
        let (answer, _) = answer.map_err(|error| Failure::from(&error))?;
        // SAFETY: `len` bytes, as the caller promises, and no more than the answer has.
        unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), data.cast(), len) };
        Ok(0)
    })
}
