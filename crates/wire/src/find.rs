//! The search for a byte in short text, eight bytes at a time.
//!
//! A call of [`memchr`](memchr::memchr()) takes some fifty instructions in front of its first comparison, and a command line
//! has a delimiter within twenty bytes: a get of a cache looks for some fifteen of them. Longer text is left to it.

const WORD: usize = size_of::<u64>();
/// What is searched here; the rest goes to `memchr`.
const SHORT: usize = 8 * WORD;
const LOW_BITS: u64 = u64::from_ne_bytes([0x01; WORD]);
const HIGH_BITS: u64 = u64::from_ne_bytes([0x80; WORD]);

/// The index of the first `byte` in `text`.
#[inline]
pub fn find_byte(byte: u8, text: &[u8]) -> Option<usize> {
    match text.first_chunk::<WORD>() {
        Some(first) => in_word(byte, *first).or_else(|| find_further(byte, text)),
        None => text.iter().position(|other| *other == byte),
    }
}

/// The same for a text whose first word does not have the byte.
fn find_further(byte: u8, text: &[u8]) -> Option<usize> {
    let (short, long) = text.split_at(text.len().min(SHORT));
    let (words, rest) = short.as_chunks::<WORD>();
    for (index, word) in words.iter().enumerate().skip(1) {
        if let Some(found) = in_word(byte, *word) {
            return Some(index * WORD + found);
        }
    }
    if !long.is_empty() {
        return memchr::memchr(byte, long).map(|found| SHORT + found);
    }
    // The last word overlaps the one before it, which does not have the byte.
    let last = short.last_chunk::<WORD>().filter(|_| !rest.is_empty())?;
    in_word(byte, *last).map(|found| short.len() - WORD + found)
}

/// Whether a byte of `text` is a space or a control character below it.
#[inline]
pub(crate) fn has_space_or_control(text: &[u8]) -> bool {
    const SPACES: u64 = LOW_BITS * (b' ' as u64 + 1);
    let in_word = |word: &[u8; WORD]| {
        let word = u64::from_le_bytes(*word);
        word.wrapping_sub(SPACES) & !word & HIGH_BITS != 0
    };
    let (words, rest) = text.as_chunks::<WORD>();
    words.iter().any(in_word)
        || match text.last_chunk::<WORD>() {
            Some(last) => in_word(last),
            None => rest.iter().any(|byte| *byte <= b' '),
        }
}

#[inline]
fn in_word(byte: u8, word: [u8; WORD]) -> Option<usize> {
    // A zero byte borrows from its high bit. What is found above the lowest one may be wrong, the lowest one is not.
    let differ = u64::from_le_bytes(word) ^ (LOW_BITS * u64::from(byte));
    let found = differ.wrapping_sub(LOW_BITS) & !differ & HIGH_BITS;
    (found != 0).then(|| (found.trailing_zeros() / u8::BITS) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_and_control_characters_are_seen_wherever_they_are() {
        for other in [0x21, 0x22, 0x7f, 0x80, 0xa0, 0xff] {
            for len in 0..3 * WORD {
                assert!(!has_space_or_control(&vec![other; len]), "{len} times {other}");
                for at in 0..len {
                    for byte in 0..=b' ' {
                        let mut text = vec![other; len];
                        text[at] = byte;
                        assert!(has_space_or_control(&text), "{byte} at {at} of {len}");
                    }
                }
            }
        }
    }

    /// Every length up to more than [`SHORT`], with the byte at each place, twice, and nowhere. The others differ from it
    /// by one or in the high bit, which is where the arithmetic could be wrong.
    #[test]
    fn the_first_one_is_found_wherever_it_is() {
        for byte in [0, 1, b'\n', b' ', 0x7f, 0x80, 0x81, 0xff] {
            for other in [byte ^ 1, byte ^ 0x80, byte.wrapping_add(1), byte.wrapping_sub(1)] {
                for len in 0..SHORT + 2 * WORD {
                    let mut text = vec![other; len];
                    assert_eq!(find_byte(byte, &text), None);
                    for at in (0..len).rev() {
                        text[at] = byte;
                        assert_eq!(find_byte(byte, &text), Some(at), "{byte} of {len}");
                        text[len - 1] = other;
                    }
                }
            }
        }
    }
}
