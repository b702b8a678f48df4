//! `serval demo transfer`: a real file goes through a transfer engine in every way, and other implementations of the
//! digests and of AES-GCM check what arrives.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use aes_gcm::aead::{Aead as _, KeyInit as _};
use aes_gcm::{Aes256Gcm, Nonce};
use hkdf::Hkdf;
use serde_json::{Value as Json, json};
use server::config::bytes_for_people;
use sha2::{Digest as _, Sha256};
use sys::local::LocalListener;
use transfer::message::Answer;
use transfer::{Client, Command, DigestKind, Key, Report as Moved, Service, ServiceLimits, Source};

use super::{DemoError, Report, Stage};
use crate::screen::{Table, Tone};

/// The file: this program, which is large enough and on every machine.
const FILE: &str = "/proc/self/exe";
/// Bytes of it that are used at most, and with `--quick`.
const BYTES_MAX: usize = 64 << 20;
const QUICK_BYTES_MAX: usize = 8 << 20;
/// Bytes that are compared at a time: one check.
const BLOCK_BYTES: usize = 65_520;
/// Longest that a transfer may take.
const LIMIT: Duration = Duration::from_secs(60);

/// The ways through the engine.
const WAYS: [Way; 5] = [
    Way { name: "file -> socket", digest: None, sealed: false, receives: false },
    Way {
        name: "file -> CRC32C -> socket",
        digest: Some(DigestKind::Crc32c),
        sealed: false,
        receives: false,
    },
    Way { name: "file -> AES-256-GCM -> socket", digest: None, sealed: true, receives: false },
    Way {
        name: "file -> SHA-256 -> AES-256-GCM -> socket",
        digest: Some(DigestKind::Sha256),
        sealed: true,
        receives: false,
    },
    Way {
        name: "socket -> SHA-256 -> file",
        digest: Some(DigestKind::Sha256),
        sealed: false,
        receives: true,
    },
];

struct Way {
    name: &'static str,
    digest: Option<DigestKind>,
    sealed: bool,
    receives: bool,
}

/// Checks and what they found.
#[derive(Clone, Copy, Default)]
struct Checks {
    checked: u64,
    wrong: u64,
}

impl Checks {
    fn add(&mut self, is_right: bool) {
        self.checked += 1;
        self.wrong += u64::from(!is_right);
    }

    /// Compares block by block.
    fn compare(&mut self, got: &[u8], expected: &[u8]) {
        self.add(got.len() == expected.len());
        for (at, block) in expected.chunks(BLOCK_BYTES).enumerate() {
            let start = (at * BLOCK_BYTES).min(got.len());
            self.add(got[start..].starts_with(block));
        }
    }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Report, DemoError> {
    let io = |what: &str| {
        let what = what.to_owned();
        move |error| DemoError::Io { what, error }
    };
    let folder = Folder::new().map_err(io("make a folder for the engine's socket"))?;
    let limit = if stage.options.quick { QUICK_BYTES_MAX } else { BYTES_MAX };
    let mut content = Vec::new();
    let file = File::open(FILE).map_err(io("open this program's file"))?;
    (&file).take(limit as u64).read_to_end(&mut content).map_err(io("read this program's file"))?;
    let socket = folder.0.join("engine");
    let listener =
        LocalListener::bind(&socket).map_err(|error| DemoError::Wrong(error.to_string()))?;
    let service = Service::start(listener, ServiceLimits::default())
        .map_err(io("start a transfer engine"))?;
    let mut client =
        Client::connect(&socket).map_err(|error| DemoError::Wrong(error.to_string()))?;

    let bar = stage.progress("transferring", WAYS.len());
    let mut table = Table::new(&["", ">bytes", ">rate", ">checked", ">wrong"]);
    let (mut rows, mut total) = (Vec::new(), Checks::default());
    let key: [u8; 32] = Sha256::digest(content.len().to_le_bytes()).into();
    for way in &WAYS {
        stage.check_interrupted()?;
        let corrupt = stage.options.corrupt && way.sealed && way.digest.is_none();
        let (checks, moved, seconds) = travel(way, &mut client, &folder.0, &content, key, corrupt)
            .map_err(io("transfer a file"))?;
        let rate = moved.written as f64 / seconds;
        let shown =
            [bytes_for_people(moved.written), format!("{}/s", bytes_for_people(rate as u64))];
        let counts = [checks.checked.to_string(), checks.wrong.to_string()];
        table.row([way.name.to_owned()].into_iter().chain(shown).chain(counts));
        rows.push(json!({
            "way": way.name, "bytes": moved.written, "bytes_per_second": rate,
            "digest": moved.digest().map(|digest| digest.to_string()),
            "checked": checks.checked, "wrong": checks.wrong,
        }));
        total.checked += checks.checked;
        total.wrong += checks.wrong;
        bar.inc(1);
    }
    bar.finish_and_clear();
    total.add(service.in_flight() == 0);

    let screen = &stage.options.screen;
    let title = format!(
        "{} of this program's file through a transfer engine",
        bytes_for_people(content.len() as u64)
    );
    let text = format!(
        "{}\n\n{}\n  Each way is one command; the thread that asked for it touched none of the bytes. Loopback TCP; {}.\n  \
         {} blocks, digests and lengths were checked with other implementations than the engine's, {} were wrong.\n",
        screen.paint(Tone::Bold, &title),
        table.render(screen),
        stage.cores(),
        total.checked,
        total.wrong
    );
    let json: Json = json!({
        "demo": "transfer", "file_bytes": content.len(), "rows": rows,
        "checked": total.checked, "wrong": total.wrong,
    });
    let failure = (total.wrong > 0)
        .then(|| format!("{} of {} checks found wrong bytes", total.wrong, total.checked));
    Ok(Report { text, json, chart: None, failure })
}

/// One transfer, with what the other side got and the time it took.
fn travel(
    way: &Way,
    client: &mut Client,
    folder: &std::path::Path,
    content: &[u8],
    key: [u8; 32],
    corrupt: bool,
) -> std::io::Result<(Checks, Moved, f64)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let ours = TcpStream::connect(listener.local_addr()?)?;
    let (mut theirs, _) = listener.accept()?;
    theirs.set_read_timeout(Some(LIMIT))?;
    theirs.set_write_timeout(Some(LIMIT))?;
    let began = Instant::now();
    let (moved, mut got) = if way.receives {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(folder.join("sink"))?;
        let source = Source::socket(ours, None).digest(way.digest.expect("it has one"));
        let command = source.file(file.try_clone()?, 0);
        let moved = thread::scope(|scope| {
            let sender = scope.spawn(move || theirs.write_all(content));
            let moved = execute(client, command);
            sender.join().expect("it does not panic").and(moved)
        })?;
        let mut got = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut got)?;
        (moved, got)
    } else {
        let command = send(way, ours, content.len(), key)?;
        thread::scope(|scope| {
            let receiver = scope.spawn(move || {
                let mut got = Vec::new();
                theirs.read_to_end(&mut got).map(|_| got)
            });
            let moved = execute(client, command);
            let got = receiver.join().expect("it does not panic");
            Ok::<_, std::io::Error>((moved?, got?))
        })?
    };
    let seconds = began.elapsed().as_secs_f64();
    if corrupt {
        let middle = got.len() / 2;
        got[middle] ^= 1;
    }
    let mut checks = Checks::default();
    checks.add(moved.written == got.len() as u64);
    if way.sealed {
        checks.compare(&open(&key, &got), content);
    } else {
        checks.compare(&got, content);
    }
    if let Some(digest) = moved.digest() {
        checks.add(digest.to_string() == other_digest(digest.kind(), content));
    }
    Ok((checks, moved, seconds))
}

