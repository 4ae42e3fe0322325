//! A cluster network's configuration with the plugin in its list, and without: text in, text out.
//! Whatever is somebody else's stays as it is, byte for byte.

use super::digest::Digest;
use crate::cni::json_spans::{elements, members};
use serde_json::{Map, Value};
use std::ops::Range;

/// Why a file is not one that the plugin can be put into. Runtimes skip most of these as well
/// (libcni, `NetworkConfFromBytes` and `ConfFromBytes`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableList {
    /// The file is empty: somebody is writing it, or was killed at that.
    #[error("is empty")]
    Empty,
    /// Not JSON; runtimes understand neither byte order marks nor comments nor trailing commas.
    #[error("is not JSON ({0})")]
    NotJson(String),
    /// JSON, but not an object.
    #[error("is not a JSON object")]
    NotObject,
    /// Without a name, a runtime refuses the network.
    #[error("has no \"name\"")]
    NoName,
    /// A `.conflist` without a list.
    #[error("has no \"plugins\"")]
    NoPlugins,
    /// A plugin that isn't one.
    #[error("has a member plugins[{0}] without a \"type\"")]
    NoType(usize),
    /// A `.conf` that is no plugin's configuration.
    #[error("has no \"type\"; a list of plugins belongs in a .conflist")]
    NotSingle,
    /// Multus makes its file anew from the cluster network's, and would lose the plugin.
    #[error("is Multus's own: the plugin belongs in the cluster network's file, which Multus calls")]
    Multus,
    /// The loopback interface's: no pod's network.
    #[error("is for the loopback interface only")]
    Loopback,
    /// A `.conf` has a foreign `.conflist` of the same name beside it.
    #[error("{0} stands beside it; remove the one that is not meant")]
    Twice(String),
}

/// The list `text` with `entry` in it: in place of an older one of the same `type`, else at the
/// end. The text itself where it is there already.
///
/// # Errors
/// The text is no list that a runtime would accept.
pub fn rewrite(text: &str, entry: &Value) -> Result<String, UnusableList> {
    let list = ConfList::parse(text)?;
    let own = list.of_type(&entry["type"]);
    if let [only] = own[..]
        && list.plugins[only] == *entry
    {
        return Ok(text.to_owned());
    }
    let mut plugins = list.plugins.clone();
    match own.split_first() {
        None => plugins.push(entry.clone()),
        Some((first, others)) => {
            plugins[*first] = entry.clone();
            others.iter().rev().for_each(|other| drop(plugins.remove(*other)));
        }
    }
    let edited = list.spans.as_deref().map(|spans| match own.split_first() {
        None => {
            let last = spans.last().map_or(0..0, Range::clone);
            let separator = separator(text, spans);
            let style = JsonStyle::of(text, &last, &separator);
            format!("{}{separator}{}{}", &text[..last.end], style.write(entry), &text[last.end..])
        }
        Some((first, others)) => {
            let without = cut(text, spans, others);
            let place = spans[*first].clone();
            let style = JsonStyle::of(text, &place, "");
            format!("{}{}{}", &without[..place.start], style.write(entry), &without[place.end..])
        }
    });
    Ok(list.checked(edited, plugins))
}

/// The list `text` without plugins of the type `kind`; `None` where there are none of it.
///
/// # Errors
/// As [`rewrite`].
pub fn without(text: &str, kind: &str) -> Result<Option<String>, UnusableList> {
    let list = ConfList::parse(text)?;
    let own = list.of_type(&Value::from(kind));
    if own.is_empty() {
        return Ok(None);
    }
    let mut plugins = list.plugins.clone();
    own.iter().rev().for_each(|index| drop(plugins.remove(*index)));
    let edited = list.spans.as_deref().map(|spans| cut(text, spans, &own));
    Ok(Some(list.checked(edited, plugins)))
}

