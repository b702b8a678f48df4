//! An authenticated link: frames in encrypted records on a byte stream that never blocks, which is a TCP connection
//! except in the simulator.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use sys::readiness::wait_readable;
use wire::link::{RECORD_BYTES_MAX, TAG_BYTES, record_bytes};

use crate::handshake::{Handshake, HandshakeError, Keys};
use crate::secret::Secret;

/// Bytes of a read.
const READ_BYTES: usize = 2 * (4 + RECORD_BYTES_MAX + TAG_BYTES);
/// While this many bytes wait for the connection no further messages are taken from the rings.
const UNSENT_BYTES_MAX: usize = 256 << 10;
/// While this many bytes wait for the connection neither released slots nor heartbeats are reported.
const UNSENT_REPORTS_MAX: usize = UNSENT_BYTES_MAX + (64 << 10);

/// See the module's text. Errors are one sentence.
pub struct Channel<S = TcpStream> {
    stream: S,
    seal: LessSafeKey,
    open: LessSafeKey,
    /// Records sent and received.
    sealed: u64,
    opened: u64,
    /// Records that have not arrived as a whole: the first `raw_len` bytes.
    raw: Box<[u8]>,
    raw_len: usize,
    /// Decrypted frames; those before `plain_at` have been handled.
    pub(crate) plain: Vec<u8>,
    pub(crate) plain_at: usize,
    /// Frames to send.
    pub(crate) frames: Vec<u8>,
    /// Records to send; those before `sent` have been.
    records: Vec<u8>,
    sent: usize,
    /// Bytes that the connection has taken since the link began.
    taken: u64,
}

/// The nonce of a record: no other record of its direction has the same, and each direction has a key of its own.
fn nonce(record: u64) -> Nonce {
    let record = if mutants::on("seal_with_one_nonce") { 0 } else { record };
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&record.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl Channel {
    pub(crate) fn new(stream: TcpStream, keys: Keys) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream, keys))
    }

    /// Readable when the other side has sent something.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends what is left, then waits for the other side to close the connection, in all for at most `limit`.
    pub(crate) fn close(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut ended = false;
        while self.flush().is_ok() && Instant::now() < deadline {
            if !self.is_blocked() && !std::mem::replace(&mut ended, true) {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
            // What still arrives is not read: the link is over.
            match self.stream.read(&mut self.raw) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let pause = if ended { left } else { Duration::from_millis(1) };
                    wait_readable(&[self.stream.as_fd()], Some(pause.min(left)));
                }
                Err(_) => return,
            }
        }
    }
}

impl<S: Read + Write> Channel<S> {
    /// The engine's and the accelerator's side of a link inside this process, over two streams that never block.
    pub fn pair(streams: [S; 2], secret: &Secret) -> Result<[Self; 2], HandshakeError> {
        let (mut to_far, mut to_near) = (Vec::new(), Vec::new());
        let mut near = Handshake::engine(secret, &mut to_far)?;
        let mut far = Handshake::accelerator(secret);
        far.advance(&mut to_far, &mut to_near)?;
        near.advance(&mut to_near, &mut to_far)?;
        let far = far.advance(&mut to_far, &mut to_near)?.ok_or(HandshakeError::Order)?;
        let near = near.advance(&mut to_near, &mut to_far)?.ok_or(HandshakeError::Order)?;
        let [near_stream, far_stream] = streams;
        Ok([Self::over(near_stream, near), Self::over(far_stream, far)])
    }

    fn over(stream: S, keys: Keys) -> Self {
        let [seal, open] = keys;
        Self {
            stream,
            seal,
            open,
            sealed: 0,
            opened: 0,
            raw: vec![0; READ_BYTES].into(),
            raw_len: 0,
            plain: Vec::with_capacity(READ_BYTES),
            plain_at: 0,
            frames: Vec::with_capacity(UNSENT_BYTES_MAX),
            records: Vec::with_capacity(UNSENT_BYTES_MAX + RECORD_BYTES_MAX),
            sent: 0,
            taken: 0,
        }
    }

    /// Whether records wait for the connection.
    pub(crate) fn is_blocked(&self) -> bool {
        self.sent < self.records.len()
    }

    /// Bytes that the connection has taken since the link began.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Bytes that wait for the connection.
    fn unsent(&self) -> usize {
        self.frames.len() + self.records.len() - self.sent
    }

