//! The buffers that runtimes registered, and copies that name them by address.

use mqueue::command::{BufferRange, Copy, Direction};

use super::COMMANDS_IN_FLIGHT;
use super::address_map::{AddressMap, RegisterError, TranslateError};

/// Bytes to copy between the region's staging and memory of the accelerator that is named by its address there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressCopy {
    /// The direction.
    pub direction: Direction,
    /// Offset in the staging.
    pub staging_offset: u64,
    /// Accelerator virtual address. The range may go through several buffers of the same ring.
    pub address: u64,
    /// How many; like the offset and the address a multiple of 8, and at least 8.
    pub bytes: u64,
}

/// Why a copy by address is refused. Nothing was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The address range cannot be translated.
    #[error(transparent)]
    Address(#[from] TranslateError),
    /// The copy does not stay in the staging.
    #[error("the copy does not stay in the staging")]
    Staging,
    /// An offset, the address or the size is not a multiple of 8.
    #[error("offset, address and size of a copy are multiples of 8")]
    Unaligned,
    /// The range goes through more buffers than commands can be in flight.
    #[error("the range goes through more than {COMMANDS_IN_FLIGHT} buffers")]
    TooManyBuffers,
}

impl Refused {
    /// How many there are.
    pub const COUNT: usize = TranslateError::ALL.len() + 3;

    /// All of them, in the order of [`Self::index`].
    pub fn all() -> impl Iterator<Item = Self> {
        let own = [Self::Staging, Self::Unaligned, Self::TooManyBuffers];
        TranslateError::ALL.map(Self::Address).into_iter().chain(own)
    }

    /// Its place in [`Self::all`].
    pub fn index(self) -> usize {
        Self::all().position(|other| other == self).expect("all are listed")
    }

    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Address(error) => error.name(),
            Self::Staging => "beyond_staging",
            Self::Unaligned => "unaligned",
            Self::TooManyBuffers => "too_many_buffers",
        }
    }
}

/// Buffers by address and by the runtime's numbers. Each command ring owns those that were described through it.
#[derive(Default)]
pub struct Buffers {
    map: AddressMap,
    /// By number in the map: the runtime's number.
    numbers: Vec<u32>,
}

impl Buffers {
    /// Registers the buffer `number` of the runtime behind `ring`; it replaces an earlier one of that number.
    pub fn register(
        &mut self,
        ring: u32,
        number: u32,
        range: BufferRange,
    ) -> Result<(), RegisterError> {
        if let Some(earlier) = self.position(ring, number) {
            self.map.unregister(ring, earlier);
        }
        let position = self.map.register(ring, range.address, range.bytes)? as usize;
        if self.numbers.len() <= position {
            self.numbers.resize(position + 1, 0);
        }
        self.numbers[position] = number;
        Ok(())
    }

    /// Where the buffer `number` of the runtime behind `ring` is.
    pub fn range(&self, ring: u32, number: u32) -> Option<BufferRange> {
        let buffer = self.map.buffer(self.position(ring, number)?)?;
        Some(BufferRange { address: buffer.address, bytes: buffer.bytes })
    }

    fn position(&self, ring: u32, number: u32) -> Option<u32> {
        let is_it = |position: &u32| {
            self.numbers[*position as usize] == number
                && self.map.buffer(*position).is_some_and(|buffer| buffer.owner == ring)
        };
        (0..self.numbers.len() as u32).find(is_it)
    }

    /// The copies of which a copy by address consists, each within one buffer. All of it was checked.
    pub fn copies(
        &self,
        ring: u32,
        staging_bytes: u64,
        copy: &AddressCopy,
    ) -> Result<impl Iterator<Item = Copy>, Refused> {
        let AddressCopy { direction, mut staging_offset, address, bytes } = *copy;
        let runs = || self.map.translate(ring, address, bytes);
        let count = runs()?.take(COMMANDS_IN_FLIGHT as usize + 1).count();
        if staging_offset.checked_add(bytes).is_none_or(|end| end > staging_bytes) {
            return Err(Refused::Staging);
        }
        if (staging_offset | address | bytes) % 8 != 0 {
            return Err(Refused::Unaligned);
        }
        if count > COMMANDS_IN_FLIGHT as usize {
            return Err(Refused::TooManyBuffers);
        }
        Ok(runs()?.map(move |run| {
            let (buffer, near) = (self.numbers[run.buffer as usize], staging_offset);
            staging_offset += run.bytes;
            Copy {
                direction,
                staging_offset: near,
                buffer,
                buffer_offset: run.offset,
                bytes: run.bytes,
            }
        }))
    }
}
