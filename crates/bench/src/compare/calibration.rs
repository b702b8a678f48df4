//! The current speed of the machine: a fixed amount of work on each core, and the round trip of a cache line between
//! the cores.
//!
//! Ratios of interleaved measurements cancel slow changes, but not changes *within* a pair. So both are measured
//! before and after every pair, and a pair in which a core's speed changed by more than [`MOVED_MAX`] is measured
//! again. The round trip determines the [`State`] of the machine: on virtual machines the host may place two cores
//! near each other or far apart, for seconds or for minutes, and the cost of communication between them differs by a
//! multiple. A pair counts only if the state is the same before and after. Within a state the round trip varies by
//! tens of percent between slices without other effects, so it is only reported, and the spread of the pairs shows
//! the effect. On a machine whose round trip is near the limit of two states it may cross that limit without a change
//! of state.
//!
//! The throughput of independent work on a core is a third quantity: if another program runs on the core's other
//! hardware thread, the dependent work above takes the same time, but independent work takes 1.5 to 2 times as long,
//! like the measured programs. On virtual machines that share a host this changes within seconds for each core
//! separately, so that almost no pair of several cores would remain if such pairs were discarded. Therefore it is
//! recorded for the slowest of the server's cores, and pairs around which it was slower than around the best one are
//! counted; only a row that requires it (`whole`) discards them. The compared quantity is the time of the independent
//! work divided by that of the dependent work, which does not depend on the clock frequency. The reference is the
//! best pair of the row: a neighbour that never stops is not detected.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use std::{fmt, io};

use serde::{Deserialize, Serialize};

/// Largest change of a core's speed between two calibrations, as a share of the smaller one.
pub const MOVED_MAX: f64 = 0.10;

/// Slices of work on a core; the median is used, so that a single interrupt has no effect.
const SLICES: usize = 5;
/// Steps of a chain of dependent multiplications in a slice: about 4 ms (5 cycles each, 3-4 GHz).
const MULTIPLICATIONS: u64 = 3_000_000;
/// Steps of eight independent chains in a slice: about 1 ms on an unshared core.
const WIDE_STEPS: u64 = 800_000;
/// Round trips in a slice of the ping-pong.
const ROUND_TRIPS: u64 = 4_000;
/// A round trip through a core's own shared cache takes 60-300 ns, one between sockets or distant
/// clusters 400 ns and more.
pub const NEAR_NS_MAX: f64 = 350.0;

/// The result of a calibration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Nanoseconds of the fixed work on the server's core.
    pub server_spin_ns: f64,
    /// Nanoseconds of the fixed work on the client's core.
    pub client_spin_ns: f64,
    /// Nanoseconds of independent work on the slowest of the server's cores, measured together.
    pub server_wide_ns: f64,
    /// Nanoseconds of a cache line's round trip between both cores; `None` if they are the same.
    pub ping_pong_ns: Option<f64>,
}

/// The state has changed only if the round trip is longer by this factor: within a state it is not, between states it
/// is by a factor of two and more.
const WAY_MOVED_MIN: f64 = 1.5;

/// The distance of the two cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// They are the same core.
    OneCore,
    /// The round trip of a cache line is at most [`NEAR_NS_MAX`].
    Near,
    /// It is longer.
    Far,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::OneCore => "one core",
            Self::Near => "near",
            Self::Far => "far",
        })
    }
}

/// What changed between two calibrations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Moved {
    /// The speed of a core.
    Core {
        /// The side of the core.
        whose: &'static str,
        /// The change, as a share of the smaller value.
        share: f64,
    },
    /// The distance of the cores.
    State {
        /// Before.
        from: State,
        /// After.
        to: State,
    },
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Core { whose, share } => {
                write!(f, "the speed of the {whose}'s core moved by {:.0} %", 100.0 * share)
            }
            Self::State { from, to } => write!(f, "the cores moved from {from} to {to}"),
        }
    }
}

impl Calibration {
    /// Measures for about 50 ms: speed and round trip on the first of the server's cores and the client's, and
    /// independent work on all of the server's cores, of which there is at least one.
    ///
    /// # Errors
    ///
    /// A core that this process may not use.
    pub fn measure(server_cores: &[usize], client_core: usize) -> io::Result<Self> {
        let wide = on_cores(server_cores, |_| wide())?;
        let server_wide_ns = wide.into_iter().fold(0.0, f64::max);
        let cores = [server_cores[0], client_core];
        if cores[0] == client_core {
            let spin_ns = on_cores(&cores[..1], |_| spin())?[0];
            let (server_spin_ns, client_spin_ns) = (spin_ns, spin_ns);
            return Ok(Self { server_spin_ns, client_spin_ns, server_wide_ns, ping_pong_ns: None });
        }
        let spins = on_cores(&cores, |_| spin())?;
        let lines = [Line::default(), Line::default()];
        let ping_pong_ns = Some(on_cores(&cores, |side| ping_pong(&lines, side))?[0]);
        let (server_spin_ns, client_spin_ns) = (spins[0], spins[1]);
        Ok(Self { server_spin_ns, client_spin_ns, server_wide_ns, ping_pong_ns })
    }

    /// Time of independent work on the server's cores divided by that of the dependent work: less is better.
    pub fn width(&self) -> f64 {
        self.server_wide_ns / self.server_spin_ns
    }

