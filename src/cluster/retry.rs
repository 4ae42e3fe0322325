//! How long an answer is waited for: which failure is worth another try, and when.

use crate::cni;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

/// After this time without an answer, a second request starts beside the first one, which continues: the server may
/// be slow, or only the connection broken. Each later one waits twice as long and replaces the oldest.
const TRY: Duration = Duration::from_secs(3);
/// The most requests for one object at the same time.
const MOST_RUNNING: usize = 2;
/// What is not there is asked for again for so long: the API server's cache, or the one of the
/// proxy before it, may lag behind the kubelet.
const LAG: Duration = Duration::from_secs(2);
/// The first wait between two tries; each is twice the one before.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// The longest wait between two tries that nobody asked for.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// A last try is made so long before the end, rather than a wait that nothing follows.
const LAST_TRY: Duration = Duration::from_millis(100);

/// Why a try failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AttemptError {
    /// The object is not there, or only an earlier one of that name: it may appear.
    Missing(String),
    /// The API server could not be asked or could not answer.
    Trouble {
        /// What happened, in the words of whoever noticed.
        cause: String,
        /// `Retry-After`.
        after: Option<Duration>,
    },
    /// Another try can't help.
    Hopeless(cni::Error),
}

/// The end of all tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RetriesExhausted {
    /// What the last try came to.
    pub(super) last: AttemptError,
    /// How many there were.
    pub(super) tries: u32,
    /// How long they took, waits included.
    pub(super) waited: Duration,
}

/// The times of the tries for one object.
#[derive(Debug)]
struct RetrySchedule {
    started: Instant,
    deadline: Instant,
    missing_since: Option<Instant>,
    tries: u32,
    hung: u32,
}

impl RetrySchedule {
    fn new(started: Instant, total: Duration) -> Self {
        Self { started, deadline: started + total, missing_since: None, tries: 0, hung: 0 }
    }

    /// Counts a try that starts at `now` beside `running` others; returns when the next one starts if none answers
    /// before. One that would replace another needs time for an answer.
    fn begin(&mut self, now: Instant, running: usize) -> Option<Instant> {
        self.tries += 1;
        self.hung += u32::from(running > 0);
        let next = now + TRY * 2_u32.pow(self.hung.min(8));
        let end = if running + 1 < MOST_RUNNING { next } else { next + TRY };
        (end < self.deadline).then_some(next)
    }

    /// How long to wait before the next try after one that failed at `now`; `None` for no more.
    fn wait(&mut self, now: Instant, failure: &AttemptError) -> Option<Duration> {
        let (end, asked) = match failure {
            AttemptError::Hopeless(_) => return None,
            AttemptError::Missing(_) => (self.deadline.min(*self.missing_since.get_or_insert(now) + LAG), None),
            AttemptError::Trouble { after, .. } => (self.deadline, *after),
        };
        let left = end.saturating_duration_since(now);
        let growing = FIRST_WAIT * 2_u32.pow(self.tries.saturating_sub(1).min(8));
        let wait = asked.unwrap_or(Duration::ZERO).max(growing.min(LONGEST_WAIT));
        (left > LAST_TRY).then(|| wait.min(left - LAST_TRY))
    }
}

/// Tries until `attempt` succeeds or its failure is not worth another try, for `total` after
/// `started` at the longest. While a try has no answer, another one may run beside it; the first answer counts.
pub(super) async fn retry<T>(
    started: Instant,
    total: Duration,
    attempt: impl AsyncFn() -> Result<T, AttemptError>,
) -> Result<T, RetriesExhausted> {
    let mut schedule = RetrySchedule::new(started, total);
    let mut running = Vec::new();
    let mut next = Some(Instant::now());
    loop {
        let now = Instant::now();
        if next.is_some_and(|next| next <= now) {
            if running.len() == MOST_RUNNING {
                drop(running.remove(0));
            }
            next = schedule.begin(now, running.len());
            running.push(Box::pin(attempt()));
        }
        let until = next.map_or(schedule.deadline, |next| next.min(schedule.deadline));
        let ended = tokio::time::timeout_at(until.into(), first(&mut running)).await;
        let now = Instant::now();
        let last = match ended {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(failure)) => {
                next = schedule.wait(now, &failure).map(|wait| now + wait);
                let goes_on = matches!(failure, AttemptError::Trouble { .. }) && !running.is_empty();
                if next.is_some() || goes_on {
                    continue;
                }
                failure
            }
            Err(_) if now < schedule.deadline => continue,
            Err(_) => {
                let cause = format!("no answer within {:.1} s", total.as_secs_f32());
                AttemptError::Trouble { cause, after: None }
            }
        };
        return Err(RetriesExhausted { last, tries: schedule.tries, waited: now - schedule.started });
    }
}

