//! Transfers of Python programs: an engine in this process, or the connection to one in another.
//!
//! The thread that starts a transfer touches none of its bytes, and the interpreter's lock is not held while they move. Ends
//! arrive in [`Transfers::next`], which one thread of the Python package calls.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pyo3::exceptions::{PyException, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sys::descriptors::duplicate;
use sys::readiness::{Interest, Readiness};
use sys::readiness::{WakeFd, wait_readable};
use transfer::service::message::Answer;
use transfer::{
    AcceleratorMemory, Cipher, Client, ClientError, Command, DigestKind, Engine, Existing,
    ExpandLimits, Format, Key, Limits, Namer, NewFile, Outcome, Place, RemoteError, Report,
    SearchKind, SearchSpec, Small, StageSpec, TransferError as Error, TransferHandle,
};

use zeroize::Zeroizing;

use crate::gpu::{GpuArray, lent};
use crate::lock;

pyo3::create_exception!(
    serval._native,
    TransferRefused,
    PyException,
    "What a transfer is refused with: reason, error number, text."
);

/// See the module's text.
#[pyclass(frozen, module = "serval._native")]
pub(crate) struct Transfers {
    /// The process that made it. After a fork its threads and its connection belong to this process.
    process: u32,
    /// `None` after `close`.
    open: Mutex<Option<Arc<Open>>>,
}

struct Open {
    engine: Where,
    /// That move bytes in this process.
    lanes: Lanes,
    flights: Arc<Flights>,
    namer: Namer,
    /// Those that the engine does not get.
    small: Mutex<Small>,
    /// It is being closed: what calling threads do themselves ends.
    closes: AtomicBool,
    /// The connection to the engine has failed.
    lost: AtomicBool,
}

enum Where {
    /// In this process.
    Here(Engine),
    /// In another one. Ends come from there, and from this process, where files get their names: the set watches both.
    There(Mutex<Client>, Readiness),
}

/// How arrays of a GPU are lent.
struct Lanes {
    threads: usize,
    /// `None`: as it is good for the array.
    slot_bytes: Option<usize>,
}

/// Apart from the engine, whose threads have it as well.
struct Flights {
    state: Mutex<State>,
    /// Something has ended in this process, or `next` is to return.
    wake: WakeFd,
    /// The program's, which counts ends.
    counter: Mutex<Option<WakeFd>>,
}

#[derive(Default)]
struct State {
    last: u64,
    in_flight: HashMap<u64, Flight>,
    /// Transfers that are being passed to an engine in another process.
    starting: usize,
    /// The socket to which a calling thread sends a small transfer itself, by its identity.
    small: Option<(u64, u64)>,
    /// Ends that come from this process.
    ended: VecDeque<End>,
}

/// A transfer's number, its result, and what it did.
type End = (u64, Result<(), RemoteError>, Report);

/// A transfer in flight.
#[derive(Default)]
struct Flight {
    /// None while it is being submitted, and of an engine in another process.
    handle: Option<TransferHandle>,
    file: Option<Naming>,
    /// Its end comes from this process, also if the engine is in another one: its new file gets its name, or goes away.
    ends_here: bool,
}

/// A file that gets its name if its transfer succeeds.
struct Naming {
    file: NewFile,
    existing: Existing,
    sync: bool,
}

/// A source or a sink as Python describes it.
#[derive(FromPyObject)]
enum GivenPlace {
    /// An array in the memory of a GPU.
    Gpu(GpuArray),
    /// A descriptor, whether it is a socket, and the first byte.
    Descriptor((RawFd, bool, u64)),
    /// The path of a new file.
    Path(PathBuf),
}

/// The name of a stage and what it needs: an algorithm, a key, a pattern, and two numbers.
type GivenStage = (String, String, Vec<u8>, u64, u64);

/// A stage's name, bytes in, bytes out, whether it finished, its digest, and what it found.
type StageResult<'py> =
    (&'static str, u64, u64, bool, Option<Bound<'py, PyBytes>>, Option<(u64, Vec<u64>)>);
/// A transfer's number, its error (reason, error number, text), bytes read and written, and its stages.
type Ended<'py> = (u64, Option<(&'static str, i32, String)>, u64, u64, Vec<StageResult<'py>>);

