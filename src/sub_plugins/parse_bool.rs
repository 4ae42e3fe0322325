//! Booleans as Go reads them: what Istio's own programs do with labels and variables.

/// `strconv.ParseBool` of Go's standard library; `None` where that is an error.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_go_and_no_others() {
        for (text, meaning) in [
            ("1", Some(true)),
            ("t", Some(true)),
            ("T", Some(true)),
            ("true", Some(true)),
            ("TRUE", Some(true)),
            ("True", Some(true)),
            ("0", Some(false)),
            ("f", Some(false)),
            ("F", Some(false)),
            ("false", Some(false)),
            ("FALSE", Some(false)),
            ("False", Some(false)),
            ("", None),
            ("tRUE", None),
            ("yes", None),
            (" true", None),
        ] {
            assert_eq!(parse_bool(text), meaning, "{text:?}");
        }
    }
}
