//! `serval transfer`: two commands move a file between them, and mistakes get one sentence.

mod common;

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Peer, Served};
use serde_json::Value as Json;
use transfer::Source;
use transfer::service::message::Answer;

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

    /// A file that only its owner can read.
    fn secret(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.file(name, bytes);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
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
    let sink = folder.secret("sink", &vec![1; content.len() + 1]);
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
    assert_eq!(fs::metadata(&sink).unwrap().permissions().mode() & 0o777, 0o600, "as before");
    assert_eq!(folder.names(), ["sink", "source"]);
}

/// Through a Unix socket, whose path is free afterwards, and to nowhere.
#[test]
fn a_file_goes_through_a_unix_socket_and_is_discarded() {
    let folder = Folder::new("unix");
    let content: Vec<u8> = (0..300_000u32).flat_map(|n| n.to_le_bytes()).collect();
    let (source, sink) = (folder.file("source", &content), folder.path("sink"));
    let socket = folder.path("socket");
    let listens = format!("unix-listen://{socket}");
    let mut receiver = serval(&[&listens, &sink, "--json", "--digest", "md5"]).spawn().unwrap();
    let mut lines = BufReader::new(receiver.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(line.contains("listening") && line.contains(&socket), "{line}");
    // The path is in use.
    let (code, said) = failure(&[&listens, &folder.path("other")]);
    assert!(code == Some(1) && said.contains("remove it if no program uses it"), "{said}");
    let sent = serval(&[&source, &format!("unix://{socket}"), "--json"]).output().unwrap();
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(receiver.wait().unwrap().success());
    assert!(fs::read(&sink).unwrap() == content);
    let received: Json = serde_json::from_str(&line).unwrap();
    let counted = serval(&[&source, "discard://", "--json", "--digest", "md5"]).output().unwrap();
    assert!(counted.status.success(), "{}", String::from_utf8_lossy(&counted.stderr));
    let counted: Json = serde_json::from_slice(&counted.stdout).unwrap();
    assert_eq!(counted["digest"], received["digest"]);
    assert_eq!(counted["written_bytes"], content.len());
    let (code, said) = failure(&["discard://", &sink]);
    assert!(code == Some(2) && said.contains("can only be the SINK"), "{said}");
    let (code, said) = failure(&[&source, &format!("unix://{socket}")]);
    assert!(code == Some(1) && said.contains("cannot connect to unix://"), "{said}");
    assert_eq!(folder.names(), ["sink", "source"]);
}

#[test]
fn a_peer_that_sends_nothing_destroys_no_file() {
    let folder = Folder::new("nothing");
    let sink = folder.file("sink", b"content");
    let peer = |address: String| TcpStream::connect(address.strip_prefix("tcp://").unwrap());
    let (receiver, _lines, address) = listener(&sink, &[]);
    drop(peer(address).unwrap());
    let output = receiver.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("the peer sent nothing, so it stays as it was"), "{said}");
    assert_eq!((output.status.code(), fs::read(&sink).unwrap()), (Some(1), b"content".to_vec()));
    // A link is replaced, and the file that it names is not touched.
    let link = folder.path("link");
    std::os::unix::fs::symlink(&sink, &link).unwrap();
    let (mut receiver, _lines, address) = listener(&link, &[]);
    peer(address).unwrap().write_all(b"other").unwrap();
    assert!(receiver.wait().unwrap().success());
    assert_eq!(
        (fs::read(&sink).unwrap(), fs::read(&link).unwrap()),
        (b"content".to_vec(), b"other".to_vec())
    );
    // An empty stream makes an empty file.
    let (mut receiver, _lines, address) = listener(&folder.path("empty"), &[]);
    drop(peer(address).unwrap());
    assert!(receiver.wait().unwrap().success());
    // From an offset a file is continued in its place.
    let (mut receiver, _lines, address) = listener(&sink, &["--offset", "3"]);
    peer(address).unwrap().write_all(b"crete").unwrap();
    assert!(receiver.wait().unwrap().success());
    assert_eq!(fs::read(&sink).unwrap(), b"concrete");
    assert_eq!(folder.names(), ["empty", "link", "sink"]);
}

