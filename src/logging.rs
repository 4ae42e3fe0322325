//! Log lines: `key=value` pairs, one line an event, on stderr and in a file. Never on stdout: that
//! belongs to the CNI result.
//!
//! How many lines a call may log, and how much of each: what others write down must not fill a disk.
//!
//! What of a call's log somebody else is told.

use crate::cni::LogLevel;
use crate::printable;
use crate::streams::Stderr;
use crate::trusted_file::append_below;
use std::borrow::Cow;
use std::path::{Component, Path};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::writer::{BoxMakeWriter, MakeWriterExt};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging for the rest of the process; a second start changes nothing. Each line has the
/// pairs of `context`. Events of dependencies are logged at level debug only. What `noticed` keeps, it
/// keeps at any level. With `lines`, only so many lines are logged; without, all are.
///
/// A file that can't be opened, or is not [`accepted`], is a warning on stderr: a full or missing disk must
/// not keep pods from starting, nor must a path that an earlier version accepted.
pub fn start(
    level: LogLevel,
    file: Option<&Path>,
    context: &[(&str, &str)],
    noticed: Option<&EventCollector>,
    lines: Option<&Lines>,
) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    if level == LevelFilter::OFF && noticed.is_none() {
        return;
    }
    let opened = file.filter(|_| level != LevelFilter::OFF);
    let opened = opened.map(|path| {
        let opened = accepted(path).map_err(io::Error::other);
        opened.and_then(|()| append_below(Path::new(DIRECTORY), path)).map(Arc::new).map_err(|error| (path, error))
    });
    let opened = opened.transpose();
    let writer = match &opened {
        Ok(Some(file)) => BoxMakeWriter::new((|| Stderr).and(Arc::clone(file))),
        Ok(None) | Err(_) => BoxMakeWriter::new(|| Stderr),
    };
    let ours = env!("CARGO_PKG_NAME").split('-').next().unwrap_or_default();
    // What they say of a request, our own errors say with the pod's name.
    let others = if level == LevelFilter::DEBUG { level } else { LevelFilter::OFF };
    let filter = Targets::new().with_target(ours, level).with_default(others);
    // Where stderr is closed, the layer's own report of that to stderr would be a panic.
    let layer = tracing_subscriber::fmt::layer()
        .event_format(LineFormat { context: pairs(context), lines: lines.cloned() })
        .with_writer(writer)
        .log_internal_errors(false)
        .with_filter(filter);
    let noticed =
        noticed.map(|noticed| noticed.clone().with_filter(Targets::new().with_target(ours, LevelFilter::DEBUG)));
    let started = tracing_subscriber::registry().with(layer).with(noticed).try_init();
    if let (Ok(()), Err((path, error))) = (started, opened) {
        tracing::warn!(file = %path.display(), %error, "log_file can't be opened; logging to stderr only");
    }
}

/// Where log files are: a path elsewhere would let the author of a configuration append to any file of
/// the node.
const DIRECTORY: &str = "/var/log";

/// Whether the plugin appends its log to a file of that path.
///
/// # Errors
/// It does not: why, and what is accepted.
pub fn accepted(file: &Path) -> Result<(), String> {
    let within = file.strip_prefix(DIRECTORY).ok().filter(|within| within.iter().next().is_some());
    let plain = |within: &Path| within.components().all(|part| matches!(part, Component::Normal(_)));
    if within.is_some_and(plain) {
        return Ok(());
    }
    Err(format!("invalid value {:?}; expected a path below {DIRECTORY} without \"..\"", file.display().to_string()))
}

fn pairs(context: &[(&str, &str)]) -> String {
    let mut line = String::new();
    for (key, value) in context.iter().filter(|(_, value)| !value.is_empty()) {
        // Writing to a string can't fail.
        let _ = pair(&mut line, key, value, CONTEXT);
    }
    line
}

/// ` key=value`, as far as there is `room` for the value; in quotes and escaped (as [`printable::line`] does
/// it) if it is not one word, or if a terminal would act on it.
fn pair(line: &mut dyn fmt::Write, key: &str, value: &str, room: usize) -> fmt::Result {
    let value = cut(value, room);
    let plain = |c: char| !c.is_whitespace() && !printable::acts(c) && c != '"' && c != '=';
    if !value.is_empty() && value.chars().all(plain) {
        write!(line, " {key}={value}")
    } else {
        write!(line, " {key}={value:?}")
    }
}

/// How an event is written.
struct LineFormat {
    context: String,
    lines: Option<Lines>,
}

impl<S, N> FormatEvent<S, N> for LineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if self.lines.as_ref().is_some_and(|lines| !lines.admit(*event.metadata().level())) {
            return Err(fmt::Error);
        }
        writer.write_str("time=")?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, " level={}", event.metadata().level().as_str().to_ascii_lowercase())?;
        let mut fields = EventFields::default();
        event.record(&mut fields);
        pair(&mut writer, "msg", &fields.message, MESSAGE)?;
        writeln!(writer, "{}{}", fields.others, self.context)
    }
}