    /// The change from this calibration to `after`, if any.
    pub fn moved(&self, after: &Self) -> Option<Moved> {
        let (from, to) = (self.state(), after.state());
        let wandered = match (self.ping_pong_ns, after.ping_pong_ns) {
            (Some(from), Some(to)) => from.max(to) < WAY_MOVED_MIN * from.min(to),
            _ => false,
        };
        if from != to && !wandered {
            return Some(Moved::State { from, to });
        }
        let share = |a: f64, b: f64| (a - b).abs() / a.min(b);
        let cores = [
            ("server", share(self.server_spin_ns, after.server_spin_ns)),
            ("client", share(self.client_spin_ns, after.client_spin_ns)),
        ];
        let (whose, share) = cores.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        // A speed that is not a number counts as changed.
        (share > MOVED_MAX || share.is_nan()).then_some(Moved::Core { whose, share })
    }

    /// The distance of the cores.
    pub fn state(&self) -> State {
        match self.ping_pong_ns {
            None => State::OneCore,
            Some(ns) if ns <= NEAR_NS_MAX => State::Near,
            Some(_) => State::Far,
        }
    }
}

/// Runs `work` on a separate thread on each core, at the same time.
fn on_cores(cores: &[usize], work: impl Fn(usize) -> f64 + Sync) -> io::Result<Vec<f64>> {
    // Checked first: a ping without a pong would wait forever.
    for &core in cores {
        let pinned = || sys::affinity::pin_current_thread(core);
        std::thread::scope(|scope| scope.spawn(pinned).join()).expect("no panic")?;
    }
    Ok(std::thread::scope(|scope| {
        let start = |(side, &core)| {
            let work = &work;
            scope.spawn(move || {
                // Has just succeeded; without pinning the work is only less accurate.
                let _ = sys::affinity::pin_current_thread(core);
                work(side)
            })
        };
        let threads: Vec<_> = cores.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    }))
}

/// Rotations of eight words: as many instructions at a time as a core can execute. Each word is hidden from the
/// compiler after each step; otherwise it would use two vector registers if the processor has vector rotations.
fn wide() -> f64 {
    median_of_slices(|| {
        let start = Instant::now();
        let mut words = std::hint::black_box([1u64, 2, 3, 4, 5, 6, 7, 8]);
        for step in 0..WIDE_STEPS {
            for (by, word) in (3..).zip(&mut words) {
                *word = std::hint::black_box(word.rotate_left(by) ^ step);
            }
        }
        std::hint::black_box(words);
        start.elapsed().as_nanos() as f64
    })
}

fn spin() -> f64 {
    median_of_slices(|| {
        let start = Instant::now();
        let mut word = std::hint::black_box(1u64);
        for _ in 0..MULTIPLICATIONS {
            // The shift keeps the compiler from multiplying the constants in advance.
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (word >> 29);
        }
        std::hint::black_box(word);
        start.elapsed().as_nanos() as f64
    })
}

/// A counter with its own cache line (and the adjacent one, which is prefetched with it).
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

    const QUIET: Calibration = Calibration {
        server_spin_ns: 100.0,
        client_spin_ns: 100.0,
        server_wide_ns: 100.0,
        ping_pong_ns: Some(110.0),
    };

    #[test]
    fn small_changes_are_ignored_and_large_ones_are_named() {
        assert_eq!(QUIET.moved(&QUIET), None);
        assert_eq!(QUIET.moved(&Calibration { server_spin_ns: 109.0, ..QUIET }), None);
        let slower = Calibration { client_spin_ns: 120.0, ..QUIET };
        for moved in [QUIET.moved(&slower), slower.moved(&QUIET)] {
            let moved = moved.unwrap();
            assert_eq!(moved.to_string(), "the speed of the client's core moved by 20 %");
        }
        assert!(QUIET.moved(&Calibration { server_spin_ns: f64::NAN, ..QUIET }).is_some());
    }

    #[test]
    fn the_round_trip_may_vary_within_its_state() {
        let way = |ns| Calibration { ping_pong_ns: Some(ns), ..QUIET };
        assert_eq!(way(57.0).moved(&way(110.0)), None);
        assert_eq!(way(360.0).moved(&way(470.0)), None);
        assert_eq!(way(340.0).moved(&way(400.0)), None);
        assert!(way(300.0).moved(&way(460.0)).is_some());
        assert_eq!(
            way(110.0).moved(&way(470.0)).unwrap().to_string(),
            "the cores moved from near to far"
        );
        assert_eq!(
            [way(350.0), way(351.0), Calibration { ping_pong_ns: None, ..QUIET }]
                .map(|c| c.state()),
            [State::Near, State::Far, State::OneCore]
        );
    }

    #[test]
    fn every_core_can_be_calibrated() {
        let cores = sys::affinity::allowed_cores().unwrap();
        let (first, last) = (cores[0], cores[cores.len() - 1]);
        let found = Calibration::measure(&cores, last).unwrap();
        assert!(found.server_spin_ns > 0.0 && found.client_spin_ns > 0.0);
        assert!(found.server_wide_ns > 0.0);
        assert_eq!(found.ping_pong_ns.is_some(), first != last);
        assert!(found.ping_pong_ns.is_none_or(|ns| ns > 0.0));
        let one = Calibration::measure(&[first], first).unwrap();
        assert_eq!((one.ping_pong_ns, one.state()), (None, State::OneCore));
        assert!(Calibration::measure(&[first], 1023).is_err());
        assert!(Calibration::measure(&[first, 1023], first).is_err());
    }
}
