//! How callers share what has a limit: memory, transfers in flight, connections, processes.

/// Whether a caller may hold `more` bytes, or transfers in flight, beside its `own`: no more than what all callers together leave free of `most`, of which they hold
/// `held`. So one caller gets half, each of two a third, each of *n* one part of *n* + 1, and a part is free for
/// the next one (dynamic thresholds: Choudhury and Hahne, 1998). One of a higher weight gets as many times of what is free.
pub(crate) fn is_within_share(more: u64, own: u64, held: u64, most: u64, weight: u32) -> bool {
    own.saturating_add(more) <= most.saturating_sub(held).saturating_mul(u64::from(weight.max(1)))
}
