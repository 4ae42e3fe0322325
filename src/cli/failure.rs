//! Why a command has no answer.

use detour_cni::cni::Error;
use std::fmt;
use std::process::ExitCode;

/// Either the arguments, or what they speak of.
#[derive(Debug)]
pub(super) enum Failure {
    /// The arguments can't be used.
    Usage(String),
    /// A file or an object that the arguments name is missing, or can't be understood.
    Input(Error),
    /// Something is wrong with what was asked about.
    Wrong(Error),
}

impl Failure {
    /// 2 for wrong arguments and wrong input, 1 for the rest.
    pub(super) fn code(&self) -> ExitCode {
        match self {
            Self::Usage(_) | Self::Input(_) => ExitCode::from(2),
            Self::Wrong(_) => ExitCode::FAILURE,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Wrong(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(what) => write!(f, "{what}; see --help"),
            Self::Input(error) | Self::Wrong(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Failure {}
