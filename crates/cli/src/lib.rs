//! The `serval` command: [`command`] has its verbs, the other modules what they show.
#![forbid(unsafe_code)]

pub mod command;
pub mod demo;
pub mod doctor;
pub mod screen;
pub mod top;
