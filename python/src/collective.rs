//! Groups for Python: the calls of `serval-collective` on Python's buffers.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use collective::{CollectiveError, Element, Member, Transport};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError, PyValueError};
use pyo3::prelude::*;

create_exception!(serval._native, GroupError, PyException, "A call of a group failed.");

/// The longest limit: 30 years.
const SECONDS_MAX: f64 = 1e9;

type AnyGroup = collective::Group<Box<dyn Transport + Send>>;

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
    group: Mutex<Option<AnyGroup>>,
    /// A call in another thread ends.
    aborted: Arc<AtomicBool>,
    /// The process that formed it. After a fork the connections belong to this process.
    process: u32,
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
        Self::form(py, || {
            let formed = collective::Group::connect(&member, &listener.socket, &addresses, limit);
            formed.map(collective::Group::boxed)
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
        Self::form(py, || {
            collective::Group::connect_shared(&member, &folder, limit).map(collective::Group::boxed)
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
        let element = match element {
            "float32" => Element::Float32,
            "int32" => Element::Int32,
            other => {
                let why = format!("an all-reduce sums float32 or int32, not {other}");
                return Err(PyValueError::new_err(why));
            }
        };
        self.call(py, Some(buffer), limit, |group, data| group.all_reduce(element, data))
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
}

impl Group {
    fn end(&self) {
        let Some(group) = self.lock().take() else { return };
        if self.process != std::process::id() {
            group.abandon();
        }
    }

    fn form(
        py: Python<'_>,
        form: impl FnOnce() -> Result<AnyGroup, CollectiveError> + Send,
    ) -> PyResult<Self> {
        let mut group = py.detach(form).map_err(raised)?;
        let aborted = Arc::new(AtomicBool::new(false));
        let asked = aborted.clone();
        // Python's handlers of signals run here; the exception that one raises is raised by the call.
        group.set_interrupt(move || {
            asked.load(Ordering::Relaxed)
                || Python::attach(|py| match py.check_signals() {
                    Ok(()) => false,
                    Err(raised) => {
                        raised.restore(py);
                        true
                    }
                })
        });
        Ok(Self { group: Mutex::new(Some(group)), aborted, process: std::process::id() })
    }

    fn lock(&self) -> MutexGuard<'_, Option<AnyGroup>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(
        &self,
        py: Python<'_>,
        buffer: Option<&Bound<'_, PyAny>>,
        limit: f64,
        call: impl FnOnce(&mut AnyGroup, &mut [u8]) -> Result<(), CollectiveError> + Send,
    ) -> PyResult<()> {
        let limit = seconds(limit)?;
        if self.process != std::process::id() {
            let why = "the group belongs to the process that formed it, not to its fork";
            return Err(failed("argument", why.to_owned()));
        }
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
        let result = py.detach(|| {
            let mut group = self.lock();
            let Some(group) = group.as_mut() else {
                return Err(CollectiveError::Argument("the group is closed".to_owned()));
            };
            group.set_limit(limit);
            call(group, data)
        });
        match result {
            Ok(()) => Ok(()),
            // The handler of a signal has raised.
            Err(CollectiveError::Interrupted(_)) if PyErr::occurred(py) => Err(PyErr::fetch(py)),
            Err(error) => Err(raised(error)),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
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

fn raised(error: CollectiveError) -> PyErr {
    failed(error.name(), error.to_string())
}
