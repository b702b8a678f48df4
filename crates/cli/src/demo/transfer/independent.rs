//! What the engine does, by other implementations: the checks of the demo, and the loop that it is compared with.
//!
//! Compressed bytes are made and expanded by the programs `gzip` and `zstd`, and lines counted by `grep`, where the machine has them. Otherwise
//! it is done by the libraries, which the engine uses as well.

use std::io::{self, Read, Write};
use std::process::{Command, Stdio};
use std::thread;

use aes::Aes256;
use aes_gcm::Aes256Gcm;
use aes_gcm::aead::{AeadInPlace as _, KeyInit as _};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ctr::Ctr128BE;
use ctr::cipher::{KeyIvInit as _, StreamCipher as _};
use hkdf::Hkdf;
use md5::Md5;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use transfer::{DigestKind, Format};

/// The format of sealed streams, as `docs/transfer.md` describes it.
const HEADER_BYTES: usize = 48;
const RECORD_BYTES: usize = 64 << 10;
const TAG_BYTES: usize = 16;
const PAYLOAD_BYTES: usize = RECORD_BYTES - TAG_BYTES;

/// A library with AES-256-GCM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Library {
    /// The Rust crate `aes-gcm`.
    Rust,
    /// aws-lc, which the engine has.
    AwsLc,
}

/// Length of a sealed stream of as many plain bytes.
pub(super) fn sealed_bytes(plain: usize) -> usize {
    HEADER_BYTES + plain + TAG_BYTES * plain.div_ceil(PAYLOAD_BYTES).max(1)
}

/// The key of a stream with this header.
fn stream_key(key: &[u8; 32], header: &[u8]) -> [u8; 32] {
    let mut made = [0; 32];
    let derived = Hkdf::<Sha256>::new(Some(&header[16..HEADER_BYTES]), key);
    derived.expand(&header[..16], &mut made).expect("32 bytes are few enough");
    made
}

fn nonce(record: u64, last: bool) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[3] = last.into();
    nonce[4..].copy_from_slice(&record.to_be_bytes());
    nonce
}

/// AES-256-GCM of one stream.
enum Cipher {
    Rust(Box<Aes256Gcm>),
    AwsLc(Box<LessSafeKey>),
}

impl Cipher {
    fn new(library: Library, key: &[u8; 32]) -> Self {
        match library {
            Library::Rust => Self::Rust(Aes256Gcm::new(key.into()).into()),
            Library::AwsLc => {
                let key = UnboundKey::new(&AES_256_GCM, key).expect("it has 32 bytes");
                Self::AwsLc(LessSafeKey::new(key).into())
            }
        }
    }

    /// Encrypts in place and appends the tag.
    fn seal(&self, nonce: [u8; 12], record: &mut Vec<u8>) -> io::Result<()> {
        let sealed = match self {
            Self::Rust(cipher) => {
                cipher.encrypt_in_place(&nonce.into(), &[], record).map_err(|_| ())
            }
            Self::AwsLc(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                key.seal_in_place_append_tag(nonce, Aad::empty(), record).map_err(|_| ())
            }
        };
        sealed.map_err(|()| io::Error::other("AES-256-GCM failed"))
    }

    /// The plain bytes, if the record opens.
    fn open(&self, nonce: [u8; 12], record: &[u8]) -> Option<Vec<u8>> {
        let mut record = record.to_vec();
        match self {
            Self::Rust(cipher) => {
                cipher.decrypt_in_place(&nonce.into(), &[], &mut record).ok()?;
            }
            Self::AwsLc(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                let len = key.open_in_place(nonce, Aad::empty(), &mut record).ok()?.len();
                record.truncate(len);
            }
        }
        Some(record)
    }
}

