//! The native module of the Python package: `serval._native`.
//!
//! [`HostCall`] attaches to an engine (`runtime::attach`, on a thread of its own that never runs Python) and gives batches of
//! messages to the Python thread that calls the function. The loop around the function is written in Python, so no native frame
//! is below the function: whatever happens inside it, including the end of the interpreter, unwinds no Rust code.
//!
//! [`ring::Ring`] reads what a function on the path of messages delivers to this process.
//!
//! [`transfer::Transfers`] starts transfers and reports their ends.
//!
//! [`collective::Group`] is a rank of a group whose calls run on the calling thread, without the interpreter's lock.

#![deny(unsafe_code)]

mod collective;
mod gpu;
mod ring;
mod transfer;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList, PyMemoryView, PyTuple};
use runtime::host_call::{Caller, CallerHandle, HostCallDevice, Limits, NoReply, host_call};
use runtime::{AttachRequest, ParamValue, RuntimeError};

/// How often the control thread looks whether an overdue call has returned.
const RETURN_CHECK: Duration = Duration::from_millis(100);

/// One service whose messages go to a Python function.
#[pyclass(frozen, module = "serval._native")]
struct HostCall {
    /// The process that made it. After a fork the rings belong to this process, and the child must not write to them.
    process: u32,
    /// `None` after `release`.
    caller: Mutex<Option<Caller>>,
    /// The messages of the last `next_rows`: the function may change those that it got.
    rows: Mutex<Vec<u8>>,
    handle: Mutex<Option<CallerHandle>>,
    control: Arc<Control>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// State shared with the control thread.
#[derive(Default)]
struct Control {
    cancel: AtomicBool,
    /// Why the control thread has ended by itself.
    failure: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl HostCall {
    /// Starts to attach at `path`, on a thread of its own.
    #[new]
    fn new(
        path: PathBuf,
        service: String,
        batch: usize,
        delay_us: u64,
        idle_us: u64,
        call_ms: u64,
    ) -> PyResult<Self> {
        let limits = Limits {
            batch,
            delay: Duration::from_micros(delay_us),
            idle: Duration::from_micros(idle_us),
            call: Duration::from_millis(call_ms),
        };
        let (device, caller) = host_call("python", limits)?;
        let (handle, control) = (caller.handle(), Arc::<Control>::default());
        let thread = std::thread::Builder::new().name("serval-attach".into()).spawn({
            let (control, handle) = (control.clone(), handle.clone());
            let request = AttachRequest { service, kernel: String::new() };
            move || attach(&path, &request, device, &control, &handle)
        });
        let thread = Mutex::new(Some(thread.map_err(PyErr::from)?));
        Ok(Self {
            process: std::process::id(),
            caller: Mutex::new(Some(caller)),
            rows: Mutex::default(),
            handle: Mutex::new(Some(handle)),
            control,
            thread,
        })
    }

    /// Publishes the answers of the last batch and waits for the next one: a list of `bytes`. `None` after `close`.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let mut caller = self.caller()?;
        let Some(caller) = caller.as_mut() else { return Ok(None) };
        for first in std::iter::once(true).chain(std::iter::repeat(false)) {
            if !wait(py, caller, first) {
                break;
            }
            let mut messages = Vec::with_capacity(64);
            let count = caller.take(|message| {
                messages.push(PyBytes::new(py, message));
                None
            });
            if count > 0 {
                return PyList::new(py, messages).map(Some);
            }
        }
        Ok(None)
    }

    /// As `next`, for messages that all have `row_bytes` bytes: one `bytearray` of all messages, and their number. Messages of
    /// another length are dropped as `bad_length`.
    fn next_rows<'py>(
        &self,
        py: Python<'py>,
        row_bytes: usize,
    ) -> PyResult<Option<(Bound<'py, PyByteArray>, usize)>> {
        let mut caller = self.caller()?;
        let Some(caller) = caller.as_mut() else { return Ok(None) };
        // Only this thread uses them, but the wait releases the interpreter's lock.
        let mut rows = std::mem::take(&mut *lock(&self.rows));
        rows.clear();
        for first in std::iter::once(true).chain(std::iter::repeat(false)) {
            if !wait(py, caller, first) {
                break;
            }
            let count = caller.take(|message| {
                if message.len() != row_bytes {
                    return Some(NoReply::BadLength);
                }
                rows.extend_from_slice(message);
                None
            });
            if count > 0 {
                let array = PyByteArray::new(py, &rows);
                *lock(&self.rows) = rows;
                return Ok(Some((array, count)));
            }
        }
        Ok(None)
    }

