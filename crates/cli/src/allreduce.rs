//! One rank that measures and checks an all-reduce: for the verb and the demo.

mod array;

use std::time::{Duration, Instant};

pub use array::Array;
use collective::{CollectiveError, Element, Group};
use sha2::{Digest as _, Sha256};

/// What every rank of a group does.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The type of the elements: float32 or int32.
    pub element: Element,
    /// Bytes of each rank's data.
    pub bytes: usize,
    /// Calls that are measured.
    pub rounds: usize,
    /// Spoil one byte of the last result before it is checked.
    pub corrupt: bool,
}

/// What a rank found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Elements of results that were compared with a serial calculation, or with an earlier result that was.
    pub checked: u64,
    /// Those that were wrong.
    pub wrong: u64,
    /// SHA-256 of the first result, in hexadecimal digits: equal on all ranks, and in all runs.
    pub digest: String,
    /// Duration of the calls, sorted.
    pub times: Vec<Duration>,
}

impl Outcome {
    /// The duration that this share of the calls did not exceed.
    pub fn quantile(&self, share: f64) -> Duration {
        let last = self.times.len().saturating_sub(1);
        self.times.get((share * last as f64).round() as usize).copied().unwrap_or_default()
    }
}

/// Makes the calls of one rank. `array` has the size of the plan's data.
pub fn run(group: &mut Group, plan: &Plan, array: &mut Array) -> Result<Outcome, CollectiveError> {
    let (count, rank) = (plan.bytes / plan.element.bytes(), group.rank());
    let input = words(plan.element, rank, count);
    array.write(rank, &input)?;
    array.all_reduce(group, plan.element)?;
    let mut first = vec![0; plan.bytes];
    array.read(rank, &mut first)?;
    let mut data = first.clone();
    let mut outcome = Outcome {
        checked: count as u64,
        wrong: wrong_words(plan.element, group.ranks(), &first),
        digest: Sha256::digest(&first).iter().map(|byte| format!("{byte:02x}")).collect(),
        times: Vec::with_capacity(plan.rounds),
    };
    for round in 0..plan.rounds {
        array.write(rank, &input)?;
        let began = Instant::now();
        array.all_reduce(group, plan.element)?;
        outcome.times.push(began.elapsed());
        array.read(rank, &mut data)?;
        if plan.corrupt
            && round + 1 == plan.rounds
            && let Some(byte) = data.get_mut(plan.bytes / 2)
        {
            *byte ^= 1;
        }
        outcome.checked += count as u64;
        if data != first {
            let pairs = data.chunks(4).zip(first.chunks(4));
            outcome.wrong += pairs.filter(|(got, expected)| got != expected).count() as u64;
        }
    }
    group.barrier()?;
    outcome.times.sort_unstable();
    Ok(outcome)
}

/// A rank's input.
fn words(element: Element, rank: usize, count: usize) -> Vec<u8> {
    let word = |at: usize| match element {
        Element::Float32 => float(rank, at).to_ne_bytes(),
        Element::Int32 | Element::Byte => int(rank, at).to_ne_bytes(),
    };
    (0..count).flat_map(word).collect()
}

/// Some 32 bits for each rank and place (the finaliser of MurmurHash3).
fn int(rank: usize, at: usize) -> i32 {
    let mut bits = (at as u32).wrapping_mul(8).wrapping_add(rank as u32 + 1);
    for factor in [0x85eb_ca6b, 0xc2b2_ae35] {
        bits = (bits ^ bits >> 16).wrapping_mul(factor);
    }
    (bits ^ bits >> 13) as i32
}

/// A number whose sums depend on the order in which they are made.
fn float(rank: usize, at: usize) -> f32 {
    let bits = int(rank, at);
    (bits as f32) * [1.0, 1e-3, 1e-6][bits as usize % 3]
}

/// Elements of a result that are not the sum of all ranks' inputs, calculated one after the other: for float32 in double
/// precision, with the error that sums in single precision may have.
fn wrong_words(element: Element, ranks: usize, result: &[u8]) -> u64 {
    let is_wrong = |(at, got): (usize, &[u8; 4])| match element {
        Element::Float32 => {
            let terms = (0..ranks).map(|rank| f64::from(float(rank, at)));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, a), term| (s + term, a + term.abs()));
            let error = (f64::from(f32::from_ne_bytes(*got)) - sum).abs();
            error.is_nan() || error > size * f64::from(f32::EPSILON) * ranks as f64
        }
        Element::Int32 | Element::Byte => {
            let sum = (0..ranks).fold(0i32, |sum, rank| sum.wrapping_add(int(rank, at)));
            i32::from_ne_bytes(*got) != sum
        }
    };
    result.as_chunks::<4>().0.iter().enumerate().filter(|pair| is_wrong(*pair)).count() as u64
}
