//! `serval top [URL|FILE]`.

use std::io::{IsTerminal as _, stdin, stdout};
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use sys::signal::{Signal, Signals};

use super::{Failure, File, Sets};
use crate::screen::Screen;
use crate::top::{Endpoint, Grid, Page, Sample, Sort, draw};

pub(super) const HELP: &str = "\
Rates, drops, the depth of queues (mean/largest mqueue), how long requests stay in each stage, what
workers do: from the server's /metrics (engine.metrics), looked at twice. A narrow terminal shows
fewer columns. Keys: q quits, p pauses, s changes the order.

Examples:
  serval top
  serval top http://127.0.0.1:9464/metrics --interval 0.5
  serval top service.toml --once
  serval top 127.0.0.1:9464 --json

Exit codes: 0 seen, 1 nobody answers there, 2 no terminal, or no endpoint in the file.";

/// Where metrics are when nobody says.
const DEFAULT: &str = "http://127.0.0.1:9464/metrics";
/// Time between two looks at the keyboard and at signals.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The server's metrics (http://HOST:PORT/metrics or HOST:PORT), or its configuration file
    #[arg(value_name = "URL|FILE", default_value = DEFAULT)]
    target: String,

    /// Seconds between two looks, from 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,

    /// Show one sample and end; --json does too
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    overrides: Sets,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "a number of seconds from 0.1 to 3600".to_owned())
}

pub(super) fn run(screen: &Screen, options: &Options) -> Result<(), Failure> {
    let endpoint = endpoint(options)?;
    let interval = Duration::from_secs_f64(options.interval);
    let once = options.once || screen.json;
    let on_terminal = stdin().is_terminal() && stdout().is_terminal();
    if !once && !on_terminal {
        let message = "serval top needs a terminal; --once and --json do without";
        return Err(Failure::Usage(message.to_owned()));
    }
    let first = Look::at(&endpoint)?;
    if once {
        std::thread::sleep(interval);
        let sample = Look::at(&endpoint)?.since(&first);
        let tables = || Grid::of(&sample).map(|grid| grid.table().render(screen)).join("\n");
        screen.show(tables, || sample.to_json());
        return Ok(());
    }
    // Signals become values before the terminal changes: whatever ends this restores it.
    let signals = Signals::install().map_err(Failure::run)?;
    let (asked, sort) = (first.at, Sort::default());
    let mut view = View { endpoint, interval, signals, before: first, asked, sort };
    // Restores the terminal on a panic, too.
    let mut terminal = ratatui::try_init().map_err(Failure::run)?;
    let ended = view.watch(&mut terminal);
    ratatui::restore();
    ended
}

/// An address as it stands, or the one in a configuration file.
fn endpoint(options: &Options) -> Result<Endpoint, Failure> {
    let path = Path::new(&options.target);
    if options.target.starts_with("http://") || !path.is_file() {
        return Endpoint::parse(&options.target).map_err(|error| Failure::Usage(error.to_string()));
    }
    let overrides = Sets { sets: options.overrides.sets.clone() };
    let config = File { path: path.to_owned(), overrides }.load()?;
    let metrics = config.metrics.filter(|address| address.port() != 0);
    let metrics = metrics.ok_or_else(|| {
        let target = &options.target;
        Failure::Usage(format!(
            "{target} sets no engine.metrics with a port: add one, or say a URL"
        ))
    })?;
    Endpoint::parse(&metrics.to_string()).map_err(Failure::run)
}

/// A page and when it was seen.
struct Look {
    page: Page,
    at: Instant,
}

impl Look {
    fn at(endpoint: &Endpoint) -> Result<Self, Failure> {
        let page = endpoint.fetch().map_err(Failure::run)?;
        Ok(Self { page, at: Instant::now() })
    }

    fn since(&self, before: &Self) -> Sample {
        Sample::between(&before.page, &self.page, self.at - before.at)
    }
}

/// What a key or a signal asks for.
enum Wish {
    Quit,
    Pause,
    Sort,
    Redraw,
}

struct View {
    endpoint: Endpoint,
    interval: Duration,
    signals: Signals,
    before: Look,
    /// When the server was last asked, whether it answered or not.
    asked: Instant,
    sort: Sort,
}

impl View {
    fn watch(&mut self, terminal: &mut DefaultTerminal) -> Result<(), Failure> {
        let url = self.endpoint.url();
        let (mut paused, mut news) = (false, String::new());
        // Before there are two looks, everything stands still.
        let mut sample = self.before.since(&self.before);
        loop {
            sample.sort(self.sort);
            let line = if paused { "paused" } else { news.as_str() };
            let drawn = terminal.draw(|frame| draw(frame, &url, &sample, self.sort, line));
            drawn.map_err(Failure::run)?;
            match self.wish(paused)? {
                Some(Wish::Quit) => return Ok(()),
                Some(Wish::Pause) => paused = !paused,
                Some(Wish::Sort) => self.sort = self.sort.next(),
                Some(Wish::Redraw) => {}
                // A server that is away may come back: what was seen last stays on the screen.
                None => match Look::at(&self.endpoint) {
                    Ok(look) => {
                        sample = look.since(&self.before);
                        (self.asked, self.before) = (look.at, look);
                        news.clear();
                    }
                    Err(Failure::Run(message)) => {
                        news = message;
                        self.asked = Instant::now();
                    }
                    Err(other) => return Err(other),
                },
            }
        }
    }

    /// Waits for a wish; `None` when it is time for another look.
    fn wish(&mut self, paused: bool) -> Result<Option<Wish>, Failure> {
        while paused || self.asked.elapsed() < self.interval {
            let signal = self.signals.wait(Some(Duration::ZERO)).map_err(Failure::run)?;
            if matches!(signal, Some(Signal::Terminate | Signal::Interrupt)) {
                return Ok(Some(Wish::Quit));
            }
            if !event::poll(LOOK).map_err(Failure::run)? {
                continue;
            }
            let key = match event::read().map_err(Failure::run)? {
                Event::Key(key) if key.kind == KeyEventKind::Press => key,
                Event::Resize(..) => return Ok(Some(Wish::Redraw)),
                _ => continue,
            };
            let control = key.modifiers.contains(KeyModifiers::CONTROL);
            match key.code {
                KeyCode::Char('c') if control => return Ok(Some(Wish::Quit)),
                KeyCode::Char('q') | KeyCode::Esc => return Ok(Some(Wish::Quit)),
                KeyCode::Char('p') => return Ok(Some(Wish::Pause)),
                KeyCode::Char('s') => return Ok(Some(Wish::Sort)),
                _ => {}
            }
        }
        Ok(None)
    }
}
