//! One worker's share of one service: its mqueues, its dispatcher, its requests.

pub(crate) mod bundle_choice;
#[cfg(test)]
mod bundle_model;
pub(crate) mod bundle_run;
pub(crate) mod bundle_table;
pub(crate) mod bundles;
pub(crate) mod chain;
mod credit;
pub(crate) mod dispatch;
pub(crate) mod ends;
mod in_place;
pub(crate) mod mqueues;
mod notices;
mod owners;
mod path;
mod pool_memory;
pub(crate) mod received;
pub(crate) mod requests;
mod sampler;
pub(crate) mod share;
mod stages;
pub(crate) mod vote;
