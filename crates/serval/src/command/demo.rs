//! `serval demo [NAME]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use engine::topology::WORKERS_MAX;
use mqueue::abi::BLOCKS_MAX;

use super::{Failure, cancel_on_signal};
use crate::demo::{self, Name};
use crate::screen::Screen;

pub(super) const HELP: &str = "\
Starts a server in this process on free loopback ports, runs real clients against it, checks every
reply and prints what came out. Needs no configuration, no root and no GPU.

Examples:
  serval demo                          handwritten digits, LeNet-5, against a thread-pool server
  serval demo echo --mqueues 240       many mqueues on one core
  serval demo scale --quick            seconds instead of half a minute
  serval demo faces                    a kernel that asks memcached (apt install memcached)

Exit code 1 when a reply is wrong or missing, or when fewer than 97 % of the digits are read right.";

#[derive(Args, Debug)]
pub(super) struct Options {
    /// Which demo
    #[arg(value_enum, default_value_t = Name::Lenet)]
    name: Name,

    /// Mqueues of the service [default: 4; echo 240, faces 28]
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
}

fn workers(text: &str) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|workers| (1..=WORKERS_MAX).contains(workers));
    parsed.ok_or_else(|| format!("must be in [1, {WORKERS_MAX}]"))
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let cancel = Arc::new(AtomicBool::new(false));
    cancel_on_signal(cancel.clone()).map_err(Failure::run)?;
    if let Err(error) = sys::process::raise_descriptor_limit() {
        tracing::warn!(%error, "the limit of open descriptors stays as it is");
    }
    let name = options.name;
    let options = demo::Options {
        workers: options.workers,
        mqueues: options.mqueues,
        quick: options.quick,
        pictures: options.pictures.clone(),
        screen: *screen,
        cancel,
    };
    let report = demo::run(name, &options).map_err(Failure::run)?;
    screen.show(|| report.text, || report.json);
    Ok(())
}
