//! What the engine sees of an accelerator besides its region: something to drive once a turn.

/// Why blocks did not start; one sentence.
pub type StartError = Box<dyn std::error::Error + Send + Sync>;

/// One worker's share of an accelerator's blocks.
///
/// The worker publishes requests into RX rings, then calls [`Self::drive`]. Blocks that live on the
/// worker's own core run inside that call; blocks that live elsewhere (accelerator threads, a GPU)
/// are woken if they sleep. Either way the call reports which mqueues may hold messages from the
/// accelerator. Mqueue and block indices are those of the region.
pub trait Blocks: Send {
    /// Called once, by the thread that will drive the blocks and before it does. What takes long has
    /// been prepared elsewhere; blocks that run elsewhere have nothing left to do here.
    fn start(&mut self) -> Result<(), StartError> {
        Ok(())
    }

    /// `rang` lists the mqueues whose RX ring got messages since the last call. Appends to `touched`
    /// the mqueues whose TX ring may hold messages (each at most once; spurious ones are harmless,
    /// missed ones are not).
    fn drive(&mut self, now_ns: u64, rx_pending: &[u32], tx_pending: &mut Vec<u32>);

    /// When [`Self::drive`] must be called again even if nothing rings: monotonic nanoseconds;
    /// 0: at once (a block used up its budget), `u64::MAX`: no need.
    fn wake_at(&self) -> u64;

    /// Whether the blocks run on other threads or processes: they may have something to say although
    /// nobody rang.
    fn elsewhere(&self) -> bool {
        false
    }

    /// Whether the blocks run. If not, requests find no accelerator until the worker is notified
    /// that their generation began; see [`crate::RuntimeEvent`].
    fn present(&self) -> bool {
        true
    }

    /// The worker found impossible words in the rings of a block: it looks at them no more.
    fn condemn(&mut self, _block: u32) {}

    /// Blocks that ended or hang since the last call, with their [`mqueue::abi::reason`].
    fn ended(&mut self, into: &mut Vec<(u32, u64)>);
}