#[pymethods]
impl Transfers {
    /// With the engine that listens at `path`, or with one of its own.
    #[new]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        threads: u32,
        in_flight: u32,
        memory_mib: u32,
        slot_kib: Option<u32>,
    ) -> PyResult<Self> {
        let engine = match path {
            None => Where::Here(Engine::start(Limits { in_flight, threads, memory_mib })?),
            Some(path) => {
                let client = py.detach(|| Client::connect(&path));
                Where::There(Mutex::new(client.map_err(failed)?), Readiness::new()?)
            }
        };
        let (state, counter) = (Mutex::default(), Mutex::default());
        let flights = Arc::new(Flights { state, wake: WakeFd::new()?, counter });
        let slot_bytes = slot_kib.map(|kib| (kib as usize) << 10);
        let lanes = Lanes { threads: threads as usize, slot_bytes };
        let (namer, small) = (Namer::default(), Mutex::default());
        let (closes, lost) = (AtomicBool::new(false), AtomicBool::new(false));
        let open = Open { engine, lanes, flights, namer, small, closes, lost };
        open.watch()?;
        Ok(Self { process: std::process::id(), open: Mutex::new(Some(Arc::new(open))) })
    }

    /// Starts a transfer and returns its number. The descriptors stay the caller's.
    #[allow(clippy::too_many_arguments)]
    fn start(
        &self,
        py: Python<'_>,
        source: GivenPlace,
        sink: GivenPlace,
        bytes: Option<u64>,
        stages: Vec<GivenStage>,
        stall: Option<f64>,
        deadline: Option<f64>,
        sync: bool,
        replace: bool,
        head: &[u8],
    ) -> PyResult<u64> {
        let open = self.open()?;
        let ((source, _), (sink, file)) =
            (source.open(py, &open.lanes)?, sink.open(py, &open.lanes)?);
        let command = command(source, sink, bytes, stages, stall, deadline)?;
        let mut command = command.after(head.to_vec());
        if sync {
            command = command.sync();
        }
        let existing = if replace { Existing::Replace } else { Existing::Keep };
        let file = file.map(|file| Naming { file, existing, sync });
        py.detach(|| open.start(command, file))
    }

    /// Does a small transfer from a file to a socket in this thread; `None`: it is another one, for `start`. A signal whose handler raises
    /// ends it, and so does `stop`.
    #[allow(clippy::too_many_arguments)]
    fn run_small<'py>(
        &self,
        py: Python<'py>,
        source: GivenPlace,
        sink: GivenPlace,
        bytes: Option<u64>,
        stages: Vec<GivenStage>,
        stall: Option<f64>,
        deadline: Option<f64>,
    ) -> PyResult<Option<Ended<'py>>> {
        let (GivenPlace::Descriptor((_, false, _)), GivenPlace::Descriptor((_, true, _))) =
            (&source, &sink)
        else {
            return Ok(None);
        };
        let open = self.open()?;
        let ((source, _), (sink, _)) = (source.open(py, &open.lanes)?, sink.open(py, &open.lanes)?);
        let command = command(source, sink, bytes, stages, stall, deadline)?;
        let raised = Mutex::new(None);
        let interrupted = || {
            let signals = Python::attach(|py| py.check_signals());
            signals.map_err(|error| *lock(&raised) = Some(error)).is_err()
                || open.closes.load(Ordering::Relaxed)
        };
        let ended = py.detach(|| open.run_small(&command, &interrupted));
        if let Some(error) = lock(&raised).take() {
            return Err(error);
        }
        Ok(ended.map(|(result, report)| shown(py, (0, result, report))))
    }

    /// The end of a transfer; `None` if none ends within `limit` seconds, or after `wake`.
    fn next<'py>(&self, py: Python<'py>, limit: f64) -> PyResult<Option<Ended<'py>>> {
        let open = self.open()?;
        let limit = seconds(limit)?;
        let ended = py.detach(|| open.next(limit)).map_err(PyRuntimeError::new_err)?;
        Ok(ended.map(|ended| shown(py, ended)))
    }

    /// Ends a transfer; its end arrives as every other.
    fn cancel(&self, py: Python<'_>, id: u64) -> PyResult<()> {
        let open = self.open()?;
        py.detach(|| open.cancel(id)).map_err(PyRuntimeError::new_err)
    }

    /// Bytes read and written so far; `None` of a transfer that has ended, or of an engine in another process.
    fn progress(&self, id: u64) -> PyResult<Option<(u64, u64)>> {
        let open = self.open()?;
        let state = lock(&open.flights.state);
        let submitted = state.in_flight.get(&id).and_then(|flight| flight.handle.as_ref());
        Ok(submitted.map(|submitted| (submitted.progress().read(), submitted.progress().written())))
    }

    /// A descriptor that is readable when a transfer may have ended, until `next` finds none.
    fn fileno(&self) -> PyResult<RawFd> {
        let open = self.open()?;
        Ok(match &open.engine {
            Where::Here(_) => open.flights.wake.as_fd().as_raw_fd(),
            Where::There(_, both) => both.as_fd().as_raw_fd(),
        })
    }

    /// Adds 1 to this eventfd for each end that `next` has. After an error an earlier one goes on to count.
    fn signal(&self, eventfd: RawFd) -> PyResult<()> {
        let open = self.open()?;
        let wrong = |error: ClientError| PyValueError::new_err(error.to_string());
        let counter = WakeFd::counting(duplicate(eventfd)?);
        let counter = counter.map_err(|_| wrong(ClientError::NoCounter))?;
        if let Where::There(client, _) = &open.engine {
            lock(client).signal(duplicate(eventfd)?).map_err(|error| match error {
                ClientError::NoCounter | ClientError::OtherUser => wrong(error),
                error => failed(error),
            })?;
        }
        *lock(&open.flights.counter) = Some(counter);
        Ok(())
    }

    /// Transfers whose ends come from this process whatever becomes of an engine in another one: their new files get their names, or go away.
    fn ending_here(&self) -> PyResult<Vec<u64>> {
        let open = self.open()?;
        let state = open.state();
        let ends = state.in_flight.iter().filter(|(_, flight)| flight.ends_here);
        Ok(ends.map(|(id, _)| *id).collect())
    }

    /// Ends what calling threads do themselves, and lets `next` return.
    fn stop(&self) -> PyResult<()> {
        let open = self.open()?;
        open.closes.store(true, Ordering::Relaxed);
        open.flights.wake.wake();
        Ok(())
    }

    /// Cancels what is in flight, and ends the engine or the connection.
    fn close(&self, py: Python<'_>) {
        let open = lock(&self.open).take();
        if let Some(open) = &open {
            open.closes.store(true, Ordering::Relaxed);
        }
        if self.process == std::process::id() {
            py.detach(|| drop(open));
        } else {
            // The threads that would be waited for are those of the parent.
            std::mem::forget(open);
        }
    }
}

