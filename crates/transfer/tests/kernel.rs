//! Kernels as stages of transfers: replies in any order and of any length, AES of another library, kernels that fail or hang.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use aes::Aes256;
use ctr::Ctr128BE;
use ctr::cipher::{KeyIvInit as _, StreamCipher as _, StreamCipherSeek as _};
use proptest::prelude::*;
use transfer::stages::kernel::PIECE_HEADER_BYTES;
use transfer::{
    Cipher, DigestKind, Engine, Kernel, KernelSource, Key, Limits, Source, TransferError,
};

/// A kernel in the test. Replies come back in an order that looks random.
struct Fake {
    message_max: usize,
    depth: usize,
    work: fn(&[u8]) -> Option<Vec<u8>>,
    replies: VecDeque<(u64, Vec<u8>)>,
    in_flight: usize,
    turn: usize,
}

impl Kernel for Fake {
    fn bytes_max(&self) -> (usize, usize) {
        (self.message_max, 2 * self.message_max)
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn send(&mut self, number: u64, message: &[u8]) -> Result<bool, String> {
        assert!(message.len() <= self.message_max && message.len() > PIECE_HEADER_BYTES);
        self.turn += 1;
        // Now and then there is no room.
        if self.in_flight == self.depth || self.turn % 7 == 0 {
            return Ok(false);
        }
        self.in_flight += 1;
        let Some(reply) = (self.work)(message) else { return Ok(true) };
        let at = self.turn * 5 % (self.replies.len() + 1);
        self.replies.insert(at, (number, reply));
        Ok(true)
    }

    fn receive(&mut self, into: &mut [u8], wait: Duration) -> Result<Option<(u64, usize)>, String> {
        self.turn += 1;
        if self.turn % 5 == 0 {
            return Ok(None);
        }
        let Some((number, reply)) = self.replies.pop_front() else {
            std::thread::sleep(wait);
            return Ok(None);
        };
        self.in_flight -= 1;
        into[..reply.len()].copy_from_slice(&reply);
        Ok(Some((number, reply.len())))
    }
}

fn source(message_max: usize, depth: usize, work: fn(&[u8]) -> Option<Vec<u8>>) -> KernelSource {
    let replies = VecDeque::new;
    KernelSource::new(move || {
        Ok(Box::new(Fake { message_max, depth, work, replies: replies(), in_flight: 0, turn: 0 }))
    })
}

/// What the kernel `aes256_ctr` does, by another library.
fn aes(message: &[u8]) -> Option<Vec<u8>> {
    let offset = u64::from_le_bytes(message[8..16].try_into().unwrap());
    let mut cipher = Ctr128BE::<Aes256>::new(message[16..48].into(), &[0; 16].into());
    cipher.seek(offset);
    let mut bytes = message[PIECE_HEADER_BYTES..].to_vec();
    cipher.apply_keystream(&mut bytes);
    Some(bytes)
}

/// Every byte twice, of every second piece nothing.
fn doubled(message: &[u8]) -> Option<Vec<u8>> {
    let number = u64::from_le_bytes(message[..8].try_into().unwrap());
    let twice = message[PIECE_HEADER_BYTES..].iter().flat_map(|byte| [*byte; 2]);
    Some(if number % 2 == 0 { twice.collect() } else { Vec::new() })
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at as u64 * 0x9e37_79b9) >> 11) as u8).collect()
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = sys::descriptors::nameless(&std::env::temp_dir()).unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn read_all(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

fn engine() -> Engine {
    Engine::start(Limits::default()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn what_a_kernel_seals_opens_everywhere(
        bytes in 0..1_300_000_usize,
        message_max in prop::sample::select(vec![64, 100, 4096, 16_432, 70_000]),
        depth in 1..40_usize,
    ) {
        // Small messages are many: fewer bytes of them.
        let plain = content(if message_max < 4096 { bytes / 20 } else { bytes });
        let engine = engine();
        let key = || Key::new([9; 32]);
        let (sealed, opened) = (file_of(&[]), file_of(&[]));
        let seal = Source::file(file_of(&plain), 0, None).digest(DigestKind::Sha256);
        let seal = seal.seal_on(source(message_max, depth, aes), key());
        let outcome = engine.submit(seal.file(sealed.try_clone().unwrap(), 0)).unwrap().wait();
        prop_assert_eq!(outcome.result, Ok(()));
        prop_assert_eq!(outcome.report.written, plain.len() as u64 + 48);
        let stages = &outcome.report.stages;
        prop_assert_eq!((stages[1].kind.name(), stages[1].bytes), ("aes-256-ctr-kernel", plain.len() as u64));
        let open = Source::file(sealed, 0, None).open_with(Cipher::Aes256Ctr, key());
        let open = open.digest(DigestKind::Sha256).file(opened.try_clone().unwrap(), 0);
        let back = engine.submit(open).unwrap().wait();
        prop_assert_eq!(back.result, Ok(()));
        prop_assert!(read_all(&opened) == plain);
        prop_assert_eq!(back.report.digest(), outcome.report.digest());
    }
}

#[test]
fn replies_of_other_lengths_go_on_in_the_order_of_the_pieces() {
    let plain = content(200_000);
    let sink = file_of(&[]);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let command = Source::socket(theirs, None).kernel(source(1048, 8, doubled), [1; 32]);
    let command = command.digest(DigestKind::Crc32c).file(sink.try_clone().unwrap(), 0);
    let engine = engine();
    let transfer = engine.submit(command).unwrap();
    for part in plain.chunks(777) {
        ours.write_all(part).unwrap();
    }
    drop(ours);
    let outcome = transfer.wait();
    assert_eq!(outcome.result, Ok(()));
    let kept = plain.chunks(992).step_by(2).flatten();
    let expected: Vec<u8> = kept.flat_map(|byte| [*byte; 2]).collect();
    assert!(read_all(&sink) == expected);
    assert_eq!(outcome.report.stages[1].bytes, expected.len() as u64);
}

#[test]
fn what_has_come_goes_on_while_the_source_is_silent() {
    let (mut ours, source_end) = UnixStream::pair().unwrap();
    let (sink_end, mut theirs) = UnixStream::pair().unwrap();
    let command = Source::socket(source_end, None).kernel(source(64, 4, aes), [3; 32]);
    let engine = engine();
    let transfer = engine.submit(command.socket(sink_end)).unwrap();
    theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut expected = content(16 * 20);
    let mut got = vec![0; 16 * 20];
    for piece in 0..20 {
        ours.write_all(&expected[16 * piece..16 * (piece + 1)]).unwrap();
        theirs.read_exact(&mut got[16 * piece..16 * (piece + 1)]).unwrap();
    }
    let mut cipher = Ctr128BE::<Aes256>::new(&[3; 32].into(), &[0; 16].into());
    cipher.apply_keystream(&mut expected);
    assert!(got == expected);
    drop(ours);
    assert_eq!(transfer.wait().result, Ok(()));
}

#[test]
fn a_kernel_that_fails_or_hangs_ends_its_transfer_and_no_other() {
    let engine = engine();
    let plain = content(100_000);
    let start = |kernel, stall| {
        let command = Source::file(file_of(&plain), 0, None).kernel(kernel, [0; 32]);
        engine.submit(command.file(file_of(&[]), 0).stall(stall))
    };
    let patient = Duration::from_secs(60);
    let refused = start(KernelSource::new(|| Err("nothing listens there".into())), patient);
    let error = refused.err().unwrap();
    assert_eq!((error.name(), error.errno()), ("kernel", 5));
    assert!(error.to_string().ends_with("nothing listens there"), "{error}");
    let short = start(source(50, 4, aes), patient).err().unwrap().to_string();
    assert!(short.contains("at most 50 bytes"), "{short}");

    // One that does not encrypt, whose replies have the key.
    let key = Key::new([5; 32]);
    let sink = file_of(&[]);
    let echo = source(1072, 8, |message| Some(message.to_vec()));
    let command = Source::file(file_of(&plain), 0, None).seal_on(echo, key);
    let outcome = engine.submit(command.file(sink.try_clone().unwrap(), 0)).unwrap().wait();
    assert!(
        matches!(&outcome.result, Err(TransferError::Kernel(why)) if why.contains("does not encrypt")),
        "{outcome:?}"
    );
    assert!(read_all(&sink).len() <= 48, "nothing but the header has left");

    // It answers the first pieces only.
    fn silent(message: &[u8]) -> Option<Vec<u8>> {
        let number = u64::from_le_bytes(message[..8].try_into().unwrap());
        (number < 3).then(|| message[PIECE_HEADER_BYTES..].to_vec())
    }
    let hangs = start(source(1072, 8, silent), Duration::from_secs(2)).unwrap();
    let began = Instant::now();
    let other = start(source(1072, 8, aes), patient).unwrap().wait();
    assert_eq!(other.result, Ok(()));
    let outcome = hangs.wait();
    assert!(matches!(outcome.result, Err(TransferError::Stalled(_))), "{outcome:?}");
    assert!(began.elapsed() >= Duration::from_secs(1), "it had its time");
    assert!(outcome.report.written <= 3 * 1024, "{}", outcome.report.written);
    let cancelled = start(source(1072, 8, silent), patient).unwrap();
    cancelled.cancel();
    assert_eq!(cancelled.wait().result, Err(TransferError::Cancelled));
}
