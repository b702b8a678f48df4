//! What the NVIDIA driver shows, without loading it into this process: another one is asked, because a driver that is
//! out of order may hang or crash, and because an engine never has it in its memory.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use accel::cuda;
use serde_json::Value as Json;
use sys::probe::{Capability, State};
use sys::process::find_program;

/// How long a driver may take to answer; the first program on a sleeping GPU waits for seconds.
const DRIVER_PATIENCE: Duration = Duration::from_secs(20);

/// How long `nvidia-smi` may take.
const SMI_PATIENCE: Duration = Duration::from_secs(10);

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenGpu {
    /// Its number, from 0, as CUDA_VISIBLE_DEVICES leaves it.
    pub(crate) index: u32,
    pub(crate) name: String,
    /// Why it cannot serve; none when it can.
    pub(crate) unfit: Option<String>,
    /// Where it is on the PCI bus: `nvidia-smi` does not know its number, which CUDA_VISIBLE_DEVICES changes.
    bus_id: String,
    /// Its architecture, such as `sm_90`.
    architecture: String,
    /// One process at a time.
    exclusive: bool,
    /// Kernels are loaded when they are first started.
    lazy: bool,
    /// The built-in kernels have code for it.
    code: bool,
    /// All of it, for people.
    line: String,
}

/// Replaces what was found about CUDA, if a driver was found, by what the driver says, and adds what else matters on a
/// machine with GPUs.
pub(crate) fn examine(found: &mut Vec<Capability>) {
    let cuda = found.iter_mut().find(|capability| capability.name == "cuda");
    let Some(cuda) = cuda.filter(|cuda| cuda.state != State::Off) else { return };
    let remedy = "see what `serval doctor --gpus` and `nvidia-smi` say".to_owned();
    match ask() {
        Err(why) => (cuda.state, cuda.why, cuda.remedy) = (State::Off, why, remedy),
        Ok(gpus) => {
            (cuda.state, cuda.why, cuda.remedy) = sum_up(gpus.iter().map(SeenGpu::judge).collect());
            found.extend(persistence());
            found.push(mps());
        }
    }
}

/// What is said of all GPUs. The best decides, because one is enough to serve; it comes first, and what is with the
/// others are notes.
fn sum_up(mut judged: Vec<(State, String, String)>) -> (State, String, String) {
    judged.sort_by_key(|(state, ..)| rank(*state));
    let (state, _, remedy) = judged[0].clone();
    let whys: Vec<String> = judged.into_iter().map(|(_, why, _)| why).collect();
    (state, whys.join("; "), remedy)
}

fn rank(state: State) -> u8 {
    match state {
        State::Available => 0,
        State::Degraded => 1,
        State::Off => 2,
    }
}

impl SeenGpu {
    /// What it is good for, as it is.
    fn judge(&self) -> (State, String, String) {
        let Self { bus_id, architecture, .. } = self;
        if self.unfit.is_some() {
            let remedy = "use another GPU, or do what the line says".to_owned();
            return (State::Off, self.line.clone(), remedy);
        }
        let own = format!("kernels of your own: `serval kernel build --gpu {architecture}`");
        let mut notes = Vec::new();
        if !cuda::built_in() {
            let remedy = format!("`make cuda-kernels` and build again; {own}");
            notes.push(("no kernels for it are built into this program".to_owned(), remedy));
        } else if !self.code {
            notes.push((format!("the built-in kernels have no code for {architecture}"), own));
        }
        if self.exclusive {
            let what = "compute mode EXCLUSIVE_PROCESS: one process at a time, so services of one \
                        accelerator and tenant only";
            notes.push((what.to_owned(), format!("`nvidia-smi -i {bus_id} -c DEFAULT`")));
        }
        if self.lazy {
            let remedy = "set CUDA_MODULE_LOADING=EAGER, or install a driver of CUDA 12.4 or later";
            let what = "this driver loads kernels when they are first started";
            notes.push((what.to_owned(), remedy.to_owned()));
        }
        let state = if notes.is_empty() { State::Available } else { State::Degraded };
        let (whys, remedies): (Vec<_>, Vec<_>) = notes.into_iter().unzip();
        let why = [vec![self.line.clone()], whys].concat().join("; ");
        (state, why, remedies.join("; "))
    }
}

