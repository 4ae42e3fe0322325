//! The one wait with a deadline: asks again in growing intervals until there is an answer.

use std::thread::park_timeout;
use std::time::{Duration, Instant};

/// The first and the longest interval between two questions.
pub type Intervals = [Duration; 2];

/// Asks again at once: for something that another process changed meanwhile.
pub const AT_ONCE: Intervals = [Duration::ZERO; 2];

/// Returns the first answer of `ask`; `None` if it has none until `timeout` is over. Asks at least once.
///
/// # Errors
/// The first error of `ask`.
pub fn until<T, E>(
    timeout: Duration,
    [mut interval, longest]: Intervals,
    mut ask: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(answer) = ask()? {
            return Ok(Some(answer));
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
            return Ok(None);
        };
        if !interval.is_zero() {
            park_timeout(interval.min(left));
        }
        interval = (interval * 2).min(longest);
    }
}
