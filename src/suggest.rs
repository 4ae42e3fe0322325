//! Suggestions for misspelled names.

/// The minimum similarity (Jaro-Winkler) of a suggestion. clap uses 0.7 for subcommands and flags, which for short
/// keys suggests unrelated names.
const MIN_SIMILARITY: f64 = 0.85;

/// The maximum length of a name that is compared, in bytes. Names come from untrusted users, and a comparison costs
/// the product of both lengths.
const MAX_NAME_BYTES: usize = 64;

/// Returns the candidate that is most similar to `given`, if one is similar enough.
pub fn closest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if given.len() > MAX_NAME_BYTES {
        return None;
    }
    let similarity = |name: &'a str| (strsim::jaro_winkler(&given.to_lowercase(), &name.to_lowercase()), name);
    let similar = candidates.into_iter().map(similarity).filter(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    similar.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

/// Returns `; did you mean "NAME"?` with the candidate that is most similar to `given`, else an empty string.
pub fn did_you_mean<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    closest(given, candidates).map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_similar_name_is_suggested() {
        let candidates = ["chain", "capabilities", "uid-exclude", "dns-exclude", "istio-redirect", "log_level"];
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
            assert_eq!(closest(given, candidates), wanted, "{given}");
        }
        assert_eq!(closest(&"chain".repeat(1 << 20), candidates), None, "it is not compared");
        assert_eq!(did_you_mean("chian", candidates), "; did you mean \"chain\"?");
        assert_eq!(did_you_mean("bridge", candidates), "");
    }
}