/// Read, AES-256-GCM, write: `bytes` of a file as a sealed stream, with one buffer. The simple loop, not the best one.
pub(super) fn seal(
    library: Library,
    key: &[u8; 32],
    mut from: impl Read,
    bytes: usize,
    mut to: impl Write,
) -> io::Result<()> {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(b"SERVSEAL");
    header[8..12].copy_from_slice(&[1, 0, 1, 0]);
    header[12..16].copy_from_slice(&(RECORD_BYTES as u32).to_le_bytes());
    aws_lc_rs::rand::fill(&mut header[16..]).map_err(io::Error::other)?;
    to.write_all(&header)?;
    let cipher = Cipher::new(library, &stream_key(key, &header));
    let (mut rest, mut record) = (bytes, Vec::with_capacity(RECORD_BYTES));
    let records = bytes.div_ceil(PAYLOAD_BYTES).max(1) as u64;
    for number in 0..records {
        let payload = rest.min(PAYLOAD_BYTES);
        rest -= payload;
        record.resize(payload, 0);
        from.read_exact(&mut record)?;
        cipher.seal(nonce(number, number + 1 == records), &mut record)?;
        to.write_all(&record)?;
    }
    Ok(())
}

/// Opens a sealed stream of AES-256-GCM. Records that do not open become zeros.
pub(super) fn open(library: Library, key: &[u8; 32], stream: &[u8]) -> Vec<u8> {
    let Some((header, rest)) = stream.split_at_checked(HEADER_BYTES) else { return Vec::new() };
    let cipher = Cipher::new(library, &stream_key(key, header));
    let records = rest.chunks(RECORD_BYTES);
    let last = records.len().saturating_sub(1);
    let mut plain = Vec::with_capacity(rest.len());
    for (number, record) in records.enumerate() {
        match cipher.open(nonce(number as u64, number == last), record) {
            Some(payload) => plain.extend(payload),
            None => plain.resize(plain.len() + record.len().saturating_sub(TAG_BYTES), 0),
        }
    }
    plain
}

/// Opens a sealed stream of AES-256-CTR.
pub(super) fn open_ctr(key: &[u8; 32], stream: &[u8]) -> Vec<u8> {
    let Some((header, rest)) = stream.split_at_checked(HEADER_BYTES) else { return Vec::new() };
    let mut plain = rest.to_vec();
    let key = stream_key(key, header);
    Ctr128BE::<Aes256>::new(&key.into(), &[0; 16].into()).apply_keystream(&mut plain);
    plain
}

/// The digest in hexadecimal.
pub(super) fn digest(kind: DigestKind, bytes: &[u8]) -> String {
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
    match kind.name() {
        "md5" => hex(&Md5::digest(bytes)),
        "sha1" => hex(&Sha1::digest(bytes)),
        "sha256" => hex(&Sha256::digest(bytes)),
        "crc32c" => format!("{:08x}", crc32c(bytes)),
        other => unreachable!("no way of the demo has {other}"),
    }
}

/// CRC32C by a table, as RFC 3720 describes it.
fn crc32c(bytes: &[u8]) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut table = [0u32; 256];
    for (value, entry) in (0u32..).zip(&mut table) {
        *entry = (0..8).fold(value, |crc, _| (crc >> 1) ^ ((crc & 1) * REVERSED_POLYNOMIAL));
    }
    !bytes.iter().fold(!0, |crc: u32, byte| (crc >> 8) ^ table[usize::from((crc as u8) ^ byte)])
}

/// What a program makes of these bytes; `None`: the machine does not have it.
fn by_program(program: &str, arguments: &[&str], bytes: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut input = child.stdin.take().expect("it is a pipe");
    let output = thread::scope(|scope| {
        // A program that does not want the rest of its input ends.
        scope.spawn(move || _ = input.write_all(bytes));
        child.wait_with_output()
    });
    // The code says whether `grep` has found something.
    Ok(Some(output?.stdout))
}