/// What an event says.
#[derive(Default)]
struct EventFields {
    message: String,
    others: String,
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => {
                let room = OTHERS.saturating_sub(self.others.len());
                // Writing to a string can't fail.
                let _ = pair(&mut self.others, name, value, room);
            }
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// The most lines of levels info and warn of one call.
const MOST_LINES: usize = 100;
/// So much of a line's message, of all its other values, and of each value of its context is logged, in
/// bytes: together 4 KiB.
const MESSAGE: usize = 2500;
const OTHERS: usize = 800;
const CONTEXT: usize = 120;

/// Counts the lines of one call. Errors are always logged, and so are details at level debug, which the
/// administrator has asked for.
#[derive(Debug, Clone, Default)]
pub struct Lines(Arc<AtomicUsize>);

impl Lines {
    /// Whether a line of this level is still logged.
    fn admit(&self, level: Level) -> bool {
        !matches!(level, Level::INFO | Level::WARN) || self.0.fetch_add(1, Relaxed) < MOST_LINES
    }

    /// Says how many lines were left out, where any were; lines after that are counted anew.
    pub fn finish(&self) {
        let more = self.0.swap(0, Relaxed).saturating_sub(MOST_LINES);
        if more > 0 {
            tracing::warn!("{more} more lines of this call are not logged (at most {MOST_LINES} are)");
        }
    }
}

/// Returns `value` as far as it fits into `room` bytes with every escape that it needs.
fn cut(value: &str, room: usize) -> Cow<'_, str> {
    /// No byte becomes more than `\u{1b}`.
    const ESCAPED: usize = 6;
    if value.len() <= room / ESCAPED {
        return Cow::Borrowed(value);
    }
    let mut used = 0;
    let end = value.char_indices().find(|(_, c)| {
        used += c.escape_debug().map(char::len_utf8).sum::<usize>();
        used > room
    });
    end.map_or(Cow::Borrowed(value), |(end, _)| Cow::Owned(format!("{}…", &value[..end])))
}

/// As many warnings are kept, and so much of each, in characters.
const MOST_EVENTS: usize = 8;
const LONGEST: usize = 400;

/// Fills while events are logged, whatever the level of the log.
#[derive(Debug, Clone, Default)]
pub struct EventCollector(Arc<Mutex<KeptEvents>>);

#[derive(Debug, Default)]
struct KeptEvents {
    warnings: Vec<String>,
    facts: String,
}

impl EventCollector {
    fn kept(&self) -> MutexGuard<'_, KeptEvents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The warnings so far; those after the eighth are lost.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.kept().warnings.clone()
    }

    /// Who gave facts: the field `facts` of an event. Where several did, not the agent.
    #[must_use]
    pub fn facts(&self) -> String {
        self.kept().facts.clone()
    }
}

impl<S: Subscriber> Layer<S> for EventCollector {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut source = FactsSource::default();
        event.record(&mut source);
        let mut kept = self.kept();
        if !source.0.is_empty() && (kept.facts.is_empty() || kept.facts == "agent") {
            kept.facts = source.0;
        }
        if *event.metadata().level() == Level::WARN && kept.warnings.len() < MOST_EVENTS {
            let mut fields = EventFields::default();
            event.record(&mut fields);
            kept.warnings.push((fields.message + &fields.others).chars().take(LONGEST).collect());
        }
    }
}

/// The value of the field `facts`.
#[derive(Default)]
struct FactsSource(String);

impl Visit for FactsSource {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "facts" {
            value.clone_into(&mut self.0);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn a_pair_stays_on_one_line_and_is_one_word_or_quoted() {
        let pairs = pairs(&[("a", "x/y:1"), ("empty", ""), ("b", "two words"), ("c", "l1\nl2"), ("d", "k=\"v\"")]);
        assert_eq!(pairs, r#" a=x/y:1 b="two words" c="l1\nl2" d="k=\"v\"""#);
    }

    #[test]
    fn a_line_has_an_end_whatever_is_logged() {
        for value in ["a", "ä b", "\u{1b}", "\n", "\u{10ffff}", "\""] {
            let mut line = String::new();
            pair(&mut line, "msg", &value.repeat(100_000), MESSAGE).expect("a string");
            assert!(line.len() <= MESSAGE + 20, "{value:?}: {}", line.len());
            assert!(line.ends_with("…") || line.ends_with("…\""), "{value:?}");
        }
        let mut line = String::new();
        pair(&mut line, "msg", &"a b ".repeat(MESSAGE / 4), MESSAGE).expect("a string");
        assert!(!line.contains('…'), "what fits is whole");
    }

    #[test]
    fn warnings_and_the_source_of_facts_are_kept() {
        let noticed = EventCollector::default();
        let subscriber = tracing_subscriber::registry().with(noticed.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("nothing");
            tracing::warn!(why = "so", "look {}", 1);
            tracing::debug!(facts = "agent", "answered");
            tracing::debug!(facts = "api", "answered");
            tracing::debug!(facts = "agent", "answered");
            (0..20).for_each(|_| tracing::warn!("{}", "long ".repeat(1000)));
        });
        assert_eq!(noticed.facts(), "api");
        assert_eq!((noticed.warnings()[0].as_str(), noticed.warnings().len()), ("look 1 why=so", MOST_EVENTS));
        assert!(noticed.warnings().iter().all(|warning| warning.len() <= LONGEST));
    }
}
