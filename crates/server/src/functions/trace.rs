//! Traces: what the next messages of a service meet on its chain.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use engine::{ChainPlace, ChainReply, ChainRequest, ControlMessage};
use onpath::{TRACED_MAX, Trace, Traced};

use super::error::FunctionError;
use super::objects::{Functions, Tracing};
use super::path::ChainOf;
use crate::base::caller::Caller;
use crate::base::engine::Engine;

/// A message of a trace, with the names of the functions that it met.
pub struct TracedMessage {
    /// Its worker.
    pub worker: usize,
    /// What it met.
    pub traced: Traced,
    /// By step.
    pub functions: Vec<String>,
}

impl Functions {
    /// Begins to trace the next `count` messages of a service. A trace of the same service that runs is given up.
    pub fn begin_trace(
        &mut self,
        engine: &Engine,
        caller: Caller,
        service: &str,
        count: usize,
    ) -> Result<(), FunctionError> {
        let place = self.traceable(engine, caller, service)?.0;
        if !(1..=TRACED_MAX).contains(&count) {
            return Err(FunctionError::TraceCount(count));
        }
        let recorded: Vec<Arc<AtomicUsize>> =
            (0..engine.fabric.workers()).map(|_| Arc::default()).collect();
        let (reply, replies) = mpsc::channel();
        for (worker, recorded) in (0..).zip(&recorded) {
            let trace = Box::new(Trace::new(count, recorded.clone()));
            let request = ChainRequest::Trace(Some(trace));
            engine.fabric.post(worker, ControlMessage::Chain(place, request, reply.clone()));
        }
        drop(reply);
        for _ in 0..engine.fabric.workers() {
            self.next_reply(engine, &replies)?;
        }
        self.traces.retain(|trace| trace.place != place);
        self.traces.push(Tracing { place, count, recorded });
        Ok(())
    }

    /// What was traced, in the order of time, if all messages were or with `stop`; it ends the trace. `Err` in it: how many there are.
    pub fn end_trace(
        &mut self,
        engine: &Engine,
        caller: Caller,
        service: &str,
        stop: bool,
    ) -> Result<Result<Vec<TracedMessage>, usize>, FunctionError> {
        let (place, chain) = self.traceable(engine, caller, service)?;
        let of_service = self.traces.iter().position(|trace| trace.place == place);
        let Some(at) = of_service else {
            return Err(FunctionError::NoTrace(service.to_owned()));
        };
        let Tracing { count, ref recorded, .. } = self.traces[at];
        let sum: usize = recorded.iter().map(|recorded| recorded.load(Ordering::Acquire)).sum();
        if sum < count && !stop {
            return Ok(Err(sum));
        }
        self.traces.remove(at);
        let mut found = Vec::new();
        for worker in 0..engine.fabric.workers() {
            let (reply, replies) = mpsc::channel();
            let request = ChainRequest::Trace(None);
            engine.fabric.post(worker as u16, ControlMessage::Chain(place, request, reply));
            if let ChainReply::Traced(Some(trace)) = self.next_reply(engine, &replies)? {
                found.extend(trace.into_entries().into_iter().map(|traced| (worker, traced)));
            }
        }
        found.sort_by_key(|(_, traced)| traced.at_ns);
        found.truncate(count);
        let name = |link: u64| {
            let found = self.functions_on(chain).find(|function| function.link == link);
            found.map_or("(gone)".to_owned(), |function| function.object.spec.name.clone())
        };
        let named = found.into_iter().map(|(worker, traced)| {
            let functions = traced.steps.iter().map(|step| name(step.link)).collect();
            TracedMessage { worker, traced, functions }
        });
        Ok(Ok(named.collect()))
    }

    /// A chain whose functions the caller may all see.
    fn traceable(
        &self,
        engine: &Engine,
        caller: Caller,
        service: &str,
    ) -> Result<(ChainPlace, ChainOf), FunctionError> {
        let chain = self.chain_for(engine, caller, service)?;
        let mut functions = self.functions_on(chain).peekable();
        if functions.peek().is_none() {
            return Err(FunctionError::NothingToTrace(service.to_owned()));
        }
        if functions.any(|function| !function.object.is_of(caller)) {
            return Err(FunctionError::TraceOfOthers(service.to_owned()));
        }
        let slot = engine.slots[chain.service].slot;
        Ok((ChainPlace { slot, backend: chain.backend }, chain))
    }
}
