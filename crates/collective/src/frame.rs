//! The format of what ranks send to each other. All numbers are little endian.
//!
//! | message   | bytes | connection     | content                                                                          |
//! |-----------|-------|----------------|----------------------------------------------------------------------------------|
//! | [`Hello`]   | 80  | both, first    | version, purpose, ranks, who connects to whom, the group's name                  |
//! | [`Welcome`] | 12  | both, answer   | whether the listener accepts                                                     |
//! | [`Header`]  | 32  | data           | before the bytes of each transfer: the sender's call, and how many bytes follow  |
//! | [`Notice`]  | 8   | control        | the sender leaves, or ends the group                                             |
//!
//! The bytes of a transfer follow its header, except those of a long one ([`is_long`]) to a higher rank: they take the connection
//! for bulk. So two ranks that send much to each other do it over one connection per direction, and neither keeps the other from
//! its socket.

use crate::error::Reason;
use crate::schedule::{Element, Operation, RANKS_MAX};

/// The version of this format. Ranks of different versions refuse each other.
pub const VERSION: u16 = 2;
/// Longest name of a group, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Bytes of a [`Hello`].
pub const HELLO_BYTES: usize = 80;
/// Bytes of a [`Welcome`].
pub const WELCOME_BYTES: usize = 12;
/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = 32;
/// Bytes of a [`Notice`].
pub const NOTICE_BYTES: usize = 8;

const MAGIC: [u8; 8] = *b"servalcg";
/// The first byte of a header and of a notice.
const DATA: u8 = 0xd1;
const CONTROL: u8 = 0xc1;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Notices; its end means that the rank has ended.
    Control,
    /// The data of calls.
    Data,
    /// The bytes of long transfers to the rank that has connected.
    Bulk,
}

/// Whether a transfer of this many bytes is long.
pub const fn is_long(bytes: usize) -> bool {
    bytes > 64 << 10
}

/// The first message of a connection, from the rank that connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the connection is for.
    pub purpose: Purpose,
    /// Ranks of the group.
    pub ranks: u8,
    /// The rank that connects.
    pub from: u8,
    /// The rank that it wants to reach.
    pub to: u8,
    /// The group's name, at most [`NAME_BYTES_MAX`] bytes.
    pub name: String,
}

impl Hello {
    /// As bytes. Panics if the name is too long.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.purpose as u8;
        bytes[11..14].copy_from_slice(&[self.ranks, self.from, self.to]);
        bytes[14] = u8::try_from(self.name.len()).expect("a name of at most 64 bytes");
        bytes[16..][..self.name.len()].copy_from_slice(self.name.as_bytes());
        bytes
    }

    /// Reads one. `Err` has the answer: the version is another, or it is no hello (`None`: no answer).
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Option<Welcome>> {
        if bytes[..8] != MAGIC {
            return Err(None);
        }
        if u16::from_le_bytes([bytes[8], bytes[9]]) != VERSION {
            return Err(Some(Welcome::OtherVersion(VERSION)));
        }
        let purpose = match bytes[10] {
            0 => Purpose::Control,
            1 => Purpose::Data,
            2 => Purpose::Bulk,
            _ => return Err(None),
        };
        let [ranks, from, to, len, reserved] = [11, 12, 13, 14, 15].map(|at| bytes[at]);
        let (name, rest) = bytes[16..].split_at_checked(len.into()).ok_or(None)?;
        let is_sane = reserved == 0
            && rest.iter().all(|byte| *byte == 0)
            && (2..=RANKS_MAX).contains(&ranks.into())
            && from < ranks
            && to < from;
        let name = String::from_utf8(name.to_vec()).map_err(|_| None)?;
        is_sane.then_some(Self { purpose, ranks, from, to, name }).ok_or(None)
    }
}

/// The listener's answer to a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Welcome {
    /// The connection is part of the group.
    Accepted,
    /// The listener has another version of the format: its version.
    OtherVersion(u16),
    /// The listener belongs to a group of another name.
    OtherName,
    /// The listener's group has another number of ranks: its number.
    OtherRanks(u8),
    /// The listener is another rank: its rank.
    OtherRank(u8),
    /// The rank that connects has connected before.
    Twice,
}

