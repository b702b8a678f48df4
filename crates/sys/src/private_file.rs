//! Private copies of files: later changes to the file do not affect the copy.
//!
//! A mapped file changes with every write to it, and one that shrinks under a mapping turns the next access into
//! SIGBUS. A file that another process may rewrite at any time is therefore copied into a memfd whose content and
//! length are sealed. Checks made on the copy stay valid for its lifetime, also in a process that receives it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::{self, NonNull};

use libc::{c_int, c_void};

use crate::memory::{MemoryError, memfd};
use crate::os::check;

/// Neither content, length nor seals of the copy can change.
const SEALS: c_int =
    libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// Longest part of the file's name used in the copy's name, in characters.
const NAME_CHARS_MAX: usize = 40;
/// Bytes copied at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Why a file cannot be copied or a copy cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// It cannot be opened or read.
    #[error(transparent)]
    Read(io::Error),
    /// It is a directory, a FIFO, a device, a socket or a symbolic link.
    #[error("it is a {0}, not a file")]
    NotAFile(&'static str),
    /// It is longer than allowed.
    #[error("it has more than {0} bytes")]
    TooLong(u64),
    /// It has no content.
    #[error("it is empty")]
    Empty,
    /// It is being written to.
    #[error("it changed while it was read")]
    Changing,
    /// There is not enough memory for the copy.
    #[error("not enough memory for a copy of it: {0}")]
    Memory(io::Error),
    /// The descriptor received is not such a copy.
    #[error("the descriptor is not a sealed copy")]
    NotSealed,
}

/// Opens a regular file for reading. Never blocks, whatever kind of file the path names.
pub fn open_regular(path: &Path) -> Result<(File, Metadata), CopyError> {
    // Without `O_NONBLOCK`, opening a FIFO waits for a writer.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    // Opening a device may have side effects, so the type is checked first.
    regular(&std::fs::metadata(path).map_err(CopyError::Read)?)?;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = file.map_err(CopyError::Read)?;
    let found = file.metadata().map_err(CopyError::Read)?;
    regular(&found)?;
    Ok((file, found))
}

/// Opens a regular file for writing; `new`: one that does not exist yet, else one that may. Never blocks, and follows no symbolic link at the end
/// of the path.
pub fn open_sink(path: &Path, new: bool) -> Result<File, CopyError> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    if !new && let Ok(found) = std::fs::symlink_metadata(path) {
        regular(&found)?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).create_new(new).truncate(false).custom_flags(flags);
    let file = options.open(path).map_err(CopyError::Read)?;
    regular(&file.metadata().map_err(CopyError::Read)?)?;
    Ok(file)
}

fn no_memory(error: MemoryError) -> CopyError {
    CopyError::Memory(io::Error::new(io::ErrorKind::OutOfMemory, error.to_string()))
}

fn regular(found: &Metadata) -> Result<(), CopyError> {
    let kind = found.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "folder",
        () if kind.is_fifo() => "FIFO",
        () if kind.is_socket() => "socket",
        () if kind.is_symlink() => "symbolic link",
        () => "device",
    };
    Err(CopyError::NotAFile(what))
}

