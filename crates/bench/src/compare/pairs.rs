//! Interleaved pairs: A and B measured in turn, each pair guarded by a calibration before and after.
//!
//! The side that is first alternates, so that effects of one measurement on the next (a warm cache, a busy host)
//! affect both sides. A pair is discarded and measured again if the machine changed during it or disturbed a
//! measurement, or was in another state than the plan requires; its value is reported with the reason. The number of
//! discarded pairs is limited: a machine that keeps changing proves nothing. A row that requires unshared cores
//! counts no other pairs. A measurement that is void for any other reason (wrong or missing answers, or a side that stalls under a load that
//! it can bear while the machine stays as it was) ends everything: repeating it until it succeeds would prove nothing.

use serde::Serialize;

use super::calibration::{Calibration, State};
use super::show::{Figures, Style};
use super::verdict::{Better, Combine};

/// One of the two that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The candidate.
    A,
    /// The baseline.
    B,
}

/// The result of measuring one side once.
#[derive(Clone, Debug, PartialEq)]
pub enum Run {
    /// A valid measurement.
    Figures(Figures),
    /// A measurement that the machine disturbed, with the cause.
    Noisy(Figures, String),
    /// The side did not take a load that it can bear, with what was missing: the machine is the cause only if it changed.
    Unloaded(String),
    /// Invalid, and not because of the machine; with the reason.
    Void(String),
}

/// The equipment that pairs are measured with.
pub trait Bench {
    /// Why a side cannot be measured at all; ends everything.
    type Error;
    /// The current speed of the machine.
    fn calibrate(&mut self) -> Result<Calibration, Self::Error>;
    /// Measures one side once.
    fn measure(&mut self, side: Side) -> Result<Run, Self::Error>;
    /// A pair has been kept or discarded.
    fn progress(&mut self, kept: usize, discarded: usize);
}

/// The plan of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Pairs to keep.
    pub pairs: usize,
    /// Maximum number of discarded pairs.
    pub discards_max: usize,
    /// Whether disturbed pairs are discarded. Otherwise pairs prove nothing.
    pub guard: bool,
    /// The state of the machine in which pairs count; `None`: any.
    pub state: Option<State>,
    /// Whether pairs count only if no other program shares the server's cores.
    pub whole: bool,
    /// The compared figure, for texts.
    pub metric: String,
    /// How two figures become a value.
    pub combine: Combine,
    /// Which way the figure improves.
    pub better: Better,
    /// The figure of each side.
    pub figure: [String; 2],
}

impl Plan {
    /// The format of values.
    fn style(&self) -> Style<'_> {
        let better = self.combine.better(self.better);
        Style { metric: &self.metric, combine: self.combine, better }
    }
}

/// One pair that counts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// The side that was measured first.
    pub first: Side,
    /// The value of the pair.
    pub value: f64,
    /// A's figures.
    pub a: Figures,
    /// B's figures, where there is a B.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<Figures>,
    /// The machine before.
    pub before: Calibration,
    /// The machine after.
    pub after: Calibration,
}

/// Minimum share of their best throughput of independent work for cores to count as unshared.
pub const WHOLE_MIN: f64 = 0.85;

/// The result of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs {
    /// The pairs that count.
    pub kept: Vec<Pair>,
    /// Why the others were discarded.
    pub discarded: Vec<String>,
    /// The least [`Calibration::width`] around any of them.
    width: Option<f64>,
}

impl Pairs {
    /// Adds a pair that counts.
    fn keep(&mut self, pair: Pair) {
        let width = pair.before.width().min(pair.after.width());
        self.width = Some(self.width.map_or(width, |least| least.min(width)));
        self.kept.push(pair);
    }

    /// Throughput of independent work of the server's cores around a pair, as a share of their best.
    fn whole_share(&self, pair: &Pair) -> f64 {
        let width = pair.before.width().max(pair.after.width());
        self.width.map_or(1.0, |least| least / width)
    }

    /// The pairs around which the server's cores did less than [`WHOLE_MIN`] of their best.
    pub fn slowed(&self) -> usize {
        self.kept.iter().filter(|pair| self.whole_share(pair) < WHOLE_MIN).count()
    }

