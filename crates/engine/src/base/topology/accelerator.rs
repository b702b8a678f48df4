//! Accelerators: where kernels run, and what starts them.

use std::path::PathBuf;

/// `[[accelerator]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Accelerator {
    /// Name that services use.
    pub name: String,
    /// Its kind.
    pub kind: AcceleratorKind,
}

/// Kinds of accelerators this engine can drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcceleratorKind {
    /// Kernels on host cores, as coroutines in the engine's process.
    Cpu {
        /// Where they run.
        placement: CpuPlacement,
        /// Stack of each block in KiB, in [[`STACK_KIB_MIN`], [`STACK_KIB_MAX`]].
        stack_kib: usize,
    },
    /// Kernels in a separate process for each service, which maps its own region only.
    Process {
        /// Who starts the process.
        launch: Launch,
        /// A runtime without a heartbeat for this long is lost, in milliseconds, in [[`HEARTBEAT_MS_MIN`], [`HEARTBEAT_MS_MAX`]].
        heartbeat_ms: u64,
        /// The processor of the kernels.
        device: DeviceSpec,
    },
}

impl AcceleratorKind {
    /// Whether its regions have pools. A runtime says by itself whether its blocks take bundles.
    pub fn takes_bundles(&self) -> bool {
        match self {
            Self::Cpu { .. } => true,
            Self::Process { device, .. } => device.bundles,
        }
    }
}

/// The processor that a runtime's kernels run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    /// `kind` in a configuration.
    pub kind: &'static str,
    /// Whether its kernels use a device library that takes bundles.
    pub bundles: bool,
    /// Values of the keys that are specific to this kind: numbers …
    pub settings: Vec<(&'static str, u64)>,
    /// … and texts.
    pub texts: Vec<(&'static str, String)>,
}

impl DeviceSpec {
    /// Host cores.
    pub fn host() -> Self {
        let settings = vec![("spin_us", SPIN_US)];
        Self { kind: "process", bundles: true, settings, texts: Vec::new() }
    }

    /// The value of one of its keys; 0 for a key it does not have.
    pub fn get(&self, key: &str) -> u64 {
        self.settings.iter().find(|(name, _)| *name == key).map_or(0, |(_, value)| *value)
    }

    /// The value of one of its keys that are texts; empty for a key it does not have.
    pub fn text(&self, key: &str) -> &str {
        self.texts.iter().find(|(name, _)| *name == key).map_or("", |(_, value)| value)
    }
}

/// Shortest `heartbeat_ms`.
pub const HEARTBEAT_MS_MIN: u64 = 100;
/// Longest `heartbeat_ms`.
pub const HEARTBEAT_MS_MAX: u64 = 600_000;
/// Default `heartbeat_ms`.
pub const HEARTBEAT_MS: u64 = 2_000;

/// Shortest `hang_ms`.
pub const HANG_MS_MIN: u64 = 100;
/// Longest `hang_ms`.
pub const HANG_MS_MAX: u64 = 3_600_000;
/// Default `hang_ms`, unless a service waits longer for a reply.
pub const HANG_MS: u64 = 10_000;

/// Smallest `stack_kib`.
pub const STACK_KIB_MIN: u64 = 16;
/// Largest `stack_kib`.
pub const STACK_KIB_MAX: u64 = 65_536;
/// Default `stack_kib`.
pub const STACK_KIB: usize = 64;

/// Default `spin_us` of accelerators of kind `process`: longer than a client's round trip.
pub const SPIN_US: u64 = 50;

/// Who starts a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Launch {
    /// The engine, which restarts it with increasing delays.
    Engine {
        /// Path of the `serval` program; `None`: the running one.
        program: Option<PathBuf>,
        /// Threads that share the blocks, 0: as many as suit them; ignored where blocks have no host threads.
        threads: usize,
        /// Cores to pin them to; empty: not pinned.
        cores: Vec<usize>,
        /// As in [`AcceleratorKind::Cpu`]; ignored where blocks have no stacks.
        stack_kib: usize,
    },
    /// Another process, which attaches at this path.
    External {
        /// A Unix socket.
        attach: PathBuf,
    },
}

/// Where `cpu` blocks run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpuPlacement {
    /// On the engine's workers, inside the turn.
    Worker,
    /// On dedicated accelerator threads.
    Threads {
        /// Number of threads; 0: as many as suit the blocks.
        threads: usize,
        /// Cores to pin them to; empty: not pinned.
        cores: Vec<usize>,
    },
}
