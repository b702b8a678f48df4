//! The file of a sink. One that replaces a file is written beside it, as `NAME.part`, and gets its name when all bytes are there: a peer that
//! sends nothing, or not everything, destroys no file. One that is continued at an offset is written where it is.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sys::private_file::open_sink;

use crate::command::Failure;

/// See the module's text. Dropping it removes an empty `NAME.part`.
pub(super) struct Sink {
    path: PathBuf,
    file: File,
    part: Option<PathBuf>,
    /// The file that is replaced.
    replaced: Option<Metadata>,
}

impl Sink {
    /// Opens the file, whose end is cut off at `offset`. A symbolic link is replaced, or refused if there is an offset.
    pub(super) fn open(path: &Path, offset: u64) -> Result<Self, Failure> {
        let failed = |error: &dyn std::fmt::Display| {
            Failure::Run(format!("cannot write {}: {error}", path.display()))
        };
        let found = path.symlink_metadata().ok();
        let is_link = found.as_ref().is_some_and(Metadata::is_symlink);
        if offset > 0 {
            let file = open_sink(path, false).map_err(|error| failed(&error))?;
            file.set_len(offset).map_err(|error| failed(&error))?;
            return Ok(Self { path: path.to_owned(), file, part: None, replaced: None });
        }
        if found.is_some() && !is_link {
            // It has to be a file that this user may write.
            open_sink(path, false).map_err(|error| failed(&error))?;
        }
        let mut part = OsString::from(path);
        part.push(".part");
        let part = PathBuf::from(part);
        match std::fs::remove_file(&part) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&error)),
            _ => {}
        }
        let file = open_sink(&part, true).map_err(|error| failed(&error))?;
        let replaced = found.filter(|_| !is_link);
        Ok(Self { path: path.to_owned(), file, part: Some(part), replaced })
    }

    /// Another descriptor of the file.
    pub(super) fn file(&self) -> Result<File, Failure> {
        self.file.try_clone().map_err(Failure::run)
    }

    /// What is left of the bytes of a transfer that failed, if anything.
    pub(super) fn left(&self) -> Option<&Path> {
        self.part.as_deref().filter(|_| !self.is_empty())
    }

    /// All bytes are there. `synced`: the name, too, is to be on the disk.
    pub(super) fn finish(mut self, synced: bool) -> Result<(), Failure> {
        let Some(part) = &self.part else { return Ok(()) };
        let failed = |why: &dyn std::fmt::Display| {
            Err(Failure::Run(format!("cannot replace {}: {why}", self.path.display())))
        };
        let keeps = !mutants::on("replace_by_nothing");
        if keeps && self.is_empty() && self.replaced.as_ref().is_some_and(|found| found.len() > 0) {
            return failed(&"the peer sent nothing, so it stays as it was");
        }
        let written = self.file.metadata().and_then(|own| Ok((own, part.symlink_metadata()?)));
        match written {
            Ok((own, found)) if (own.dev(), own.ino()) == (found.dev(), found.ino()) => {}
            Ok(_) => return failed(&"another program has replaced the part"),
            Err(error) => return failed(&error),
        }
        let replaced = self.replaced.as_ref();
        let moved = replaced.map_or(Ok(()), |found| self.file.set_permissions(found.permissions()));
        if let Err(error) = moved.and_then(|()| std::fs::rename(part, &self.path)) {
            return failed(&error);
        }
        self.part = None;
        if synced {
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = File::open(folder.unwrap_or(Path::new(".")));
            folder.and_then(|folder| folder.sync_all()).map_err(Failure::run)?;
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.len() == 0)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some(part) = self.part.as_ref().filter(|_| self.is_empty()) {
            // Nothing is lost if it stays.
            let _ = std::fs::remove_file(part);
        }
    }
}
