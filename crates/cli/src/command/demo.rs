//! `serval demo [NAME]`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Args, ValueEnum as _};
use engine::topology::WORKERS_MAX;
use mqueue::abi::BLOCKS_MAX;

use super::{Failure, cancel_on_signal};
use crate::demo::{self, DemoGpu, Name};
use crate::doctor::gpus;
use crate::screen::Screen;
use bench::plot;

pub(super) const HELP: &str = "\
Starts a server in this process on free loopback ports, runs real clients against it, checks every
reply and prints the results. Needs no configuration, no root and no GPU. If there are a GPU and
kernels for it, the digits are read there and compared with the CPU.

Examples:
  serval demo                          handwritten digits, LeNet-5: the GPU against the CPU, or
                                       Serval against a thread-pool server
  serval demo --cpu                    the same without a GPU
  serval demo echo --mqueues 240       many mqueues on one core
  serval demo scale --quick            seconds instead of half a minute
  serval demo faces                    a kernel that uses memcached (apt install memcached)
  serval demo faces --corrupt          a byte is changed: the demo must find it, and fail
  serval demo transfer                 a file through a transfer engine, and clients beside a loop
  serval demo transfer --plot rate.svg --json  the same as JSON, the rate and CPU time as a picture
  serval demo functions                functions on the path, replaced under load
  serval demo cache                    a cache in front of memcached (apt install memcached)
  serval demo auth                     CoAP authentication beside a flood (apt install nodejs)
  serval demo chain                    authentication, a kernel, a cache (apt install memcached)
  serval demo allreduce                groups of ranks sum vectors
  serval demo sockets                  kernels with connections of their own
  serval demo remote                   digits on local and remote accelerators
  serval demo tenants                  six tenants, of which one floods

Saves a chart of the results and prints its path. Exit code 1 if a reply is wrong or missing (as
with --corrupt), or when fewer than 97 % of the digits are read correctly.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The demo
    #[arg(value_enum, default_value_t = Name::Lenet)]
    name: Name,

    /// Mqueues of a demo's services [default: depends on the demo; lenet 4, on a GPU 64, echo 240, faces 28]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(BLOCKS_MAX)))]
    mqueues: Option<u32>,

    /// Workers of the engine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = workers)]
    workers: usize,

    /// Shorter and fewer rounds
    #[arg(long)]
    quick: bool,

    /// faces: a file of pictures made by tools/train/make_faces.py
    #[arg(long, value_name = "FILE")]
    pictures: Option<PathBuf>,

    /// lenet: do not use a GPU
    #[arg(long)]
    cpu: bool,

    /// lenet: a fatbin of the built-in kernels, if this program was built without nvcc
    #[arg(long, value_name = "FILE", conflicts_with = "cpu")]
    cuda_kernels: Option<PathBuf>,

    /// Change one byte of what arrives: the demo must find it and fail
    #[arg(long)]
    corrupt: bool,

    /// Where to save the chart (SVG) [default: serval-demo-NAME.svg in the current folder]
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,

    /// Do not save a chart
    #[arg(long, conflicts_with = "plot")]
    no_plot: bool,
}

fn workers(text: &str) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|workers| (1..=WORKERS_MAX).contains(workers));
    parsed.ok_or_else(|| format!("must be in [1, {WORKERS_MAX}]"))
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let cancel = Arc::new(AtomicBool::new(false));
    cancel_on_signal(cancel.clone()).map_err(Failure::run)?;
    if let Err(error) = sys::process::raise_descriptor_limit() {
        tracing::warn!(%error, "the limit of open descriptors could not be raised");
    }
    let name = options.name;
    let settings = demo::Options {
        workers: options.workers,
        mqueues: options.mqueues,
        quick: options.quick,
        pictures: options.pictures.clone(),
        gpu: find_gpu(options),
        corrupt: options.corrupt,
        screen: *screen,
        cancel,
    };
    let mut report = demo::run(name, &settings).map_err(Failure::run)?;
    if !options.no_plot {
        save_plot(name, options.plot.as_deref(), &mut report)?;
    }
    screen.show(|| report.text, || report.json);
    report.failure.map_or(Ok(()), |why| Err(Failure::Unproven(format!("error: {why}"))))
}

/// The first usable GPU, or the reason why there is none.
fn find_gpu(options: &Options) -> Result<DemoGpu, String> {
    if options.cpu || options.name != Name::Lenet {
        return Err("--cpu was given".to_owned());
    }
    let seen = gpus::ask()?;
    let Some(gpu) = seen.iter().find(|gpu| gpu.unfit.is_none()).or(seen.first()) else {
        return Err("the driver shows none".to_owned());
    };
    if let Some(unfit) = &gpu.unfit {
        return Err(format!("GPU {} ({}) {unfit}", gpu.index, gpu.name));
    }
    let kernels = match &options.cuda_kernels {
        Some(file) => Some(std::path::absolute(file).map_err(|error| error.to_string())?),
        None if accel::cuda::built_in() => None,
        None => {
            let name = &gpu.name;
            return Err(format!(
                "there is a GPU ({name}), but no kernels for it in this program: run `make cuda-kernels` and build again"
            ));
        }
    };
    Ok(DemoGpu { index: gpu.index, name: gpu.name.clone(), kernels })
}

/// If a chart was requested, failing to save it is an error; otherwise it is only reported.
fn save_plot(name: Name, path: Option<&Path>, report: &mut demo::Report) -> Result<(), Failure> {
    let own_name = name.to_possible_value().expect("no demo is hidden");
    let own_path = format!("serval-demo-{}.svg", own_name.get_name());
    let at = path.unwrap_or(own_path.as_ref());
    let Some(chart) = &report.chart else {
        let why = format!("the demo {} has no chart: leave out --plot", own_name.get_name());
        return path.map_or(Ok(()), |_| Err(Failure::Usage(why)));
    };
    let saved = plot::save(chart, at)
        .map_err(|error| format!("cannot save the plot {}: {error}", at.display()));
    match saved {
        Ok(()) => {
            report.text.push_str(&format!("  Plot: {}\n", at.display()));
            report.json["plot"] = at.display().to_string().into();
            Ok(())
        }
        Err(why) if path.is_some() => Err(Failure::Run(why)),
        Err(why) => {
            tracing::warn!("{why}");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_demo_has_an_example() {
        for name in Name::value_variants().iter().filter(|name| **name != Name::Lenet) {
            let name = name.to_possible_value().unwrap();
            let example = format!("  serval demo {} ", name.get_name());
            assert!(HELP.contains(&example), "{example}");
        }
    }
}
