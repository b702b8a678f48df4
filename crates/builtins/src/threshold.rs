//! Compares a number in each request with limits, and keeps statistics: the threshold function of NICA (USENIX ATC '19).
//!
//! The number is an unsigned 32-bit one, most significant byte first, at a fixed offset of the payload. Requests whose number is less than
//! `low` or greater than `high`, and requests that are too short to have one, are dropped. Replies pass.

use wire::DropReason;

use onpath::Messages;
use onpath::{Direction, Failure, Function, Merge, Register};

const NUMBER_BYTES: usize = 4;

/// Where NICA's threshold function has its number.
const OFFSET: usize = 14;
const LIMIT_MAX: u64 = u32::MAX as u64;

/// See the module's text.
pub struct Threshold {
    offset: usize,
    low: u64,
    high: u64,
    statistics: Statistics,
    registers: Vec<Register>,
}

#[derive(Clone, Copy)]
struct Statistics {
    min: u64,
    max: u64,
    count: u64,
    sum: u64,
    dropped: u64,
    short: u64,
}

/// Without any number `min` is greater than `max`.
const NONE: Statistics =
    Statistics { min: u32::MAX as u64, max: 0, count: 0, sum: 0, dropped: 0, short: 0 };

const REGISTERS: [(&str, Merge); 9] = [
    ("min", Merge::Min),
    ("max", Merge::Max),
    ("count", Merge::Sum),
    ("sum", Merge::Sum),
    ("dropped", Merge::Sum),
    ("short", Merge::Sum),
    ("offset", Merge::Setting),
    ("low", Merge::Setting),
    ("high", Merge::Setting),
];
const AT_OFFSET: usize = 6;
const AT_LOW: usize = 7;

impl Default for Threshold {
    /// Every number passes.
    fn default() -> Self {
        Self {
            offset: OFFSET,
            low: 0,
            high: LIMIT_MAX,
            statistics: NONE,
            registers: Register::list(&REGISTERS),
        }
    }
}

impl Threshold {
    fn number(&self, payload: &[u8]) -> Option<u64> {
        let bytes = payload.get(self.offset..)?.first_chunk::<NUMBER_BYTES>()?;
        Some(u32::from_be_bytes(*bytes).into())
    }
}

impl Function for Threshold {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Replies {
            return Ok(());
        }
        for index in 0..messages.len() {
            if !messages.is_open(index) {
                continue;
            }
            let Some(number) = self.number(messages.bytes(index)) else {
                self.statistics.short += 1;
                messages.drop(index, DropReason::TooShort);
                continue;
            };
            let seen = &mut self.statistics;
            seen.min = seen.min.min(number);
            seen.max = seen.max.max(number);
            seen.count += 1;
            seen.sum = seen.sum.wrapping_add(number);
            if number < self.low || number > self.high {
                seen.dropped += 1;
                messages.drop(index, DropReason::FunctionDrop);
            }
        }
        Ok(())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let Statistics { min, max, count, sum, dropped, short } = self.statistics;
        Ok(vec![min, max, count, sum, dropped, short, self.offset as u64, self.low, self.high])
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.statistics = NONE;
        Ok(())
    }

    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        let name = REGISTERS[register].0;
        if value > LIMIT_MAX {
            return Err(Failure(format!("{name} is at most {LIMIT_MAX}")));
        }
        match register {
            AT_OFFSET => self.offset = value as usize,
            AT_LOW => self.low = value,
            _ => self.high = value,
        }
        Ok(())
    }
}
