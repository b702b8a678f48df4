//! How the state of a function belongs together when several workers run it.

use std::fmt;

/// The bytes of a request that are its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Where it begins, in bytes.
    pub offset: u32,
    /// Its bytes; 0: to the end of the request. A request that is shorter has the bytes that it has.
    pub length: u32,
}

impl Key {
    /// The key of a request.
    pub fn of<'a>(&self, request: &'a [u8]) -> &'a [u8] {
        let rest = request.get(self.offset as usize..).unwrap_or_default();
        match self.length {
            0 => rest,
            length => &rest[..rest.len().min(length as usize)],
        }
    }
}

/// How the state of a function lives when several workers run it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateKind {
    /// Each worker has its own, and a read merges them.
    #[default]
    Mergeable,
    /// There is one: one worker sees all messages.
    Single,
    /// Requests with the same key are seen by the same worker.
    ByKey(Key),
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mergeable => "mergeable",
            Self::Single => "single",
            Self::ByKey(_) => "by-key",
        })
    }
}

impl StateKind {
    /// Whether this number of workers keeps it: each worker has an instance of its own, and sees the messages that it receives.
    pub fn fits(self, workers: usize) -> bool {
        self == Self::Mergeable || workers <= 1 || mutants::on("split_single_state")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_what_the_request_has_of_it() {
        let key = Key { offset: 2, length: 3 };
        assert_eq!(key.of(b"0123456"), b"234");
        assert_eq!(key.of(b"0123"), b"23");
        assert_eq!(key.of(b"0"), b"");
        assert_eq!(Key { offset: 2, length: 0 }.of(b"0123456"), b"23456");
    }

    #[test]
    fn only_a_state_that_can_be_merged_fits_several_workers() {
        let by_key = StateKind::ByKey(Key { offset: 0, length: 8 });
        for (state, fits) in
            [(StateKind::Mergeable, true), (StateKind::Single, false), (by_key, false)]
        {
            assert!(state.fits(1));
            assert_eq!(state.fits(2), fits, "{state}");
        }
    }
}
