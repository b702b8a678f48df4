//! One command after the other through the engine, and what another implementation says about each.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use transfer::{
    Cipher, Command, DigestKind, Engine, ExpandLimits, Format, KernelSource, Key, Place,
    Report as Moved, SearchKind, SearchSpec, StageSpec,
};

use super::independent::{self, Library};
use super::{FILE, LIMIT};

/// Bytes that are compared at a time: one check.
const BLOCK_BYTES: usize = 65_520;
/// What is looked for in the file.
const TEXT: &str = "ELF";
/// The lines that are looked for: the first one, and others.
const LINES: &str = "^7f454c46|^(00){2}.*[0-9a-f]f+$";
/// Bytes that become text at most, and in a line of it.
const TEXT_BYTES_MAX: usize = 4 << 20;
const LINE_BYTES: usize = 32;
/// Offsets that a search reports.
const OFFSETS: u16 = 16;

/// What a way begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    /// The file as it is.
    Plain,
    /// Sealed with AES-256-GCM.
    Sealed,
    /// Compressed.
    Packed(Format),
    /// Compressed by Zstandard, then sealed.
    PackedSealed,
    /// The begin of the file as text, compressed by Zstandard.
    PackedText,
}

/// What comes out at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Plain,
    Sealed,
    SealedCtr,
    Packed(Format),
    PackedSealed,
    /// It goes to /dev/null.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    FileToSocket,
    SocketToFile,
    FileToNothing,
}

/// A way through the engine.
pub(super) struct Way {
    pub(super) name: &'static str,
    ends: Ends,
    input: Input,
    stages: Vec<StageSpec>,
    output: Output,
    /// `--corrupt` changes a byte of what arrives here.
    is_spoiled: bool,
}

/// The ways. `kernel` is one that encrypts with AES-256-CTR.
pub(super) fn all(key: [u8; 32], kernel: KernelSource) -> Vec<Way> {
    use DigestKind::{Crc32c, Md5, Sha1, Sha256};
    use Ends::{FileToNothing, FileToSocket, SocketToFile};
    let key = || Key::new(key);
    let digest = StageSpec::Digest;
    let (open, seal) = (
        || StageSpec::Open(Cipher::Aes256Gcm, key()),
        || StageSpec::Seal(Cipher::Aes256Gcm, key()),
    );
    let expand = |format| StageSpec::Expand(format, ExpandLimits::default());
    let compress = |format: Format| StageSpec::Compress(format.into());
    let search = |kind, pattern: &str| {
        StageSpec::Search(SearchSpec { kind, pattern: pattern.into(), offsets: OFFSETS })
    };
    let way = |name, ends, input, stages, output| Way {
        name,
        ends,
        input,
        stages,
        output,
        is_spoiled: false,
    };
    let (plain, packed) = (Input::Plain, Input::Packed);
    vec![
        way("file -> socket", FileToSocket, plain, vec![], Output::Plain),
        way("file -> CRC32C -> socket", FileToSocket, plain, vec![digest(Crc32c)], Output::Plain),
        Way {
            is_spoiled: true,
            ..way(
                "file -> AES-256-GCM -> socket",
                FileToSocket,
                plain,
                vec![seal()],
                Output::Sealed,
            )
        },
        way(
            "file -> SHA-256 -> AES-256-GCM -> socket",
            FileToSocket,
            plain,
            vec![digest(Sha256), seal()],
            Output::Sealed,
        ),
        way("socket -> SHA-256 -> file", SocketToFile, plain, vec![digest(Sha256)], Output::Plain),
        way(
            "file -> MD5, SHA-1, SHA-256, CRC32C -> socket",
            FileToSocket,
            plain,
            [Md5, Sha1, Sha256, Crc32c].map(digest).to_vec(),
            Output::Plain,
        ),
        way(
            "sealed file -> open -> SHA-256 -> socket",
            FileToSocket,
            Input::Sealed,
            vec![open(), digest(Sha256)],
            Output::Plain,
        ),
        way(
            "file -> gzip -> socket",
            FileToSocket,
            plain,
            vec![compress(Format::Gzip)],
            Output::Packed(Format::Gzip),
        ),
        way(
            "gzip file -> expand -> MD5 -> socket",
            FileToSocket,
            packed(Format::Gzip),
            vec![expand(Format::Gzip), digest(Md5)],
            Output::Plain,
        ),
        way(
            "file -> SHA-1 -> Zstandard -> AES-256-GCM -> socket",
            FileToSocket,
            plain,
            vec![digest(Sha1), compress(Format::Zstd), seal()],
            Output::PackedSealed,
        ),
        way(
            "socket -> open -> expand -> SHA-256 -> file",
            SocketToFile,
            Input::PackedSealed,
            vec![open(), expand(Format::Zstd), digest(Sha256)],
            Output::Plain,
        ),
        way(
            "file -> search for a text",
            FileToNothing,
            plain,
            vec![search(SearchKind::Text, TEXT)],
            Output::Nothing,
        ),
        way(
            "Zstandard text -> expand -> search lines",
            FileToNothing,
            Input::PackedText,
            vec![expand(Format::Zstd), search(SearchKind::Lines, LINES)],
            Output::Nothing,
        ),
        way(
            "file -> MD5 -> kernel (AES-256-CTR) -> socket",
            FileToSocket,
            plain,
            vec![digest(Md5), StageSpec::SealOn(kernel, key())],
            Output::SealedCtr,
        ),
    ]
}

