//! A message of the user, for kernels without a built-in workload.

use super::Workload;

/// A message, and its correct replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Custom {
    /// The request; every request is the same.
    pub payload: Vec<u8>,
    /// The correct replies.
    pub expect: Expect,
}

/// Which replies are correct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Every reply, or every reply of this many bytes.
    Any(Option<usize>),
    /// The request itself.
    Echo,
    /// These bytes.
    Bytes(Vec<u8>),
}

impl Custom {
    /// Length of the correct replies, if known.
    pub fn reply_bytes(&self) -> Option<usize> {
        match &self.expect {
            Expect::Any(bytes) => *bytes,
            Expect::Echo => Some(self.payload.len()),
            Expect::Bytes(bytes) => Some(bytes.len()),
        }
    }

    /// Whether replies are compared, rather than counted.
    pub fn compares(&self) -> bool {
        !matches!(self.expect, Expect::Any(_))
    }
}

impl Workload for &Custom {
    fn request(&mut self, _index: u64, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.payload);
    }

    fn accepts(&mut self, _index: u64, reply: &[u8]) -> bool {
        match &self.expect {
            Expect::Any(bytes) => bytes.is_none_or(|bytes| bytes == reply.len()),
            Expect::Echo => reply == self.payload,
            Expect::Bytes(bytes) => reply == bytes,
        }
    }

    fn replies_differ(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_compared_as_configured() {
        let accepts = |expect: Expect, reply: &[u8]| {
            let custom = Custom { payload: b"ab".to_vec(), expect };
            (&mut &custom).accepts(7, reply)
        };
        assert!(accepts(Expect::Echo, b"ab") && !accepts(Expect::Echo, b"abc"));
        assert!(accepts(Expect::Bytes(b"x".to_vec()), b"x"));
        assert!(!accepts(Expect::Bytes(b"x".to_vec()), b"ab"));
        assert!(accepts(Expect::Any(None), b"") && accepts(Expect::Any(Some(3)), b"abc"));
        assert!(!accepts(Expect::Any(Some(3)), b"ab"));
    }
}
