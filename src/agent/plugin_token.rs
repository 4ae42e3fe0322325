//! The plugin's own token: requested, renewed in time, and reused while the API server is unavailable.

use super::metrics::Metrics;
use crate::cluster::{ObjectRef, ServiceAccount, Token};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use std::cell::RefCell;
use std::time::Duration;

/// The requested lifetime. The token is not bound to the agent's pod, so that the plugin works while an agent is
/// replaced. A token that is renewed after a third of a day lasts through a night without agent or API server, and a
/// stolen one is useless the day after.
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// The pause after a failed request.
const RETRY_DELAY: SignedDuration = SignedDuration::from_secs(60);

/// The token of the service account that the plugin uses on a node.
#[derive(Debug)]
pub struct PluginToken {
    account: ServiceAccount,
    plugin_account: ObjectRef,
    metrics: Metrics,
    granted: RefCell<GrantedToken>,
}

/// The last granted token.
#[derive(Debug, Default)]
struct GrantedToken {
    token: Option<Token>,
    /// The time of the next request.
    renewal: Timestamp,
    /// Why the last request failed.
    failure: Option<String>,
}

impl PluginToken {
    /// Creates the token of the service account `plugin_account`, which `account` requests.
    #[must_use]
    pub fn new(account: ServiceAccount, plugin_account: ObjectRef, metrics: Metrics) -> Self {
        Self { account, plugin_account, metrics, granted: RefCell::default() }
    }

    /// Returns the current token. `installed` returns the token on the node, which an agent that has just started
    /// reuses while the API server grants none.
    ///
    /// # Errors
    /// The API server grants no token, and none is valid; returns the reason.
    pub fn current(&self, installed: impl FnOnce() -> Option<String>) -> Result<String, String> {
        let mut granted = self.granted.borrow_mut();
        let was_logged = granted.failure.is_some();
        let request = || self.account.token(&self.plugin_account, LIFETIME).map_err(|error| error.to_string());
        let fallback = || Token::of_account(&installed()?, &self.plugin_account.namespace, &self.plugin_account.name);
        let token = granted.at(Timestamp::now(), request, fallback);
        self.metrics.token_renewal_failed(token.is_err() || granted.failure.is_some());
        let token = token?;
        if let Some(failure) = granted.failure.as_ref().filter(|_| !was_logged) {
            tracing::warn!("{failure}; the plugin keeps its current token, valid until {}", token.expires);
        }
        Ok(token.text)
    }
}

impl GrantedToken {
    /// Returns the token to use at `now`: the granted one until its renewal, then the result of `request`. If that
    /// fails, returns the granted token or else the `fallback`, unless it has expired.
    fn at(
        &mut self,
        now: Timestamp,
        request: impl FnOnce() -> Result<Token, String>,
        fallback: impl FnOnce() -> Option<Token>,
    ) -> Result<Token, String> {
        if let Some(token) = self.token.as_ref().filter(|_| now < self.renewal) {
            return Ok(token.clone());
        }
        let (token, renewal, failure) = match request() {
            Ok(token) => (token.clone(), renewal(now, token.expires), None),
            Err(failure) => match self.token.take().or_else(fallback).filter(|token| now < token.expires) {
                Some(token) => (token, now.saturating_add(RETRY_DELAY).unwrap_or(now), Some(failure)),
                None => return Err(failure),
            },
        };
        *self = Self { token: Some(token.clone()), renewal, failure };
        Ok(token)
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

    fn not_requested() -> Result<Token, String> {
        panic!("no request is expected")
    }

    fn unavailable() -> Result<Token, String> {
        Err("down".into())
    }

    #[test]
    fn a_token_is_renewed_after_a_third_of_its_life() {
        let mut granted = GrantedToken::default();
        let first = token("first", 1000 + 600);
        assert_eq!(granted.at(at(1000), || Ok(first.clone()), || None), Ok(first.clone()));
        assert_eq!(granted.at(at(1199), not_requested, || None), Ok(first));
        let second = token("second", 1200 + 86_400);
        assert_eq!(granted.at(at(1200), || Ok(second.clone()), || None), Ok(second.clone()));
        assert_eq!(granted.at(at(1200 + 28_799), not_requested, || None), Ok(second));
    }

    #[test]
    fn without_a_new_token_the_old_one_is_used_until_it_expires_and_requested_once_a_minute() {
        let mut granted = GrantedToken::default();
        let first = token("first", 3000);
        granted.at(at(0), || Ok(first.clone()), || None).expect("given");
        assert_eq!(granted.at(at(1000), unavailable, || None), Ok(first.clone()));
        assert_eq!(granted.failure.as_deref(), Some("down"));
        assert_eq!(granted.at(at(1059), not_requested, || None), Ok(first.clone()));
        assert_eq!(granted.at(at(2999), unavailable, || None), Ok(first));
        assert_eq!(granted.at(at(3059), unavailable, || None), Err("down".into()));
        let second = token("second", 6000);
        assert_eq!(granted.at(at(3060), || Ok(second.clone()), || None), Ok(second));
        assert_eq!(granted.failure, None);
    }

    #[test]
    fn after_a_start_a_valid_token_on_the_node_is_reused() {
        let installed = token("installed", 100);
        assert_eq!(GrantedToken::default().at(at(99), unavailable, || Some(installed.clone())), Ok(installed.clone()));
        assert_eq!(GrantedToken::default().at(at(100), unavailable, || Some(installed.clone())), Err("down".into()));
        let fresh = token("fresh", 200);
        assert_eq!(
            GrantedToken::default().at(at(0), || Ok(fresh.clone()), || panic!("no fallback is expected")),
            Ok(fresh)
        );
    }
}
