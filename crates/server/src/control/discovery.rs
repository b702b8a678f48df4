//! The default paths of control sockets, and the discovery of running servers.
//!
//! A server has `PID.sock` in `$XDG_RUNTIME_DIR/serval`, or in `/run/serval` if that variable is not set, so that
//! several servers of one user can run at once. The next server removes the sockets of killed ones.
//!
//! `serval top` and `serval reload` look in the first of these folders, and if no server answers there in the other
//! one, because a service of systemd does not have the variable. They ask the servers of their own user, and as root
//! those of all users: every server accepts root.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use sys::local::LocalSocket;
use sys::readiness::wait_readable;
use sys::{CopyError, PrivateFile};

use super::ControlError;
use super::protocol::{ANSWER_BYTES_MAX, Request, read_answer};

/// How long a server may take to answer a request that can be answered at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two tries to connect to a socket whose backlog is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of sockets of one folder that are tried.
const SOCKETS_MAX: usize = 256;
/// Maximum size of a page of metrics that is read.
const PAGE_BYTES_MAX: u64 = 64 << 20;

/// The folder for sockets of this user.
fn folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    own.filter(|path| path.is_absolute()).unwrap_or_else(|| "/run".into()).join("serval")
}

/// The path of this process's socket, unless configured. Creates the folder and removes dead servers' sockets from
/// it.
pub(super) fn own_path() -> Result<PathBuf, String> {
    let folder = folder();
    let cannot =
        |error: std::io::Error| format!("the folder {folder:?} cannot be created: {error}");
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(cannot(error)),
        _ => {}
    }
    let found = fs::symlink_metadata(&folder).map_err(cannot)?;
    let of_others = found.uid() != sys::process::user() && found.uid() != 0;
    if !found.is_dir() || of_others || found.mode() & 0o022 != 0 {
        return Err(format!("{folder:?} is not a folder, or others can write to it"));
    }
    for (process, path) in sockets(&folder) {
        let dead = !Path::new(&format!("/proc/{process}")).exists();
        let refuses = || {
            let connected = LocalSocket::connect(&path);
            connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        };
        if dead && refuses() {
            // A file that cannot be removed does no harm.
            let _ = fs::remove_file(&path);
        }
    }
    Ok(folder.join(format!("{}.sock", std::process::id())))
}

/// The sockets of a folder, and the processes in their names.
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
pub struct FoundServer {
    pub path: PathBuf,
    status: Json,
}

impl FoundServer {
    /// One line of a list to choose from.
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

/// The folders that may contain servers' sockets, in the order of the search.
fn folders() -> Vec<PathBuf> {
    let mut folders = vec![folder(), PathBuf::from("/run/serval")];
    folders.dedup();
    folders
}

/// Whether `user` may use the file at `path` as the socket of a server. A user trusts its own sockets only, since
/// others may be able to create one in the folder. Root trusts all sockets of a folder that only its owner can write
/// to.
fn is_trusted(path: &Path, only_owner_writes: bool, user: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| {
        let is_root = user == 0 && only_owner_writes;
        found.file_type().is_socket() && (found.uid() == user || is_root)
    })
}

/// The servers in a folder that answer: this user's, or as root those of all users.
fn running(folder: &Path) -> Vec<FoundServer> {
    let only_owner_writes = fs::metadata(folder).is_ok_and(|found| found.mode() & 0o022 == 0);
    let user = sys::process::user();
    let paths = sockets(folder).into_iter().map(|(_, path)| path);
    let found = |path: PathBuf| {
        let status = ask(&path, Request::Status).ok()?;
        Some(FoundServer { path, status })
    };
    paths.filter(|path| is_trusted(path, only_owner_writes, user)).filter_map(found).collect()
}

