//! Suggestions for misspelled names.

/// The least similarity (Jaro-Winkler) of a name that is suggested; clap uses the same for subcommands and flags
/// with 0.7, which for short keys suggests names of another meaning.
const SIMILAR: f64 = 0.85;

/// The longest name that is compared, in bytes: others decide how long a name is, and comparing costs its length
/// times that of each known name.
const LONGEST: usize = 64;

/// Returns the known name that `given` most likely means, if one is similar enough.
pub fn closest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if given.len() > LONGEST {
        return None;
    }
    let similarity = |name: &'a str| (strsim::jaro_winkler(&given.to_lowercase(), &name.to_lowercase()), name);
    let similar = known.into_iter().map(similarity).filter(|(similarity, _)| *similarity >= SIMILAR);
    similar.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

/// Returns `; did you mean "NAME"?` for the name that `given` most likely means, else an empty string.
pub fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    closest(given, known).map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_name_suggests_the_closest_and_another_word_none() {
        let known = ["chain", "capabilities", "uid-exclude", "dns-exclude", "istio-redirect", "log_level"];
        for (given, wanted) in [
            ("chian", Some("chain")),
            ("Chain", Some("chain")),
            ("uid-exclud", Some("uid-exclude")),
            ("dns_exclude", Some("dns-exclude")),
            ("istio-redirct", Some("istio-redirect")),
            ("loglevel", Some("log_level")),
            ("bridge", None),
            ("portmap", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(closest(given, known), wanted, "{given}");
        }
        assert_eq!(closest(&"chain".repeat(1 << 20), known), None, "it is not compared");
        assert_eq!(did_you_mean("chian", known), "; did you mean \"chain\"?");
        assert_eq!(did_you_mean("bridge", known), "");
    }
}
