//! The queue of modules that are compiled, each in a process of its own (`serval-compile`), for the thread that owns the server: it goes on meanwhile, so reloads and
//! requests of others do not wait for the compiler.
//!
//! One module at a time is compiled for each tenant ([`Beneficiary`]), and for at most [`RUNNING_MAX`] tenants; others wait in their order, and those beyond
//! [`WAITING_MAX`] are refused. The operator has a place of its own. A job whose connection has ended is given up, also
//! while it is compiled.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::Task;
use crate::{Beneficiary, CompiledModule, Uncompiled};

/// Tenants for which modules are compiled at the same time.
const RUNNING_MAX: usize = 4;
/// Jobs of one tenant, or of the operator, that wait.
const WAITING_MAX: usize = 8;

/// Modules that are compiled one after the other, and what happens then.
pub(super) struct Job {
    pub(super) of: Beneficiary,
    pub(super) modules: Vec<Uncompiled>,
    /// Set when the connection that asked for it has ended.
    pub(super) gone: Arc<AtomicBool>,
    /// Makes the task that the owner gets with the modules.
    pub(super) then: Box<dyn FnOnce(Vec<CompiledModule>) -> Task + Send>,
}

#[derive(Default)]
struct Queue {
    running: Vec<Beneficiary>,
    waiting: VecDeque<Job>,
}

struct Shared {
    queue: Mutex<Queue>,
    ends: AtomicBool,
    /// The owner's queue.
    tasks: Sender<Task>,
}

/// See the module's text. When it is dropped, everything that it compiles ends.
pub(super) struct Compiles {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Queue {
    /// The next job that may start; it counts as running.
    fn start(&mut self) -> Option<Job> {
        self.waiting.retain(|job| !job.gone.load(Ordering::Relaxed));
        let tenants = self.running.iter().filter(|of| **of != Beneficiary::Operator).count();
        let may_start = |job: &Job| {
            let has_place = job.of == Beneficiary::Operator || tenants < RUNNING_MAX;
            has_place && !self.running.contains(&job.of)
        };
        let at = self.waiting.iter().position(may_start)?;
        let job = self.waiting.remove(at)?;
        self.running.push(job.of.clone());
        Some(job)
    }

    fn end(&mut self, of: &Beneficiary) {
        let at = self.running.iter().position(|running| running == of);
        at.map(|at| self.running.swap_remove(at));
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does one job after the other until none may start.
    fn run(&self, mut job: Job) {
        loop {
            let Job { of, modules, gone, then } = job;
            let stop = || gone.load(Ordering::Relaxed) || self.ends.load(Ordering::Relaxed);
            let compiled = modules.into_iter().map(|module| module.compile(&stop)).collect();
            if !stop() {
                // The owner is gone only when everything ends.
                let _ = self.tasks.send(then(compiled));
            }
            let mut queue = self.queue();
            queue.end(&of);
            match queue.start() {
                Some(next) if !self.ends.load(Ordering::Relaxed) => job = next,
                _ => return,
            }
        }
    }
}

impl Compiles {
    pub(super) fn new(tasks: Sender<Task>) -> Self {
        let shared = Shared { queue: Mutex::default(), ends: AtomicBool::new(false), tasks };
        Self { shared: Arc::new(shared), threads: Vec::new() }
    }

    /// Compiles the modules of a job, at once or later. It is refused if too many wait, or without threads; the error is one sentence.
    pub(super) fn submit(&mut self, job: Job) -> Result<(), String> {
        self.threads.retain(|thread| !thread.is_finished());
        let mut queue = self.shared.queue();
        let waits = |other: &&Job| other.of == job.of && !other.gone.load(Ordering::Relaxed);
        if queue.waiting.iter().filter(waits).count() >= WAITING_MAX {
            return Err(format!(
                "{WAITING_MAX} modules of the same tenant wait for the compiler: try again later"
            ));
        }
        queue.waiting.push_back(job);
        while let Some(job) = queue.start() {
            let (shared, of) = (self.shared.clone(), job.of.clone());
            let builder = std::thread::Builder::new().name("serval-compiles".into());
            match builder.spawn(move || shared.run(job)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    queue.end(&of);
                    return Err(format!("a thread cannot be started: {error}"));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Compiles {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It does not panic; if it did, what it compiled has ended with it.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(of: &Beneficiary, gone: bool) -> Job {
        let gone = Arc::new(AtomicBool::new(gone));
        Job { of: of.clone(), modules: Vec::new(), gone, then: Box::new(|_| Task::End) }
    }

    fn tenant(name: &str) -> Beneficiary {
        Beneficiary::Tenant(name.to_owned())
    }

    #[test]
    fn one_job_of_each_tenant_runs_and_others_wait_in_their_order() {
        let mut queue = Queue::default();
        let (a, b) = (tenant("a"), tenant("b"));
        for of in [&a, &a, &b, &a, &Beneficiary::User(7), &Beneficiary::Operator] {
            queue.waiting.push_back(job(of, false));
        }
        let mut started = Vec::new();
        while let Some(job) = queue.start() {
            started.push(job.of);
        }
        assert_eq!(started, [a.clone(), b, Beneficiary::User(7), Beneficiary::Operator]);
        assert_eq!(queue.waiting.len(), 2, "both of tenant a");
        queue.end(&a);
        assert_eq!(queue.start().map(|job| job.of), Some(a));
        assert!(queue.start().is_none());
    }

    #[test]
    fn few_tenants_compile_at_a_time_and_the_operator_always_may() {
        let mut queue = Queue::default();
        for number in 0..=RUNNING_MAX {
            queue.waiting.push_back(job(&tenant(&number.to_string()), false));
        }
        for _ in 0..RUNNING_MAX {
            assert!(queue.start().is_some());
        }
        assert!(queue.start().is_none());
        queue.waiting.push_back(job(&Beneficiary::Operator, false));
        assert_eq!(queue.start().map(|job| job.of), Some(Beneficiary::Operator));
        queue.end(&tenant("0"));
        assert_eq!(queue.start().map(|job| job.of), Some(tenant(&RUNNING_MAX.to_string())));
    }

    #[test]
    fn a_job_whose_client_has_gone_is_not_compiled_and_too_many_are_refused() {
        let (tasks, inbox) = std::sync::mpsc::channel();
        let mut compiles = Compiles::new(tasks);
        let a = tenant("a");
        compiles.submit(job(&a, false)).unwrap();
        assert!(matches!(inbox.recv(), Ok(Task::End)));
        // As if one ran.
        while compiles.shared.queue().running.contains(&a) {
            std::thread::yield_now();
        }
        compiles.shared.queue().running.push(a.clone());
        for _ in 0..WAITING_MAX {
            compiles.submit(job(&a, true)).unwrap();
            compiles.submit(job(&a, false)).unwrap();
        }
        let why = compiles.submit(job(&a, false)).unwrap_err();
        assert!(why.contains("wait for the compiler"), "{why}");
        compiles.submit(job(&tenant("b"), false)).unwrap();
        assert!(matches!(inbox.recv(), Ok(Task::End)), "another tenant does not wait");
        assert_eq!(compiles.shared.queue().waiting.len(), WAITING_MAX, "who has gone is left out");
    }
}
