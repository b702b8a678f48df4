//! Seeded mutants: deliberate bugs, each behind a switch, that prove that the tests can fail.
//!
//! Code that carries one asks [`on`] for its name and does the wrong thing if it is in force:
//!
//! ```
//! # let (mut outstanding, name) = (1, "leak_credit");
//! if !mutants::on(name) {
//!     outstanding -= 1;
//! }
//! # assert_eq!(outstanding, 0);
//! ```
//!
//! In every ordinary build the answer is a constant `false`, and nothing of the mutant is left. With the
//! feature `seeded` the environment variable `SERVAL_MUTANT` names the one that is in force; so one build
//! of the tests serves for all of them. `xtask/src/mutants.rs` lists them with the tests that must catch
//! each; `cargo xtask mutants` tries them.
#![forbid(unsafe_code)]

/// Whether the mutant called `name` is in force.
#[cfg(not(feature = "seeded"))]
#[inline(always)]
pub const fn on(_name: &str) -> bool {
    false
}

/// Whether the mutant called `name` is in force: the one in `SERVAL_MUTANT` when first asked.
#[cfg(feature = "seeded")]
pub fn on(name: &str) -> bool {
    static IN_FORCE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let in_force = IN_FORCE.get_or_init(|| std::env::var("SERVAL_MUTANT").unwrap_or_default());
    in_force == name
}
