//! The application's side of a custom ring: what a function on the path of messages delivers to this process.

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use runtime::custom_ring::{CustomRing, Delivered};

/// Signals of the interpreter are handled after this time.
const WAIT: Duration = Duration::from_millis(100);

/// A ring, until it is closed.
#[pyclass(frozen, module = "serval._native")]
pub(crate) struct Ring {
    /// The process that made it. A child of a fork must not read the rings of this process.
    process: u32,
    ring: Mutex<Option<CustomRing>>,
}

/// A request: its bytes, its worker, its number there, and its client if it has one.
type Found<'py> = (Bound<'py, PyBytes>, u32, u64, Option<(String, u16)>);

#[pymethods]
impl Ring {
    /// Takes the descriptors that the server sent: they are closed with the ring.
    #[new]
    fn new(region: RawFd, bell: RawFd) -> PyResult<Self> {
        // SAFETY: the module `serval.functions` received them, and gives them up with this call.
        #[allow(unsafe_code)]
        let files = [region, bell].map(|file| unsafe { OwnedFd::from_raw_fd(file) });
        let ring = CustomRing::open(files.into()).map_err(PyRuntimeError::new_err)?;
        Ok(Self { process: std::process::id(), ring: Mutex::new(Some(ring)) })
    }

    /// Reads up to `most` requests; waits up to `seconds` for the first one.
    fn read<'py>(
        &self,
        py: Python<'py>,
        most: usize,
        seconds: f64,
    ) -> PyResult<Bound<'py, PyList>> {
        let patience = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        let begin = Instant::now();
        let (mut found, mut message): (Vec<Found<'py>>, _) = (Vec::new(), Vec::new());
        loop {
            self.take(py, most, &mut found, &mut message)?;
            let left = patience.saturating_sub(begin.elapsed());
            if !found.is_empty() || left.is_zero() || most == 0 {
                return PyList::new(py, found);
            }
            py.check_signals()?;
            py.detach(|| self.open(|ring| ring.wait(left.min(WAIT))))?;
        }
    }

    /// Gives the memory back.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.ring.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Ring {
    fn open<R>(&self, of: impl FnOnce(&mut CustomRing) -> R) -> PyResult<R> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *ring {
            Some(_) if self.process != std::process::id() => {
                Err(PyRuntimeError::new_err("the ring belongs to the parent of this process"))
            }
            Some(ring) => Ok(of(ring)),
            None => Err(PyRuntimeError::new_err("the ring is closed")),
        }
    }

    fn take<'py>(
        &self,
        py: Python<'py>,
        most: usize,
        found: &mut Vec<Found<'py>>,
        message: &mut Vec<u8>,
    ) -> PyResult<()> {
        // Waits for another thread that reads or waits: it must be able to take the interpreter's lock.
        while found.len() < most {
            let read = py.detach(|| self.open(|ring| ring.read(message)))?;
            let Some(read) = read.map_err(PyRuntimeError::new_err)? else { return Ok(()) };
            let Delivered { worker, number, client } = read;
            let client = client.map(|client| (client.ip().to_string(), client.port()));
            found.push((PyBytes::new(py, message), worker, number, client));
        }
        Ok(())
    }
}
