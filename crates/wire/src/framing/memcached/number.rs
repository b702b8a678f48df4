//! Numbers in command lines.
//!
//! memcached reads them with `strtol` and its relatives (`safe_strtol` of util.c): white space and signs in front and white space
//! behind are allowed, and what does not fit 32 bits is cut off. Such numbers decide how memcached 1.6.18 reads a line, and newer
//! versions read some of them differently. So they are recognised here, and what has them is refused: a [`Number::Odd`].

/// A number as memcached 1.6.18 reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number<T> {
    /// Digits, for signed numbers with a minus in front, in range.
    Plain(T),
    /// memcached takes it for this number.
    Odd(T),
    /// It takes it for none.
    Bad,
}

impl<T> Number<T> {
    pub(super) fn plain(self) -> Option<T> {
        match self {
            Self::Plain(value) => Some(value),
            Self::Odd(_) | Self::Bad => None,
        }
    }

    /// The number, and whether it is plain.
    pub(super) fn any(self) -> Option<(T, bool)> {
        match self {
            Self::Plain(value) => Some((value, true)),
            Self::Odd(value) => Some((value, false)),
            Self::Bad => None,
        }
    }
}

/// What `strtol` reads.
struct Read {
    negative: bool,
    magnitude: u64,
    /// Nothing but digits, and a minus in front of them.
    plain: bool,
}

/// The longest plain number: 64 bits.
const DIGITS_MAX: usize = 20;

fn read(word: &[u8]) -> Option<Read> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t'..=b'\r');
    let spaces = word.iter().take_while(|byte| is_space(byte)).count();
    let number = &word[spaces..];
    let (sign, digits) = match number.split_first() {
        Some((sign @ (b'+' | b'-'), digits)) => (Some(*sign), digits),
        _ => (None, number),
    };
    let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, behind) = digits.split_at(count);
    if digits.is_empty() || !behind.first().is_none_or(is_space) {
        return None;
    }
    let magnitude = digits.iter().try_fold(0u64, |value, digit| {
        value.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
    })?;
    let plain = spaces == 0 && sign != Some(b'+') && behind.is_empty() && count <= DIGITS_MAX;
    Some(Read { negative: sign == Some(b'-'), magnitude, plain })
}

/// A signed number of 32 bits.
#[inline]
pub(super) fn signed(word: &[u8]) -> Number<i32> {
    let Some(Read { negative, magnitude, plain }) = read(word) else { return Number::Bad };
    let value = match negative {
        true => 0i64.checked_sub_unsigned(magnitude),
        false => i64::try_from(magnitude).ok(),
    };
    match value {
        None => Number::Bad,
        Some(value) => match i32::try_from(value) {
            Ok(value) if plain => Number::Plain(value),
            _ => Number::Odd(value as i32),
        },
    }
}

/// A number without a sign of 32 or 64 bits.
#[inline]
pub(super) fn unsigned(word: &[u8], bits: u32) -> Number<u64> {
    let Some(Read { negative, magnitude, plain }) = read(word) else { return Number::Bad };
    let value = if negative { magnitude.wrapping_neg() } else { magnitude };
    if (value as i64) < 0 && word.contains(&b'-') {
        return Number::Bad;
    }
    let fits = bits == 64 || value <= u64::from(u32::MAX);
    let cut = if bits == 64 { value } else { u64::from(value as u32) };
    if plain && !negative && fits { Number::Plain(value) } else { Number::Odd(cut) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_memcached_reads_them() {
        use Number::{Bad, Odd, Plain};
        for (word, expected) in [
            ("0", Plain(0)),
            ("-1", Plain(-1)),
            ("-0", Plain(0)),
            ("007", Plain(7)),
            ("2147483647", Plain(i32::MAX)),
            ("-2147483648", Plain(i32::MIN)),
            ("+5", Odd(5)),
            ("\t5", Odd(5)),
            ("5\r", Odd(5)),
            ("5\tx", Odd(5)),
            ("2147483648", Odd(i32::MIN)),
            ("4294967301", Odd(5)),
            ("9223372036854775807", Odd(-1)),
            ("000000000000000000005", Odd(5)),
            ("9223372036854775808", Bad),
            ("-9223372036854775809", Bad),
            ("", Bad),
            ("-", Bad),
            ("+", Bad),
            ("x", Bad),
            ("5x", Bad),
            ("0x5", Bad),
            ("5-", Bad),
            ("--5", Bad),
            ("\u{a0}5", Bad),
        ] {
            assert_eq!(signed(word.as_bytes()), expected, "{word:?}");
        }
        for (word, expected) in [
            ("0", Plain(0)),
            ("4294967295", Plain(u64::from(u32::MAX))),
            ("4294967296", Odd(0)),
            ("18446744073709551615", Odd(u64::from(u32::MAX))),
            ("18446744073709551616", Bad),
            ("-1", Bad),
            ("-0", Odd(0)),
            ("-18446744073709551615", Odd(1)),
            ("+1", Odd(1)),
            ("1\x0b", Odd(1)),
            ("noreply", Bad),
        ] {
            assert_eq!(unsigned(word.as_bytes(), 32), expected, "{word:?}");
        }
        assert_eq!(unsigned(b"18446744073709551615", 64), Plain(u64::MAX));
    }
}
