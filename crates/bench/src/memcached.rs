//! A private memcached on a free loopback port, which ends when dropped.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sys::process::find_program;

/// Why there is no memcached.
#[derive(Debug, thiserror::Error)]
pub enum MemcachedError {
    /// The program is missing, or does not start; the text says how to get it.
    #[error("{0}")]
    Missing(String),
    /// It does not store values.
    #[error("{0}")]
    Wrong(String),
    /// A call to the host kernel failed.
    #[error("cannot {what}: {error}")]
    Io {
        /// The attempted call.
        what: String,
        /// The host kernel's error.
        error: io::Error,
    },
}

/// Time limit of the start.
const START: Duration = Duration::from_secs(10);
/// Another program may take the port between finding it free and using it.
const TRIES: usize = 3;

pub struct Memcached {
    child: Child,
    address: SocketAddr,
}

impl Memcached {
    pub fn start() -> Result<Self, MemcachedError> {
        let program = find_program("memcached").ok_or_else(|| {
            MemcachedError::Missing(
                "this demo needs memcached, which is not on PATH: install it (apt install memcached)"
                    .to_owned(),
            )
        })?;
        let mut last = None;
        for _ in 0..TRIES {
            match Self::start_on(&program, free_port()?) {
                Ok(started) => return Ok(started),
                Err(error) => last = Some(error),
            }
        }
        Err(last.expect("it was tried"))
    }

    fn start_on(program: &std::path::Path, address: SocketAddr) -> Result<Self, MemcachedError> {
        let mut command = Command::new(program);
        command.args(["-l", "127.0.0.1", "-m", "64", "-t", "1"]);
        let port = address.port().to_string();
        command.args(["-p", &port, "-U", &port]);
        if sys::process::user() == 0 {
            // It refuses to run as root.
            command.args(["-u", "nobody"]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| io_error("start memcached", error))?;
        let mut started = Self { child, address };
        let deadline = Instant::now() + START;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = started.child.try_wait() {
                let what = format!("memcached ended at once ({status}); try running it by hand");
                return Err(MemcachedError::Missing(what));
            }
            if started.is_up() {
                return Ok(started);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(MemcachedError::Missing("memcached did not answer within 10 s".to_owned()))
    }

    /// Whether this process answers, not another one that took the port in between.
    fn is_up(&self) -> bool {
        let asks = || -> io::Result<bool> {
            let mut stream = TcpStream::connect(self.address)?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            stream.write_all(b"stats\r\n")?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)?;
            Ok(line.trim_end() == format!("STAT pid {}", self.child.id()))
        };
        asks().unwrap_or(false)
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stores values under keys; neither contains bytes with a meaning in the protocol.
    pub fn store<'a>(
        &self,
        entries: impl Iterator<Item = (String, &'a [u8])>,
    ) -> Result<usize, MemcachedError> {
        let failed = |error| io_error("fill memcached", error);
        let stream = TcpStream::connect(self.address).map_err(failed)?;
        stream.set_read_timeout(Some(START)).map_err(failed)?;
        let mut answers = BufReader::new(stream.try_clone().map_err(failed)?);
        let mut stream = stream;
        let mut stored = 0;
        for (key, value) in entries {
            let mut command = format!("set {key} 0 0 {}\r\n", value.len()).into_bytes();
            command.extend_from_slice(value);
            command.extend_from_slice(b"\r\n");
            stream.write_all(&command).map_err(failed)?;
            let mut line = String::new();
            answers.read_line(&mut line).map_err(failed)?;
            if line != "STORED\r\n" {
                return Err(MemcachedError::Wrong(format!("memcached answered {line:?} to a set")));
            }
            stored += 1;
        }
        Ok(stored)
    }
}

impl Drop for Memcached {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> Result<SocketAddr, MemcachedError> {
    let found = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    found.map_err(|error| io_error("find a free port", error))
}

fn io_error(what: &str, error: io::Error) -> MemcachedError {
    MemcachedError::Io { what: what.to_owned(), error }
}
