//! Retries of API requests: which failures are retried, with which backoff, until which deadline.

use crate::backoff::Backoff;
use crate::cni;
use futures_util::future::select_all;
use std::future::pending;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// After this time without a response, or after half of [`Limits::silence`], a second attempt starts while the first one
/// continues: the server may be slow, or only the connection broken. For each later attempt this time doubles, and the
/// oldest attempt is dropped.
const HEDGE_DELAY: Duration = Duration::from_secs(3);
/// The maximum number of concurrent attempts.
const MAX_CONCURRENT: usize = 2;
/// How long "not found" is retried: the cache of the API server, or of a proxy in front of it, may lag behind the
/// kubelet.
const NOT_FOUND_TIMEOUT: Duration = Duration::from_secs(2);
/// The pauses after failures, unless the server requests a longer one.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// The last attempt starts this long before the deadline.
const LAST_ATTEMPT: Duration = Duration::from_millis(100);

/// How long a request is attempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// The time for all attempts.
    pub(super) timeout: Duration,
    /// The time for them while the server has sent no response.
    pub(super) silence: Option<Duration>,
}

impl From<Duration> for Limits {
    /// Returns limits that do not depend on responses.
    fn from(timeout: Duration) -> Self {
        Self { timeout, silence: None }
    }
}

/// Why an attempt failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AttemptError {
    /// The object does not exist (yet), or only an earlier one of the same name; retried for [`NOT_FOUND_TIMEOUT`].
    NotFound(String),
    /// The API server is unreachable or can't answer; retried until the deadline.
    Transient {
        /// The cause, for the error's details.
        cause: String,
        /// The response's `Retry-After`.
        retry_after: Option<Duration>,
        /// Whether there was a response.
        answered: bool,
    },
    /// A retry can't succeed.
    Permanent(cni::Error),
}

/// The error of the last attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RetriesExhausted {
    /// Why the last attempt failed.
    pub(super) last: AttemptError,
    /// The number of attempts.
    pub(super) attempts: u32,
    /// The time that they took, including backoffs.
    pub(super) elapsed: Duration,
    /// Whether the server has sent a response to one of them.
    pub(super) answered: bool,
}

/// Runs `attempt` until it succeeds, fails permanently, or the time of `limits` after `started` has passed. While an
/// attempt has no response, another one may run concurrently; the first success is returned.
pub(super) async fn retry<T>(
    started: Instant,
    limits: Limits,
    attempt: impl AsyncFn() -> Result<T, AttemptError>,
) -> Result<T, RetriesExhausted> {
    let mut schedule = RetrySchedule::new(started, limits);
    let mut running = Vec::new();
    let mut next = Some(Instant::now());
    let mut earlier = String::new();
    loop {
        let now = Instant::now();
        if next.is_some_and(|next| next <= now) {
            if running.len() == MAX_CONCURRENT {
                drop(running.remove(0));
            }
            next = schedule.start_attempt(now, running.len());
            running.push(Box::pin(attempt()));
        }
        let until = next.map_or(schedule.deadline, |next| next.min(schedule.deadline));
        let result = tokio::time::timeout_at(until.into(), first(&mut running)).await;
        let now = Instant::now();
        let last = match result {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => {
                next = schedule.backoff(now, &error).map(|backoff| now + backoff);
                let another_runs = matches!(error, AttemptError::Transient { .. }) && !running.is_empty();
                match error {
                    AttemptError::NotFound(cause) | AttemptError::Transient { cause, .. }
                        if next.is_some() || another_runs =>
                    {
                        earlier = format!("; an earlier attempt failed: {cause}");
                        continue;
                    }
                    last => last,
                }
            }
            Err(_) if now < schedule.deadline => continue,
            Err(_) => {
                let waited = schedule.deadline - schedule.started;
                let cause = format!("no answer within {:.1} s{earlier}", waited.as_secs_f32());
                AttemptError::Transient { cause, retry_after: None, answered: false }
            }
        };
        let RetrySchedule { started, attempts, answered, .. } = schedule;
        return Err(RetriesExhausted { last, attempts, elapsed: now - started, answered });
    }
}