/// A sealed copy of a file, mapped for reading.
#[derive(Debug)]
pub struct PrivateFile {
    file: OwnedFd,
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping is read-only and its content is sealed, so any thread may read it.
unsafe impl Send for PrivateFile {}
// SAFETY: as above.
unsafe impl Sync for PrivateFile {}

impl PrivateFile {
    /// Copies the regular file at `path`, of at most `len_bytes_max`.
    pub fn copy(path: &Path, len_bytes_max: u64) -> Result<Self, CopyError> {
        let (file, before) = open_regular(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name: String = name.chars().take(NAME_CHARS_MAX).collect();
        let mut copy = File::from(memfd(&format!("serval:file:{name}"), 0).map_err(no_memory)?);
        let mut chunk = vec![0; CHUNK_BYTES];
        let (mut rest, mut len) = ((&file).take(len_bytes_max.saturating_add(1)), 0);
        loop {
            match rest.read(&mut chunk) {
                Ok(0) => break,
                Ok(read) => {
                    copy.write_all(&chunk[..read]).map_err(CopyError::Memory)?;
                    len += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(CopyError::Read(error)),
            }
        }
        if len > len_bytes_max {
            return Err(CopyError::TooLong(len_bytes_max));
        }
        let after = file.metadata().map_err(CopyError::Read)?;
        let state = |m: &Metadata| (m.len(), m.mtime(), m.mtime_nsec());
        if state(&before) != state(&after) || len != after.len() {
            return Err(CopyError::Changing);
        }
        Self::seal(copy)
    }

    /// A sealed file with this content, which can be passed to another process.
    pub fn of(name: &str, bytes: &[u8]) -> Result<Self, CopyError> {
        let mut file = File::from(memfd(&format!("serval:{name}"), 0).map_err(no_memory)?);
        file.write_all(bytes).map_err(CopyError::Memory)?;
        Self::seal(file)
    }

    fn seal(file: File) -> Result<Self, CopyError> {
        let file = OwnedFd::from(file);
        // SAFETY: no pointers.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })
            .map_err(CopyError::Memory)?;
        Self::received(file, u64::MAX)
    }

    /// A copy that another process made, of at most `len_bytes_max`.
    pub fn received(file: OwnedFd, len_bytes_max: u64) -> Result<Self, CopyError> {
        // SAFETY: no pointers.
        let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) });
        if !seals.is_ok_and(|seals| seals & SEALS == SEALS) {
            return Err(CopyError::NotSealed);
        }
        let file = File::from(file);
        let len = file.metadata().map_err(CopyError::Read)?.len();
        let file = OwnedFd::from(file);
        if len > len_bytes_max {
            return Err(CopyError::TooLong(len_bytes_max));
        }
        let len_bytes = usize::try_from(len).map_err(|_| CopyError::TooLong(len_bytes_max))?;
        if len_bytes == 0 {
            return Err(CopyError::Empty);
        }
        // Private, because a shared mapping of a sealed file is refused before Linux 6.7.
        // SAFETY: the host kernel chooses the address, so no existing mapping is touched.
        let start: *mut c_void = unsafe {
            let (access, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
            libc::mmap(ptr::null_mut(), len_bytes, access, flags, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(CopyError::Memory(io::Error::last_os_error()));
        }
        let start = NonNull::new(start.cast()).expect("a mapping is not at zero");
        Ok(Self { file, start, len_bytes })
    }

    /// The content.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has this length and lives as long as `self`; the seals keep content and length
        // constant in every process.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl AsFd for PrivateFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for PrivateFile {
    fn drop(&mut self) {
        // SAFETY: the whole range belongs to this value, which is being dropped.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> std::path::PathBuf {
        let folder =
            std::env::temp_dir().join(format!("serval-private-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_copy_never_changes() {
        let folder = folder("stays");
        let path = folder.join("file");
        std::fs::write(&path, b"what was read").unwrap();
        let copy = PrivateFile::copy(&path, 100).unwrap();
        std::fs::write(&path, b"").unwrap();
        assert_eq!(copy.bytes(), b"what was read");
        let mut again = File::from(copy.as_fd().try_clone_to_owned().unwrap());
        assert!(again.write_all(b"x").is_err(), "it is sealed");
        assert!(again.set_len(1).is_err() && again.set_len(1 << 20).is_err());
        let received = PrivateFile::received(again.into(), 100).unwrap();
        assert_eq!(received.bytes(), copy.bytes());
        let passed = copy.as_fd().try_clone_to_owned().unwrap();
        assert!(matches!(PrivateFile::received(passed, 3), Err(CopyError::TooLong(3))));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn anything_but_a_file_is_refused_without_blocking() {
        let folder = folder("refused");
        let path = folder.join("fifo");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a C string that outlives the call.
        check(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }).unwrap();
        let kind = |path: &Path| match PrivateFile::copy(path, 100) {
            Err(CopyError::NotAFile(kind)) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(&path), "FIFO");
        assert_eq!(kind(&folder), "folder");
        assert_eq!(kind("/dev/null".as_ref()), "device");
        let file = folder.join("file");
        std::fs::write(&file, b"").unwrap();
        assert!(matches!(PrivateFile::copy(&file, 100), Err(CopyError::Empty)));
        std::fs::write(&file, [0; 101]).unwrap();
        assert!(matches!(PrivateFile::copy(&file, 100), Err(CopyError::TooLong(100))));
        let missing = PrivateFile::copy(&folder.join("missing"), 100);
        assert!(matches!(missing, Err(CopyError::Read(_))));
        let open = File::open(&file).unwrap();
        assert!(matches!(PrivateFile::received(open.into(), 1000), Err(CopyError::NotSealed)));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
