//! The GPUs that the NVIDIA driver shows. The driver is not loaded into this process: a child process queries it,
//! because a faulty driver may hang or crash, and because an engine never loads it.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use accel::cuda;
use serde_json::Value as Json;
use sys::probe::{Capability, State};
use sys::process::find_program;

/// Time limit of the driver; the first program on a sleeping GPU waits for seconds.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(20);

/// Time limit of `nvidia-smi`.
const SMI_TIMEOUT: Duration = Duration::from_secs(10);

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedGpu {
    /// Its number, from 0, after CUDA_VISIBLE_DEVICES.
    pub(crate) index: u32,
    pub(crate) name: String,
    /// Why it cannot serve; `None` if it can.
    pub(crate) unfit: Option<String>,
    /// Its PCI bus id: `nvidia-smi` does not know its number, which CUDA_VISIBLE_DEVICES changes.
    bus_id: String,
    /// Its architecture, such as `sm_90`.
    architecture: String,
    /// It accepts one process at a time.
    exclusive: bool,
    /// Kernels are loaded at their first start.
    lazy: bool,
    /// The built-in kernels contain code for it.
    code: bool,
    /// A description as text.
    line: String,
}

/// Replaces the findings about CUDA, if a driver was found, by those of the driver, and adds other facts that matter
/// on a machine with GPUs.
pub(crate) fn examine(found: &mut Vec<Capability>) {
    let cuda = found.iter_mut().find(|capability| capability.name == "cuda");
    let Some(cuda) = cuda.filter(|cuda| cuda.state != State::Off) else { return };
    let remedy = "run `serval doctor --gpus` and `nvidia-smi`".to_owned();
    match ask() {
        Err(why) => (cuda.state, cuda.why, cuda.remedy) = (State::Off, why, remedy),
        Ok(gpus) => {
            (cuda.state, cuda.why, cuda.remedy) =
                sum_up(gpus.iter().map(ListedGpu::assess).collect());
            found.extend(persistence());
            found.push(mps());
        }
    }
}

/// The summary of all GPUs. The best one determines the state, because one is enough to serve; it comes first, and
/// problems of the others are notes.
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

impl ListedGpu {
    /// Its state and problems.
    fn assess(&self) -> (State, String, String) {
        let Self { bus_id, architecture, .. } = self;
        if self.unfit.is_some() {
            let remedy = "use another GPU, or fix the named problem".to_owned();
            return (State::Off, self.line.clone(), remedy);
        }
        let own = format!("your own kernels: `serval kernel build --gpu {architecture}`");
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
            let what = "this driver loads kernels at their first start";
            notes.push((what.to_owned(), remedy.to_owned()));
        }
        let state = if notes.is_empty() { State::Available } else { State::Degraded };
        let (whys, remedies): (Vec<_>, Vec<_>) = notes.into_iter().unzip();
        let why = [vec![self.line.clone()], whys].concat().join("; ");
        (state, why, remedies.join("; "))
    }
}

/// Whether the driver stays ready while no GPU is in use; `None` if unknown.
fn persistence() -> Option<Capability> {
    let query = ["--query-gpu=persistence_mode", "--format=csv,noheader"];
    let mut smi = Command::new(find_program("nvidia-smi")?);
    let output = run(smi.args(query), SMI_TIMEOUT).ok()?;
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
    let remedy = "`nvidia-smi -pm 1` as root, or run nvidia-persistenced".to_owned();
    Some(Capability { name, state: State::Degraded, why, remedy })
}

/// Whether programs share GPUs concurrently.
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

/// The output of a program within a time limit.
fn run(command: &mut Command, timeout: Duration) -> Result<Output, String> {
    let sentence = |error: std::io::Error| format!("the driver cannot be asked: {error}");
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(sentence)?;
    let deadline = Instant::now() + timeout;
    while child.try_wait().map_err(sentence)?.is_none() {
        if Instant::now() >= deadline {
            // It may be stuck in the host kernel; in any case it is not waited for.
            let _ = child.kill();
            return Err(format!("the driver gave no answer for {} s", timeout.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().map_err(sentence)
}

/// The GPUs, at least one; or the reason, in one sentence, why there are none.
pub(crate) fn ask() -> Result<Vec<ListedGpu>, String> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| format!("the driver cannot be asked: {error}"))?;
    let output = run(Command::new(program).args(["doctor", "--gpus", "--json"]), DRIVER_TIMEOUT)?;
    let answer: Json = serde_json::from_slice(&output.stdout)
        .map_err(|_| format!("the driver ended its process ({})", output.status))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(error.to_owned());
    }
    let gpus: Vec<ListedGpu> =
        (answer["gpus"].as_array().into_iter().flatten()).filter_map(read).collect();
    if gpus.is_empty() { Err("the driver shows no GPU".to_owned()) } else { Ok(gpus) }
}

fn read(gpu: &Json) -> Option<ListedGpu> {
    Some(ListedGpu {
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
    fn problems_of_a_gpu_have_a_remedy() {
        let sound = ListedGpu {
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
        let assess = |gpu: ListedGpu| gpu.assess();
        let (state, why, remedy) = assess(sound.clone());
        assert_eq!(state == State::Available, cuda::built_in(), "{why}");
        assert_eq!(state == State::Available, remedy.is_empty(), "{remedy}");
        let (state, why, remedy) = assess(ListedGpu { lazy: true, ..sound.clone() });
        assert_eq!(state, State::Degraded);
        assert!(
            why.contains("first start") && remedy.contains("CUDA_MODULE_LOADING=EAGER"),
            "{why}: {remedy}"
        );
        let (_, why, remedy) = assess(ListedGpu { exclusive: true, lazy: true, ..sound.clone() });
        assert!(why.contains("EXCLUSIVE_PROCESS") && why.contains("first start"), "{why}");
        assert!(remedy.contains("`nvidia-smi -i 0000:65:00.0 -c DEFAULT`; set CUDA"), "{remedy}");
        let (_, why, remedy) = assess(ListedGpu { code: false, ..sound.clone() });
        assert!(!cuda::built_in() || why.contains("no code for sm_90"), "{why}");
        assert!(remedy.contains("serval kernel build --gpu sm_90"), "{remedy}");
        let unfit = Some("is too old".to_owned());
        assert_eq!(assess(ListedGpu { unfit, lazy: true, ..sound }).0, State::Off);
    }
}
