//! The `serval` command: [`command`] contains its verbs, the other modules their output.
#![forbid(unsafe_code)]

pub mod allreduce;
pub mod command;
pub mod demo;
pub mod doctor;
mod kernel_stage;
pub mod screen;
mod sdk;
pub mod top;
