//! The order of the binary's sections for `hack/layout.sh`: those that calls of the plugin use come first.

use crate::read;
use anyhow::{Context, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The parts of the binary whose sections get an order.
const ORDERED: [&str; 4] = [".rodata", ".text", ".data", ".bss"];

/// A section of an object file, as it is in the binary.
struct Section {
    /// The part of the binary, for example `.text`.
    part: &'static str,
    /// The address after its last byte.
    end: u64,
    /// The pattern that matches it in a linker script.
    pattern: String,
}

/// Writes the file `PART.ld` in `directory` for each of the ordered parts: patterns for the sections that the traces
/// touch, in the order of the first trace that does, then by address. `map` is the map of lld; each trace has one
/// hexadecimal address per line.
pub(crate) fn layout(map: &Path, directory: &Path, traces: &[PathBuf]) -> anyhow::Result<()> {
    let sections = sections(&read(map)?);
    if sections.is_empty() {
        bail!("{}: expected a map that lld wrote, got no sections", map.display());
    }
    let mut ordered = Vec::new();
    for trace in traces {
        let mut touched = BTreeSet::new();
        for line in read(trace)?.lines() {
            let address = u64::from_str_radix(line, 16).with_context(|| format!("{}: {line:?}", trace.display()))?;
            touched.extend(sections.range(..=address).next_back().filter(|(_, s)| address < s.end).map(|(at, _)| at));
        }
        ordered.extend(touched.into_iter().map(|at| &sections[at]));
    }
    for part in ORDERED {
        let mut written = BTreeSet::new();
        let patterns = ordered.iter().filter(|s| s.part == part && written.insert(&s.pattern)).map(|s| &s.pattern);
        let text: String = patterns.flat_map(|pattern| [pattern, "\n"]).collect();
        let file = directory.join(format!("{}.ld", part.trim_start_matches('.')));
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        println!("{}: {} sections", file.display(), written.len());
    }
    Ok(())
}

/// Reads the sections of the ordered parts by address. Each line of the map has address, load address, size, alignment
/// and a name: of a part of the binary, of a section (indented by 8), or of a symbol (by 16).
fn sections(map: &str) -> BTreeMap<u64, Section> {
    let mut part = None;
    let mut sections = BTreeMap::new();
    for line in map.lines() {
        let Some((numbers, name)) = line.split_at_checked(49) else { continue };
        let numbers: Vec<&str> = numbers.split_ascii_whitespace().collect();
        let [address, _, size, _] = numbers[..] else { continue };
        if !name.starts_with(' ') {
            part = ORDERED.into_iter().find(|part| *part == name);
        }
        let (Some(part), Some(pattern)) = (part, pattern(name.trim_start())) else { continue };
        if let (Ok(address), Ok(size)) = (u64::from_str_radix(address, 16), u64::from_str_radix(size, 16)) {
            sections.insert(address, Section { part, end: address + size, pattern });
        }
    }
    sections
}

/// Returns the pattern for `FILE:(SECTION)`. Hashes of crates and the numbers of copies of a function differ from build
/// to build. Sections of the C library without a name of their own are matched by the file.
fn pattern(name: &str) -> Option<String> {
    let (file, section) = name.strip_suffix(')')?.split_once(":(")?;
    if ORDERED.contains(&section) {
        let (_, file) = file.rsplit_once('/')?;
        let member = file.strip_prefix("libc.a(").and_then(|member| member.strip_suffix(')'));
        return member.map(|member| format!("*libc.a:{member}({section})"));
    }
    let mut pattern = String::new();
    for (index, piece) in section.split("Cs").enumerate() {
        let after_hash = piece.find('_').filter(|_| index > 0);
        let hash = &piece[..after_hash.unwrap_or_default()];
        if after_hash.is_some() && hash.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            pattern.extend(["Cs*", &piece[hash.len()..]]);
        } else {
            pattern.extend([if index > 0 { "Cs" } else { "" }, piece]);
        }
    }
    let is_copy = |number: &str| number.bytes().all(|byte| byte.is_ascii_digit()) && !section.contains("Lanon");
    if let Some((name, _)) = pattern.rsplit_once('.').filter(|(_, number)| is_copy(number)) {
        pattern = format!("{name}.*");
    }
    Some(format!("*({pattern})"))
}
