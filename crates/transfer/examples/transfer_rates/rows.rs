//! The comparisons.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sys::affinity::allowed_cores;
use sys::time::process_cpu_ns;
use transfer::command::limits::{HEADER_BYTES, TAG_BYTES};
use transfer::service::message::Answer;
use transfer::{Client, DigestKind, Key, Source};

use crate::loops;
use crate::roles::{Role, content};

const KEY: [u8; 32] = [1; 32];
/// Transfers of one side in a pair; the median counts.
const TRANSFERS: usize = 5;
/// Buffers that the loops try.
const BUFFERS: [usize; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
const SMALL_BYTES: usize = 4096;
pub(crate) const STREAMS: usize = 16;

/// Seconds and CPU seconds of one transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) seconds: f64,
    pub(crate) cpu: f64,
}

impl Sample {
    /// Of this process; `cpu` is its time at the begin.
    pub(crate) fn since(began: Instant, cpu: u64) -> Self {
        Self { seconds: began.elapsed().as_secs_f64(), cpu: (process_cpu_ns() - cpu) as f64 / 1e9 }
    }

    fn median(samples: impl IntoIterator<Item = Self>) -> Self {
        let samples: Vec<Self> = samples.into_iter().collect();
        let of = |value: fn(&Self) -> f64| median(samples.iter().map(value));
        Self { seconds: of(|s| s.seconds), cpu: of(|s| s.cpu) }
    }

    fn parse(line: &str) -> Self {
        let mut words = line.split(' ').map(|word| word.parse().expect("two numbers"));
        Self { seconds: words.next().unwrap(), cpu: words.next().unwrap() }
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub(crate) struct Bench {
    pub(crate) pairs: usize,
    pub(crate) bytes: usize,
    pub(crate) loops: PathBuf,
    /// The core of the sides of rows that compare what one core does.
    pub(crate) core: usize,
    /// A folder for the source and for the engine's socket.
    pub(crate) folder: PathBuf,
    /// The begin of the names of sinks in shared memory.
    pub(crate) memory: PathBuf,
    pub(crate) lines: Vec<String>,
}

type Row = fn(&mut Bench);

pub(crate) const ROWS: &[(&str, Row)] = &[
    ("seal-tcp", |bench| seal_tcp(bench, 2, false)),
    ("seal-tcp-1", |bench| seal_tcp(bench, 1, false)),
    ("seal-tcp-cold", |bench| seal_tcp(bench, 2, true)),
    ("seal-shm", seal_shm),
    ("seal-4k", seal_4k),
    ("recv-md5-1", |bench| receive(bench, "recv-md5-1", DigestKind::Md5, 1, [1.2, 1.3])),
    ("recv-md5-16", |bench| receive(bench, "recv-md5-16", DigestKind::Md5, STREAMS, [3.0, 4.0])),
    ("recv-sha256-1", |bench| receive(bench, "recv-sha256-1", DigestKind::Sha256, 1, [1.0, 1.0])),
    ("recv-sha256-16", |bench| {
        receive(bench, "recv-sha256-16", DigestKind::Sha256, STREAMS, [1.4, 1.6]);
    }),
    ("recv-crc32c", crc32c_tax),
    ("fused", fused),
    ("threads", threads),
];

/// What a comparison is about.
struct Comparison<'c> {
    row: &'c str,
    what: &'c str,
    bytes: usize,
    /// Ratios that are asked for: of rates at least, of CPU time at most.
    rate: [f64; 2],
    cpu: Option<[f64; 2]>,
}

impl Bench {
    /// Interleaved pairs; the order changes with each. Returns the ratio of the rates.
    fn compare(
        &mut self,
        comparison: &Comparison<'_>,
        engine: &mut dyn FnMut() -> Sample,
        other: &mut dyn FnMut() -> Sample,
    ) -> f64 {
        engine();
        other();
        let mut pairs = Vec::new();
        for number in 0..self.pairs {
            pairs.push(if number % 2 == 0 {
                let first = engine();
                (first, other())
            } else {
                let first = other();
                (engine(), first)
            });
        }
        let Comparison { row, what, bytes, rate, cpu } = comparison;
        let gb = *bytes as f64 / 1e9;
        let of = |value: fn(&(Sample, Sample)) -> f64| {
            let mut values: Vec<f64> = pairs.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            [values[values.len() / 2], values[0], values[values.len() - 1]]
        };
        let rates = of(|(a, b)| b.seconds / a.seconds);
        let costs = of(|(a, b)| a.cpu / b.cpu);
        let (a, b) = (
            Sample::median(pairs.iter().map(|pair| pair.0)),
            Sample::median(pairs.iter().map(|pair| pair.1)),
        );
        let meets = rates[0] >= rate[0] && cpu.is_none_or(|most| costs[0] <= most[0]);
        println!(
            "{row:15} {what:60} {:8.3} ms {:8.3} ms   rate {:.3}x [{:.3}, {:.3}] (must {}, aim {})   CPU {:.3}x [{:.3}, {:.3}]{}   CPU-s/GB {:.3} {:.3}   {}",
            a.seconds * 1e3,
            b.seconds * 1e3,
            rates[0],
            rates[1],
            rates[2],
            rate[0],
            rate[1],
            costs[0],
            costs[1],
            costs[2],
            cpu.map_or(String::new(), |[must, aim]| format!(" (must {must}, aim {aim})")),
            a.cpu / gb,
            b.cpu / gb,
            if meets { "meets" } else { "MISSES" },
        );
        let bounds = cpu.map_or("null".to_owned(), |[must, aim]| format!("[{must},{aim}]"));
        self.lines.push(format!(
            "{{\"row\":\"{row}\",\"what\":\"{what}\",\"pairs\":{},\"bytes\":{bytes},\"engine_s\":{:.9},\"other_s\":{:.9},\"engine_cpu_s\":{:.9},\"other_cpu_s\":{:.9},\
             \"rate\":{rates:.4?},\"rate_bounds\":{rate:?},\"cpu\":{costs:.4?},\"cpu_bounds\":{bounds},\"meets\":{meets}}}",
            self.pairs, a.seconds, b.seconds, a.cpu, b.cpu,
        ));
        rates[0]
    }

