//! How fast a file is sealed and sent, and what it costs: the transfer engine of another process against loops of read, seal and write
//! in one thread, with aws-lc and with OpenSSL (`benches/transfer/seal_openssl.c`).
//!
//! `cargo run --release -p serval-transfer --example seal_rate [PAIRS]` prints a table and one line of JSON. All senders send the same file of 64 MiB over loopback TCP to a
//! process that only reads. Rounds are interleaved, and each round of a sender is several transfers. CPU time is that of the sender (for the engine: of the caller
//! and of the engine's threads), and that of sender and receiver together. The loops first choose their best buffer. *Send only* is the bound: as many bytes
//! from memory to the socket.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sys::descriptors::read_at;
use sys::local::LocalListener;
use sys::time::process_cpu_ns;
use transfer::message::Answer;
use transfer::seal::{HEADER_BYTES, TAG_BYTES};
use transfer::service::{Service, ServiceLimits};
use transfer::{Client, Key, Source};

const FILE_BYTES: usize = 64 << 20;
const TRANSFERS: usize = 6;
const KEY: [u8; 32] = [1; 32];
/// Buffers that the loops try.
const BUFFERS: [usize; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];

/// Seconds and CPU seconds of one transfer.
type Sample = (f64, f64);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["receive"] => receive(),
        ["engine", socket] => engine(Path::new(socket)),
        ["loop", file, port, buffer] => {
            let sender =
                || aws_lc_loop(Path::new(file), port.parse().unwrap(), buffer.parse().unwrap());
            (0..TRANSFERS).map(|_| sender()).for_each(print);
        }
        ["send", port, buffer] => {
            let sender = || send_only(port.parse().unwrap(), buffer.parse().unwrap());
            (0..TRANSFERS).map(|_| sender()).for_each(print);
        }
        ["call", file, port, socket, process] => call(file, port.parse().unwrap(), socket, process),
        [] => compare(9),
        [pairs] => compare(pairs.parse().expect("a number of pairs")),
        _ => panic!("usage: seal_rate [PAIRS]"),
    }
}

fn print((seconds, cpu): Sample) {
    println!("{seconds:.6} {cpu:.6}");
}

/// Reads and forgets, one connection after the other.
fn receive() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    let mut buffer = vec![0; 256 << 10];
    while let Ok((mut socket, _)) = listener.accept() {
        while socket.read(&mut buffer).is_ok_and(|read| read > 0) {}
    }
}

fn engine(socket: &Path) {
    let listener = LocalListener::bind(socket).unwrap();
    let _service = Service::start(listener, ServiceLimits::default()).unwrap();
    println!("ready");
    // Until the parent closes the pipe.
    let _ = std::io::stdin().read(&mut [0]);
}

fn connect(port: u16) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_nodelay(true).unwrap();
    socket
}

/// The receiver closes when it has read everything.
fn end(mut socket: &TcpStream) {
    socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
}

/// The same loop as in C, with the library that the engine uses. The record is as long as the buffer.
fn aws_lc_loop(path: &Path, port: u16, buffer_bytes: usize) -> Sample {
    let (file, socket) = (File::open(path).unwrap(), connect(port));
    let mut buffer = vec![0; HEADER_BYTES + buffer_bytes];
    let (began, cpu) = (Instant::now(), process_cpu_ns());
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &KEY).unwrap());
    let (mut at, mut start) = (0, HEADER_BYTES);
    for record in 0u64.. {
        if at == FILE_BYTES {
            break;
        }
        let want = (buffer_bytes - TAG_BYTES).min(FILE_BYTES - at);
        let mut parts = [std::io::IoSliceMut::new(&mut buffer[start..start + want])];
        let got = read_at(file.as_fd(), &mut parts, at as u64).unwrap();
        at += got;
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&record.to_be_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        let (payload, tag) = buffer[start..].split_at_mut(got);
        let sealed = key.seal_in_place_separate_tag(nonce, Aad::empty(), payload).unwrap();
        tag[..TAG_BYTES].copy_from_slice(sealed.as_ref());
        (&socket).write_all(&buffer[..start + got + TAG_BYTES]).unwrap();
        start = 0;
    }
    end(&socket);
    (began.elapsed().as_secs_f64(), (process_cpu_ns() - cpu) as f64 / 1e9)
}

/// The part of it that no sender can avoid: as many bytes from memory to the socket.
fn send_only(port: u16, buffer_bytes: usize) -> Sample {
    let (socket, buffer) = (connect(port), vec![1; buffer_bytes]);
    let (began, cpu) = (Instant::now(), process_cpu_ns());
    for _ in 0..FILE_BYTES / buffer_bytes {
        (&socket).write_all(&buffer).unwrap();
    }
    end(&socket);
    (began.elapsed().as_secs_f64(), (process_cpu_ns() - cpu) as f64 / 1e9)
}

/// CPU time of all threads of a process.
fn cpu_of(process: &str) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let ns = tasks.map(|task| {
        let text = fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
        text.split(' ').next().unwrap().parse::<u64>().unwrap()
    });
    ns.sum::<u64>() as f64 / 1e9
}

fn call(file: &str, port: u16, socket: &str, process: &str) {
    let mut client = Client::connect(Path::new(socket)).unwrap();
    for _ in 0..TRANSFERS {
        let (file, to) = (File::open(file).unwrap(), connect(port));
        let theirs = to.try_clone().unwrap();
        let (engine, cpu, began) = (cpu_of(process), process_cpu_ns(), Instant::now());
        client.submit(Source::file(file, 0, None).seal(Key::new(KEY)).socket(theirs)).unwrap();
        let answer = client.next(Duration::from_secs(60)).unwrap();
        assert!(matches!(answer, Some(Answer::Ended { result: Ok(()), .. })));
        end(&to);
        let (seconds, own) = (began.elapsed().as_secs_f64(), process_cpu_ns() - cpu);
        print((seconds, own as f64 / 1e9 + cpu_of(process) - engine));
    }
}

