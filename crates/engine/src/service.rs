//! One worker's share of one service: its mqueues, its dispatcher, its requests.

pub(crate) mod dispatch;
pub(crate) mod ends;
pub(crate) mod share;