/// What expands to these bytes.
pub(super) fn compress(format: Format, bytes: &[u8]) -> io::Result<Vec<u8>> {
    if let Some(made) = by_program(format.name(), &["-1", "-c"], bytes)? {
        return Ok(made);
    }
    match format {
        Format::Gzip => {
            let level = flate2::Compression::fast();
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
            encoder.write_all(bytes)?;
            encoder.finish()
        }
        Format::Zstd => zstd::encode_all(bytes, 1),
    }
}

/// What these bytes expand to; empty if they are no such stream.
pub(super) fn expand(format: Format, bytes: &[u8]) -> io::Result<Vec<u8>> {
    if let Some(made) = by_program(format.name(), &["-d", "-c"], bytes)? {
        return Ok(made);
    }
    let mut plain = Vec::new();
    let expanded = match format {
        Format::Gzip => flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut plain),
        Format::Zstd => zstd::Decoder::new(bytes)?.read_to_end(&mut plain),
    };
    if expanded.is_err() {
        plain.clear();
    }
    Ok(plain)
}

/// Where a text occurs; occurrences do not overlap.
pub(super) fn occurrences(text: &[u8], bytes: &[u8]) -> Vec<u64> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(next) = bytes[at..].iter().position(|byte| *byte == text[0]) {
        at += next;
        if bytes[at..].starts_with(text) {
            found.push(at as u64);
            at += text.len();
        } else {
            at += 1;
        }
    }
    found
}

/// How many lines match an expression.
pub(super) fn matching_lines(expression: &str, text: &[u8]) -> io::Result<u64> {
    if let Some(count) = by_program("grep", &["-c", "-E", expression], text)? {
        let count = String::from_utf8_lossy(&count).trim().parse();
        return count.map_err(io::Error::other);
    }
    let expression = regex::bytes::Regex::new(expression).map_err(io::Error::other)?;
    Ok(text.split(|byte| *byte == b'\n').filter(|line| expression.is_match(line)).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_digests_are_the_published_ones() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        let of_abc = |kind| digest(kind, b"abc");
        assert_eq!(of_abc(DigestKind::Md5), "900150983cd24fb0d6963f7d28e17f72");
        assert_eq!(of_abc(DigestKind::Sha1), "a9993e364706816aba3e25717850c26c9cd0d89d");
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of_abc(DigestKind::Sha256), sha);
    }

    #[test]
    fn what_one_library_seals_the_other_opens_unless_it_is_spoiled() {
        let key = [7; 32];
        for plain in [0, 1, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 3 * PAYLOAD_BYTES] {
            let plain: Vec<u8> = (0..plain).map(|at| (at / 3) as u8 | 1).collect();
            for (by, other) in [(Library::Rust, Library::AwsLc), (Library::AwsLc, Library::Rust)] {
                let mut sealed = Vec::new();
                seal(by, &key, &plain[..], plain.len(), &mut sealed).unwrap();
                assert_eq!(sealed.len(), sealed_bytes(plain.len()));
                assert!(open(other, &key, &sealed) == plain, "{by:?}");
                sealed[HEADER_BYTES] ^= 1;
                let spoiled = open(other, &key, &sealed);
                assert!(spoiled != plain || plain.is_empty(), "{by:?}");
                assert!(spoiled.len() == plain.len());
            }
        }
    }

    #[test]
    fn compressed_bytes_expand_and_others_do_not() {
        let plain = b"serval, serval, serval".repeat(1000);
        for format in Format::ALL {
            let made = compress(format, &plain).unwrap();
            assert!(made.len() < plain.len() / 10, "{format}");
            assert!(expand(format, &made).unwrap() == plain, "{format}");
            assert!(expand(format, &plain).unwrap().is_empty(), "{format}");
        }
    }

    #[test]
    fn a_text_and_lines_are_found() {
        assert_eq!(occurrences(b"aa", b"aaaabaa"), [0, 2, 5]);
        assert_eq!(matching_lines("^a+b?$", b"ab\nba\naaa\n").unwrap(), 2);
    }
}
