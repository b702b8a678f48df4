//! A memcached with pictures, and clients that ask a face verification service about them.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{PATIENCE, Peer, Random, ask, free_port, tcp_client};

const GET_MEMCACHED: &str = "install memcached (make setup-test does)";

/// A memcached of this test's own; ends with it.
pub(crate) struct Memcached {
    pub(crate) port: u16,
    pub(crate) process: Peer,
}

impl Memcached {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// With these options besides.
    pub(crate) fn start_with(options: &[&str]) -> Self {
        // The port was free a moment ago: if it was taken meanwhile, another one is tried.
        for _ in 0..10 {
            if let Some(memcached) = Self::start_on_with(free_port(), options) {
                return memcached;
            }
        }
        panic!("memcached does not start on any port");
    }

    pub(crate) fn start_on(port: u16) -> Option<Self> {
        Self::start_on_with(port, &[])
    }

    fn start_on_with(port: u16, options: &[&str]) -> Option<Self> {
        let mut command = Command::new("memcached");
        command.args([
            "-l",
            "127.0.0.1",
            "-p",
            &port.to_string(),
            "-U",
            &port.to_string(),
            "-u",
            "nobody",
        ]);
        command.args(["-m", "16", "-t", "1"]).args(options).stderr(Stdio::null());
        let mut memcached = Self { port, process: Peer::start(&mut command, GET_MEMCACHED) };
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if memcached.process.0.try_wait().unwrap().is_some() {
                return None;
            }
            match memcached.process_that_answers() {
                Ok(process) if process == memcached.process.0.id() => return Some(memcached),
                // Someone else's: this one will find its port taken.
                Ok(_) => return None,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
        None
    }

    /// A connection alone is not enough: another process that took the port would accept it too.
    fn process_that_answers(&self) -> io::Result<u32> {
        let mut stream = TcpStream::connect(self.address())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"stats\r\n")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        let process = line.strip_prefix("STAT pid ").and_then(|rest| rest.trim_end().parse().ok());
        process.ok_or_else(|| io::Error::other(format!("no memcached: {line:?}")))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Stores the picture of every label.
    pub(crate) fn fill(&self) {
        let mut stream = tcp_client(self.address());
        for n in 0..LABELS {
            let digits: String = label(n).iter().map(|byte| format!("{byte:02x}")).collect();
            let mut command = format!("set face:{digits} 0 0 1024\r\n").into_bytes();
            command.extend(picture(n));
            command.extend(b"\r\n");
            stream.write_all(&command).unwrap();
            let mut line = [0; 8];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"STORED\r\n");
        }
    }
}

pub(crate) const LABELS: usize = 20;
/// A label that was never stored.
pub(crate) const UNKNOWN_LABEL: usize = 1000;

pub(crate) fn label(n: usize) -> [u8; 12] {
    let mut label = [0xfa; 12];
    label[..8].copy_from_slice(&(n as u64 * 0x0101_0101_0101).to_le_bytes());
    label
}

/// Noise, other for every label: such pictures have next to no local patterns in common.
pub(crate) fn picture(n: usize) -> Vec<u8> {
    Random::new(n as u64 + 1).bytes(1024)
}

pub(crate) fn request(label_of: usize, picture_of: usize) -> Vec<u8> {
    [&label(label_of)[..], &picture(picture_of)].concat()
}

pub(crate) const NO_MATCH: u32 = 0;
pub(crate) const MATCH: u32 = 1;
pub(crate) const UNKNOWN: u32 = 2;
pub(crate) const UNAVAILABLE: u32 = 3;

pub(crate) fn verdict(reply: &[u8]) -> (u32, f32) {
    assert_eq!(reply.len(), 8);
    let word = |at: usize| <[u8; 4]>::try_from(&reply[at..at + 4]).unwrap();
    (u32::from_le_bytes(word(0)), f32::from_le_bytes(word(4)))
}

pub(crate) fn ask_faces(client: &UdpSocket, label_of: usize, picture_of: usize) -> u32 {
    verdict(&ask(client, &request(label_of, picture_of))).0
}

/// Asks until the database is reached again; any other verdict on the way is a wrong one.
pub(crate) fn ask_until_available(client: &UdpSocket, label_of: usize, picture_of: usize) -> u32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let verdict = ask_faces(client, label_of, picture_of);
        if verdict != UNAVAILABLE {
            return verdict;
        }
        assert!(Instant::now() < deadline, "the database stays unavailable");
    }
}
