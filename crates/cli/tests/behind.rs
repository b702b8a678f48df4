//! `serval fn run`: unmodified servers behind a proxy, which bind the address of the proxy and know nothing of it.

mod common;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use bench::client::workload::coap;
use common::running::Running;
use common::*;
use onpath::Spec;
use server::control::client::FunctionClient;
use server::{Place, RegisterAction, Target};

/// How the server in C has its sockets, and whether the proxy tells it who its clients are.
const HOW: [(&str, bool); 8] = [
    ("plain", false),
    ("dup", false),
    ("fork", false),
    ("exec", false),
    ("plain", true),
    ("dup", true),
    ("fork", true),
    ("exec", true),
];
/// How long a server may take for an answer; one that has not come is asked for again.
const WAIT: Duration = Duration::from_millis(500);

/// The folder with the library and the programs in C.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lib");
        let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("behind-c");
        let mut make = Command::new("make");
        make.args(["--no-print-directory", "--silent", "-C"]).arg(library);
        let made = make
            .arg(format!("BUILD={}", build.display()))
            .args(["functions", "functions-tests"])
            .output();
        let made = made.unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        build
    })
}

/// An engine with a proxy at a free port over both transports.
struct Front {
    engine: Running,
    at: SocketAddr,
}

impl Front {
    fn new(name: &str, framing: &str, knows_clients: bool, functions: &str) -> Self {
        Self::at(name, "127.0.0.1", framing, knows_clients, functions)
    }

    /// The same at this address.
    fn at(name: &str, host: &str, framing: &str, knows_clients: bool, functions: &str) -> Self {
        let (port, upstream) = (free_port(), free_port());
        let engine = Running::start(
            &format!("behind-{name}-{knows_clients}"),
            &format!(
                "[[service]]\nname = \"front\"\nframing = \"{framing}\"\nrequest_timeout_ms = 60000\n\
                 listen = [\"udp://{host}:{port}\", \"tcp://{host}:{port}\"]\n\
                 upstream = \"127.0.0.1:{upstream}\"\nproxy_protocol = {knows_clients}\n{functions}"
            ),
        );
        let at = if host == "[::1]" { "::1" } else { "127.0.0.1" };
        Self { engine, at: SocketAddr::new(at.parse().unwrap(), port) }
    }

    fn command(&self, service: &str, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.args(["fn", "run", service]).arg(&self.engine.file).arg("--library");
        command.arg(built().join("libserval_functions_preload.so")).arg("--");
        command.arg(program).args(arguments).stdin(Stdio::null());
        command
    }

    /// The program, which gets the port of the proxy as its own.
    fn run(&self, program: &Path, arguments: &[&str]) -> Peer {
        Peer::start(&mut self.command("front", program, arguments), "it is installed")
    }

    /// An engine, and the program behind its proxy once that answers `probe`. `arguments` gets the port.
    fn with(
        new: impl Fn() -> Self,
        probe: &[u8],
        program: &Path,
        arguments: impl Fn(&str) -> Vec<String>,
    ) -> (Self, Peer) {
        // The ports were free a moment ago: if another program took one meanwhile, the next ones are tried.
        for _ in 0..10 {
            let front = new();
            let arguments = arguments(&front.port());
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let mut server = front.run(program, &arguments);
            let (mut ended, mut answers) = (false, false);
            let udp = front.udp();
            eventually("the server answers or ends", || {
                ended = server.0.try_wait().unwrap().is_some();
                udp.send(probe).unwrap();
                answers = udp.recv(&mut [0; 2048]).is_ok();
                ended || answers
            });
            if answers {
                return (front, server);
            }
        }
        panic!("{} ends by itself", program.display());
    }

    fn port(&self) -> String {
        self.at.port().to_string()
    }

    fn udp(&self) -> UdpSocket {
        let socket = UdpSocket::bind(SocketAddr::new(self.at.ip(), 0)).unwrap();
        socket.connect(self.at).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket
    }

    /// Asks until the server behind the proxy answers.
    fn ask(&self, socket: &UdpSocket, request: &[u8]) -> Vec<u8> {
        let mut answer = vec![0; 65_536];
        let mut found = None;
        eventually("the server answers a datagram", || {
            socket.send(request).unwrap();
            found = socket.recv(&mut answer).ok();
            found.is_some()
        });
        answer.truncate(found.unwrap());
        answer
    }