    /// Answers the batch with a list or tuple of bytes-like objects; `None` in it: no reply is wanted. The number of replies must be that of the
    /// messages. Returns those that are wrong, whose messages are not answered: `(index, object)` if an object is not bytes-like, `(index, length,
    /// most)` if a reply is too long. `None`: no reply is wrong.
    fn reply<'py>(
        &self,
        py: Python<'py>,
        replies: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Bound<'py, PyTuple>>>> {
        let mut caller = self.caller()?;
        let Some(caller) = caller.as_mut() else { return Ok(None) };
        // Sequences are not changed by others while this thread has the interpreter's lock and runs no Python code; those that could run
        // code have been converted to lists.
        let replies: Vec<Bound<'py, PyAny>> = replies.try_iter()?.collect::<PyResult<_>>()?;
        let mut wrong = Vec::new();
        for (index, reply) in replies.iter().enumerate() {
            wrong.extend(reply_at(py, caller, index, reply)?);
        }
        Ok((!wrong.is_empty()).then_some(wrong))
    }

    /// Answers the message `index` of the batch, which has no answer yet, with an object as in `reply`. Returns what is wrong with it.
    fn reply_at<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        reply: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let mut caller = self.caller()?;
        let Some(caller) = caller.as_mut() else { return Ok(None) };
        reply_at(py, caller, index, reply)
    }

    /// Answers the batch of `count` messages with the rows of a contiguous buffer. Returns `(index, length, most)` if a row is too
    /// long, and answers nothing then.
    fn reply_rows<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        count: usize,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let mut caller = self.caller()?;
        let Some(caller) = caller.as_mut() else { return Ok(None) };
        let Some(rows) = copy_of(py, rows) else {
            return Err(PyRuntimeError::new_err("the array has no contiguous buffer"));
        };
        let row_bytes = rows.len() / count.max(1);
        for index in 0..count {
            let most = caller.reply_bytes_max(index);
            if row_bytes > most {
                return (index, row_bytes, most).into_pyobject(py).map(Some);
            }
        }
        for index in 0..count {
            caller.reply(index, &rows[index * row_bytes..][..row_bytes]);
        }
        Ok(None)
    }

    /// Ends the message `index` of the batch without a reply: it counts as `reply_too_long`, or as `kernel_drop`. Messages that have no answer when
    /// the next batch is asked for end in the same way, as `kernel_drop`.
    fn drop_at(&self, index: usize, too_long: bool) -> PyResult<()> {
        let why = if too_long { NoReply::TooLong } else { NoReply::Rejected };
        if let Some(caller) = self.caller()?.as_mut() {
            caller.end_message(index, why);
        }
        Ok(())
    }

    /// Publishes the answers given so far and begins the time limit of a call again. False: nothing is to be called again, because the
    /// generation has ended or `close` was called.
    fn call_again(&self) -> PyResult<bool> {
        Ok(self.caller()?.as_mut().is_some_and(Caller::call_again))
    }

    /// The message `index` of the batch of `next_rows`, which has messages of `row_bytes` bytes, as it was.
    fn row<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        row_bytes: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let rows = lock(&self.rows);
        let row = index.checked_mul(row_bytes).and_then(|from| rows.get(from..)?.get(..row_bytes));
        let absent = || PyIndexError::new_err(format!("the batch has no message {index}"));
        Ok(PyByteArray::new(py, row.ok_or_else(absent)?))
    }

    /// Makes `next` return `None`, now and later. May be called from any thread.
    fn close(&self) {
        if let Some(handle) = &*lock(&self.handle) {
            handle.close();
        }
    }

    /// Closes the descriptors, after `close` and `detach`; `next` returns `None` and answers go nowhere from now on. Objects that keep this
    /// one alive, such as the frames of an exception of the function, then keep only memory.
    fn release(&self) {
        if let Ok(mut caller) = self.caller() {
            *caller = None;
            *lock(&self.handle) = None;
        }
    }

    /// Detaches, and waits for the control thread for at most `seconds`; returns whether it has ended.
    fn detach(&self, py: Python<'_>, seconds: f64) -> bool {
        self.control.cancel.store(true, Ordering::Relaxed);
        let Some(thread) = lock(&self.thread).take() else { return true };
        let ended = py.detach(|| {
            let deadline =
                std::time::Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
            while !thread.is_finished() && std::time::Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            thread.is_finished()
        });
        if ended {
            // It panicked or ended: neither concerns the caller any more.
            let _ = thread.join();
        } else {
            *lock(&self.thread) = Some(thread);
        }
        ended
    }

    /// A descriptor that is readable after a generation has started, a call is overdue, or the control thread has failed.
    fn event_fd(&self) -> PyResult<i32> {
        Ok(self.handle()?.event_fd())
    }

    /// Makes `event_fd` unreadable until the next event.
    fn clear_event(&self) -> PyResult<()> {
        self.handle()?.clear_event();
        Ok(())
    }

    /// Why the control thread has ended by itself, in one sentence.
    fn failure(&self) -> Option<String> {
        lock(&self.control.failure).clone()
    }

    /// The parameters of the service, by name.
    fn params<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in self.handle()?.params() {
            match value {
                ParamValue::Number(number) => dict.set_item(name, number)?,
                ParamValue::Text(text) => dict.set_item(name, text)?,
            }
        }
        Ok(dict)
    }

    /// The counters by name.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let handle = self.handle()?;
        let counters = handle.counters();
        let dict = PyDict::new(py);
        let all: [(&str, &AtomicU64); 11] = [
            ("full", &counters.full),
            ("delay", &counters.delay),
            ("idle", &counters.idle),
            ("messages", &counters.messages),
            ("replies", &counters.replies),
            ("consumed", &counters.consumed),
            ("rejected", &counters.rejected),
            ("bad_length", &counters.bad_length),
            ("too_long", &counters.too_long),
            ("generations", &counters.generations),
            ("overdue", &counters.overdue),
        ];
        for (name, counter) in all {
            dict.set_item(name, counter.load(Ordering::Relaxed))?;
        }
        Ok(dict)
    }
}

