//! The table of a benchmark: medians, ratios to another row, and targets.

use crate::cost::Cost;
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Write};
use std::path::Path;
use std::str::FromStr;

/// One row of the table.
struct Row {
    label: String,
    /// The label of the row that this one is compared with; empty: none.
    compared_with: String,
    targets: Vec<Target>,
}

/// A limit of one figure: `cpu 1.6x` (ratio), `cpu +2ms` (difference), `wall 150ms` (absolute).
struct Target {
    text: String,
    is_cpu: bool,
    limit: Limit,
}

enum Limit {
    Ratio(f64),
    DifferenceMs(f64),
    Ms(f64),
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let parts = text.split_once(' ').filter(|(figure, _)| ["cpu", "wall"].contains(figure));
        let parse = |limit: &str| {
            Some(if let Some(ratio) = limit.strip_suffix('x') {
                Limit::Ratio(ratio.parse().ok()?)
            } else if let Some(more) = limit.strip_prefix('+') {
                Limit::DifferenceMs(more.strip_suffix("ms")?.parse().ok()?)
            } else {
                Limit::Ms(limit.strip_suffix("ms")?.parse().ok()?)
            })
        };
        let limit = parts.and_then(|(_, limit)| parse(limit)).with_context(|| {
            format!("target {text:?}: expected \"cpu\" or \"wall\", and a limit such as 1.6x, +2ms or 150ms")
        })?;
        Ok(Self { text: text.to_owned(), is_cpu: text.starts_with("cpu"), limit })
    }
}

/// The medians of one label.
#[derive(Default)]
struct Figures {
    runs: usize,
    cpu_ms: f64,
    user_ms: f64,
    system_ms: f64,
    wall_ms: f64,
    max_rss_mib: f64,
    page_faults: f64,
}

impl Figures {
    fn of(costs: &[Cost]) -> Self {
        let median = |value: fn(&Cost) -> i64| median(costs.iter().map(value).collect());
        let cpu_ms = median(|c| c.user_us + c.system_us) / 1000.0;
        // The division of one short run is a matter of chance, that of all runs is not.
        let (user, all) = costs.iter().fold((0, 0), |(u, a), c| (u + c.user_us, a + c.user_us + c.system_us));
        let user_ms = cpu_ms * user as f64 / all.max(1) as f64;
        Self {
            runs: costs.len(),
            cpu_ms,
            user_ms,
            system_ms: (cpu_ms - user_ms).abs(),
            wall_ms: median(|c| c.wall_us) / 1000.0,
            max_rss_mib: median(|c| c.max_rss_kib) / 1024.0,
            page_faults: median(|c| c.page_faults),
        }
    }
}

/// Whether a target is met.
struct Outcome {
    measured: String,
    met: bool,
}

impl Target {
    fn outcome(&self, row: &Figures, base: Option<&Figures>) -> Option<Outcome> {
        let of = |figures: &Figures| if self.is_cpu { figures.cpu_ms } else { figures.wall_ms };
        let value = of(row);
        Some(match self.limit {
            Limit::Ratio(limit) => {
                let ratio = value / of(base?);
                Outcome { measured: format!("{ratio:.2}x"), met: ratio <= limit }
            }
            Limit::DifferenceMs(limit) => {
                let more = value - of(base?);
                Outcome { measured: format!("{more:+.2}ms"), met: more <= limit }
            }
            Limit::Ms(limit) => Outcome { measured: format!("{value:.1}ms"), met: value <= limit },
        })
    }
}

/// Returns the table of the costs, and the table of targets.
pub(crate) fn table(costs: &Path, rows: Option<&Path>) -> anyhow::Result<String> {
    let (mut order, mut by_label) = (Vec::new(), BTreeMap::<String, Vec<Cost>>::new());
    for line in crate::read(costs)?.lines() {
        let cost: Cost = serde_json::from_str(line)?;
        if !by_label.contains_key(&cost.label) {
            order.push(cost.label.clone());
        }
        by_label.entry(cost.label.clone()).or_default().push(cost);
    }
    let rows: Vec<Row> = match rows {
        Some(rows) => crate::read(rows)?.lines().map(str::parse).collect::<Result<_, _>>()?,
        None => order.into_iter().map(|label| Row { label, compared_with: String::new(), targets: vec![] }).collect(),
    };
    let figures: BTreeMap<_, _> = by_label.iter().map(|(label, costs)| (label.as_str(), Figures::of(costs))).collect();
    Ok(format!("{}{}", Costs { rows: &rows, figures: &figures }, Targets { rows: &rows, figures: &figures }))
}

impl FromStr for Row {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Self> {
        let parts: Vec<_> = line.split('|').collect();
        ensure!(parts.len() == 4, "expected CONTENDER|ROW|COMPARED WITH|TARGETS, got {line:?}");
        let targets = parts[3].split(", ").filter(|target| !target.is_empty());
        let targets = targets.map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { label: parts[1].to_owned(), compared_with: parts[2].to_owned(), targets })
    }
}

type FiguresOf<'a> = BTreeMap<&'a str, Figures>;

/// The table of all rows that were measured.
struct Costs<'a> {
    rows: &'a [Row],
    figures: &'a FiguresOf<'a>,
}

impl Display for Costs<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{:<44} {:>4} {:>8} {:>8} {:>9} {:>8} {:>7} {:>6} {:>7} {:>7}  compared with",
            "", "runs", "CPU ms", "user ms", "system ms", "wall ms", "RSS MiB", "faults", "x CPU", "x wall"
        )?;
        for row in self.rows {
            let Some(of) = self.figures.get(row.label.as_str()) else { continue };
            let (mut cpu, mut wall) = (String::new(), String::new());
            if let Some(base) = self.figures.get(row.compared_with.as_str()) {
                write!(cpu, "{:.2}", of.cpu_ms / base.cpu_ms)?;
                write!(wall, "{:.2}", of.wall_ms / base.wall_ms)?;
            }
            let line = format!(
                "{:<44} {:>4} {:>8.2} {:>8.2} {:>9.2} {:>8.2} {:>7.1} {:>6.0} {cpu:>7} {wall:>7}  {}",
                row.label,
                of.runs,
                of.cpu_ms,
                of.user_ms,
                of.system_ms,
                of.wall_ms,
                of.max_rss_mib,
                of.page_faults,
                row.compared_with
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The table of the targets.
struct Targets<'a> {
    rows: &'a [Row],
    figures: &'a FiguresOf<'a>,
}

impl Display for Targets<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let mut has_title = false;
        for row in self.rows {
            let Some(of) = self.figures.get(row.label.as_str()) else { continue };
            let base = self.figures.get(row.compared_with.as_str());
            for target in &row.targets {
                let Some(Outcome { measured, met }) = target.outcome(of, base) else { continue };
                if !has_title {
                    writeln!(f, "\n{:<44} {:<12} {:>10}  {:<4} compared with", "", "target", "measured", "met")?;
                    has_title = true;
                }
                let met = if met { "yes" } else { "NO" };
                let line =
                    format!("{:<44} {:<12} {measured:>10}  {met:<4} {}", row.label, target.text, row.compared_with);
                writeln!(f, "{}", line.trim_end())?;
            }
        }
        Ok(())
    }
}

fn median(mut values: Vec<i64>) -> f64 {
    values.sort_unstable();
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2] as f64,
        n => (values[n / 2 - 1] + values[n / 2]) as f64 / 2.0,
    }
}
