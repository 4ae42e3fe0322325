//! The OpenMetrics text format, as strictly as Prometheus reads it.

use std::collections::BTreeMap;

/// A metric family: `# TYPE`, and every sample by the suffix of its name and its labels.
#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) kind: String,
    pub(crate) samples: BTreeMap<(String, Labels), f64>,
}

pub(crate) type Labels = BTreeMap<String, String>;

/// Families by name.
pub(crate) struct Exposition(pub(crate) BTreeMap<String, Family>);

impl Exposition {
    pub(crate) fn parse(text: &str) -> Self {
        let body = text.strip_suffix("# EOF\n").expect("it ends with # EOF");
        let (mut families, mut current) = (BTreeMap::<String, Family>::new(), String::new());
        for line in body.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let [what, name, value] = comment.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{line:?}") };
                if name != current {
                    let before = families.insert(name.to_owned(), Family::default());
                    assert!(before.is_none(), "{name} is declared twice");
                    current = name.to_owned();
                }
                match what {
                    "TYPE" => families.get_mut(name).expect("declared").kind = value.to_owned(),
                    "HELP" => assert!(!value.is_empty(), "{name} has no help"),
                    "UNIT" => assert!(name.ends_with(&format!("_{value}")), "{name} is not in {value}"),
                    _ => panic!("{line:?}"),
                }
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?} has no value"));
                let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
                let suffix = name.strip_prefix(&*current).unwrap_or_else(|| panic!("{name} stands below {current}"));
                let labels = labels.strip_suffix('}').expect("a closing brace");
                let sample = ((suffix.to_owned(), self::labels(labels)), value.parse().expect("a number"));
                let family = families.get_mut(&current).expect("declared");
                assert!(family.samples.insert(sample.0, sample.1).is_none(), "{series} is there twice");
            }
        }
        Self(families)
    }

    /// One sample: a counter's has the suffix `_total`, an info's `_info`, a gauge's none.
    pub(crate) fn value(&self, family: &str, suffix: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.0.get(family)?.samples.get(&(suffix.to_owned(), labels)).copied()
    }
}

/// `a="b",c="d"`; no value here has a quote or a backslash.
fn labels(text: &str) -> Labels {
    assert!(!text.contains('\\'), "{text}");
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').expect("a value");
            let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).expect("quotes");
            (key.to_owned(), value.to_owned())
        })
        .collect()
}