    /// Whether further messages may be appended to [`Self::frames`] and `more` bytes.
    pub(crate) fn has_room_for(&self, more: usize) -> bool {
        self.unsent() + more < UNSENT_BYTES_MAX
    }

    /// Whether a heartbeat or a report of released slots may be appended to [`Self::frames`].
    pub(crate) fn has_room_for_report(&self) -> bool {
        self.unsent() < UNSENT_REPORTS_MAX
    }

    /// Encrypts all frames and writes as much as the connection takes, in one call.
    pub(crate) fn flush(&mut self) -> Result<(), String> {
        for text in self.frames.chunks(RECORD_BYTES_MAX) {
            let len = ((text.len() + TAG_BYTES) as u32).to_le_bytes();
            self.records.extend_from_slice(&len);
            let at = self.records.len();
            self.records.extend_from_slice(text);
            let sealed = self.seal.seal_in_place_separate_tag(
                nonce(self.sealed),
                Aad::from(len),
                &mut self.records[at..],
            );
            let tag = sealed.map_err(|_| "a record cannot be encrypted".to_owned())?;
            self.records.extend_from_slice(tag.as_ref());
            self.sealed += u64::from(!mutants::on("forget_sealed_record"));
        }
        self.frames.clear();
        while self.sent < self.records.len() {
            match self.stream.write(&self.records[self.sent..]) {
                Ok(0) => return Err("the other side closed the connection".into()),
                Ok(count) => {
                    self.sent += if mutants::on("resend_written") { 0 } else { count };
                    self.taken += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.sent > UNSENT_BYTES_MAX {
                        self.records.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("the connection broke: {error}")),
            }
        }
        self.records.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads once and decrypts what is complete. Returns whether anything arrived.
    pub(crate) fn receive(&mut self) -> Result<bool, String> {
        match self.stream.read(&mut self.raw[self.raw_len..]) {
            Ok(0) => return Err("the other side closed the connection".into()),
            Ok(count) => self.raw_len += count,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(format!("the connection broke: {error}")),
        }
        if self.plain_at > 0 {
            self.plain.drain(..self.plain_at);
            self.plain_at = 0;
        }
        let mut at = 0;
        while let Some(len) =
            record_bytes(&self.raw[at..self.raw_len]).map_err(|error| error.to_string())?
        {
            if self.raw_len - at < len {
                break;
            }
            let (head, body) = self.raw[at..at + len].split_first_chunk_mut::<4>().expect("more");
            let opened = self.open.open_in_place(nonce(self.opened), Aad::from(*head), body);
            let text = opened.map_err(|_| "a record was forged or damaged".to_owned())?;
            self.plain.extend_from_slice(text);
            self.opened += u64::from(!mutants::on("forget_opened_record"));
            at += len;
        }
        self.raw.copy_within(at..self.raw_len, 0);
        self.raw_len -= at;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};
    use std::sync::{Arc, Mutex};

    use super::*;

    const SECRET: &[u8] = b"a secret of the tests, of at least 32 bytes";
    const FORGED: &str = "a record was forged or damaged";
    const CLOSED: &str = "the other side closed the connection";

    /// One direction of a connection, which never blocks.
    #[derive(Clone, Default)]
    struct Pipe(Arc<Mutex<PipeState>>);

    #[derive(Default)]
    struct PipeState {
        bytes: VecDeque<u8>,
        ended: bool,
    }

    struct End {
        read: Pipe,
        write: Pipe,
    }

    impl Read for End {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let mut state = self.read.0.lock().unwrap();
            match state.bytes.read(into)? {
                0 if !state.ended => Err(ErrorKind::WouldBlock.into()),
                count => Ok(count),
            }
        }
    }

    impl Write for End {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.write.0.lock().unwrap().bytes.extend(from);
            Ok(from.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    type Record = Vec<u8>;

    /// A link whose two directions end at a man in the middle: whatever one side sends reaches the other side only by
    /// [`Middle::deliver`].
    struct Middle {
        /// The engine's side, and the accelerator's.
        sides: [Channel<End>; 2],
        /// What each side has sent.
        sent: [Pipe; 2],
        /// What each side will read.
        arriving: [Pipe; 2],
    }

    impl Middle {
        fn new() -> Self {
            let [sent, arriving] = [(); 2].map(|()| [(); 2].map(|()| Pipe::default()));
            let end = |side: usize| End { read: arriving[side].clone(), write: sent[side].clone() };
            let sides = Channel::pair([end(0), end(1)], &Secret::of(SECRET)).unwrap();
            Self { sides, sent, arriving }
        }

        /// Sends the frames of `text` from a side; the records that leave it.
        fn seal(&mut self, from: usize, text: &[u8]) -> Vec<Record> {
            self.sides[from].frames.extend_from_slice(text);
            self.sides[from].flush().unwrap();
            let bytes: Vec<u8> = self.sent[from].0.lock().unwrap().bytes.drain(..).collect();
            let mut rest = &bytes[..];
            let mut records = Vec::new();
            while let Some(len) = record_bytes(rest).unwrap() {
                let (record, more) = rest.split_at(len);
                records.push(record.to_vec());
                rest = more;
            }
            records
        }

        /// One record for each text.
        fn seal_each(&mut self, from: usize, texts: &[&[u8]]) -> Vec<Record> {
            let seal = |text: &&[u8]| {
                let [record] = self.seal(from, text).try_into().unwrap();
                record
            };
            texts.iter().map(seal).collect()
        }

        /// Passes these bytes to a side, and returns the frames that it believes.
        fn deliver(&mut self, to: usize, bytes: &[u8]) -> Result<Vec<u8>, String> {
            self.arriving[to].0.lock().unwrap().bytes.extend(bytes);
            while self.sides[to].receive()? {}
            let side = &mut self.sides[to];
            side.plain_at = side.plain.len();
            Ok(side.plain.clone())
        }
    }

    /// A man in the middle that passes other records than the three that were sent.
    #[test]
    fn records_that_are_repeated_removed_or_swapped_end_the_link() {
        let attacks: [(&str, &[usize]); 8] = [
            ("the first is repeated", &[0, 0]),
            ("a later one is repeated", &[0, 1, 1]),
            ("the first is repeated later", &[0, 1, 2, 0]),
            ("the first is removed", &[1]),
            ("one in the middle is removed", &[0, 2]),
            ("two are swapped", &[1, 0]),
            ("two are swapped behind another", &[0, 2, 1]),
            ("the last comes first", &[2, 0, 1]),
        ];
        for from in [0, 1] {
            for (what, order) in attacks {
                // All in one read, and each in one of its own.
                for at_once in [true, false] {
                    let mut middle = Middle::new();
                    // The same text and length: only their numbers tell them apart.
                    let records = middle.seal_each(from, &[&b"frame"[..]; 3]);
                    let passed: Vec<Record> = order.iter().map(|at| records[*at].clone()).collect();
                    let parts = if at_once { vec![passed.concat()] } else { passed };
                    let end = parts
                        .iter()
                        .map(|part| middle.deliver(1 - from, part))
                        .find(Result::is_err);
                    assert_eq!(end, Some(Err(FORGED.to_owned())), "{what}, side {from}");
                }
            }
            // As they were sent they are believed.
            let mut middle = Middle::new();
            let records = middle.seal_each(from, &[&b"frame"[..]; 3]);
            for record in records {
                assert_eq!(middle.deliver(1 - from, &record), Ok(b"frame".to_vec()));
            }
        }
    }

    /// Each direction of each link has a key of its own.
    #[test]
    fn records_of_the_other_direction_or_of_another_link_end_the_link() {
        let mut middle = Middle::new();
        let [record] = middle.seal(0, b"frame").try_into().unwrap();
        assert_eq!(
            middle.deliver(0, &record),
            Err(FORGED.to_owned()),
            "it comes back to its sender"
        );
        for from in [0, 1] {
            let [mut first, mut second] = [(); 2].map(|()| Middle::new());
            let [record] = first.seal(from, b"frame").try_into().unwrap();
            let [_] = second.seal(from, b"frame").try_into().unwrap();
            assert_eq!(second.deliver(1 - from, &record), Err(FORGED.to_owned()), "side {from}");
        }
    }

    #[test]
    fn a_byte_that_changes_anywhere_in_a_record_ends_the_link() {
        let mut middle = Middle::new();
        let [record] = middle.seal(0, b"frame").try_into().unwrap();
        for at in 0..record.len() {
            let mut middle = Middle::new();
            let [mut record] = middle.seal(0, b"frame").try_into().unwrap();
            record[at] ^= 1;
            // A greater length waits for more bytes, which the next record supplies.
            record.extend_from_slice(&middle.seal(0, &[0; 300]).concat());
            let believed = middle.deliver(1, &record);
            assert!(believed.is_err(), "byte {at}: {believed:?}");
        }
    }

    /// A connection that ends is never an orderly end, and what was cut off is not delivered in part.
    #[test]
    fn a_last_record_that_is_cut_or_removed_ends_the_link() {
        for from in [0, 1] {
            let mut middle = Middle::new();
            let [first, last] = middle.seal_each(from, &[b"first", b"last"]).try_into().unwrap();
            assert_eq!(middle.deliver(1 - from, &first), Ok(b"first".to_vec()));
            assert_eq!(middle.deliver(1 - from, &last[..last.len() - 1]), Ok(Vec::new()));
            middle.arriving[1 - from].0.lock().unwrap().ended = true;
            assert_eq!(middle.deliver(1 - from, &[]), Err(CLOSED.to_owned()));
            // With no byte of the last one.
            let mut middle = Middle::new();
            let [first, _] = middle.seal_each(from, &[b"first", b"last"]).try_into().unwrap();
            assert_eq!(middle.deliver(1 - from, &first), Ok(b"first".to_vec()));
            middle.arriving[1 - from].0.lock().unwrap().ended = true;
            assert_eq!(middle.deliver(1 - from, &[]), Err(CLOSED.to_owned()));
        }
    }

    /// AES-GCM seals the same text with the same key and nonce to the same bytes, so different bytes show different nonces or
    /// keys. More records than 16 bits count, in both directions of two links.
    #[test]
    fn no_two_records_are_sealed_with_one_key_and_nonce() {
        let mut seen = HashSet::new();
        let mut links = [(); 2].map(|()| Middle::new());
        for number in 0..70_000 {
            for (link, middle) in links.iter_mut().enumerate() {
                for from in [0, 1] {
                    // Long enough that no two are equal by chance.
                    let [record] = middle.seal(from, &[0; 16]).try_into().unwrap();
                    let text: [u8; 16] = record[4..20].try_into().unwrap();
                    assert!(seen.insert(text), "record {number} of side {from} of link {link}");
                }
            }
        }
        // Those of one call, too.
        let mut middle = Middle::new();
        let records = middle.seal(0, &vec![0; 5 * RECORD_BYTES_MAX]);
        let texts: HashSet<&[u8]> = records.iter().map(|record| &record[4..20]).collect();
        assert_eq!((records.len(), texts.len()), (5, 5));
    }

    #[test]
    fn a_record_has_at_most_its_limit_and_one_above_it_is_refused() {
        for from in [0, 1] {
            let mut middle = Middle::new();
            let text: Vec<u8> = (0..2 * RECORD_BYTES_MAX + 1).map(|at| at as u8).collect();
            let records = middle.seal(from, &text);
            let lens: Vec<usize> =
                records.iter().map(|record| record.len() - 4 - TAG_BYTES).collect();
            assert_eq!(lens, [RECORD_BYTES_MAX, RECORD_BYTES_MAX, 1]);
            let mut believed = Vec::new();
            for record in &records {
                believed.extend(middle.deliver(1 - from, record).unwrap());
            }
            assert!(believed == text);
            // Of no peer that keeps the protocol, but with the right key and nonce.
            let key = &middle.sides[from];
            let len = ((RECORD_BYTES_MAX + 1 + TAG_BYTES) as u32).to_le_bytes();
            let mut text = vec![0; RECORD_BYTES_MAX + 1];
            let sealed =
                key.seal.seal_in_place_append_tag(nonce(key.sealed), Aad::from(len), &mut text);
            sealed.unwrap();
            let end = middle.deliver(1 - from, &[&len[..], &text].concat()).unwrap_err();
            assert!(end.contains("a record of an impossible length"), "{end}");
            // And one with nothing in it, which would cost work without end.
            let mut middle = Middle::new();
            let end = middle.deliver(1 - from, &(TAG_BYTES as u32).to_le_bytes()).unwrap_err();
            assert!(end.contains("a record of an impossible length"), "{end}");
        }
    }
}
