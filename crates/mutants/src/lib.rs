//! Seeded mutants: deliberate bugs, each behind a switch, that prove that the tests can fail.
//!
//! Code with a mutant calls [`on`] with its name and misbehaves if the mutant is enabled:
//!
//! ```
//! # let (mut outstanding, name) = (1, "leak_credit");
//! if !mutants::on(name) {
//!     outstanding -= 1;
//! }
//! # assert_eq!(outstanding, 0);
//! ```
//!
//! In an ordinary build the result is a constant `false`, and the compiler removes the mutant. With the
//! feature `seeded` the environment variable `SERVAL_MUTANT` names the enabled mutant, so one build
//! of the tests serves all of them. The tables in `xtask/src/mutants/` list them with the tests that must catch
//! each; `cargo xtask mutants` runs them.
#![forbid(unsafe_code)]

/// Whether the mutant called `name` is enabled.
#[cfg(not(feature = "seeded"))]
#[inline(always)]
pub const fn on(_name: &str) -> bool {
    false
}

/// Whether the mutant called `name` is enabled: the one in `SERVAL_MUTANT` at the first call.
#[cfg(feature = "seeded")]
pub fn on(name: &str) -> bool {
    static IN_FORCE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let in_force = IN_FORCE.get_or_init(|| std::env::var("SERVAL_MUTANT").unwrap_or_default());
    in_force == name
}
