//! Sealing and opening: AES-256-GCM in records, or AES-256-CTR.
//!
//! ```text
//! stream: header (48 bytes), then what the cipher makes
//! header: "SERVSEAL" | version u16 = 1 | cipher u16 | record bytes u32 | salt (32 bytes)
//! 1, AES-256-GCM: record bytes = 65536; record, record, ..., last record
//!                 record: ciphertext (65520 bytes; the last record 0 to 65520) | tag (16 bytes)
//! 2, AES-256-CTR: record bytes = 0; ciphertext, as long as the plain bytes
//! ```
//!
//! Integers are little-endian. The salt is random and new for every stream. The key of the stream is
//! HKDF-SHA256 (RFC 5869) of the caller's key, with the salt as salt and the first 16 bytes of the header as info, 32 bytes long.
//!
//! *GCM.* The nonce of record *n* (from 0) is 12 bytes: three zeros, 1 for the last record or else 0, and *n* as big-endian u64.
//! There is no additional data. The construction is that of RFC 8188 with the last-record flag of STREAM (Hoang et al., CRYPTO 2015):
//! records that are changed, reordered, dropped or repeated, and a stream that was cut off, do not open.
//! At most 2^32 records (256 TiB) are sealed in a stream.
//!
//! *CTR.* The first counter block is 16 zeros, and counts up as one big-endian number (NIST SP 800-38A). Nothing notices a
//! change of the stream: a digest or another protocol has to.
//!
//! *Nonces are never reused.* A stream key belongs to one salt, a random 256-bit number, and to one cipher, and each record of a
//! stream has a number of its own.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::cipher::{
    AES_256, DecryptionContext, EncryptionContext, StreamingDecryptingKey, StreamingEncryptingKey,
    UnboundCipherKey,
};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use aws_lc_rs::iv::FixedLength;
use zeroize::Zeroizing;

use crate::command::error::TransferError;
use crate::command::key::Key;
use crate::command::limits::{HEADER_BYTES, PAYLOAD_BYTES, RECORD_BYTES, TAG_BYTES};
use crate::command::stage::Cipher;
use crate::stages::Ran;

/// Records of a stream.
const RECORDS_MAX: u64 = 1 << 32;
/// The part of the header before the salt.
const FIXED_BYTES: usize = 16;
/// Room that the library wants beyond the bytes that it makes.
const CTR_SLACK: usize = 15;

pub(crate) type Header = [u8; HEADER_BYTES];

/// The begin of a stream of AES-256-CTR that is encrypted elsewhere: its header, and the key of its blocks.
pub(crate) fn begin_ctr(key: &Key) -> Result<(Header, Zeroizing<[u8; 32]>), TransferError> {
    let header = new_header(Cipher::Aes256Ctr)?;
    Ok((header, stream_key(key, &header)))
}

/// The header of a stream of AES-256-GCM whose parts are sealed at the same time.
pub(crate) fn begin_gcm() -> Result<Header, TransferError> {
    new_header(Cipher::Aes256Gcm)
}

/// The part of a header before its salt.
fn fixed(cipher: Cipher) -> [u8; FIXED_BYTES] {
    let (code, record): (u16, u32) = match cipher {
        Cipher::Aes256Gcm => (1, RECORD_BYTES as u32),
        Cipher::Aes256Ctr => (2, 0),
    };
    let mut fixed = [0; FIXED_BYTES];
    fixed[..8].copy_from_slice(b"SERVSEAL");
    fixed[8..10].copy_from_slice(&1u16.to_le_bytes());
    fixed[10..12].copy_from_slice(&code.to_le_bytes());
    fixed[12..].copy_from_slice(&record.to_le_bytes());
    fixed
}

/// The header of a stream of its own, with a new salt.
fn new_header(cipher: Cipher) -> Result<Header, TransferError> {
    let mut header = [0; HEADER_BYTES];
    header[..FIXED_BYTES].copy_from_slice(&fixed(cipher));
    let random = aws_lc_rs::rand::fill(&mut header[FIXED_BYTES..]);
    // EIO: the host kernel's random numbers are not available.
    random.map_err(|_| TransferError::Host { what: "getrandom", errno: 5 })?;
    Ok(header)
}

/// A length for HKDF.
struct KeyBytes;

impl KeyType for KeyBytes {
    fn len(&self) -> usize {
        32
    }
}

