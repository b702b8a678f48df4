//! `kind = "cpu"`: host cores, inside the engine. What runs its blocks is in `accel::cpu`.

use engine::topology::DeviceSpec;

use super::{Flags, Kind, Options};
use crate::Device;

pub(super) struct Cpu;

impl Kind for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn summary(&self) -> &'static str {
        "inside the engine's process"
    }

    fn flags(&self) -> Flags {
        Flags { in_engine: true, host_threads: true, stack_kib: true, elsewhere: false }
    }

    fn device(&self, _: &DeviceSpec, _: Options) -> Result<Box<dyn Device>, String> {
        Err("a cpu accelerator runs inside the engine: write kind = \"process\" to attach"
            .to_owned())
    }
}
