//! How fast the machine is at this moment: a fixed piece of work on each core, and how long a cache line
//! takes to the other core and back.
//!
//! Ratios of interleaved measurements cancel what changes slowly. What changes *within* a pair they do
//! not cancel, so both are taken before and after every pair, and a pair in which either moved by more
//! than [`MOVED_MAX`] is measured again. The round trip also names the state the machine is in: on
//! virtual machines the host may place two cores near each other or far apart, and whatever crosses
//! between them differs several times over.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;

/// Largest change of a figure between two calibrations, as a share of the smaller one.
pub const MOVED_MAX: f64 = 0.10;

/// Slices of work on a core; the median counts, so that one interrupt does not.
const SLICES: usize = 5;
/// Steps of a chain of dependent multiplications in a slice: about 4 ms (5 cycles each, 3-4 GHz).
const MULTIPLICATIONS: u64 = 3_000_000;
/// Round trips in a slice of the ping-pong.
const ROUND_TRIPS: u64 = 4_000;
/// A round trip through a core's own shared cache takes 60-200 ns, one between sockets or distant
/// clusters 300 ns and more.
const NEAR_NS_MAX: f64 = 250.0;

/// What a calibration found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Nanoseconds of the fixed work on the server's core.
    pub server_spin_ns: f64,
    /// Nanoseconds of the fixed work on the client's core.
    pub client_spin_ns: f64,
    /// Nanoseconds of a cache line's round trip between both cores; `None` where they are one.
    pub ping_pong_ns: Option<f64>,
}

/// The figure that moved most between two calibrations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    /// Which one.
    pub figure: &'static str,
    /// By how much, as a share of the smaller value.
    pub share: f64,
}

impl Calibration {
    /// Measures now, for about 40 ms on both cores.
    ///
    /// # Errors
    ///
    /// A core that this process may not use.
    pub fn measure(server_core: usize, client_core: usize) -> io::Result<Self> {
        if server_core == client_core {
            let spin_ns = on_cores([server_core], |_| spin())?[0];
            let (server_spin_ns, client_spin_ns) = (spin_ns, spin_ns);
            return Ok(Self { server_spin_ns, client_spin_ns, ping_pong_ns: None });
        }
        let cores = [server_core, client_core];
        let [server_spin_ns, client_spin_ns] = on_cores(cores, |_| spin())?;
        let lines = [Line::default(), Line::default()];
        let [ping_pong_ns, _] = on_cores(cores, |side| ping_pong(&lines, side))?;
        Ok(Self { server_spin_ns, client_spin_ns, ping_pong_ns: Some(ping_pong_ns) })
    }

    /// What moved by more than [`MOVED_MAX`] from here to `after`, if anything did.
    pub fn moved(&self, after: &Self) -> Option<Moved> {
        let share = |a: f64, b: f64| (a - b).abs() / a.min(b);
        let ping_pong = self.ping_pong_ns.zip(after.ping_pong_ns);
        let all = [
            ("speed of the server's core", share(self.server_spin_ns, after.server_spin_ns)),
            ("speed of the client's core", share(self.client_spin_ns, after.client_spin_ns)),
            ("way between the cores", ping_pong.map_or(0.0, |(a, b)| share(a, b))),
        ];
        let moved = all.map(|(figure, share)| Moved { figure, share });
        let most = moved.into_iter().max_by(|a, b| a.share.total_cmp(&b.share));
        // A figure that is no number has moved, too.
        most.filter(|most| most.share > MOVED_MAX || most.share.is_nan())
    }

    /// `near`, `far`, or `one core`.
    pub fn state(&self) -> &'static str {
        match self.ping_pong_ns {
            None => "one core",
            Some(ns) if ns <= NEAR_NS_MAX => "near",
            Some(_) => "far",
        }
    }
}

