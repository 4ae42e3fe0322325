//! The plugin's own token: requested, renewed in time, and reused while the API server is unavailable. A request runs in
//! the pool of threads, because the agent must restore configuration lists while the API server does not answer.

use super::metrics::Metrics;
use super::runtime::Tasks;
use crate::cluster::{Api, ObjectRef, Token};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use std::cell::{Cell, RefCell};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// The requested lifetime; the agent's admission policy allows no longer one. The token is bound to the node, not to the
/// agent's pod, so that the plugin works while an agent is replaced. Without an agent, it lasts for at least 40 minutes.
const LIFETIME: Duration = Duration::from_secs(60 * 60);
/// The pause after a failed request, unless the token has expired.
const RETRY_DELAY: SignedDuration = SignedDuration::from_secs(60);
/// How long the first call waits for its request. Later calls never wait: they use the result when there is one.
const FIRST_TIMEOUT: Duration = Duration::from_millis(500);

/// Why there is no token before the first request has a result.
const NOT_GRANTED: &str = "the API server has not granted the plugin's token yet";

/// The token of the service account that the plugin uses on a node.
#[derive(Debug)]
pub struct PluginToken {
    account: Api,
    plugin_account: ObjectRef,
    metrics: Metrics,
    tasks: Tasks,
    granted: RefCell<GrantedToken>,
    /// The result of the running request.
    pending: RefCell<Option<Receiver<Result<Token, String>>>>,
    /// How long the next call waits for it.
    timeout: Cell<Duration>,
}

/// The last granted token.
#[derive(Debug, Default)]
struct GrantedToken {
    token: Option<Token>,
    /// The time of the last request. An earlier current time shows that the clock was corrected.
    since: Timestamp,
    /// The time of the next request.
    renewal: Timestamp,
    /// Why the last request failed.
    failure: Option<String>,
}

impl PluginToken {
    /// Creates the token of the service account `plugin_account`, which `account` requests.
    #[must_use]
    pub fn new(account: Api, plugin_account: ObjectRef, metrics: Metrics, tasks: Tasks) -> Self {
        let (granted, pending, timeout) = (RefCell::default(), RefCell::default(), Cell::new(FIRST_TIMEOUT));
        Self { account, plugin_account, metrics, tasks, granted, pending, timeout }
    }

    /// Returns the current token. `installed` returns the token on the node, which an agent that has just started
    /// reuses while the API server grants none, even if it has expired ([`Self::expired`]).
    ///
    /// # Errors
    /// The API server grants no token, and the node has none; returns the reason.
    pub fn current(&self, installed: impl FnOnce() -> Option<String>) -> Result<String, String> {
        let mut granted = self.granted.borrow_mut();
        let fallback = || Token::of_account(&installed()?, &self.plugin_account.namespace, &self.plugin_account.name);
        let now = Timestamp::now();
        let token = granted.at(now, |kept| self.request(kept), fallback);
        let failed = token.is_err() || granted.failure.is_some() || granted.expired(now).is_some();
        self.metrics.token_renewal_failed.set(failed.into());
        Ok(token?.text)
    }

    /// Returns what the plugin lacks if its token has expired: the node is not ready, but everything else is installed.
    #[must_use]
    pub fn expired(&self) -> Option<String> {
        self.granted.borrow().expired(Timestamp::now())
    }

    /// Starts a request unless one is running, and returns its result; `None` if it has none yet. Logs a failure if the
    /// plugin keeps a token that expires at `kept`.
    fn request(&self, kept: Option<Timestamp>) -> Option<Result<Token, String>> {
        let mut pending = self.pending.borrow_mut();
        let timeout = self.timeout.replace(Duration::ZERO);
        let result = pending.get_or_insert_with(|| self.start(kept)).recv_timeout(timeout);
        let result = match result {
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err("the thread that requests the plugin's token failed".to_owned()),
            Ok(result) => result,
        };
        *pending = None;
        Some(result)
    }

    fn start(&self, kept: Option<Timestamp>) -> Receiver<Result<Token, String>> {
        let (sender, receiver) = channel();
        let (account, plugin_account, metrics) =
            (self.account.clone(), self.plugin_account.clone(), self.metrics.clone());
        let request = move || {
            let result = account.token(&plugin_account, LIFETIME).map_err(|error| error.to_string());
            if let (Err(failure), Some(kept)) = (&result, kept) {
                metrics.token_renewal_failed.set(1);
                tracing::warn!("{failure}; the plugin keeps its current token (expiry: {kept})");
            }
            // Fails only at the end of the agent.
            let _ = sender.send(result);
        };
        self.tasks.handle().spawn_blocking(request);
        receiver
    }
}

impl GrantedToken {
    /// Returns the token to use at `now`: the granted one until its renewal, then the result of `request`. If the request
    /// fails or has no result yet, returns the granted token, otherwise the `fallback`. `request` gets the expiry of the
    /// kept token if a failure would be new.
    fn at(
        &mut self,
        now: Timestamp,
        request: impl FnOnce(Option<Timestamp>) -> Option<Result<Token, String>>,
        fallback: impl FnOnce() -> Option<Token>,
    ) -> Result<Token, String> {
        if let Some(token) = self.token.as_ref().filter(|_| self.since <= now && now < self.renewal) {
            return Ok(token.clone());
        }
        let old = self.token.take().or_else(fallback);
        let kept = old.as_ref().filter(|_| self.failure.is_none()).map(|token| token.expires);
        let (token, renewal, failure) = match (request(kept), old) {
            (Some(Ok(token)), _) => (token.clone(), renewal(now, token.expires), None),
            (Some(Err(failure)), Some(old)) => {
                let delay = if now < old.expires { RETRY_DELAY } else { SignedDuration::ZERO };
                (old, now.saturating_add(delay).unwrap_or(now), Some(failure))
            }
            // The next call gets the result.
            (None, Some(old)) => (old, now, self.failure.take()),
            (Some(Err(failure)), None) => {
                self.failure = Some(failure.clone());
                return Err(failure);
            }
            (None, None) => return Err(self.failure.clone().unwrap_or_else(|| NOT_GRANTED.to_owned())),
        };
        *self = Self { token: Some(token.clone()), since: now, renewal, failure };
        Ok(token)
    }