    /// A file with content; in the page cache.
    fn source(&self, name: &str, bytes: usize) -> PathBuf {
        let path = self.folder.join(name);
        if fs::metadata(&path).is_ok_and(|found| found.len() == bytes as u64) {
            return path;
        }
        fs::write(&path, content(0, bytes)).unwrap();
        path
    }

    /// A file in shared memory that has its pages.
    fn sink(&self, name: &str, bytes: usize) -> PathBuf {
        let path = PathBuf::from(format!("{}.{name}", self.memory.display()));
        fs::write(&path, vec![1; bytes]).unwrap();
        path
    }

    pub(crate) fn clean(&self) {
        let _ = fs::remove_dir_all(&self.folder);
        let prefix = self.memory.file_name().unwrap().to_string_lossy().into_owned();
        for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// An engine in another process.
    fn engine(&self, threads: u32, cores: &[usize]) -> Caller {
        static ENGINES: AtomicUsize = AtomicUsize::new(0);
        let number = ENGINES.fetch_add(1, Ordering::Relaxed);
        let socket = self.folder.join(format!("engine-{number}"));
        let socket = socket.to_str().unwrap();
        let role = Role::own(&["role-engine", socket, &threads.to_string()], cores);
        Caller { client: Client::connect(Path::new(socket)).unwrap(), role }
    }

    /// One run of the C program: its samples.
    fn loop_samples(&self, arguments: &[&str]) -> Vec<Sample> {
        let output = Command::new(&self.loops).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(Sample::parse).collect()
    }

    /// The cores of a side: any for one stream, and one for several, which shows what a core does.
    fn cores_of(&self, streams: usize) -> Vec<usize> {
        if streams == 1 { Vec::new() } else { vec![self.core] }
    }

    /// The cores of the peers.
    fn peers_of(&self, streams: usize) -> Vec<usize> {
        let others = |core: &usize| streams == 1 || *core != self.core;
        allowed_cores().unwrap().into_iter().filter(others).collect()
    }
}

/// An engine and its caller, this process.
struct Caller {
    client: Client,
    role: Role,
}

impl Caller {
    /// Runs `work`, in which the engine does something for this process.
    fn measure(&mut self, work: impl FnOnce(&mut Client)) -> Sample {
        let (engine, cpu, began) = (self.role.cpu(), process_cpu_ns(), Instant::now());
        work(&mut self.client);
        let own = Sample::since(began, cpu);
        Sample { cpu: own.cpu + self.role.cpu() - engine, ..own }
    }
}

/// Waits until a transfer has ended well; returns its digest.
fn ended(client: &mut Client) -> (u64, String) {
    match client.next(Duration::from_secs(60)).unwrap() {
        Some(Answer::Ended { id, result: Ok(()), report }) => {
            (id, report.digest().map_or(String::new(), |digest| digest.to_string()))
        }
        other => panic!("no success: {other:?}"),
    }
}

fn best_buffer(best: impl Fn(usize) -> Sample) -> usize {
    // The best buffer by time and CPU time, in two looks.
    let cost = |buffer: usize| {
        [best(buffer), best(buffer)].iter().map(|sample| sample.seconds + sample.cpu).sum::<f64>()
    };
    let costs = BUFFERS.map(|buffer| (cost(buffer), buffer));
    costs.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
}

/// Sends a file to this process, and compares what arrives.
fn check_sealed(caller: &mut Caller, file: &Path) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = loops::connect(listener.local_addr().unwrap().port());
    let (mut from, _) = listener.accept().unwrap();
    let command = Source::file(File::open(file).unwrap(), 0, None).seal(Key::new(KEY)).socket(to);
    let reader = std::thread::spawn(move || {
        let mut sealed = Vec::new();
        from.read_to_end(&mut sealed).unwrap();
        sealed
    });
    caller.client.submit(command).unwrap();
    ended(&mut caller.client);
    check_stream(&reader.join().unwrap(), file);
}

fn check_stream(sealed: &[u8], file: &Path) {
    let mut opener =
        transfer::stages::seal::Opener::new(transfer::Cipher::Aes256Gcm, &Key::new(KEY));
    let expected = fs::read(file).unwrap();
    let mut plain = vec![0; sealed.len() + (1 << 20)];
    let ran = opener.run(sealed, true, &mut plain).unwrap();
    assert!(ran.done && plain[..ran.made] == expected, "what arrived is not what was sent");
}

fn drop_from_cache(file: &Path) {
    let of = format!("if={}", file.display());
    let status = Command::new("dd").args([&of, "iflag=nocache", "count=0", "status=none"]).status();
    assert!(status.unwrap().success());
}

/// 64 MiB through AES-256-GCM to a loopback TCP socket. One thread seals and sends in turn; of two, one sends what the other has sealed.
fn seal_tcp(bench: &mut Bench, threads: u32, cold: bool) {
    let file = bench.source("source", bench.bytes);
    let (receiver, mut caller) = (Role::own(&["role-receive"], &[]), bench.engine(threads, &[]));
    let (port, path) = (receiver.line.clone(), file.to_str().unwrap().to_owned());
    let number: u16 = port.parse().unwrap();
    check_sealed(&mut caller, &file);
    if cold {
        File::open(&file).unwrap().sync_all().unwrap();
    }
    let fresh = || {
        if cold {
            drop_from_cache(&file)
        }
    };
    let with_openssl = |buffer: usize| {
        let run = || {
            fresh();
            bench.loop_samples(&["seal", &path, &port, &buffer.to_string(), "1"])[0]
        };
        Sample::median((0..TRANSFERS).map(|_| run()))
    };
    let with_aws_lc = |buffer: usize| {
        let run = || {
            fresh();
            loops::seal_to_socket(&file, bench.bytes, number, buffer)
        };
        Sample::median((0..TRANSFERS).map(|_| run()))
    };
    let (of_openssl, of_aws_lc) = (best_buffer(with_openssl), best_buffer(with_aws_lc));
    println!("# best buffers: OpenSSL {} KiB, aws-lc {} KiB", of_openssl >> 10, of_aws_lc >> 10);
    let mut with_engine = || {
        let mut run = || {
            fresh();
            let to = loops::connect(number);
            let theirs = to.try_clone().unwrap();
            let file = File::open(&file).unwrap();
            caller.measure(|client| {
                client
                    .submit(Source::file(file, 0, None).seal(Key::new(KEY)).socket(theirs))
                    .unwrap();
                ended(client);
                loops::end(&to);
            })
        };
        Sample::median((0..TRANSFERS).map(|_| run()))
    };
    let (bytes, mut shown) = (bench.bytes, bench.view());
    let cache = if cold { "cold" } else { "warm" };
    let row = match (cold, threads) {
        (true, _) => "seal-tcp-cold",
        (false, 1) => "seal-tcp-1",
        (false, _) => "seal-tcp",
    };
    let mut show = |other: &str, rate, cpu, with: &mut dyn FnMut() -> Sample| {
        let what =
            format!("encrypted sendfile to TCP, {threads} threads, cache {cache}, against {other}");
        let comparison = Comparison { row, what: &what, bytes, rate, cpu };
        shown.compare(&comparison, &mut with_engine, with);
    };
    show("read + OpenSSL + write", [1.3, 1.45], Some([0.75, 0.6]), &mut || {
        with_openssl(of_openssl)
    });
    show("read + aws-lc + write", [1.05, 1.05], Some([0.95, 0.95]), &mut || with_aws_lc(of_aws_lc));
    if !cold {
        show("sending as many bytes only", [0.0, 0.0], None, &mut || {
            let run = || loops::send_only(bytes, number, of_aws_lc);
            Sample::median((0..TRANSFERS).map(|_| run()))
        });
    }
    bench.lines.append(&mut shown.lines);
}

/// The same to shared memory, against the loop to a socket and against one with the same sink.
fn seal_shm(bench: &mut Bench) {
    let file = bench.source("source", bench.bytes);
    let sealed = HEADER_BYTES + bench.bytes + (bench.bytes / 65520 + 1) * TAG_BYTES;
    let (ours, theirs) = (bench.sink("a", sealed), bench.sink("b", sealed + bench.bytes / 64));
    let (receiver, mut caller) = (Role::own(&["role-receive"], &[]), bench.engine(2, &[]));
    let mut four = bench.engine(4, &[]);
    let (port, path) = (receiver.line.clone(), file.to_str().unwrap().to_owned());
    let bytes = bench.bytes;
    let of_engine = |caller: &mut Caller| {
        let mut run = || {
            let (file, sink) =
                (File::open(&file).unwrap(), File::options().write(true).open(&ours).unwrap());
            caller.measure(|client| {
                client
                    .submit(Source::file(file, 0, None).seal(Key::new(KEY)).file(sink, 0))
                    .unwrap();
                ended(client);
            })
        };
        Sample::median((0..TRANSFERS).map(|_| run()))
    };
    let mut with_engine = || of_engine(&mut caller);
    with_engine();
    check_stream(
        &fs::read(&ours).unwrap()[..HEADER_BYTES + bytes + bytes.div_ceil(65520) * TAG_BYTES],
        &file,
    );
    let rounds = TRANSFERS.to_string();
    let of = |bench: &Bench, what: &str, to: &str, buffer: usize| {
        Sample::median(bench.loop_samples(&[what, &path, to, &buffer.to_string(), &rounds]))
    };
    let to = theirs.to_str().unwrap().to_owned();
    let best_tcp = best_buffer(|buffer| of(bench, "seal", &port, buffer));
    let best_file = best_buffer(|buffer| of(bench, "seal-file", &to, buffer));
    let (view, mut shown) = (bench.view(), bench.view());
    let what = "encrypted file to shared memory against read + OpenSSL + write to TCP";
    let comparison = Comparison { row: "seal-shm", what, bytes, rate: [3.0, 4.0], cpu: None };
    shown.compare(&comparison, &mut with_engine, &mut || of(&view, "seal", &port, best_tcp));
    let what = "the same with four threads of the engine";
    let comparison = Comparison { row: "seal-shm", what, bytes, rate: [0.0, 0.0], cpu: None };
    let mut with_four = || of_engine(&mut four);
    shown.compare(&comparison, &mut with_four, &mut || of(&view, "seal", &port, best_tcp));
    let what = "the same against read + OpenSSL + write to shared memory";
    let comparison = Comparison { row: "seal-shm", what, bytes, rate: [1.0, 1.0], cpu: None };
    shown.compare(&comparison, &mut with_engine, &mut || of(&view, "seal-file", &to, best_file));
    bench.lines.append(&mut shown.lines);
}

impl Bench {
    /// The same settings, without results.
    fn view(&self) -> Self {
        Self {
            loops: self.loops.clone(),
            folder: self.folder.clone(),
            memory: self.memory.clone(),
            lines: Vec::new(),
            ..*self
        }
    }
}

/// A file of 4 KiB, opened, sealed and sent, until the peer has answered: p50.
fn seal_4k(bench: &mut Bench) {
    const ROUNDS: usize = 400;
    let file = bench.source("small", SMALL_BYTES);
    let sealed = (HEADER_BYTES + SMALL_BYTES + TAG_BYTES).to_string();
    let (peer, mut caller) = (Role::own(&["role-answer", &sealed], &[]), bench.engine(2, &[]));
    check_sealed(&mut caller, &file);
    let to = loops::connect(peer.line.parse().unwrap());
    // As the loop counts: the samples are of this thread, and what the engine costs is spread over them.
    let mut with_engine = || {
        let before = caller.role.cpu();
        let mut run = || {
            let mut answers = &to;
            let (began, cpu) = (Instant::now(), process_cpu_ns());
            let source = Source::file(File::open(&file).unwrap(), 0, None);
            let ended = caller.client.send(source.seal(Key::new(KEY)), &to);
            assert_eq!(ended.unwrap().result, Ok(()));
            answers.read_exact(&mut [0]).unwrap();
            Sample::since(began, cpu)
        };
        let sample = Sample::median((0..ROUNDS).map(|_| run()));
        let engine = (caller.role.cpu() - before) / ROUNDS as f64;
        Sample { cpu: sample.cpu + engine, ..sample }
    };
    let path = file.to_str().unwrap();
    let view = bench.view();
    let rounds = ROUNDS.to_string();
    let mut with_loop = || Sample::median(view.loop_samples(&["small", path, &peer.line, &rounds]));
    let what = "4 KiB encrypted, p50, against open + read + OpenSSL + write";
    let (row, bytes) = ("seal-4k", SMALL_BYTES);
    let comparison = Comparison { row, what, bytes, rate: [1.0, 2.0], cpu: None };
    bench.compare(&comparison, &mut with_engine, &mut with_loop);
}

/// Streams that an engine receives through a digest to files.
struct Receiver {
    caller: Caller,
    listener: TcpListener,
    sender: Role,
    sinks: Vec<PathBuf>,
    bytes: usize,
}

impl Receiver {
    fn new(bench: &Bench, streams: usize, bytes: usize, rounds: usize) -> Self {
        let caller = bench.engine(2, &bench.cores_of(streams));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let numbers = [streams, bytes, rounds].map(|number| number.to_string());
        let arguments = ["role-send", &port, &numbers[0], &numbers[1], &numbers[2]];
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args(arguments);
        let sender = Role::start(own, &bench.peers_of(streams), false);
        let sinks = (0..streams).map(|n| bench.sink(&format!("engine.{n}"), bytes)).collect();
        Self { caller, listener, sender, sinks, bytes }
    }