    /// The same over a connection: the answer ends as `end` says.
    fn call(&self, request: &[u8], end: &[u8]) -> (Vec<u8>, SocketAddr) {
        let mut found = None;
        eventually("the server answers over a connection", || {
            let mut stream = TcpStream::connect(self.at).unwrap();
            stream.set_read_timeout(Some(WAIT)).unwrap();
            stream.write_all(request).unwrap();
            let mut answer = Vec::new();
            let mut bytes = [0; 4096];
            while !answer.ends_with(end) {
                match stream.read(&mut bytes) {
                    Ok(len @ 1..) => answer.extend_from_slice(&bytes[..len]),
                    _ => return false,
                }
            }
            // Nothing listens at `upstream` yet.
            let failed = answer.starts_with(b"SERVER_ERROR");
            found = (!failed).then(|| (answer, stream.local_addr().unwrap()));
            found.is_some()
        });
        found.unwrap()
    }

    /// A register of a function of the proxy.
    fn register(&self, function: &str, name: &str) -> u64 {
        let client = FunctionClient::connect(&self.engine.socket).unwrap();
        let target = Target::Named { service: "front".into(), name: function.into() };
        let read = client.command(&target, &RegisterAction::Read).unwrap();
        read.into_iter().find(|(of, _)| of == name).unwrap().1
    }
}

fn function(name: &str, function: &str, params: &str) -> String {
    format!(
        "[[service.function]]\nname = \"{name}\"\nfunction = \"{function}\"\ndeadline_us = 1000000\n{params}\n"
    )
}

/// The server in C.
fn plain(how: &str, new: impl Fn() -> Front) -> (Front, Peer) {
    let arguments = |port: &str| vec![port.to_owned(), how.to_owned()];
    Front::with(new, b"probe", &built().join("plain_server"), arguments)
}

#[test]
fn an_echo_server_is_served_by_a_chain_and_sees_its_own_address() {
    for (how, knows) in HOW {
        let chain = function("limits", "threshold", "params = { offset = 0, high = 2147483647 }");
        let (front, server) = plain(how, || Front::new(how, "line", knows, &chain));
        assert_eq!(front.ask(&front.udp(), b"12345"), b"12345", "{how}");
        // What the function drops is not answered, what it passes is.
        let udp = front.udp();
        udp.send(b"\xff\xff\xff\xff").unwrap();
        assert_eq!(front.ask(&udp, b"another"), b"another", "{how}");
        let (line, _) = front.call(b"0123456\n", b"\n");
        assert_eq!(line, b"0123456\n", "{how}");
        assert!(front.register("limits", "dropped") >= 1);
        drop(server);
        assert_eq!(front.engine.end(), 0);
    }
}

#[test]
fn a_socket_has_the_name_that_was_asked_for_and_its_clients_have_theirs() {
    for (how, knows) in HOW {
        let name = format!("name-{how}");
        let (front, _server) = plain(how, || Front::new(&name, "line", knows, ""));
        let port = front.port();
        let udp = front.udp();
        let text = String::from_utf8(front.ask(&udp, b"?")).unwrap();
        let (own, client) = text.trim_end().split_once(' ').unwrap();
        let bound = if how == "exec" { "127.0.0.1" } else { "0.0.0.0" };
        assert_eq!(own, format!("{bound}:{port}"), "{how}");
        let is_clients = |text: &str, address: SocketAddr| text == address.to_string();
        assert_eq!(is_clients(client, udp.local_addr().unwrap()), knows, "{how} {client}");
        let (text, address) = front.call(b"?\n", b"\n");
        let text = String::from_utf8(text).unwrap();
        let (own, client) = text.trim_end().split_once(' ').unwrap();
        assert_eq!(own, format!("127.0.0.1:{port}"), "a connection's end, {how}");
        assert_eq!(is_clients(client, address), knows, "{how} {client}");
    }
}

