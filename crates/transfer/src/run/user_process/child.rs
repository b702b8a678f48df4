//! The process of a user: it makes the system calls of transfers, and nothing else.
//!
//! Each lane has a thread, so that a file that hangs delays no other call. The process ends with the engine's end of its connection.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use sys::descriptors::{DescriptorKind, describe, is_of_kernel, sync};
use sys::local::LocalSocket;
use sys::readiness::wait_readable;
use sys::slot::Slot;

use super::wire::{Call, Control, MESSAGE_BYTES, Operation, Reply, SLOT_BYTES};
use crate::run::reaper::Reaper;

/// The descriptors of a transfer.
struct Files {
    sources: Vec<OwnedFd>,
    sink: OwnedFd,
}

#[derive(Clone, Default)]
struct Open {
    files: Arc<Mutex<HashMap<u64, Arc<Files>>>>,
    reaper: Reaper,
}

/// Makes calls until the engine ends. Standard input is the connection to it.
pub(super) fn run() -> io::Result<()> {
    sys::isolation::become_started()?;
    sys::signal::ignore_file_size_signal();
    // As many as the host allows: without them only fewer calls at a time work.
    let _ = sys::process::raise_descriptor_limit();
    let control = LocalSocket::inherited(io::stdin().as_fd().try_clone_to_owned()?)?;
    let open = Open::default();
    loop {
        wait_readable(&[control.as_fd()], None);
        let mut bytes = [0; MESSAGE_BYTES + 1];
        let (len, descriptors) = match control.receive_descriptors(&mut bytes) {
            Ok(None) => continue,
            Ok(Some((0, _))) | Err(_) => return Ok(()),
            Ok(Some(received)) => received,
        };
        match Control::decode(&bytes[..len]) {
            Some(Control::Lane) => add_lane(&open, descriptors)?,
            Some(Control::Close(transfer)) => {
                let closed = open.files().remove(&transfer);
                open.reaper.discard(closed);
            }
            None => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn add_lane(open: &Open, descriptors: Vec<OwnedFd>) -> io::Result<()> {
    let Ok([socket, memory]) = <[OwnedFd; 2]>::try_from(descriptors) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let socket = LocalSocket::inherited(socket)?;
    let slot = Slot::open(memory, SLOT_BYTES).map_err(io::Error::other)?;
    let open = open.clone();
    let builder = std::thread::Builder::new().name("serval-calls".into());
    // Without a thread the engine finds that the lane is closed.
    builder.spawn(move || serve(&open, &socket, &slot)).map(drop)
}

/// Makes the calls of a lane until it is closed.
fn serve(open: &Open, socket: &LocalSocket, slot: &Slot) {
    loop {
        wait_readable(&[socket.as_fd()], None);
        let mut bytes = [0; MESSAGE_BYTES + 1];
        let (len, descriptors) = match socket.receive_descriptors(&mut bytes) {
            Ok(None) => continue,
            Ok(Some((0, _))) | Err(_) => return,
            Ok(Some(received)) => received,
        };
        let Some(call) = Call::decode(&bytes[..len]) else { return };
        let reply = open.make(&call, descriptors, slot);
        if socket.send(&reply.encode(), &[]).is_err() {
            return;
        }
    }
}

impl Open {
    fn files(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Files>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, call: &Call, mut descriptors: Vec<OwnedFd>, slot: &Slot) -> Reply {
        if let Some(sink) = descriptors.pop() {
            let files = Arc::new(Files { sources: descriptors, sink });
            let refused = files.refusal();
            self.files().insert(call.transfer, files);
            if let Some(refused) = refused {
                return refused;
            }
        }
        let files = self.files().get(&call.transfer).cloned();
        // EBADF: its descriptors did not arrive, because this process has too many.
        let Some(files) = files else { return Reply::Failed(9) };
        let result = files.make(call, slot);
        result.map_or_else(|error| Reply::Failed(error.raw_os_error().unwrap_or(5)), Reply::Done)
    }
}

impl Files {
    /// Why no call is made on them. Asks the file systems, whose servers may not answer.
    fn refusal(&self) -> Option<Reply> {
        let is_file = |file: BorrowedFd<'_>| {
            describe(file).is_ok_and(|found| matches!(found.kind, DescriptorKind::File { .. }))
        };
        let sources = self.sources.iter().map(|file| (file.as_fd(), false));
        let mut files = sources.chain([(self.sink.as_fd(), true)]);
        files.find_map(|(file, is_sink)| match is_file(file).then(|| is_of_kernel(file))? {
            Ok(false) => None,
            Ok(true) => Some(Reply::OfKernel { is_sink }),
            Err(error) => Some(Reply::Failed(error.raw_os_error().unwrap_or(5))),
        })
    }

    fn make(&self, call: &Call, slot: &Slot) -> io::Result<usize> {
        let source = |file: usize| {
            let file = self.sources.get(file).ok_or(io::Error::from_raw_os_error(9))?;
            Ok::<_, io::Error>(file.as_fd())
        };
        let sink = self.sink.as_fd();
        match call.operation {
            Operation::Read { file, offset } => slot.read_at(source(file)?, call.bytes, offset),
            Operation::Write { offset } => slot.write_at(sink, call.bytes, offset),
            Operation::Sync => sync(sink).map(|()| 0),
            Operation::Send => slot.send_now(sink, call.bytes),
            Operation::Receive => slot.receive_now(source(0)?, call.bytes),
        }
    }
}
