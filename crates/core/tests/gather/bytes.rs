//! Registered buffers, gathered, against a list of single bytes.

use crate::controller::{seg, walk_prps, walk_sgl};
use crate::pages::Pages;
use pinfold_core::addr::Segment;
use pinfold_core::folio::Folios;
use pinfold_core::gather::Profile;
use pinfold_core::gather::prp::{ControllerPage, Prps};
use pinfold_core::gather::sgl::Sgl;
use proptest::prelude::*;

fn bytes(segments: &[Segment]) -> Vec<u64> {
    segments.iter().flat_map(|s| s.iova.raw()..s.iova.raw() + s.len).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_part_of_a_buffer_is_gathered_byte_by_byte(
        places in prop::collection::vec((0u64..64, any::<bool>()), 1..24),
        head in 0u64..4096, tail in 0u64..4096,
        parts in prop::collection::vec((0.0..1.0, 0.0..1.0), 1..20),
        longest in 1u64..20_000, boundary in 0u32..17,
    ) {
        // Pages anywhere, some of them beside the one before; the buffer begins and ends within its
        // first and last.
        let mut pages: Vec<u64> = Vec::new();
        for (place, beside) in places {
            let next = pages.last().map(|last| last + 4096).filter(|_| beside);
            pages.push(next.unwrap_or(place << 12));
        }
        let whole = pages.len() as u64 * 4096;
        let tail = tail.min(whole - head - 1);
        let addr = 0x7000_0000 + usize::try_from(head).unwrap();
        let page_segments: Vec<Segment> = pages.iter().map(|&page| seg(page, 4096)).collect();
        let mut pieces = page_segments.clone();
        let first = pieces.first_mut().unwrap();
        *first = seg(first.iova.raw() + head, first.len - head);
        // The whole has at least a byte, and `tail` is less than a page.
        pieces.last_mut().unwrap().len -= tail;
        let buffer = Folios::from_segments(addr, pieces).unwrap();
        let model = bytes(&page_segments)[usize::try_from(head).unwrap()..usize::try_from(whole - tail).unwrap()].to_vec();

        let boundary = if boundary == 0 { 0 } else { 1 << boundary };
        let profile = Profile::new(u32::MAX, longest, boundary, 1).unwrap();
        let pool = Pages::new(4096, 64);
        for (from, to) in parts {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the buffer")]
            let at = |share: f64| (share * model.len() as f64) as usize;
            let (from, to) = (at(f64::min(from, to)), at(f64::max(from, to)) + 1);
            let expected = &model[from..to];
            let (offset, len) = (from as u64, (to - from) as u64);
            let cut: Vec<Segment> =
                profile.gather(buffer.segments(offset, len).unwrap()).map(Result::unwrap).collect();
            prop_assert_eq!(bytes(&cut), expected);
            for piece in &cut {
                prop_assert!(piece.len <= longest);
                let last = piece.iova.raw() + piece.len - 1;
                prop_assert!(boundary == 0 || piece.iova.raw() / boundary == last / boundary);
            }
            if longest > 200 && (boundary == 0 || boundary > 200) {
                let sgl: Sgl<_, 64> = Sgl::new(&profile, buffer.segments(offset, len).unwrap(), &mut &pool).unwrap();
                prop_assert_eq!(walk_sgl(sgl.sgl1().words(), |at| pool.read(at)).0, cut);
                sgl.release(&mut &pool);
            }
            // The pages are the controller's own, so only the first byte can be misaligned.
            let page = ControllerPage::SIZE_4K;
            let prps: Result<Prps<_>, _> = Prps::new(page, buffer.segments(offset, len).unwrap(), &mut &pool);
            prop_assert_eq!(prps.is_ok(), expected[0].is_multiple_of(4));
            if let Ok(prps) = prps {
                let walked = walk_prps(4096, prps.prp1(), prps.prp2(), len, |at| pool.read(at)).0;
                prop_assert_eq!(bytes(&walked), expected);
                prps.release(&mut &pool);
            }
        }
        // Every byte by itself.
        for (offset, &expected) in model.iter().enumerate().step_by(97) {
            prop_assert_eq!(buffer.locate(offset as u64).unwrap().iova.raw(), expected);
        }
    }
}
