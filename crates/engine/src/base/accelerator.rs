//! What the engine needs of an accelerator besides its region: a driver that is called once a turn.

/// Why blocks did not start, in one sentence.
pub type StartError = Box<dyn std::error::Error + Send + Sync>;

/// One worker's share of an accelerator's blocks.
///
/// The worker publishes requests into RX rings, then calls [`Self::drive`]. Blocks on the worker's own core run
/// inside that call; blocks on other threads, in other processes or on a GPU are woken if they sleep. The call
/// reports which mqueues may hold messages from the accelerator. Mqueue and block indices are those of the region.
pub trait Blocks: Send {
    /// Called once, by the thread that will drive the blocks, before the first drive. Slow preparations happen
    /// earlier on another thread; blocks that do not run on the worker have nothing to do here.
    fn start(&mut self) -> Result<(), StartError> {
        Ok(())
    }

    /// `rang` lists the mqueues whose RX ring got messages since the last call. Appends to `touched`
    /// the mqueues whose TX ring may hold messages (each at most once; spurious ones are harmless,
    /// missed ones are not).
    fn drive(&mut self, now_ns: u64, rx_pending: &[u32], tx_pending: &mut Vec<u32>);

    /// When [`Self::drive`] must be called again even without new messages, in monotonic nanoseconds; 0: at once (a
    /// block used up its budget), `u64::MAX`: no need.
    fn wake_at(&self) -> u64;

    /// Whether the blocks run on other threads or in other processes: they may produce messages while this worker is
    /// idle.
    fn runs_off_thread(&self) -> bool {
        false
    }

    /// Whether the blocks run. If not, requests are dropped for lack of an accelerator until the worker gets the
    /// event that their generation has started; see [`crate::RuntimeEvent`].
    fn present(&self) -> bool {
        true
    }

    /// Whether their library takes bundles. Asked when their generation has started.
    fn takes_bundles(&self) -> bool {
        true
    }

    /// The worker found impossible words in the rings of a block: the block is not driven any more.
    fn disable_block(&mut self, _block: u32) {}

    /// Blocks that ended or hang since the last call, with their [`mqueue::abi::reason`].
    fn ended(&mut self, into: &mut Vec<(u32, u64)>);
}
