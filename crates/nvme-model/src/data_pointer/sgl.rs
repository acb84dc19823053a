//! Scatter/gather lists (Base 4.1.2).

use crate::bus::Bus;
use crate::data_pointer::Runs;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{SglDescriptor, Status};
use zerocopy::FromBytes;

/// Most descriptors of one command, which also bounds a chain of segments without end.
const MAX_DESCRIPTORS: u64 = 1 << 16;

/// Appends the runs of exactly `len` bytes that the descriptor `first` describes, directly or by
/// segments. Addresses and lengths of data blocks are multiples of `align`. `page` is scratch
/// space.
pub(super) fn resolve(
    bus: &impl Bus,
    first: SglDescriptor,
    len: usize,
    align: u64,
    page: &mut [u8],
    runs: &mut Runs,
) -> Result<(), Status> {
    let mut left = len as u64;
    let mut data_block = |descriptor: &SglDescriptor| {
        let (address, len) = (descriptor.address.get(), u64::from(descriptor.length.get()));
        if (address | len) & (align - 1) != 0 {
            return Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
        }
        left = left.checked_sub(len).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        match usize::try_from(len) {
            Ok(0) => Ok(()),
            Ok(len) => runs.push(address, len),
            Err(_) => Err(Status::DATA_SGL_LENGTH_INVALID),
        }
    };
    let mut descriptors = 0;
    let mut segment = match first.kind {
        SglDescriptor::DATA_BLOCK => {
            data_block(&first)?;
            None
        }
        _ => Some(first),
    };
    while let Some(SglDescriptor { address, length, kind, .. }) = segment.take() {
        let is_last = match kind {
            SglDescriptor::SEGMENT => false,
            SglDescriptor::LAST_SEGMENT => true,
            _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        };
        let bytes = u64::from(length.get());
        if bytes == 0 || !bytes.is_multiple_of(SglDescriptor::BYTES as u64) {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
        }
        descriptors += bytes / SglDescriptor::BYTES as u64;
        if descriptors > MAX_DESCRIPTORS {
            return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT);
        }
        let mut at = 0;
        while at < bytes {
            let piece = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(page.len());
            let part = page.get_mut(..piece).ok_or(Status::INTERNAL_ERROR)?;
            let from = address.get().checked_add(at).ok_or(Status::DATA_TRANSFER_ERROR)?;
            bus.read(Iova::new(from), part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            for bytes_of_one in part.chunks_exact(SglDescriptor::BYTES) {
                at += SglDescriptor::BYTES as u64;
                let descriptor = SglDescriptor::read_from_bytes(bytes_of_one)
                    .map_err(|_| Status::INTERNAL_ERROR)?;
                match descriptor.kind {
                    SglDescriptor::DATA_BLOCK => data_block(&descriptor)?,
                    SglDescriptor::SEGMENT | SglDescriptor::LAST_SEGMENT
                        if !is_last && at == bytes =>
                    {
                        segment = Some(descriptor);
                    }
                    SglDescriptor::SEGMENT | SglDescriptor::LAST_SEGMENT => {
                        return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
                    }
                    _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
                }
            }
        }
        if !is_last && segment.is_none() {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
        }
    }
    if left == 0 { Ok(()) } else { Err(Status::DATA_SGL_LENGTH_INVALID) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::BusFault;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;
    use zerocopy::little_endian::{U32, U64};

    /// Memory that begins at address 0 and repeats without end.
    struct Memory(Vec<u8>);

    impl Bus for Memory {
        fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
            let len = self.0.len();
            let start = usize::try_from(iova.raw() % len as u64).unwrap();
            for (i, to) in to.iter_mut().enumerate() {
                *to = self.0[(start + i) % len];
            }
            Ok(())
        }
        fn write(&self, _: Iova, _: &[u8]) -> Result<(), BusFault> {
            Ok(())
        }
        fn write_u32_release(&self, _: Iova, _: u32) -> Result<(), BusFault> {
            Ok(())
        }
    }

    fn descriptor(kind: u8, address: u64, length: u32) -> SglDescriptor {
        SglDescriptor {
            address: U64::new(address),
            length: U32::new(length),
            reserved: [0; 3],
            kind,
        }
    }
    const DATA: u8 = SglDescriptor::DATA_BLOCK;
    const SEGMENT: u8 = SglDescriptor::SEGMENT;
    const LAST: u8 = SglDescriptor::LAST_SEGMENT;

    fn runs(
        memory: &[SglDescriptor],
        first: SglDescriptor,
        len: usize,
        align: u64,
    ) -> Result<Vec<(u64, usize)>, Status> {
        let mut runs = Runs::default();
        resolve(&Memory(memory.as_bytes().to_vec()), first, len, align, &mut [0; 4096], &mut runs)?;
        Ok(runs.iter().map(|run| (run.iova.raw(), run.len)).collect())
    }

    #[test]
    fn one_data_block_needs_no_segment() {
        assert_eq!(runs(&[], descriptor(DATA, 0x1234, 700), 700, 1), Ok(vec![(0x1234, 700)]));
        for len in [699, 701] {
            assert_eq!(
                runs(&[], descriptor(DATA, 0x1234, 700), len, 1),
                Err(Status::DATA_SGL_LENGTH_INVALID)
            );
        }
        let misaligned = Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
        assert_eq!(runs(&[], descriptor(DATA, 0x1232, 700), 700, 4), misaligned);
        assert_eq!(runs(&[], descriptor(DATA, 0x1234, 702), 702, 4), misaligned);
        assert_eq!(
            runs(&[], descriptor(DATA, u64::MAX, 2), 2, 1),
            Err(Status::DATA_TRANSFER_ERROR)
        );
        assert_eq!(
            runs(&[], descriptor(0x10, 0, 2), 2, 1),
            Err(Status::SGL_DESCRIPTOR_TYPE_INVALID)
        );
    }

    #[test]
    fn segments_are_followed_to_the_last() {
        let memory = [
            descriptor(DATA, 0x1000, 100),
            descriptor(SEGMENT, 32, 32),
            descriptor(DATA, 0x9000, 0),
            descriptor(LAST, 64, 32),
            descriptor(DATA, 0x2000, 50),
            descriptor(DATA, 0x2032, 50),
        ];
        let first = descriptor(SEGMENT, 0, 32);
        assert_eq!(runs(&memory, first, 200, 1), Ok(vec![(0x1000, 100), (0x2000, 100)]));
        assert_eq!(runs(&memory, first, 201, 1), Err(Status::DATA_SGL_LENGTH_INVALID));
        let wrong = Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
        // A link in the middle, a link in the last segment, a segment without a link, odd and empty
        // lengths.
        assert_eq!(runs(&memory, descriptor(SEGMENT, 16, 32), 200, 1), wrong);
        assert_eq!(runs(&memory, descriptor(LAST, 0, 32), 200, 1), wrong);
        assert_eq!(runs(&memory, descriptor(SEGMENT, 64, 32), 100, 1), wrong);
        assert_eq!(runs(&memory, descriptor(LAST, 64, 31), 100, 1), wrong);
        assert_eq!(runs(&memory, descriptor(LAST, 64, 0), 100, 1), wrong);
    }

    #[test]
    fn a_chain_without_end_is_an_error() {
        let memory = [descriptor(DATA, 0, 0), descriptor(SEGMENT, 0, 32)];
        let first = descriptor(SEGMENT, 0, 32);
        assert_eq!(runs(&memory, first, 1, 1), Err(Status::INVALID_SGL_DESCRIPTOR_COUNT));
        assert_eq!(
            runs(&memory, descriptor(LAST, 0, u32::MAX - 15), 1, 1),
            Err(Status::INVALID_SGL_DESCRIPTOR_COUNT)
        );
    }

    fn any_descriptor() -> impl Strategy<Value = SglDescriptor> {
        let kind =
            prop_oneof![4 => Just(DATA), 2 => Just(SEGMENT), 2 => Just(LAST), 1 => any::<u8>()];
        let address = prop_oneof![3 => (0u64..32).prop_map(|i| i * 16), 1 => any::<u64>()];
        let length =
            prop_oneof![3 => (0u32..8).prop_map(|i| i * 16), 1 => 0u32..5000, 1 => any::<u32>()];
        (kind, address, length)
            .prop_map(|(kind, address, length)| descriptor(kind, address, length))
    }

    proptest! {
        /// Resolving ends for any descriptors, and accepts exactly `len` bytes.
        #[test]
        fn lying_sizes_are_errors(
            memory in proptest::collection::vec(any_descriptor(), 1..32),
            first in any_descriptor(),
            len in prop_oneof![0usize..300, 0usize..(8 << 20)],
            align in prop_oneof![Just(1u64), Just(4)],
        ) {
            if let Ok(runs) = runs(&memory, first, len, align) {
                prop_assert_eq!(runs.iter().map(|run| run.1).sum::<usize>(), len);
                prop_assert!(runs.iter().all(|run| run.0.checked_add(run.1 as u64).is_some()));
            }
        }
    }
}
