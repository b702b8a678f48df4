//! Regions, rings, bundles, commands and streams: one program, since each one would compile the rings again.

mod alike;
mod bundles;
mod command;
mod directory;
mod edges;
mod hostile;
mod layout;
mod property;
mod ring;
mod streams;
mod stress;
#[path = "../support/mod.rs"]
mod support;