/// When the attempts of one request start.
#[derive(Debug)]
struct RetrySchedule {
    started: Instant,
    /// The deadline now, and after a response.
    deadline: Instant,
    last_deadline: Instant,
    answered: bool,
    hedge_delay: Duration,
    not_found_since: Option<Instant>,
    backoff: Backoff,
    attempts: u32,
    /// The number of attempts that started while another one had no response.
    hedged: u32,
}

impl RetrySchedule {
    fn new(started: Instant, Limits { timeout, silence }: Limits) -> Self {
        Self {
            started,
            deadline: started + silence.map_or(timeout, |silence| silence.min(timeout)),
            last_deadline: started + timeout,
            answered: false,
            hedge_delay: silence.map_or(HEDGE_DELAY, |silence| HEDGE_DELAY.min(silence / 2)),
            not_found_since: None,
            backoff: BACKOFF,
            attempts: 0,
            hedged: 0,
        }
    }

    /// Counts an attempt that starts at `now` while `running` others run; returns when the next one starts if none of
    /// them responds before. An attempt that would replace another one only starts if it has time for a response.
    fn start_attempt(&mut self, now: Instant, running: usize) -> Option<Instant> {
        self.attempts += 1;
        self.hedged += u32::from(running > 0);
        let next = now + self.hedge_delay * 2_u32.pow(self.hedged.min(8));
        let end = if running + 1 < MAX_CONCURRENT { next } else { next + self.hedge_delay };
        (end < self.deadline).then_some(next)
    }

    /// Returns the backoff after an attempt that failed at `now`; `None` if it is not retried. A response extends the
    /// deadline.
    fn backoff(&mut self, now: Instant, error: &AttemptError) -> Option<Duration> {
        if !matches!(error, AttemptError::Transient { answered: false, .. }) {
            (self.answered, self.deadline) = (true, self.last_deadline);
        }
        let (end, requested) = match error {
            AttemptError::Permanent(_) => return None,
            AttemptError::NotFound(_) => {
                (self.deadline.min(*self.not_found_since.get_or_insert(now) + NOT_FOUND_TIMEOUT), None)
            }
            AttemptError::Transient { retry_after, .. } => (self.deadline, *retry_after),
        };
        let left = end.saturating_duration_since(now);
        let backoff = requested.unwrap_or(Duration::ZERO).max(self.backoff.pause(now));
        (left > LAST_ATTEMPT).then(|| backoff.min(left - LAST_ATTEMPT))
    }
}

