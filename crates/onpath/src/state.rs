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
    /// Whether this number of workers keeps it together. `hands_over`: each message reaches the worker that has its state.
    pub fn fits(self, workers: usize, hands_over: bool) -> bool {
        self == Self::Mergeable || workers <= 1 || hands_over
    }
}

/// Which worker's functions see a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// Those of the worker that receives it.
    #[default]
    Receiver,
    /// Those of one worker see all requests.
    One,
    /// Those of one worker see all requests with the same key.
    OfKey(Key),
}

impl Owner {
    /// Of a chain of functions with these states: all of them see a request on the same worker.
    pub fn of(states: impl IntoIterator<Item = StateKind>) -> Self {
        states.into_iter().fold(Self::Receiver, |owner, state| match (owner, state) {
            (_, StateKind::Mergeable) => owner,
            (Self::Receiver, StateKind::ByKey(key)) => Self::OfKey(key),
            (Self::OfKey(before), StateKind::ByKey(key)) if before == key => owner,
            // The functions of one worker see those of each key together as well.
            (_, StateKind::Single | StateKind::ByKey(_)) => Self::One,
        })
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
    fn only_a_state_that_can_be_merged_fits_several_workers_without_hand_over() {
        let by_key = StateKind::ByKey(Key { offset: 0, length: 8 });
        for (state, fits) in
            [(StateKind::Mergeable, true), (StateKind::Single, false), (by_key, false)]
        {
            assert!(state.fits(1, false) && state.fits(2, true));
            assert_eq!(state.fits(2, false), fits, "{state}");
        }
    }

    #[test]
    fn the_functions_of_a_chain_have_one_owner() {
        let key = |offset| Key { offset, length: 4 };
        let (single, merged) = (StateKind::Single, StateKind::Mergeable);
        let by = |offset| StateKind::ByKey(key(offset));
        let of = |states: &[StateKind]| Owner::of(states.iter().copied());
        assert_eq!(of(&[]), Owner::Receiver);
        assert_eq!(of(&[merged, merged]), Owner::Receiver);
        assert_eq!(of(&[merged, single]), Owner::One);
        assert_eq!(of(&[by(0), merged, by(0)]), Owner::OfKey(key(0)));
        for one in [[by(0), by(4)], [by(0), single], [single, by(0)]] {
            assert_eq!(of(&one), Owner::One);
        }
    }
}
