//! What the NVIDIA driver shows, without loading it into this process: another one is asked, because a driver that is
//! out of order may hang or crash, and because an engine never has it in its memory.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use accel::cuda;
use serde_json::Value as Json;
use sys::probe::{Capability, State};

/// How long a driver may take to answer; the first program on a sleeping GPU waits for seconds.
const DRIVER_PATIENCE: Duration = Duration::from_secs(20);

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenGpu {
    /// Its number, from 0, as CUDA_VISIBLE_DEVICES leaves it.
    pub(crate) index: u32,
    pub(crate) name: String,
    /// Why it cannot serve; none when it can.
    pub(crate) unfit: Option<String>,
    /// All of it, for people.
    line: String,
}

/// Replaces what was found about CUDA, if a driver was found, by what the driver says.
pub(crate) fn examine(found: &mut [Capability]) {
    let cuda = found.iter_mut().find(|capability| capability.name == "cuda");
    let Some(cuda) = cuda.filter(|cuda| cuda.state == State::Available) else { return };
    let lines =
        |gpus: Vec<SeenGpu>| gpus.iter().map(|gpu| gpu.line.clone()).collect::<Vec<_>>().join("; ");
    let (state, why, remedy) = match ask().map(lines) {
        Err(why) => (State::Off, why, "see what `serval doctor --gpus` and `nvidia-smi` say"),
        Ok(why) if cuda::built_in() => (State::Available, why, ""),
        Ok(why) => (
            State::Degraded,
            format!("{why}; no kernels for it are built into this program"),
            "`make cuda-kernels` and build again; fatbin files of your own work without",
        ),
    };
    (cuda.state, cuda.why, cuda.remedy) = (state, why, remedy.to_owned());
}

/// The GPUs, at least one; or in one sentence why there are none.
pub(crate) fn ask() -> Result<Vec<SeenGpu>, String> {
    let sentence = |error: std::io::Error| format!("the driver cannot be asked: {error}");
    let program = std::env::current_exe().map_err(sentence)?;
    let mut command = Command::new(program);
    command.args(["doctor", "--gpus", "--json"]).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(sentence)?;
    let deadline = Instant::now() + DRIVER_PATIENCE;
    while child.try_wait().map_err(sentence)?.is_none() {
        if Instant::now() >= deadline {
            // It may be stuck in the host kernel; either way nobody waits for it.
            let _ = child.kill();
            return Err(format!("the driver gave no answer for {} s", DRIVER_PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().map_err(sentence)?;
    let answer: Json = serde_json::from_slice(&output.stdout)
        .map_err(|_| format!("the driver ended its process ({})", output.status))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(error.to_owned());
    }
    let gpus: Vec<SeenGpu> =
        (answer["gpus"].as_array().into_iter().flatten()).filter_map(read).collect();
    if gpus.is_empty() { Err("the driver shows no GPU".to_owned()) } else { Ok(gpus) }
}

fn read(gpu: &Json) -> Option<SeenGpu> {
    Some(SeenGpu {
        index: gpu["index"].as_u64()?.try_into().ok()?,
        name: gpu["name"].as_str()?.to_owned(),
        unfit: gpu["unfit"].as_str().map(str::to_owned),
        line: gpu["line"].as_str()?.to_owned(),
    })
}
