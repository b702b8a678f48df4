//! A file that is whole, or absent.
//!
//! While bytes arrive the file has no name (`O_TMPFILE`), so it goes away when its process ends, however that ends. A file system
//! without such files gets a hidden file with a name of its own, which stays after `kill -9`; nothing half-written ever has the final
//! name. [`NewFile::commit`] gives that name when the transfer has succeeded.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use sys::descriptors::{give_name, nameless};

use crate::run::reaper::Reaper;

/// Attempts to find a name that nothing has.
const NAMES_MAX: usize = 16;
/// How long the end of a file that was given up is waited for.
const DISCARD_MAX: Duration = Duration::from_secs(1);

/// See the module's text. Dropping it without a commit removes the file.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    path: PathBuf,
    /// The name that it has until it gets its own.
    temporary: Option<PathBuf>,
}

/// What a commit does with a file that has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// The commit fails with `AlreadyExists`.
    Keep,
    /// It is replaced.
    Replace,
}

impl NewFile {
    /// An empty file that will have this path.
    pub fn create(path: &Path) -> io::Result<Self> {
        let path = path.to_owned();
        match nameless(folder(&path)) {
            Ok(file) => Ok(Self { file, path, temporary: None }),
            // What file systems without such files say.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Unsupported | io::ErrorKind::IsADirectory
                ) =>
            {
                let (file, temporary) = with_new_name(&path, |name| {
                    let mut options = OpenOptions::new();
                    options.read(true).write(true).create_new(true).open(name)
                })?;
                Ok(Self { file, path, temporary: Some(temporary) })
            }
            Err(error) => Err(error),
        }
    }

    /// A descriptor of it, for [`crate::command::pipeline::Pipeline::file`].
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Gives the file its name, after a transfer to it has succeeded. `synced`: returns when the name is on the disk as well; the bytes are if
    /// the command asked for that ([`crate::Command::sync`]).
    pub fn commit(mut self, existing: Existing, synced: bool) -> io::Result<()> {
        use std::os::fd::AsFd as _;
        match (existing, &self.temporary) {
            (Existing::Keep, None) => give_name(self.file.as_fd(), &self.path)?,
            // A link replaces nothing, a rename does.
            (Existing::Keep, Some(temporary)) => {
                fs::hard_link(temporary, &self.path)?;
            }
            (Existing::Replace, _) => {
                if self.temporary.is_none() {
                    let named =
                        with_new_name(&self.path, |name| give_name(self.file.as_fd(), name));
                    self.temporary = Some(named?.1);
                }
                let temporary = self.temporary.as_ref().expect("it has a name by now");
                fs::rename(temporary, &self.path)?;
                self.temporary = None;
            }
        }
        if synced { File::open(folder(&self.path))?.sync_all() } else { Ok(()) }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // Nothing half-written has the final name if it stays.
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Gives files their names on threads of its own: a file system that does not answer holds such a thread, and not its caller.
/// A clone shares the threads.
#[derive(Clone, Default)]
pub struct Namer(Reaper);

impl Namer {
    /// Commits a file; `done` gets the result on one of the threads. While 16 commits hang, further ones wait for them.
    pub fn commit(
        &self,
        file: NewFile,
        existing: Existing,
        synced: bool,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) {
        self.0.run(move || done(file.commit(existing, synced)));
    }

    /// Drops a file without a commit; `done` is called when it has gone, or a second later if its file system does not answer.
    pub fn discard(&self, file: NewFile, done: impl FnOnce() + Send + 'static) {
        if file.temporary.is_none() {
            // Its end is not seen.
            self.0.discard(file);
            return done();
        }
        let (gone, waits) = mpsc::channel::<()>();
        self.0.run(move || {
            drop(file);
            drop(gone);
        });
        self.0.run(move || {
            let _ = waits.recv_timeout(DISCARD_MAX);
            done();
        });
    }
}

impl std::fmt::Debug for Namer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Namer")
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Tries hidden names beside `path` until `make` finds one free.
fn with_new_name<T>(
    path: &Path,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(T, PathBuf)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    for _ in 0..NAMES_MAX {
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random).map_err(|_| io::ErrorKind::Other)?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{:016x}.part", u64::from_le_bytes(random)));
        let hidden = path.with_file_name(hidden);
        match make(&hidden) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((made?, hidden)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn folder_of_test() -> PathBuf {
        let path = std::env::temp_dir().join(format!("serval-new-file-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// As on a file system without files that have no name.
    fn with_temporary_name(path: &Path) -> NewFile {
        let made = with_new_name(path, |name| {
            OpenOptions::new().read(true).write(true).create_new(true).open(name)
        });
        let (file, name) = made.unwrap();
        NewFile { file, path: path.to_owned(), temporary: Some(name) }
    }

    #[test]
    fn a_file_is_whole_or_absent() {
        let folder = folder_of_test();
        let names = || fs::read_dir(&folder).unwrap().count();
        let path = folder.join("file");
        let write = |temporary: bool, text: &str| {
            let new = match temporary {
                true => with_temporary_name(&path),
                false => NewFile::create(&path).unwrap(),
            };
            new.file().unwrap().write_all(text.as_bytes()).unwrap();
            new
        };
        for temporary in [false, true] {
            drop(write(temporary, "lost"));
            assert_eq!(names(), 0);
            write(temporary, "first").commit(Existing::Keep, true).unwrap();
            assert_eq!((names(), fs::read(&path).unwrap()), (1, b"first".to_vec()));
            let kept = write(temporary, "second").commit(Existing::Keep, false).unwrap_err();
            assert_eq!(kept.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!((names(), fs::read(&path).unwrap()), (1, b"first".to_vec()));
            write(temporary, "third").commit(Existing::Replace, true).unwrap();
            assert_eq!((names(), fs::read(&path).unwrap()), (1, b"third".to_vec()));
            fs::remove_file(&path).unwrap();
        }
        assert!(NewFile::create(&folder.join("nowhere/file")).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_given_up_has_gone_when_that_is_told() {
        let folder = std::env::temp_dir().join(format!("serval-given-up-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (namer, path) = (Namer::default(), folder.join("file"));
        for new in [with_temporary_name, |path: &Path| NewFile::create(path).unwrap()] {
            // Not the first ones: a thread that has to start gives others time.
            for _ in 0..20 {
                let (told, hears) = mpsc::channel();
                let names = folder.clone();
                let count = move || told.send(fs::read_dir(names).unwrap().count()).unwrap();
                namer.discard(new(&path), count);
                assert_eq!(hears.recv().unwrap(), 0);
            }
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_commit_that_hangs_holds_no_other() {
        let folder = std::env::temp_dir().join(format!("serval-namer-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (namer, (release, hangs)) = (Namer::default(), mpsc::channel::<()>());
        let file = |name: &str| NewFile::create(&folder.join(name)).unwrap();
        namer.commit(file("first"), Existing::Keep, false, move |_| _ = hangs.recv());
        let (done, named) = mpsc::channel();
        for expected in [None, Some(io::ErrorKind::AlreadyExists)] {
            let done = done.clone();
            let answer =
                move |named: io::Result<()>| done.send(named.map_err(|e| e.kind())).unwrap();
            namer.commit(file("second"), Existing::Keep, true, answer);
            assert_eq!(named.recv().unwrap().err(), expected);
        }
        assert!(folder.join("second").exists());
        drop(release);
        fs::remove_dir_all(&folder).unwrap();
    }
}