    /// Discards those pairs. Earlier pairs may be among them once there is a better one.
    fn discard_slowed(&mut self, style: &Style<'_>) {
        for pair in std::mem::take(&mut self.kept) {
            let share = self.whole_share(&pair);
            if share < WHOLE_MIN {
                let (percent, value) = (100.0 * share, style.value(pair.value));
                let why = format!(
                    "the server's cores had {percent:.0} % of their best throughput; its value was {value}"
                );
                self.discarded.push(why);
            } else {
                self.kept.push(pair);
            }
        }
    }

    /// The pairs' values.
    pub fn values(&self) -> Vec<f64> {
        self.kept.iter().map(|pair| pair.value).collect()
    }
}

/// Why there is no result.
#[derive(Debug, PartialEq)]
pub enum PairsError<E> {
    /// A side cannot be measured.
    Side(E),
    /// A measurement of a side is void because of the side.
    Void {
        /// The side.
        side: Side,
        /// The reason.
        why: String,
    },
    /// A side has no figure with that name.
    NoFigure {
        /// The side.
        side: Side,
        /// The requested name.
        figure: String,
        /// The available ones.
        known: String,
    },
}

/// Measures. Ends early, with fewer pairs than planned, if too many had to be discarded.
pub fn measure<B: Bench>(bench: &mut B, plan: &Plan) -> Result<Pairs, PairsError<B::Error>> {
    let mut pairs = Pairs::default();
    while pairs.kept.len() < plan.pairs && pairs.discarded.len() <= plan.discards_max {
        let firsts = pairs.kept.iter().filter(|pair| pair.first == Side::A).count();
        let first = if 2 * firsts <= pairs.kept.len() { Side::A } else { Side::B };
        match pair(bench, plan, first)? {
            Ok(pair) => pairs.keep(pair),
            Err(why) => pairs.discarded.push(why),
        }
        if plan.whole && plan.guard {
            pairs.discard_slowed(&plan.style());
        }
        bench.progress(pairs.kept.len(), pairs.discarded.len());
    }
    Ok(pairs)
}

