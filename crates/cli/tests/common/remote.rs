//! Remote accelerators in tests: the runtime on the other side, and a relay through which its link goes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::*;

/// A file with a secret, which only this user can access.
pub(crate) fn secret_file(name: &str, secret: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.secret"));
    let _ = fs::remove_file(&path);
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&path).unwrap();
    writeln!(file, "{secret}").unwrap();
    path
}

pub(crate) const SECRET: &str = "a secret of the tests, of at least 32 bytes";

/// `serval attach --listen`.
pub(crate) struct Far {
    pub(crate) process: Peer,
    pub(crate) address: SocketAddr,
}

impl Far {
    pub(crate) fn start(secret: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serval"));
        command.args(["attach", "--listen", "tcp://127.0.0.1:0", "--secret-file"]).arg(secret);
        command.args(more).stdout(Stdio::piped());
        let mut process = Peer::start(&mut command, "cargo builds it");
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening at tcp://");
        let address = address.unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
        Self { process, address }
    }
}

/// An accelerator of kind `remote`.
pub(crate) fn accelerator(name: &str, at: SocketAddr, secret: &Path, more: &str) -> String {
    format!(
        "[[accelerator]]\nname = \"{name}\"\nkind = \"remote\"\naddress = \"tcp://{at}\"\n\
         secret_file = \"{}\"\n{more}\n",
        secret.display()
    )
}

/// Forwards connections, and can do to them what networks do.
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    state: Arc<RelayState>,
}

struct RelayState {
    target: Mutex<SocketAddr>,
    /// The connections, both sides of each.
    open: Mutex<Vec<TcpStream>>,
    /// Nothing is forwarded.
    frozen: AtomicBool,
    /// When this number of further bytes has gone toward the accelerator the last is changed; 0: none.
    spoil_after: AtomicU64,
    /// When this number of further bytes has gone toward the accelerator the connection is cut; 0: never.
    cut_after: AtomicU64,
}

impl Relay {
    pub(crate) fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(RelayState {
            target: Mutex::new(target),
            open: Mutex::default(),
            frozen: AtomicBool::new(false),
            spoil_after: AtomicU64::new(0),
            cut_after: AtomicU64::new(0),
        });
        let shared = state.clone();
        // Ends with the process of the test.
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let target = *shared.target.lock().unwrap();
                let Ok(far) = TcpStream::connect(target) else { continue };
                for stream in [&near, &far] {
                    stream.set_nodelay(true).unwrap();
                    shared.open.lock().unwrap().push(stream.try_clone().unwrap());
                }
                let ends = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let (one, other) = (shared.clone(), shared.clone());
                thread::spawn(move || forward(ends.0, ends.1, &one, true));
                thread::spawn(move || forward(far, near, &other, false));
            }
        });
        Self { address, state }
    }

    /// New connections go there.
    pub(crate) fn turn_to(&self, target: SocketAddr) {
        *self.state.target.lock().unwrap() = target;
    }

    pub(crate) fn cut(&self) {
        for stream in self.state.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn freeze(&self, frozen: bool) {
        self.state.frozen.store(frozen, Ordering::Relaxed);
    }

    pub(crate) fn spoil_after(&self, bytes: u64) {
        self.state.spoil_after.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn cut_after(&self, bytes: u64) {
        self.state.cut_after.store(bytes, Ordering::Relaxed);
    }
}

/// Whether a count that is not 0 reaches 0 with these bytes; the position before which it does.
fn reached(count: &AtomicU64, len: usize) -> Option<usize> {
    let before = count.load(Ordering::Relaxed);
    if before == 0 {
        return None;
    }
    count.store(before.saturating_sub(len as u64), Ordering::Relaxed);
    (before <= len as u64).then(|| before as usize - 1)
}

fn forward(mut from: TcpStream, mut to: TcpStream, state: &RelayState, to_far: bool) {
    let mut bytes = vec![0; 65_536];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        while state.frozen.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        let mut end = len;
        if to_far {
            if let Some(at) = reached(&state.spoil_after, len) {
                bytes[at] ^= 1;
            }
            if let Some(at) = reached(&state.cut_after, len) {
                end = at;
            }
        }
        if to.write_all(&bytes[..end]).is_err() || end < len {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