/// Returns the output of the first future that ends, and removes that future. Waits forever without futures.
async fn first<F: Future>(running: &mut Vec<Pin<Box<F>>>) -> F::Output {
    if running.is_empty() {
        return pending().await;
    }
    let (output, index, _) = select_all(running.iter_mut()).await;
    drop(running.remove(index));
    output
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{Code, Error};

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn transient() -> AttemptError {
        AttemptError::Transient { cause: "no".into(), retry_after: None, answered: true }
    }

    /// The times of the attempts, in milliseconds, if each one fails at once with the same error.
    fn attempts(timeout: Duration, error: &AttemptError) -> Vec<u128> {
        let started = Instant::now();
        let (mut schedule, mut now, mut times) = (RetrySchedule::new(started, timeout.into()), started, Vec::new());
        loop {
            schedule.attempts += 1;
            times.push((now - started).as_millis());
            match schedule.backoff(now, error) {
                Some(backoff) => now += backoff,
                None => return times,
            }
        }
    }

    #[test]
    fn transient_errors_are_retried_until_just_before_the_deadline() {
        let times = attempts(TIMEOUT, &transient());
        let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        for (pause, least) in pauses.iter().zip([100, 200, 400, 800, 1000, 1000]) {
            assert!((least..least * 3 / 2).contains(pause), "{times:?}");
        }
        assert_eq!(times.last(), Some(&9900));
        assert_eq!(attempts(Duration::from_secs(1), &transient()).last(), Some(&900));
    }

    #[test]
    fn not_found_is_retried_for_two_seconds_after_its_first_occurrence() {
        let not_found = AttemptError::NotFound("no".into());
        assert_eq!(attempts(TIMEOUT, &not_found).last(), Some(&1900));
        assert_eq!(attempts(Duration::from_millis(500), &not_found).last(), Some(&400));

        let started = Instant::now();
        let mut schedule = RetrySchedule::new(started, TIMEOUT.into());
        let late = started + Duration::from_secs(5);
        schedule.attempts = 1;
        assert!(schedule.backoff(late, &not_found).is_some(), "earlier errors of other kinds do not count");
        assert_eq!(schedule.backoff(late + NOT_FOUND_TIMEOUT, &not_found), None);
    }

    #[test]
    fn retry_after_is_honored_within_the_deadline() {
        let busy = |seconds| AttemptError::Transient {
            cause: "busy".into(),
            retry_after: Some(Duration::from_secs(seconds)),
            answered: true,
        };
        assert_eq!(attempts(TIMEOUT, &busy(4)), [0, 4000, 8000, 9900]);
        assert_eq!(attempts(TIMEOUT, &busy(60)), [0, 9900]);
    }

    #[test]
    fn a_permanent_error_is_not_retried() {
        assert_eq!(attempts(TIMEOUT, &AttemptError::Permanent(Error::new(Code::Forbidden, "no"))), [0]);
    }

    #[test]
    fn without_a_response_a_second_attempt_runs_beside_the_first_and_later_ones_replace_the_oldest() {
        let started = Instant::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let mut schedule = RetrySchedule::new(started, TIMEOUT.into());
        assert_eq!(schedule.start_attempt(started, 0), Some(at(3)));
        assert_eq!(schedule.start_attempt(at(3), 1), None, "the third, at 9 s, would not have time for a response");
        let mut schedule = RetrySchedule::new(started, Duration::from_secs(60).into());
        let next =
            [(0, 0), (3, 1), (9, 1), (21, 1)].map(|(seconds, running)| schedule.start_attempt(at(seconds), running));
        assert_eq!((next, schedule.attempts), ([Some(at(3)), Some(at(9)), Some(at(21)), Some(at(45))], 4));
        let mut short = RetrySchedule::new(started, Duration::from_secs(3).into());
        assert_eq!(short.start_attempt(started, 0), None, "no attempt starts at the deadline");
    }

    #[test]
    fn a_server_that_sends_no_response_is_given_up_earlier_and_one_that_does_has_the_whole_time() {
        let silence = Duration::from_secs(2);
        let (started, limits) = (Instant::now(), Limits { timeout: TIMEOUT, silence: Some(silence) });
        let at = |milliseconds| started + Duration::from_millis(milliseconds);
        let unanswered = AttemptError::Transient { cause: "refused".into(), retry_after: None, answered: false };
        let mut schedule = RetrySchedule::new(started, limits);
        assert_eq!(schedule.start_attempt(started, 0), Some(at(1000)), "a second attempt has time for a response");
        assert!(schedule.backoff(at(100), &unanswered).is_some());
        assert_eq!(schedule.backoff(at(1950), &unanswered), None);
        assert_eq!((schedule.deadline, schedule.answered), (started + silence, false));
        assert!(schedule.backoff(at(1950), &transient()).is_some());
        assert!(schedule.backoff(at(8000), &unanswered).is_some(), "it has answered once");
        assert_eq!((schedule.deadline, schedule.answered), (started + TIMEOUT, true));
        let short = RetrySchedule::new(started, Limits { timeout: silence / 2, silence: Some(silence) });
        assert_eq!(short.deadline, started + silence / 2);
    }
}