/// One pair, or why it does not count.
fn pair<B: Bench>(
    bench: &mut B,
    plan: &Plan,
    first: Side,
) -> Result<Result<Pair, String>, PairsError<B::Error>> {
    let before = bench.calibrate().map_err(PairsError::Side)?;
    let order: &[Side] = match (plan.combine, first) {
        (Combine::Alone, _) => &[Side::A],
        (_, Side::A) => &[Side::A, Side::B],
        (_, Side::B) => &[Side::B, Side::A],
    };
    let mut found: [Option<Figures>; 2] = [None, None];
    for &side in order {
        match bench.measure(side).map_err(PairsError::Side)? {
            Run::Figures(figures) => found[side as usize] = Some(figures),
            Run::Noisy(figures, _) if !plan.guard => found[side as usize] = Some(figures),
            Run::Noisy(_, why) => return Ok(Err(format!("{side:?}: {why}"))),
            Run::Unloaded(why) => {
                let after = bench.calibrate().map_err(PairsError::Side)?;
                return match before.moved(&after).filter(|_| plan.guard) {
                    Some(moved) => Ok(Err(format!("{side:?}: {why}; {moved}"))),
                    None => Err(PairsError::Void { side, why }),
                };
            }
            Run::Void(why) => return Err(PairsError::Void { side, why }),
        }
    }
    let after = bench.calibrate().map_err(PairsError::Side)?;
    if let Some(moved) = before.moved(&after).filter(|_| plan.guard) {
        return Ok(Err(moved.to_string()));
    }
    let figure = |side: Side| {
        let Some(figures) = &found[side as usize] else { return Ok(None) };
        let name = &plan.figure[side as usize];
        figures.get(name).copied().map(Some).ok_or_else(|| PairsError::NoFigure {
            side,
            figure: name.clone(),
            known: figures.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    };
    let (a, b) = (figure(Side::A)?.expect("A is always measured"), figure(Side::B)?);
    let Some(value) = plan.combine.value(plan.better, a, b) else {
        return Ok(Err(format!("no value from {a} and {b:?}")));
    };
    let state = after.state();
    if plan.guard && plan.state.is_some_and(|wanted| wanted != state) {
        let way = after.ping_pong_ns.map_or_else(String::new, |ns| format!(" ({ns:.0} ns)"));
        let value = plan.style().value(value);
        return Ok(Err(format!("the machine was {state}{way}; its value was {value}")));
    }
    let [a, b] = found;
    let a = a.expect("A is always measured");
    Ok(Ok(Pair { first, value, a, b, before, after }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Calibration = Calibration {
        server_spin_ns: 100.0,
        client_spin_ns: 100.0,
        server_wide_ns: 100.0,
        ping_pong_ns: Some(110.0),
    };

    /// A bench with a script: every calibration and every measurement is given.
    #[derive(Default)]
    struct Scripted {
        /// Speed of the server's core at the n-th calibration; 100 afterwards.
        spins: Vec<f64>,
        /// Round trip between the cores at the n-th calibration; 110 afterwards.
        ways: Vec<f64>,
        /// Independent work at the n-th calibration; 100 afterwards.
        wides: Vec<f64>,
        calibrations: usize,
        /// Numbers of measurements that are void.
        void: Vec<usize>,
        /// Numbers of measurements that are noisy.
        noisy: Vec<usize>,
        /// Numbers of measurements whose side could not be loaded.
        unloaded: Vec<usize>,
        /// Number of the measurement that fails.
        fails: Option<usize>,
        measured: Vec<Side>,
        reports: Vec<(usize, usize)>,
    }

    impl Bench for Scripted {
        type Error = String;

        fn calibrate(&mut self) -> Result<Calibration, String> {
            let spin = self.spins.get(self.calibrations).copied().unwrap_or(100.0);
            let way = self.ways.get(self.calibrations).copied().unwrap_or(110.0);
            let wide = self.wides.get(self.calibrations).copied().unwrap_or(100.0);
            self.calibrations += 1;
            let (server_spin_ns, ping_pong_ns) = (spin, Some(way));
            Ok(Calibration { server_spin_ns, ping_pong_ns, server_wide_ns: wide, ..QUIET })
        }

        fn measure(&mut self, side: Side) -> Result<Run, String> {
            let number = self.measured.len();
            self.measured.push(side);
            if self.fails == Some(number) {
                return Err("it burns".to_owned());
            }
            if self.void.contains(&number) {
                return Ok(Run::Void("3 replies were wrong".to_owned()));
            }
            if self.unloaded.contains(&number) {
                return Ok(Run::Unloaded("half of the requests were not sent".to_owned()));
            }
            let rate = if side == Side::A { 300.0 } else { 200.0 };
            let figures = Figures::from([("rate".to_owned(), rate)]);
            if self.noisy.contains(&number) {
                return Ok(Run::Noisy(figures, "a neighbour".to_owned()));
            }
            Ok(Run::Figures(figures))
        }

        fn progress(&mut self, kept: usize, discarded: usize) {
            self.reports.push((kept, discarded));
        }
    }

    fn plan(pairs: usize, combine: Combine) -> Plan {
        let figure = ["rate".to_owned(), "rate".to_owned()];
        let (better, metric) = (Better::Higher, "rate".to_owned());
        Plan {
            pairs,
            discards_max: pairs,
            guard: true,
            state: None,
            whole: false,
            metric,
            combine,
            better,
            figure,
        }
    }

    /// A side that stalls does not vanish from the row: only a machine that changed meanwhile excuses it.
    #[test]
    fn a_side_that_cannot_be_loaded_makes_the_row_void() {
        let mut bench = Scripted { unloaded: vec![3], ..Default::default() };
        let found = measure(&mut bench, &plan(5, Combine::Ratio));
        let why = "half of the requests were not sent".to_owned();
        assert_eq!(found, Err(PairsError::Void { side: Side::A, why }));
        assert_eq!(bench.measured.len(), 4);
        // The calibrations of the first two pairs, and that before the one that stalls.
        let spins = vec![100.0, 100.0, 100.0, 200.0];
        let mut bench = Scripted { unloaded: vec![3], spins, ..Default::default() };
        let pairs = measure(&mut bench, &plan(5, Combine::Ratio)).unwrap();
        assert_eq!((pairs.kept.len(), pairs.discarded.len()), (5, 1));
        assert!(pairs.discarded[0].starts_with("A: half of the requests"), "{pairs:?}");
        // A plan without a guard proves nothing by what the machine did.
        let mut bench = Scripted {
            unloaded: vec![3],
            spins: vec![100.0, 100.0, 100.0, 200.0],
            ..Default::default()
        };
        let unguarded = Plan { guard: false, ..plan(5, Combine::Ratio) };
        assert!(measure(&mut bench, &unguarded).is_err());
    }

    #[test]
    fn the_first_side_alternates() {
        let mut bench = Scripted::default();
        let pairs = measure(&mut bench, &plan(3, Combine::Ratio)).unwrap();
        use Side::{A, B};
        assert_eq!(bench.measured, [A, B, B, A, A, B]);
        assert_eq!(pairs.values(), [1.5; 3]);
        assert_eq!(pairs.kept.iter().map(|pair| pair.first).collect::<Vec<_>>(), [A, B, A]);
        assert_eq!(bench.calibrations, 6, "before and after every pair");
        assert_eq!(bench.reports, [(1, 0), (2, 0), (3, 0)]);
        assert!(pairs.discarded.is_empty());
    }

    #[test]
    fn a_pair_during_which_the_machine_changed_is_measured_again() {
        let spins = vec![100.0, 100.0, 100.0, 111.0];
        let mut bench = Scripted { spins, ..Scripted::default() };
        let pairs = measure(&mut bench, &plan(3, Combine::Ratio)).unwrap();
        assert_eq!((pairs.kept.len(), pairs.discarded.len()), (3, 1));
        assert!(pairs.discarded[0].contains("server's core moved by 11 %"), "{pairs:?}");
        // The pair is repeated with the same side first, so that both are first equally often.
        assert_eq!(bench.measured[2..6], [Side::B, Side::A, Side::B, Side::A]);
    }

    #[test]
    fn a_pair_counts_in_one_state_and_in_the_required_one() {
        let ways = vec![110.0, 470.0, 470.0, 480.0, 90.0, 110.0];
        let mut bench = Scripted { ways: ways.clone(), ..Scripted::default() };
        let any = measure(&mut bench, &plan(2, Combine::Alone)).unwrap();
        assert_eq!((any.kept.len(), bench.calibrations), (2, 6));
        assert_eq!(any.discarded, ["the cores moved from near to far"]);
        let near = Plan { state: Some(State::Near), ..plan(2, Combine::Alone) };
        let near = measure(&mut Scripted { ways, ..Scripted::default() }, &near).unwrap();
        assert_eq!(near.kept.len(), 2);
        assert!(near.kept.iter().all(|pair| pair.after.state() == State::Near));
        assert_eq!(near.discarded[1], "the machine was far (480 ns); its value was 300 /s");
    }

    #[test]
    fn pairs_on_shared_cores_count_and_are_counted() {
        let wides = vec![200.0, 190.0, 105.0, 100.0, 100.0, 130.0, 117.0, 110.0];
        let mut bench = Scripted { wides, ..Scripted::default() };
        let pairs = measure(&mut bench, &plan(5, Combine::Ratio)).unwrap();
        assert_eq!((pairs.kept.len(), pairs.slowed()), (5, 2));
        assert_eq!(Pairs::default().slowed(), 0);
    }

    #[test]
    fn a_row_that_requires_unshared_cores_counts_no_others() {
        let wides = vec![200.0, 190.0, 105.0, 100.0, 100.0, 130.0, 117.0, 110.0];
        let bench = || Scripted { wides: wides.clone(), ..Scripted::default() };
        let pairs = measure(&mut bench(), &whole_of(3)).unwrap();
        assert_eq!((pairs.kept.len(), pairs.slowed()), (3, 0));
        // The first one looked unshared until the second was measured.
        assert_eq!(pairs.discarded.len(), 2);
        let why = "the server's cores had 50 % of their best throughput; its value was 300 /s";
        assert_eq!(pairs.discarded[0], why);
        let open = Plan { guard: false, ..whole_of(3) };
        assert_eq!(measure(&mut bench(), &open).unwrap().kept.len(), 3);
        // A pair with an unshared core only before it is the reference for the others.
        let halves = [vec![100.0], vec![200.0; 5], vec![110.0; 9]].concat();
        let pairs =
            measure(&mut Scripted { wides: halves, ..Scripted::default() }, &whole_of(3)).unwrap();
        assert_eq!((pairs.kept.len(), pairs.discarded.len()), (3, 3));
        // Always half: cannot be distinguished from unshared, as the documentation of calibration.rs says.
        let mut halves = Scripted { wides: vec![200.0; 20], ..Scripted::default() };
        assert_eq!(measure(&mut halves, &whole_of(3)).unwrap().kept.len(), 3);
        // Always worse: given up.
        let worse: Vec<f64> = (0..20).map(|n| 100.0 + 50.0 * f64::from(n)).collect();
        let mut worse = Scripted { wides: worse, ..Scripted::default() };
        let pairs = measure(&mut worse, &whole_of(3)).unwrap();
        assert!(pairs.kept.len() < 3 && pairs.discarded.len() == 4, "{pairs:?}");
    }

    fn whole_of(pairs: usize) -> Plan {
        Plan { whole: true, ..plan(pairs, Combine::Alone) }
    }

    #[test]
    fn noisy_measurements_discard_their_pair() {
        let mut bench = Scripted { noisy: vec![0, 3], ..Scripted::default() };
        let pairs = measure(&mut bench, &plan(2, Combine::Ratio)).unwrap();
        assert_eq!(pairs.discarded, ["A: a neighbour", "B: a neighbour"]);
        assert_eq!(pairs.kept.len(), 2);
    }

    #[test]
    fn a_void_measurement_is_not_repeated() {
        let mut bench = Scripted { void: vec![3], ..Scripted::default() };
        let why = "3 replies were wrong".to_owned();
        for guard in [true, false] {
            let plan = Plan { guard, ..plan(7, Combine::Ratio) };
            let found = measure(&mut bench, &plan).unwrap_err();
            assert_eq!(found, PairsError::Void { side: Side::A, why: why.clone() });
            assert_eq!(bench.measured.len(), 4);
            bench = Scripted { void: vec![3], ..Scripted::default() };
        }
    }

    #[test]
    fn without_the_guard_noise_is_kept() {
        let bench =
            || Scripted { spins: vec![100.0, 200.0], noisy: vec![0], ..Scripted::default() };
        let guarded = measure(&mut bench(), &plan(2, Combine::Alone)).unwrap();
        assert_eq!((guarded.kept.len(), guarded.discarded.len()), (2, 2));
        assert_eq!(guarded.discarded[0], "A: a neighbour");
        assert!(guarded.discarded[1].contains("moved by 100 %"), "{guarded:?}");
        let open = Plan { guard: false, ..plan(2, Combine::Alone) };
        let open = measure(&mut bench(), &open).unwrap();
        assert_eq!((open.kept.len(), open.discarded.len()), (2, 0));
    }

    #[test]
    fn a_machine_that_keeps_changing_is_given_up() {
        let spins = (0..100).map(|n| if n % 2 == 0 { 100.0 } else { 150.0 }).collect();
        let mut bench = Scripted { spins, ..Scripted::default() };
        let pairs = measure(&mut bench, &plan(4, Combine::Ratio)).unwrap();
        assert_eq!((pairs.kept.len(), pairs.discarded.len()), (0, 5));
    }

    #[test]
    fn a_side_alone_has_no_other() {
        let mut bench = Scripted::default();
        let pairs = measure(&mut bench, &plan(2, Combine::Alone)).unwrap();
        assert_eq!(bench.measured, [Side::A, Side::A]);
        assert_eq!(pairs.values(), [300.0, 300.0]);
        assert!(pairs.kept.iter().all(|pair| pair.b.is_none()));
    }

    #[test]
    fn failures_and_unknown_figures_end_everything() {
        let mut bench = Scripted { fails: Some(3), ..Scripted::default() };
        let failed = measure(&mut bench, &plan(7, Combine::Ratio));
        assert_eq!(failed, Err(PairsError::Side("it burns".to_owned())));
        let mut plan = plan(7, Combine::Ratio);
        plan.figure[1] = "p50_ns".to_owned();
        let missing = measure(&mut Scripted::default(), &plan).unwrap_err();
        let known = "rate".to_owned();
        let figure = "p50_ns".to_owned();
        assert_eq!(missing, PairsError::NoFigure { side: Side::B, figure, known });
    }
}