impl HostCall {
    fn caller(&self) -> PyResult<MutexGuard<'_, Option<Caller>>> {
        if std::process::id() != self.process {
            return Err(PyRuntimeError::new_err("this host call belongs to the parent process"));
        }
        let busy = |_| PyRuntimeError::new_err("another thread uses this host call");
        self.caller.try_lock().map_err(busy)
    }

    fn handle(&self) -> PyResult<CallerHandle> {
        let released = || PyRuntimeError::new_err("this host call was released");
        lock(&self.handle).clone().ok_or_else(released)
    }
}

impl Drop for HostCall {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            let caller = self.caller.get_mut().unwrap_or_else(PoisonError::into_inner);
            // It would answer the batch in progress.
            return std::mem::forget(caller.take());
        }
        self.close();
        self.control.cancel.store(true, Ordering::Relaxed);
    }
}

/// Waits for a batch without the interpreter's lock; false: the host call is closed. The `first` wait after a call takes a full batch
/// without giving the lock away: between two calls the interpreter gives it to other threads itself. Nothing waits with the lock.
fn wait(py: Python<'_>, caller: &mut Caller, first: bool) -> bool {
    (first && caller.take_full().is_some()) || py.detach(|| caller.wait().is_some())
}

/// Answers a message of the batch with a bytes-like object or `None`, or returns what is wrong with the object; see `HostCall::reply`.
fn reply_at<'py>(
    py: Python<'py>,
    caller: &mut Caller,
    index: usize,
    reply: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let most = caller.reply_bytes_max(index);
    let copy;
    let bytes = if let Ok(bytes) = reply.cast::<PyBytes>() {
        bytes.as_bytes()
    } else if reply.is_none() {
        caller.end_message(index, NoReply::Consumed);
        return Ok(None);
    } else {
        let Some(copied) = copy_of(py, reply) else {
            return (index, reply).into_pyobject(py).map(Some);
        };
        copy = copied;
        &copy
    };
    if bytes.len() > most {
        return (index, bytes.len(), most).into_pyobject(py).map(Some);
    }
    caller.reply(index, bytes);
    Ok(None)
}

/// A copy of a bytes-like object of any element type; `None`: it is none.
fn copy_of(py: Python<'_>, object: &Bound<'_, PyAny>) -> Option<Vec<u8>> {
    if let Ok(buffer) = PyBuffer::<u8>::get(object) {
        return buffer.to_vec(py).ok();
    }
    let view = PyMemoryView::from(object).ok()?;
    let bytes = view.call_method1("cast", ("B",)).ok()?;
    PyBuffer::<u8>::get(&bytes).ok()?.to_vec(py).ok()
}

/// The control thread: serves one generation after the other until it is cancelled.
fn attach(
    path: &std::path::Path,
    request: &AttachRequest,
    mut device: HostCallDevice,
    control: &Control,
    handle: &CallerHandle,
) {
    loop {
        let result = runtime::attach(path, request, &mut device, false, &control.cancel);
        if control.cancel.load(Ordering::Relaxed) {
            return;
        }
        match result {
            // A call did not return in time; the next generation begins when it has.
            Err(RuntimeError::Blocks(failure)) if failure.reason == runtime::host_call::HUNG => {
                while !device.wait_until_free(RETURN_CHECK) {
                    if control.cancel.load(Ordering::Relaxed) {
                        return;
                    }
                }
            }
            Ok(_) => return,
            Err(error) => {
                *lock(&control.failure) = Some(error.to_string());
                handle.signal();
                return;
            }
        }
    }
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::HostCall;
    #[pymodule_export]
    use super::collective::{Group, GroupError, Listener};
    #[pymodule_export]
    use super::ring::Ring;
    #[pymodule_export]
    use super::transfer::{TransferRefused, Transfers};
}
