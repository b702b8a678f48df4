//! The kernel of examples/10_secure_multiply in the isolated process of a tenant, and the baseline of its row: both answer what is sealed with the
//! key, once, and nothing else.

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bench::client::workload::Sealed;
use bench::client::{self, Load, Workload as _};
use common::running::Running;
use common::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder of the kernel and the baseline.
fn built() -> PathBuf {
    static BUILD: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = BUILD.lock();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("secure");
    let mut make = Command::new("make");
    make.arg("-C").arg(root().join("benches/secure"));
    let made = make.arg(format!("BUILD={}", folder.display())).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}: `make setup-test` installs libssl-dev");
    folder
}

/// Requests that are answered, and then some that must not be: changed in each of their bytes, cut off, sent again, sent by someone without the key.
/// Returns the number of the latter that are refused as such, and of those with a wrong length.
fn exchange(server: SocketAddr, key: [u8; 32]) -> (u64, u64) {
    let mut sealed = Sealed::with_key(key);
    let load = Load { window: 8, requests: 300, timeout: PATIENCE, ..Load::default() };
    let outcome = client::udp(server, &load, &mut sealed).unwrap();
    assert!(outcome.is_perfect(), "{outcome:?}");
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(server).unwrap();
    let request = |sealed: &mut Sealed, index: u64| {
        let mut request = Vec::new();
        sealed.request(index, &mut request);
        request
    };
    let whole = request(&mut sealed, 1000);
    let mut refused = 0;
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        socket.send(&changed).unwrap();
        refused += 1;
    }
    for (from, to) in [(0, whole.len() - 1), (0, 0), (1, whole.len())] {
        socket.send(&whole[from..to]).unwrap();
    }
    // One that was answered, and one whose counter lies far before the newest.
    for index in [299, 299] {
        socket.send(&request(&mut sealed, index)).unwrap();
        refused += 1;
    }
    // The next answer is that of the request that is good: nothing before it was answered. It is answered once.
    let mut answer = [0; 256];
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..3 {
        socket.send(&whole).unwrap();
    }
    refused += 2;
    let bytes = socket.recv(&mut answer).unwrap();
    assert!(sealed.accepts(1000, &answer[..bytes]), "{:?}", &answer[..bytes]);
    // It lies outside of the window of the sender from then on.
    socket.send(&request(&mut sealed, 1000 + 5000)).unwrap();
    let bytes = socket.recv(&mut answer).unwrap();
    assert!(sealed.accepts(6000, &answer[..bytes]), "no other answer came before it");
    socket.send(&request(&mut sealed, 2000)).unwrap();
    refused += 1;
    socket.send(&request(&mut sealed, 6001)).unwrap();
    let bytes = socket.recv(&mut answer).unwrap();
    assert!(sealed.accepts(6001, &answer[..bytes]), "no other answer came before it");
    socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(socket.recv(&mut answer).is_err(), "nothing else is answered");
    (refused, 3)
}

fn configuration(port: u16, kernel: &Path) -> String {
    format!(
        "[[tenant]]\nname = \"bank\"\n[[accelerator]]\nname = \"enclave\"\nkind = \"process\"\nspin_us = 1000\nstack_kib = 256\n\
         [[service]]\nname = \"multiply\"\nlisten = \"udp://127.0.0.1:{port}\"\ntenant = \"bank\"\naccelerator = \"enclave\"\n\
         kernel = \"{}\"\nmqueues = 1\nmax_message_bytes = 64\nrequest_timeout_ms = 60000\n",
        kernel.display()
    )
}

#[test]
fn sealed_numbers_are_multiplied_in_an_isolated_process_once() {
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    let (key, text) = new_key();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("secure.key");
    std::fs::write(&file, &text).unwrap();
    command.env("SECURE_MULTIPLY_KEY", &file);
    let kernel = built().join("multiply.so");
    let server = Running::start_with("secure", &configuration(port, &kernel), command);
    let (refused, short) = exchange(([127, 0, 0, 1], port).into(), key);
    for (reason, count) in [("kernel_drop", refused), ("bad_length", short)] {
        server.wait_for_line(&format!(
            "serval_dropped_total{{service=\"multiply\",reason=\"{reason}\",scope=\"request\"}} {count}"
        ));
    }
    // No other process may look into this one.
    let engine = server.process.0.id();
    let processes = children(engine);
    let status = std::fs::read_to_string(format!("/proc/{}/status", processes[0])).unwrap();
    assert!(processes.len() == 1 && status.contains("Seccomp:\t2"), "{status}");
    the_key_is_with(processes[0], engine, (&key, &text));
    let log = server.log();
    assert!(!log.contains(&text), "{log}");
    assert_eq!(server.end(), 0);
}

