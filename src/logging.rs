//! Logging of a plugin call: lines of `key=value` pairs on stderr and in a file, with limits so that untrusted input
//! cannot fill a disk. stdout is reserved for the CNI result.

use crate::printable;
use crate::streams::Stderr;
use crate::trusted_file::append_below;
use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

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
/// Each line has the pairs of `context` that have a value. Events of dependencies are logged only at level debug. `call`
/// collects events regardless of the level, and limits the number of lines.
///
/// If the file can't be opened or its path is not accepted ([`check_log_file`]), a warning on stderr is logged: neither
/// a full disk nor a path that an earlier version accepted may prevent pods from starting.
pub fn start(level: LevelFilter, file: Option<&Path>, context: &[(&str, &str)], call: Option<&CallEvents>) {
    let open = |path| {
        check_log_file(path).map_err(io::Error::other)?;
        append_below(Path::new(DIRECTORY), path)
    };
    let path = file.filter(|_| level != LevelFilter::OFF);
    let (file, failure) = match path.map(open).transpose() {
        Ok(file) => (file, None),
        Err(error) => (None, path.map(|path| (path, error))),
    };
    let context = context.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let log = Log { level, context, file, call: call.cloned() };
    if let (Ok(()), Some((path, error))) = (tracing::subscriber::set_global_default(log), failure) {
        tracing::warn!(file = %path.display(), %error, "can't open log_file; logging to stderr only");
    }
}

