//! Versions of the CNI protocol: the supported ones, their result formats, and the commands that each allows.

use super::error::{Code, Error};
use super::request::CniCommand;

/// The supported versions, oldest first.
pub const SUPPORTED: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The version of a configuration without `cniVersion` (SPEC.md).
pub const UNSTATED: &str = SUPPORTED[0];

/// The newest supported version, for answers without a configuration.
pub const NEWEST: &str = SUPPORTED[SUPPORTED.len() - 1];

/// The format of results, named after the first version that has it (reference library, `pkg/types/020`, `040`,
/// `100`).
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
    /// Returns the result format of a version; `None` if the version is not supported.
    #[must_use]
    pub fn of(version: &str) -> Option<Self> {
        [Self::V0_1, Self::V0_3, Self::V1_0].into_iter().find(|shape| shape.versions().contains(&version))
    }

    /// Returns the versions with this format, oldest first.
    #[must_use]
    pub fn versions(self) -> &'static [&'static str] {
        match self {
            Self::V0_1 => &SUPPORTED[..2],
            Self::V0_3 => &SUPPORTED[2..5],
            Self::V1_0 => &SUPPORTED[5..],
        }
    }
}

/// Checks that the version of a configuration is supported and has `command`, in the order and with the messages of
/// the reference library (`pkg/skel`).
///
/// # Errors
/// [`Code::IncompatibleVersion`]; [`Code::Decode`] if the command depends on the version and the version is not
/// numeric.
pub fn check(version: &str, command: CniCommand) -> Result<(), Error> {
    let incompatible = |msg: String| Err(Error::new(Code::IncompatibleVersion, msg));
    if let Some(since) = first_version_with(command) {
        let requested = numbers(version)?;
        if requested < numbers(since)? {
            return incompatible(format!("config version does not allow {command}"));
        }
        if requested > numbers(NEWEST)? {
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

/// Returns the first version with `command`; `None` if all versions have it.
fn first_version_with(command: CniCommand) -> Option<&'static str> {
    match command {
        CniCommand::Add | CniCommand::Del => None,
        CniCommand::Check => Some("0.4.0"),
        CniCommand::Gc | CniCommand::Status => Some("1.1.0"),
    }
}

/// Parses major, minor and micro version; missing parts are 0.
///
/// # Errors
/// [`Code::Decode`]: a part is not a number, or there are more than three.
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
    fn each_version_has_one_result_format() {
        for version in SUPPORTED {
            let shape = ResultShape::of(version).expect("a result format");
            assert!(shape.versions().contains(&version));
        }
        assert_eq!(ResultShape::of("0.2.0"), Some(ResultShape::V0_1));
        assert_eq!(ResultShape::of("0.4.0"), Some(ResultShape::V0_3));
        assert_eq!(ResultShape::of("1.0.0"), Some(ResultShape::V1_0));
        assert_eq!(ResultShape::of("1.2.0"), None);
    }

    #[test]
    fn commands_require_their_version() {
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
    fn messages_are_those_of_the_reference_library() {
        let refused = |version, command| check(version, command).expect_err("refused");
        let error = refused("9.9.9", CniCommand::Add);
        assert_eq!((error.code, error.msg.as_str()), (Code::IncompatibleVersion, "incompatible CNI versions"));
        let supported = r#"["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#;
        assert_eq!(error.details, format!(r#"config is "9.9.9", plugin supports {supported}"#));
        assert_eq!(refused("0.3.1", CniCommand::Check).msg, "config version does not allow CHECK");
        assert_eq!(refused("9", CniCommand::Gc).msg, "plugin version does not allow GC");
        assert_eq!(refused("1.1", CniCommand::Status).msg, "incompatible CNI versions");
        assert_eq!(refused("1.x", CniCommand::Status).code, Code::Decode);
        assert_eq!(refused("1.1.0.0", CniCommand::Status).code, Code::Decode);
        assert_eq!(refused("1.x", CniCommand::Del).code, Code::IncompatibleVersion);
    }
}
