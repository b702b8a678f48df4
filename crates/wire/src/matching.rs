//! `match = "id:OFFSET:LENGTH"`: bytes of a request that its answer repeats at the same position. They distinguish
//! the expected answer from duplicate and late ones.

use std::fmt;
use std::str::FromStr;

/// Longest id in bytes.
const ID_BYTES_MAX: u32 = 8;

/// Position of the id in a request and in its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatchId {
    offset: u32,
    len: u32,
}

/// Why an id is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchIdError {
    /// Not of the form.
    #[error("match `{0}` names no bytes: write \"id:OFFSET:LENGTH\", such as \"id:0:8\"")]
    Syntax(String),
    /// A length out of range.
    #[error("match `{0}` has an id of {1} bytes: give a LENGTH from 1 to 8")]
    Length(String, u32),
    /// No message is long enough.
    #[error(
        "{id} ends after byte {max}, where the longest message ends ({key}): give a smaller OFFSET"
    )]
    OverMaximum {
        /// The id.
        id: MatchId,
        /// The configuration key.
        key: &'static str,
        /// Its value.
        max: usize,
    },
}

impl MatchId {
    /// The offset behind the last byte of the id: the shortest message that has one.
    pub const fn end(self) -> usize {
        self.offset as usize + self.len as usize
    }

    /// Rejects an id that no message of at most `max` bytes has; `key` contains the maximum.
    pub const fn check(self, key: &'static str, max: usize) -> Result<(), MatchIdError> {
        if self.end() > max {
            return Err(MatchIdError::OverMaximum { id: self, key, max });
        }
        Ok(())
    }

    /// The id of a message, as a number; `None` if the message is too short.
    #[inline]
    pub fn of(self, message: &[u8]) -> Option<u64> {
        let id = message.get(self.offset as usize..self.end())?;
        Some(id.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

impl FromStr for MatchId {
    type Err = MatchIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // `parse` alone would also accept a sign.
        let number = |digits: &str| {
            digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u32>().ok())?
        };
        let range = text.strip_prefix("id:").and_then(|range| range.split_once(':'));
        let range = range.and_then(|(offset, len)| Some((number(offset)?, number(len)?)));
        let (offset, len) = range.ok_or_else(|| MatchIdError::Syntax(text.to_owned()))?;
        if !(1..=ID_BYTES_MAX).contains(&len) {
            return Err(MatchIdError::Length(text.to_owned(), len));
        }
        // `end` must not overflow on a 32-bit host either.
        match offset.checked_add(len) {
            Some(_) => Ok(Self { offset, len }),
            None => Err(MatchIdError::Syntax(text.to_owned())),
        }
    }
}

impl fmt::Display for MatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id:{}:{}", self.offset, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_at_its_position() {
        let id: MatchId = "id:2:4".parse().unwrap();
        assert_eq!(id.to_string(), "id:2:4");
        assert_eq!(id.of(b"ab\x01\x02\x03\x04"), Some(0x0102_0304));
        assert_eq!(id.of(b"ab\x01\x02\x03"), None);
        assert_eq!("id:0:8".parse::<MatchId>().unwrap().of(&[255; 9]), Some(u64::MAX));
    }

    #[test]
    fn invalid_ids_are_refused_with_the_fix() {
        for text in
            ["", "id", "id:0", "0:4", "id:0:", "id:-1:4", "id:+1:4", "id:4294967295:8", "ID:0:4"]
        {
            let error = text.parse::<MatchId>().unwrap_err().to_string();
            assert!(error.contains("id:OFFSET:LENGTH"), "{error}");
        }
        for text in ["id:0:0", "id:0:9"] {
            let error = text.parse::<MatchId>().unwrap_err().to_string();
            assert!(error.contains("from 1 to 8"), "{error}");
        }
        let id: MatchId = "id:4:8".parse().unwrap();
        assert_eq!(id.check("max_message_bytes", 12), Ok(()));
        let error = id.check("max_message_bytes", 11).unwrap_err().to_string();
        assert!(error.contains("after byte 11") && error.contains("max_message_bytes"), "{error}");
    }
}
