//! What all modules of the process share: the engine of wasmtime, and the thread that counts time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(1);
/// After this number of ticks without a call the thread sleeps until the next one: longer than any deadline.
const IDLE_TICKS: u32 = 3000;

/// See the module's text. It exists as long as a module does.
pub(super) struct Host {
    pub(super) engine: wasmtime::Engine,
    clock: Arc<Clock>,
    counts: Option<JoinHandle<()>>,
}

/// Whether time is counted.
#[derive(Default)]
struct Clock {
    /// There was a call since the last tick.
    is_used: AtomicBool,
    /// The thread sleeps until a call wakes it.
    is_parked: AtomicBool,
    ends: AtomicBool,
}

static HOST: Mutex<Weak<Host>> = Mutex::new(Weak::new());

impl Host {
    /// The host of this process.
    pub(super) fn get() -> Result<Arc<Self>, String> {
        let mut shared = HOST.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = shared.upgrade() {
            return Ok(host);
        }
        let host = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&host);
        Ok(host)
    }

    fn start() -> Result<Self, String> {
        let engine = wasmtime::Engine::new(&crate::module_settings::settings())
            .map_err(|error| super::one_line(&error))?;
        let clock = Arc::<Clock>::default();
        let (counted, counts) = (engine.weak(), clock.clone());
        let builder = std::thread::Builder::new().name("serval-epochs".into());
        let thread = builder.spawn(move || {
            counts.run(|| {
                if let Some(engine) = counted.upgrade() {
                    engine.increment_epoch();
                }
            });
        });
        let thread = thread.map_err(|error| format!("a thread cannot be started: {error}"))?;
        Ok(Self { engine, clock, counts: Some(thread) })
    }

    /// A call begins: from now on time is counted.
    #[inline]
    pub(super) fn begin_call(&self) {
        // With sequential consistency either the thread sees that it is used, or it is seen to be parked.
        if !self.clock.is_used.load(Ordering::Relaxed) {
            self.clock.is_used.store(true, Ordering::SeqCst);
            if self.clock.is_parked.load(Ordering::SeqCst)
                && let Some(thread) = &self.counts
            {
                thread.thread().unpark();
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.clock.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.counts.take() {
            Thread::unpark(thread.thread());
            // It does not panic; a panic would end the count of time, and nothing else.
            let _ = thread.join();
        }
    }
}

impl Clock {
    fn run(&self, tick: impl Fn()) {
        let mut idle = 0;
        while !self.ends.load(Ordering::SeqCst) {
            idle = if self.is_used.swap(false, Ordering::SeqCst) { 0 } else { idle + 1 };
            if idle < IDLE_TICKS {
                std::thread::park_timeout(TICK);
                tick();
                continue;
            }
            self.is_parked.store(true, Ordering::SeqCst);
            while !self.is_used.load(Ordering::SeqCst) && !self.ends.load(Ordering::SeqCst) {
                std::thread::park();
            }
            self.is_parked.store(false, Ordering::SeqCst);
            idle = 0;
        }
    }
}
