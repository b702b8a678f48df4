//! A test case: a seed, and reductions of its plan that make a failure easier to understand.
//!
//! Reductions only remove things: a smaller case is the seed's plan with some faults removed, some
//! clients left out, fewer requests or turns. It is printed as the arguments of `serval-sim` that run it.

use std::fmt::{Display, Formatter};

use crate::fault::FaultSet;
use crate::plan::Plan;

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Case {
    /// The seed.
    pub seed: u64,
    /// Faults that do not occur.
    pub without: FaultSet,
    /// The clients that take part, by index in the plan; `None`: all.
    pub clients: Option<Vec<usize>>,
    /// Maximum number of requests of a client (on each of its connections).
    pub requests: Option<u32>,
    /// Maximum number of turns under load.
    pub turns: Option<u32>,
    /// Maximum number of workers.
    pub workers: Option<usize>,
}

impl From<u64> for Case {
    fn from(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }
}

impl From<&Self> for Case {
    fn from(case: &Self) -> Self {
        case.clone()
    }
}

impl Display for Case {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "--seed {}", self.seed)?;
        if !self.without.0.is_empty() {
            let only = self.without.others();
            match only.0.len() < self.without.0.len() {
                true => write!(
                    f,
                    " --only {}",
                    if only.0.is_empty() { "none".into() } else { only.to_string() }
                )?,
                false => write!(f, " --without {}", self.without)?,
            }
        }
        if let Some(clients) = &self.clients {
            let clients: Vec<_> = clients.iter().map(usize::to_string).collect();
            write!(f, " --clients {}", clients.join(","))?;
        }
        if let Some(requests) = self.requests {
            write!(f, " --requests {requests}")?;
        }
        if let Some(turns) = self.turns {
            write!(f, " --turns {turns}")?;
        }
        if let Some(workers) = self.workers {
            write!(f, " --workers {workers}")?;
        }
        Ok(())
    }
}

impl Case {
    /// The plan of the case.
    pub fn plan(&self) -> Plan {
        let mut plan = Plan::of_seed(self.seed);
        for fault in &self.without.0 {
            plan.remove_fault(*fault);
        }
        if let Some(clients) = &self.clients {
            plan.keep_clients(clients);
        }
        if let Some(most) = self.requests {
            plan.limit_requests(most);
        }
        plan.turns = plan.turns.min(self.turns.unwrap_or(u32::MAX));
        let workers = &mut plan.setup.topology.engine.workers;
        *workers = (*workers).min(self.workers.unwrap_or(usize::MAX));
        plan
    }

    /// Reduces a failing case as long as `fails`: fewer turns, clients, faults, requests and
    /// workers, repeatedly until nothing can be removed. The result is deterministic.
    pub fn shrink(&self, mut fails: impl FnMut(&Self) -> bool) -> Self {
        let mut smallest = self.clone();
        loop {
            let before = smallest.clone();
            let plan = smallest.plan();
            shrink_number(plan.turns, |turns| {
                accept(&mut smallest, &mut fails, |case| case.turns = Some(turns))
            });
            let all: Vec<usize> = (0..plan.client_count()).collect();
            let clients = smallest.clients.clone().unwrap_or(all);
            shrink_list(clients, |left| {
                accept(&mut smallest, &mut fails, |case| case.clients = Some(left.to_vec()))
            });
            shrink_list(smallest.without.others().0.into_iter().collect(), |left| {
                let only = FaultSet(left.iter().copied().collect());
                accept(&mut smallest, &mut fails, |case| case.without = only.others())
            });
            shrink_number(smallest.plan().requests_max(), |requests| {
                accept(&mut smallest, &mut fails, |case| case.requests = Some(requests))
            });
            shrink_number(plan.setup.topology.engine.workers as u32, |workers| {
                workers > 0
                    && accept(&mut smallest, &mut fails, |case| {
                        case.workers = Some(workers as usize);
                    })
            });
            if smallest == before {
                return smallest;
            }
        }
    }
}

/// Accepts the smaller case if it still fails.
fn accept(
    case: &mut Case,
    fails: &mut impl FnMut(&Case) -> bool,
    change: impl FnOnce(&mut Case),
) -> bool {
    let mut smaller = case.clone();
    change(&mut smaller);
    let accepted = smaller != *case && fails(&smaller);
    if accepted {
        *case = smaller;
    }
    accepted
}

/// Finds a smaller number below `from` that `works`: large steps first.
fn shrink_number(from: u32, mut works: impl FnMut(u32) -> bool) {
    let (mut now, mut step) = (from, from);
    while step > 0 && now > 0 {
        let smaller = now - step.min(now);
        if works(smaller) {
            now = smaller;
        } else {
            step /= 2;
        }
    }
}

/// Removes elements of `list` as long as the rest `works`: large pieces first (delta debugging,
/// Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).
fn shrink_list<T: Clone>(mut list: Vec<T>, mut works: impl FnMut(&[T]) -> bool) {
    let mut piece = list.len();
    while piece > 0 {
        let mut at = 0;
        while at < list.len() {
            let end = (at + piece).min(list.len());
            let left = [&list[..at], &list[end..]].concat();
            if works(&left) {
                list = left;
            } else {
                at = end;
            }
        }
        piece /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Fault;

    #[test]
    fn a_case_is_as_small_as_its_cause() {
        // Fails with clients 1 and 3, the fault `lose`, 17 turns or more.
        let fails = |case: &Case| {
            let clients = case.clients.clone().unwrap_or((0..100).collect());
            clients.contains(&1)
                && clients.contains(&3)
                && !case.without.0.contains(&Fault::Lose)
                && case.turns.is_none_or(|turns| turns >= 17)
        };
        let plan = |seed: &u64| Case::from(*seed).plan();
        let seed = (1..).find(|seed| plan(seed).client_count() > 3).unwrap();
        let smallest = Case::from(seed).shrink(fails);
        let expected =
            format!("--seed {seed} --only lose --clients 1,3 --requests 0 --turns 17 --workers 1");
        assert_eq!(
            smallest.to_string().replace(" --workers 1", ""),
            expected.replace(" --workers 1", "")
        );
        assert!(fails(&smallest));
        assert_eq!(smallest.plan().setup.topology.engine.workers, 1);
    }

    #[test]
    fn pieces_are_taken_out_of_lists() {
        let mut left = (0..50).collect::<Vec<_>>();
        shrink_list(left.clone(), |list| {
            let works = list.contains(&7) && list.contains(&40);
            if works {
                left = list.to_vec();
            }
            works
        });
        assert_eq!(left, [7, 40]);
        let mut least = 1000;
        shrink_number(1000, |n| {
            let works = n >= 13;
            if works {
                least = n;
            }
            works
        });
        assert_eq!(least, 13);
    }
}
