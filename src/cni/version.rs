//! Versions of the CNI protocol: which are spoken here, which results have the same shape, which
//! commands each allows.

use super::{CniCommand, Code, Error};

/// Every version that is spoken here, oldest first.
pub const SUPPORTED: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// What an absent or empty `cniVersion` means (SPEC.md).
pub const UNSTATED: &str = SUPPORTED[0];

/// The version that is spoken where no configuration says which.
pub const NEWEST: &str = SUPPORTED[SUPPORTED.len() - 1];

/// Versions whose results have the same shape, by the first of them (reference library,
/// `pkg/types/020`, `040`, `100`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultShape {
    /// `ip4` and `ip6`, one address each.
    V0_1,
    /// `interfaces`, `ips` with their `version`, `routes`.
    V0_3,
    /// `ips` without `version`.
    V1_0,
}

impl ResultShape {
    /// The family of a version, where it is spoken here.
    #[must_use]
    pub fn of(version: &str) -> Option<Self> {
        [Self::V0_1, Self::V0_3, Self::V1_0].into_iter().find(|family| family.versions().contains(&version))
    }

    /// Its versions, oldest first.
    #[must_use]
    pub fn versions(self) -> &'static [&'static str] {
        match self {
            Self::V0_1 => &SUPPORTED[..2],
            Self::V0_3 => &SUPPORTED[2..5],
            Self::V1_0 => &SUPPORTED[5..],
        }
    }
}

/// Refuses a configuration whose version is not spoken here or does not know `command`, in the
/// reference library's order and words (`pkg/skel`).
///
/// # Errors
/// [`Code::IncompatibleVersion`]; [`Code::Decode`] where the command depends on the version and
/// the version is no numbers.
pub fn check(version: &str, command: CniCommand) -> Result<(), Error> {
    let incompatible = |msg: String| Err(Error::new(Code::IncompatibleVersion, msg));
    if let Some(since) = since(command) {
        let asked = numbers(version)?;
        if asked < numbers(since)? {
            return incompatible(format!("config version does not allow {command}"));
        }
        if asked > numbers(NEWEST)? {
            return incompatible(format!("plugin version does not allow {command}"));
        }
    }
    if SUPPORTED.contains(&version) {
        return Ok(());
    }
    let quoted = SUPPORTED.map(|v| format!("{v:?}")).join(" ");
    incompatible("incompatible CNI versions".to_owned())
        .map_err(|error| error.with_details(format!("config is {version:?}, plugin supports [{quoted}]")))
}

/// The first version that knows `command`, where it isn't the first of all.
fn since(command: CniCommand) -> Option<&'static str> {
    match command {
        CniCommand::Add | CniCommand::Del => None,
        CniCommand::Check => Some("0.4.0"),
        CniCommand::Gc | CniCommand::Status => Some("1.1.0"),
    }
}

/// Major, minor and micro; what is not written is 0.
///
/// # Errors
/// [`Code::Decode`]: one of them is no number, or there are more.
pub fn numbers(version: &str) -> Result<[u32; 3], Error> {
    let mut numbers = [0; 3];
    let parts: Vec<&str> = version.split('.').collect();
    if parts.len() > numbers.len() {
        return Err(Error::new(Code::Decode, format!("invalid version {version:?}: too many parts")));
    }
    for ((number, part), place) in numbers.iter_mut().zip(parts).zip(["major", "minor", "micro"]) {
        let msg = || format!("failed to convert {place} version part {part:?}: it is not a number");
        *number = part.parse().map_err(|_| Error::new(Code::Decode, msg()))?;
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_has_one_family() {
        for version in SUPPORTED {
            let family = ResultShape::of(version).expect("a family");
            assert!(family.versions().contains(&version));
        }
        assert_eq!(ResultShape::of("0.2.0"), Some(ResultShape::V0_1));
        assert_eq!(ResultShape::of("0.4.0"), Some(ResultShape::V0_3));
        assert_eq!(ResultShape::of("1.0.0"), Some(ResultShape::V1_0));
        assert_eq!(ResultShape::of("1.2.0"), None);
    }

    #[test]
    fn commands_appear_with_their_version() {
        for (version, command, allowed) in [
            ("0.1.0", CniCommand::Add, true),
            ("0.1.0", CniCommand::Del, true),
            ("0.3.1", CniCommand::Check, false),
            ("0.4.0", CniCommand::Check, true),
            ("1.0.0", CniCommand::Status, false),
            ("1.0.0", CniCommand::Gc, false),
            ("1.1.0", CniCommand::Gc, true),
        ] {
            assert_eq!(check(version, command).is_ok(), allowed, "{version} {command}");
        }
    }

    #[test]
    fn the_words_are_those_of_the_reference_library() {
        let says = |version, command| check(version, command).expect_err("refused");
        let error = says("9.9.9", CniCommand::Add);
        assert_eq!((error.code, error.msg.as_str()), (Code::IncompatibleVersion, "incompatible CNI versions"));
        let supported = r#"["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#;
        assert_eq!(error.details, format!(r#"config is "9.9.9", plugin supports {supported}"#));
        assert_eq!(says("0.3.1", CniCommand::Check).msg, "config version does not allow CHECK");
        assert_eq!(says("9", CniCommand::Gc).msg, "plugin version does not allow GC");
        assert_eq!(says("1.1", CniCommand::Status).msg, "incompatible CNI versions");
        assert_eq!(says("1.x", CniCommand::Status).code, Code::Decode);
        assert_eq!(says("1.1.0.0", CniCommand::Status).code, Code::Decode);
        assert_eq!(says("1.x", CniCommand::Del).code, Code::IncompatibleVersion);
    }
}