#[test]
fn a_connection_goes_on_in_the_program_that_a_server_executes() {
    for knows in [false, true] {
        let (front, _server) = plain("later", || Front::new("later", "line", knows, ""));
        // The proxy may find nothing at `upstream` at first.
        assert_eq!(front.call(b"a\n", b"\n").0, b"a\n");
        let mut stream = TcpStream::connect(front.at).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut ask = |line: &str| {
            stream.write_all(line.as_bytes()).unwrap();
            let mut answer = Vec::new();
            let mut byte = [0];
            while !answer.ends_with(b"\n") {
                stream.read_exact(&mut byte).unwrap();
                answer.push(byte[0]);
            }
            String::from_utf8(answer).unwrap()
        };
        assert_eq!(ask("before\n"), "before\n");
        assert_eq!(ask("!\n"), "again\n", "the connection is another program's");
        assert_eq!(ask("after\n"), "after\n");
        let own = format!("127.0.0.1:{} ", front.port());
        let text = ask("?\n");
        assert!(text.starts_with(&own), "{text} {own}");
        assert_eq!(front.ask(&front.udp(), b"datagram"), b"datagram");
        let (text, address) = front.call(b"?\n", b"\n");
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with(&own), "{text}");
        assert_eq!(text.trim_end().ends_with(&address.to_string()), knows, "{text}");
    }
}

#[test]
fn a_server_sees_the_address_to_which_a_datagram_was_sent_and_answers_from_it() {
    let new = || Front::at("pktinfo", "0.0.0.0", "line", true, "");
    let (front, _server) = plain("pktinfo", new);
    for host in ["127.0.0.1", "127.0.0.5", "127.9.8.7"] {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        // A connected socket gets nothing from another address.
        socket.connect((host, front.at.port())).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        assert_eq!(front.ask(&socket, b"?"), format!("{host}\n").as_bytes());
        assert_eq!(front.ask(&socket, b"hello"), b"hello");
    }
}

/// Headers of IPv4 and IPv6 have other lengths; whatever a program's buffers are, it gets the bytes behind them, and learns if
/// there were more.
#[test]
fn a_datagram_is_received_in_parts_of_any_length_behind_any_header() {
    for host in ["127.0.0.1", "[::1]"] {
        let (front, _server) = plain("parts", || Front::at("parts", host, "raw", true, ""));
        for len in (1..130).chain([1000]) {
            // Of a socket for each, so that a late answer to a repeated request is not read.
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let expected = match len {
                0..=100 => bytes.clone(),
                _ => [format!("{len} ").as_bytes(), &bytes[..100]].concat(),
            };
            assert!(front.ask(&front.udp(), &bytes) == expected, "{len} bytes from {host}");
        }
    }
}