fn send(way: &Way, to: TcpStream, bytes: usize, key: [u8; 32]) -> std::io::Result<Command> {
    let source = Source::file(File::open(FILE)?, 0, Some(bytes as u64));
    let key = Key::new(key);
    Ok(match (way.digest, way.sealed) {
        (Some(kind), true) => source.digest(kind).seal(key).socket(to),
        (Some(kind), false) => source.digest(kind).socket(to),
        (None, true) => source.seal(key).socket(to),
        (None, false) => source.socket(to),
    })
}

fn execute(client: &mut Client, command: Command) -> std::io::Result<Moved> {
    let id = client.submit(command).map_err(std::io::Error::other)?;
    match client.next(LIMIT).map_err(std::io::Error::other)? {
        Some(Answer::Ended { id: ended, result, report }) if ended == id => {
            result.map(|()| report).map_err(std::io::Error::other)
        }
        _ => Err(std::io::ErrorKind::TimedOut.into()),
    }
}

/// Opens a sealed stream without the engine's code. Records that do not open become zeros.
fn open(key: &[u8; 32], stream: &[u8]) -> Vec<u8> {
    const HEADER_BYTES: usize = 48;
    let Some((header, rest)) = stream.split_at_checked(HEADER_BYTES) else { return Vec::new() };
    let mut stream_key = [0; 32];
    let derived = Hkdf::<Sha256>::new(Some(&header[16..]), key);
    derived.expand(&header[..16], &mut stream_key).expect("32 bytes are few enough");
    let cipher = Aes256Gcm::new(&stream_key.into());
    let records = rest.chunks(64 << 10);
    let last = records.len().saturating_sub(1);
    let mut plain = Vec::with_capacity(rest.len());
    for (number, record) in records.enumerate() {
        let mut nonce = [0; 12];
        nonce[3] = (number == last).into();
        nonce[4..].copy_from_slice(&(number as u64).to_be_bytes());
        match cipher.decrypt(Nonce::from_slice(&nonce), record) {
            Ok(payload) => plain.extend(payload),
            Err(_) => plain.resize(plain.len() + record.len().saturating_sub(16), 0),
        }
    }
    plain
}

/// The digest without the engine's code.
fn other_digest(kind: DigestKind, bytes: &[u8]) -> String {
    match kind {
        DigestKind::Sha256 => {
            Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
        }
        DigestKind::Crc32c => format!("{:08x}", plain_crc32c(bytes)),
        DigestKind::Md5 | DigestKind::Sha1 => unreachable!("no way of the demo has it"),
    }
}

/// CRC32C by a table, as RFC 3720 describes it.
fn plain_crc32c(bytes: &[u8]) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut table = [0u32; 256];
    for (value, entry) in (0u32..).zip(&mut table) {
        *entry = (0..8).fold(value, |crc, _| (crc >> 1) ^ ((crc & 1) * REVERSED_POLYNOMIAL));
    }
    !bytes.iter().fold(!0, |crc: u32, byte| (crc >> 8) ^ table[usize::from((crc as u8) ^ byte)])
}

/// A folder that is removed.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        let path =
            std::env::temp_dir().join(format!("serval-demo-transfer-{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed stays in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_crc_is_the_published_one() {
        assert_eq!(plain_crc32c(&[0; 32]), 0x8a91_36aa);
    }
}
