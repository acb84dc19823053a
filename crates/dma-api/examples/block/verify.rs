//! Verifies a disk.

use super::block::{Blocks, Result, WaitIrq};
use rdif_block::BlkError;

/// The part of the disk that is written.
pub(crate) const BYTES: usize = 4 << 20;

/// Writes the start of the disk and reads it back; returns whether it is the same.
pub(crate) fn verify(disk: &mut impl Blocks, wait: &mut WaitIrq) -> Result<bool> {
    let (blocks, block_bytes) = disk.size();
    let most = disk.max_bytes();
    println!("{blocks} blocks of {block_bytes} bytes, requests of up to {most}");
    let (data, mut back) = (data(), vec![0; BYTES]);
    // One block, one page and a block, three pages: PRP 1, PRP 2, and a list.
    let sizes = [block_bytes, 4096 + block_bytes, 3 * 4096, 256 << 10];
    let pieces = || {
        let mut at = 0;
        sizes.into_iter().cycle().map_while(move |size| {
            let from = at;
            at = (from + size.min(most) / block_bytes * block_bytes).min(BYTES);
            (from < BYTES).then_some(from..at)
        })
    };
    for piece in pieces() {
        let lba = (piece.start / block_bytes) as u64;
        let piece = data.get(piece).unwrap_or_default();
        retried(|| disk.write(lba, piece, wait))?;
    }
    retried(|| disk.flush(wait))?;
    for piece in pieces() {
        let lba = (piece.start / block_bytes) as u64;
        let piece = back.get_mut(piece).unwrap_or_default();
        retried(|| disk.read(lba, piece, wait))?;
    }
    Ok(back == data)
}

/// Repeats a request that failed: the driver does not, and its error does not tell whether that can
/// help.
fn retried(mut request: impl FnMut() -> Result<()>) -> Result<()> {
    let mut result = request();
    for _ in 0..16 {
        match &result {
            Err(error) if error.downcast_ref() == Some(&BlkError::Io) => result = request(),
            _ => break,
        }
    }
    result
}

/// Returns the bytes that are written.
pub(crate) fn data() -> Vec<u8> {
    let words = (1u32..).map(|word| word.wrapping_mul(0x9e37_79b1));
    words.flat_map(u32::to_le_bytes).take(BYTES).collect()
}
