//! memcached over UDP (memcached, doc/protocol.txt, "UDP protocol"): every datagram begins with a header of
//! eight bytes. A request is one datagram, a response one or several, all with the id of their request.
//!
//! memcached 1.6 sends the values of a request for several keys as if each were a response: numbered by themselves, with nothing but a
//! header whose total is 0 for a key that it does not have, and `END` behind the last.

use super::command::{Command, Verb};
use super::{CRLF, Words, decimal};

/// Length of the header.
pub const UDP_HEADER_BYTES: usize = 8;

/// Maximum number of datagrams of one response that are assembled: 1.4 MB with memcached's datagrams.
const PIECES_MAX: u16 = 1024;

/// The header of a datagram: id, sequence, total and two bytes that are zero, in network byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    /// Set by the client in the request, and repeated by the server.
    pub id: u16,
    /// Number of this datagram in its message, from 0.
    pub sequence: u16,
    /// Datagrams of the message.
    pub total: u16,
}

impl UdpHeader {
    /// The header of a request.
    pub const fn request(id: u16) -> Self {
        Self { id, sequence: 0, total: 1 }
    }

    /// The encoded header.
    pub const fn bytes(self) -> [u8; UDP_HEADER_BYTES] {
        let ([a, b], [c, d]) = (self.id.to_be_bytes(), self.sequence.to_be_bytes());
        let [e, f] = self.total.to_be_bytes();
        [a, b, c, d, e, f, 0, 0]
    }

    /// The header of a datagram and its payload; `None` if the header is missing or invalid.
    pub fn split(datagram: &[u8]) -> Option<(Self, &[u8])> {
        let ([a, b, c, d, e, f, _, _], payload) = datagram.split_first_chunk()?;
        let header = Self {
            id: u16::from_be_bytes([*a, *b]),
            sequence: u16::from_be_bytes([*c, *d]),
            total: u16::from_be_bytes([*e, *f]),
        };
        (header.sequence < header.total).then_some((header, payload))
    }

    /// The same for a datagram of an answer, which may have no content.
    pub fn split_answer(datagram: &[u8]) -> Option<(Self, &[u8])> {
        match datagram {
            [a, b, 0, 0, 0, 0, _, _] => {
                let id = u16::from_be_bytes([*a, *b]);
                Some((Self { id, sequence: 0, total: 0 }, &[]))
            }
            datagram => Self::split(datagram),
        }
    }
}

/// Whether a datagram is what memcached answers by itself: exactly one command. It takes the next datagram, of any client, for the rest of
/// an incomplete one, and the rest of a datagram that is longer than its command for another one.
pub fn is_request(datagram: &[u8]) -> bool {
    let Some((UdpHeader { total: 1, .. }, body)) = UdpHeader::split(datagram) else { return false };
    Command::of_message(body).is_some_and(|command| command.verb != Verb::Quit)
}

/// How many bytes of the value at the front of an answer are missing; less than 0 if something is behind it. `Some(0)` without any bytes, where a
/// key had no value; `None` if the answer does not begin with a value.
pub fn bytes_left(body: &[u8]) -> Option<i64> {
    if body.is_empty() {
        return Some(0);
    }
    let lf = crate::find_byte(b'\n', body)?;
    let mut words = Words(body[..lf].strip_suffix(b"\r")?);
    words.next().filter(|word| *word == b"VALUE")?;
    let bytes = decimal(words.nth(2)?)?;
    Some((lf + 1 + bytes + CRLF.len()) as i64 - body.len() as i64)
}

/// The result of adding a datagram to a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// It was the last missing one.
    Last,
    /// Others are missing.
    Taken,
    /// It is a duplicate, or contradicts earlier ones.
    Useless,
    /// The response is longer than the maximum.
    TooLong,
}

/// The datagrams of one response, in any order.
#[derive(Debug, Default)]
pub struct Assembly {
    bytes: Vec<u8>,
    /// Sequence, start and end of each in `bytes`, in the order of arrival.
    pieces: Vec<(u16, u32, u32)>,
    total: u16,
}