/// Of several transfers: the median of seconds and of CPU seconds.
fn run(command: &mut Command) -> Sample {
    let output = command.stderr(Stdio::inherit()).output().expect("the program is there");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let samples: Vec<Sample> = text
        .lines()
        .map(|line| {
            let (seconds, cpu) = line.split_once(' ').unwrap();
            (seconds.parse().unwrap(), cpu.parse().unwrap())
        })
        .collect();
    (median(samples.iter().map(|s| s.0)), median(samples.iter().map(|s| s.1)))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A child of this program, and the first line that it prints.
fn child(arguments: &[&str]) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(child.stdout.as_mut().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    (child, line.trim().to_owned())
}

fn compare(pairs: usize) {
    let folder = std::env::temp_dir().join(format!("serval-seal-rate-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (file, socket) = (folder.join("file"), folder.join("engine"));
    let content: Vec<u8> =
        (0..FILE_BYTES as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    fs::write(&file, content).unwrap();
    let (file, socket) = (file.to_str().unwrap().to_owned(), socket.to_str().unwrap().to_owned());
    let (mut receiver, port) = child(&["receive"]);
    let (mut engine, _) = child(&["engine", &socket]);
    let process = engine.id().to_string();
    let own = std::env::current_exe().unwrap();
    let openssl = PathBuf::from("target/transfer-bench/seal_openssl");
    assert!(openssl.exists(), "build it first: make -C benches/transfer");
    let transfers = TRANSFERS.to_string();
    let receiving = receiver.id().to_string();
    // Seconds, CPU seconds of the sender, and of sender and receiver. On loopback the host kernel does a part of the sender's work in the receiver's context,
    // another part each time.
    let run = |command: &mut Command| {
        let before = cpu_of(&receiving);
        let (seconds, cpu) = run(command);
        [seconds, cpu, cpu + (cpu_of(&receiving) - before) / TRANSFERS as f64]
    };
    let with_openssl = |buffer: usize| {
        run(Command::new(&openssl).args([&file, &port, &buffer.to_string(), &transfers]))
    };
    let with_aws_lc =
        |buffer: usize| run(Command::new(&own).args(["loop", &file, &port, &buffer.to_string()]));
    let with_engine = || run(Command::new(&own).args(["call", &file, &port, &socket, &process]));
    // The best buffer by CPU time, in two looks: rates vary more.
    let best = |of: &dyn Fn(usize) -> [f64; 3]| {
        let cost =
            |buffer: usize| [of(buffer), of(buffer)].iter().map(|s| s[0] + s[2]).sum::<f64>();
        let mut costs: Vec<(f64, usize)> =
            BUFFERS.iter().map(|buffer| (cost(*buffer), *buffer)).collect();
        costs.sort_by(|a, b| a.0.total_cmp(&b.0));
        costs[0].1
    };
    with_engine();
    let (of_openssl, of_aws_lc) = (best(&with_openssl), best(&with_aws_lc));
    println!("best buffers: OpenSSL {} KiB, aws-lc {} KiB", of_openssl >> 10, of_aws_lc >> 10);
    let sending_only = || run(Command::new(&own).args(["send", &port, &of_aws_lc.to_string()]));
    let mut rounds: Vec<[[f64; 3]; 4]> = Vec::new();
    for pair in 0..pairs {
        let round =
            [with_engine(), with_openssl(of_openssl), with_aws_lc(of_aws_lc), sending_only()];
        let gb = FILE_BYTES as f64 / 1e9;
        let shown = round.map(|[s, cpu, all]| {
            format!("{:.2} GB/s {:.3} {:.3} s/GB", gb / s, cpu / gb, all / gb)
        });
        let [engine, openssl, aws_lc, send] = shown;
        println!("{pair:2}  engine {engine}  OpenSSL {openssl}  aws-lc {aws_lc}  send only {send}");
        rounds.push(round);
    }
    for (index, name) in [(1, "openssl"), (2, "aws_lc"), (3, "send_only")] {
        let rate = rounds.iter().map(|round| round[index][0] / round[0][0]);
        let cpu = rounds.iter().map(|round| round[0][1] / round[index][1]);
        let all = rounds.iter().map(|round| round[0][2] / round[index][2]);
        let shown = |name, values: &mut dyn Iterator<Item = f64>| {
            let values: Vec<f64> = values.collect();
            let [low, high] = ends(values.iter().copied());
            format!(
                "\"{name}\":{:.3},\"{name}_min\":{low:.3},\"{name}_max\":{high:.3}",
                median(values.into_iter())
            )
        };
        println!(
            "{{\"against\":\"{name}\",\"pairs\":{pairs},{},{},{}}}",
            shown("rate", &mut { rate }),
            shown("cpu", &mut { cpu }),
            shown("cpu_with_receiver", &mut { all }),
        );
    }
    drop(engine.stdin.take());
    let _ = engine.wait();
    let _ = receiver.kill();
    let _ = receiver.wait();
    let _ = fs::remove_dir_all(folder);
}

fn ends(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let values: Vec<f64> = values.collect();
    [values.iter().copied().fold(f64::MAX, f64::min), values.iter().copied().fold(0.0, f64::max)]
}
