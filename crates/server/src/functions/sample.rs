//! What functions count themselves, for the page of metrics: their registers, and how long their states are.
//!
//! The thread that owns the server asks the workers, and takes their answers when it asks again. It never waits for one.

use std::sync::mpsc;

use engine::metrics::{FunctionMetrics, FunctionSample};
use engine::{ChainPlace, ChainReply, ChainRequest, ControlMessage};
use onpath::{Command, CommandError, Merge, Reading, Register};

use super::objects::Functions;
use crate::base::engine::Engine;

/// The question about one function.
#[derive(Default)]
pub(super) struct Sampling {
    replies: Option<mpsc::Receiver<ChainReply>>,
    readings: Vec<Reading>,
    /// It has failed when it was asked: it is not asked again, so that this alone does not restart it again and again.
    failed: bool,
}

impl Sampling {
    /// Takes the answers that there are. Returns whether to ask again.
    fn collect(&mut self, workers: usize, of: &[Register], metrics: &FunctionMetrics) -> bool {
        let Some(replies) = &self.replies else { return !self.failed };
        loop {
            match replies.try_recv() {
                Ok(ChainReply::Command(Ok(reading))) => self.readings.push(reading),
                Ok(ChainReply::Command(Err(CommandError::Failed(_)))) => self.failed = true,
                Ok(_) => {}
                Err(mpsc::TryRecvError::Empty) => return false,
                Err(mpsc::TryRecvError::Disconnected) => break,
            }
        }
        self.replies = None;
        let readings = std::mem::take(&mut self.readings);
        // While it restarts on a worker the values of the others alone would be too small.
        if readings.len() == workers {
            metrics.set_sample(sample(of, &readings));
        }
        !self.failed
    }
}

fn sample(registers: &[Register], readings: &[Reading]) -> FunctionSample {
    let merged = |(index, register): (usize, &Register)| {
        let values = readings.iter().filter_map(|reading| reading.values.get(index).copied());
        let value = values.reduce(|a, b| register.merge.merge(a, b))?;
        Some((register.name.clone(), value))
    };
    // What follows from all states together is read by a command.
    let shown = registers.iter().enumerate().filter(|(_, of)| of.merge != Merge::State);
    let state_bytes = readings.iter().map(|reading| reading.state_bytes).sum();
    FunctionSample { registers: shown.filter_map(merged).collect(), state_bytes }
}

impl Functions {
    /// Takes the registers that workers have answered, and asks for those of now.
    pub fn sample(&mut self, engine: &Engine) {
        let workers = engine.fabric.workers();
        for (chain, slot) in self.chains.iter_mut().zip(&engine.slots) {
            for function in chain.iter_mut().filter(|f| !f.registers.is_empty()) {
                if !function.sampling.collect(workers, &function.registers, &function.metrics) {
                    continue;
                }
                let (reply, replies) = mpsc::channel();
                let place = ChainPlace { slot: slot.slot, backend: function.backend };
                let link = function.link;
                engine.fabric.post_to_all(|_| {
                    let request = ChainRequest::Command(link, Command::Sample);
                    ControlMessage::Chain(place, request, reply.clone())
                });
                function.sampling.replies = Some(replies);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_merged_over_workers_and_complete() {
        let names = [("sum", Merge::Sum), ("least", Merge::Min), ("most", Merge::Max)];
        let others = [("high", Merge::Setting), ("estimate", Merge::State)];
        let registers: Vec<Register> = names
            .into_iter()
            .chain(others)
            .map(|(name, merge)| Register { name: name.into(), merge })
            .collect();
        let reading = |values: [u64; 5]| Reading {
            values: values.to_vec(),
            state: Vec::new(),
            state_bytes: 100,
        };
        let metrics = FunctionMetrics::new("s".into(), "f".into(), 2);
        let (reply, replies) = mpsc::channel();
        let mut sampling = Sampling { replies: Some(replies), ..Sampling::default() };
        reply.send(ChainReply::Command(Ok(reading([1, 5, 5, 9, 1])))).unwrap();
        assert!(!sampling.collect(2, &registers, &metrics), "one worker has not answered");
        assert_eq!(metrics.sample(), None);
        reply.send(ChainReply::Command(Ok(reading([2, 3, 3, 9, 2])))).unwrap();
        drop(reply);
        assert!(sampling.collect(2, &registers, &metrics));
        let sample = metrics.sample().unwrap();
        let found: Vec<_> = sample.registers.iter().map(|(name, v)| (&**name, *v)).collect();
        assert_eq!(found, [("sum", 3), ("least", 3), ("most", 5), ("high", 9)]);
        assert_eq!(sample.state_bytes, 200);
        // A worker on which it restarts does not count: the sample stays. One on which it fails ends the questions.
        for (error, again) in [
            (CommandError::Failing, true),
            (CommandError::Failed(onpath::Failure("x".into())), false),
        ] {
            let (reply, replies) = mpsc::channel();
            sampling.replies = Some(replies);
            reply.send(ChainReply::Command(Err(error))).unwrap();
            reply.send(ChainReply::Command(Ok(reading([7; 5])))).unwrap();
            drop(reply);
            assert_eq!(sampling.collect(2, &registers, &metrics), again);
            assert_eq!(metrics.sample().unwrap(), sample);
        }
        assert!(!sampling.collect(2, &registers, &metrics));
    }
}