impl Transfers {
    fn open(&self) -> PyResult<Arc<Open>> {
        if self.process != std::process::id() {
            return Err(PyRuntimeError::new_err(
                "the transfers belong to the parent of this process: make new ones after a fork",
            ));
        }
        lock(&self.open).clone().ok_or_else(|| PyRuntimeError::new_err("the transfers are closed"))
    }
}

impl Open {
    fn start(&self, command: Command, file: Option<Naming>) -> PyResult<u64> {
        let engine = match &self.engine {
            Where::Here(engine) => engine,
            Where::There(client, _) => return self.start_there(client, command, file),
        };
        let id = {
            let mut state = self.state();
            if state.is_used(&command) {
                drop(state);
                return Err(self.refuse(file, &RemoteError::from(&Error::Busy)));
            }
            state.last += 1;
            let id = state.last;
            state.in_flight.insert(id, Flight { file, ..Flight::default() });
            id
        };
        let (flights, namer) = (self.flights.clone(), self.namer.clone());
        let submitted = engine.submit_with(command, move |outcome| {
            let result = outcome.result.map_err(|error| RemoteError::from(&error));
            match flights.take_file(id) {
                Some(file) => flights.name(&namer, file, (id, result, outcome.report)),
                None => flights.end((id, result, outcome.report)),
            }
        });
        match submitted {
            Ok(submitted) => {
                // It may have ended already.
                if let Some(flight) = self.state().in_flight.get_mut(&id) {
                    flight.handle = Some(submitted);
                }
                Ok(id)
            }
            Err(error) => {
                let flight = self.state().in_flight.remove(&id);
                let file = flight.and_then(|flight| flight.file);
                Err(self.refuse(file, &RemoteError::from(&error)))
            }
        }
    }

    fn start_there(
        &self,
        client: &Mutex<Client>,
        command: Command,
        file: Option<Naming>,
    ) -> PyResult<u64> {
        {
            let mut state = self.state();
            if state.is_used(&command) {
                drop(state);
                return Err(self.refuse(file, &RemoteError::from(&Error::Busy)));
            }
            state.starting += 1;
        }
        // `next` reads no answer before the number is known: it needs the client for that.
        let mut client = lock(client);
        let submitted = client.submit(command);
        let mut state = self.state();
        state.starting -= 1;
        match submitted {
            Ok(id) => {
                state.in_flight.insert(id, Flight { file, ..Flight::default() });
                Ok(id)
            }
            Err(error) => {
                drop((state, client));
                self.discard(file);
                Err(failed(error))
            }
        }
    }

    /// Of a transfer that does not start. Its new file goes away.
    fn refuse(&self, file: Option<Naming>, error: &RemoteError) -> PyErr {
        self.discard(file);
        refused(error)
    }

