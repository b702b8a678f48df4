//! Answers `ping`, drops requests that are longer than a limit, and counts both.

use std::ffi::CStr;

use serval_function::{Batch, Function, Merge};

mod serval_function;

struct Ping {
    pings: u64,
    dropped: u64,
    longest: u64,
}

impl Default for Ping {
    fn default() -> Self {
        Self { pings: 0, dropped: 0, longest: 1024 }
    }
}

impl Function for Ping {
    const REGISTERS: &'static [(&'static CStr, Merge)] =
        &[(c"pings", Merge::Sum), (c"dropped", Merge::Sum), (c"longest", Merge::Setting)];

    fn requests(&mut self, batch: &mut Batch<'_>) {
        for index in 0..batch.len() {
            let payload = batch.payload(index);
            if payload == b"ping" {
                self.pings += 1;
                batch.reply_or_drop(index, b"pong");
            } else if payload.len() as u64 > self.longest {
                self.dropped += 1;
                batch.drop(index);
            }
        }
    }

    fn read(&self, register: usize) -> u64 {
        [self.pings, self.dropped, self.longest].get(register).copied().unwrap_or(0)
    }

    fn write(&mut self, register: usize, value: u64) -> bool {
        if register == 2 {
            self.longest = value;
        }
        register == 2
    }

    fn reset(&mut self) {
        (self.pings, self.dropped) = (0, 0);
    }
}

serval_function!(Ping);