impl Welcome {
    /// As bytes.
    pub fn encode(self) -> [u8; WELCOME_BYTES] {
        let mut bytes = [0; WELCOME_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        let (code, value) = match self {
            Self::Accepted => (0, 0),
            Self::OtherVersion(version) => (1, version),
            Self::OtherName => (2, 0),
            Self::OtherRanks(ranks) => (3, ranks.into()),
            Self::OtherRank(rank) => (4, rank.into()),
            Self::Twice => (5, 0),
        };
        bytes[8] = code;
        bytes[10..].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    /// Reads one.
    pub fn decode(bytes: &[u8; WELCOME_BYTES]) -> Option<Self> {
        let value = u16::from_le_bytes([bytes[10], bytes[11]]);
        let small = u8::try_from(value);
        match bytes[8] {
            _ if bytes[..8] != MAGIC || bytes[9] != 0 => None,
            0 if value == 0 => Some(Self::Accepted),
            1 => Some(Self::OtherVersion(value)),
            2 if value == 0 => Some(Self::OtherName),
            3 => small.ok().map(Self::OtherRanks),
            4 => small.ok().map(Self::OtherRank),
            5 if value == 0 => Some(Self::Twice),
            _ => None,
        }
    }
}

/// What comes before the bytes of each transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's operation.
    pub operation: Operation,
    /// The type of its elements.
    pub element: Element,
    /// The how manyth transfer between these ranks in this call it is, from 0.
    pub part: u32,
    /// The how manyth call of the group it is, from 1.
    pub sequence: u64,
    /// Elements of the call.
    pub count: u64,
    /// Bytes that follow.
    pub bytes: u64,
}

impl Header {
    /// As bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (operation, root) = match self.operation {
            Operation::AllReduce => (0, 0),
            Operation::Broadcast { root } => (1, root as u8),
            Operation::Barrier => (2, 0),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&[DATA, operation, self.element as u8, root]);
        bytes[4..8].copy_from_slice(&self.part.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.count.to_le_bytes());
        bytes[24..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// Reads one; `None` if it is none.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let operation = match (bytes[1], bytes[3]) {
            (0, 0) => Operation::AllReduce,
            (1, root) if usize::from(root) < RANKS_MAX => {
                Operation::Broadcast { root: root.into() }
            }
            (2, 0) => Operation::Barrier,
            _ => return None,
        };
        let element = match bytes[2] {
            0 => Element::Byte,
            1 => Element::Float32,
            2 => Element::Int32,
            _ => return None,
        };
        let part = u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i]));
        let header =
            Self { operation, element, part, sequence: word(8), count: word(16), bytes: word(24) };
        (bytes[0] == DATA).then_some(header)
    }
}

/// What a rank says on its control connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// It leaves; all that it had to send has been sent.
    Leave,
    /// It ends the group.
    End(Reason),
    /// It has moved something for which the receiver sleeps (shared memory only).
    Wake,
}

impl Notice {
    /// As bytes.
    pub fn encode(self) -> [u8; NOTICE_BYTES] {
        let (code, rank) = match self {
            Self::Leave => (0, 0),
            Self::End(Reason::Lost(rank)) => (1, rank),
            Self::End(Reason::Disagreement(rank)) => (2, rank),
            Self::End(Reason::Deadline(rank)) => (3, rank),
            Self::End(Reason::Garbage(rank)) => (4, rank),
            Self::Wake => (5, 0),
            Self::End(Reason::Copy(rank)) => (6, rank),
        };
        [CONTROL, code, rank as u8, 0, 0, 0, 0, 0]
    }

    /// Reads one; `None` if it is none.
    pub fn decode(bytes: &[u8; NOTICE_BYTES]) -> Option<Self> {
        let [CONTROL, code, rank, 0, 0, 0, 0, 0] = *bytes else { return None };
        let rank = usize::from(rank);
        if rank >= RANKS_MAX {
            return None;
        }
        match code {
            0 if rank == 0 => Some(Self::Leave),
            1 => Some(Self::End(Reason::Lost(rank))),
            2 => Some(Self::End(Reason::Disagreement(rank))),
            3 => Some(Self::End(Reason::Deadline(rank))),
            4 => Some(Self::End(Reason::Garbage(rank))),
            5 if rank == 0 => Some(Self::Wake),
            6 => Some(Self::End(Reason::Copy(rank))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let hello =
            Hello { purpose: Purpose::Data, ranks: 8, from: 7, to: 3, name: "n".repeat(64) };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello.clone()));
        let mut other = hello.encode();
        other[8] += 1;
        assert_eq!(Hello::decode(&other), Err(Some(Welcome::OtherVersion(VERSION))));
        for forged in [(0, 1), (10, 3), (11, 9), (11, 1), (12, 8), (13, 7), (14, 65), (15, 1)] {
            let mut bytes = hello.encode();
            bytes[forged.0] = forged.1;
            assert_eq!(Hello::decode(&bytes), Err(None), "{forged:?}");
        }
        for welcome in [
            Welcome::Accepted,
            Welcome::OtherVersion(7),
            Welcome::OtherName,
            Welcome::OtherRanks(3),
            Welcome::OtherRank(2),
            Welcome::Twice,
        ] {
            assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
        }
        for operation in
            [Operation::AllReduce, Operation::Barrier, Operation::Broadcast { root: 7 }]
        {
            for element in [Element::Byte, Element::Float32, Element::Int32] {
                let header =
                    Header { operation, element, part: 3, sequence: 1 << 40, count: 9, bytes: 36 };
                assert_eq!(Header::decode(&header.encode()), Some(header));
            }
        }
        for notice in [
            Notice::Leave,
            Notice::Wake,
            Notice::End(Reason::Lost(7)),
            Notice::End(Reason::Disagreement(1)),
            Notice::End(Reason::Deadline(0)),
            Notice::End(Reason::Garbage(2)),
            Notice::End(Reason::Copy(3)),
        ] {
            assert_eq!(Notice::decode(&notice.encode()), Some(notice));
        }
    }
}