impl Assembly {
    /// Removes all datagrams.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.total = 0;
    }

    /// Adds one more datagram of a response of at most `max` bytes.
    pub fn take(&mut self, header: UdpHeader, payload: &[u8], max: usize) -> Piece {
        if self.pieces.is_empty() {
            self.total = header.total;
        }
        let came = self.pieces.iter().any(|piece| piece.0 == header.sequence);
        if came || header.total != self.total {
            return Piece::Useless;
        }
        let start = self.bytes.len();
        if header.total > PIECES_MAX || payload.len() > max.saturating_sub(start) {
            return Piece::TooLong;
        }
        self.bytes.extend_from_slice(payload);
        self.pieces.push((header.sequence, start as u32, self.bytes.len() as u32));
        if self.pieces.len() == usize::from(self.total) { Piece::Last } else { Piece::Taken }
    }

    /// The complete response, once its last piece was added; copied into `scratch` in order, which has room for it,
    /// if its pieces arrived out of order.
    pub fn whole<'a>(&'a mut self, scratch: &'a mut [u8]) -> &'a [u8] {
        if self.pieces.is_sorted() {
            return &self.bytes;
        }
        self.pieces.sort_unstable();
        let mut at = 0;
        for (_, start, end) in &self.pieces {
            let piece = &self.bytes[*start as usize..*end as usize];
            scratch[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        &scratch[..at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_round_trips() {
        let header = UdpHeader { id: 0x0102, sequence: 3, total: 0x0405 };
        let datagram = [&header.bytes()[..], b"END\r\n"].concat();
        assert_eq!(datagram[..8], [1, 2, 0, 3, 4, 5, 0, 0]);
        assert_eq!(UdpHeader::split(&datagram), Some((header, &b"END\r\n"[..])));
        assert_eq!(UdpHeader::split(&datagram[..7]), None);
        assert_eq!(UdpHeader::split(&UdpHeader { total: 3, ..header }.bytes()), None);
        assert_eq!(
            UdpHeader::split(&UdpHeader::request(7).bytes()),
            Some((UdpHeader::request(7), &b""[..]))
        );
        let empty = UdpHeader { id: 7, sequence: 0, total: 0 };
        assert_eq!(UdpHeader::split_answer(&empty.bytes()), Some((empty, &b""[..])));
        assert_eq!(UdpHeader::split_answer(&[&empty.bytes()[..], b"x"].concat()), None);
        assert_eq!(UdpHeader::split_answer(&datagram), UdpHeader::split(&datagram));
    }

    #[test]
    fn a_request_is_one_datagram_with_one_command() {
        let framed = |total, body: &str| {
            let header = UdpHeader { id: 7, sequence: 0, total }.bytes();
            [&header[..], body.as_bytes()].concat()
        };
        for body in ["get a\r\n", "get a b\n", "set a 0 0 2 noreply\r\nxy\r\n", "mn\r\n"] {
            assert!(is_request(&framed(1, body)), "{body}");
            assert!(!is_request(&framed(2, body)), "{body}");
        }
        for body in [
            "",
            "get a",
            "get a\r\nget b\r\n",
            "set a 0 0 3\r\nxy\r\n",
            "set a x 0 2\r\nxy\r\n",
            "set a 0 0 26\r\n",
            "bogus\r\n",
            "quit\r\n",
        ] {
            assert!(!is_request(&framed(1, body)), "{body}");
        }
    }

    #[test]
    fn the_end_of_a_value_is_known_from_its_line() {
        for (body, left) in [
            ("", Some(0)),
            ("VALUE a 0 1\r\nx\r\n", Some(0)),
            ("VALUE a 0 1 7\r\nx\r\nEND\r\n", Some(-5)),
            ("VALUE a 0 100\r\nx", Some(101)),
            ("VALUE a 0 x\r\n", None),
            ("VALUE a 0 1", None),
            ("END\r\n", None),
            ("VA 1\r\nx\r\n", None),
        ] {
            assert_eq!(bytes_left(body.as_bytes()), left, "{body:?}");
        }
    }

    #[test]
    fn pieces_make_the_response_in_any_order() {
        let parts = [&b"VALUE a 0 4\r\n"[..], b"abcd", b"\r\nEND\r\n"];
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut assembly = Assembly::default();
            for (n, part) in order.into_iter().enumerate() {
                let header = UdpHeader { id: 1, sequence: part as u16, total: 3 };
                let last = if n == 2 { Piece::Last } else { Piece::Taken };
                assert_eq!(assembly.take(header, parts[part], 24), last);
                if n < 2 {
                    assert_eq!(assembly.take(header, parts[part], 24), Piece::Useless, "twice");
                    let other = UdpHeader { total: 4, sequence: 3, ..header };
                    assert_eq!(assembly.take(other, b"", 24), Piece::Useless);
                }
            }
            assert_eq!(assembly.whole(&mut [0; 64]), parts.concat());
        }
    }

    #[test]
    fn the_size_of_a_response_is_limited() {
        let mut assembly = Assembly::default();
        let header = UdpHeader { id: 1, sequence: 0, total: 2 };
        assert_eq!(assembly.take(header, &[0; 25], 24), Piece::TooLong);
        assert_eq!(assembly.take(header, &[0; 20], 24), Piece::Taken);
        assert_eq!(assembly.take(UdpHeader { sequence: 1, ..header }, &[0; 5], 24), Piece::TooLong);
        let many = UdpHeader { total: 1025, ..header };
        assert_eq!(Assembly::default().take(many, b"", 24), Piece::TooLong);
    }
}
