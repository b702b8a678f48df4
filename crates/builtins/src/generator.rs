//! Answers each request with a message that it makes: a number that counts up, then one byte again and again. For measuring how fast replies leave.

use onpath::Messages;
use onpath::{Direction, Failure, Function, Merge, Register};

/// Longest message, in bytes: NICA's packet generator has this one.
const LENGTH_MAX: u64 = 2048;

const REGISTERS: [(&str, Merge); 3] =
    [("generated", Merge::Sum), ("length", Merge::Setting), ("byte", Merge::Setting)];
const AT_LENGTH: usize = 1;

/// See the module's text.
pub struct Generator {
    generated: u64,
    length: usize,
    byte: u8,
    registers: Vec<Register>,
}

impl Default for Generator {
    fn default() -> Self {
        Self { generated: 0, length: 64, byte: b'.', registers: Register::list(&REGISTERS) }
    }
}

impl Function for Generator {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Replies {
            return Ok(());
        }
        for index in 0..messages.len() {
            if !messages.is_open(index) {
                continue;
            }
            let (number, byte) = (self.generated.to_be_bytes(), self.byte);
            messages.reply_with(index, self.length, |_, reply| {
                let (head, rest) = reply.split_at_mut(number.len().min(reply.len()));
                head.copy_from_slice(&number[number.len() - head.len()..]);
                rest.fill(byte);
            });
            self.generated += 1;
        }
        Ok(())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        Ok(vec![self.generated, self.length as u64, self.byte.into()])
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.generated = 0;
        Ok(())
    }

    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        let name = REGISTERS[register].0;
        let max = if register == AT_LENGTH { LENGTH_MAX } else { u8::MAX.into() };
        if value > max {
            return Err(Failure(format!("{name} is at most {max}")));
        }
        match register {
            AT_LENGTH => self.length = value as usize,
            _ => self.byte = value as u8,
        }
        Ok(())
    }
}
