//! One worker's share of one service: its mqueues, its dispatcher, its requests.

pub(crate) mod bundle;
pub(crate) mod chain;
pub(crate) mod dispatch;
pub(crate) mod ends;
pub(crate) mod mqueues;
mod owners;
mod sampler;
pub(crate) mod services;
pub(crate) mod share;
pub(crate) mod vote;