/// Whether the driver stays ready while nobody uses a GPU; none where nothing tells.
fn persistence() -> Option<Capability> {
    let query = ["--query-gpu=persistence_mode", "--format=csv,noheader"];
    let mut smi = Command::new(find_program("nvidia-smi")?);
    let output = run(smi.args(query), SMI_PATIENCE).ok()?;
    let modes = String::from_utf8_lossy(&output.stdout).into_owned();
    let name = "gpu-persistence";
    if !output.status.success() || modes.trim().is_empty() {
        return None;
    }
    if modes.lines().all(|mode| mode.trim() == "Enabled") {
        let why = "the driver stays ready between programs".to_owned();
        return Some(Capability { name, state: State::Available, why, remedy: String::new() });
    }
    let why =
        "off: a runtime that starts on an idle GPU waits for the driver, for seconds".to_owned();
    let remedy = "`nvidia-smi -pm 1` as root, or let nvidia-persistenced run".to_owned();
    Some(Capability { name, state: State::Degraded, why, remedy })
}

/// Whether programs share GPUs at the same time.
fn mps() -> Capability {
    if let Some(folder) = cuda::mps_folder() {
        let why = format!(
            "on, at {}: programs share a GPU at the same time, and a kernel's fault ends them all",
            folder.display()
        );
        return Capability { name: "gpu-mps", state: State::Available, why, remedy: String::new() };
    }
    super::missing(
        "gpu-mps",
        "no MPS daemon: programs on one GPU take turns of milliseconds".to_owned(),
        "only for several programs on one GPU: `nvidia-cuda-mps-control -d`",
    )
}

/// What a program says within this time.
fn run(command: &mut Command, timeout: Duration) -> Result<Output, String> {
    let sentence = |error: std::io::Error| format!("the driver cannot be asked: {error}");
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(sentence)?;
    let deadline = Instant::now() + timeout;
    while child.try_wait().map_err(sentence)?.is_none() {
        if Instant::now() >= deadline {
            // It may be stuck in the host kernel; either way nobody waits for it.
            let _ = child.kill();
            return Err(format!("the driver gave no answer for {} s", timeout.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().map_err(sentence)
}

/// The GPUs, at least one; or in one sentence why there are none.
pub(crate) fn ask() -> Result<Vec<SeenGpu>, String> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| format!("the driver cannot be asked: {error}"))?;
    let output = run(Command::new(program).args(["doctor", "--gpus", "--json"]), DRIVER_PATIENCE)?;
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
        bus_id: gpu["bus_id"].as_str()?.to_owned(),
        unfit: gpu["unfit"].as_str().map(str::to_owned),
        architecture: format!(
            "sm_{}{}",
            gpu["capability"][0].as_u64()?,
            gpu["capability"][1].as_u64()?
        ),
        exclusive: gpu["exclusive"].as_bool()?,
        lazy: gpu["lazy"].as_bool()?,
        code: gpu["code"].as_bool()?,
        line: gpu["line"].as_str()?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_gpu_comes_with_its_remedy() {
        let sound = SeenGpu {
            index: 3,
            name: "A".to_owned(),
            bus_id: "0000:65:00.0".to_owned(),
            unfit: None,
            architecture: "sm_90".to_owned(),
            exclusive: false,
            lazy: false,
            code: true,
            line: "GPU 3: A".to_owned(),
        };
        let judge = |gpu: SeenGpu| gpu.judge();
        let (state, why, remedy) = judge(sound.clone());
        assert_eq!(state == State::Available, cuda::built_in(), "{why}");
        assert_eq!(state == State::Available, remedy.is_empty(), "{remedy}");
        let (state, why, remedy) = judge(SeenGpu { lazy: true, ..sound.clone() });
        assert_eq!(state, State::Degraded);
        assert!(
            why.contains("first started") && remedy.contains("CUDA_MODULE_LOADING=EAGER"),
            "{why}: {remedy}"
        );
        let (_, why, remedy) = judge(SeenGpu { exclusive: true, lazy: true, ..sound.clone() });
        assert!(why.contains("EXCLUSIVE_PROCESS") && why.contains("first started"), "{why}");
        assert!(remedy.contains("`nvidia-smi -i 0000:65:00.0 -c DEFAULT`; set CUDA"), "{remedy}");
        let (_, why, remedy) = judge(SeenGpu { code: false, ..sound.clone() });
        assert!(!cuda::built_in() || why.contains("no code for sm_90"), "{why}");
        assert!(remedy.contains("serval kernel build --gpu sm_90"), "{remedy}");
        let unfit = Some("is too old".to_owned());
        assert_eq!(judge(SeenGpu { unfit, lazy: true, ..sound }).0, State::Off);
    }
}