/// Checks and what they found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checks {
    pub(super) checked: u64,
    pub(super) wrong: u64,
}

impl Checks {
    pub(super) fn add(&mut self, is_right: bool) {
        self.checked += 1;
        self.wrong += u64::from(!is_right);
    }

    /// Compares block by block.
    pub(super) fn compare(&mut self, got: &[u8], expected: &[u8]) {
        self.add(got.len() == expected.len());
        for (at, block) in expected.chunks(BLOCK_BYTES).enumerate() {
            let start = (at * BLOCK_BYTES).min(got.len());
            self.add(got[start..].starts_with(block));
        }
    }

    pub(super) fn join(&mut self, other: Self) {
        self.checked += other.checked;
        self.wrong += other.wrong;
    }
}

/// A transfer that has ended, and what was checked.
pub(super) struct Ran {
    pub(super) checks: Checks,
    pub(super) moved: Moved,
    pub(super) took: Duration,
}

/// What the ways have in common.
pub(super) struct Runner<'r> {
    pub(super) engine: &'r Engine,
    pub(super) folder: &'r Path,
    /// The begin of the file.
    pub(super) content: &'r [u8],
    pub(super) key: [u8; 32],
}

impl Runner<'_> {
    /// One transfer, with what the other side got and the time it took.
    pub(super) fn run(&self, way: &Way, corrupt: bool) -> io::Result<Ran> {
        let plain: Cow<'_, [u8]> = match way.input {
            Input::PackedText => as_text(self.content).into(),
            _ => self.content.into(),
        };
        let (moved, mut got, took) = match way.ends {
            Ends::FileToSocket => self.send(way, &plain)?,
            Ends::SocketToFile => self.receive(way, &plain)?,
            Ends::FileToNothing => self.drop(way, &plain)?,
        };
        if corrupt && way.is_spoiled {
            let middle = got.len() / 2;
            got[middle] ^= 1;
        }
        let mut checks = Checks::default();
        if way.output != Output::Nothing {
            checks.add(moved.written == got.len() as u64);
            checks.compare(&self.plain_of(way.output, got)?, &plain);
        }
        check_stages(&mut checks, way, &moved, &plain)?;
        Ok(Ran { checks, moved, took })
    }

    fn command(&self, way: &Way, source: Place, bytes: Option<u64>, sink: Place) -> Command {
        Command::new(source, bytes, way.stages.clone(), sink).deadline(LIMIT)
    }

    fn execute(&self, command: Command) -> io::Result<Moved> {
        let outcome = self.engine.submit(command).map_err(io::Error::other)?.wait();
        outcome.result.map(|()| outcome.report).map_err(io::Error::other)
    }

    fn input(&self, way: &Way, plain: &[u8]) -> io::Result<Vec<u8>> {
        let sealed = |plain: &[u8]| {
            let mut sealed = Vec::new();
            independent::seal(Library::Rust, &self.key, plain, plain.len(), &mut sealed)?;
            Ok(sealed)
        };
        match way.input {
            Input::Plain => Ok(plain.to_vec()),
            Input::Sealed => sealed(plain),
            Input::Packed(format) => independent::compress(format, plain),
            Input::PackedSealed => sealed(&independent::compress(Format::Zstd, plain)?),
            Input::PackedText => independent::compress(Format::Zstd, plain),
        }
    }

    fn plain_of(&self, output: Output, got: Vec<u8>) -> io::Result<Vec<u8>> {
        match output {
            Output::Plain | Output::Nothing => Ok(got),
            Output::Sealed => Ok(independent::open(Library::Rust, &self.key, &got)),
            Output::SealedCtr => Ok(independent::open_ctr(&self.key, &got)),
            Output::Packed(format) => independent::expand(format, &got),
            Output::PackedSealed => {
                let packed = independent::open(Library::Rust, &self.key, &got);
                independent::expand(Format::Zstd, &packed)
            }
        }
    }

    /// The file, or another one, and how much of it.
    fn source(&self, way: &Way, plain: &[u8]) -> io::Result<(Place, Option<u64>)> {
        if way.input == Input::Plain {
            let bytes = Some(plain.len() as u64);
            return Ok((Place::File(File::open(FILE)?.into(), 0), bytes));
        }
        let mut file = scratch(self.folder)?;
        file.write_all(&self.input(way, plain)?)?;
        Ok((Place::File(file.into(), 0), None))
    }

    fn send(&self, way: &Way, plain: &[u8]) -> io::Result<(Moved, Vec<u8>, Duration)> {
        let (ours, mut theirs) = pair()?;
        let (source, bytes) = self.source(way, plain)?;
        let command = self.command(way, source, bytes, Place::Socket(ours.into()));
        let began = Instant::now();
        thread::scope(|scope| {
            let receiver = scope.spawn(move || {
                let mut got = Vec::new();
                theirs.read_to_end(&mut got).map(|_| got)
            });
            let moved = self.execute(command);
            let got = receiver.join().expect("it does not panic");
            Ok((moved?, got?, began.elapsed()))
        })
    }

    fn receive(&self, way: &Way, plain: &[u8]) -> io::Result<(Moved, Vec<u8>, Duration)> {
        let (ours, mut theirs) = pair()?;
        let mut file = scratch(self.folder)?;
        let sink = Place::File(file.try_clone()?.into(), 0);
        let command = self.command(way, Place::Socket(ours.into()), None, sink);
        let input = self.input(way, plain)?;
        let began = Instant::now();
        let moved = thread::scope(|scope| {
            let sender = scope.spawn(move || theirs.write_all(&input));
            let moved = self.execute(command);
            sender.join().expect("it does not panic").and(moved)
        })?;
        let took = began.elapsed();
        let mut got = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut got)?;
        Ok((moved, got, took))
    }

    fn drop(&self, way: &Way, plain: &[u8]) -> io::Result<(Moved, Vec<u8>, Duration)> {
        let (source, bytes) = self.source(way, plain)?;
        let sink = File::options().write(true).open("/dev/null")?;
        let command = self.command(way, source, bytes, Place::File(sink.into(), 0));
        let began = Instant::now();
        let moved = self.execute(command)?;
        Ok((moved, Vec::new(), began.elapsed()))
    }
}

