//! The clock for heartbeats and deadlines, and CPU time clocks.

/// Nanoseconds of CLOCK_MONOTONIC: the same in every process of this host, unlike
/// [`std::time::Instant`], whose zero is unknown. About 20 ns a call (vDSO, no system call).
#[inline]
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds since 1970 (CLOCK_REALTIME): for records that people read, never for waiting.
#[inline]
pub fn realtime_ns() -> u64 {
    read(libc::CLOCK_REALTIME)
}

/// CPU time of all threads of this process since it started, in user mode and in the host kernel,
/// in nanoseconds.
pub fn process_cpu_ns() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// The same of another process; `None`: there is none.
pub fn cpu_ns_of(process: u32) -> Option<u64> {
    let mut clock = 0;
    // SAFETY: `clock` outlives the call.
    if unsafe { libc::clock_getcpuclockid(process as libc::pid_t, &raw mut clock) } != 0 {
        return None;
    }
    ThreadClock(clock).read().map(|time| time.as_nanos() as u64)
}

/// The same for the calling thread.
pub fn thread_cpu_ns() -> u64 {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The CPU clock of one thread, readable by the other threads of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// Of the calling thread.
    pub fn of_this_thread() -> std::io::Result<Self> {
        let mut clock = 0;
        // SAFETY: `clock` outlives the call; the calling thread exists.
        match unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) } {
            0 => Ok(Self(clock)),
            error => Err(std::io::Error::from_raw_os_error(error)),
        }
    }

    /// CPU time of the thread, in user mode and in the host kernel; `None` once it has ended.
    pub fn read(self) -> Option<std::time::Duration> {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `now` outlives the call, which fails if the thread does not exist.
        match unsafe { libc::clock_gettime(self.0, &raw mut now) } {
            0 => Some(std::time::Duration::new(now.tv_sec as u64, now.tv_nsec as u32)),
            _ => None,
        }
    }
}

#[inline]
fn read(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which cannot fail for the clocks of this file.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_goes_back_and_does_advance() {
        let start = monotonic_ns();
        let mut last = start;
        while last == start {
            let now = monotonic_ns();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn work_takes_time_of_the_process() {
        let before = process_cpu_ns();
        while process_cpu_ns() == before {}
        assert!(process_cpu_ns() > before);
    }

    #[test]
    fn another_thread_reads_the_time_of_a_thread_until_it_has_ended() {
        let (send, receive) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            send.send(ThreadClock::of_this_thread().unwrap()).unwrap();
            while ended.try_recv().is_err() {}
        });
        let clock = receive.recv().unwrap();
        let start = clock.read().unwrap();
        while clock.read().unwrap() == start {}
        end.send(()).unwrap();
        thread.join().unwrap();
        // Its id stays taken until the host kernel has released it.
        while clock.read().is_some() {}
    }

    #[test]
    fn work_takes_time_of_the_thread_and_sleep_does_not() {
        let start = thread_cpu_ns();
        while thread_cpu_ns() - start < 1_000_000 {}
        let before = thread_cpu_ns();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(thread_cpu_ns() - before < 25_000_000);
    }
}
