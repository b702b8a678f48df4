//! Requests about functions to a running server, from another process. `serval fn` uses it, and so can any Rust program.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onpath::Spec;
use onpath::spec::MODULE_BYTES_MAX;
use runtime::custom_ring::CustomRing;
use serde_json::Value as Json;
use sys::local::LocalSocket;
use sys::readiness::wait_readable;
use sys::{CopyError, PrivateFile};

use super::ControlError;
use super::discovery::connect;
use super::protocol::{
    ANSWER_BYTES_MAX, FunctionRequest, RegisterAction, Request, TenantRequest, read_answer,
};
use crate::{Attachment, Place, Registers, Replacement, Target};

/// How long an answer may take: a module is compiled, and a worker may be inside a kernel.
const PATIENCE: Duration = Duration::from_secs(90);

/// Longest state that is read.
const STATE_BYTES_MAX: u64 = 1 << 30;

/// How often to look whether a trace is complete.
const TRACE_INTERVAL: Duration = Duration::from_millis(50);

/// A connection to the control socket of a server. Functions that are created as bound end with it. Without such functions the server closes it
/// after some seconds without a request.
pub struct FunctionClient {
    socket: LocalSocket,
    path: PathBuf,
}

impl FunctionClient {
    /// Connects to the control socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let socket = connect(path, Instant::now() + PATIENCE).map_err(|error| {
            ControlError::Failed(format!("no server answers at {}: {error}", path.display()))
        })?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// All functions that this user may see, as the server describes them.
    pub fn list(&self) -> Result<Json, ControlError> {
        self.ask(FunctionRequest::List)
    }

    /// Creates a function, attached to nothing; with `bound` it ends with this connection. Returns its id.
    pub fn create(&self, spec: &Spec, bound: bool) -> Result<u64, ControlError> {
        let answer = self.ask(FunctionRequest::Create { spec: spec.clone(), bound })?;
        self.id(&answer)
    }

    /// Gives a function that was created, and is not attached, a ring for what it delivers: with `entries` places for each worker, a power of two.
    pub fn make_ring(
        &self,
        id: u64,
        entries: u32,
        message_bytes: u32,
    ) -> Result<CustomRing, ControlError> {
        let request = FunctionRequest::Ring { id, entries, message_bytes };
        let (_, files) = self.ask_for_files(request)?;
        CustomRing::open(files).map_err(ControlError::Failed)
    }

    /// Attaches a function that was created.
    pub fn attach(&self, id: u64, service: &str, place: &Place) -> Result<(), ControlError> {
        let (service, place) = (service.to_owned(), place.clone());
        self.ask(FunctionRequest::AttachCreated { id, service, place }).map(drop)
    }

    /// Attaches a function, or replaces the one with its name. It ends when it is detached.
    pub fn attach_new(
        &self,
        service: &str,
        spec: &Spec,
        place: &Place,
    ) -> Result<Attachment, ControlError> {
        let (service, spec, place) = (service.to_owned(), spec.clone(), place.clone());
        let answer = self.ask(FunctionRequest::Attach { service, spec, place })?;
        Ok(Attachment { id: self.id(&answer)?, replaced: answer["result"] == "replaced" })
    }

    /// Gives a function other code, other parameters or another policy. Returns what the operator should know.
    pub fn replace(
        &self,
        target: &Target,
        by: &Replacement,
    ) -> Result<Option<String>, ControlError> {
        self.ask(FunctionRequest::Replace(target.clone(), by.clone())).map(|answer| note(&answer))
    }

    /// Reads, resets or writes registers. Returns the values of all afterwards, merged over all workers.
    pub fn command(
        &self,
        target: &Target,
        action: &RegisterAction,
    ) -> Result<Registers, ControlError> {
        let answer = self.ask(FunctionRequest::Registers(target.clone(), action.clone()))?;
        let registers = answer["registers"].as_object().into_iter().flatten();
        let value = |(name, value): (&String, &Json)| value.as_u64().map(|v| (name.clone(), v));
        Ok(registers.filter_map(value).collect())
    }

    /// The state of a function, merged over all workers. One without a state is an error.
    pub fn state(&self, target: &Target) -> Result<Vec<u8>, ControlError> {
        let (_, files) = self.ask_for_files(FunctionRequest::State(target.clone()))?;
        let file = files.into_iter().next().ok_or(CopyError::NotSealed);
        let file = file.and_then(|file| PrivateFile::received(file, STATE_BYTES_MAX));
        let file = file.map_err(|error| {
            ControlError::Failed(format!("the state from {}: {error}", self.path.display()))
        })?;
        Ok(file.bytes().to_vec())
    }

    /// Traces the next `count` messages of a service, for at most `patience`. Returns what the server describes.
    pub fn trace(
        &self,
        service: &str,
        count: u32,
        patience: Duration,
    ) -> Result<Json, ControlError> {
        self.ask(FunctionRequest::Trace { service: service.to_owned(), count })?;
        let begin = Instant::now();
        loop {
            let (service, stop) = (service.to_owned(), begin.elapsed() >= patience);
            let answer = self.ask(FunctionRequest::Traced { service, stop })?;
            if answer["result"] == "traced" {
                return Ok(answer);
            }
            std::thread::sleep(TRACE_INTERVAL.min(patience));
        }
    }

    /// Detaches a function. Returns what the operator should know.
    pub fn detach(&self, target: &Target) -> Result<Option<String>, ControlError> {
        self.ask(FunctionRequest::Detach(target.clone())).map(|answer| note(&answer))
    }

    /// Destroys a function that was created and is not attached.
    pub fn destroy(&self, id: u64) -> Result<(), ControlError> {
        self.ask(FunctionRequest::Destroy(id)).map(drop)
    }

    /// Sends a request, with the content of its file, and waits for the answer.
    fn ask(&self, request: FunctionRequest) -> Result<Json, ControlError> {
        self.ask_for_files(request).map(|(answer, _)| answer)
    }

    fn ask_for_files(
        &self,
        request: FunctionRequest,
    ) -> Result<(Json, Vec<OwnedFd>), ControlError> {
        let content = request.file().map(|path| {
            PrivateFile::copy(path.as_ref(), MODULE_BYTES_MAX).map_err(|error| {
                ControlError::Failed(format!("the file {path} cannot be read: {error}"))
            })
        });
        let content = content.transpose()?;
        let files: Vec<_> = content.iter().map(|file| file.as_fd()).collect();
        self.exchange(&Request::Functions(request), &files)
    }

    /// Sends a request about tenants, and waits for the answer.
    pub fn tenants(&self, request: TenantRequest) -> Result<Json, ControlError> {
        self.exchange(&Request::Tenants(request), &[]).map(|(answer, _)| answer)
    }

    fn exchange(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
    ) -> Result<(Json, Vec<OwnedFd>), ControlError> {
        let shown = self.path.display();
        let failed = |error| ControlError::Failed(format!("no server answers at {shown}: {error}"));
        let line = request.line();
        self.socket.send(line.as_bytes(), files).map_err(failed)?;
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = vec![0; ANSWER_BYTES_MAX];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            wait_readable(&[self.socket.as_fd()], Some(left));
            let received = self.socket.receive_descriptors(&mut bytes).map_err(failed)?;
            let (len, files) = match received {
                None if left.is_zero() => {
                    let why = format!("the server at {shown} does not answer");
                    return Err(ControlError::Failed(why));
                }
                None => continue,
                Some((0, _)) => {
                    return Err(ControlError::Failed(format!("the server at {shown} ended")));
                }
                Some(received) => received,
            };
            let answer = read_answer(&bytes[..len]).map_err(ControlError::Failed)?;
            return match answer["error"].as_str() {
                Some(why) => Err(ControlError::Failed(why.to_owned())),
                None => Ok((answer, files)),
            };
        }
    }

    fn id(&self, answer: &Json) -> Result<u64, ControlError> {
        answer["id"].as_u64().ok_or_else(|| {
            let shown = self.path.display();
            ControlError::Failed(format!("the server at {shown} does not say the function's id"))
        })
    }
}

fn note(answer: &Json) -> Option<String> {
    answer["note"].as_str().map(str::to_owned)
}