/// The key of the stream with this header.
fn stream_key(key: &Key, header: &Header) -> Zeroizing<[u8; 32]> {
    let extracted = Salt::new(HKDF_SHA256, &header[FIXED_BYTES..]).extract(key.bytes());
    let info = [&header[..FIXED_BYTES]];
    let expanded = extracted.expand(&info, KeyBytes).expect("32 bytes are short enough");
    let mut made = Zeroizing::new([0; 32]);
    expanded.fill(&mut *made).expect("32 bytes were asked for");
    made
}

fn gcm_key(key: &Key, header: &Header) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, &*stream_key(key, header));
    LessSafeKey::new(key.expect("the length is right"))
}

fn ctr_key(key: &Key, header: &Header) -> UnboundCipherKey {
    UnboundCipherKey::new(&AES_256, &*stream_key(key, header)).expect("the length is right")
}

/// The library has no memory.
const NO_CIPHER: TransferError = TransferError::Host { what: "setting up AES-256-CTR", errno: 12 };

fn nonce(record: u64, last: bool) -> Nonce {
    let mut nonce = [0; 12];
    nonce[3] = last.into();
    nonce[4..].copy_from_slice(&record.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Seals one stream with AES-256-GCM, in place.
pub struct Sealer {
    key: LessSafeKey,
    header: Header,
    records: u64,
}

impl Sealer {
    /// A stream of its own, with a new salt.
    pub fn new(key: &Key) -> Result<Self, TransferError> {
        let header = new_header(Cipher::Aes256Gcm)?;
        Ok(Self::at(key, header, 0))
    }

    /// From this record on of the stream with this header. No other sealer of the stream may have the same records.
    pub(crate) fn at(key: &Key, header: Header, records: u64) -> Self {
        Self { key: gcm_key(key, &header), header, records }
    }

    /// Whether the next record is the first one of the stream.
    pub(crate) fn begins(&self) -> bool {
        self.records == 0
    }

    /// What precedes the first record.
    pub fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// Encrypts a record in place: `record` is the plain bytes and room for the tag. All records but the last have
    /// [`RECORD_BYTES`].
    pub fn seal(&mut self, record: &mut [u8], last: bool) -> Result<(), TransferError> {
        if self.records >= RECORDS_MAX && !mutants::on("seal_records_without_limit") {
            return Err(TransferError::Range);
        }
        debug_assert!(last || record.len() == RECORD_BYTES);
        let (payload, room) = record.split_at_mut(record.len() - TAG_BYTES);
        let nonce = nonce(self.records, last);
        self.records += u64::from(!mutants::on("seal_records_with_one_nonce"));
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::empty(), payload);
        // Fails only for records that are longer than a GiB.
        let tag = sealed.map_err(|_| TransferError::Range)?;
        room.copy_from_slice(tag.as_ref());
        Ok(())
    }
}

/// Seals a stream that comes in parts of any length.
pub struct StreamSealer {
    header: Option<Header>,
    state: SealState,
}

enum SealState {
    /// The plain bytes of a record that is not full yet.
    Gcm(Sealer, Vec<u8>),
    Ctr(StreamingEncryptingKey),
}

impl StreamSealer {
    /// A stream of its own, with a new salt.
    pub fn new(cipher: Cipher, key: &Key) -> Result<Self, TransferError> {
        let (header, state) = match cipher {
            Cipher::Aes256Gcm => {
                let sealer = Sealer::new(key)?;
                let carry = Vec::with_capacity(PAYLOAD_BYTES);
                (*sealer.header(), SealState::Gcm(sealer, carry))
            }
            Cipher::Aes256Ctr => {
                let header = new_header(cipher)?;
                let start = EncryptionContext::Iv128(FixedLength::from([0; 16]));
                let made = StreamingEncryptingKey::less_safe_ctr(ctr_key(key, &header), start);
                (header, SealState::Ctr(made.map_err(|_| NO_CIPHER)?))
            }
        };
        Ok(Self { header: Some(header), state })
    }

    /// Takes plain bytes and makes a part of the stream; `last`: no more come after these. `out` has room for the header and a record.
    pub fn run(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<Ran, TransferError> {
        let mut ran = Ran::default();
        if let Some(header) = self.header.take() {
            out[..HEADER_BYTES].copy_from_slice(&header);
            ran.made = HEADER_BYTES;
        }
        match &mut self.state {
            SealState::Ctr(key) => {
                let take = input.len().min(out.len() - ran.made - CTR_SLACK);
                let made = key.update(&input[..take], &mut out[ran.made..]);
                ran.made += made.map_err(|_| NO_CIPHER)?.written().len();
                ran.taken = take;
                ran.done = last && take == input.len();
            }
            SealState::Gcm(sealer, carry) => loop {
                let rest = &input[ran.taken..];
                let payload = (carry.len() + rest.len()).min(PAYLOAD_BYTES);
                let ends = last && carry.len() + rest.len() == payload;
                if payload < PAYLOAD_BYTES && !ends {
                    carry.extend_from_slice(rest);
                    ran.taken = input.len();
                    break;
                }
                if out.len() - ran.made < payload + TAG_BYTES {
                    break;
                }
                let record = &mut out[ran.made..ran.made + payload + TAG_BYTES];
                let (carried, fresh) = (carry.len(), payload - carry.len());
                record[..carried].copy_from_slice(carry);
                record[carried..payload].copy_from_slice(&rest[..fresh]);
                sealer.seal(record, ends)?;
                carry.clear();
                ran.taken += fresh;
                ran.made += payload + TAG_BYTES;
                if ends {
                    ran.done = true;
                    break;
                }
            },
        }
        Ok(ran)
    }
}

/// Opens a sealed stream that comes in parts of any length. It gives out no byte of a record that does not verify, and
/// reports an end that is not the stream's own.
pub struct Opener {
    cipher: Cipher,
    key: Key,
    state: OpenState,
    /// The begin of a header or of a record whose rest has not come.
    carry: Vec<u8>,
    records: u64,
}

enum OpenState {
    Header,
    Gcm(LessSafeKey),
    Ctr(StreamingDecryptingKey),
}

impl Opener {
    /// For a stream that was sealed with this cipher and key. A stream of another cipher is refused: a stranger who could choose
    /// the cipher would choose the one that notices no change.
    pub fn new(cipher: Cipher, key: &Key) -> Self {
        let (state, carry) = (OpenState::Header, Vec::new());
        Self { cipher, key: key.clone(), state, carry, records: 0 }
    }

    /// Takes a part of the stream and makes plain bytes; `last`: no more come after these. `out` has room for a record.
    pub fn run(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<Ran, TransferError> {
        let mut ran = Ran::default();
        if matches!(self.state, OpenState::Header) {
            let wanted = HEADER_BYTES - self.carry.len();
            ran.taken = wanted.min(input.len());
            self.carry.extend_from_slice(&input[..ran.taken]);
            self.read_header(last && ran.taken == input.len())?;
        }
        match &mut self.state {
            OpenState::Header => {}
            OpenState::Ctr(key) => {
                let take = (input.len() - ran.taken).min(out.len() - CTR_SLACK);
                let made = key.update(&input[ran.taken..ran.taken + take], out);
                ran.made = made.map_err(|_| NO_CIPHER)?.written().len();
                ran.taken += take;
                ran.done = last && ran.taken == input.len();
            }
            OpenState::Gcm(_) => self.open_records(input, last, out, &mut ran)?,
        }
        Ok(ran)
    }

    /// Looks at the header once it is whole.
    fn read_header(&mut self, ends: bool) -> Result<(), TransferError> {
        let Ok(header) = <&Header>::try_from(self.carry.as_slice()) else {
            // As much of a header as has come.
            let begun = self.carry.len().min(8);
            let is_begin = self.carry[..begun] == b"SERVSEAL"[..begun];
            return match (is_begin, ends) {
                (false, _) => Err(TransferError::NotSealed),
                (true, true) => Err(TransferError::CutOff),
                (true, false) => Ok(()),
            };
        };
        if header[..FIXED_BYTES] != fixed(self.cipher) {
            return Err(TransferError::NotSealed);
        }
        self.state = match self.cipher {
            Cipher::Aes256Gcm => OpenState::Gcm(gcm_key(&self.key, header)),
            Cipher::Aes256Ctr => {
                let start = DecryptionContext::Iv128(FixedLength::from([0; 16]));
                let made = StreamingDecryptingKey::ctr(ctr_key(&self.key, header), start);
                OpenState::Ctr(made.map_err(|_| NO_CIPHER)?)
            }
        };
        self.carry.clear();
        Ok(())
    }

    fn open_records(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
        ran: &mut Ran,
    ) -> Result<(), TransferError> {
        loop {
            let rest = &input[ran.taken..];
            let have = self.carry.len() + rest.len();
            // Whether a full record is the last one is known when something follows, or the stream ends.
            let ends = last && have <= RECORD_BYTES;
            if have <= RECORD_BYTES && !ends {
                self.carry.extend_from_slice(rest);
                ran.taken = input.len();
                return Ok(());
            }
            let len = have.min(RECORD_BYTES);
            let Some(payload) = len.checked_sub(TAG_BYTES) else {
                return Err(TransferError::CutOff);
            };
            if out.len() - ran.made < payload {
                return Ok(());
            }
            let fresh = len - self.carry.len();
            let joined = !self.carry.is_empty();
            if joined {
                self.carry.extend_from_slice(&rest[..fresh]);
            }
            let record = if joined { self.carry.as_slice() } else { &rest[..len] };
            let to = &mut out[ran.made..ran.made + payload];
            if let Err(error) = self.open_record(record, ends, to) {
                if joined && !mutants::on("keep_what_did_not_open") {
                    self.carry.truncate(len - fresh);
                }
                // What verified goes out before the reason is reported.
                return if ran.made > 0 { Ok(()) } else { Err(error) };
            }
            self.carry.clear();
            self.records += 1;
            ran.taken += fresh;
            ran.made += payload;
            if ends {
                ran.done = true;
                return Ok(());
            }
        }
    }

    fn open_record(&self, record: &[u8], ends: bool, out: &mut [u8]) -> Result<(), TransferError> {
        let OpenState::Gcm(key) = &self.state else { unreachable!("the header has been read") };
        if self.records >= RECORDS_MAX && !mutants::on("open_records_without_limit") {
            return Err(TransferError::Range);
        }
        let (sealed, tag) = record.split_at(record.len() - TAG_BYTES);
        let mut open = |ends| {
            let nonce = nonce(self.records, ends);
            key.open_separate_gather(nonce, Aad::empty(), sealed, tag, out)
        };
        if open(ends).is_ok() {
            return Ok(());
        }
        if ends && mutants::on("open_without_the_last_record") && open(false).is_ok() {
            return Ok(());
        }
        // A record that verifies as one that is followed by others.
        if ends && record.len() == RECORD_BYTES && open(false).is_ok() {
            return Err(TransferError::CutOff);
        }
        Err(TransferError::NotVerified(self.records))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key::new([9; 32])
    }

    /// A stream of three records, the last of which has this many plain bytes.
    fn stream(last: usize) -> Vec<u8> {
        let mut sealer = StreamSealer::new(Cipher::Aes256Gcm, &key()).unwrap();
        let plain: Vec<u8> = (0..2 * PAYLOAD_BYTES + last).map(|at| (at / 7) as u8).collect();
        let mut stream = vec![0; HEADER_BYTES + 3 * RECORD_BYTES];
        let mut made = 0;
        let mut taken = 0;
        loop {
            let ran = sealer.run(&plain[taken..], true, &mut stream[made..]).unwrap();
            (taken, made) = (taken + ran.taken, made + ran.made);
            if ran.done {
                stream.truncate(made);
                return stream;
            }
        }
    }

    /// How many plain bytes come out of a stream that arrives in pieces of this size, and how it ends.
    fn opened(stream: &[u8], piece: usize) -> (usize, Result<(), TransferError>) {
        let mut opener = Opener::new(Cipher::Aes256Gcm, &key());
        let (mut made, mut at, mut out) = (0, 0, vec![0; RECORD_BYTES]);
        loop {
            let end = (at + piece).min(stream.len());
            match opener.run(&stream[at..end], end == stream.len(), &mut out) {
                Ok(ran) if ran.done => return (made + ran.made, Ok(())),
                Ok(ran) => (at, made) = (at + ran.taken, made + ran.made),
                Err(error) => return (made, Err(error)),
            }
        }
    }

    /// Bytes of the header and of this many records.
    fn records(count: usize) -> usize {
        HEADER_BYTES + count * RECORD_BYTES
    }

    #[test]
    fn a_stream_has_a_number_of_records_that_its_nonces_allow() {
        let header = begin_gcm().unwrap();
        let mut sealer = Sealer::at(&key(), header, RECORDS_MAX - 1);
        let mut record = vec![0; RECORD_BYTES];
        assert_eq!(sealer.seal(&mut record, false), Ok(()));
        for last in [false, true] {
            assert_eq!(sealer.seal(&mut record.clone(), last), Err(TransferError::Range));
        }
        let mut opener = Opener::new(Cipher::Aes256Gcm, &key());
        let mut out = vec![0; RECORD_BYTES];
        let begun = opener.run(&header, false, &mut out).unwrap();
        assert_eq!((begun.taken, begun.made), (HEADER_BYTES, 0));
        opener.records = RECORDS_MAX - 1;
        let stream = [&record[..], &[0; TAG_BYTES]].concat();
        let last = opener.run(&stream, true, &mut out).unwrap();
        assert_eq!((last.taken, last.made), (RECORD_BYTES, PAYLOAD_BYTES));
        let further = opener.run(&stream[RECORD_BYTES..], true, &mut out);
        assert_eq!(further.err(), Some(TransferError::Range));
    }

    #[test]
    fn every_record_has_a_nonce_of_its_own() {
        let mut sealer = Sealer::new(&key()).unwrap();
        let mut seal = |last| {
            let mut record = vec![0; RECORD_BYTES];
            sealer.seal(&mut record, last).unwrap();
            record
        };
        let mut all = vec![seal(false), seal(false), seal(false), seal(true)];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4, "the same plain bytes under the same nonce are the same record");
    }

    /// What a man in the middle can do to whole records.
    #[test]
    fn records_that_are_removed_repeated_or_exchanged_do_not_open() {
        for last in [1, 100, PAYLOAD_BYTES] {
            let stream = stream(last);
            let all = 2 * PAYLOAD_BYTES + last;
            let part =
                |from: usize, to: usize| &stream[from.min(stream.len())..to.min(stream.len())];
            let [begin, first, second, third] = [
                part(0, HEADER_BYTES),
                part(records(0), records(1)),
                part(records(1), records(2)),
                part(records(2), records(3)),
            ];
            for piece in [1000, RECORD_BYTES, 2 * RECORD_BYTES + 1, stream.len()] {
                assert_eq!(opened(&stream, piece), (all, Ok(())));
                let fails = |parts: &[&[u8]], whole: usize, error: TransferError| {
                    let (made, result) = opened(&parts.concat(), piece);
                    assert_eq!(
                        (made, result),
                        (whole * PAYLOAD_BYTES, Err(error)),
                        "{last} {piece}"
                    );
                };
                let wrong = |record| TransferError::NotVerified(record);
                // Without the last records, or without any.
                fails(&[begin, first, second], 1, TransferError::CutOff);
                fails(&[begin, first], 0, TransferError::CutOff);
                fails(&[begin], 0, TransferError::CutOff);
                fails(&[begin, first, second, &third[..third.len() - 1]], 2, wrong(2));
                // Without another one, with one twice, in another order.
                fails(&[begin, second, third], 0, wrong(0));
                fails(&[begin, first, third], 1, wrong(1));
                fails(&[begin, first, first, second, third], 1, wrong(1));
                fails(&[begin, first, second, second, third], 2, wrong(2));
                fails(&[begin, second, first, third], 0, wrong(0));
                fails(&[begin, first, third, second], 1, wrong(1));
                // More behind the last one.
                fails(&[begin, first, second, third, third], 2, wrong(2));
                fails(&[begin, first, second, third, &[0]], 2, wrong(2));
                // Of another stream with the same key.
                let other = self::stream(last);
                fails(&[begin, first, &other[records(1)..records(2)], third], 1, wrong(1));
            }
        }
    }

    #[test]
    fn what_does_not_open_does_not_open_at_the_next_try_either() {
        // Cut off between two records: the one that was last verifies only as one that others follow.
        let stream = stream(100);
        let cut = &stream[..records(2)];
        for piece in [RECORD_BYTES / 2, RECORD_BYTES - 1] {
            let mut opener = Opener::new(Cipher::Aes256Gcm, &key());
            let (mut at, mut out) = (0, vec![0; RECORD_BYTES]);
            let mut errors = 0;
            while errors < 3 {
                let end = (at + piece).min(cut.len());
                match opener.run(&cut[at..end], end == cut.len(), &mut out) {
                    Ok(ran) => {
                        assert!(errors == 0 && !ran.done, "it has failed");
                        at += ran.taken;
                    }
                    Err(error) => {
                        assert_eq!(error, TransferError::CutOff);
                        errors += 1;
                    }
                }
            }
        }
    }
}