    /// One round; returns the digests by the numbers of the streams.
    fn round(&mut self, kind: Option<DigestKind>) -> (Sample, Vec<String>) {
        let mut streams: Vec<Option<TcpStream>> = self.sinks.iter().map(|_| None).collect();
        for _ in 0..streams.len() {
            let (mut stream, _) = self.listener.accept().unwrap();
            let mut number = [0];
            stream.read_exact(&mut number).unwrap();
            streams[usize::from(number[0])] = Some(stream);
        }
        let open = |path: &PathBuf| File::options().write(true).open(path).unwrap();
        let files: Vec<File> = self.sinks.iter().map(open).collect();
        let mut digests = vec![String::new(); files.len()];
        let bytes = self.bytes as u64;
        let sample = self.caller.measure(|client| {
            let mut ids = Vec::new();
            for (stream, file) in streams.iter().flatten().zip(files) {
                let mut go = stream.try_clone().unwrap();
                let source = Source::socket(stream.try_clone().unwrap(), Some(bytes));
                let command = match kind {
                    Some(kind) => source.digest(kind).file(file, 0),
                    None => source.file(file, 0),
                };
                ids.push(client.submit(command).unwrap());
                go.write_all(b"g").unwrap();
            }
            for _ in 0..ids.len() {
                let (id, digest) = ended(client);
                digests[ids.iter().position(|known| *known == id).unwrap()] = digest;
            }
        });
        (sample, digests)
    }

