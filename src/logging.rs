//! Logging of a plugin call: lines of `key=value` pairs on stderr and in a file, with limits so that untrusted input
//! cannot fill a disk. stdout is reserved for the CNI result.

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

/// The directory of log files. Other paths are refused, since the author of a configuration could append to any file
/// of the node.
const DIRECTORY: &str = "/var/log";
/// The maximum number of lines of levels info and warn in one call.
const MAX_LINES: usize = 100;
/// The maximum lengths of a line's message, of its other values together, and of each value of its context, in bytes:
/// 4 KiB in total.
const MAX_MESSAGE_BYTES: usize = 2500;
const MAX_FIELDS_BYTES: usize = 800;
const MAX_CONTEXT_BYTES: usize = 120;
/// The maximum number of collected warnings, and of characters in each.
const MAX_EVENTS: usize = 8;
const MAX_EVENT_CHARACTERS: usize = 400;

/// Starts logging for the rest of the process; later calls have no effect.
///
/// Each line has the pairs of `context`. Events of dependencies are logged only at level debug. `collector` receives
/// events at every level. `lines` limits the number of lines.
///
/// If the file can't be opened or its path is not accepted ([`check_log_file`]), a warning on stderr is logged: neither
/// a full disk nor a path that an earlier version accepted may prevent pods from starting.
pub fn start(
    level: LogLevel,
    file: Option<&Path>,
    context: &[(&str, &str)],
    collector: Option<&EventCollector>,
    lines: Option<&Lines>,
) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    if level == LevelFilter::OFF && collector.is_none() {
        return;
    }
    let opened = file.filter(|_| level != LevelFilter::OFF);
    let opened = opened.map(|path| {
        let opened = check_log_file(path).map_err(io::Error::other);
        opened.and_then(|()| append_below(Path::new(DIRECTORY), path)).map(Arc::new).map_err(|error| (path, error))
    });
    let opened = opened.transpose();
    let writer = match &opened {
        Ok(Some(file)) => BoxMakeWriter::new((|| Stderr).and(Arc::clone(file))),
        Ok(None) | Err(_) => BoxMakeWriter::new(|| Stderr),
    };
    let own = env!("CARGO_PKG_NAME").split('-').next().unwrap_or_default();
    // This crate's errors for failed requests have more context than those of dependencies.
    let dependencies = if level == LevelFilter::DEBUG { level } else { LevelFilter::OFF };
    let filter = Targets::new().with_target(own, level).with_default(dependencies);
    // If stderr is closed, the layer would report that to stderr and panic.
    let layer = tracing_subscriber::fmt::layer()
        .event_format(LineFormat { context: pairs(context), lines: lines.cloned() })
        .with_writer(writer)
        .log_internal_errors(false)
        .with_filter(filter);
    let debug = Targets::new().with_target(own, LevelFilter::DEBUG);
    let collector = collector.map(|collector| collector.clone().with_filter(debug));
    let started = tracing_subscriber::registry().with(layer).with(collector).try_init();
    if let (Ok(()), Err((path, error))) = (started, opened) {
        tracing::warn!(file = %path.display(), %error, "can't open log_file; logging to stderr only");
    }
}

/// Checks that the plugin may append its log to this file.
///
/// # Errors
/// The path is not below `/var/log`; the message has the expected form.
pub fn check_log_file(file: &Path) -> Result<(), String> {
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
        let _ = pair(&mut line, key, value, MAX_CONTEXT_BYTES);
    }
    line
}

/// Appends ` key=value` with at most `room` bytes of the value. The value is quoted and escaped (as by
/// [`printable::line`]) if it is not one word or contains characters that terminals interpret.
fn pair(line: &mut dyn fmt::Write, key: &str, value: &str, room: usize) -> fmt::Result {
    let value = cut(value, room);
    let plain = |c: char| !c.is_whitespace() && !printable::is_interpreted(c) && c != '"' && c != '=';
    if !value.is_empty() && value.chars().all(plain) {
        write!(line, " {key}={value}")
    } else {
        write!(line, " {key}={value:?}")
    }
}

/// The format of log lines.
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
        pair(&mut writer, "msg", &fields.message, MAX_MESSAGE_BYTES)?;
        writeln!(writer, "{}{}", fields.others, self.context)
    }
}