/// A key that no other memory has by chance, and its hexadecimal digits.
fn new_key() -> ([u8; 32], String) {
    let mut key = [0; 32];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut key).unwrap();
    (key, key.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The process that runs the kernel has the key. The engine has it nowhere: neither in the region, which both share and where all messages are,
/// nor in memory of its own, through which what it sends and logs has passed.
fn the_key_is_with(runtime: u32, engine: u32, (key, text): (&[u8; 32], &str)) {
    let (Some(with), Some(without)) = (memory_of(runtime), memory_of(engine)) else {
        println!("SKIPPED: only root may read the memory of these processes");
        return;
    };
    let holds = |memory: &[(String, Vec<u8>)], wanted: &[u8]| {
        let of = memory.iter().find(|(_, bytes)| memchr::memmem::find(bytes, wanted).is_some());
        of.map(|(place, _)| place.clone())
    };
    assert!(holds(&with, key).is_some(), "it is not found where it is");
    let regions = |memory: &[(String, Vec<u8>)]| {
        memory.iter().filter(|(place, _)| place.contains("memfd:serval")).count()
    };
    assert!(regions(&with) > 0 && regions(&without) > 0, "the region was read");
    for wanted in [&key[..], text.as_bytes()] {
        assert_eq!(holds(&without, wanted), None, "the engine has the key");
    }
    let shared: Vec<_> = with.into_iter().filter(|(place, _)| place.contains("memfd")).collect();
    assert_eq!(holds(&shared, key), None, "the region has the key");
}

/// What a process has in memory, with where that is; `None` if this process may not look.
fn memory_of(process: u32) -> Option<Vec<(String, Vec<u8>)>> {
    use std::os::unix::fs::FileExt as _;
    let memory = std::fs::File::open(format!("/proc/{process}/mem")).ok()?;
    let map = std::fs::read_to_string(format!("/proc/{process}/smaps")).ok()?;
    let (mut found, mut place) = (Vec::new(), "");
    for line in map.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        if range.is_some_and(|(from, to)| number(from).is_some() && number(to).is_some()) {
            place = line;
        }
        // Parts that were never touched have no memory.
        let Some(resident) = line.strip_prefix("Rss:") else { continue };
        if resident.trim() == "0 kB" {
            continue;
        }
        let (from, to) = place.split(' ').next()?.split_once('-')?;
        let (from, to) = (number(from)?, number(to)?);
        let mut bytes = vec![0; (to - from) as usize];
        // The host kernel's own pages cannot be read.
        if memory.read_exact_at(&mut bytes, from).is_ok() {
            found.push((place.to_owned(), bytes));
        }
    }
    Some(found)
}

#[test]
fn without_a_key_nothing_is_answered_and_the_log_says_why() {
    let port = free_port();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let key = folder.join("short.key");
    std::fs::write(&key, "0123456789abcdef").unwrap();
    let file = folder.join("secure-nokey.toml");
    let text = configuration(port, &built().join("multiply.so"));
    std::fs::write(&file, format!("schema = 1\n{text}")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("serve").arg(&file).env("SECURE_MULTIPLY_KEY", &key);
    command.env("SERVAL_ENGINE_CONTROL", "off");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no key of 64 hexadecimal digits"), "{said}");
}

#[test]
fn the_server_that_calls_its_isolated_process_answers_the_same() {
    for form in ["", "--spin"] {
        let mut command = Command::new(built().join("secure_call"));
        command.arg("--key").arg(root().join("benches/secure/bench.key"));
        command.args(form.split_whitespace()).stdout(Stdio::piped());
        let mut process = Peer::start(&mut command, "the Makefile builds it");
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        let mut ready = String::new();
        output.read_line(&mut ready).unwrap();
        let (_, address) = ready.trim_end().rsplit_once("udp://").expect("it is ready");
        exchange(address.parse().unwrap(), Sealed::KEY);
        process.signal("TERM");
        let mut last = String::new();
        output.read_to_string(&mut last).unwrap();
        assert!(last.contains("\"messages\":303,"), "{last}");
        assert_eq!(process.0.wait().unwrap().code(), Some(0));
    }
}