    /// Returns what is missing if the token has expired.
    fn expired(&self, now: Timestamp) -> Option<String> {
        let expires = self.token.as_ref()?.expires;
        let failure = self.failure.as_deref().unwrap_or("the API server has not granted another one yet");
        (expires <= now).then(|| format!("a valid token of the plugin, whose token expired at {expires}: {failure}"))
    }
}

/// Returns the renewal time of a token that is granted at `now`: after a third of its life, however short the API
/// server has made that.
fn renewal(now: Timestamp, expires: Timestamp) -> Timestamp {
    let third = now.duration_until(expires) / 3;
    now.saturating_add(third).unwrap_or(expires)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn token(text: &str, expires: i64) -> Token {
        Token { text: text.into(), expires: at(expires) }
    }

    fn not_requested(_: Option<Timestamp>) -> Option<Result<Token, String>> {
        panic!("no request is expected")
    }

    fn unavailable(_: Option<Timestamp>) -> Option<Result<Token, String>> {
        Some(Err("down".into()))
    }

    fn pending(_: Option<Timestamp>) -> Option<Result<Token, String>> {
        None
    }

    fn grants(token: &Token) -> impl FnOnce(Option<Timestamp>) -> Option<Result<Token, String>> {
        let token = token.clone();
        move |_| Some(Ok(token))
    }

    #[test]
    fn a_token_is_renewed_after_a_third_of_its_life() {
        let mut granted = GrantedToken::default();
        let first = token("first", 1000 + 600);
        assert_eq!(granted.at(at(1000), grants(&first), || None), Ok(first.clone()));
        assert_eq!(granted.at(at(1199), not_requested, || None), Ok(first));
        let second = token("second", 1200 + 86_400);
        assert_eq!(granted.at(at(1200), grants(&second), || None), Ok(second.clone()));
        assert_eq!(granted.at(at(1200 + 28_799), not_requested, || None), Ok(second));
    }

    #[test]
    fn without_a_new_token_the_old_one_is_used_and_requested_once_a_minute_until_it_expires() {
        let mut granted = GrantedToken::default();
        let first = token("first", 3000);
        granted.at(at(0), grants(&first), || None).expect("given");
        assert_eq!(granted.at(at(1000), unavailable, || None), Ok(first.clone()));
        assert_eq!(granted.failure.as_deref(), Some("down"));
        assert_eq!(granted.at(at(1059), not_requested, || None), Ok(first.clone()));
        assert_eq!(granted.at(at(2999), unavailable, || None), Ok(first.clone()));
        assert_eq!(granted.expired(at(2999)), None);
        // The token stays on the node, so that the rest of the installation can be restored.
        assert_eq!(granted.at(at(3059), unavailable, || None), Ok(first.clone()));
        let missing = granted.expired(at(3059)).expect("it has expired");
        assert!(missing.contains("expired at 1970-01-01T00:50:00Z: down"), "{missing}");
        assert_eq!(granted.at(at(3059), pending, || None), Ok(first), "requested again at once");
        let second = token("second", 6000);
        assert_eq!(granted.at(at(3060), grants(&second), || None), Ok(second));
        assert_eq!((granted.failure.as_deref(), granted.expired(at(3060))), (None, None));
    }

    #[test]
    fn after_a_start_the_token_on_the_node_is_reused_until_there_is_another_one() {
        let installed = token("installed", 100);
        for now in [99, 100, 2_592_000] {
            for request in [unavailable, pending] {
                let mut granted = GrantedToken::default();
                assert_eq!(granted.at(at(now), request, || Some(installed.clone())), Ok(installed.clone()));
                assert_eq!(granted.expired(at(now)).is_some(), now >= 100, "{now}");
                let fresh = token("fresh", now + 200);
                assert_eq!(granted.at(at(now + 60), grants(&fresh), || None), Ok(fresh));
            }
        }
        assert_eq!(GrantedToken::default().at(at(0), unavailable, || None), Err("down".into()));
        assert!(GrantedToken::default().at(at(0), pending, || None).is_err());
        let fresh = token("fresh", 200);
        assert_eq!(GrantedToken::default().at(at(0), grants(&fresh), || Some(installed)), Ok(fresh));
    }

    /// The clock of a node may be wrong until it is synchronized after the boot.
    #[test]
    fn a_token_is_requested_again_after_the_clock_was_corrected() {
        let month = 2_592_000;
        let (ahead, right) = (at(2 * month), at(month));
        let mut granted = GrantedToken::default();
        granted.at(ahead, grants(&token("first", month + 86_400)), || None).expect("granted");
        let second = token("second", month + 86_400);
        assert_eq!(granted.at(right, grants(&second), || None), Ok(second));
        let behind = &mut GrantedToken::default();
        behind.at(at(0), grants(&token("first", month + 86_400)), || None).expect("granted");
        let third = token("third", month + 86_400);
        assert_eq!(behind.at(right, grants(&third), || None), Ok(third));
    }
}