/// The result of the first of these that ends, which is removed.
async fn first<F: Future>(running: &mut Vec<Pin<Box<F>>>) -> F::Output {
    poll_fn(|context| {
        let ended = running.iter_mut().enumerate().find_map(|(index, future)| match future.as_mut().poll(context) {
            Poll::Ready(output) => Some((index, output)),
            Poll::Pending => None,
        });
        match ended {
            Some((index, output)) => {
                drop(running.remove(index));
                Poll::Ready(output)
            }
            None => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{Code, Error};

    const TOTAL: Duration = Duration::from_secs(10);

    fn trouble() -> AttemptError {
        AttemptError::Trouble { cause: "no".into(), after: None }
    }

    /// The moments of the tries, in milliseconds, when each fails at once in the same way.
    fn tries(total: Duration, failure: &AttemptError) -> Vec<u128> {
        let started = Instant::now();
        let (mut schedule, mut now, mut moments) = (RetrySchedule::new(started, total), started, Vec::new());
        loop {
            schedule.tries += 1;
            moments.push((now - started).as_millis());
            match schedule.wait(now, failure) {
                Some(wait) => now += wait,
                None => return moments,
            }
        }
    }

    #[test]
    fn trouble_is_retried_for_the_whole_wait_and_once_more_just_before_its_end() {
        let moments = tries(TOTAL, &trouble());
        assert_eq!(moments[..6], [0, 100, 300, 700, 1500, 2500]);
        assert_eq!(moments.last(), Some(&9900));
        assert_eq!(tries(Duration::from_secs(1), &trouble()), [0, 100, 300, 700, 900]);
    }

    #[test]
    fn what_is_missing_is_asked_for_during_two_seconds_from_the_first_time() {
        let missing = AttemptError::Missing("no".into());
        assert_eq!(tries(TOTAL, &missing), [0, 100, 300, 700, 1500, 1900]);
        assert_eq!(tries(Duration::from_millis(500), &missing), [0, 100, 300, 400]);

        let started = Instant::now();
        let mut schedule = RetrySchedule::new(started, TOTAL);
        let late = started + Duration::from_secs(5);
        schedule.tries = 1;
        assert!(schedule.wait(late, &missing).is_some(), "trouble before does not count");
        assert_eq!(schedule.wait(late + LAG, &missing), None);
    }

    #[test]
    fn retry_after_is_honoured_up_to_what_is_left() {
        let asked = |seconds| AttemptError::Trouble { cause: "busy".into(), after: Some(Duration::from_secs(seconds)) };
        assert_eq!(tries(TOTAL, &asked(4)), [0, 4000, 8000, 9900]);
        assert_eq!(tries(TOTAL, &asked(60)), [0, 9900]);
    }

    #[test]
    fn what_is_hopeless_is_tried_once() {
        assert_eq!(tries(TOTAL, &AttemptError::Hopeless(Error::new(Code::Forbidden, "no"))), [0]);
    }

    #[test]
    fn silence_starts_another_try_beside_the_first_and_later_ones_replace_the_oldest() {
        let started = Instant::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let mut schedule = RetrySchedule::new(started, TOTAL);
        assert_eq!(schedule.begin(started, 0), Some(at(3)));
        assert_eq!(schedule.begin(at(3), 1), None, "the third, at 9 s, would not have time for an answer");
        let mut schedule = RetrySchedule::new(started, Duration::from_secs(60));
        let begun = [(0, 0), (3, 1), (9, 1), (21, 1)].map(|(seconds, running)| schedule.begin(at(seconds), running));
        assert_eq!((begun, schedule.tries), ([Some(at(3)), Some(at(9)), Some(at(21)), Some(at(45))], 4));
        let mut brief = RetrySchedule::new(started, Duration::from_secs(3));
        assert_eq!(brief.begin(started, 0), None, "never at the end of the wait");
    }
}