#[test]
fn an_interrupted_sender_ends_its_receiver_with_an_error() {
    let folder = Folder::new("interrupted");
    let source = folder.path("source");
    // A sparse file, which takes long.
    fs::File::create(&source).unwrap().set_len(1 << 40).unwrap();
    let (receiver, _lines, address) = listener(&folder.path("sink"), &[]);
    let sender = serval(&[&source, &address]).spawn().unwrap();
    let part = folder.0.join("sink.part");
    while fs::metadata(&part).map_or(0, |found| found.len()) < 1_000_000 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let interrupted = Command::new("kill").args(["-INT", &sender.id().to_string()]).status();
    assert!(interrupted.unwrap().success());
    let output = sender.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("cancelled"), "{said}");
    let output = receiver.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let expected = "the peer reset the connection";
    assert!(output.status.code() == Some(1) && said.contains(expected), "{said}");
    assert_eq!(folder.names(), ["sink.part", "source"]);
}

#[test]
fn a_part_is_sealed() {
    let folder = Folder::new("seal");
    let source = folder.file("source", &[7; 5000]);
    let key = folder.secret("key", "ab".repeat(32).as_bytes());
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
fn a_sealed_stream_arrives_as_its_plain_bytes_or_not_at_all() {
    let folder = Folder::new("open");
    let content: Vec<u8> = (0..300_000u32).flat_map(|n| n.to_le_bytes()).collect();
    let (source, sink) = (folder.file("source", &content), folder.path("sink"));
    let key = folder.secret("key", "ab".repeat(32).as_bytes());
    for cipher in ["aes-256-gcm", "aes-256-ctr"] {
        let keyed = ["--cipher", cipher, "--digest", "sha1", "--digest", "md5"];
        let open = [&keyed[..], &["--open", &key]].concat();
        let (mut receiver, mut lines, address) = listener(&sink, &open);
        let seal = [&[source.as_str(), &address, "--json", "--seal", &key][..], &keyed].concat();
        let sent = serval(&seal).output().unwrap();
        assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(receiver.wait().unwrap().success());
        let sent: Json = serde_json::from_slice(&sent.stdout).unwrap();
        let received: Json = serde_json::from_str(&line).unwrap();
        assert_eq!(sent["digests"], received["digests"]);
        assert_eq!(received["digests"][1]["kind"], "md5");
        assert!(fs::read(&sink).unwrap() == content);
    }
    // From file to file, and with a byte changed: the sink stays as it was.
    let sealed = folder.path("sealed");
    assert!(
        serval(&[&source, &sealed, "--seal", &key, "--sync"]).output().unwrap().status.success()
    );
    fs::write(&sink, b"before").unwrap();
    let mut changed = fs::read(&sealed).unwrap();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    fs::write(&sealed, changed).unwrap();
    let (code, said) = failure(&[&sealed, &sink, "--open", &key]);
    let expected = "record 18 of the sealed stream does not open";
    assert!(code == Some(1) && said.contains(expected), "{code:?} {said}");
    assert_eq!(fs::read(&sink).unwrap(), b"before");
    assert!(content.starts_with(&fs::read(folder.path("sink.part")).unwrap()));
}

#[test]
fn a_search_on_the_way_counts_what_grep_counts() {
    let folder = Folder::new("grep");
    let text: String = (0..100_000).map(|n| format!("line {n} of the file\n")).collect();
    let (source, sink) = (folder.file("source", text.as_bytes()), folder.path("sink"));
    let options = ["--find", "7 of", "--grep", "[02468]77 of .*e$", "--matches", "2", "--json"];
    let output = serval(&[&[source.as_str(), &sink], &options[..]].concat()).output().unwrap();
    let report: Json = serde_json::from_slice(&output.stdout).unwrap();
    let grep = Command::new("grep").args(["-c", "[02468]77 of .*e$", &source]).output().unwrap();
    let expected: u64 = String::from_utf8(grep.stdout).unwrap().trim().parse().unwrap();
    let stages = &report["stages"];
    assert_eq!((&stages[0]["count"], &stages[1]["count"]), (&10_000.into(), &expected.into()));
    let first = text.find("line 277 of").unwrap();
    assert_eq!(stages[1]["offsets"][0], first);
    assert_eq!(stages[1]["offsets"].as_array().unwrap().len(), 2);
    let joined = serval(&[&source, &sink, "--then", &source, "--find", "7 of", "--json"]);
    let joined: Json = serde_json::from_slice(&{ joined }.output().unwrap().stdout).unwrap();
    assert_eq!(joined["stages"][0]["count"], 20_000);
    assert!(fs::read(&sink).unwrap() == [text.as_bytes(), text.as_bytes()].concat());
    let (code, said) = failure(&[&source, &sink, "--grep", "("]);
    assert!(code == Some(1) && said.contains("the pattern cannot be used"), "{code:?} {said}");
}

#[test]
fn a_bomb_replaces_no_file() {
    let folder = Folder::new("expand");
    let source = folder.path("source");
    fs::File::create(&source).unwrap().set_len(64 << 20).unwrap();
    let (packed, sink) = (folder.path("packed"), folder.file("sink", b"before"));
    for (format, level) in [("gzip", "gzip:9"), ("zstd", "zstd:9")] {
        let made = serval(&[&source, &packed, "--compress", level, "--digest", "md5", "--json"]);
        let made: Json = serde_json::from_slice(&{ made }.output().unwrap().stdout).unwrap();
        let expand = [&packed, &sink, "--expand", format];
        let (code, said) = failure(&expand.map(|text: &str| text));
        assert!(code == Some(1) && said.contains("expands to more bytes"), "{code:?} {said}");
        assert_eq!(fs::read(&sink).unwrap(), b"before");
        let other = folder.path("expanded");
        let trusted = ["--expand-ratio", "100000", "--digest", "md5", "--json"];
        let got = serval(&[&[&packed, &other, "--expand", format][..], &trusted].concat());
        let got: Json = serde_json::from_slice(&{ got }.output().unwrap().stdout).unwrap();
        assert_eq!((&got["written_bytes"], &got["digest"]), (&made["read_bytes"], &made["digest"]));
    }
}

#[test]
fn mistakes_get_one_sentence_and_their_exit_code() {
    let folder = Folder::new("mistakes");
    let (source, key) = (folder.file("source", b"content"), folder.secret("key", b"short"));
    let (nothing, fifo) = (folder.path("nothing"), folder.path("fifo"));
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let open = folder.file("open", &[b'a'; 64]);
    let link = folder.path("link");
    std::os::unix::fs::symlink(&source, &link).unwrap();
    let cases: [(&[&str], i32, &str); 12] = [
        (&[&source, "tcp://127.0.0.1:1", "--seal", &open], 2, "run chmod 600 on it"),
        (&["listen://127.0.0.1:0", &fifo], 1, "it is a FIFO, not a file"),
        (&["listen://127.0.0.1:0", "/dev/full"], 1, "it is a device, not a file"),
        (&["listen://127.0.0.1:0", &link, "--offset", "1"], 1, "it is a symbolic link, not a file"),
        (&["tcp://127.0.0.1:1", "tcp://127.0.0.1:1"], 1, "cannot connect to tcp://127.0.0.1:1"),
        (&[&source, "tcp://127.0.0.1:1", "--cipher", "des"], 2, "must be aes-256-gcm or"),
        (
            &[&source, "udp://127.0.0.1:1"],
            2,
            "udp:// is not tcp://, listen://, unix://, unix-listen:// or discard://",
        ),
        (&[&source, "tcp://127.0.0.1:1", "--digest", "sha3"], 2, "must be md5, sha256, crc32c or"),
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
    { peer }.write_all(&[5; 40]).unwrap();
    let output = receiver.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let expected = "the peer closed the connection before the end of the transfer; 40 bytes were read from the source, \
                    40 reached the sink and are in";
    assert!(said.contains(expected), "{said}");
    let part = folder.0.join("sink.part");
    assert_eq!(fs::read(&part).unwrap(), [5; 40]);
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
    let _ = { peer }.write_all(&[5; 10_000]);
    let output = receiver.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("`ulimit -f` allows") && said.contains("4096 reached the sink"),
        "{said}"
    );
    assert_eq!(fs::read(&part).unwrap(), [5; 4096]);
}

const ECHO: &str =
    "[[service]]\nname = \"echo\"\nlisten = \"udp://127.0.0.1:0\"\nkernel = \"echo\"\n";

/// `[transfer]` alone is a configuration; the server serves transfers, and a reload adds services to it.
#[test]
fn a_server_without_a_service_does_transfers() {
    let folder = Folder::new("alone");
    let content = vec![7; 700_000];
    let (source, sink, engine) =
        (folder.file("source", &content), folder.path("sink"), folder.path("engine"));
    let table = format!("[transfer]\nsocket = \"{engine}\"\n");
    let served = Served::start("transfer-alone", "", &table);
    assert!(served.services.is_empty());
    let (mut receiver, _lines, address) = listener(&sink, &["--engine", &engine]);
    let sent = { serval(&[&source, &address, "--engine", &engine]) }.output().unwrap();
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    assert!(receiver.wait().unwrap().success());
    assert!(fs::read(&sink).unwrap() == content);
    assert_eq!(served.metric("serval_transfers_succeeded_total"), 2);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("transfer-alone.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{text}{ECHO}")).unwrap();
    served.process.signal("HUP");
    let echoes = "serval_requests_received_total{service=\"echo\"} 0";
    common::eventually("the service is there", || common::page(served.metrics).contains(echoes));
    assert_eq!(served.drain(), 0);
}

