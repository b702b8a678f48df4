//! `serval ask` against real services and against servers that do not answer.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use engine::topology::{Replies, Service};
use serde_json::Value as Json;
use server::Server;
use wire::framing::Framing;

use common::{address, start, tcp, topology, udp};

/// A path that no other test uses.
fn port(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("serval-ask-{}-{name}", std::process::id()))
}

/// An echo service on UDP and TCP, and in shared memory at a path of this name.
fn echo(name: &str, framing: Framing) -> (Server, PathBuf) {
    let mut service = Service::new("echo", vec![udp(), tcp()], "echo");
    service.framing = framing;
    service.memory_ports = vec![port(name)];
    (start(topology(vec![service])), port(name))
}

fn ask_with(input: &[u8], arguments: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_serval"))
        .arg("ask")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

/// The printed reply; the time limit allows for a busy machine.
fn reply(input: &[u8], arguments: &[&str]) -> String {
    let output = ask_with(input, &[arguments, &["--timeout", "60s"]].concat());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The one sentence on standard error.
fn refusal(code: i32, arguments: &[&str]) -> String {
    let output = ask_with(b"", arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    error
}

/// Every way to give the message, and every way to show the reply.
fn answers(url: &str, more: &[&str]) {
    let says = |input: &[u8], message: &[&str]| reply(input, &[&[url], message, more].concat());
    assert_eq!(says(b"", &["hello"]), "hello\n");
    assert_eq!(says(b"", &["--text", "--hello"]), "--hello\n");
    assert_eq!(says(b"from a pipe", &["-"]), "from a pipe\n");
    assert_eq!(says(b"from a pipe", &["--payload", "-"]), "from a pipe\n");
    let dump = says(b"", &["--hex", "00ff61"]);
    assert!(dump.starts_with("00000000  00 ff 61  ") && dump.contains("|..a|"), "{dump}");
    let file = port("file").with_extension(std::thread::current().name().unwrap());
    std::fs::write(&file, "from a file").unwrap();
    assert_eq!(says(b"", &["--payload", file.to_str().unwrap()]), "from a file\n");
    std::fs::remove_file(&file).unwrap();
    let json: Json = serde_json::from_str(&says(b"", &["hello", "--json"])).unwrap();
    assert_eq!((&json["target"], &json["sent_bytes"]), (&url.into(), &5.into()), "{json}");
    assert_eq!((&json["reply_hex"], &json["reply_text"]), (&"68656c6c6f".into(), &"hello".into()));
    assert!(json["took_us"].as_f64().unwrap() > 0.0, "{json}");
}

#[test]
fn a_datagram_is_answered() {
    let (server, _) = echo("udp", Framing::Raw);
    answers(&format!("udp://{}", address(&server, 0)), &[]);
}

#[test]
fn a_message_on_a_connection_is_answered_in_every_framing() {
    let (server, _) = echo("tcp", Framing::LengthU16);
    answers(&format!("tcp://{}", address(&server, 1)), &["--framing", "length:u16"]);
    for (framing, arguments) in [
        (Framing::Raw, &[][..]),
        (Framing::Raw, &["--reply-bytes", "5"]),
        (Framing::Fixed(5), &["--framing", "fixed:5"]),
        (Framing::LengthU32, &["--framing", "length:u32"]),
        (Framing::Line, &["--framing", "line"]),
    ] {
        let (server, _) = echo(&format!("tcp-{}", arguments.concat()), framing);
        let url = format!("tcp://{}", address(&server, 1));
        assert_eq!(reply(b"", &[&[url.as_str(), "hello"], arguments].concat()), "hello\n");
    }
}

#[test]
fn a_message_in_shared_memory_is_answered() {
    let (_server, path) = echo("shm", Framing::Raw);
    answers(&format!("shm://{}", path.display()), &[]);
    let mut silent = Service::new("silent", vec![], "echo");
    silent.replies = Replies::None;
    silent.memory_ports = vec![port("silent")];
    let _silent = start(topology(vec![silent]));
    let error = refusal(1, &[&format!("shm://{}", port("silent").display()), "hello"]);
    assert!(error.contains("sends no replies"), "{error}");
}

#[test]
fn a_missing_reply_is_reported_in_one_sentence() {
    // A separate address: another test may get the port of 127.0.0.1 meanwhile.
    let free = TcpListener::bind("127.0.0.99:0").unwrap().local_addr().unwrap();
    let silent_udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let silent_tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = closing.local_addr().unwrap();
    // It sends half of a reply.
    let closer = std::thread::spawn(move || {
        let (mut stream, _) = closing.accept().unwrap();
        stream.read_exact(&mut [0; 7]).unwrap();
        stream.write_all(&[0, 9, b'x']).unwrap();
    });
    let tcp = |address| format!("tcp://{address}");
    let udp = |address| format!("udp://{address}");
    let framed = ["--framing", "length:u16"];
    let closed = refusal(1, &[&[&*tcp(address), "hello"], &framed[..]].concat());
    assert!(
        closed.contains("closed the connection") && closed.contains("(3 bytes had)"),
        "{closed}"
    );
    closer.join().unwrap();
    let short = ["--timeout", "100ms"];
    for (url, part) in [
        (tcp(free), "is a server running there"),
        (udp(free), "is a server running there"),
        (udp(silent_udp.local_addr().unwrap()), "within 100ms: does a server run there"),
        (tcp(silent_tcp.local_addr().unwrap()), "is the framing (--framing) the service's own"),
        ("shm:///there/is/no/port".to_owned(), "no server listens at"),
    ] {
        let error = refusal(1, &[&[&*url, "hello"], &short[..]].concat());
        // A refusal may arrive within so short a time as well.
        let late = error.contains("within 100ms") && url.ends_with(&free.to_string());
        assert!(error.contains(part) || late, "{url}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    }
}

#[test]
fn an_invalid_message_is_a_command_line_error() {
    for (arguments, part) in [
        (&["udp://127.0.0.1:9"][..], "MESSAGE"),
        (&["udp://127.0.0.1:9", "hello", "--hex", "00"], "cannot be used with"),
        (&["udp://127.0.0.1:9", "--hex", "0"], "pairs of hexadecimal digits"),
        (&["udp://127.0.0.1:9", "--payload", "/there/is/no/file"], "/there/is/no/file"),
        (&["http://127.0.0.1:9", "hello"], "udp://HOST:PORT"),
        (&["tcp://127.0.0.1:9", "hello", "--framing", "fixed:4"], "cannot carry"),
    ] {
        let error = refusal(2, arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}
