//! Programs in Python and Java, unmodified, send files in the ways of their runtimes: `os.sendfile`, asyncio's `loop.sendfile` and
//! `FileChannel.transferTo`, with other writes, TCP_CORK, copied descriptors, children and `close` around them. What a peer receives
//! is the same bytes without the library, with the library and no engine, and with an engine; and the engine has sent them.

#[path = "common/preloaded.rs"]
mod preloaded;

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use preloaded::{LIBRARY, PATIENCE, Setup, body, free_address, get};

/// What surrounds a program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum With {
    Nothing,
    Library,
    Engine,
}

const WAYS: [With; 3] = [With::Nothing, With::Library, With::Engine];

/// A program of `programs/`, which connects to the listener.
fn start(setup: &Setup, with: With, runtime: &str, program: &str, arguments: &[&str]) -> Child {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let mut command = Command::new(runtime);
    command.arg(folder.join(program)).args(arguments).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("SERVAL_TRANSFER_SOCKET");
    if with != With::Nothing {
        command.env("LD_PRELOAD", LIBRARY.as_path()).env("SERVAL_TRANSFER_NONBLOCKING", "1");
    }
    match with {
        With::Nothing => {}
        With::Library => drop(command.env("SERVAL_TRANSFER_SOCKET", setup.folder.join("nothing"))),
        With::Engine => drop(command.env("SERVAL_TRANSFER_SOCKET", setup.folder.join("engine"))),
    }
    command.spawn().expect("`make setup-test` installs it")
}

/// Waits for the program; returns what it has printed.
fn finish(program: Child, with: With) -> String {
    let output = program.wait_with_output().unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{with:?}: {complaints}");
    let warnings = complaints.matches("serval: transfers are done by libc").count();
    assert_eq!(warnings, usize::from(with == With::Library), "{with:?}: {complaints}");
    String::from_utf8(output.stdout).unwrap()
}

fn accept(listener: &TcpListener) -> TcpStream {
    let socket = listener.accept().unwrap().0;
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn received(mut socket: TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    socket.read_to_end(&mut got).unwrap();
    got
}

/// Compares without printing megabytes.
fn assert_same(with: With, got: &[u8], expected: &[u8]) {
    let differs = got.iter().zip(expected).position(|(got, expected)| got != expected);
    assert_eq!((got.len(), differs), (expected.len(), None), "{with:?}: lengths, first difference");
}

#[test]
fn python_sends_in_order_with_other_writes() {
    let setup = Setup::new("order");
    let content = setup.file("source", 3_000_001);
    let expected = [
        &b"more"[..],
        &content,
        b"between",
        &content[11..1011],
        b"corked",
        &content[7..1_000_007],
        b"still corked",
        &content[100..500_100],
        b"first of two numbers",
        &content[200..400_200],
        &content[5..300_005],
        b"child",
        b"parent",
        &content[1000..],
    ]
    .concat();
    let source = setup.folder.join("files/source");
    for with in WAYS {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let program =
            start(&setup, with, "/usr/bin/python3", "order.py", &[&port, source.to_str().unwrap()]);
        assert_same(with, &received(accept(&listener)), &expected);
        finish(program, with);
    }
    let strings = b"morebetweencorkedstill corkedfirst of two numberschildparent".len() + 1000;
    assert_eq!(setup.service.counters().written(), (expected.len() - strings) as u64);
    assert_eq!(setup.service.in_flight(), 0);
}

#[test]
fn asyncio_sends_on_connections_of_one_loop() {
    let setup = Setup::new("loop");
    let content = setup.file("source", 3_000_001);
    let source = setup.folder.join("files/source");
    for with in WAYS {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let arguments = [&port, source.to_str().unwrap(), "4"];
        let program = start(&setup, with, "/usr/bin/python3", "loop.py", &arguments);
        let peers: Vec<_> = (0..4).map(|_| accept(&listener)).collect();
        let peers: Vec<_> =
            peers.into_iter().map(|peer| thread::spawn(move || received(peer))).collect();
        let mut numbers: Vec<u8> = peers
            .into_iter()
            .map(|peer| {
                let got = peer.join().unwrap();
                let expected =
                    [&got[..1], b":", &content, b" then ", &content[1000..2_001_000], b" end"];
                assert_same(with, &got, &expected.concat());
                got[0]
            })
            .collect();
        numbers.sort_unstable();
        assert_eq!(numbers, *b"0123");
        finish(program, with);
    }
    // The ends of ranges may be short, and are libc's then, as is a call that a busy engine answers late.
    assert!(setup.service.counters().written() > 0);
}

#[test]
fn a_server_in_python_serves_through_the_engine() {
    let mut setup = Setup::new("serve");
    let address = free_address();
    let (large, small) = (setup.file("large", 20 << 20), setup.file("small", 1000));
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/serve.py");
    let mut command = Command::new("/usr/bin/python3");
    command.arg(program).arg(address.port().to_string()).arg(setup.folder.join("files"));
    setup.start(&mut command, address);
    assert!(body(get(address, "/small")) == small);
    assert_eq!(setup.service.counters().started(), 0, "small files are sent by libc");
    let readers: Vec<_> =
        (0..4).map(|_| thread::spawn(move || body(get(address, "/large")))).collect();
    for reader in readers {
        assert!(reader.join().unwrap() == large);
    }
    assert_eq!(setup.service.counters().written(), 4 * large.len() as u64);
}

#[test]
fn java_transfers_in_order_with_other_writes() {
    let setup = Setup::new("java");
    let content = setup.file("source", 3_000_001);
    let source = setup.folder.join("files/source");
    for with in WAYS {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let program = start(&setup, with, "java", "Order.java", &[&port, source.to_str().unwrap()]);
        let expected = [b"blocking", &content[..], b"between", &content[11..1011]];
        let expected = [&expected.concat(), &content[7..1_000_007]].concat();
        assert_same(with, &received(accept(&listener)), &expected);
        let expected = [b"selector", &content[..], b"end"].concat();
        assert_same(with, &received(accept(&listener)), &expected);
        // Nothing is read until another thread has closed the file.
        let closed = accept(&listener);
        assert_eq!(finish(program, with), "closed\n");
        let got = received(closed);
        let sent = got.strip_prefix(b"closed").unwrap();
        let differs = sent.chunks(content.len()).position(|part| part != &content[..part.len()]);
        assert_eq!(differs, None, "{with:?}");
    }
    let counters = setup.service.counters();
    // Blocking calls wait for the engine, others not for long.
    assert!(counters.written() >= 3_000_001 + 1_000_000, "{}", counters.written());
    let end = Instant::now() + PATIENCE;
    while setup.service.in_flight() > 0 {
        assert!(Instant::now() < end, "{} transfers are in flight", setup.service.in_flight());
        thread::yield_now();
    }
}