/// The plugins of the list `text` that have the type `kind`.
///
/// # Errors
/// As [`rewrite`].
pub fn of_type(text: &str, kind: &str) -> Result<Vec<Value>, UnusableList> {
    let list = ConfList::parse(text)?;
    let own = list.of_type(&Value::from(kind));
    Ok(own.into_iter().map(|index| list.plugins[index].clone()).collect())
}

/// Digests of the plugins of the list `text` that have the type `kind`, as the record has them.
///
/// # Errors
/// As [`rewrite`].
pub(super) fn digests(text: &str, kind: &str) -> Result<Vec<Digest>, UnusableList> {
    Ok(of_type(text, kind)?.iter().map(Digest::of_value).collect())
}

/// The types of the list's plugins, in their order.
///
/// # Errors
/// As [`rewrite`].
pub fn types(text: &str) -> Result<Vec<String>, UnusableList> {
    let list = ConfList::parse(text)?;
    Ok(list.plugins.iter().filter_map(|plugin| Some(plugin["type"].as_str()?.to_owned())).collect())
}

/// The list that a single plugin's configuration stands for: of the same name and version (both
/// are part of what that plugin, and its address management, keep on the node).
///
/// # Errors
/// The text is no configuration that a runtime would accept.
pub fn list_of(conf: &str) -> Result<String, UnusableList> {
    let keys = object(conf)?;
    if keys.get("type").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Err(UnusableList::NotSingle);
    }
    let name = keys.get("name").filter(|name| name.is_string()).ok_or(UnusableList::NoName)?;
    let version = keys.get("cniVersion").map(|version| format!("  \"cniVersion\": {version},\n")).unwrap_or_default();
    let plugin = conf.trim().replace('\n', "\n    ");
    Ok(format!("{{\n{version}  \"name\": {name},\n  \"plugins\": [\n    {plugin}\n  ]\n}}\n"))
}

fn object(text: &str) -> Result<Map<String, Value>, UnusableList> {
    if text.trim().is_empty() {
        return Err(UnusableList::Empty);
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(keys)) => Ok(keys),
        Ok(_) => Err(UnusableList::NotObject),
        Err(_) if text.starts_with('\u{feff}') => Err(UnusableList::NotJson("it starts with a byte order mark".into())),
        Err(error) => Err(UnusableList::NotJson(error.to_string())),
    }
}

/// A plugin list that a runtime would accept.
struct ConfList {
    keys: Map<String, Value>,
    plugins: Vec<Value>,
    /// Where the plugins stand; `None` where that can't be told.
    spans: Option<Vec<Range<usize>>>,
}

impl ConfList {
    fn parse(text: &str) -> Result<Self, UnusableList> {
        let keys = object(text)?;
        if !keys.get("name").is_some_and(Value::is_string) {
            return Err(UnusableList::NoName);
        }
        let plugins = keys.get("plugins").and_then(Value::as_array).filter(|plugins| !plugins.is_empty());
        let plugins = plugins.ok_or(UnusableList::NoPlugins)?.clone();
        if let Some(index) = plugins.iter().position(|plugin| plugin["type"].as_str().is_none_or(str::is_empty)) {
            return Err(UnusableList::NoType(index));
        }
        let last = members(text, 0).into_iter().rev().find(|member| member.key == "plugins");
        let spans = last.map(|member| elements(text, member.value.start));
        Ok(Self { keys, spans: spans.filter(|spans| spans.len() == plugins.len()), plugins })
    }

    fn of_type(&self, kind: &Value) -> Vec<usize> {
        let of_type = |(index, plugin): (usize, &Value)| (plugin["type"] == *kind).then_some(index);
        self.plugins.iter().enumerate().filter_map(of_type).collect()
    }

    /// The edited text where it says what is meant, else the whole list written anew.
    fn checked(&self, edited: Option<String>, plugins: Vec<Value>) -> String {
        let mut meant = self.keys.clone();
        meant.insert("plugins".into(), plugins.into());
        let meant = Value::Object(meant);
        match edited {
            Some(text) if serde_json::from_str::<Value>(&text).is_ok_and(|value| value == meant) => text,
            _ => format!("{meant:#}\n"),
        }
    }
}

