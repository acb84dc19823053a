//! Serves the disk's requests (virtio 1.2 section 5.2.6).

use super::SECTOR;
use super::queue::Piece;
use pinfold::soft::{Fault, Port};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const ID: [u8; 20] = *b"pinfold-model-disk\0\0";

/// Serves a chain of a header, data, and a status byte; returns how many bytes were written.
pub(super) fn serve(port: &Port, media: &mut [u8], chain: &[Piece], short: usize) -> u32 {
    let Some((status, rest)) = chain.split_last() else { return 0 };
    let Some((header, data)) = rest.split_first() else { return 0 };
    let (outcome, written) = match serve_data(port, media, header, data, short) {
        Ok(outcome) => outcome,
        Err(_) => (IO_ERROR, 0),
    };
    // If even the status cannot be written, the failure cannot be reported.
    written + u32::from(port.write(status.iova, &[outcome]).is_ok())
}

fn serve_data(
    port: &Port,
    media: &mut [u8],
    header: &Piece,
    data: &[Piece],
    short: usize,
) -> Result<(u8, u32), Fault> {
    let mut bytes = [0; 16];
    port.read(header.iova, &mut bytes)?;
    let [a, b, c, d, _, _, _, _, sector @ ..] = bytes;
    let sector = usize::try_from(u64::from_le_bytes(sector)).unwrap_or(usize::MAX);
    let kind = u32::from_le_bytes([a, b, c, d]);
    let start = sector.saturating_mul(SECTOR);
    let mut at = start;
    match kind {
        IN | OUT => {
            for piece in data {
                let end = at.saturating_add(piece.len as usize);
                let Some(part) = media.get_mut(at..end) else { return Ok((IO_ERROR, 0)) };
                if kind == OUT {
                    port.read(piece.iova, part)?;
                } else {
                    let sent = part.len().saturating_sub(short);
                    port.write(piece.iova, part.get(..sent).unwrap_or_default())?;
                }
                at = end;
            }
            let moved = u32::try_from(at - start).unwrap_or(u32::MAX);
            Ok((OK, if kind == IN { moved } else { 0 }))
        }
        FLUSH => Ok((OK, 0)),
        GET_ID => {
            let Some(piece) = data.first() else { return Ok((IO_ERROR, 0)) };
            let n = ID.len().min(piece.len as usize);
            port.write(piece.iova, ID.get(..n).unwrap_or_default())?;
            Ok((OK, u32::try_from(n).unwrap_or(0)))
        }
        _ => Ok((UNSUPPORTED, 0)),
    }
}