/// The line that scripts wait for names the socket.
#[test]
fn the_first_line_names_the_socket_of_transfers() {
    let folder = Folder::new("announced");
    let engine = folder.path("engine");
    let text =
        format!("schema = 1\n[engine]\ncontrol = \"off\"\n[transfer]\nsocket = \"{engine}\"\n");
    let file = folder.file("serval.toml", text.as_bytes());
    let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
    command.args(["serve", &file]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut process = Peer::start(&mut command, "cargo builds it");
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, format!("ready: transfers {engine}\n"));
}

#[test]
fn a_server_does_the_transfer_and_counts_it() {
    let folder = Folder::new("served");
    let content = vec![9; 3_000_000];
    let (source, sink, engine) =
        (folder.file("source", &content), folder.path("sink"), folder.path("engine"));
    let config = format!("[transfer]\nsocket = \"{engine}\"\n{ECHO}");
    let served = Served::start("transfer-served", "", &config);
    let (mut receiver, _lines, address) =
        listener(&sink, &["--engine", &engine, "--digest", "md5"]);
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
    assert!(reader.join().unwrap().is_err(), "the end of the stream is no success");
    let expected = "the file ends at byte 3000000, before the end of the transfer at byte 3000001; \
                    3000000 bytes were read from the source, 3000000 reached the sink";
    assert!(code == Some(1) && said.contains(expected), "{said}");
    assert_eq!(served.metric("serval_transfers_started_total"), 3);
    assert_eq!(served.metric("serval_transfers_succeeded_total"), 2);
    assert_eq!(served.metric("serval_transfers_failed_total{reason=\"file_ended\"}"), 1);
    assert_eq!(served.metric("serval_transfers_written_bytes_total"), 9_000_000);
    for device in ["file", "socket", "accelerator", "digest"] {
        let name = format!("serval_transfers_queued{{device=\"{device}\"}}");
        assert_eq!(served.metric(&name), 0, "{name}");
    }
    // Two were sent, and one was received.
    for metric in ["source_bytes_total{device=\"file\"}", "sink_bytes_total{device=\"socket\"}"] {
        assert_eq!(served.metric(&format!("serval_transfers_{metric}")), 6_000_000, "{metric}");
    }
    let in_flight = || served.metric("serval_transfer_bytes_in_flight{device=\"file\"}");
    common::eventually("nothing is in flight", || in_flight() == 0);
    let [passes, chunks] = ["passes", "chunks"]
        .map(|what| served.metric(&format!("serval_transfers_digest_{what}_total")));
    assert!(passes > 0 && passes <= chunks, "{passes} passes, {chunks} chunks");
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
    let folder = Folder::new("demo");
    let picture = folder.path("picture.svg");
    let (code, report) = demo(&["--plot", &picture]);
    assert_eq!((code, &report["wrong"]), (Some(0), &Json::from(0)), "{report}");
    assert!(report["checked"].as_u64().unwrap() > 500);
    let rows = report["rows"].as_array().unwrap();
    let stages: HashSet<&str> = rows
        .iter()
        .flat_map(|row| row["stages"].as_array().unwrap())
        .map(|stage| stage["stage"].as_str().unwrap())
        .collect();
    for kind in [
        "md5",
        "sha1",
        "sha256",
        "crc32c",
        "aes-256-gcm",
        "open-aes-256-gcm",
        "gzip",
        "expand-gzip",
        "zstd",
        "expand-zstd",
        "search-text",
        "search-lines",
        "aes-256-ctr-kernel",
    ] {
        assert!(stages.contains(kind), "{kind} is not in {stages:?}");
    }
    for row in rows {
        assert!(row["checked"].as_u64().unwrap() >= 4 && row["wrong"] == 0, "{row}");
    }
    // The engine and the loop, each with 1, 2 and 4 clients.
    let served = report["file_service"].as_array().unwrap();
    assert_eq!(served.len(), 6, "{report}");
    for row in served {
        for value in ["bytes_per_second", "cpu_seconds_per_gb"] {
            assert!(row[value].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    assert_eq!(report["plot"], Json::from(picture.as_str()), "{report}");
    let picture = fs::read_to_string(picture).unwrap();
    for part in ["loop of read, seal, write", "transfer engine", "bytes a second"] {
        assert!(picture.contains(part), "{part} is not in {picture}");
    }
    let (code, report) = demo(&["--corrupt", "--no-plot"]);
    assert_eq!((code, &report["wrong"]), (Some(1), &Json::from(1)), "{report}");
}

#[test]
fn transfers_in_flight_are_listed() {
    let folder = Folder::new("ls");
    let engine = folder.path("engine");
    let config = format!("[transfer]\nsocket = \"{engine}\"\n{ECHO}");
    let served = Served::start("transfer-ls", "", &config);
    let list = || {
        let output = serval(&["ls", "--engine", &engine, "--json"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Json>(&output.stdout).unwrap()
    };
    assert_eq!(list()["in_flight"], 0);
    let mut client = transfer::Client::connect(engine.as_ref()).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let sink = fs::File::create(folder.path("sink")).unwrap();
    let source = Source::socket(ours, None).digest(transfer::DigestKind::Sha1);
    client.submit(source.file(sink, 0)).unwrap();
    theirs.write_all(&[1; 5000]).unwrap();
    // After a while it has taken what has arrived.
    let entry = loop {
        let entry = list()["transfers"][0].clone();
        if entry["written_bytes"] == 5000 && entry["state"] == "waits for a socket" {
            break entry;
        }
    };
    assert_eq!(entry["stages"], serde_json::json!(["sha1"]));
    assert_eq!((&entry["source"], &entry["sink"]), (&"socket".into(), &"file".into()));
    let devices = list()["devices"].as_array().unwrap().clone();
    let of = |name: &str| devices.iter().find(|device| device["device"] == name).unwrap();
    assert_eq!(
        (&of("file")["given_bytes"], &of("socket")["taken_bytes"]),
        (&5000.into(), &5000.into())
    );
    assert!(of("file")["file_system"].is_string() && of("socket")["file_system"].is_null());
    assert_eq!((&of("socket")["waiting"], &of("socket")["queued"]), (&1.into(), &0.into()));
    assert!(of("socket")["taken_bytes_per_second"].is_number());
    let shown = serval(&["ls", "--engine", &engine]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("socket -> sha1 -> file"), "{shown}");
    let (code, said) = failure(&["ls"]);
    assert!(code == Some(2) && said.contains("--engine"), "{said}");
    drop((theirs, client, served));
}

/// The next answer about a transfer: its reason, bytes read and bytes written.
fn ended(client: &mut transfer::Client) -> (u64, &'static str, u64, u64) {
    let answer = client.next(Duration::from_secs(60)).unwrap();
    let Some(Answer::Ended { id, result, report }) = answer else { panic!("{answer:?}") };
    (id, result.map_or_else(|error| error.name(), |()| "none"), report.read, report.written)
}

#[test]
fn a_file_that_hangs_stops_neither_other_transfers_nor_the_server() {
    let folder = Folder::new("hangs");
    let program = folder.path("hang");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hang.c");
    let compiled = Command::new("cc").args(["-o", &program, source]).status().unwrap();
    assert!(compiled.success());
    let mut hang = Command::new(&program);
    hang.arg(env!("CARGO_BIN_EXE_serval"));
    let engine = folder.path("engine");
    let config = format!("[transfer]\nsocket = \"{engine}\"\n{ECHO}");
    let served = Served::start_by(hang, "transfer-hangs", "", &config);
    let connect = || transfer::Client::connect(engine.as_ref()).unwrap();
    let source = folder.file("hangs-source", &[1; 100_000]);
    let sink = folder.file("hangs-sink", b"");
    let (mut client, mut peers) = (connect(), Vec::new());
    let mut submit = |client: &mut transfer::Client, sends: bool, stall_ms: u64| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let command = if sends {
            Source::file(fs::File::open(&source).unwrap(), 0, None).socket(ours)
        } else {
            theirs.write_all(&[1; 5000]).unwrap();
            let sink = fs::OpenOptions::new().write(true).open(&sink).unwrap();
            Source::socket(ours, Some(6000)).file(sink, 0)
        };
        peers.push(theirs);
        client.submit(command.stall(Duration::from_millis(stall_ms))).unwrap()
    };
    // The thread that is left watches the time.
    let alone = submit(&mut client, true, 600);
    assert_eq!(ended(&mut client), (alone, "file_stalled", 0, 0));
    let sends: Vec<u64> = (0..3).map(|_| submit(&mut client, true, 900)).collect();
    let receives = submit(&mut client, false, 900);
    // A file that hangs when it is closed.
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let refused = Source::socket(ours, None).file(fs::File::open(&source).unwrap(), 0);
    let mut other = connect();
    other.submit(refused).unwrap();
    assert_eq!(ended(&mut other).1, "access");
    // Another program's file goes out meanwhile.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let innocent = folder.file("innocent", &[2; 1000]);
    let command = Source::file(fs::File::open(innocent).unwrap(), 0, None).socket(ours);
    let id = other.submit(command.stall(Duration::from_secs(20))).unwrap();
    assert_eq!(ended(&mut other), (id, "none", 1000, 1000));
    theirs.read_exact(&mut [0; 1000]).unwrap();
    // Those that hang are answered when their time is over, with exact counts.
    let mut answers: Vec<_> = (0..4).map(|_| ended(&mut client)).collect();
    answers.sort_unstable();
    let mut expected: Vec<_> = sends.iter().map(|id| (*id, "file_stalled", 0, 0)).collect();
    expected.push((receives, "file_stalled", 5000, 0));
    assert_eq!(answers, expected);
    // The peers see the end, although the host kernel has not given the files back.
    for mut peer in peers {
        assert_eq!(peer.read(&mut [0; 1]).unwrap_or(0), 0);
    }
    assert_eq!(served.metric("serval_transfers_failed_total{reason=\"file_stalled\"}"), 5);
    // A program takes no more than its part of the places for files that hang: those of another one go on.
    let (mut greedy, mut peers) = (connect(), Vec::new());
    for _ in 0..20 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        peers.push(theirs);
        let hanging = Source::file(fs::File::open(&source).unwrap(), 0, None).socket(ours);
        greedy.submit(hanging.stall(Duration::from_secs(600))).unwrap();
    }
    let innocent = folder.path("innocent");
    let of_another = serval(&[&innocent, "discard://", "--engine", &engine]).output().unwrap();
    assert!(of_another.status.success(), "{}", String::from_utf8_lossy(&of_another.stderr));
    // When it goes its places come back, though the host kernel gives no thread back.
    drop((client, other, greedy, peers));
    let mut client = connect();
    let null = fs::File::options().write(true).open("/dev/null").unwrap();
    let command = Source::file(fs::File::open(&innocent).unwrap(), 0, None).file(null, 0);
    let id = client.submit(command.stall(Duration::from_secs(60))).unwrap();
    assert_eq!(ended(&mut client), (id, "none", 1000, 1000));
    // The end of the server answers what still hangs, and waits for no file.
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let hanging = Source::file(fs::File::open(&source).unwrap(), 0, None).socket(ours);
    client.submit(hanging).unwrap();
    assert_eq!(served.drain(), 0);
    match client.next(Duration::from_secs(60)) {
        Ok(Some(Answer::Ended { result: Err(error), .. })) => {
            assert!(matches!(error.name(), "cancelled" | "stopping"));
        }
        other => assert!(matches!(other, Err(transfer::ClientError::Closed)), "{other:?}"),
    }
}

#[test]
fn a_kernel_seals_and_any_service_can_be_a_stage() {
    let folder = Folder::new("kernel");
    let (aes, scale) = (folder.path("aes"), folder.path("scale"));
    let services = format!(
        "[[service]]\nname = \"aes\"\nlisten = \"shm://{aes}\"\nkernel = \"aes256_ctr\"\n\
         mqueues = 4\nmax_message_bytes = 16432\nmax_reply_bytes = 16384\n\
         [[service]]\nname = \"scale\"\nlisten = \"shm://{scale}\"\nkernel = \"echo\"\n"
    );
    let _served = Served::start("transfer-kernel", "", &services);
    let plain: Vec<u8> =
        (0..700_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    let source = folder.file("plain", &plain);
    let key = folder.secret("key", &[7; 32]);
    let (sealed, opened) = (folder.path("sealed"), folder.path("opened"));
    let seal_on = format!("shm://{aes}");
    let run = |arguments: &[&str]| {
        let done = Command::new(env!("CARGO_BIN_EXE_serval"))
            .arg("transfer")
            .args(arguments)
            .output()
            .unwrap();
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let (code, said) =
        run(&[&source, &sealed, "--seal", &key, "--cipher", "aes-256-ctr", "--seal-on", &seal_on]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(fs::read(&sealed).unwrap().len(), plain.len() + 48);
    let (code, said) = run(&[&sealed, &opened, "--open", &key, "--cipher", "aes-256-ctr"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(fs::read(&opened).unwrap() == plain);

    // An echo returns the messages, so each piece comes back behind its header.
    let echoed = folder.path("echoed");
    let (code, said) = run(&[&source, &echoed, "--kernel", &format!("shm://{scale}")]);
    assert_eq!(code, Some(0), "{said}");
    let echoed = fs::read(&echoed).unwrap();
    assert_eq!(echoed[16..48], [0; 32]);
    assert_eq!(echoed[48..1000], plain[..952]);

    let (code, said) = run(&[&source, &sealed, "--seal", &key, "--seal-on", &seal_on]);
    assert!(code == Some(2) && said.contains("--cipher aes-256-ctr"), "{said}");
    let (code, said) = run(&[&source, &sealed, "--kernel", "shm:///nowhere/at-all"]);
    assert!(code == Some(1) && said.contains("no server listens"), "{said}");
}

/// The server is root's here: its user of a tenant gets a process, which moves the bytes with the user's rights.
#[test]
fn a_tenant_s_user_transfers_with_its_own_rights() {
    use std::os::unix::process::CommandExt as _;
    const USER: u32 = 65_534;
    if sys::process::user() != 0 {
        eprintln!("SKIPPED: only root can start programs of other users");
        return;
    }
    let folder = Folder::new("user");
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o755)).unwrap();
    let engine = folder.path("engine");
    let tenant = format!("[[tenant]]\nname = \"red\"\nusers = [{USER}]\n");
    let served = Served::start(
        "transfer-user",
        "",
        &format!("[transfer]\nsocket = \"{engine}\"\n{tenant}{ECHO}"),
    );
    let content: Vec<u8> = (0..1_000_003u32).map(|at| (at * 7 + at / 251) as u8).collect();
    let source = folder.file("source", &content);
    // A build folder may be one that only root enters.
    let program = folder.path("serval");
    fs::copy(env!("CARGO_BIN_EXE_serval"), &program).unwrap();
    let as_user = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("transfer").args(arguments).args(["--engine", &engine]);
        command.uid(USER).gid(USER).output().unwrap()
    };
    let done = as_user(&[&source, "discard://", "--digest", "crc32c", "--json"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let done: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(done["digest"]["value"], format!("{:08x}", crc32c::crc32c(&content)));
    assert_eq!(served.metric("serval_transfers_succeeded_total"), 1);
    assert_eq!(served.metric("serval_tenant_transfers_total{tenant=\"red\"}"), 1);
    let refused = as_user(&["/proc/version", "discard://"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("interface of the host kernel"), "{why}");
    assert_eq!(served.drain(), 0);
}
