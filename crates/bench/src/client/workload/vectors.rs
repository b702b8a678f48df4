//! Vectors of numbers for the kernel `scale`.

use super::Workload;

/// Low and high part of a request's number: integers of this many bits, whose triple is exact.
const PART_BITS: u32 = 20;
const PART_MASK: u64 = (1 << PART_BITS) - 1;

/// Vectors of numbers; the correct reply is three times each. The first two identify the request.
#[derive(Clone, Copy, Debug)]
pub struct Vectors {
    numbers: usize,
}

impl Vectors {
    /// Default number of numbers in a message.
    pub const NUMBERS: usize = 64;

    /// Vectors of this many numbers.
    pub fn new(numbers: usize) -> Self {
        Self { numbers }
    }

    fn numbers(self, index: u64) -> impl Iterator<Item = f32> {
        let number = move |i| match i {
            0 => index & PART_MASK,
            1 => (index >> PART_BITS) & PART_MASK,
            // Below 2^22, so that the triple is exact.
            i => index.wrapping_mul(31).wrapping_add(i * 7919) % (1 << 22),
        };
        (0..self.numbers as u64).map(move |i| number(i) as f32)
    }
}

impl Workload for Vectors {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        self.numbers(index).for_each(|x| into.extend_from_slice(&x.to_le_bytes()));
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let (numbers, rest) = reply.as_chunks::<4>();
        let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
        rest.is_empty() && numbers.eq(self.numbers(index).map(|x| 3.0 * x))
    }

    fn has_identity(&self) -> bool {
        self.numbers >= 2
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        let part = |at: usize| {
            let bytes = reply.get(4 * at..)?.first_chunk::<4>()?;
            // A float that is not a valid part is changed by the cast; `accepts` checks it again.
            Some((f32::from_le_bytes(*bytes) / 3.0) as u64 & PART_MASK)
        };
        Some(part(0)? | (part(1)? << PART_BITS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_answer_is_three_times_each_and_identifies_the_request(
            index in 0..(1u64 << (2 * PART_BITS)) - 1, numbers in 2..100usize,
        ) {
            let mut vectors = Vectors::new(numbers);
            let mut message = Vec::new();
            vectors.request(index, &mut message);
            prop_assert_eq!(message.len(), 4 * numbers);
            let (floats, _) = message.as_chunks::<4>();
            let tripled = floats.iter().map(|bytes| 3.0 * f32::from_le_bytes(*bytes));
            let reply: Vec<u8> = tripled.flat_map(f32::to_le_bytes).collect();
            super::super::tests::identity_survives(&mut vectors, index, &reply);
            prop_assert!(index == 0 || !vectors.accepts(index, &message));
            prop_assert!(!vectors.accepts(index, &reply[..reply.len() - 1]));
            let damaged: Vec<u8> = reply.iter().map(|byte| !byte).collect();
            vectors.identify(&damaged);
        }
    }
}