/// The one server that answers; if `file` is given, among those that were started with it.
pub fn find_one(file: Option<&Path>) -> Result<PathBuf, ControlError> {
    let file = file.map(|file| file.canonicalize().unwrap_or_else(|_| file.to_owned()));
    let started_with = |server: &FoundServer| {
        let of_server = server.status["file"].as_str().map(Path::new);
        file.is_none() || of_server == file.as_deref()
    };
    let servers = |folder: &PathBuf| -> Vec<FoundServer> {
        running(folder).into_iter().filter(started_with).collect()
    };
    let folders = folders();
    let found = folders.iter().map(servers).find(|found| !found.is_empty()).unwrap_or_default();
    match found.as_slice() {
        [one] => Ok(one.path.clone()),
        [] => {
            let folders: Vec<String> = folders.iter().map(|path| format!("{path:?}")).collect();
            Err(ControlError::Failed(format!(
                "no server answers in {}: start one with `serval serve FILE`, or name the control socket of one",
                folders.join(" or ")
            )))
        }
        several => {
            let lines: Vec<String> = several.iter().map(FoundServer::line).collect();
            Err(ControlError::Ambiguous(format!(
                "several servers run here; name the control socket of one:\n{}",
                lines.join("\n")
            )))
        }
    }
}

/// Connects to a server; waits until `deadline` if its backlog is full.
pub fn connect(path: &Path, deadline: Instant) -> std::io::Result<LocalSocket> {
    loop {
        match LocalSocket::connect(path) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            other => return other,
        }
    }
}

/// One request and its immediate answer.
pub fn ask(path: &Path, request: Request) -> Result<Json, ControlError> {
    ask_for_file(path, request).map(|(answer, _)| answer)
}

/// The page of metrics.
pub fn metrics(path: &Path) -> Result<String, ControlError> {
    let (answer, file) = ask_for_file(path, Request::Metrics)?;
    let shown = path.display();
    if let Some(why) = answer["error"].as_str() {
        return Err(ControlError::Failed(format!("the server at {shown} reports: {why}")));
    }
    let page = file.ok_or(CopyError::NotSealed);
    let page = page.and_then(|file| PrivateFile::received(file, PAGE_BYTES_MAX));
    let page =
        page.map_err(|error| ControlError::Failed(format!("the metrics of {shown}: {error}")))?;
    Ok(String::from_utf8_lossy(page.bytes()).into_owned())
}

fn ask_for_file(
    path: &Path,
    request: Request,
) -> Result<(Json, Option<std::os::fd::OwnedFd>), ControlError> {
    let shown = path.display();
    let failed = |error| ControlError::Failed(format!("no server answers at {shown}: {error}"));
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let socket = connect(path, deadline).map_err(failed)?;
    socket.send(request.line().as_bytes(), &[]).map_err(failed)?;
    let mut bytes = vec![0; ANSWER_BYTES_MAX];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = ANSWER_TIMEOUT.as_secs();
            let why = format!("the server at {shown} does not answer within {seconds} s");
            return Err(ControlError::Failed(why));
        }
        wait_readable(&[std::os::fd::AsFd::as_fd(&socket)], Some(left));
        match socket.receive_descriptors(&mut bytes).map_err(failed)? {
            None => {}
            Some((0, _)) => {
                return Err(ControlError::Failed(format!("the server at {shown} ended")));
            }
            Some((len, files)) => {
                let answer = read_answer(&bytes[..len]).map_err(ControlError::Failed)?;
                return Ok((answer, files.into_iter().next()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_trusts_its_own_sockets_and_root_those_of_private_folders() {
        let folder = std::env::temp_dir().join(format!("serval-trust-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (socket, file, link) =
            (folder.join("1.sock"), folder.join("2.sock"), folder.join("3.sock"));
        let _listener = sys::local::LocalListener::bind(&socket).unwrap();
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let user = sys::process::user();
        let other = user + 1;
        for only_owner_writes in [true, false] {
            assert!(is_trusted(&socket, only_owner_writes, user));
            assert!(!is_trusted(&socket, only_owner_writes, other));
            assert_eq!(is_trusted(&socket, only_owner_writes, 0), only_owner_writes || user == 0);
            assert!(!is_trusted(&file, only_owner_writes, user));
            assert!(!is_trusted(&link, only_owner_writes, user));
        }
        fs::remove_dir_all(&folder).unwrap();
        assert!(folders().contains(&PathBuf::from("/run/serval")));
    }
}
