//! The processes of a measurement: this program in other roles.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use sys::local::LocalListener;
use transfer::service::{Service, ServiceLimits};

/// Runs the role that the arguments name; false: they name none.
pub(crate) fn run(arguments: &[String]) -> bool {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["role-engine", socket, threads] => engine(Path::new(socket), threads.parse().unwrap()),
        ["role-receive"] => receive(),
        ["role-answer", bytes] => answer(bytes.parse().unwrap()),
        ["role-send", port, streams, bytes, rounds] => {
            let number = |text: &str| text.parse::<usize>().unwrap();
            send(port.parse().unwrap(), number(streams), number(bytes), number(rounds));
        }
        _ => return false,
    }
    true
}

fn engine(socket: &Path, threads: u32) {
    let listener = LocalListener::bind(socket).unwrap();
    let limits = ServiceLimits { threads, ..ServiceLimits::default() };
    let _service = Service::start(listener, limits).unwrap();
    println!("ready");
    // Until the parent closes the pipe.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Reads and forgets; closes when the peer has ended.
fn receive() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    while let Ok((mut socket, _)) = listener.accept() {
        std::thread::spawn(move || {
            let mut buffer = vec![0; 256 << 10];
            while socket.read(&mut buffer).is_ok_and(|read| read > 0) {}
        });
    }
}

/// Answers each `bytes` bytes with one byte.
fn answer(bytes: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    while let Ok((mut socket, _)) = listener.accept() {
        socket.set_nodelay(true).unwrap();
        std::thread::spawn(move || {
            let mut buffer = vec![0; bytes];
            while socket.read_exact(&mut buffer).is_ok() && socket.write_all(&[1]).is_ok() {}
        });
    }
}

/// What a stream carries.
pub(crate) fn content(number: usize, bytes: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(number as u64 + 1);
    let mut word = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 24).to_le_bytes()
    };
    let mut content = Vec::with_capacity(bytes + 5);
    while content.len() < bytes {
        content.extend_from_slice(&word()[..5]);
    }
    content.truncate(bytes);
    content
}

/// Connects each stream, says its number, waits for a byte, and sends.
fn send(port: u16, streams: usize, bytes: usize, rounds: usize) {
    let contents: Vec<_> = (0..streams).map(|number| Arc::new(content(number, bytes))).collect();
    for _ in 0..rounds {
        let senders = contents.iter().cloned().enumerate().map(|(number, content)| {
            let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
            socket.write_all(&[number as u8]).unwrap();
            std::thread::spawn(move || {
                socket.read_exact(&mut [0]).unwrap();
                content.chunks(256 << 10).for_each(|part| socket.write_all(part).unwrap());
                socket.shutdown(Shutdown::Write).unwrap();
                // Until the peer has closed.
                let _ = socket.read(&mut [0]);
            })
        });
        let senders: Vec<_> = senders.collect();
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    }
}

/// A child process on these cores (none: any), which ends with this one.
pub(crate) struct Role {
    child: Child,
    /// The first line that it printed.
    pub(crate) line: String,
    output: BufReader<std::process::ChildStdout>,
}

impl Role {
    pub(crate) fn own(arguments: &[&str], cores: &[usize]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(arguments);
        Self::start(command, cores, true)
    }

    /// `speaks`: it prints a line when it is ready.
    pub(crate) fn start(mut command: Command, cores: &[usize], speaks: bool) -> Self {
        sys::process::tie(&mut command, cores);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut role = Self { child, line: String::new(), output };
        if speaks {
            role.line = role.next_line();
        }
        role
    }

    pub(crate) fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// CPU seconds of all its threads, also of those that have ended.
    pub(crate) fn cpu(&self) -> f64 {
        sys::time::cpu_ns_of(self.child.id()).expect("it runs") as f64 / 1e9
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
