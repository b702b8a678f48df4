//! Handwritten digits for the kernel `lenet`.

use super::Workload;

/// Pictures that were not used for training: magic, u32 LE count, then label and 784 bytes each
/// (device/models/README.md).
const HELD_OUT: &[u8] = include_bytes!("../../../models/digits_heldout.bin");
const MAGIC: &[u8] = b"SVDIGIT1";
/// Tolerance of a logit: other compilers sum in another order.
const LOGIT_TOLERANCE: f32 = 1e-3;

/// A labelled picture of 28 x 28 grey pixels.
#[derive(Clone, Copy, Debug)]
pub struct Digit<'a> {
    /// What it shows, in [0, 9].
    pub label: u8,
    /// The request.
    pub picture: &'a [u8],
}

impl Digit<'static> {
    /// The built-in pictures, which were not used for training.
    pub fn held_out() -> Vec<Self> {
        parse(HELD_OUT).expect("the built-in pictures are whole")
    }
}

/// Parses a file of digits; `None` if it is invalid.
fn parse(file: &[u8]) -> Option<Vec<Digit<'_>>> {
    let rest = file.strip_prefix(MAGIC)?;
    let (count, rest) = rest.split_first_chunk::<4>()?;
    let count = u32::from_le_bytes(*count) as usize;
    let records = rest.chunks_exact(1 + Digits::PICTURE_BYTES);
    let sound = count > 0 && records.len() == count && records.remainder().is_empty();
    sound.then(|| records.map(|r| Digit { label: r[0], picture: &r[1..] }).collect())
}

/// Sends the digits in turn. The last answers are kept; with `expected`, all must be equal to those.
#[derive(Clone, Debug)]
pub struct Digits<'a> {
    digits: &'a [Digit<'a>],
    expected: Option<&'a [Vec<u8>]>,
    answers: Vec<Vec<u8>>,
    is_numbered: bool,
}

impl<'a> Digits<'a> {
    /// Length of a request.
    pub const PICTURE_BYTES: usize = 784;
    /// Length of a reply: the digit, 3 zero bytes, 10 float32 LE logits.
    pub const REPLY_BYTES: usize = 44;
    /// Length of the number at the end of numbered requests and replies.
    pub const NUMBER_BYTES: usize = 8;

    /// Without `expected`, any well-formed answer is accepted.
    pub fn new(digits: &'a [Digit<'a>], expected: Option<&'a [Vec<u8>]>) -> Self {
        Self { digits, expected, answers: vec![Vec::new(); digits.len()], is_numbered: false }
    }

    /// Each request ends with its number, which its reply repeats.
    pub fn numbered(self) -> Self {
        Self { is_numbered: true, ..self }
    }

    /// The answers kept, in the order of the digits; empty where there was none.
    pub fn answers(&self) -> &[Vec<u8>] {
        &self.answers
    }

    /// Number of answers with the correct digit.
    pub fn right(&self) -> usize {
        let hits = self.digits.iter().zip(&self.answers);
        hits.filter(|(digit, answer)| answer.first() == Some(&digit.label)).count()
    }
}

/// The same digit, and logits within the tolerance.
fn agree(reply: &[u8], expected: &[u8]) -> bool {
    let near = |(a, b): (&[u8; 4], &[u8; 4])| {
        let (a, b) = (f32::from_le_bytes(*a), f32::from_le_bytes(*b));
        (a - b).abs() <= LOGIT_TOLERANCE * b.abs().max(1.0)
    };
    let ((a, _), (b, _)) = (reply[4..].as_chunks(), expected[4..].as_chunks());
    reply[..4] == expected[..4] && a.iter().zip(b).all(near)
}

impl Workload for Digits<'_> {
    fn request(&mut self, index: u64, into: &mut Vec<u8>) {
        into.extend_from_slice(self.digits[index as usize % self.digits.len()].picture);
        if self.is_numbered {
            into.extend_from_slice(&index.to_le_bytes());
        }
    }

    fn accepts(&mut self, index: u64, reply: &[u8]) -> bool {
        let at = index as usize % self.digits.len();
        let reply = match (self.is_numbered, reply.split_last_chunk()) {
            (false, _) => reply,
            (true, Some((rest, number))) if *number == index.to_le_bytes() => rest,
            (true, _) => return false,
        };
        let sound = reply.len() == Self::REPLY_BYTES && reply[0] < 10 && reply[1..4] == [0; 3];
        if let (true, Some(expected)) = (sound, self.expected) {
            return agree(reply, &expected[at]);
        }
        self.answers[at] = reply.to_vec();
        sound
    }

    fn has_identity(&self) -> bool {
        self.is_numbered
    }

    fn identify(&self, reply: &[u8]) -> Option<u64> {
        let number = reply.last_chunk().filter(|_| self.is_numbered)?;
        Some(u64::from_le_bytes(*number))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::identity_survives;
    use super::*;

    #[test]
    fn the_built_in_digits_are_whole_and_damaged_files_are_refused() {
        let digits = Digit::held_out();
        assert!(digits.len() >= 100 && digits.iter().all(|d| d.label < 10));
        assert!((0..10).all(|label| digits.iter().any(|d| d.label == label)));
        assert!(parse(&HELD_OUT[..HELD_OUT.len() - 1]).is_none());
        assert!(parse(b"SVDIGIT1\0\0\0\0").is_none());
        assert!(parse(b"something else").is_none());
    }

    #[test]
    fn malformed_replies_are_not_accepted() {
        let picture = [0; Digits::PICTURE_BYTES];
        let digits = [Digit { label: 0, picture: &picture }];
        let mut reading = Digits::new(&digits, None);
        assert!(reading.accepts(0, &[0; 44]));
        assert!(!reading.accepts(0, &[0; 43]));
        assert!(!reading.accepts(0, &[1; 44]));
        assert!(!reading.accepts(0, &[10; 44]));
    }

    #[test]
    fn numbered_replies_identify_their_requests() {
        let picture = [0; Digits::PICTURE_BYTES];
        let digits = [Digit { label: 0, picture: &picture }];
        let mut numbered = Digits::new(&digits, None).numbered();
        let mut request = Vec::new();
        numbered.request(0x0102, &mut request);
        assert_eq!(request.len(), Digits::PICTURE_BYTES + Digits::NUMBER_BYTES);
        let mut reply = vec![0; Digits::REPLY_BYTES];
        reply.extend_from_slice(&request[Digits::PICTURE_BYTES..]);
        identity_survives(&mut numbered, 0x0102, &reply);
        assert!(!numbered.accepts(0x0102, &reply[..Digits::REPLY_BYTES]));
    }

    #[test]
    fn logits_may_differ_by_rounding_only() {
        let picture = [0; Digits::PICTURE_BYTES];
        let digits = [Digit { label: 3, picture: &picture }];
        let reply = |digit: u8, logit: f32| {
            let mut reply = vec![digit, 0, 0, 0];
            reply.extend([logit; 10].iter().flat_map(|x| x.to_le_bytes()));
            reply
        };
        let expected = [reply(3, 10.0)];
        let mut reading = Digits::new(&digits, Some(&expected));
        assert!(reading.accepts(0, &reply(3, 10.0)) && reading.accepts(7, &reply(3, 10.009)));
        assert!(!reading.accepts(0, &reply(4, 10.0)));
        assert!(!reading.accepts(0, &reply(3, 10.02)));
        assert!(!reading.accepts(0, &reply(3, f32::NAN)));
        assert!(!reading.accepts(0, &reply(3, 10.0)[..40]));
    }
}