/// What stands between two plugins of the list.
fn separator(text: &str, spans: &[Range<usize>]) -> String {
    match spans {
        [.., before, last] => text[before.end..last.start].to_owned(),
        [only] => {
            let blank = |c: char| c.is_ascii_whitespace();
            let lead = text[..only.start].trim_end_matches(blank).len();
            format!(",{}", &text[lead..only.start])
        }
        [] => String::new(),
    }
}

/// The text without the elements of these indices (in ascending order), each with the separator
/// before it, the first with the one after.
fn cut(text: &str, spans: &[Range<usize>], indices: &[usize]) -> String {
    let mut left = text.to_owned();
    for index in indices.iter().rev() {
        let range = match (index.checked_sub(1), spans.get(index + 1)) {
            (Some(before), _) => spans[before].end..spans[*index].end,
            (None, Some(after)) => spans[*index].start..after.start,
            (None, None) => spans[*index].clone(),
        };
        left.replace_range(range, "");
    }
    left
}

/// How a neighbour is written, so that what is put beside it looks the same.
struct JsonStyle {
    /// Before each line but the first; `None` for all on one line.
    indent: Option<String>,
    /// What one level adds.
    unit: String,
    newline: &'static str,
}

impl JsonStyle {
    fn of(text: &str, neighbour: &Range<usize>, separator: &str) -> Self {
        let written = &text[neighbour.clone()];
        let newline = if written.contains("\r\n") || separator.contains("\r\n") { "\r\n" } else { "\n" };
        let Some((_, rest)) = written.split_once('\n') else {
            return Self { indent: None, unit: String::new(), newline };
        };
        let indent = blanks(text[..neighbour.end].rsplit('\n').next().unwrap_or_default());
        let unit = blanks(rest).strip_prefix(indent).filter(|unit| !unit.is_empty()).unwrap_or("  ");
        Self { indent: Some(indent.to_owned()), unit: unit.to_owned(), newline }
    }

    fn write(&self, entry: &Value) -> String {
        let Some(indent) = &self.indent else { return entry.to_string() };
        let two_blanks = format!("{entry:#}");
        let mut lines = two_blanks.lines();
        let mut text = lines.next().unwrap_or_default().to_owned();
        for line in lines {
            let content = line.trim_start_matches(' ');
            let levels = (line.len() - content.len()) / 2;
            text += &format!("{}{indent}{}{content}", self.newline, self.unit.repeat(levels));
        }
        text
    }
}

