//! Where control sockets are that no configuration names, and which servers are there.
//!
//! A server has `PID.sock` in `$XDG_RUNTIME_DIR/serval`, or in `/run/serval` where that variable is not set, so that
//! several servers of one user run at once. What a killed server left is removed by the next one.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use sys::local::{LocalSocket, wait_readable};
use sys::{CopyError, PrivateFile};

use super::protocol::{ANSWER_BYTES_MAX, Request, read_answer};
use crate::command::Failure;

/// How long a server may take to answer what it can answer at once.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two tries to connect to a socket whose backlog is full.
const AGAIN: Duration = Duration::from_millis(20);
/// Most sockets of one folder that are looked at.
const SOCKETS_MAX: usize = 256;
/// Longest page of metrics that is read.
const PAGE_BYTES_MAX: u64 = 64 << 20;

/// The folder for sockets of this user.
fn folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    own.filter(|path| path.is_absolute()).unwrap_or_else(|| "/run".into()).join("serval")
}

/// Where this process listens if no configuration says so. Makes the folder and clears it of dead servers' sockets.
pub(super) fn own_path() -> Result<PathBuf, String> {
    let folder = folder();
    let cannot = |error: std::io::Error| format!("the folder {folder:?} cannot be made: {error}");
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(cannot(error)),
        _ => {}
    }
    let found = fs::symlink_metadata(&folder).map_err(cannot)?;
    let of_others = found.uid() != sys::process::user() && found.uid() != 0;
    if !found.is_dir() || of_others || found.mode() & 0o022 != 0 {
        return Err(format!("others may write to {folder:?}, or it is no folder"));
    }
    for (process, path) in sockets(&folder) {
        let dead = !Path::new(&format!("/proc/{process}")).exists();
        let refuses = || {
            let connected = LocalSocket::connect(&path);
            connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        };
        if dead && refuses() {
            // If it cannot be removed, it stays in nobody's way.
            let _ = fs::remove_file(&path);
        }
    }
    Ok(folder.join(format!("{}.sock", std::process::id())))
}

/// The sockets of a folder, and the processes that they are called after.
fn sockets(folder: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let socket = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.ok()?.path();
        let process = path.file_name()?.to_str()?.strip_suffix(".sock")?.parse().ok()?;
        Some((process, path))
    };
    let mut found: Vec<_> = entries.filter_map(socket).take(SOCKETS_MAX).collect();
    found.sort();
    found
}

/// A server that answers.
pub(in crate::command) struct Found {
    pub(in crate::command) path: PathBuf,
    status: Json,
}

impl Found {
    /// For a list to choose from.
    fn line(&self) -> String {
        let names = self.status["services"].as_array().map_or(&[][..], Vec::as_slice);
        let names = names.iter().filter_map(|service| service["name"].as_str());
        let (process, file) = (&self.status["process"], self.status["file"].as_str());
        format!(
            "  {}  (process {process}, {}, services {})",
            self.path.display(),
            file.unwrap_or_default(),
            names.collect::<Vec<_>>().join(", ")
        )
    }
}

/// This user's servers that answer.
fn running() -> Vec<Found> {
    let own = |path: &PathBuf| {
        fs::symlink_metadata(path).is_ok_and(|found| found.uid() == sys::process::user())
    };
    let paths = sockets(&folder()).into_iter().map(|(_, path)| path).filter(own);
    let found = |path: PathBuf| {
        let status = ask(&path, Request::Status).ok()?;
        Some(Found { path, status })
    };
    paths.filter_map(found).collect()
}

/// The one server of this user that answers, of those that were started with `file` if one is given.
pub(in crate::command) fn find_one(file: Option<&Path>) -> Result<PathBuf, Failure> {
    let mut found = running();
    if let Some(file) = file {
        let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
        found.retain(|server| server.status["file"].as_str().map(Path::new) == Some(&file));
    }
    match found.as_slice() {
        [one] => Ok(one.path.clone()),
        [] => {
            let folder = folder();
            Err(Failure::Run(format!(
                "no server answers in {folder:?}: start one with `serval serve FILE`, or name the control socket of one"
            )))
        }
        several => {
            let lines: Vec<String> = several.iter().map(Found::line).collect();
            Err(Failure::Usage(format!(
                "several servers run here; name the control socket of one:\n{}",
                lines.join("\n")
            )))
        }
    }
}

/// Connects to a server; a backlog that is full is waited for until `deadline`.
pub(in crate::command) fn connect(path: &Path, deadline: Instant) -> std::io::Result<LocalSocket> {
    loop {
        match LocalSocket::connect(path) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(AGAIN);
            }
            other => return other,
        }
    }
}

/// One request that is answered at once, and its answer.
pub(in crate::command) fn ask(path: &Path, request: Request) -> Result<Json, Failure> {
    ask_for_file(path, request).map(|(answer, _)| answer)
}

/// The page of metrics.
pub(in crate::command) fn metrics(path: &Path) -> Result<String, Failure> {
    let (answer, file) = ask_for_file(path, Request::Metrics)?;
    let shown = path.display();
    if let Some(why) = answer["error"].as_str() {
        return Err(Failure::Run(format!("the server at {shown} says: {why}")));
    }
    let page = file.ok_or(CopyError::NotSealed);
    let page = page.and_then(|file| PrivateFile::received(file, PAGE_BYTES_MAX));
    let page = page.map_err(|error| Failure::Run(format!("the metrics of {shown}: {error}")))?;
    Ok(String::from_utf8_lossy(page.bytes()).into_owned())
}

fn ask_for_file(
    path: &Path,
    request: Request,
) -> Result<(Json, Option<std::os::fd::OwnedFd>), Failure> {
    let shown = path.display();
    let failed = |error| Failure::Run(format!("no server answers at {shown}: {error}"));
    let deadline = Instant::now() + PATIENCE;
    let socket = connect(path, deadline).map_err(failed)?;
    socket.send(request.line().as_bytes(), &[]).map_err(failed)?;
    let mut bytes = vec![0; ANSWER_BYTES_MAX];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = PATIENCE.as_secs();
            let why = format!("the server at {shown} does not answer within {seconds} s");
            return Err(Failure::Run(why));
        }
        wait_readable(&[std::os::fd::AsFd::as_fd(&socket)], Some(left));
        match socket.receive_descriptors(&mut bytes).map_err(failed)? {
            None => {}
            Some((0, _)) => return Err(Failure::Run(format!("the server at {shown} ended"))),
            Some((len, files)) => {
                let answer = read_answer(&bytes[..len]).map_err(Failure::Run)?;
                return Ok((answer, files.into_iter().next()));
            }
        }
    }
}
