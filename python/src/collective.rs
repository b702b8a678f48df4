//! Groups for Python: the calls of `serval-collective` on Python's buffers.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use collective::{CollectiveError, Element, Member};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::gpu::{GpuArray, Stages};

create_exception!(serval._native, GroupError, PyException, "A call of a group failed.");

/// The longest limit: 30 years.
const SECONDS_MAX: f64 = 1e9;

/// A listening socket, made before the addresses of all ranks are known.
#[pyclass(frozen, module = "serval._native")]
pub(crate) struct Listener {
    socket: TcpListener,
}

#[pymethods]
impl Listener {
    /// Listens at a free port of `host`, or at `port`.
    #[new]
    #[pyo3(signature = (host, port = 0))]
    fn new(py: Python<'_>, host: &str, port: u16) -> PyResult<Self> {
        // Looking up a name may take seconds.
        let socket = py.detach(|| TcpListener::bind((host, port)))?;
        Ok(Self { socket })
    }

    /// `HOST:PORT`.
    fn address(&self) -> PyResult<String> {
        Ok(self.socket.local_addr()?.to_string())
    }
}

/// A rank of a group.
#[pyclass(frozen, module = "serval._native")]
pub(crate) struct Group {
    /// `None` after `close`.
    group: Mutex<Option<Open>>,
    /// A call in another thread ends.
    aborted: Arc<AtomicBool>,
    /// The process that formed it. After a fork the connections belong to this process.
    process: u32,
}

/// A group, and slots for arrays in the memory of GPUs.
struct Open {
    group: collective::Group,
    stages: Stages,
}

#[pymethods]
impl Group {
    /// Forms a group over TCP; `addresses` has one for each rank.
    #[staticmethod]
    fn tcp(
        py: Python<'_>,
        name: String,
        rank: usize,
        listener: &Listener,
        addresses: Vec<String>,
        limit: f64,
    ) -> PyResult<Self> {
        let addresses: Vec<SocketAddr> =
            py.detach(|| addresses.iter().map(|text| resolve(text)).collect::<PyResult<_>>())?;
        let member = Member { name, ranks: addresses.len(), rank };
        let limit = seconds(limit)?;
        Self::form(py, |interrupt| {
            let listener = &listener.socket;
            collective::Group::connect_unless(&member, listener, &addresses, limit, interrupt)
        })
    }

    /// Forms a group over shared memory, by sockets in `folder`.
    #[staticmethod]
    fn shared(
        py: Python<'_>,
        name: String,
        ranks: usize,
        rank: usize,
        folder: PathBuf,
        limit: f64,
    ) -> PyResult<Self> {
        let member = Member { name, ranks, rank };
        let limit = seconds(limit)?;
        Self::form(py, |interrupt| {
            collective::Group::connect_shared_unless(&member, &folder, limit, interrupt)
        })
    }

    /// Sums a writable, contiguous buffer of `element` ("float32" or "int32") over all ranks, in place.
    fn all_reduce(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        element: &str,
        limit: f64,
    ) -> PyResult<()> {
        let element = summed(element)?;
        self.call(py, Some(buffer), limit, |group, data| group.all_reduce(element, data))
    }

    /// The same for an array in the memory of a GPU.
    fn all_reduce_gpu(
        &self,
        py: Python<'_>,
        array: GpuArray,
        element: &str,
        limit: f64,
    ) -> PyResult<()> {
        let element = summed(element)?;
        self.run(py, limit, |open| {
            let Open { group, stages } = open;
            stages.call(&array, |staging| group.all_reduce_staged(element, staging))
        })
    }

    /// Replaces an array in the memory of a GPU by the one of `root`.
    fn broadcast_gpu(
        &self,
        py: Python<'_>,
        array: GpuArray,
        root: usize,
        limit: f64,
    ) -> PyResult<()> {
        self.run(py, limit, |open| {
            let Open { group, stages } = open;
            stages.call(&array, |staging| group.broadcast_staged(root, staging))
        })
    }

    /// Replaces a writable, contiguous buffer by the one of `root`.
    fn broadcast(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        root: usize,
        limit: f64,
    ) -> PyResult<()> {
        self.call(py, Some(buffer), limit, |group, data| group.broadcast(root, data))
    }

    /// Returns after all ranks have called it.
    fn barrier(&self, py: Python<'_>, limit: f64) -> PyResult<()> {
        self.call(py, None, limit, |group, _| group.barrier())
    }

    /// Leaves the group; waits for a call in another thread.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }

    /// Leaves the group; a call in another thread fails.
    fn abort(&self, py: Python<'_>) {
        self.aborted.store(true, Ordering::Relaxed);
        py.detach(|| self.end());
    }

    /// In a fork: closes the descriptors, so that the group's other ranks notice the end of the process that formed it.
    fn forget(&self) {
        if self.is_forked() {
            self.end();
        }
    }
}