    fn discard(&self, file: Option<Naming>) {
        if let Some(Naming { file, .. }) = file {
            self.namer.discard(file, || ());
        }
    }

    fn cancel(&self, id: u64) -> Result<(), String> {
        match &self.engine {
            Where::Here(_) => {
                let submitted =
                    self.state().in_flight.get(&id).and_then(|flight| flight.handle.clone());
                if let Some(submitted) = submitted {
                    submitted.cancel();
                }
                Ok(())
            }
            Where::There(client, _) => lock(client).cancel(id).map_err(|error| error.to_string()),
        }
    }

    fn next(&self, limit: Duration) -> Result<Option<End>, String> {
        let ended = match self.take()? {
            Some(ended) => Some(ended),
            None => {
                match &self.engine {
                    Where::There(client, _) if !self.is_lost() => {
                        let client = lock(client).as_fd().try_clone_to_owned();
                        let client = client.map_err(|error| error.to_string())?;
                        wait_readable(&[self.flights.wake.as_fd(), client.as_fd()], Some(limit))
                    }
                    _ => wait_readable(&[self.flights.wake.as_fd()], Some(limit)),
                };
                self.flights.wake.clear();
                self.watch().map_err(|error| error.to_string())?;
                self.take()?
            }
        };
        let mut state = self.state();
        if let Some((id, ..)) = &ended {
            state.in_flight.remove(id);
        }
        if !state.ended.is_empty() {
            // The wake-up for them may have been cleared with that for this one.
            self.flights.wake.wake();
        }
        Ok(ended)
    }

    /// In this thread, if it is small, no other one is in flight, and no other thread does one.
    fn run_small(
        &self,
        command: &Command,
        interrupted: &(dyn Fn() -> bool + Sync),
    ) -> Option<(Result<(), RemoteError>, Report)> {
        let mut small = self.small.try_lock().ok()?;
        let socket = command.sink_socket()?;
        {
            let mut state = self.state();
            if !state.in_flight.is_empty() || state.starting > 0 {
                return None;
            }
            state.small = Some(socket);
        }
        let _used = Used(&self.flights);
        let Outcome { result, report } = small.run(command, interrupted)?;
        Some((result.map_err(|error| RemoteError::from(&error)), report))
    }

    /// From now on `fileno` is readable when something comes, or has come.
    fn watch(&self) -> std::io::Result<()> {
        let Where::There(client, both) = &self.engine else { return Ok(()) };
        both.wait(&mut Vec::new(), Some(Duration::ZERO));
        if !self.is_lost() {
            both.arm(lock(client).as_fd(), 0, Interest::Receive)?;
        }
        both.arm(self.flights.wake.as_fd(), 1, Interest::Receive)
    }

    /// An end that has arrived.
    fn take(&self) -> Result<Option<End>, String> {
        if let Some(ended) = self.state().ended.pop_front() {
            return Ok(Some(ended));
        }
        let Where::There(client, _) = &self.engine else { return Ok(None) };
        if self.is_lost() {
            return Ok(None);
        }
        loop {
            let answer = lock(client).next(Duration::ZERO).or_else(|error| {
                self.lost.store(true, Ordering::Relaxed);
                self.watch().map_err(|error| error.to_string())?;
                Err(error.to_string())
            });
            match answer? {
                Some(Answer::Ended { id, result, report }) => match self.flights.take_file(id) {
                    Some(file) => self.flights.name(&self.namer, file, (id, result, report)),
                    None => return Ok(Some((id, result, report))),
                },
                // Nobody has asked for another one.
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.flights.state)
    }
}

impl State {
    /// Whether a calling thread sends a small transfer to the sink of this one.
    fn is_used(&self, command: &Command) -> bool {
        self.small.is_some() && command.sink_socket() == self.small
    }
}

/// A calling thread sends a small transfer until this is dropped.
struct Used<'f>(&'f Flights);

impl Drop for Used<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).small = None;
    }
}

impl Flights {
    /// The new file of a transfer, once.
    fn take_file(&self, id: u64) -> Option<Naming> {
        let mut state = lock(&self.state);
        let flight = state.in_flight.get_mut(&id)?;
        let file = flight.file.take();
        flight.ends_here = file.is_some();
        file
    }

