//! What is stored of a packet: a slot of 4096 bytes, in which the packet lies where it was
//! received.

use pinfold_core::domain::Pinned;
use pinfold_core::mem::AccessError;
use pinfold_xdp::PacketPage;
use std::time::Duration;

/// The distance of two slots in bytes: a page.
pub(crate) const SLOT: u64 = 4096;
/// Bytes of the header.
const HEADER: usize = 40;
/// What a slot begins with. One that does not holds no packet.
const MAGIC: [u8; 8] = *b"PINFOLD1";

/// Returns whether there is room for a header in front of the packet. The kernel reserves 256 bytes
/// there.
pub(crate) fn has_room(page: &PacketPage) -> bool {
    page.offset() >= HEADER
}

/// Completes the page as slot `number` of the run that began at `run`: the header, and zeroes for
/// everything up to the end of the packet's last block of `block` bytes that is not the packet.
/// Returns how many bytes are to be written.
///
/// # Errors
/// [`AccessError`] if there is no room for the header.
pub(crate) fn complete(
    page: &PacketPage,
    number: u64,
    received: Duration,
    run: Duration,
    block: usize,
) -> Result<usize, AccessError> {
    let (memory, offset, len) = (page.memory(), page.offset(), page.len());
    let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    let nanoseconds =
        |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_le_bytes();
    let mut header = [0; HEADER];
    let fields = [MAGIC, number.to_le_bytes(), nanoseconds(received)].into_iter().flatten();
    let fields = fields.chain(word(offset)).chain(word(len)).chain(nanoseconds(run));
    header.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
    let end = offset.saturating_add(len);
    let bytes = end.next_multiple_of(block).min(memory.len());
    memory.copy_from_slice(0, &header)?;
    // What an earlier packet left in the page is not stored with this one.
    memory.fill(HEADER, offset.saturating_sub(HEADER), 0)?;
    memory.fill(end, bytes.saturating_sub(end), 0)?;
    Ok(bytes)
}