impl Group {
    fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Drops the group, which does not speak to the other ranks in a fork.
    fn end(&self) {
        let mut group = match self.is_forked() {
            false => self.lock(),
            // A thread that the fork does not have may hold the lock.
            true => match self.group.try_lock() {
                Ok(group) => group,
                Err(_) => return,
            },
        };
        let mut open = group.take();
        if let (Some(open), true) = (&mut open, self.is_forked()) {
            open.stages.forget();
        }
        drop(open);
    }

    fn form(
        py: Python<'_>,
        form: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<collective::Group, CollectiveError> + Send,
    ) -> PyResult<Self> {
        let formed = py.detach(|| form(&mut signal_has_raised));
        let mut group = formed.map_err(|error| raised(py, error))?;
        let aborted = Arc::new(AtomicBool::new(false));
        let asked = aborted.clone();
        group.set_interrupt(move || asked.load(Ordering::Relaxed) || signal_has_raised());
        let open = Open { group, stages: Stages::default() };
        Ok(Self { group: Mutex::new(Some(open)), aborted, process: std::process::id() })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(
        &self,
        py: Python<'_>,
        buffer: Option<&Bound<'_, PyAny>>,
        limit: f64,
        call: impl FnOnce(&mut collective::Group, &mut [u8]) -> Result<(), CollectiveError> + Send,
    ) -> PyResult<()> {
        let buffer = buffer.map(PyUntypedBuffer::get).transpose()?;
        let data: &mut [u8] = match &buffer {
            Some(buffer) if buffer.readonly() || !buffer.is_c_contiguous() => {
                return Err(PyValueError::new_err("the buffer has to be writable and contiguous"));
            }
            Some(buffer) if buffer.len_bytes() > 0 => {
                let (start, len) = (buffer.buf_ptr().cast::<u8>(), buffer.len_bytes());
                // SAFETY: the exporter keeps these bytes in place and mapped until `buffer` is released, at the end of this function.
                // They are writable and initialised. Another Python thread that uses the object during the call gets undefined
                // values, as with every extension that releases the interpreter's lock; the documentation forbids it.
                #[allow(unsafe_code)]
                unsafe {
                    std::slice::from_raw_parts_mut(start, len)
                }
            }
            _ => &mut [],
        };
        self.run(py, limit, |open| call(&mut open.group, data))
    }

    fn run(
        &self,
        py: Python<'_>,
        limit: f64,
        call: impl FnOnce(&mut Open) -> Result<(), CollectiveError> + Send,
    ) -> PyResult<()> {
        let limit = seconds(limit)?;
        if self.is_forked() {
            let why = "the group belongs to the process that formed it, not to its fork: form another group here";
            return Err(failed("argument", why.to_owned()));
        }
        let result = py.detach(|| {
            let mut open = self.lock();
            let Some(open) = open.as_mut() else {
                return Err(CollectiveError::Argument("the group is closed".to_owned()));
            };
            open.group.set_limit(limit);
            call(open)
        });
        result.map_err(|error| raised(py, error))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
        if matches!(self.group.try_lock(), Err(TryLockError::WouldBlock)) {
            // A thread of the parent was inside of the group at the fork: what it had in hand cannot be dropped.
            std::mem::forget(std::mem::replace(&mut self.group, Mutex::new(None)));
        }
    }
}

/// Runs Python's handlers of the signals that have come. True: one has raised an exception, which [`raised`] takes.
fn signal_has_raised() -> bool {
    let asked = Python::try_attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(raised) => {
            raised.restore(py);
            true
        }
    });
    // Without an interpreter the process is ending, and nobody waits for the call.
    asked.unwrap_or(true)
}

fn summed(element: &str) -> PyResult<Element> {
    match element {
        "float32" => Ok(Element::Float32),
        "int32" => Ok(Element::Int32),
        other => {
            let why = format!("an all-reduce sums float32 or int32, not {other}");
            Err(PyValueError::new_err(why))
        }
    }
}

fn resolve(text: &str) -> PyResult<SocketAddr> {
    let refused = |why: String| {
        PyOSError::new_err(format!("{text:?} is no address such as host:7000: {why}"))
    };
    let mut found = text.to_socket_addrs().map_err(|error| refused(error.to_string()))?;
    found.next().ok_or_else(|| refused("the name has no address".to_owned()))
}

fn seconds(limit: f64) -> PyResult<Duration> {
    // Without a maximum the deadline could be beyond what the clock can represent.
    let parsed = Duration::try_from_secs_f64(limit.min(SECONDS_MAX)).ok();
    let parsed = parsed.filter(|parsed| !limit.is_nan() && !parsed.is_zero());
    parsed.ok_or_else(|| PyValueError::new_err("the limit has to be a positive number of seconds"))
}

/// The exception's arguments are a word for programs and a sentence.
fn failed(name: &'static str, why: String) -> PyErr {
    GroupError::new_err((name, why))
}

fn raised(py: Python<'_>, error: CollectiveError) -> PyErr {
    match error {
        // The handler of a signal has raised.
        CollectiveError::Interrupted(_) if PyErr::occurred(py) => PyErr::fetch(py),
        error => failed(error.name(), error.to_string()),
    }
}
