//! A kernel as a plain function: one message in, one reply out, on the caller's thread.
//!
//! It is the same compiled kernel that a service runs, with one private mqueue. The mqueue adds a fraction of a
//! microsecond.

use std::time::Duration;

use accel::cpu::{Options, WorkerBlocks};
use accel::{AccelError, Kernel};
use engine::accelerator::Blocks as _;
use engine::topology::ParamValue;
use mqueue::abi::kind;
use mqueue::{Consumer, Head, HeapMapping, MappedMemory, MqueuePlan, Producer, Region, RegionPlan};
use mqueue::{RingPlan, Words};
use sys::time::monotonic_ns;

/// A kernel as a function. Bound to the thread that created it.
pub struct KernelFunction {
    to: Producer<MappedMemory>,
    from: Consumer<MappedMemory>,
    words: Words<MappedMemory>,
    blocks: WorkerBlocks,
    touched: Vec<u32>,
    calls: u64,
}

/// Why a call returned no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The message is longer than the kernel was opened for.
    #[error("the message is longer than the kernel was opened for")]
    TooLong,
    /// The kernel dropped the message.
    #[error("it dropped the message")]
    Dropped,
    /// The kernel did not answer within a second, or ended.
    #[error("it did not answer within a second, or ended")]
    Silent,
}

impl KernelFunction {
    /// Opens a kernel for messages and replies of at most these lengths.
    pub fn open(
        kernel: &str,
        params: &[(String, ParamValue)],
        max_message_bytes: u32,
        max_reply_bytes: u32,
    ) -> Result<Self, AccelError> {
        let kernel = Kernel::find(kernel)?;
        let ring = |max| RingPlan::doorbell(max, 0);
        let (rx, tx) = (ring(max_message_bytes), ring(max_reply_bytes));
        let mqueues = vec![MqueuePlan { depth: 2, rx, tx }];
        let plan = RegionPlan::of_blocks(1, &mqueues, 1);
        let bytes = plan.bytes().expect("a plan of one mqueue") as usize;
        let memory = HeapMapping::memory(bytes);
        let mut region = Region::format(memory.clone(), &plan).expect("memory of that size");
        let (to, from) = region.engine_ends(0);
        let words = region.words();
        let blocks = WorkerBlocks::start(memory, kernel, params, &[0], &Options::default())?;
        Ok(Self { to, from, words, blocks, touched: Vec::new(), calls: 0 })
    }

    /// Calls the kernel; its reply replaces the content of `reply`.
    pub fn call(&mut self, message: &[u8], reply: &mut Vec<u8>) -> Result<(), CallError> {
        reply.clear();
        self.calls += 1;
        // Otherwise the kernel would assume that its engine has ended.
        self.words.set_engine_heartbeat(self.calls);
        let head = Head { token: self.calls, kind: kind::MESSAGE, ..Head::default() };
        self.to.push(head, message).map_err(|_| CallError::TooLong)?;
        self.to.publish();
        let begin_ns = monotonic_ns();
        let mut now_ns = begin_ns;
        while now_ns - begin_ns < Duration::from_secs(1).as_nanos() as u64 {
            self.blocks.drive(now_ns, &[0], &mut self.touched);
            self.touched.clear();
            if let Some(header) = self.from.peek().map_err(|_| CallError::Silent)? {
                reply.resize(header.len as usize, 0);
                let whole = self.from.copy_out(&header, reply);
                self.from.advance();
                self.from.release();
                // The answer to an earlier call that timed out.
                if header.token != self.calls {
                    continue;
                }
                let answered = whole && header.kind == kind::MESSAGE;
                return if answered { Ok(()) } else { Err(CallError::Dropped) };
            }
            now_ns = monotonic_ns();
        }
        Err(CallError::Silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_called_as_a_function() {
        let mut scale = KernelFunction::open("scale", &[], 1024, 1024).unwrap();
        let mut reply = Vec::new();
        for n in 1..100u8 {
            let message: Vec<u8> = (0..n).flat_map(|i| f32::from(i).to_le_bytes()).collect();
            let expected: Vec<u8> =
                (0..n).flat_map(|i| (3.0 * f32::from(i)).to_le_bytes()).collect();
            assert_eq!(scale.call(&message, &mut reply), Ok(()));
            assert_eq!(reply, expected);
        }
        assert_eq!(scale.call(&[0; 3], &mut reply), Err(CallError::Dropped));
        assert_eq!(scale.call(&[0; 1025], &mut reply), Err(CallError::TooLong));
        assert_eq!(scale.call(&[0; 4], &mut reply), Ok(()));
    }

    #[test]
    fn a_kernel_may_be_slow() {
        let params = [("microseconds".to_owned(), 2000.0.into())];
        let mut delay = KernelFunction::open("delay", &params, 64, 64).unwrap();
        let mut reply = Vec::new();
        assert_eq!(delay.call(b"hello", &mut reply), Ok(()));
        assert_eq!(reply, b"hello");
    }
}