/// The message and the other fields of an event.
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
                let room = MAX_FIELDS_BYTES.saturating_sub(self.others.len());
                // Writing to a string can't fail.
                let _ = pair(&mut self.others, name, value, room);
            }
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// Counts and limits the lines of one call. Errors are always logged, and so are events at level debug, which only
/// the administrator can enable.
#[derive(Debug, Clone, Default)]
pub struct Lines(Arc<AtomicUsize>);

impl Lines {
    /// Counts a line and returns whether it is logged.
    fn admit(&self, level: Level) -> bool {
        !matches!(level, Level::INFO | Level::WARN) || self.0.fetch_add(1, Relaxed) < MAX_LINES
    }

    /// Logs how many lines were dropped, if any, and resets the counter.
    pub fn finish(&self) {
        let dropped = self.0.swap(0, Relaxed).saturating_sub(MAX_LINES);
        if dropped > 0 {
            tracing::warn!("{dropped} log lines of this call dropped: limit of {MAX_LINES} lines reached");
        }
    }
}

/// Returns the start of `value` that fits into `room` bytes including escapes.
fn cut(value: &str, room: usize) -> Cow<'_, str> {
    /// The maximum length of an escaped byte: `\u{1b}`.
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

/// Collects warnings and the source of facts from events, independently of the log level.
#[derive(Debug, Clone, Default)]
pub struct EventCollector(Arc<Mutex<CollectedEvents>>);

#[derive(Debug, Default)]
struct CollectedEvents {
    warnings: Vec<String>,
    facts: String,
}

impl EventCollector {
    fn lock(&self) -> MutexGuard<'_, CollectedEvents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first warnings, at most `MAX_EVENTS`.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.lock().warnings.clone()
    }

    /// Returns the source of facts: the field `facts` of an event. A source other than the agent takes precedence.
    #[must_use]
    pub fn facts(&self) -> String {
        self.lock().facts.clone()
    }
}

impl<S: Subscriber> Layer<S> for EventCollector {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut source = FactsSource::default();
        event.record(&mut source);
        let mut events = self.lock();
        if !source.0.is_empty() && (events.facts.is_empty() || events.facts == "agent") {
            events.facts = source.0;
        }
        if *event.metadata().level() == Level::WARN && events.warnings.len() < MAX_EVENTS {
            let mut fields = EventFields::default();
            event.record(&mut fields);
            events.warnings.push((fields.message + &fields.others).chars().take(MAX_EVENT_CHARACTERS).collect());
        }
    }
}

/// The value of the field `facts` of an event.
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
    fn values_that_are_not_one_word_are_quoted() {
        let pairs = pairs(&[("a", "x/y:1"), ("empty", ""), ("b", "two words"), ("c", "l1\nl2"), ("d", "k=\"v\"")]);
        assert_eq!(pairs, r#" a=x/y:1 b="two words" c="l1\nl2" d="k=\"v\"""#);
    }

    #[test]
    fn long_values_are_truncated() {
        for value in ["a", "ä b", "\u{1b}", "\n", "\u{10ffff}", "\""] {
            let mut line = String::new();
            pair(&mut line, "msg", &value.repeat(100_000), MAX_MESSAGE_BYTES).expect("a string");
            assert!(line.len() <= MAX_MESSAGE_BYTES + 20, "{value:?}: {}", line.len());
            assert!(line.ends_with("…") || line.ends_with("…\""), "{value:?}");
        }
        let mut line = String::new();
        pair(&mut line, "msg", &"a b ".repeat(MAX_MESSAGE_BYTES / 4), MAX_MESSAGE_BYTES).expect("a string");
        assert!(!line.contains('…'), "a value that fits is complete");
    }

    #[test]
    fn warnings_and_the_source_of_facts_are_collected() {
        let collector = EventCollector::default();
        let subscriber = tracing_subscriber::registry().with(collector.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("nothing");
            tracing::warn!(why = "so", "look {}", 1);
            tracing::debug!(facts = "agent", "answered");
            tracing::debug!(facts = "api", "answered");
            tracing::debug!(facts = "agent", "answered");
            (0..20).for_each(|_| tracing::warn!("{}", "long ".repeat(1000)));
        });
        assert_eq!(collector.facts(), "api");
        assert_eq!((collector.warnings()[0].as_str(), collector.warnings().len()), ("look 1 why=so", MAX_EVENTS));
        assert!(collector.warnings().iter().all(|warning| warning.len() <= MAX_EVENT_CHARACTERS));
    }
}