/// The blanks and tabs that a line starts with.
fn blanks(line: &str) -> &str {
    &line[..line.len() - line.trim_start_matches([' ', '\t']).len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry() -> Value {
        json!({"type": "detour", "chain": [{"type": "uid-exclude", "uids": ["1337"]}]})
    }

    #[test]
    fn one_line_stays_one_line() {
        let text = r#"{"name":"n","plugins":[{"type":"a"}, {"type":"b"}],"x":1.50}"#;
        let added = r#"{"name":"n","plugins":[{"type":"a"}, {"type":"b"}, {"type":"detour"}],"x":1.50}"#;
        assert_eq!(rewrite(text, &json!({"type": "detour"})), Ok(added.into()));
        assert_eq!(without(added, "detour"), Ok(Some(text.into())));
    }

    #[test]
    fn tabs_and_carriage_returns_are_kept() {
        let text =
            "{\r\n\t\"name\": \"n\",\r\n\t\"plugins\": [\r\n\t\t{\r\n\t\t\t\"type\": \"a\"\r\n\t\t}\r\n\t]\r\n}\r\n";
        let added = rewrite(text, &json!({"type": "detour"})).expect("a list");
        assert_eq!(
            added,
            text.replace("\t\t}\r\n\t]", "\t\t},\r\n\t\t{\r\n\t\t\t\"type\": \"detour\"\r\n\t\t}\r\n\t]")
        );
    }

    #[test]
    fn an_older_entry_is_replaced_where_it_is_and_doubles_go() {
        let text = r#"{"name":"n","plugins":[{"type":"detour","old":1},{"type":"a"},{"type":"detour"},{"type":"b"},{"type":"detour"}]}"#;
        let replaced = r#"{"name":"n","plugins":[{"type":"detour","new":1},{"type":"a"},{"type":"b"}]}"#;
        assert_eq!(rewrite(text, &json!({"type": "detour", "new": 1})), Ok(replaced.into()));
        assert_eq!(
            without(replaced, "detour"),
            Ok(Some(r#"{"name":"n","plugins":[{"type":"a"},{"type":"b"}]}"#.into()))
        );
    }

    #[test]
    fn a_list_whose_keys_are_escaped_or_doubled_is_restored_byte_for_byte() {
        for text in [
            r#"{"z":1,"name":"n", "pl\u0075gins" : [{"\u0074ype":"a"}],"a":2}"#,
            r#"{"name":"n","plugins":[{"type":"b"}],"\u0070lugins":[{"type":"a"}]}"#,
            r#"{"name":"n","\u0070lugins":[{"type":"b"}],"plugins":[{"type":"a"}]}"#,
        ] {
            let written = rewrite(text, &entry()).expect("a list");
            let value: Value = serde_json::from_str(&written).expect("JSON");
            assert_eq!(value["plugins"], json!([{"type": "a"}, entry()]), "{written}");
            assert_eq!(without(&written, "detour"), Ok(Some(text.to_owned())));
        }
    }

    #[test]
    fn what_a_runtime_refuses_is_refused() {
        for (text, why) in [
            ("", UnusableList::Empty),
            (" \n", UnusableList::Empty),
            ("[]", UnusableList::NotObject),
            (r#"{"plugins":[{"type":"a"}]}"#, UnusableList::NoName),
            (r#"{"name":"n"}"#, UnusableList::NoPlugins),
            (r#"{"name":"n","plugins":[]}"#, UnusableList::NoPlugins),
            (r#"{"name":"n","plugins":{}}"#, UnusableList::NoPlugins),
            (r#"{"name":"n","plugins":[{"type":"a"},{}]}"#, UnusableList::NoType(1)),
            (r#"{"name":"n","plugins":["a"]}"#, UnusableList::NoType(0)),
        ] {
            assert_eq!(rewrite(text, &entry()), Err(why), "{text}");
        }
        assert_eq!(list_of(r#"{"name":"n","plugins":[]}"#), Err(UnusableList::NotSingle));
        assert_eq!(list_of(r#"{"type":"n"}"#), Err(UnusableList::NoName));
    }

    proptest::proptest! {
        #[test]
        fn putting_in_twice_changes_nothing_and_taking_out_gives_the_text_back(
            types in proptest::collection::vec("[a-z]{1,4}", 1..4), pretty: bool, extra in "[ -~]{0,6}", escaped in 0..7_usize,
        ) {
            let plugins: Vec<_> = types.iter().map(|kind| json!({"type": kind, "k": extra})).collect();
            let value = json!({"cniVersion": "1.0.0", "name": "n", "plugins": plugins, "z": {"plugins": [extra]}});
            let text = if pretty { format!("{value:#}\n") } else { value.to_string() };
            let key = format!("\"{}\\u{:04x}{}\"", &"plugins"[..escaped], u32::from("plugins".as_bytes()[escaped]), &"plugins"[escaped + 1..]);
            let text = text.replacen("\"plugins\"", &key, 1);
            let with = rewrite(&text, &entry()).expect("a list");
            proptest::prop_assert_eq!(&rewrite(&with, &entry()).expect("a list"), &with);
            proptest::prop_assert_eq!(without(&with, "detour").expect("a list"), Some(text));
        }
    }
}