/// Runs `work` on a thread of its own on each core, at the same time.
fn on_cores<const N: usize>(
    cores: [usize; N],
    work: impl Fn(usize) -> f64 + Sync,
) -> io::Result<[f64; N]> {
    let pinned = |side: usize| sys::affinity::pin_current_thread(cores[side]);
    // Looked at first: a ping without a pong would wait for ever.
    for side in 0..N {
        std::thread::scope(|scope| scope.spawn(|| pinned(side)).join()).expect("no panic")?;
    }
    let mut results = [f64::NAN; N];
    std::thread::scope(|scope| {
        let threads = std::array::from_fn::<_, N, _>(|side| {
            let (pinned, work) = (&pinned, &work);
            scope.spawn(move || {
                // Just tried; without it the work is only less telling.
                let _ = pinned(side);
                work(side)
            })
        });
        for (result, thread) in results.iter_mut().zip(threads) {
            *result = thread.join().expect("the work does not panic");
        }
    });
    Ok(results)
}

fn spin() -> f64 {
    median_of_slices(|| {
        let start = Instant::now();
        let mut word = std::hint::black_box(1u64);
        for _ in 0..MULTIPLICATIONS {
            // The shift keeps a compiler from multiplying the constants in advance.
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (word >> 29);
        }
        std::hint::black_box(word);
        start.elapsed().as_nanos() as f64
    })
}

/// A counter with its cache line (and the one that is fetched with it) to itself.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// One side of the ping-pong: writes its line, waits for the other's.
fn ping_pong(lines: &[Line; 2], side: usize) -> f64 {
    let (mine, other) = (&lines[side].0, &lines[1 - side].0);
    let mut next = 1;
    median_of_slices(|| {
        let start = Instant::now();
        for _ in 0..ROUND_TRIPS {
            // The first side serves, the second returns.
            if side == 0 {
                mine.store(next, Ordering::Release);
            }
            while other.load(Ordering::Acquire) < next {
                std::hint::spin_loop();
            }
            if side == 1 {
                mine.store(next, Ordering::Release);
            }
            next += 1;
        }
        start.elapsed().as_nanos() as f64 / ROUND_TRIPS as f64
    })
}

fn median_of_slices(slice: impl FnMut() -> f64) -> f64 {
    let mut slices: Vec<f64> = std::iter::repeat_with(slice).take(SLICES).collect();
    slices.sort_by(f64::total_cmp);
    slices[SLICES / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Calibration =
        Calibration { server_spin_ns: 100.0, client_spin_ns: 100.0, ping_pong_ns: Some(110.0) };

    #[test]
    fn small_changes_are_none_and_large_ones_are_named() {
        assert_eq!(QUIET.moved(&QUIET), None);
        assert_eq!(QUIET.moved(&Calibration { server_spin_ns: 109.0, ..QUIET }), None);
        let slower = Calibration { client_spin_ns: 120.0, ..QUIET };
        for moved in [QUIET.moved(&slower), slower.moved(&QUIET)] {
            let moved = moved.unwrap();
            assert!(moved.figure.contains("client") && (moved.share - 0.2).abs() < 1e-9);
        }
        let far = Calibration { ping_pong_ns: Some(470.0), ..QUIET };
        assert!(QUIET.moved(&far).unwrap().figure.contains("between"));
        assert!(QUIET.moved(&Calibration { server_spin_ns: f64::NAN, ..QUIET }).is_some());
        assert_eq!((QUIET.state(), far.state()), ("near", "far"));
    }

    #[test]
    fn every_core_there_is_can_be_calibrated() {
        let cores = sys::affinity::allowed_cores().unwrap();
        let (first, last) = (cores[0], cores[cores.len() - 1]);
        let found = Calibration::measure(first, last).unwrap();
        assert!(found.server_spin_ns > 0.0 && found.client_spin_ns > 0.0);
        assert_eq!(found.ping_pong_ns.is_some(), first != last);
        assert!(found.ping_pong_ns.is_none_or(|ns| ns > 0.0));
        let one = Calibration::measure(first, first).unwrap();
        assert_eq!((one.ping_pong_ns, one.state()), (None, "one core"));
        assert!(Calibration::measure(first, 1023).is_err());
    }
}