/// Returns the pairs that have a value.
fn pairs(context: &[(String, String)]) -> String {
    let mut pairs = String::new();
    let with_value = context.iter().filter(|(_, value)| !value.is_empty());
    with_value.for_each(|(key, value)| add_pair(&mut pairs, key, value, MAX_CONTEXT_BYTES));
    pairs
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

/// Appends ` key=value` with at most `room` bytes of the value. The value is quoted and escaped (as by
/// [`printable::line`]) if it is not one word or contains characters that terminals interpret.
fn add_pair(line: &mut String, key: &str, value: &str, room: usize) {
    let value = cut(value, room);
    let plain = |c: char| !c.is_whitespace() && !printable::is_interpreted(c) && c != '"' && c != '=';
    *line += &if !value.is_empty() && value.chars().all(plain) {
        format!(" {key}={value}")
    } else {
        format!(" {key}={value:?}")
    };
}

/// Prints and collects the events of this process. Spans, which only dependencies have, are ignored: the registry of
/// `tracing-subscriber` allocates a table for them in each call of the plugin.
struct Log {
    level: LevelFilter,
    /// The pairs at the end of each line.
    context: Vec<(String, String)>,
    file: Option<File>,
    call: Option<CallEvents>,
}

impl Log {
    fn prints(&self, metadata: &Metadata<'_>) -> bool {
        // This crate's errors for failed requests have more context than those of dependencies.
        *metadata.level() <= self.level && (is_own(metadata) || self.level == LevelFilter::DEBUG)
    }

    fn collects(&self, metadata: &Metadata<'_>) -> bool {
        self.call.is_some() && is_own(metadata) && *metadata.level() <= Level::DEBUG
    }

    fn line(&self, level: Level, fields: &EventFields) -> String {
        let mut line = "time=".to_owned();
        // Writing to a string can't fail.
        let _ = SystemTime.format_time(&mut Writer::new(&mut line));
        line += &format!(" level={}", level.as_str().to_ascii_lowercase());
        add_pair(&mut line, "msg", &fields.message, MAX_MESSAGE_BYTES);
        [&line, &fields.others, &pairs(&self.context), "\n"].concat()
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !metadata.is_span() && (self.prints(metadata) || self.collects(metadata))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(if self.call.is_some() { LevelFilter::DEBUG } else { self.level })
    }

    fn event(&self, event: &Event<'_>) {
        let (level, mut fields) = (*event.metadata().level(), EventFields::default());
        event.record(&mut fields);
        if let Some(call) = self.call.as_ref().filter(|_| self.collects(event.metadata())) {
            call.collect(level, &fields);
        }
        if self.prints(event.metadata()) && self.call.as_ref().is_none_or(|call| call.admits_line(level)) {
            let line = self.line(level, &fields);
            // A failure to write a log line can't be logged.
            let _ = Stderr.write_all(line.as_bytes());
            let _ = self.file.as_ref().map(|mut file| file.write_all(line.as_bytes()));
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Returns whether an event is this crate's, not a dependency's.
fn is_own(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("detour")
}

/// The message and the other fields of an event.
#[derive(Default)]
struct EventFields {
    message: String,
    others: String,
    /// The value of the field `facts`.
    facts: String,
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => return value.clone_into(&mut self.message),
            "facts" => value.clone_into(&mut self.facts),
            _ => {}
        }
        let room = MAX_FIELDS_BYTES.saturating_sub(self.others.len());
        add_pair(&mut self.others, field.name(), value, room);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// Returns the start of `value` that fits into `room` bytes including escapes.
fn cut(value: &str, room: usize) -> Cow<'_, str> {
    let mut used = 0;
    let end = value.char_indices().find(|(_, c)| {
        used += c.escape_debug().map(char::len_utf8).sum::<usize>();
        used > room
    });
    end.map_or(Cow::Borrowed(value), |(end, _)| Cow::Owned(format!("{}…", &value[..end])))
}

/// What was collected from the events of one call, at any log level.
#[derive(Debug, Default)]
pub struct Collected {
    /// The first warnings.
    pub warnings: Vec<String>,
    /// The source of facts: the field `facts` of an event. A source other than the agent takes precedence.
    pub facts: String,
    /// The number of lines that are limited.
    lines: usize,
}

/// Collects the events of one call, and limits its lines.
#[derive(Debug, Clone, Default)]
pub struct CallEvents(Arc<Mutex<Collected>>);

impl CallEvents {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn collect(&self, level: Level, fields: &EventFields) {
        let mut events = self.lock();
        if !fields.facts.is_empty() && (events.facts.is_empty() || events.facts == "agent") {
            events.facts.clone_from(&fields.facts);
        }
        if level == Level::WARN && events.warnings.len() < MAX_EVENTS {
            let text = [fields.message.as_str(), &fields.others].concat();
            events.warnings.push(text.chars().take(MAX_EVENT_CHARACTERS).collect());
        }
    }

    /// Counts a line and returns whether it is logged. Errors are always logged, and so are events at level debug, which
    /// only the administrator can enable.
    fn admits_line(&self, level: Level) -> bool {
        if !matches!(level, Level::INFO | Level::WARN) {
            return true;
        }
        let mut events = self.lock();
        events.lines += 1;
        events.lines <= MAX_LINES
    }

    /// Returns what was collected, and logs how many lines were dropped, if any.
    #[must_use]
    pub fn finish(&self) -> Collected {
        let collected = mem::take(&mut *self.lock());
        let dropped = collected.lines.saturating_sub(MAX_LINES);
        if dropped > 0 {
            tracing::warn!("{dropped} log lines of this call dropped: limit of {MAX_LINES} lines reached");
        }
        collected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_one_word_are_quoted() {
        let mut pairs = String::new();
        for (key, value) in [("a", "x/y:1"), ("b", "two words"), ("c", "l1\nl2"), ("d", "k=\"v\"")] {
            add_pair(&mut pairs, key, value, MAX_CONTEXT_BYTES);
        }
        assert_eq!(pairs, r#" a=x/y:1 b="two words" c="l1\nl2" d="k=\"v\"""#);
    }

    #[test]
    fn context_without_a_value_is_omitted() {
        let context = [("network", "n"), ("pod", "")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let line = Log { context, ..log(LevelFilter::INFO, None) }.line(Level::INFO, &EventFields::default());
        assert!(line.ends_with(" level=info msg=\"\" network=n\n"), "{line}");
    }

    #[test]
    fn long_values_are_truncated_and_the_context_stays() {
        let log = Log { context: vec![("pod".to_owned(), "shop/web-0".to_owned())], ..log(LevelFilter::INFO, None) };
        for value in ["a", "ä b", "\u{1b}", "\n", "\u{10ffff}", "\""] {
            let mut fields = EventFields { message: value.repeat(100_000), ..EventFields::default() };
            let room = MAX_FIELDS_BYTES;
            add_pair(&mut fields.others, "key", &value.repeat(100_000), room);
            let line = log.line(Level::INFO, &fields);
            assert!(line.len() <= 4096, "{value:?}: {}", line.len());
            assert!(line.ends_with("… pod=shop/web-0\n") || line.ends_with("…\" pod=shop/web-0\n"), "{value:?}");
        }
        let fields = EventFields { message: "a b ".repeat(MAX_MESSAGE_BYTES / 4), ..EventFields::default() };
        assert!(!log.line(Level::INFO, &fields).contains('…'), "a value that fits is complete");
    }

    fn log(level: LevelFilter, call: Option<CallEvents>) -> Log {
        Log { level, context: Vec::new(), file: None, call }
    }

    #[test]
    fn events_of_dependencies_are_printed_only_at_level_debug() {
        let is_enabled = |level, call, is_own| {
            tracing::subscriber::with_default(log(level, call), || match is_own {
                true => [tracing::enabled!(Level::INFO), tracing::enabled!(Level::DEBUG)],
                false => {
                    [tracing::enabled!(target: "kube", Level::INFO), tracing::enabled!(target: "kube", Level::DEBUG)]
                }
            })
        };
        assert_eq!(is_enabled(LevelFilter::INFO, None, true), [true, false]);
        assert_eq!(is_enabled(LevelFilter::INFO, None, false), [false, false]);
        assert_eq!(is_enabled(LevelFilter::DEBUG, None, false), [true, true]);
        let call = Some(CallEvents::default());
        assert_eq!(is_enabled(LevelFilter::ERROR, call.clone(), true), [true, true]);
        assert_eq!(is_enabled(LevelFilter::ERROR, call, false), [false, false]);
    }

    #[test]
    fn warnings_and_the_source_of_facts_are_collected() {
        let call = CallEvents::default();
        tracing::subscriber::with_default(log(LevelFilter::OFF, Some(call.clone())), || {
            tracing::info!("nothing");
            tracing::warn!(why = "so", "look {}", 1);
            tracing::debug!(facts = "agent", "answered");
            tracing::debug!(facts = "api", "answered");
            tracing::debug!(facts = "agent", "answered");
            (0..20).for_each(|_| tracing::warn!("{}", "long ".repeat(1000)));
        });
        let Collected { warnings, facts, .. } = call.finish();
        assert_eq!(facts, "api");
        assert_eq!((warnings[0].as_str(), warnings.len()), ("look 1 why=so", MAX_EVENTS));
        assert!(warnings.iter().all(|warning| warning.len() <= MAX_EVENT_CHARACTERS));
    }
}
