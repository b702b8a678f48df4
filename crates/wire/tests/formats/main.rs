//! Framings, bundles and the messages of attachments.

mod attach;
mod bundles;
mod framing;
#[path = "../support/mod.rs"]
mod support;
