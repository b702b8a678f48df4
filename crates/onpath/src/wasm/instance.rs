//! An instance of a module, as a function of a chain.

use std::sync::Arc;

use wire::DropReason;

use super::descriptor::{DESCRIPTOR_BYTES, Decision, read_descriptor};
use super::running::{Limits, Running, START_TICKS, STATE_BYTES_MAX, Start, begin, failure};
use super::spares::Spares;
use super::{Module, printable};
use crate::dictionary::Dictionary;
use crate::function::{Direction, Failure, Function, Register};
use crate::messages::{MESSAGES_MAX, Messages};
use crate::spec::Sizes;

/// See the module's text.
pub struct Instance {
    start: Start,
    spares: Spares,
    /// The spares' thread ends after them.
    _module: Module,
    registers: Vec<Register>,
    /// Settings that were written, to be written again after a restart.
    settings: Vec<Option<u64>>,
    /// `None` after a failure.
    running: Option<Running>,
    /// The messages of a call, by their places in the batch.
    shown: Vec<u32>,
    /// The descriptors that a call has left, unless all messages pass.
    left: Vec<u8>,
}

impl Instance {
    pub(super) fn new(
        module: Module,
        limits: Limits,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<Self, String> {
        let Sizes { message_bytes, reply_bytes } = limits.sizes;
        let longest = message_bytes.max(reply_bytes);
        let messages_bytes = Messages::bytes_max(longest, longest);
        let compiled = module.compiled.clone();
        let mut start = Start { compiled, limits, dictionary, messages_bytes, registers: None };
        let (running, registers) = start.run(START_TICKS, &[])?;
        start.registers = Some(registers.clone());
        let settings = vec![None; registers.len()];
        let mut spares = Spares::new(&module.maker)?;
        spares.order(&start, &settings);
        Ok(Self {
            start,
            spares,
            _module: module,
            settings,
            registers,
            running: Some(running),
            shown: Vec::with_capacity(MESSAGES_MAX),
            left: Vec::with_capacity(MESSAGES_MAX * DESCRIPTOR_BYTES),
        })
    }

    /// Does something with the running instance; after a failure there is none.
    fn with<T>(
        &mut self,
        call: impl FnOnce(&mut Running) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Self { running, start, spares, .. } = self;
        let Some(alive) = running else {
            return Err(Failure("it is not restarted yet".to_owned()));
        };
        begin(&mut alive.store, &start.compiled, &start.limits);
        let done = call(alive);
        if done.is_err() {
            running.take().into_iter().for_each(|failed| spares.free(failed));
        }
        done
    }

    /// A setting has changed.
    fn set(&mut self, register: usize, value: u64) {
        self.settings[register] = Some(value);
        self.spares.outdate();
        self.spares.order(&self.start, &self.settings);
    }

    fn write_setting(&mut self, register: usize, value: u64) -> Result<i32, Failure> {
        self.with(|running| match running.write.clone() {
            None => Ok(-1),
            Some(write) => {
                write.call(&mut running.store, (register as u32, value)).map_err(failure)
            }
        })
    }

    fn is_shown_replies(&self) -> bool {
        self.running.as_ref().is_none_or(|running| running.replies.is_some())
    }
}

impl Function for Instance {
    fn decide(&mut self, direction: Direction, messages: &mut Messages) -> Result<(), Failure> {
        if direction == Direction::Replies && !self.is_shown_replies() {
            return Ok(());
        }
        let (mut shown, mut left) =
            (std::mem::take(&mut self.shown), std::mem::take(&mut self.left));
        let done = self.with(|running| {
            running.call(direction, messages, &mut shown, &mut left)?;
            let memory = running.memory.data(&running.store);
            let (descriptors, _) = left.as_chunks::<DESCRIPTOR_BYTES>();
            // All are checked before one has an effect.
            for descriptor in descriptors {
                read_descriptor(descriptor, memory.len()).map_err(Failure)?;
            }
            for (index, descriptor) in shown.iter().zip(descriptors) {
                let index = *index as usize;
                match read_descriptor(descriptor, memory.len()).map_err(Failure)? {
                    Decision::Pass => {}
                    Decision::Drop => messages.drop(index, DropReason::FunctionDrop),
                    Decision::Steer(mqueue) => messages.steer(index, mqueue),
                    Decision::Deliver if direction == Direction::Requests => {
                        messages.deliver(index);
                    }
                    Decision::Deliver => {}
                    Decision::Reply(start, len) if direction == Direction::Requests => {
                        messages.reply(index, &memory[start..start + len]);
                    }
                    Decision::Reply(start, len) | Decision::Rewrite(start, len) => {
                        messages.rewrite(index, &memory[start..start + len]);
                    }
                }
            }
            Ok(())
        });
        (self.shown, self.left) = (shown, left);
        done
    }

    fn restart(&mut self) -> Result<bool, Failure> {
        if self.running.is_none() {
            let taken = self.spares.take();
            self.spares.order(&self.start, &self.settings);
            self.running = taken.transpose()?;
        }
        Ok(self.running.is_some())
    }

    fn registers(&self) -> &[Register] {
        &self.registers
    }

    fn read(&mut self) -> Result<Vec<u64>, Failure> {
        let count = self.registers.len() as u32;
        self.with(|running| {
            let Some(read) = running.read.clone() else { return Ok(Vec::new()) };
            (0..count).map(|at| read.call(&mut running.store, at).map_err(failure)).collect()
        })
    }

    fn state(&mut self) -> Result<Vec<u8>, Failure> {
        self.with(|running| running.state().map(<[u8]>::to_vec))
    }

    fn state_bytes(&mut self) -> Result<u64, Failure> {
        self.with(|running| running.state().map(|state| state.len() as u64))
    }

    fn merge(&mut self, state: &[u8]) -> Result<(), Failure> {
        let refused = || Failure("it does not take the state of another instance".to_owned());
        if state.len() > STATE_BYTES_MAX {
            return Err(refused());
        }
        self.with(|running| {
            let Running { store, memory, merge, window, .. } = running;
            let Some(merge) = merge else { return Err(refused()) };
            // The window has room for it where messages are during other calls.
            memory.data_mut(&mut *store)[*window..][..state.len()].copy_from_slice(state);
            let arguments = (*window as u32, state.len() as u32);
            match merge.call(&mut *store, arguments).map_err(failure)? {
                0 => Ok(()),
                _ => Err(refused()),
            }
        })
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.with(|running| match running.reset.clone() {
            None => Ok(()),
            Some(reset) => reset.call(&mut running.store, ()).map_err(failure),
        })
    }

    fn write(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        let refused = self.write_setting(register, value)?;
        if refused != 0 {
            let name = printable(&self.registers[register].name);
            return Err(Failure(format!("it does not take {value} as {name}")));
        }
        self.set(register, value);
        Ok(())
    }

    fn write_at_restart(&mut self, register: usize, value: u64) -> Result<(), Failure> {
        self.set(register, value);
        Ok(())
    }
}
