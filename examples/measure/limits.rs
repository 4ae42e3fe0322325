//! Compares counts, which hardly vary from run to run, with limits in a file.

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

/// The file of limits.
#[derive(Serialize, Deserialize, Default)]
struct Limits {
    /// The compiler that built the program when the values were written.
    compiler: String,
    values: BTreeMap<String, Limit>,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
struct Limit {
    value: u64,
    tolerance_percent: u64,
}

impl Limit {
    fn highest(self) -> u64 {
        self.value + self.value * self.tolerance_percent / 100
    }

    fn lowest(self) -> u64 {
        self.value - self.value * self.tolerance_percent / 100
    }
}

/// The tolerance of a new value, in percent: more than counts vary from run to run, and less than a change that an
/// operator notices.
const USUAL_TOLERANCE: u64 = 10;

/// Prints a table of the counts, and fails if one exceeds its limit. With `update`, writes them to the file instead.
pub(crate) fn guard(file: &Path, counts: &Path, compiler: &str, update: bool) -> anyhow::Result<ExitCode> {
    let counts = parse(&crate::read(counts)?)?;
    let limits: Limits = match std::fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("limits {}", file.display()))?,
        Err(error) if update && error.kind() == std::io::ErrorKind::NotFound => Limits::default(),
        Err(error) => return Err(error).with_context(|| format!("read {}", file.display())),
    };
    if update {
        let values = counts.into_iter().map(|(name, value)| {
            let tolerance_percent = limits.values.get(&name).map_or(USUAL_TOLERANCE, |limit| limit.tolerance_percent);
            (name, Limit { value, tolerance_percent })
        });
        let new = Limits { compiler: compiler.to_owned(), values: values.collect() };
        std::fs::write(file, text(&new)?).with_context(|| format!("write {}", file.display()))?;
        println!("{}: {} values written", file.display(), new.values.len());
        return Ok(ExitCode::SUCCESS);
    }
    let report = Report::new(&limits, &counts);
    print!("{}", report.table);
    if report.has_lower {
        println!("lower: if this is a lasting gain, lower the limits: hack/instructions.sh --update");
    }
    if report.exceeded.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    if limits.compiler != compiler {
        println!("compiler: {compiler}; the limits are from {}", limits.compiler);
    }
    println!(
        "{}: exceeded: {}; make the plugin cheaper, or state in the commit message why it costs more and run \
         hack/instructions.sh --update (docs/cost.md)",
        file.display(),
        report.exceeded.join("; ")
    );
    Ok(ExitCode::FAILURE)
}

fn parse(text: &str) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        let parsed = line.split_once('|').and_then(|(name, count)| Some((name.to_owned(), count.parse().ok()?)));
        let (name, count) = parsed.with_context(|| format!("expected NAME|COUNT, got {line:?}"))?;
        ensure!(counts.insert(name, count).is_none(), "two counts of the same name: {line:?}");
    }
    Ok(counts)
}

/// One value a line, so that a change of it is one line of a diff.
fn text(limits: &Limits) -> anyhow::Result<String> {
    let mut lines = Vec::new();
    for (name, limit) in &limits.values {
        lines.push(format!("    {}: {}", serde_json::to_string(name)?, serde_json::to_string(limit)?));
    }
    let compiler = serde_json::to_string(&limits.compiler)?;
    Ok(format!("{{\n  \"compiler\": {compiler},\n  \"values\": {{\n{}\n  }}\n}}\n", lines.join(",\n")))
}

struct Report {
    table: String,
    /// The names of values above their limits, or without one, each with its change.
    exceeded: Vec<String>,
    has_lower: bool,
}

impl Report {
    fn new(limits: &Limits, counts: &BTreeMap<String, u64>) -> Self {
        let mut report = Self { table: String::new(), exceeded: Vec::new(), has_lower: false };
        report.row("", ["expected", "tolerance", "measured", "change"], "");
        for (name, &count) in counts {
            let measured = count.to_string();
            let Some(&limit) = limits.values.get(name) else {
                report.row(name, ["", "", &measured, ""], "NO LIMIT");
                report.exceeded.push(format!("{name} (no limit)"));
                continue;
            };
            let change = format!("{:+.2} %", (count as f64 / limit.value as f64 - 1.0) * 100.0);
            let verdict = if count > limit.highest() {
                report.exceeded.push(format!("{name} ({change})"));
                "EXCEEDED"
            } else if count < limit.lowest() {
                report.has_lower = true;
                "lower"
            } else {
                "ok"
            };
            let tolerance = format!("{} %", limit.tolerance_percent);
            report.row(name, [&limit.value.to_string(), &tolerance, &measured, &change], verdict);
        }
        for name in limits.values.keys().filter(|name| !counts.contains_key(*name)) {
            report.row(name, [""; 4], "NOT MEASURED");
            report.exceeded.push(format!("{name} (not measured)"));
        }
        report
    }

    fn row(&mut self, name: &str, [expected, tolerance, measured, change]: [&str; 4], verdict: &str) {
        let line = format!("{name:<52} {expected:>9} {tolerance:>9} {measured:>9} {change:>9}  {verdict}");
        // Writing to a string can't fail.
        let _ = writeln!(self.table, "{}", line.trim_end());
    }
}