    fn check_files(&self) {
        for (number, path) in self.sinks.iter().enumerate() {
            assert!(fs::read(path).unwrap() == content(number, self.bytes), "another content");
        }
    }
}

fn digests(kind: DigestKind, streams: usize, bytes: usize) -> Vec<String> {
    use aws_lc_rs::digest::{SHA256, digest};
    use md5::Digest as _;
    let of = |number| {
        let content = content(number, bytes);
        let value = match kind {
            DigestKind::Md5 => md5::Md5::digest(&content).to_vec(),
            DigestKind::Sha256 => digest(&SHA256, &content).as_ref().to_vec(),
            _ => unreachable!("no row has it"),
        };
        value.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    (0..streams).map(of).collect()
}

/// Streams through a digest to files in shared memory, on one core: the engine against a thread for each stream with OpenSSL.
fn receive(bench: &mut Bench, row: &str, kind: DigestKind, streams: usize, rate: [f64; 2]) {
    let bytes = bench.bytes / if streams > 1 { 4 } else { 1 };
    let expected = digests(kind, streams, bytes);
    let rounds = bench.pairs + 1;
    let mut ours = Receiver::new(bench, streams, bytes, rounds);
    for number in 0..streams {
        bench.sink(&format!("loop.{number}"), bytes);
    }
    let mut command = Command::new(&bench.loops);
    let sink = format!("{}.loop", bench.memory.display());
    let numbers = [streams, bytes, 256 << 10, rounds].map(|number| number.to_string());
    command.args([
        "receive",
        kind.name(),
        &numbers[0],
        &numbers[1],
        &sink,
        &numbers[2],
        &numbers[3],
    ]);
    let mut theirs = Role::start(command, &bench.cores_of(streams), true);
    let mut own = Command::new(std::env::current_exe().unwrap());
    own.args(["role-send", &theirs.line, &numbers[0], &numbers[1], &numbers[3]]);
    let _sender = Role::start(own, &bench.peers_of(streams), false);
    let mut with_loop = || {
        let line = theirs.next_line();
        let mut words = line.splitn(3, ' ');
        let [seconds, cpu] = [(); 2].map(|()| words.next().unwrap().parse().unwrap());
        let digests: Vec<&str> = words.next().unwrap().split(' ').collect();
        assert_eq!(digests, expected, "the loop's digests");
        Sample { seconds, cpu }
    };
    let mut with_engine = || {
        let (sample, digests) = ours.round(Some(kind));
        assert_eq!(digests, expected, "the engine's digests");
        sample
    };
    let (name, on) = (kind.name(), if streams == 1 { "any cores" } else { "one core" });
    let what = format!("{streams} x recv + {name} + file, {on}, against a loop with OpenSSL");
    let comparison = Comparison { row, what: &what, bytes: streams * bytes, rate, cpu: None };
    bench.compare(&comparison, &mut with_engine, &mut with_loop);
    ours.check_files();
    drop(ours.sender);
}

/// What CRC32C costs: the engine with it against the engine without.
fn crc32c_tax(bench: &mut Bench) {
    let (bytes, rounds) = (bench.bytes, bench.pairs + 1);
    let (mut with, mut without) =
        (Receiver::new(bench, 1, bytes, rounds), Receiver::new(bench, 1, bytes, rounds));
    let expected = format!("{:08x}", crc32c::crc32c(&content(0, bytes)));
    let mut with_crc = || {
        let (sample, digests) = with.round(Some(DigestKind::Crc32c));
        assert_eq!(digests[0], expected);
        sample
    };
    let what = "recv + CRC32C + file against recv + file (tax at most 15 %)";
    let (row, rate) = ("recv-crc32c", [0.87, 0.91]);
    let comparison = Comparison { row, what, bytes, rate, cpu: None };
    bench.compare(&comparison, &mut with_crc, &mut || without.round(None).0);
}

/// Read, CRC32C, seal and write to shared memory: one command against two, and against passes over all of the memory.
fn fused(bench: &mut Bench) {
    let file = bench.source("source", bench.bytes);
    let bytes = bench.bytes;
    let room = HEADER_BYTES + bytes + (bytes / 65520 + 1) * TAG_BYTES;
    let [ours, between, theirs] = ["a", "between", "b"].map(|name| bench.sink(name, room));
    let (mut one, mut two) = (bench.engine(2, &[]), bench.engine(2, &[]));
    let expected = format!("{:08x}", crc32c::crc32c(&fs::read(&file).unwrap()));
    let read = |path: &Path| File::open(path).unwrap();
    let write = |path: &Path| File::options().write(true).open(path).unwrap();
    let mut with_one = || {
        let mut run = || {
            let source = Source::file(read(&file), 0, None).digest(DigestKind::Crc32c);
            let command = source.seal(Key::new(KEY)).file(write(&ours), 0);
            one.measure(|client| {
                client.submit(command).unwrap();
                assert_eq!(ended(client).1, expected);
            })
        };
        Sample::median((0..TRANSFERS).map(|_| run()))
    };
    let mut with_two = || {
        let mut run = || {
            let first = Source::file(read(&file), 0, None).digest(DigestKind::Crc32c);
            let first = first.file(write(&between), 0);
            let second = Source::file(read(&between), 0, Some(bytes as u64));
            let second = second.seal(Key::new(KEY)).file(write(&theirs), 0);
            two.measure(|client| {
                client.submit(first).unwrap();
                assert_eq!(ended(client).1, expected);
                client.submit(second).unwrap();
                ended(client);
            })
        };
        Sample::median((0..TRANSFERS).map(|_| run()))
    };
    let (row, rate) = ("fused", [1.2, 1.5]);
    let what = "file + CRC32C + seal + shared memory: one command against two";
    let comparison = Comparison { row, what, bytes, rate, cpu: None };
    bench.compare(&comparison, &mut with_one, &mut with_two);
    let sealed = HEADER_BYTES + bytes + bytes.div_ceil(65520) * TAG_BYTES;
    check_stream(&fs::read(&ours).unwrap()[..sealed], &file);
    for (what, window) in [
        ("the same against passes over all of the memory", bytes),
        ("the same against a loop of chunks of 512 KiB", 512 << 10),
    ] {
        let rate = if window == bytes { rate } else { [0.0, 0.0] };
        let comparison = Comparison { row, what, bytes, rate, cpu: None };
        let passes = || loops::passes(&file, &theirs, bytes, window);
        let mut with_passes = || Sample::median((0..TRANSFERS).map(|_| passes()));
        bench.compare(&comparison, &mut with_one, &mut with_passes);
    }
}

/// 16 encrypted streams: an engine of two or four threads against one of one thread, and threads that share nothing but the machine: each
/// with the loop of its own streams. What those do not gain, memory and the host kernel limit.
fn threads(bench: &mut Bench) {
    let bytes = bench.bytes / 4;
    let file = bench.source("shared", bytes);
    let receiver = Role::own(&["role-receive"], &[]);
    let port: u16 = receiver.line.parse().unwrap();
    let round = |caller: &mut Caller| {
        let sockets: Vec<TcpStream> = (0..STREAMS).map(|_| loops::connect(port)).collect();
        let commands: Vec<_> = sockets
            .iter()
            .map(|to| {
                let source = Source::file(File::open(&file).unwrap(), 0, None);
                source.seal(Key::new(KEY)).socket(to.try_clone().unwrap())
            })
            .collect();
        caller.measure(|client| {
            let ids = commands.into_iter().map(|command| client.submit(command).unwrap()).count();
            (0..ids).for_each(|_| drop(ended(client)));
            sockets.iter().for_each(loops::end);
        })
    };
    for (count, rate) in [(2, [1.8, 1.94]), (4, [3.6, 3.88])] {
        let (mut many, mut one) = (bench.engine(count, &[]), bench.engine(1, &[]));
        check_sealed(&mut many, &file);
        let what = format!("16 encrypted streams: {count} threads against one");
        let bytes = STREAMS * bytes;
        let comparison = Comparison { row: "threads", what: &what, bytes, rate, cpu: None };
        let engine = bench.compare(&comparison, &mut || round(&mut many), &mut || round(&mut one));
        let what = format!("16 encrypted streams, loops with aws-lc: {count} threads against one");
        let comparison =
            Comparison { row: "threads", what: &what, bytes, rate: [0.0, 0.0], cpu: None };
        let loops = |threads: usize| loops::seal_streams(&file, bytes / STREAMS, port, threads);
        let loops = bench.compare(&comparison, &mut || loops(count as usize), &mut || loops(1));
        println!("# {count} threads: the engine gains {:.3} of what loops gain", engine / loops);
        bench.lines.push(format!(
            "{{\"row\":\"threads\",\"what\":\"{count} threads: gain of the engine / gain of loops\",\"ratio\":{:.4}}}",
            engine / loops
        ));
    }
}