/// What the stages say, compared with what others say about the plain bytes.
fn check_stages(checks: &mut Checks, way: &Way, moved: &Moved, plain: &[u8]) -> io::Result<()> {
    checks.add(moved.stages.len() == way.stages.len());
    for (stage, spec) in moved.stages.iter().zip(&way.stages) {
        checks.add(stage.finished);
        match spec {
            StageSpec::Digest(kind) => {
                let value = stage.digest.map(|digest| digest.to_string());
                checks.add(value == Some(independent::digest(*kind, plain)));
            }
            StageSpec::Search(SearchSpec { kind: SearchKind::Text, pattern, .. }) => {
                let expected = independent::occurrences(pattern, plain);
                let found = stage.found.clone().unwrap_or_default();
                checks.add(found.count == expected.len() as u64 && !expected.is_empty());
                let first = &expected[..expected.len().min(OFFSETS.into())];
                checks.add(found.offsets == first);
            }
            StageSpec::Search(SearchSpec { kind: SearchKind::Lines, .. }) => {
                let expected = independent::matching_lines(LINES, plain)?;
                let count = stage.found.as_ref().map(|found| found.count);
                checks.add(count == Some(expected) && expected > 0);
            }
            _ => {}
        }
    }
    Ok(())
}

/// In hexadecimal, a line for each 32 bytes.
fn as_text(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let bytes = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
    let mut text = Vec::with_capacity(2 * bytes.len() + bytes.len() / LINE_BYTES + 1);
    for line in bytes.chunks(LINE_BYTES) {
        let digits = line.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        text.extend(digits.map(|digit| DIGITS[usize::from(digit)]));
        text.push(b'\n');
    }
    text
}

/// The two ends of a TCP connection.
pub(super) fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let ours = TcpStream::connect(listener.local_addr()?)?;
    let (theirs, _) = listener.accept()?;
    theirs.set_read_timeout(Some(LIMIT))?;
    theirs.set_write_timeout(Some(LIMIT))?;
    Ok((ours, theirs))
}

/// A file that is gone when it is closed.
fn scratch(folder: &Path) -> io::Result<File> {
    let path = folder.join("scratch");
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(path)?;
    Ok(file)
}
