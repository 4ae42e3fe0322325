//! Retries of an API request until its deadline: which failures are retried, and when a server that accepts no connection
//! ends them early.

use super::failure::Failure;
use crate::backoff::Backoff;
use futures_util::future::{Either, select};
use std::cell::RefCell;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::time::{sleep, sleep_until, timeout};

/// How long "not found" is retried: the cache of the API server, or of a proxy in front of it, may lag behind the
/// kubelet.
const NOT_FOUND_TIMEOUT: Duration = Duration::from_secs(2);
/// The pauses after failures, unless the server requests a longer one.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// The last attempt starts this long before the deadline.
const LAST_ATTEMPT: Duration = Duration::from_millis(100);
/// When a lookup checks whether the server accepts connections, and how long the check may take: a call that fails
/// because of it takes less than two seconds in all.
const CONNECTION_CHECK: Duration = Duration::from_millis(1500);
const CONNECTION_TIMEOUT: Duration = Duration::from_millis(300);

/// The time for all attempts of a request.
#[derive(Debug, Clone, Copy)]
pub(in crate::cluster) struct Deadline {
    pub(super) started: Instant,
    pub(super) at: Instant,
    /// Whether the attempts end early if the server accepts no connection: no other source has accepted one.
    pub(super) needs_connection: bool,
    /// Whether transient failures are retried.
    pub(super) retries: bool,
    /// Whether an object that is not found may be about to appear; if not, the first "not found" is the result.
    pub(super) awaits: bool,
}

impl Deadline {
    /// Returns the deadline for a request that starts now.
    pub(in crate::cluster) fn after(timeout: Duration) -> Self {
        let started = Instant::now();
        Self { started, at: started + timeout, needs_connection: true, retries: true, awaits: true }
    }
}

/// The host and the port of a server, or of the proxy in front of it.
pub(in crate::cluster) type ServerAddress = (String, u16);

/// Runs `attempt` until it succeeds, a retry can't help, or the deadline has passed. Returns the last failure.
pub(super) async fn retry<T>(
    deadline: Deadline,
    server: &ServerAddress,
    attempt: impl AsyncFn() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let earlier = RefCell::new(String::new());
    let all = async {
        let (mut backoff, mut not_found_until) = (BACKOFF, None);
        loop {
            let failure = match attempt().await {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            let now = Instant::now();
            let end = match failure.status {
                404 if deadline.awaits => *not_found_until.get_or_insert(now + NOT_FOUND_TIMEOUT),
                _ if deadline.retries && failure.is_transient() => deadline.at,
                _ => now,
            };
            let left = end.min(deadline.at).saturating_duration_since(now);
            if left <= LAST_ATTEMPT {
                return Err(failure);
            }
            earlier.replace(format!("; an earlier attempt failed: {failure}"));
            let pause = failure.retry_after.unwrap_or_default().max(backoff.pause(now));
            sleep(pause.min(left - LAST_ATTEMPT)).await;
        }
    };
    match select(pin!(all), pin!(given_up(deadline, server))).await {
        Either::Left((result, _)) => result,
        Either::Right((what, _)) => {
            let waited = deadline.started.elapsed().as_secs_f32();
            Err(Failure::new(format!("no {what} within {waited:.1} s{}", earlier.borrow())))
        }
    }
}

/// Waits until the deadline, or until it is clear that the server accepts no connection. Returns what is missing.
async fn given_up(deadline: Deadline, (host, port): &ServerAddress) -> &'static str {
    let check_at = deadline.started + CONNECTION_CHECK;
    if deadline.needs_connection && check_at < deadline.at {
        sleep_until(check_at.into()).await;
        let connection = timeout(CONNECTION_TIMEOUT, TcpStream::connect((host.as_str(), *port))).await;
        if !matches!(connection, Ok(Ok(_))) {
            return "connection";
        }
    }
    sleep_until(deadline.at.into()).await;
    "answer"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const TIMEOUT: Duration = Duration::from_secs(10);

    /// The times of the attempts, if each one fails at once with the same error, and the result. A server listens.
    fn attempts(timeout: Duration, error: &Failure) -> (Vec<Duration>, Failure) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        failing(Deadline::after(timeout), listener.local_addr().expect("an address").port(), error)
    }

    fn failing(deadline: Deadline, port: u16, error: &Failure) -> (Vec<Duration>, Failure) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let times = RefCell::new(Vec::new());
        let attempt = async || {
            times.borrow_mut().push(deadline.started.elapsed());
            Err::<(), _>(error.clone())
        };
        let server = ("127.0.0.1".to_owned(), port);
        let last = runtime.block_on(retry(deadline, &server, attempt)).expect_err("it fails");
        (times.into_inner(), last)
    }

    fn transient(cause: &str, seconds: Option<u64>) -> Failure {
        Failure { retry_after: seconds.map(Duration::from_secs), ..Failure::new(cause) }
    }

    fn closed_port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        listener.local_addr().expect("an address").port()
    }

    #[test]
    fn transient_errors_are_retried_until_just_before_the_deadline() {
        let (times, last) = attempts(Duration::from_secs(3), &transient("no", None));
        let least = [100, 200, 400, 800].map(Duration::from_millis);
        for (pair, least) in times.windows(2).zip(least) {
            assert!(pair[1] - pair[0] >= least, "{times:?}");
        }
        assert!(times.len() <= 7 && times.last() >= Some(&Duration::from_millis(2900)), "{times:?}");
        let is_expected = |cause: &str| cause == "no" || cause.contains("no answer within 3.");
        assert!(is_expected(&last.cause), "{last:?}");
    }

    #[test]
    fn not_found_is_retried_for_two_seconds_after_its_first_occurrence() {
        let not_found = Failure::not_found("no".into());
        let (times, last) = attempts(Duration::from_secs(600), &not_found);
        assert!(times.len() > 1 && times.last() >= Some(&Duration::from_millis(1900)), "{times:?}");
        assert_eq!(last, not_found);
    }

    #[test]
    fn retry_after_is_honored() {
        let (times, _) = attempts(Duration::from_secs(3), &transient("busy", Some(2)));
        assert!(times.len() <= 3 && times[1] >= Duration::from_secs(2), "{times:?}");
    }

    #[test]
    fn a_permanent_error_is_not_retried() {
        let error = Failure::of_status(403, "no");
        let (times, last) = attempts(TIMEOUT, &error);
        assert_eq!((times.len(), last), (1, error));
    }

    #[test]
    fn a_server_that_accepts_no_connection_ends_the_attempts_unless_another_source_does() {
        let refused = transient("refused", None);
        let (times, last) = failing(Deadline::after(Duration::from_secs(600)), closed_port(), &refused);
        let parts = ["no connection within", "an earlier attempt failed: refused"];
        assert!(parts.iter().all(|part| last.cause.contains(part)), "{last:?}");
        assert!(times.len() > 1);
        let connected = Deadline { needs_connection: false, ..Deadline::after(Duration::from_secs(3)) };
        let (times, _) = failing(connected, closed_port(), &refused);
        assert!(times.last() >= Some(&Duration::from_millis(2900)), "{times:?}");
    }
}