#[test]
fn what_does_not_come_from_the_proxy_is_not_served() {
    let (front, _server) = plain("plain", || Front::new("strangers", "line", true, ""));
    assert_eq!(front.ask(&front.udp(), b"known"), b"known");
    let text = std::fs::read_to_string(&front.engine.file).unwrap();
    let upstream = text.split("upstream = \"").nth(1).unwrap().split('"').next().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let header = wire::proxy_protocol::proxy_header(
        wire::nic::Transport::Udp,
        "10.9.8.7:6".parse().unwrap(),
        front.at,
    );
    for end in [0, 1, 12, header.len() - 1] {
        socket.send_to(&header[..end], upstream).unwrap();
    }
    for (at, to) in [(0, 0), (12, 0x20), (13, 0x11), (13, 0x32), (15, 35)] {
        let mut spoiled = [&header[..], b"stranger"].concat();
        spoiled[at] = to;
        socket.send_to(&spoiled, upstream).unwrap();
    }
    let mut stranger = TcpStream::connect(upstream).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.write_all(&[b'x'; 100]).unwrap();
    let ended = stranger.read(&mut [0; 10]);
    assert!(matches!(ended, Ok(0)) || ended.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    // The others are served.
    assert_eq!(front.ask(&front.udp(), b"known"), b"known");
    assert_eq!(front.call(b"line\n", b"\n").0, b"line\n");
    socket.set_nonblocking(true).unwrap();
    assert_eq!(socket.recv(&mut [0; 10]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn programs_that_cannot_be_put_behind_a_proxy_are_refused_with_the_remedy() {
    let front = Front::new("refused", "line", false, "");
    let port = front.port();
    let refused = |service: &str, program: &Path, expected: &str| {
        let output = front.command(service, program, &[&port, "plain"]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(expected), "{text}");
    };
    let fix = "give it another port and name that in `upstream`";
    let of_static = built().join("plain_server.static");
    refused("front", &of_static, "is linked statically, so no library can put it behind");
    refused("front", &of_static, fix);
    let script = Path::new(env!("CARGO_TARGET_TMPDIR")).join("behind-script");
    std::fs::write(&script, format!("#!{}\n", of_static.display())).unwrap();
    let mut mode = script.metadata().unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    refused("front", &script, "has an interpreter that is linked statically");
    refused("front", Path::new("/nowhere/server"), "there is no program /nowhere/server");
    refused("other", &of_static, "has no service \"other\": its proxies are front");
}

#[test]
fn memcached_is_unmodified_behind_its_cache() {
    for knows in [false, true] {
        let cache = function(
            "hot",
            "memcached-cache",
            "params = { memory_mib = 1, grace_ms = 1, sample = 0 }",
        );
        let arguments = |port: &str| {
            ["-l", "127.0.0.1", "-p", port, "-U", port, "-u", "root"].map(str::to_owned).into()
        };
        let header = [0, 7, 0, 0, 0, 1, 0, 0];
        let probe = [&header[..], b"version\r\n"].concat();
        let new = || Front::new("memcached", "memcached", knows, &cache);
        let (front, _server) = Front::with(new, &probe, Path::new("memcached"), arguments);
        let (stored, _) = front.call(b"set key 0 0 5\r\nvalue\r\n", b"\r\n");
        assert_eq!(stored, b"STORED\r\n");
        let value = b"VALUE key 0 5\r\nvalue\r\nEND\r\n";
        eventually("the cache answers", || {
            assert_eq!(front.call(b"get key\r\n", b"END\r\n").0, value);
            front.register("hot", "hits") > 0
        });
        let answer = front.ask(&front.udp(), &[&header[..], b"get key\r\n"].concat());
        assert_eq!(answer, [&header[..], value].concat());
    }
}

fn example(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(path)
}

#[test]
fn a_small_server_in_c_gets_a_cache() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("behind-store");
    let mut compiler = Command::new("cc");
    compiler.args(["-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    let compiled = compiler.arg(example("11_behind/store.c")).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    for knows in [false, true] {
        let cache = function(
            "hot",
            "memcached-cache",
            "params = { memory_mib = 1, grace_ms = 1, sample = 0 }",
        );
        let front = Front::new("store", "memcached", knows, &cache);
        let _server = front.run(&program, &[&front.port()]);
        assert_eq!(front.call(b"set key 0 0 5\r\nvalue\r\n", b"\r\n").0, b"STORED\r\n");
        eventually("the cache answers", || {
            let value = b"VALUE key 0 5\r\nvalue\r\nEND\r\n";
            assert_eq!(front.call(b"get key\r\n", b"END\r\n").0, value);
            front.register("hot", "hits") > 0
        });
        assert_eq!(front.call(b"set key 0 0 3\r\nnew\r\n", b"\r\n").0, b"STORED\r\n");
        let value = b"VALUE key 0 3\r\nnew\r\nEND\r\n";
        assert_eq!(front.call(b"get key\r\n", b"END\r\n").0, value, "not the one before");
        assert_eq!(front.call(b"delete key\r\n", b"\r\n").0, b"DELETED\r\n");
        assert_eq!(front.call(b"get key\r\n", b"END\r\n").0, b"END\r\n");
    }
}

/// The whole of what puts the function in front of the example's server are the lines of its configuration: NICA's authors changed 20 lines of
/// their server in Node.js.
#[test]
fn the_coap_server_of_the_example_is_attached_with_less_than_20_lines() {
    let text = std::fs::read_to_string(example("09_coap_auth/attached.toml")).unwrap();
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with('#');
    assert_eq!(text.lines().filter(is_code).count(), 10);
    let keys = Path::new(env!("CARGO_TARGET_TMPDIR")).join("behind.keys");
    std::fs::write(&keys, format!("demo {}\n", coap::KEY)).unwrap();
    let params = format!("params = {{ keys = \"{}\", refuse = \"answer\" }}", keys.display());
    let server = example("09_coap_auth/server.js").to_str().unwrap().to_owned();
    let request = |index: u64, forged: bool| {
        let mut request = Vec::new();
        coap::write_request(index, forged, b"on", &mut request);
        request
    };
    let new = || Front::new("coap", "length:u32", true, &function("auth", "coap-auth", &params));
    let arguments = |port: &str| vec![server.clone(), port.to_owned()];
    let (front, _server) = Front::with(new, &request(1, false), Path::new("node"), arguments);
    let udp = front.udp();
    let answer = front.ask(&udp, &request(2, true));
    let refused = |answer: &[u8]| coap::answers(2, coap::UNAUTHORIZED, b"", answer);
    assert!(refused(&answer), "{answer:?}");
    let answer = front.ask(&front.udp(), &request(3, false));
    assert!(coap::answers(3, coap::CONTENT, b"done", &answer), "{answer:?}");
    assert!(front.register("auth", "passed") >= 2 && front.register("auth", "bad_signature") >= 1);
}

#[test]
fn dnsmasq_is_unmodified_behind_a_function() {
    for knows in [false, true] {
        let arguments = |port: &str| {
            let port = format!("--port={port}");
            let fixed = ["--no-daemon", "--conf-file=/dev/null", "--pid-file", "--no-hosts"];
            let local = ["--listen-address=127.0.0.1", "--bind-interfaces", "--no-resolv"];
            let host = ["--user=", "--group=", "--host-record=a.test,10.1.2.3", &port];
            [&fixed[..], &local, &host].concat().into_iter().map(str::to_owned).collect()
        };
        let installed = Path::new("/usr/sbin/dnsmasq");
        let dnsmasq = if installed.exists() { installed } else { Path::new("dnsmasq") };
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x04test\0\0\x01\0\x01";
        let limit = function("limit", "rate-limiter", "");
        let new = || Front::new("dnsmasq", "length:u16", knows, &limit);
        let (front, _server) = Front::with(new, query, dnsmasq, arguments);
        let answer = front.ask(&front.udp(), query);
        assert!(answer.starts_with(b"\x12\x34") && answer.ends_with(&[10, 1, 2, 3]), "{answer:?}");
        // Over TCP each message has its length before it.
        let framed = [&(query.len() as u16).to_be_bytes()[..], query].concat();
        let (answer, _) = front.call(&framed, &[10, 1, 2, 3]);
        assert_eq!(&answer[2..4], b"\x12\x34");
        assert!(front.register("limit", "passed") >= 2);
    }
}

#[test]
fn a_server_in_node_is_unmodified_behind_a_function_that_comes_and_goes() {
    for knows in [false, true] {
        let script = Path::new(env!("CARGO_TARGET_TMPDIR")).join("behind-echo.js");
        let text = "\
            const port = Number(process.argv[2]);\n\
            const udp = require('dgram').createSocket('udp4');\n\
            udp.on('message', (m, from) => udp.send(m + ' ' + udp.address().port + ' ' + from.port, from.port, from.address));\n\
            udp.bind(port, '127.0.0.1');\n\
            require('net').createServer(c => c.on('data', d => c.write(d))).listen(port, '127.0.0.1');\n";
        std::fs::write(&script, text).unwrap();
        let arguments = |port: &str| vec![script.to_str().unwrap().to_owned(), port.to_owned()];
        let new = || Front::new("node", "line", knows, "");
        let (front, _server) = Front::with(new, b"hello", Path::new("node"), arguments);
        let udp = front.udp();
        let own = udp.local_addr().unwrap().port();
        let text = String::from_utf8(front.ask(&udp, b"hello")).unwrap();
        let expected = format!("hello {} ", front.port());
        assert!(text.starts_with(&expected), "{text}");
        assert_eq!(text == format!("{expected}{own}"), knows, "{text}");
        assert_eq!(front.call(b"line\n", b"\n").0, b"line\n");
        let client = FunctionClient::connect(&front.engine.socket).unwrap();
        let mut spec = Spec::new("echo", "echo");
        spec.deadline_us = onpath::spec::DEADLINE_US_MAX;
        client.attach_new("front", &spec, &Place::Default).unwrap();
        assert_eq!(front.ask(&front.udp(), b"hello"), b"hello", "the function answers");
        client.detach(&Target::Named { service: "front".into(), name: "echo".into() }).unwrap();
        assert!(front.ask(&front.udp(), b"hello").starts_with(expected.as_bytes()));
    }
}
