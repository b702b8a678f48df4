//! `serval top [PATH|URL|FILE]`.

use std::io::{IsTerminal as _, stdin, stdout};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use sys::signal::{Signal, Signals};

use super::{Failure, Sets};
use crate::screen::Screen;
use crate::top::{Grid, Sample, Sort, draw};
use server::config::ControlSocket;
use server::control::ConfigSource;
use server::control::discovery;
use server::exporter::page::{Endpoint, Page};

pub(super) const HELP: &str = "\
Rates, drops, queue depths (mean/largest mqueue), the time of requests in each stage and the states
of workers, computed from two reads of the server's metrics. Without an argument the command uses
the control socket of the only server of this user; if there are several, name one. A narrow
terminal shows fewer columns. Keys: q quits, p pauses, s changes the order.

Examples:
  serval top
  serval top http://127.0.0.1:9464/metrics --interval 0.5
  serval top service.toml --once
  serval top 127.0.0.1:9464 --json

Exit codes: 0 success, 1 no answer, 2 no terminal, several servers, or neither a control socket nor
metrics in the file.";

/// Interval of checks for keys and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Args, Debug)]
pub(super) struct Options {
    /// The server's control socket, its metrics (http://HOST:PORT/metrics or HOST:PORT), or its configuration file
    /// [default: the one server this user runs]
    #[arg(value_name = "PATH|URL|FILE")]
    target: Option<String>,

    /// Seconds between two samples, from 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,

    /// Show one sample and end; implied by --json
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
    let source = source(options)?;
    let interval = Duration::from_secs_f64(options.interval);
    let once = options.once || screen.json;
    let on_terminal = stdin().is_terminal() && stdout().is_terminal();
    if !once && !on_terminal {
        let message = "serval top needs a terminal; use --once or --json";
        return Err(Failure::Usage(message.to_owned()));
    }
    let first = Snapshot::at(&source)?;
    if once {
        std::thread::sleep(interval);
        let sample = Snapshot::at(&source)?.since(&first);
        let table = |grid: Grid| grid.table().render(screen);
        let tables = || Grid::of(&sample).into_iter().map(table).collect::<Vec<_>>().join("\n");
        screen.show(tables, || sample.to_json());
        return Ok(());
    }
    // Signals are handled as values from before the terminal changes, so that every end restores it.
    let signals = Signals::install().map_err(Failure::run)?;
    let (asked, sort) = (first.at, Sort::default());
    let mut view = View { source, interval, signals, before: first, asked, sort };
    // Restores the terminal also on a panic.
    let mut terminal = ratatui::try_init().map_err(Failure::run)?;
    let ended = view.watch(&mut terminal);
    ratatui::restore();
    ended
}

/// The source of the pages.
enum Source {
    /// `engine.metrics`.
    Http(Endpoint),
    /// A control socket.
    Control(PathBuf),
}

impl Source {
    fn name(&self) -> String {
        match self {
            Self::Http(endpoint) => endpoint.url(),
            Self::Control(path) => path.display().to_string(),
        }
    }

    fn fetch(&self) -> Result<Page, Failure> {
        match self {
            Self::Http(endpoint) => endpoint.fetch().map_err(Failure::run),
            Self::Control(path) => Ok(Page::parse(&discovery::metrics(path)?)),
        }
    }
}

/// The given socket or address, or the one in the given configuration file; by default the only running server.
fn source(options: &Options) -> Result<Source, Failure> {
    let Some(target) = &options.target else {
        return Ok(Source::Control(discovery::find_one(None)?));
    };
    let path = Path::new(target);
    if std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        return Ok(Source::Control(path.to_owned()));
    }
    if target.starts_with("http://") || !path.is_file() {
        let endpoint = Endpoint::parse(target);
        return endpoint.map(Source::Http).map_err(|error| Failure::Usage(error.to_string()));
    }
    let sets = options.overrides.sets.clone();
    let config = ConfigSource { path: path.to_owned(), sets }.load()?;
    match (config.metrics.filter(|address| address.port() != 0), config.control) {
        (Some(address), _) => {
            Endpoint::parse(&address.to_string()).map(Source::Http).map_err(Failure::run)
        }
        (None, ControlSocket::At(path)) => Ok(Source::Control(path)),
        (None, ControlSocket::Auto) => Ok(Source::Control(discovery::find_one(Some(path))?)),
        (None, ControlSocket::Off) => Err(Failure::Usage(format!(
            "{target} turns engine.control off and sets no engine.metrics with a port: set one of them, or give a URL"
        ))),
    }
}

/// A page and the time at which it was read.
struct Snapshot {
    page: Page,
    at: Instant,
}

impl Snapshot {
    fn at(source: &Source) -> Result<Self, Failure> {
        let page = source.fetch()?;
        Ok(Self { page, at: Instant::now() })
    }

    fn since(&self, before: &Self) -> Sample {
        Sample::between(&before.page, &self.page, self.at - before.at)
    }
}

/// The meaning of a key or a signal.
enum Action {
    Quit,
    Pause,
    Sort,
    Redraw,
}

struct View {
    source: Source,
    interval: Duration,
    signals: Signals,
    before: Snapshot,
    /// When the server was last asked, whether it answered or not.
    asked: Instant,
    sort: Sort,
}

impl View {
    fn watch(&mut self, terminal: &mut DefaultTerminal) -> Result<(), Failure> {
        let url = self.source.name();
        let (mut paused, mut news) = (false, String::new());
        // Until there are two samples, the view is static.
        let mut sample = self.before.since(&self.before);
        loop {
            sample.sort(self.sort);
            let line = if paused { "paused" } else { news.as_str() };
            let drawn = terminal.draw(|frame| draw(frame, &url, &sample, self.sort, line));
            drawn.map_err(Failure::run)?;
            match self.action(paused)? {
                Some(Action::Quit) => return Ok(()),
                Some(Action::Pause) => paused = !paused,
                Some(Action::Sort) => self.sort = self.sort.next(),
                Some(Action::Redraw) => {}
                // The server may come back: the last values stay on the screen.
                None => match Snapshot::at(&self.source) {
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

    /// Waits for an action; `None` when the next sample is due.
    fn action(&mut self, paused: bool) -> Result<Option<Action>, Failure> {
        while paused || self.asked.elapsed() < self.interval {
            let signal = self.signals.wait(Some(Duration::ZERO)).map_err(Failure::run)?;
            if matches!(signal, Some(Signal::Terminate | Signal::Interrupt)) {
                return Ok(Some(Action::Quit));
            }
            if !event::poll(POLL_INTERVAL).map_err(Failure::run)? {
                continue;
            }
            let key = match event::read().map_err(Failure::run)? {
                Event::Key(key) if key.kind == KeyEventKind::Press => key,
                Event::Resize(..) => return Ok(Some(Action::Redraw)),
                _ => continue,
            };
            let control = key.modifiers.contains(KeyModifiers::CONTROL);
            match key.code {
                KeyCode::Char('c') if control => return Ok(Some(Action::Quit)),
                KeyCode::Char('q') | KeyCode::Esc => return Ok(Some(Action::Quit)),
                KeyCode::Char('p') => return Ok(Some(Action::Pause)),
                KeyCode::Char('s') => return Ok(Some(Action::Sort)),
                _ => {}
            }
        }
        Ok(None)
    }
}
