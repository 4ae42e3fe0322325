//! The plugin's own token: one task requests it and renews it in time. The agent uses the last granted token, or that on
//! the node, while the API server grants none.

use super::metrics::Metrics;
use crate::cluster::{Api, ObjectRef, Token};
use crate::wait::Backoff;
use k8s_openapi::jiff::Timestamp;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

/// The requested lifetime; the agent's admission policy allows no longer one. The token is bound to the node, not to the
/// agent's pod, so that the plugin works while an agent is replaced. Without an agent, it lasts for at least 40 minutes.
const LIFETIME: Duration = Duration::from_secs(60 * 60);
/// The pauses after failed requests.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60));
/// A token is renewed at most this often, even if the API server grants a short one.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(60);
/// How long the start waits for the first request.
const FIRST_TIMEOUT: Duration = Duration::from_millis(500);

/// The token of the service account that the plugin uses on a node.
#[derive(Debug)]
pub struct PluginToken {
    plugin_account: ObjectRef,
    granted: watch::Receiver<Granted>,
}

/// The results of the requests.
#[derive(Debug, Clone, Default)]
struct Granted {
    /// The last granted token.
    token: Option<Token>,
    /// Why the last request failed.
    failure: Option<String>,
}

impl PluginToken {
    /// Starts the task that requests the token of `plugin_account` with the permissions of `account`.
    pub async fn start(account: Api, plugin_account: ObjectRef, metrics: Metrics) -> Self {
        let (sender, mut granted) = watch::channel(Granted::default());
        spawn_local(renew(account, plugin_account.clone(), metrics, sender));
        // Without a result, the agent starts with the token on the node.
        let _ = timeout(FIRST_TIMEOUT, granted.changed()).await;
        Self { plugin_account, granted }
    }

    /// Returns the current token, and what the plugin lacks if that has expired: the node is not ready then, but everything
    /// else is installed. `installed` returns the token on the node, which an agent that has just started reuses while the
    /// API server grants none.
    ///
    /// # Errors
    /// The API server grants no token, and the node has none; returns the reason.
    pub fn current(&self, installed: impl FnOnce() -> Option<String>) -> Result<(String, Option<String>), String> {
        let Granted { token, failure } = self.granted.borrow().clone();
        let of_node = || Token::of_account(&installed()?, &self.plugin_account.namespace, &self.plugin_account.name);
        let failure = failure.unwrap_or_else(|| "the API server has not granted the plugin's token yet".to_owned());
        let Token { text, expires } = token.or_else(of_node).ok_or_else(|| failure.clone())?;
        let expired = format!("a valid token of the plugin, whose token expired at {expires}: {failure}");
        Ok((text, (expires <= Timestamp::now()).then_some(expired)))
    }
}

/// Requests a token again and again, until nothing uses it.
async fn renew(account: Api, of: ObjectRef, metrics: Metrics, granted: watch::Sender<Granted>) {
    let mut backoff = BACKOFF;
    loop {
        let result = account.token(&of, LIFETIME).await;
        metrics.set("plugin_token_renewal_failed", [], result.is_err());
        let pause = match &result {
            Ok(token) => {
                backoff.reset();
                renewal(Timestamp::now(), token.expires)
            }
            Err(_) => backoff.pause(Instant::now()),
        };
        granted.send_modify(|granted| match result {
            Ok(token) => *granted = Granted { token: Some(token), failure: None },
            Err(error) => {
                if granted.failure.is_none() {
                    tracing::warn!("{error}; the plugin keeps the token that it has");
                }
                granted.failure = Some(error.to_string());
            }
        });
        tokio::select! {
            () = sleep(pause) => {}
            () = granted.closed() => return,
        }
    }
}

/// Returns the pause after which a token that is granted at `now` is renewed: a third of its life, however short the API
/// server has made that. The clock of a node may be wrong until it is synchronized after the boot.
fn renewal(now: Timestamp, expires: Timestamp) -> Duration {
    let third = now.duration_until(expires) / 3;
    Duration::try_from(third).unwrap_or_default().clamp(SHORTEST_RENEWAL, LIFETIME / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn token(expires: i64) -> Token {
        Token { text: format!("until-{expires}"), expires: at(expires) }
    }

    #[test]
    fn a_token_is_renewed_after_a_third_of_its_life_whatever_the_clock_shows() {
        for (now, expires, seconds) in [(0, 3600, 1200), (0, 600, 200), (2_592_000, 3600, 60), (0, 2_592_000, 1200)] {
            assert_eq!(renewal(at(now), at(expires)), Duration::from_secs(seconds), "{now}, {expires}");
        }
    }

    #[test]
    fn the_last_token_is_used_until_another_one_is_granted() {
        let (sender, granted) = watch::channel(Granted::default());
        let plugin_account = ObjectRef { namespace: "istio-system".into(), name: "detour".into() };
        let plugin = PluginToken { plugin_account, granted };
        let none = || None;
        assert!(plugin.current(none).expect_err("no token").contains("not granted"));
        sender.send_replace(Granted { token: None, failure: Some("down".into()) });
        assert_eq!(plugin.current(none), Err("down".into()));
        let (old, fresh) = (token(1000), token(i64::from(u32::MAX)));
        sender.send_replace(Granted { token: Some(old.clone()), failure: Some("down".into()) });
        let (text, expired) = plugin.current(none).expect("the rest of the installation can be restored");
        let expired = expired.expect("it has expired");
        assert!(text == old.text && expired.contains("expired at 1970-01-01T00:16:40Z: down"), "{expired}");
        sender.send_replace(Granted { token: Some(fresh.clone()), failure: None });
        assert_eq!(plugin.current(none), Ok((fresh.text, None)));
    }
}
