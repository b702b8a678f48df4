//! `serval transfer`: two commands move a file between them, and mistakes get one sentence.

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::Served;
use serde_json::Value as Json;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("serval-cli-transfer-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.0.join(name), bytes).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn serval(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.arg("transfer").args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A command that listens, with its address.
fn listener(sink: &str, more: &[&str]) -> (Child, BufReader<std::process::ChildStdout>, String) {
    let mut child =
        serval(&[&["listen://127.0.0.1:0", sink, "--json"], more].concat()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let event: Json = serde_json::from_str(&line).unwrap();
    (child, lines, format!("tcp://{}", event["address"].as_str().unwrap()))
}

/// The exit code and the sentence of a command that fails.
fn failure(arguments: &[&str]) -> (Option<i32>, String) {
    let output = serval(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_file_goes_from_one_command_to_the_other() {
    let folder = Folder::new("copy");
    let content: Vec<u8> = (0..1_000_000u32).flat_map(|n| n.to_le_bytes()).collect();
    let source = folder.file("source", &content);
    // A longer file is replaced.
    let sink = folder.file("sink", &vec![1; content.len() + 1]);
    let (mut receiver, mut lines, address) = listener(&sink, &["--digest", "sha256"]);
    let sent = serval(&[&source, &address, "--digest", "sha256", "--json"]).output().unwrap();
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(receiver.wait().unwrap().success());
    let sent: Json = serde_json::from_slice(&sent.stdout).unwrap();
    let received: Json = serde_json::from_str(&line).unwrap();
    assert_eq!(sent["digest"], received["digest"]);
    assert_eq!(received["written_bytes"], content.len());
    assert!(fs::read(&sink).unwrap() == content);
}

#[test]
fn a_part_is_sealed() {
    let folder = Folder::new("seal");
    let source = folder.file("source", &[7; 5000]);
    let key = folder.file("key", "ab".repeat(32).as_bytes());
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", port.local_addr().unwrap());
    let command =
        serval(&[&source, &address, "--seal", &key, "--offset", "1000", "--bytes", "3000"]);
    let mut child = { command }.spawn().unwrap();
    let mut stream = Vec::new();
    port.accept().unwrap().0.read_to_end(&mut stream).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(stream.starts_with(b"SERVSEAL"));
    assert_eq!(stream.len(), 48 + 3000 + 16);
}

#[test]
fn mistakes_get_one_sentence_and_their_exit_code() {
    let folder = Folder::new("mistakes");
    let (source, key) = (folder.file("source", b"content"), folder.file("key", b"short"));
    let nothing = folder.path("nothing");
    let cases: [(&[&str], i32, &str); 8] = [
        (&[&source, &nothing], 2, "one of SOURCE and SINK has to be a file"),
        (&["tcp://127.0.0.1:1", "tcp://127.0.0.1:1"], 2, "one of SOURCE and SINK has to be a file"),
        (&[&source, "udp://127.0.0.1:1"], 2, "udp:// is not tcp:// or listen://"),
        (&[&source, "tcp://127.0.0.1:1", "--digest", "sha1"], 2, "must be md5, sha256 or crc32c"),
        (&[&source, "tcp://127.0.0.1:1", "--seal", &key], 2, "has to contain 32 bytes"),
        (&[&nothing, "tcp://127.0.0.1:1"], 1, "cannot read"),
        (&["listen://127.0.0.1:0", &nothing, "--stall", "50ms"], 1, "no peer connected to"),
        (
            &[&source, "tcp://127.0.0.1:1"],
            1,
            "cannot connect to tcp://127.0.0.1:1: Connection refused",
        ),
    ];
    for (arguments, code, sentence) in cases {
        let (got, said) = failure(arguments);
        assert!(got == Some(code) && said.contains(sentence), "{arguments:?}: {got:?} {said}");
    }
}

#[test]
fn a_transfer_that_ends_early_says_how_far_it_came() {
    let folder = Folder::new("early");
    let sink = folder.path("sink");
    let (receiver, _lines, address) = listener(&sink, &["--bytes", "100"]);
    let peer = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    std::io::Write::write_all(&mut { peer }, &[5; 40]).unwrap();
    let output = receiver.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let expected = "the peer closed the connection before the end of the transfer; 40 bytes were read from the source, \
                    40 reached the sink";
    assert!(said.contains(expected), "{said}");
    assert_eq!(fs::read(&sink).unwrap(), [5; 40]);
    // A limit of the file's length; the shell counts blocks of 512 bytes.
    let limited = format!("ulimit -f 8; exec \"$0\" transfer listen://127.0.0.1:0 '{sink}' --json");
    let mut shell = Command::new("sh");
    shell.args(["-c", &limited, env!("CARGO_BIN_EXE_serval")]);
    let mut receiver = shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(receiver.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let event: Json = serde_json::from_str(&line).unwrap();
    let peer = TcpStream::connect(event["address"].as_str().unwrap()).unwrap();
    // The receiver may have ended before all is sent.
    let _ = std::io::Write::write_all(&mut { peer }, &[5; 10_000]);
    let output = receiver.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("`ulimit -f` allows") && said.contains("4096 reached the sink"),
        "{said}"
    );
    assert_eq!(fs::read(folder.0.join("sink")).unwrap(), [5; 4096]);
    // A device.
    let (receiver, _lines, address) = listener("/dev/full", &[]);
    drop(TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap());
    let said = String::from_utf8(receiver.wait_with_output().unwrap().stderr).unwrap();
    assert!(said.contains("the sink is a device: it has to be a file"), "{said}");
}

const ECHO: &str =
    "[[service]]\nname = \"echo\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";

#[test]
fn a_server_does_the_transfer_and_counts_it() {
    let folder = Folder::new("served");
    let content = vec![9; 3_000_000];
    let (source, sink, engine) =
        (folder.file("source", &content), folder.path("sink"), folder.path("engine"));
    let config = format!("[transfer]\nsocket = \"{engine}\"\n{ECHO}");
    let served = Served::start("transfer-served", "", &config);
    let (mut receiver, _lines, address) = listener(&sink, &["--engine", &engine]);
    let sent = serval(&[&source, &address, "--engine", &engine, "--digest", "crc32c", "--json"]);
    let sent = { sent }.output().unwrap();
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    assert!(receiver.wait().unwrap().success());
    assert!(fs::read(&sink).unwrap() == content);
    let sent: Json = serde_json::from_slice(&sent.stdout).unwrap();
    assert_eq!(sent["written_bytes"], content.len());
    assert_eq!(sent["digest"]["value"], format!("{:08x}", crc32c::crc32c(&content)));
    // An error of the server is that of the command.
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", port.local_addr().unwrap());
    let long = [&source, &address, "--bytes", "3000001", "--engine", &engine];
    let reader = std::thread::spawn(move || port.accept().unwrap().0.read_to_end(&mut Vec::new()));
    let (code, said) = failure(&long);
    reader.join().unwrap().unwrap();
    let expected = "the file ends at byte 3000000, before the end of the transfer at byte 3000001; \
                    3000000 bytes were read from the source, 3000000 reached the sink";
    assert!(code == Some(1) && said.contains(expected), "{said}");
    assert_eq!(served.metric("serval_transfers_started_total"), 3);
    assert_eq!(served.metric("serval_transfers_succeeded_total"), 2);
    assert_eq!(served.metric("serval_transfers_failed_total{reason=\"file_ended\"}"), 1);
    assert_eq!(served.metric("serval_transfers_written_bytes_total"), 9_000_000);
    assert_eq!(served.drain(), 0);
    assert!(!folder.0.join("engine").exists());
    let (code, said) = failure(&[&source, "tcp://127.0.0.1:1", "--engine", &engine]);
    assert!(code == Some(1) && said.contains("cannot connect to tcp://"), "{said}");
}

#[test]
fn the_demo_finds_every_byte_and_a_spoiled_one() {
    let demo = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        let output =
            command.args(["demo", "transfer", "--quick", "--json"]).args(more).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let last: Json = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        (output.status.code(), last)
    };
    let (code, report) = demo(&[]);
    assert_eq!((code, &report["wrong"]), (Some(0), &Json::from(0)), "{report}");
    assert!(report["checked"].as_u64().unwrap() > 500);
    assert_eq!(report["rows"].as_array().unwrap().len(), 5);
    let (code, report) = demo(&["--corrupt"]);
    assert_eq!((code, &report["wrong"]), (Some(1), &Json::from(1)), "{report}");
}