    /// Gives a new file its name if its transfer has succeeded, and removes it otherwise; then ends the transfer. A file system that does not answer holds neither
    /// the thread that calls this nor other transfers.
    fn name(self: &Arc<Self>, namer: &Namer, file: Naming, (id, result, report): End) {
        let Naming { file, existing, sync } = file;
        let flights = self.clone();
        if result.is_err() {
            return namer.discard(file, move || flights.end((id, result, report)));
        }
        namer.commit(file, existing, sync, move |named| {
            let named = named.map_err(|error| {
                let errno = error.raw_os_error().unwrap_or(5);
                RemoteError::from(&Error::Host { what: "naming the new file", errno })
            });
            flights.end((id, named, report));
        });
    }

    /// For `next`.
    fn end(&self, end: End) {
        lock(&self.state).ended.push_back(end);
        self.wake.wake();
        if let Some(counter) = &*lock(&self.counter) {
            counter.wake();
        }
    }
}

fn command(
    source: Place,
    sink: Place,
    bytes: Option<u64>,
    stages: Vec<GivenStage>,
    stall: Option<f64>,
    deadline: Option<f64>,
) -> PyResult<Command> {
    let stages = stages.into_iter().map(stage).collect::<PyResult<Vec<_>>>()?;
    let mut command = Command::new(source, bytes, stages, sink);
    if let Some(stall) = stall {
        command = command.stall(seconds(stall)?);
    }
    if let Some(deadline) = deadline {
        command = command.deadline(seconds(deadline)?);
    }
    Ok(command)
}

/// An end as Python sees it.
fn shown<'py>(py: Python<'py>, (id, result, report): End) -> Ended<'py> {
    let error = result.err().map(|error| (error.name(), error.errno, error.text));
    let stage = |stage: transfer::StageReport| {
        let digest = stage.digest.map(|digest| PyBytes::new(py, digest.bytes()));
        let found = stage.found.map(|found| (found.count, found.offsets));
        (stage.kind.name(), stage.bytes, stage.made, stage.finished, digest, found)
    };
    let stages = report.stages.into_iter().map(stage).collect();
    (id, error, report.read, report.written, stages)
}

impl GivenPlace {
    /// The place, and the file that it becomes if it is new.
    fn open(self, py: Python<'_>, with: &Lanes) -> PyResult<(Place, Option<NewFile>)> {
        match self {
            Self::Gpu(array) => {
                let lanes = lent(py, &array, with.threads, with.slot_bytes);
                let lanes = lanes.map_err(PyValueError::new_err)?;
                Ok((Place::Accelerator(AcceleratorMemory::with_lanes(lanes), 0), None))
            }
            Self::Descriptor((descriptor, is_socket, offset)) => {
                let owned = duplicate(descriptor)?;
                let place =
                    if is_socket { Place::Socket(owned) } else { Place::File(owned, offset) };
                Ok((place, None))
            }
            Self::Path(path) => {
                let file = NewFile::create(&path)?;
                Ok((Place::File(file.file()?.into(), 0), Some(file)))
            }
        }
    }
}

fn stage((name, option, bytes, first, second): GivenStage) -> PyResult<StageSpec> {
    let bytes = Zeroizing::new(bytes);
    let unknown = || PyValueError::new_err(format!("there is no stage {name} with {option}"));
    let key = || {
        let why = "a key has 32 bytes";
        Key::of(&bytes).ok_or_else(|| PyValueError::new_err(why))
    };
    let format = || Format::named(&option).ok_or_else(unknown);
    let cipher = || Cipher::named(&option).ok_or_else(unknown);
    Ok(match name.as_str() {
        "digest" => StageSpec::Digest(DigestKind::named(&option).ok_or_else(unknown)?),
        "open" => StageSpec::Open(cipher()?, key()?),
        "seal" => StageSpec::Seal(cipher()?, key()?),
        "compress" => StageSpec::Compress(option.parse().map_err(PyValueError::new_err)?),
        "expand" => {
            let ratio = u32::try_from(second).unwrap_or(u32::MAX);
            StageSpec::Expand(format()?, ExpandLimits { bytes: first, ratio })
        }
        "find" | "grep" => {
            let kind = if name == "find" { SearchKind::Text } else { SearchKind::Lines };
            let offsets = u16::try_from(first).unwrap_or(u16::MAX);
            StageSpec::Search(SearchSpec { kind, pattern: bytes.to_vec(), offsets })
        }
        _ => return Err(unknown()),
    })
}

fn seconds(given: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(given)
        .map_err(|_| PyValueError::new_err(format!("{given} is no time: give seconds above zero")))
}

fn refused(error: &RemoteError) -> PyErr {
    TransferRefused::new_err((error.name(), error.errno, error.text.clone()))
}

/// The connection to an engine in another process failed.
fn failed(error: ClientError) -> PyErr {
    TransferRefused::new_err(("engine", 5, error.to_string()))
}
