//! Parking a thread on a word of this process: how host accelerator threads wait for work.
//!
//! The waiter checks the word's value, decides to sleep and calls [`park`] with the value it saw;
//! the host kernel puts it to sleep only if the word still holds that value, so a waker that
//! changes the word first and then calls [`wake`] cannot be missed.

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `*word == expected`, at most `timeout` (no limit if `None`). May return early:
/// check the word again.
pub fn park(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as _,
    });
    let pointer = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: `word` is a valid aligned word for the duration of the call; `pointer` is null or points
    // to `timeout`. All outcomes (woken, value changed, timed out, interrupted) are treated alike: the
    // caller checks the word again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected,
            pointer,
        );
    }
}

/// Wakes up to `count` threads parked on `word`; returns how many. Change the word first.
pub fn wake(word: &AtomicU32, count: u32) -> u32 {
    let count = count.min(i32::MAX as u32);
    // SAFETY: `word` is a valid aligned word; waking does not access it.
    let woken = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            count,
        )
    };
    u32::try_from(woken).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::thread;

    #[test]
    fn a_changed_word_and_a_timeout_end_a_park() {
        let word = AtomicU32::new(1);
        park(&word, 0, None);
        park(&word, 1, Some(Duration::from_millis(1)));
        assert_eq!(wake(&word, u32::MAX), 0);
    }

    #[test]
    fn no_wake_is_lost() {
        const ROUNDS: u32 = 5000;
        let word = Arc::new(AtomicU32::new(0));
        let theirs = Arc::clone(&word);
        let thread = thread::spawn(move || {
            for round in (1..ROUNDS).step_by(2) {
                turn(&theirs, round);
            }
        });
        for round in (0..ROUNDS).step_by(2) {
            turn(&word, round);
        }
        thread.join().unwrap();
        assert_eq!(word.load(Ordering::Acquire), ROUNDS);

        // Waits for its round without a time limit: a lost wake would hang.
        fn turn(word: &AtomicU32, round: u32) {
            loop {
                let seen = word.load(Ordering::Acquire);
                if seen == round {
                    break;
                }
                park(word, seen, None);
            }
            word.store(round + 1, Ordering::Release);
            wake(word, 1);
        }
    }
}
